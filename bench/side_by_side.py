"""The arithmetic of bench/peers.py: orders, medians, ratios, and when a ratio is refused. Nothing is run here."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

OURS = "ours"
Item = TypeVar("Item")


def rotated(items: Sequence[Item], by: int) -> list[Item]:
    """The items from the one at `by` on, then those before it: over as many rounds each stands in each place once."""
    start = by % len(items) if items else 0
    return [*items[start:], *items[:start]]


@dataclass(frozen=True)
class Sample:
    """What one arm did in one round."""

    values: tuple[float, ...]
    """One for each step that counts; one alone where there is one a process, such as a peak."""
    tokens: tuple[int, ...]
    """Drawn, in each of those steps."""


Rounds = Sequence[Sample | None]
"""An arm's samples, round by round; None where it failed."""


@dataclass(frozen=True)
class Spread:
    """A median with the least and the most of what it is the median of."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{readable(self.median)} ({readable(self.least)} to {readable(self.most)})"


def readable(value: float) -> str:
    """Three digits or more of a positive number."""
    return f"{value:.{2 if value >= 0.995 else 3}f}" if value < 9.995 else f"{value:.{1 if value < 99.95 else 0}f}"


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def summary(rounds: Rounds) -> Spread | None:
    """Over the steps of all rounds; None where no round has any."""
    values = [value for sample in rounds if sample for value in sample.values]
    return spread(values) if values else None


@dataclass(frozen=True)
class Refused:
    """Why there is no ratio."""

    why: str

    def __str__(self) -> str:
        return f"refused: {self.why}"


def ratio(upper: Rounds, lower: Rounds) -> Spread | Refused:
    """One arm's median over another's, of each round; their median with the least and the most.

    Refused where the arms did not draw equally many tokens in every step, or have no round in common.
    """
    both = [(above, below) for above, below in zip(upper, lower, strict=True) if above and below]
    if not both:
        return Refused("no round in which both ran")
    for above, below in both:
        if above.tokens != below.tokens:
            return Refused(f"different tokens, {list(above.tokens)} and {list(below.tokens)}")
    return spread([statistics.median(above.values) / statistics.median(below.values) for above, below in both])


def rows(arms: Mapping[str, Rounds], ours_over_peer: bool = False) -> list[tuple[str, str, str]]:
    """(arm, its spread, its ratio to ours) of each arm. The ratio is the peer's over ours, as of times, where more is
    better for us; or ours over the peer's, as of memory, where less is."""
    found = []
    for name, rounds in arms.items():
        whole = summary(rounds)
        if name == OURS or OURS not in arms:
            compared = ""
        elif ours_over_peer:
            compared = str(ratio(arms[OURS], rounds))
        else:
            compared = str(ratio(rounds, arms[OURS]))
        found.append((name, "failed" if whole is None else str(whole), compared))
    return found


def markdown(heading: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    table = [heading, ["---"] * len(heading), *lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in table)
