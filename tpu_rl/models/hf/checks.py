"""Checks of the fields of a Hugging Face configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tpu_rl.errors import InputError


def require(
    name: str, value: Any, is_supported: bool, why: str, fix: str = "download config.json again"
) -> None:
    """Raise InputError unless the value of a field is supported."""
    require_together({name: value}, is_supported, why, fix)


def require_together(
    fields: Mapping[str, Any],
    are_supported: bool,
    why: str,
    fix: str = "download config.json again",
) -> None:
    """Raise InputError unless the values of fields, name -> value, are supported together."""
    if not are_supported:
        stated = ", ".join(
            f"{name} = {repr(fields[name])[: 200 // len(fields)]}" for name in fields
        )
        verb = "is" if len(fields) == 1 else "are"
        raise InputError(f"{stated} {verb} not supported", why=why, fix=fix)


def require_size(field: str, size: Any, largest: int) -> None:
    """Raise InputError unless a field of a configuration is a whole number from 1 to `largest`."""
    if type(size) is not int or not 1 <= size <= largest:
        raise InputError(
            f"{field} = {str(size)[:40]} is out of range",
            why=f"it must be a whole number from 1 to {largest:,}",
            fix="correct the file, or download it again",
        )


def require_supported(
    fields: Mapping[str, tuple[Any, bool]], *, why: str, fix: str, subject: str = ""
) -> None:
    """Raise InputError for the first field whose value is not supported.

    Args:
        fields: name -> (value, True if it is supported).
        why: what would be wrong.
        fix: a remedy.
        subject: what has the field, before its name in the error.
    """
    for name, (value, is_supported) in fields.items():
        require(f"{subject}{name}", value, is_supported, why, fix)


def require_values(
    hf: Mapping[str, Any], supported: Mapping[str, Any], *, why: str, subject: str = ""
) -> None:
    """Raise InputError for the first field that has another value than the one supported."""
    for name, value in supported.items():
        fix = f"use a model with {name} = {json.dumps(value)}"
        require(f"{subject}{name}", hf[name], hf[name] == value, why, fix)


def require_heads(num_heads: int, head_dim: int, num_kv_heads: int, kind: str = "") -> None:
    """Raise InputError unless heads have pairs of dimensions, and key-value heads divide them.

    `kind` stands before the names of the fields that only some layers have.
    """
    require_together(
        {
            "num_attention_heads": num_heads,
            f"{kind}head_dim": head_dim,
            f"num_{kind}key_value_heads": num_kv_heads,
        },
        head_dim % 2 == 0 and num_heads % num_kv_heads == 0,
        why="the dimension must be even, for rotary pairs, and key-value heads must divide the "
        "heads",
        fix="correct one of them",
    )
