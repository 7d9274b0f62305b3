"""difflib's ratio of two texts. Only processes with a time limit load this file: the time may grow
with the third power of the length."""

import difflib
from collections.abc import Sequence

LONGEST = 4000
"""Characters; longer texts are compared by lines."""


def ratio(completions: Sequence[str], patch: Sequence[str]) -> list[float]:
    """Return 2 M / T of each pair of texts: M characters or lines that match, of T in both."""
    return [_ratio(a, b) for a, b in zip(completions, patch, strict=True)]


def _ratio(a: str, b: str) -> float:
    if max(len(a), len(b)) > LONGEST:
        return difflib.SequenceMatcher(None, a.split("\n"), b.split("\n"), False).ratio()
    return difflib.SequenceMatcher(None, a, b, False).ratio()
