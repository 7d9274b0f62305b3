"""Which ids end a completion."""

from __future__ import annotations

from pathlib import Path

from tpu_rl import model_files
from tpu_rl.errors import InputError

FILE = "generation_config.json"


def listed(directory: Path, vocab_size: int) -> tuple[int, ...]:
    """End-of-sequence ids that generation_config.json lists; chat models end a turn with more than one.

    Without that file, as in transformers, those of config.json, or of the language model in it.
    Raises InputError where the file is no JSON object, or an id not one of the tokenizer's.
    """
    files = [directory / name for name in (FILE, "config.json") if (directory / name).is_file()]
    if not files:
        return ()
    file = files[0]
    source = model_files.read_json(file)
    listed = source.get("eos_token_id")
    if listed is None and isinstance(source.get("text_config"), dict):
        listed = source["text_config"].get("eos_token_id")
    listed = listed if isinstance(listed, list) else [listed]
    ids = tuple(i for i in listed if isinstance(i, int))
    if any(not 0 <= i < vocab_size for i in ids):
        what = f"eos_token_id {listed} is not among the tokenizer's {vocab_size} ids"
        raise InputError(what, where=str(file), fix=f"take tokenizer and {file.name} of the same model")
    return ids


def require(candidates: tuple[int | None, ...], where: str) -> tuple[int, ...]:
    eos_ids = tuple(dict.fromkeys(i for i in candidates if i is not None))
    if not eos_ids:
        raise InputError(
            "the tokenizer has no end-of-sequence token: a model cannot stop",
            where=where,
            fix="set eos_token in tokenizer_config.json, or eos_token_id in generation_config.json",
        )
    return eos_ids
