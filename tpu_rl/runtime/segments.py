"""Rewards of parts of a completion: numbers that belong to ranges of its characters.

A reward function may return, in place of a completion's number, a list of segments
(start, end, value): the value belongs to the characters from start up to but without end, counted
in the text that the function was given. The completion's reward is the sum of the values. Each
value lands on the token that writes the last character of its segment (`rollout.scoring`), so that
methods with credit per token, per step or with a critic see where it was earned (fine-grained
RLHF, arXiv 2306.01693, section 3.1). Methods that compare whole completions see the sum.

This imports the standard library only, because reward workers do.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

from tpu_rl.runtime.worker_child import as_number, shorten

Segment = tuple[int, int, float]
"""(start, end, value): characters [start, end) of a completion, and their reward."""


def read(value: Any, length: int | None = None) -> list[Segment] | str | None:
    """Return the segments that a reward function returned, or a message that says what is wrong.

    None if the value is no list, and so no segments.

    Args:
        value: what the function returned for a completion.
        length: characters of the completion; None leaves the ends unchecked.
    """
    if not isinstance(value, list | tuple):
        return None
    segments: list[Segment] = []
    for item in value:
        if not isinstance(item, list | tuple) or len(item) != 3:
            return f"it returned {shorten(value)} and not a number or (start, end, value) segments"
        start, end, reward = item
        # NumPy's integers are no int.
        if any(not isinstance(x, SupportsIndex) or isinstance(x, bool) for x in item[:2]):
            return f"the segment {shorten(item)} has no whole numbers as start and end"
        start, end = int(start), int(end)
        if not 0 <= start <= end or (length is not None and end > length):
            limit = "the text" if length is None else f"{length} characters"
            return f"the segment {shorten(item)} is not within {limit}"
        number = as_number(reward)
        if isinstance(number, str):
            return f"of the segment {shorten(item)}: {number}"
        segments.append((start, end, number))
    return segments


def total(segments: Sequence[Segment]) -> float:
    """Return the sum of the values."""
    return sum(value for _, _, value in segments)


def scaled(segments: Sequence[Segment], factor: float) -> list[Segment]:
    """Return the segments with their values times a factor."""
    return [(start, end, factor * value) for start, end, value in segments]


def count_tokens(ids: Sequence[int], characters: int, decode: Callable[[list[int]], str]) -> int:
    """Return the number of the first tokens whose text has so many characters.

    It relies on decoding being stable: more tokens write no shorter text.
    """
    counts = range(len(ids))
    return bisect.bisect_left(counts, characters, key=lambda count: len(decode(list(ids[:count]))))
