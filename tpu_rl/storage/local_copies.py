"""Local copies of objects in a bucket, for code that reads files: models and data.

A copy lies in `gcs/BUCKET/NAME` of the user's cache folder. It is compared with the bucket once per
process: an object is read again if its generation has changed, and a file without an object is
deleted. So a run that begins later sees what the bucket has then, and reads nothing twice.
"""

from __future__ import annotations

import fnmatch
import functools
import glob
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from filelock import FileLock

from tpu_rl.errors import InputError, MachineError, refused
from tpu_rl.storage import gcs, user_cache

GENERATIONS = ".generations.json"
"""File of a copy: name -> generation of the object that its file has."""
CONCURRENT_READS = 2
"""Objects are read whole, and shards of models have gigabytes."""


@functools.cache
def folder(address: str, patterns: tuple[str, ...], required: str) -> Path:
    """Return a local copy of the objects directly below an address.

    Args:
        address: the gs:// address of a model directory, say.
        patterns: the objects to copy, by their names behind the address. Others are left alone.
        required: a pattern that at least one object must match.

    Raises:
        InputError: no object matches `required`, or the address is not well-formed.
        MachineError: the store refuses or does not answer, or the disk has no room.
    """
    store = gcs.Store(address, gcs.SHORT_RETRIES)
    names = [name for name in store.names_of_any_folder() if "/" not in name]
    if not fnmatch.filter(names, required):
        raise InputError(
            f"no object matches {required}",
            where=store.address,
            why="this machine may not list the bucket, or there is nothing"
            if not names
            else f"there is {', '.join(names[:5])}",
            fix="correct the address; this machine needs the role Storage Object Viewer "
            "(roles/storage.objectViewer) of the bucket",
        )
    wanted = [name for name in names if any(fnmatch.fnmatch(name, one) for one in patterns)]
    return _update(store, wanted, patterns)


@functools.cache
def files(address: str) -> tuple[Path, ...]:
    """Return local copies of the objects at an address, sorted by name.

    Args:
        address: the gs:// address of one object, or a pattern whose last part has *, ? or [].

    Raises:
        InputError: there is no such object, or the address is not well-formed.
        MachineError: the store refuses or does not answer, or the disk has no room.
    """
    parent, _, last = address.rpartition("/")
    if glob.has_magic(parent) or parent.count("/") < 3:
        raise InputError(
            "the address names no object in a folder of a bucket",
            where=address,
            why="only its last part may have *, ? or []",
            fix="as in gs://bucket/folder/rows.jsonl, or several of them, separated by commas",
        )
    store = gcs.Store(parent, gcs.SHORT_RETRIES)
    if not glob.has_magic(last):
        gcs.split(address)
        return (_update(store, [last], (glob.escape(last),)) / last,)
    names = fnmatch.filter(store.names_of_any_folder(), last)
    names = [name for name in names if "/" not in name]
    if not names:
        raise InputError(
            "no object matches the pattern",
            where=address,
            fix="correct the address; this machine must be allowed to list the bucket",
        )
    copy = _update(store, names, (last,))
    return tuple(copy / name for name in names)


def _update(store: gcs.Store, names: Sequence[str], patterns: Sequence[str]) -> Path:
    """Make the files that match `patterns` those of the named objects, and return their folder."""
    copy = user_cache.folder().joinpath("gcs", *PurePosixPath(store.address[len("gs://") :]).parts)
    with refused(
        OSError,
        f"cannot copy objects of {store.address} to this machine",
        where=str(copy),
        fix="make room there, or let XDG_CACHE_HOME name a folder on a larger disk",
        kind=MachineError,
    ):
        copy.mkdir(parents=True, exist_ok=True)
        # Several processes of this machine may begin at the same time.
        with FileLock(copy / ".lock"):
            _copy_changed(store, names, copy)
            for file in copy.iterdir():
                is_known = any(fnmatch.fnmatch(file.name, pattern) for pattern in patterns)
                if is_known and file.name not in names and not file.name.startswith("."):
                    file.unlink()
    return copy


def _copy_changed(store: gcs.Store, names: Sequence[str], copy: Path) -> None:
    """Read the objects that differ from their files, a few at a time."""
    record = copy / GENERATIONS
    generations = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    for start in range(0, len(names), CONCURRENT_READS):
        batch = names[start : start + CONCURRENT_READS]
        copied = {
            name: bytes.fromhex(generations[name])
            for name in batch
            if name in generations and (copy / name).is_file()
        }
        for name, version in store.read_changed(batch, copied).items():
            if version.content is None:
                raise InputError(
                    "no such object", where=f"{store.address}/{name}", fix="correct the address"
                )
            generations.pop(name, None)
            _write(record, json.dumps(generations).encode())
            _write(copy / name, version.content)
            generations[name] = version.generation.hex()
            _write(record, json.dumps(generations).encode())


def _write(file: Path, content: bytes) -> None:
    """Write a file in one step."""
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".new-") as scratch:
        new = Path(scratch) / "new"
        new.write_bytes(content)
        os.replace(new, file)
