"""Where a model directory is, here or on the Hugging Face hub, and how one is written: wholly or not at all."""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tpu_rl.errors import InputError

_SMALL = ("*.json", "*.model", "*.txt", "*.jinja")


def find_directory(path: str | Path) -> Path:
    """The directory of a model: `path` itself, or that of a hub id, from the local cache first, then the network.

    Raises InputError where it is neither.
    """
    return _find(path, (*_SMALL, "*.safetensors"), "*.safetensors")


def find_configuration(path: str | Path) -> Path:
    """The same, of which only the configuration is read: of a hub id no weights are fetched for it."""
    return _find(path, _SMALL, "*config.json")


def _find(path: str | Path, files: tuple[str, ...], needed: str) -> Path:
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if directory.exists() or not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", str(path)):
        raise InputError("no such model directory", where=str(path), fix="give a directory or a hub id (owner/name)")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    download = functools.partial(snapshot_download, str(path), allow_patterns=list(files))
    try:
        cached = Path(download(local_files_only=True))
        if any(cached.glob(needed)):
            return cached
    except (OSError, HFValidationError):
        pass  # not in the cache: ask the hub
    try:
        return Path(download())
    except (OSError, HFValidationError) as error:
        raise InputError(
            f"{path} is neither a directory nor a model in the local cache, and the hub did not give it",
            why=str(error).splitlines()[0],
            fix="check the name, your network and (for gated models) your login; or give a directory",
        ) from error


def require_replaceable(path: str | Path, mark: str) -> None:
    """Raises InputError where `path` is there, and neither empty nor a directory with the file `mark`."""
    target = Path(path)
    if target.exists() and not (target / mark).exists() and (target.is_file() or any(target.iterdir())):
        raise InputError("will not overwrite what is not a model directory", where=str(path), fix="give a new path")


@contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """A directory to fill, which is renamed to `path` when all is written; what was there before is gone then."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        whole = Path(scratch) / "whole"
        whole.mkdir()
        yield whole
        if target.exists():
            target.rename(Path(scratch) / "old")
        whole.rename(target)
