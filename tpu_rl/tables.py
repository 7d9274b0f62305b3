"""Tables of YAML files, of which one stands on another: it says only what it changes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml


def read(files: Iterable[Path], base: str) -> dict[str, dict[str, Any]]:
    """Read name -> table of files whose tables name, under the key `base`, what they stand on."""
    tables: dict[str, dict[str, Any]] = {}
    for file in files:
        tables |= yaml.safe_load(file.read_text(encoding="utf-8"))

    def whole(name: str) -> dict[str, Any]:
        table = dict(tables[name])
        below = table.pop(base, None)
        return table if below is None else merged(whole(below), table)

    return {name: whole(name) for name in tables}


def merged(old: Any, new: Any) -> Any:
    """Return `old` with the changes that `new` makes: of a mapping, those of its values.

    A mapping with another `kind`, as those of config.yaml have it, replaces the old one.
    """
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    if new.get("kind", old.get("kind")) != old.get("kind"):
        return new
    return old | {name: merged(old.get(name), value) for name, value in new.items()}
