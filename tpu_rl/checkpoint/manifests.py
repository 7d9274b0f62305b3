"""Manifests: the size and SHA-256 of every file in a folder, in one file beside them.

A step of a checkpoint is written once and never changed, so any later difference from its manifest
is damage. The digests of the arrays (see `manager`) tell whether restored values are right. The
manifest tells which file is at fault, without restoring anything and without an accelerator.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tpu_rl import run_files
from tpu_rl.errors import TpuRlError

MANIFEST = "manifest.json"
_UNFINISHED = "manifest.tmp"


class Differences(NamedTuple):
    """Names of files, relative to the folder, that differ from the manifest."""

    changed: list[str]
    missing: list[str]
    added: list[str]


def write(folder: Path) -> None:
    """Write the manifest of all files in a folder, atomically."""
    files = {name: _describe(path) for name, path in sorted(_files(folder))}
    unfinished = folder / _UNFINISHED
    unfinished.write_text(_serialize(files))
    unfinished.replace(folder / MANIFEST)


def compare(folder: Path) -> Differences | None:
    """Return the differences between a folder and its manifest, or None if it has no manifest.

    If the manifest itself is damaged, it is the only entry in `changed`: what it says about other
    files cannot be trusted.
    """
    path = folder / MANIFEST
    if not os.path.lexists(path):
        return None
    try:
        content = run_files.read_bytes(path)
        files = json.loads(content)["files"]
        is_intact = content == _serialize(files).encode()
    except (TpuRlError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_intact = False
    if not is_intact:
        return Differences([MANIFEST], [], [])
    present = dict(_files(folder))
    return Differences(
        changed=[
            name for name in files if name in present and _is_changed(present[name], files[name])
        ],
        missing=sorted(files.keys() - present.keys()),
        added=sorted(present.keys() - files.keys()),
    )


def describe_files(root: Path, folders: list[Path]) -> dict[str, dict[str, Any]]:
    """Return name relative to the root -> size and SHA-256 of every file in some folders."""
    return {
        str((folder / name).relative_to(root)): _describe(path)
        for folder in folders
        for name, path in sorted(_files(folder))
    }


def changed_files(root: Path, files: dict[str, dict[str, Any]]) -> list[str]:
    """Return the names of the files that are not as `describe_files` found them."""
    return [name for name, seen in files.items() if _is_changed(root / name, seen)]


def _is_changed(path: Path, expected: dict[str, Any]) -> bool:
    """Return True if a file is not as its manifest says. A broken link or a pipe is not."""
    if not path.is_file():
        return True
    if path.stat().st_size != expected["size"]:
        return True
    return _describe(path) != expected


def _serialize(files: dict[str, dict[str, Any]]) -> str:
    """Return the text of a manifest, which contains a hash of itself.

    The text is canonical: any other bytes are a change.
    """
    body = json.dumps(files, sort_keys=True)
    manifest = {"files": files, "sha256": hashlib.sha256(body.encode()).hexdigest()}
    return json.dumps(manifest, indent=1, sort_keys=True)


def _files(folder: Path, prefix: str = "") -> Iterator[tuple[str, Path]]:
    """Yield (name relative to the folder, path) of every file at any depth but the manifest."""
    for path in folder.iterdir():
        name = prefix + path.name
        if path.is_dir() and not path.is_symlink():
            yield from _files(path, f"{name}/")
        elif name not in (MANIFEST, _UNFINISHED):
            yield name, path


def _describe(path: Path) -> dict[str, Any]:
    """Return the size in bytes and the SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        size = file.tell()
    return {"sha256": digest.hexdigest(), "size": size}
