"""The published rows and small files of a run in a bucket (gs://), and local copies of them.

Rows come in parts, one for each checkpoint: metrics-STEP.jsonl and samples-STEP.jsonl hold the rows
since the part before, and rows-STEP.json holds their sizes and hashes. Joined in the order of their
names, they are metrics.jsonl and samples.jsonl. This module imports neither JAX nor anything else
that takes time.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from tpu_rl import run_files
from tpu_rl.checkpoint import gcs_lock
from tpu_rl.errors import DamagedDataError, InputError, TpuRlError
from tpu_rl.storage import gcs
from tpu_rl.storage.gcs import Store

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
ROW_FILES = ("metrics.jsonl", "samples.jsonl")
STATE_FOLDERS = ("data", "examples")
"""The folders of a run folder that a resumed run reads; the others hold products."""


def fetch(address: str) -> Path:
    """Return a folder to read a run from.

    That is the run folder itself, or a temporary copy of its rows and small files.

    Raises:
      InputError: there is no run.
      DamagedDataError: the rows in the bucket are not as they were published.
    """
    if not is_run(address):
        raise InputError(
            "not a run folder", where=address, why=f"it has no {CONFIG}", fix="give a --run-dir"
        )
    if not gcs.is_address(address):
        return Path(address)
    path, _ = copy_to_spool(Store(address, gcs.SHORT_RETRIES))
    atexit.register(shutil.rmtree, path.parent, ignore_errors=True)
    return path


def is_run(address: str) -> bool:
    """Return True if an address is the folder of a run that has started.

    Raises DamagedDataError if it has checkpoints and no configuration.
    """
    if gcs.is_address(address):
        return Store(address, gcs.SHORT_RETRIES).read(CONFIG) is not None
    config = Path(address) / CONFIG
    if config.is_file():
        return True
    is_model = (Path(address) / "config.json").exists()
    if not is_model and run_files.has_checkpoints(Path(address)):
        raise run_files.damage(config, "it is missing beside checkpoints")
    return False


def checkpoints_of(address: str) -> str:
    """Return the address of a run's checkpoints."""
    if gcs.is_address(address):
        return f"{address.rstrip('/')}/{CHECKPOINTS}"
    return str(Path(address) / CHECKPOINTS)


def best_of(checkpoints: str) -> str:
    """Return where the checkpoint of the best evaluation is, beside a run's checkpoints."""
    return f"{checkpoints}_best"


def write_back(address: str, path: Path, names: tuple[str, ...]) -> None:
    """Copy files of a folder that `fetch` returned to the run folder itself."""
    if gcs.is_address(address):
        for name in names:
            Store(address).write(name, (path / name).read_bytes())


# --- parts of rows ---


class RowPart(NamedTuple):
    """The published rows of some consecutive steps."""

    after: int
    """The last step of the part before; -1 for the first part."""
    last: int
    files: dict[str, Any]
    """Name of the object -> size and SHA-256."""

    def serialize(self) -> bytes:
        """Return the content of rows-STEP.json, which contains a hash of itself."""
        body = self._asdict()
        checksum = describe(json.dumps(body).encode())
        return (json.dumps(body | checksum, indent=1) + "\n").encode()

    def object_names(self) -> list[str]:
        """Return the names of the part's objects, rows-STEP.json first."""
        return [part_name("rows", self.last), *self.files]

    @staticmethod
    def parse(content: bytes) -> RowPart | None:
        """Return the part that rows-STEP.json describes, or None if the content is damaged."""
        try:
            body = json.loads(content)
            part = RowPart(body["after"], body["last"], body["files"])
            return part if part.serialize() == content else None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None


def part_name(stem: str, step: int) -> str:
    """Return the name of a part's object; `stem` is rows, metrics or samples."""
    return f"{stem}-{step:09}.{'json' if stem == 'rows' else 'jsonl'}"


def describe(content: bytes) -> dict[str, Any]:
    """Return the size and SHA-256 of an object."""
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def part_names(store: Store) -> set[str]:
    """Return the names of all objects of all parts."""
    stems = ("rows", *(name.removesuffix(".jsonl") for name in ROW_FILES))
    return {name for stem in stems for name in store.numbered(f"{stem}-")}


def newest_first(name: str) -> tuple[int, bool]:
    """Return a sort key: the newest part first, and of each part rows-STEP.json first."""
    stem, _, rest = name.partition("-")
    return -int(rest.partition(".")[0]), stem != "rows"


def _read_parts(store: Store) -> list[RowPart]:
    """Return the parts in order.

    Raises DamagedDataError if one before the last is missing, or one is not as it was written.
    """
    parts: list[RowPart] = []
    last = -1
    for name, content in sorted(store.read_all(store.numbered("rows-")).items()):
        part = RowPart.parse(content)
        if part is None:
            raise damage_error(store, name, "it is not as it was written")
        if part.after != last:
            why = f"the part with the rows after step {last} is missing"
            raise damage_error(store, name, why)
        parts.append(part)
        last = part.last
    return parts


def damage_error(store: Store, name: str, why: str) -> DamagedDataError:
    """Return the error for a published object that is missing or has changed."""
    return DamagedDataError(
        "rows that were published are damaged",
        where=f"{store.address}/{name}",
        why=why,
        fix="put it back as it was (an older version, if the bucket keeps them), or start again "
        "in another --run-dir",
    )


# --- the local copy ---


def copy_to_spool(store: Store) -> tuple[Path, list[RowPart]]:
    """Copy the rows, the small files and the records of the checkpoints to a new local folder.

    The folder has the run's name, which reports show, and is alone in a temporary folder.

    Returns:
      (the folder, the parts of the rows).
    """
    path = Path(tempfile.mkdtemp(prefix="tpu_rl_spool_")) / store.address.rpartition("/")[2]
    path.mkdir()
    try:
        return path, _copy(store, path)
    except TpuRlError:
        shutil.rmtree(path.parent)
        raise


def _copy(store: Store, path: Path) -> list[RowPart]:
    parts = _read_parts(store)
    if parts:
        for row_file in ROW_FILES:
            _copy_rows(store, path / row_file, parts)
    small_files = [
        name
        for name in store.names_outside(CHECKPOINTS)
        if "/" not in name or name.partition("/")[0] in STATE_FOLDERS
    ]
    records = store.numbered(f"{CHECKPOINTS}/")
    skipped = part_names(store) | {gcs_lock.LOCK, gcs.MARK}
    names = [name for name in small_files + records if name not in skipped]
    for name, content in store.read_all(names).items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return parts


def _copy_rows(store: Store, target: Path, parts: list[RowPart]) -> None:
    """Join the parts of one file of rows, after checking each."""
    names = [part_name(target.stem, part.last) for part in parts]
    contents = store.read_all(names)
    for name, part in zip(names, parts, strict=True):
        if name not in contents:
            raise damage_error(store, name, "it is missing")
        if describe(contents[name]) != part.files[name]:
            raise damage_error(store, name, "its content is not what was written")
    target.write_bytes(b"".join(contents[name] for name in names))
