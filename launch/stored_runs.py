"""What a run in a store (gs://) has published, and copies of it to read or to go on from.

Rows come in parts, one for each checkpoint: metrics-STEP.jsonl and samples-STEP.jsonl with the rows since the part
before, and rows-STEP.json, which says so, with their sizes and hashes. In the order of their names they are
metrics.jsonl and samples.jsonl. This module imports neither jax nor anything else that takes time.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from tpu_rl import store_lock, stores
from tpu_rl.errors import DamagedDataError, InputError, TpuRlError
from tpu_rl.stores import Store

CONFIG, CHECKPOINTS = "config.yaml", "checkpoints"
ROWS = ("metrics.jsonl", "samples.jsonl")
STATE = ("data", "examples")
"""The folders of a run folder that a resumed run reads; the others hold products."""


def fetched(address: str) -> Path:
    """The folder of a run to read from: itself, or a copy of its rows and small files, until the process ends.

    Raises InputError where there is none, DamagedDataError where its rows in a store are not as they were published.
    """
    if not is_run(address):
        raise InputError("not a run folder", where=address, why=f"it has no {CONFIG}", fix="give a --run-dir")
    if not stores.is_address(address):
        return Path(address)
    path, _ = copied(Store(address, stores.BRIEF))
    atexit.register(shutil.rmtree, path.parent, ignore_errors=True)
    return path


def is_run(address: str) -> bool:
    """Whether it is a run folder, of a run that has begun."""
    if stores.is_address(address):
        return Store(address, stores.BRIEF).read(CONFIG) is not None
    return (Path(address) / CONFIG).is_file()


def checkpoints_of(address: str) -> str:
    """Where a run's checkpoints are."""
    return f"{address.rstrip('/')}/{CHECKPOINTS}" if stores.is_address(address) else str(Path(address) / CHECKPOINTS)


def write_back(address: str, path: Path, names: tuple[str, ...]) -> None:
    """Files that were written into a `fetched` run folder are written into the run folder itself."""
    if stores.is_address(address):
        for name in names:
            Store(address).write(name, (path / name).read_bytes())


# --- parts of rows -----------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """The rows of some steps, as they were published."""

    after: int
    """The last step of the part before; -1 for the first."""
    last: int
    files: dict[str, Any]
    """Name of the object -> size and SHA-256."""

    def text(self) -> bytes:
        body = self._asdict()
        return (json.dumps(body | described(json.dumps(body).encode()), indent=1) + "\n").encode()

    def objects(self) -> list[str]:
        return [name_of("rows", self.last), *self.files]

    @staticmethod
    def of(content: bytes) -> Part | None:
        """None where it is not what was written."""
        try:
            body = json.loads(content)
            part = Part(body["after"], body["last"], body["files"])
            return part if part.text() == content else None
        except (ValueError, KeyError, TypeError):
            return None


def name_of(stem: str, step: int) -> str:
    return f"{stem}-{step:09}.{'json' if stem == 'rows' else 'jsonl'}"


def described(content: bytes) -> dict[str, Any]:
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def part_names(store: Store) -> set[str]:
    stems = ("rows", *(name.removesuffix(".jsonl") for name in ROWS))
    return {name for stem in stems for name in store.numbered(f"{stem}-")}


def newest_first(name: str) -> tuple[int, bool]:
    stem, _, rest = name.partition("-")
    return -int(rest.partition(".")[0]), stem != "rows"


def _read_parts(store: Store) -> list[Part]:
    """In order. Raises DamagedDataError where one is missing before another, or is not as it was written."""
    parts, last = [], -1
    for name, content in sorted(store.read_all(store.numbered("rows-")).items()):
        part = Part.of(content)
        if part is None or part.after != last:
            before = f"the part with the rows after step {last} is missing" if part else "it is not as it was written"
            raise damaged(store, name, before)
        parts.append(part)
        last = part.last
    return parts


def damaged(store: Store, name: str, why: str) -> DamagedDataError:
    fix = "put it back as it was (an older version, if the bucket keeps them), or start again in another --run-dir"
    return DamagedDataError("rows that were published are damaged", where=f"{store.address}/{name}", why=why, fix=fix)


# --- the copy ----------------------------------------------------------------------------------------------------


def copied(store: Store) -> tuple[Path, list[Part]]:
    """(a new folder with the rows, the small files and the records of the checkpoints; the parts of the rows).

    It has the run's name, which reports show, and is the only thing in a temporary folder.
    """
    path = Path(tempfile.mkdtemp(prefix="tpu_rl_spool_")) / store.address.rpartition("/")[2]
    path.mkdir()
    try:
        return path, _fetch(store, path)
    except TpuRlError:
        shutil.rmtree(path.parent)
        raise


def _fetch(store: Store, path: Path) -> list[Part]:
    parts = _read_parts(store)
    for row_file in ROWS if parts else ():
        stem = row_file.removesuffix(".jsonl")
        names = [name_of(stem, part.last) for part in parts]
        contents = store.read_all(names)
        for name, part in zip(names, parts, strict=True):
            if name not in contents:
                raise damaged(store, name, "it is missing")
            if described(contents[name]) != part.files[name]:
                raise damaged(store, name, "its content is not what was written")
        (path / row_file).write_bytes(b"".join(contents[name] for name in names))
    skipped = part_names(store) | {store_lock.LOCK, stores.MARK}
    small = [name for name in store.names_outside(CHECKPOINTS) if "/" not in name or name.partition("/")[0] in STATE]
    records = store.numbered(f"{CHECKPOINTS}/")
    for name, content in store.read_all(name for name in small + records if name not in skipped).items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return parts
