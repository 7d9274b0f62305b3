"""Which files a tokenizer is, and whose."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from tpu_rl import model_files
from tpu_rl.errors import InputError
from tpu_rl.tokenizers import hugging_face, sentence_piece
from tpu_rl.tokenizers.tokenizer import Tokenizer


def load(path: str | Path) -> Tokenizer:
    """The tokenizer of a model directory, of a sentencepiece `.model` file, or of a hub id (local cache first).

    Raises InputError where there is none, or where it has no end-of-sequence token.
    """
    where = _resolve(str(path))
    if where.is_dir():
        model_files.require_safe(where)
    model_file = where / "tokenizer.model" if where.is_dir() else where
    names = {"tokenizer.json", "tokenizer_config.json"}
    if where.is_file() or (model_file.is_file() and not any((where / name).is_file() for name in names)):
        return sentence_piece.load(model_file)
    return hugging_face.load(where)


def _resolve(path: str) -> Path:
    """The local file or directory that `path` means; hub ids are looked up in the local cache, then downloaded."""
    where = Path(path).expanduser()
    if where.exists():
        return where
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path) and not where.parent.exists():
        return _hub_directory(path)
    names = [entry.name for entry in where.parent.iterdir()] if where.parent.is_dir() else []
    nearest = difflib.get_close_matches(where.name, names, n=1)
    raise InputError(
        "no such model directory or tokenizer file",
        where=path,
        fix=f"did you mean {where.parent / nearest[0]}?" if nearest else "",
    )


def _hub_directory(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns = ["tokenizer*", "*config.json", "special_tokens_map.json", "vocab*", "merges.txt", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{name} is neither a local directory nor in the local hub cache, and could not be downloaded",
            why=str(error).splitlines()[0],
            fix="check the name, or download the model and give its directory",
        ) from error
