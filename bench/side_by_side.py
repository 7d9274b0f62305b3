"""The arithmetic of bench/peers.py: orders, medians, ratios, and when a ratio is refused."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

OURS = "ours"
Item = TypeVar("Item")


def rotated(items: Sequence[Item], by: int) -> list[Item]:
    """Return the items rotated by so many places.

    Over as many rounds as there are items, each item is in each place once.
    """
    start = by % len(items) if items else 0
    return [*items[start:], *items[:start]]


@dataclass(frozen=True)
class Sample:
    """The result of one arm in one round."""

    values: tuple[float, ...]
    """One per counted step, or a single one per process, such as a peak."""
    tokens: tuple[int, ...]
    """Sampled tokens of each of these steps."""


Rounds = Sequence[Sample | None]
"""The samples of an arm, round by round; None where it failed."""


@dataclass(frozen=True)
class Spread:
    """A median with the smallest and the largest value."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{readable(self.median)} ({readable(self.least)} to {readable(self.most)})"


def readable(value: float) -> str:
    """Format a positive number with at least three digits."""
    if value < 0.995:
        return f"{value:.3f}"
    if value < 9.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def spread(values: Sequence[float]) -> Spread:
    """Return the median of values with the smallest and the largest."""
    return Spread(statistics.median(values), min(values), max(values))


def summary(rounds: Rounds) -> Spread | None:
    """Return the spread over the steps of all rounds; None if every round failed."""
    values = [value for sample in rounds if sample for value in sample.values]
    return spread(values) if values else None


@dataclass(frozen=True)
class Refused:
    """The reason why there is no ratio."""

    reason: str

    def __str__(self) -> str:
        return f"refused: {self.reason}"


def ratio(upper: Rounds, lower: Rounds) -> Spread | Refused:
    """Return the spread, over rounds, of one arm's median over another's.

    It is refused if the arms did not sample the same number of tokens in every step, or have no
    round in common.
    """
    ratios = []
    for above, below in zip(upper, lower, strict=True):
        if above is None or below is None:
            continue
        if above.tokens != below.tokens:
            return Refused(f"different tokens, {list(above.tokens)} and {list(below.tokens)}")
        ratios.append(statistics.median(above.values) / statistics.median(below.values))
    return spread(ratios) if ratios else Refused("no round in which both ran")


def rows(arms: Mapping[str, Rounds], ours_over_peer: bool = False) -> list[tuple[str, str, str]]:
    """Return (arm, spread, ratio to ours) for each arm.

    The ratio is the peer's over ours, as for times, or with `ours_over_peer` the inverse, as for
    memory.
    """
    lines = []
    for name, rounds in arms.items():
        total = summary(rounds)
        if name == OURS or OURS not in arms:
            compared = ""
        elif ours_over_peer:
            compared = str(ratio(arms[OURS], rounds))
        else:
            compared = str(ratio(rounds, arms[OURS]))
        lines.append((name, "failed" if total is None else str(total), compared))
    return lines


def markdown(heading: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    table = [heading, ["---"] * len(heading), *lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in table)
