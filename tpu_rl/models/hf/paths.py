"""Model directories: find one, locally or on the Hugging Face hub, and write one atomically."""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tpu_rl.errors import InputError, refused
from tpu_rl.storage import gcs, local_copies

_CONFIGURATION_FILES = ("*.json", "*.model", "*.txt", "*.jinja")


def find_directory(path: str | Path) -> Path:
    """Return the directory of a model: `path` itself, the snapshot of a hub id, or a copy.

    Hub ids are looked up in the local cache first, and then downloaded. Of a gs:// address, what
    has changed is copied to the user's cache folder.

    Raises:
        InputError: `path` is neither a directory nor a hub id or address that can be found.
        MachineError: the store of an address refuses or does not answer.
    """
    return _find(path, (*_CONFIGURATION_FILES, "*.safetensors"), "*.safetensors")


def find_configuration(path: str | Path) -> Path:
    """Return the directory of a model's configuration and tokenizer.

    It is `find_directory`, except that no weights of a hub id are downloaded.
    """
    return _find(path, _CONFIGURATION_FILES, "*config.json")


def _find(path: str | Path, patterns: tuple[str, ...], required: str) -> Path:
    """Return the directory at `path`, or the snapshot of a hub id with the files of `patterns`.

    A snapshot in the local cache counts only if it has a file that matches `required`.
    """
    if gcs.is_address(str(path)):
        return local_copies.folder(str(path), patterns, required)
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if directory.exists() or not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", str(path)):
        raise InputError(
            "no such model directory",
            where=str(path),
            fix="give a directory, a hub id (owner/name) or a gs:// address",
        )
    parent = directory.parent
    runs = [file.parent.name for file in parent.glob("*/config.yaml")] if "/" in str(path) else []
    if runs:
        raise InputError(
            f"the folder {parent} of runs holds no {directory.name}",
            where=str(path),
            fix=f"give one of {', '.join(sorted(runs)[:8])}, or ask for a model of the hub in "
            "another working directory",
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    download = functools.partial(snapshot_download, str(path), allow_patterns=list(patterns))
    try:
        snapshot = Path(download(local_files_only=True))
        if any(snapshot.glob(required)):
            return snapshot
    except (OSError, HFValidationError):
        pass  # It is not in the cache.
    with refused(
        (OSError, HFValidationError),
        f"{path} is neither a directory nor a model in the local cache, and downloading it "
        "from the hub failed",
        fix="check the name, your network and (for gated models) your login; or give a directory",
    ):
        return Path(download())


def require_replaceable(path: str | Path, marker: str) -> None:
    """Check that `path` may be replaced: it does not exist, is empty, or has the file `marker`.

    Raises:
        InputError: `path` is anything else.
    """
    target = Path(path)
    if not target.exists() or (target / marker).exists():
        return
    if target.is_file() or any(target.iterdir()):
        raise InputError(
            "will not overwrite what is not a model directory",
            where=str(path),
            why=f"it has no {marker}",
            fix="give a new path",
        )


@contextmanager
def atomic_directory(path: str | Path) -> Iterator[Path]:
    """Yield a new directory to write to, which becomes `path` on success.

    It is renamed at the end, so `path` is never incomplete. A directory that was at `path` before
    is deleted.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        yield new
        if target.exists():
            target.rename(Path(scratch) / "old")
        new.rename(target)
