"""Hugging Face model directories, to read and to write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpu_rl.errors import InputError
from tpu_rl.models import families
from tpu_rl.models.decoder import decoder
from tpu_rl.types import Model


def from_config(
    config: Mapping[str, Any] | str | Path, dtype: str = "float32", param_dtype: str | None = None
) -> Model:
    """The model that a Hugging Face configuration describes: a dict, or a directory with config.json. No weights.

    Raises InputError where the architecture is not supported or the directory has no readable config.json.
    """
    source = config if isinstance(config, Mapping) else _read_json(Path(config) / "config.json")
    valid = None if isinstance(config, Mapping) else _tokenizer_size(Path(config))
    return decoder(families.read_config(source, dtype, param_dtype or dtype, valid))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise InputError(f"no {path.name} in the model directory", where=str(path.parent)) from error
    except ValueError as error:
        raise InputError(f"{path.name} is not JSON", where=str(path), why=str(error)) from error


def _tokenizer_size(directory: Path) -> int | None:
    """How many ids tokenizer.json knows, added tokens included; None without that file."""
    path = directory / "tokenizer.json"
    if not path.exists():
        return None
    tokenizer = _read_json(path)
    vocab = tokenizer["model"]["vocab"]
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))  # unigram: a list of [text, score]
    return 1 + max([*ids, *(token["id"] for token in tokenizer.get("added_tokens", []))])
