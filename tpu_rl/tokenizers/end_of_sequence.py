"""Which ids end a completion."""

from __future__ import annotations

import json
from pathlib import Path

from tpu_rl.errors import InputError


def listed(directory: Path, vocab_size: int) -> tuple[int, ...]:
    """End-of-sequence ids that generation_config.json lists; chat models end a turn with more than one."""
    file = directory / "generation_config.json"
    if not file.is_file():
        return ()
    try:
        listed = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise InputError("not a JSON object", where=str(file), why=str(error), fix="download it again") from error
    listed = listed if isinstance(listed, list) else [listed]
    ids = tuple(i for i in listed if isinstance(i, int))
    if any(not 0 <= i < vocab_size for i in ids):
        what = f"eos_token_id {listed} is not among the tokenizer's {vocab_size} ids"
        raise InputError(what, where=str(file), fix="take tokenizer and generation_config.json of the same model")
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
