"""Find the files of a tokenizer and load them."""

from __future__ import annotations

import re
from pathlib import Path

from tpu_rl import untrusted_files
from tpu_rl.errors import InputError, missing_file, refused
from tpu_rl.tokenizers import hugging_face, sentencepiece
from tpu_rl.tokenizers.tokenizer import Tokenizer


def load(path: str | Path) -> Tokenizer:
    """Return a tokenizer.

    Args:
        path: a model directory, a sentencepiece `.model` file, or a hub id, which is looked up in
            the local cache first.

    Raises:
        InputError: if there is no tokenizer, or it has no end-of-sequence token.
    """
    location = _resolve(str(path))
    if location.is_file():
        return sentencepiece.load(location)
    untrusted_files.require_safe(location)
    model_file = location / "tokenizer.model"
    hugging_face_files = ("tokenizer.json", "tokenizer_config.json")
    if model_file.is_file() and not any((location / name).is_file() for name in hugging_face_files):
        return sentencepiece.load(model_file, _template(location / sentencepiece.TEMPLATE_FILE))
    return hugging_face.load(location)


def _template(file: Path) -> str | None:
    """Return the chat template in a file, None if there is no file. Raises InputError."""
    with refused(
        UnicodeDecodeError,
        "the chat template is not UTF-8",
        where=str(file),
        fix="download the file again",
    ):
        return file.read_text(encoding="utf-8") if file.is_file() else None


def _resolve(path: str) -> Path:
    """Return the local file or directory of a path or hub id."""
    location = Path(path).expanduser()
    if location.exists():
        return location
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path) and not location.parent.exists():
        return _hub_directory(path)
    raise missing_file("no such model directory or tokenizer file", location, where=path)


def _hub_directory(name: str) -> Path:
    """Return the directory of a model of the hub, downloaded if the local cache has none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns = [
        "tokenizer*",
        "*config.json",
        "special_tokens_map.json",
        "vocab*",
        "merges.txt",
        "*.jinja",
    ]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    with refused(
        (OSError, ValueError),
        f"{name} is neither a local directory nor in the local hub cache, "
        "and could not be downloaded",
        fix="check the name, or download the model and give its directory",
    ):
        return Path(snapshot_download(name, allow_patterns=patterns))


def has_same_tokens(tokenizer: Tokenizer, directory: Path) -> bool:
    """Return True if a directory has the token ids of a tokenizer, or none of its own."""
    files = ("tokenizer.json", "tokenizer.model")
    if not any((directory / file).exists() for file in files):
        return True
    other = load(directory)
    printable = "".join(map(chr, range(32, 127)))
    same_vocabulary = other.control == tokenizer.control
    same_vocabulary &= other.vocab_size == tokenizer.vocab_size
    return same_vocabulary and other.encode(printable) == tokenizer.encode(printable)


def require_same_tokens(tokenizer: Tokenizer, directory: Path, role: str) -> None:
    """Check that a model directory reads the same token ids as the run.

    Args:
        directory: a model directory. Without a tokenizer of its own it passes.
        role: the role of the model, for the message.

    Raises:
        InputError: if the directory has another tokenizer.
    """
    if not has_same_tokens(tokenizer, directory):
        raise InputError(
            f"the model of role {role!r} has another tokenizer than the run's",
            where=str(directory),
            why=f"{load(directory).vocab_size} tokens against {tokenizer.vocab_size}: "
            "all models of a run read the same token ids",
            fix="use a model of the same tokenizer",
        )
