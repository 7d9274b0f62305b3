"""The presets: named experiments, each a table of settings in a YAML file of this folder.

A file holds those of one task. Each preset has `about`, its description, whose first sentence is
what `tpu-rl presets` says of it; `preset`, the name of another one that it changes, if it does; and
its settings in the form of config.yaml. A part with another `kind` takes the place of what was
there, and of any other part only the settings that are named change.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import yaml


@functools.cache
def tables() -> dict[str, dict[str, Any]]:
    """Read preset -> its table from the files of this folder."""
    files = sorted(Path(__file__).parent.glob("*.yaml"))
    return {
        name: table
        for file in files
        for name, table in yaml.safe_load(file.read_text(encoding="utf-8")).items()
    }


def values_of(name: str, beginning: dict[str, Any]) -> dict[str, Any]:
    """Return the plain values of a preset's configuration.

    Args:
        name: a key of `tables`.
        beginning: those of the configuration that presets without `preset` change.
    """
    table = tables()[name]
    base = values_of(table["preset"], beginning) if "preset" in table else beginning
    changes = {key: value for key, value in table.items() if key not in ("about", "preset")}
    return changed(base, changes)


def changed(old: Any, new: Any) -> Any:
    """Return plain values with changes: of a part of the same kind, those of its settings."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    if new.get("kind", old["kind"]) != old["kind"]:
        return new
    return old | {name: changed(old.get(name), value) for name, value in new.items()}
