"""What a folder's files were when they were written: size and SHA-256 of each, in one file beside them.

A step of a checkpoint is written once and never changed, so whatever differs from its manifest later is damage. The
arrays' digests (see `checkpoint`) say whether what is restored is right; the manifest says which file is at fault,
without restoring anything and without an accelerator.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

MANIFEST = "manifest.json"
_UNFINISHED = "manifest.tmp"


class Differences(NamedTuple):
    """Names of files, relative to the folder, that are not as the manifest has them."""

    changed: list[str]
    missing: list[str]
    added: list[str]


def write(folder: Path) -> None:
    """Write the manifest of all files that are in the folder now, wholly or not at all."""
    files = {name: _entry(path) for name, path in sorted(_files(folder))}
    unfinished = folder / _UNFINISHED
    unfinished.write_text(_text(files))
    unfinished.replace(folder / MANIFEST)


def compare(folder: Path) -> Differences | None:
    """How the folder differs from its manifest; None if it has no manifest.

    A manifest that is itself not as it was written is the one thing changed: what it says of others counts for nothing.
    """
    path = folder / MANIFEST
    if not path.exists():
        return None
    content = path.read_bytes()
    try:
        files = json.loads(content)["files"]
        is_whole = content == _text(files).encode()
    except (ValueError, KeyError, TypeError, RecursionError):
        is_whole = False
    if not is_whole:
        return Differences([MANIFEST], [], [])
    found = dict(_files(folder))
    changed = [name for name in files if name in found and _entry(found[name]) != files[name]]
    return Differences(changed, sorted(files.keys() - found.keys()), sorted(found.keys() - files.keys()))


def _text(files: dict[str, dict[str, Any]]) -> str:
    """The manifest, with a hash of itself, in the one way it is written: any other bytes are a change."""
    body = json.dumps(files, sort_keys=True)
    return json.dumps({"files": files, "sha256": hashlib.sha256(body.encode()).hexdigest()}, indent=1, sort_keys=True)


def _files(folder: Path, prefix: str = "") -> Iterator[tuple[str, Path]]:
    """(name relative to the folder, path) of every file in it but the manifest, at any depth."""
    for path in folder.iterdir():
        name = prefix + path.name
        if path.is_dir():
            yield from _files(path, f"{name}/")
        elif name not in (MANIFEST, _UNFINISHED):
            yield name, path


def _entry(path: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            size += len(chunk)
    return {"sha256": digest.hexdigest(), "size": size}
