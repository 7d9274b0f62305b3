"""Checks of model directories from untrusted sources, before anything is parsed.

Only regular files inside the directory, of sizes that models have, may be read. Neither this module
nor its callers run code of a model's author. Symbolic links may lead to the blobs of the hub's
cache, which lays out its snapshots that way, and nowhere else outside the directory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tpu_rl.errors import InputError, refused

READ_PATTERNS = (
    "*.json",
    "*.safetensors",
    "*.model",
    "*.txt",
    "*.jinja",
    "additional_chat_templates/*.jinja",
)
"""The files of a model directory that are read at all. Weights in other formats can run code when
they are read."""

MAX_BYTES = {
    "config.json": 2**20,
    "generation_config.json": 2**20,
    "tokenizer.json": 2**28,
    "tokenizer.model": 2**28,
}
"""The largest accepted sizes, far above those of real models: larger files are refused before they
are parsed."""
MAX_OTHER_BYTES = 2**26
"""The largest accepted size of any other file without weights."""

_OTHER_FORMATS = {
    b"version https://git-lfs": (
        "it is a Git LFS pointer, not the file itself",
        "run `git lfs pull` in the directory",
    ),
    b"PK\x03\x04": (
        "it is a zip archive, as PyTorch's pickles are",
        "use a checkpoint in safetensors",
    ),
    b"\x1f\x8b": ("it is compressed by gzip", "gunzip it"),
    b"\x80\x02": (
        "it is a pickle, which can run code when read",
        "use a checkpoint in safetensors",
    ),
    b"\x80\x04": (
        "it is a pickle, which can run code when read",
        "use a checkpoint in safetensors",
    ),
}
"""The first bytes of a file -> why it is refused, and how to fix it."""
_WEB_PAGES = (b"<!doctype html", b"<html", b"<?xml")


def files(directory: Path) -> list[Path]:
    """Return the files of a model directory that would be read."""
    return sorted({path for pattern in READ_PATTERNS for path in directory.glob(pattern)})


def require_safe(directory: Path) -> None:
    """Check the files of a model directory that would be read.

    Raises InputError if one leads out of the directory, is not a regular file, is too large, or has
    another format than its name says.
    """
    for path in files(directory):
        _require_inside(path, directory.resolve())
        if not path.is_file():
            raise InputError(
                f"{path.name} is not a regular file", where=str(directory), fix="remove it"
            )
        if path.suffix == ".safetensors":
            continue
        limit = MAX_BYTES.get(path.name, MAX_OTHER_BYTES)
        size = path.stat().st_size
        if size > limit:
            raise InputError(
                f"{path.name} has {size:,} bytes",
                where=str(directory),
                why=f"the most is {limit:,}: no model has one of that size",
                fix="download it again, or do not use this checkpoint",
            )
        with path.open("rb") as file:
            reason = wrong_format(file.read(512))
        if reason is not None:
            why, fix = reason
            raise InputError(
                f"{path.name} is not what its name says", where=str(path.parent), why=why, fix=fix
            )


def _require_inside(path: Path, directory: Path) -> None:
    """Raise InputError if a link leads out of the directory or the hub's cache."""
    allowed = [directory]
    if directory.parent.name == "snapshots":
        allowed.append(directory.parent.parent / "blobs")
    # RuntimeError: a loop, in Python before 3.13.
    with refused(
        (OSError, RuntimeError),
        f"{path.name} is a link that leads nowhere",
        where=str(path.parent),
        fix="download the model again",
    ):
        target = path.resolve(strict=True)
    if not any(target.is_relative_to(folder) for folder in allowed):
        raise InputError(
            f"{path.name} is a link that leads out of the model directory",
            where=str(path.parent),
            why=f"to {target}",
            fix="if that is what you want, put a copy of the file in its place",
        )


def wrong_format(start: bytes) -> tuple[str, str] | None:
    """Return (why, fix) for a file whose first bytes show a wrong format, else None."""
    for magic, reason in _OTHER_FORMATS.items():
        if start.startswith(magic):
            return reason
    if start[257:262] == b"ustar":
        return "it is a tar archive", "unpack it"
    if start.lstrip()[:15].lower().startswith(_WEB_PAGES):
        return "it is a web page, perhaps of a login or an error", "download the file itself"
    return None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises InputError if it is missing or something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(
            f"no {path.name} in the model directory",
            where=str(path.parent),
            fix="give the folder that holds it, or download the model whole",
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path.name} is not JSON", where=str(path), why=str(error), fix="download it again"
        ) from error
    if not isinstance(content, dict):
        raise InputError(
            f"{path.name} is not a JSON object", where=str(path), fix="download it again"
        )
    return content


def refuse_outside_files(content: dict[str, Any], path: Path) -> None:
    """Raise InputError if a tokenizer_config.json names an existing file outside its directory.

    Some versions of transformers open the files that it names. Names of files that exist only on
    the author's machine are harmless.
    """
    for key, value in content.items():
        if not isinstance(value, str) or not (key.endswith("_file") or key in ("vocab", "merges")):
            continue
        if len(value) >= 4096 or "\0" in value:  # No file can have such a name.
            continue
        named = (path.parent / value).resolve()
        if not named.is_relative_to(path.parent.resolve()) and named.exists():
            raise InputError(
                f"`{key}` names a file outside of the model directory",
                where=str(path),
                why=f"{value[:200]!r}",
                fix=f"remove `{key}`, or do not use this checkpoint",
            )
