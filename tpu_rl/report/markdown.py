"""Tables and numbers in Markdown, for reports that are read as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table. Bars and ends of lines in cells do not end a cell."""
    lines = [columns, ["---"] * len(columns), *rows]
    texts = ([str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in texts)


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
