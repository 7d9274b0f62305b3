"""Shapes of well-known models, to plan a run before any weight is downloaded.

They are the fields of each model's published config.json that decide sizes and shapes. Nothing here
loads weights.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)
"""Name -> a Hugging Face configuration, as `models.from_config` reads it."""


def find(name: str) -> dict[str, Any] | None:
    """Return the shape of a well-known model, or None.

    `name` may be a hub id such as "meta-llama/Llama-3.1-8B-Instruct", in upper or lower case.
    """
    model = _short_name(name)
    return next((shape for known, shape in SHAPES.items() if known.lower() == model), None)


def nearest(name: str, count: int = 4) -> list[str]:
    """Return the well-known names most like `name`, best first; empty if none is like it."""
    by_lower = {known.lower(): known for known in SHAPES}
    close = difflib.get_close_matches(_short_name(name), by_lower, count, cutoff=0.7)
    return [by_lower[match] for match in close]


def _short_name(name: str) -> str:
    """Return the name of a model without owner, variant and date, in lower case."""
    model = name.rpartition("/")[2].lower().removeprefix("meta-")
    for suffix in ("-hf", "-chat", "-v0.1", "-0924", "-it", "-instruct", "-pt", "-base"):
        model = model.removesuffix(suffix)
    return model
