"""What may be read of a model directory that a stranger made: regular files inside it, of sizes that models have.

Nothing here or in its callers runs code of a model's author. Symbolic links may lead to the blobs of the hub's cache,
which is how it lays out its snapshots, and nowhere else out of the directory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tpu_rl.errors import InputError

READ = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "additional_chat_templates/*.jinja")
"""The files of a model directory that are read at all: weights in other formats can run code when read."""

LARGEST = {"config.json": 2**20, "generation_config.json": 2**20, "tokenizer.json": 2**28, "tokenizer.model": 2**28}
"""Bytes. A bomb is refused before it is parsed; real ones are far smaller."""
LARGEST_OTHER = 2**26
"""Bytes of any other file that is no weights."""

_IMPOSTORS = {
    b"version https://git-lfs": ("it is a Git LFS pointer, not the file itself", "run `git lfs pull` in the directory"),
    b"PK\x03\x04": ("it is a zip archive, as PyTorch's pickles are", "use a checkpoint in safetensors"),
    b"\x1f\x8b": ("it is compressed by gzip", "gunzip it"),
    b"\x80\x02": ("it is a pickle, which can run code when read", "use a checkpoint in safetensors"),
    b"\x80\x04": ("it is a pickle, which can run code when read", "use a checkpoint in safetensors"),
}
_PAGES = (b"<!doctype html", b"<html", b"<?xml")


def files(directory: Path) -> list[Path]:
    """Those that would be read."""
    return sorted({path for pattern in READ for path in directory.glob(pattern)})


def require_safe(directory: Path) -> None:
    """Raises InputError where one of the files that would be read leads elsewhere, is no file, or is a bomb."""
    for path in files(directory):
        _require_inside(path, directory.resolve())
        if not path.is_file():
            raise InputError(f"{path.name} is not a regular file", where=str(directory), fix="remove it")
        if path.suffix == ".safetensors":
            continue
        largest = LARGEST.get(path.name, LARGEST_OTHER)
        if path.stat().st_size > largest:
            raise InputError(
                f"{path.name} has {path.stat().st_size:,} bytes",
                where=str(directory),
                why=f"the most is {largest:,}: no model has one of that size",
                fix="download it again, or do not use this checkpoint",
            )
        _require_itself(path)


def _require_inside(path: Path, directory: Path) -> None:
    allowed = [directory]
    if directory.parent.name == "snapshots":
        allowed.append(directory.parent.parent / "blobs")
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop, for Python before 3.13
        what, fix = f"{path.name} is a link that leads nowhere", "download the model again"
        raise InputError(what, where=str(path.parent), why=str(error), fix=fix) from error
    if not any(target.is_relative_to(place) for place in allowed):
        raise InputError(
            f"{path.name} is a link that leads out of the model directory",
            where=str(path.parent),
            why=f"to {target}",
            fix="if that is what you want, put a copy of the file in its place",
        )


def _require_itself(path: Path) -> None:
    with path.open("rb") as file:
        why = impostor(file.read(512))
    if why:
        raise InputError(f"{path.name} is not what its name says", where=str(path.parent), **why)


def impostor(start: bytes) -> dict[str, str]:
    """Why and fix for a file that begins with `start` and is not what it should be; empty if it may be that."""
    for magic, (why, fix) in _IMPOSTORS.items():
        if start.startswith(magic):
            return {"why": why, "fix": fix}
    if start[257:262] == b"ustar":
        return {"why": "it is a tar archive", "fix": "unpack it"}
    if start.lstrip()[:15].lower().startswith(_PAGES):
        return {"why": "it is a web page, perhaps of a login or an error", "fix": "download the file itself"}
    return {}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises InputError where it is missing or something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        fix = "give the folder that holds it, or download the model whole"
        raise InputError(f"no {path.name} in the model directory", where=str(path.parent), fix=fix) from error
    except (ValueError, RecursionError) as error:
        fix = "download it again"
        raise InputError(f"{path.name} is not JSON", where=str(path), why=str(error), fix=fix) from error
    if not isinstance(content, dict):
        raise InputError(f"{path.name} is not a JSON object", where=str(path), fix="download it again")
    return content


def refuse_outside_files(content: dict[str, Any], where: Path) -> None:
    """Raises InputError where a tokenizer_config.json names a file outside of its directory that is really there.

    Some versions of transformers open what it names. Leftovers of the author's machine, not here, are harmless.
    """
    for key, value in content.items():
        if isinstance(value, str) and (key.endswith("_file") or key in ("vocab", "merges")):
            named = (where.parent / value).resolve() if len(value) < 4096 and "\0" not in value else where
            if not named.is_relative_to(where.parent.resolve()) and named.exists():
                raise InputError(
                    f"`{key}` names a file outside of the model directory",
                    where=str(where),
                    why=f"{value[:200]!r}",
                    fix=f"remove `{key}`, or do not use this checkpoint",
                )
