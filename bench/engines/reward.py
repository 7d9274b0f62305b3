"""The reward of bench/peers.py: the share of words with an even number.

It differs between completions, and is fast and exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def even_words(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """Return a score between 0 and 1 for each completion."""
    del prompts, columns
    numbers = [
        [int(word[1:]) for word in text.split() if word[1:].isdigit()] for text in completions
    ]
    return [sum(number % 2 == 0 for number in row) / max(len(row), 1) for row in numbers]
