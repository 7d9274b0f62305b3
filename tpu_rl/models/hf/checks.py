"""Checks of the fields of a Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpu_rl.errors import InputError


def require_size(field: str, size: Any, largest: int, where: str) -> None:
    """Raise InputError unless a field of a configuration is a whole number from 1 to `largest`."""
    if type(size) is not int or not 1 <= size <= largest:
        raise InputError(
            f"{field} = {str(size)[:40]} is out of range",
            where=where,
            why=f"it must be a whole number from 1 to {largest:,}",
            fix="correct config.json, or download it again",
        )


def require_supported(
    fields: Mapping[str, tuple[Any, bool]], where: str, *, why: str, fix: str, subject: str = ""
) -> None:
    """Raise InputError for the first field whose value is not supported.

    Args:
        fields: name -> (value, True if it is supported).
        where: the file.
        why: what would be wrong.
        fix: a remedy, in which {name} stands for the name of the field.
        subject: what has the field, before its name in the error.
    """
    for name, (value, is_supported) in fields.items():
        if not is_supported:
            shown = repr(value) if isinstance(value, str) else str(value)
            raise InputError(
                f"{subject}{name} = {shown[:80]} is not supported",
                where=where,
                why=why,
                fix=fix.format(name=name),
            )
