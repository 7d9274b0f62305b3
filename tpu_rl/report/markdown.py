"""Tables and numbers in Markdown, for reports that are read as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table. Bars in cells are escaped."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def of(estimate: Any, signed: bool = False) -> str:
    """Return "0.612 (0.568 to 0.654)" of an estimate with its interval, if it has one.

    Args:
        estimate: has `value`, `low` and `high`.
        signed: write the sign of positive numbers, too.
    """
    sign = "+" if signed else ""
    value, low, high = (
        f"{number:{sign}.3f}" for number in (estimate.value, estimate.low, estimate.high)
    )
    return f"{value} ({low} to {high})" if math.isfinite(estimate.low) else f"{value} (no interval)"
