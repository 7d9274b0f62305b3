"""Nested dataclasses as plain values, as config.yaml has them, and back; tables of such values."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tpu_rl.errors import InputError


def fields_of(config: Any) -> dict[str, Any]:
    """Return name -> value of the fields of a dataclass, as they are."""
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def to_dict(config: Any) -> Any:
    """Return nested dataclasses as dicts, lists and scalars.

    Each dict has the name of its class as `kind`, because a field may admit several classes.
    """
    if isinstance(config, tuple):
        return [to_dict(value) for value in config]
    if not dataclasses.is_dataclass(config):
        return config
    values = {name: to_dict(value) for name, value in fields_of(config).items()}
    return {"kind": type(config).__name__} | values


def from_dict(
    annotation: Any, values: Any, find_class: Callable[[str], type | None] = lambda kind: None
) -> Any:
    """Return the inverse of `to_dict`, for a field with this annotation.

    Args:
        find_class: returns the class of a kind that annotations do not name, or None.

    Raises:
        InputError: if the values describe none of the classes that the field admits.
    """
    kinds = typing.get_args(annotation) or (annotation,)
    classes = [kind for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind)]
    if isinstance(values, list):
        return tuple(from_dict(kinds[0], value, find_class) for value in values)
    if not isinstance(values, dict) or (not classes and "kind" not in values):
        return values
    kind_name = str(values.get("kind"))
    chosen = next((kind for kind in classes if kind.__name__ == kind_name), None)
    chosen = chosen or find_class(kind_name)
    hints = typing.get_type_hints(chosen) if chosen else {}
    unknown = sorted(set(values) - set(hints) - {"kind"})
    if chosen is None or unknown:
        names = " or ".join(kind.__name__ for kind in classes) or "a part of a run"
        raise InputError(
            f"config.yaml does not describe {names}",
            why=f"kind {kind_name!r}, unknown keys {unknown}",
        )
    fields = {name: value for name, value in values.items() if name != "kind"}
    arguments = {name: from_dict(hints[name], value, find_class) for name, value in fields.items()}
    return chosen(**arguments)


def flatten(value: Any, name: str = "") -> dict[str, Any]:
    """Return dotted name -> value of every leaf of nested dicts."""
    if not isinstance(value, dict):
        return {name: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= flatten(inner, f"{name}.{key}".strip("."))
    return flat


def merged(old: Any, new: Any) -> Any:
    """Return `old` with the changes that `new` makes: of a dict, those of its values.

    A dict of another `kind` replaces the old one.
    """
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    if new.get("kind", old.get("kind")) != old.get("kind"):
        return new
    return old | {name: merged(old.get(name), value) for name, value in new.items()}


def read_tables(files: Iterable[Path], base: str) -> dict[str, dict[str, Any]]:
    """Read name -> table from YAML files.

    A table whose key `base` names another one has what that one has, with its own changes.
    """
    tables: dict[str, dict[str, Any]] = {}
    for file in files:
        tables |= yaml.safe_load(file.read_text(encoding="utf-8"))

    def whole(name: str) -> dict[str, Any]:
        table = dict(tables[name])
        below = table.pop(base, None)
        return table if below is None else merged(whole(below), table)

    return {name: whole(name) for name in tables}


def replace_strings(value: Any, replacements: Mapping[str, str]) -> Any:
    """Return a configuration with strings replaced, at any depth."""
    if isinstance(value, tuple):
        return tuple(replace_strings(item, replacements) for item in value)
    if isinstance(value, str):
        return replacements.get(value, value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    old = fields_of(value)
    new = {name: replace_strings(item, replacements) for name, item in old.items()}
    return value if new == old else dataclasses.replace(value, **new)
