"""Whether an answer equals the ground truth, by math-verify. Loaded by a reward worker alone: it can hang for ever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from math_verify import parse, verify  # pyright: ignore[reportMissingImports]  # of the extra [math]


def equivalent(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """1 for each completion whose answer is the ground truth's, else 0. Raises ValueError where that holds none."""
    return [_equivalent(completion, truth) for completion, truth in zip(completions, answer, strict=True)]


def _equivalent(completion: str, truth: str) -> float:
    gold = _gold(truth)
    if not gold:
        raise ValueError(f"the ground truth {truth!r} holds no answer")
    return float(verify(gold, parse(_without_dollars(completion))))


MARKS = ("$", "\\boxed", "\\(", "\\[")
"""What says where LaTeX begins."""


def _gold(truth: str) -> list[Any]:
    r"""A ground truth without marks is LaTeX as a whole: looked for as in a text, 2\sqrt{3} would be a 2."""
    truth = _without_dollars(truth)
    if any(mark in truth for mark in MARKS):
        return parse(truth)
    return parse(f"${truth}$") or parse(truth)


def _without_dollars(text: str) -> str:
    """Amounts without their currency, which would end the LaTeX around them."""
    return text.replace("\\$", "")
