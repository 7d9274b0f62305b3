"""The token ids that end a completion."""

from __future__ import annotations

from pathlib import Path

from tpu_rl import untrusted_files
from tpu_rl.errors import InputError

FILE = "generation_config.json"


def listed(directory: Path, vocab_size: int) -> tuple[int, ...]:
    """Return the end-of-sequence ids that generation_config.json lists.

    Chat models end a turn with more than one. Without that file they are those of config.json, or
    of the language model in it, as in transformers. Raises InputError if the file is not a JSON
    object, or an id is not one of the tokenizer's.
    """
    files = [directory / name for name in (FILE, "config.json") if (directory / name).is_file()]
    if not files:
        return ()
    file = files[0]
    source = untrusted_files.read_json(file)
    value = source.get("eos_token_id")
    if value is None and isinstance(source.get("text_config"), dict):
        value = source["text_config"].get("eos_token_id")
    values = value if isinstance(value, list) else [value]
    ids = tuple(i for i in values if isinstance(i, int))
    if any(not 0 <= i < vocab_size for i in ids):
        raise InputError(
            f"eos_token_id {values} is not among the tokenizer's {vocab_size} ids",
            where=str(file),
            why="the file seems to belong to another model",
            fix=f"use tokenizer and {file.name} of the same model",
        )
    return ids


def embedding_rows(directory: Path) -> int | None:
    """Return the rows of the model's embedding, as config.json says; None if it does not."""
    file = directory / "config.json"
    if not file.is_file():
        return None
    source = untrusted_files.read_json(file)
    inner = source.get("text_config")
    rows = source.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None)
    return rows if isinstance(rows, int) else None


def require(candidates: tuple[int | None, ...], where: str) -> tuple[int, ...]:
    """Return the different ids among the candidates, in their order.

    Raises InputError if there is none.
    """
    eos_ids = tuple(dict.fromkeys(i for i in candidates if i is not None))
    if not eos_ids:
        raise InputError(
            "the tokenizer has no end-of-sequence token",
            where=where,
            why="a model cannot stop without one",
            fix="set eos_token in tokenizer_config.json, or eos_token_id in generation_config.json",
        )
    return eos_ids
