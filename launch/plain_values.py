"""Configurations as plain values, as config.yaml has them, and back."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from tpu_rl.errors import InputError


def to_dict(config: Any) -> Any:
    """Nested dataclasses -> plain values; where a field admits several classes, `kind` says which it is."""
    if isinstance(config, tuple):
        return [to_dict(value) for value in config]
    if not dataclasses.is_dataclass(config):
        return config
    values = {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
    return {"kind": type(config).__name__} | values


def from_dict(kind: Any, values: Any) -> Any:
    """The inverse of `to_dict` for a field annotated `kind`."""
    kinds = typing.get_args(kind) or (kind,)
    classes = [k for k in kinds if isinstance(k, type) and dataclasses.is_dataclass(k)]
    if isinstance(values, list):
        return tuple(from_dict(kinds[0], value) for value in values)
    if not classes or not isinstance(values, dict):
        return values
    chosen = next((c for c in classes if c.__name__ == values.get("kind")), None)
    hints = typing.get_type_hints(chosen) if chosen else {}
    unknown = sorted(set(values) - set(hints) - {"kind"})
    if chosen is None or unknown:
        names = " or ".join(c.__name__ for c in classes)
        raise InputError(
            f"config.yaml does not describe {names}", why=f"kind {values.get('kind')!r}, unknown keys {unknown}"
        )
    return chosen(**{name: from_dict(hints[name], value) for name, value in values.items() if name != "kind"})
