"""Compare answers with the ground truth, or with each other, by math-verify.

Only worker processes import this file, because math-verify can hang.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from math_verify import parse, verify  # pyright: ignore[reportMissingImports]  # of the extra [math]

LATEX_MARKS = ("$", "\\boxed", "\\(", "\\[")
"""Texts that begin LaTeX."""


def equivalent(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """Return 1 for each completion whose answer equals the ground truth, else 0.

    Raises:
        ValueError: if a ground truth contains no answer.
    """
    return [
        _equivalent(completion, truth)
        for completion, truth in zip(completions, answer, strict=True)
    ]


def answer_classes(completions: Sequence[str]) -> list[int | None]:
    """Return a number for each completion, the same for answers that are equal; None without one.

    An answer belongs to the first class whose first answer math-verify finds equal to it.
    """
    firsts: list[list[Any]] = []
    classes: list[int | None] = []
    for completion in completions:
        answer = parse(_without_dollars(completion))
        if not answer:
            classes.append(None)
            continue
        number = next((i for i, first in enumerate(firsts) if verify(first, answer)), len(firsts))
        if number == len(firsts):
            firsts.append(answer)
        classes.append(number)
    return classes


def _equivalent(completion: str, truth: str) -> float:
    expected = _parse_truth(truth)
    if not expected:
        raise ValueError(f"the ground truth {truth!r} contains no answer")
    return float(verify(expected, parse(_without_dollars(completion))))


def _parse_truth(truth: str) -> list[Any]:
    r"""Return a parsed ground truth.

    Without marks it is LaTeX as a whole. Searched as a text, 2\sqrt{3} would be a 2.
    """
    truth = _without_dollars(truth)
    if any(mark in truth for mark in LATEX_MARKS):
        return parse(truth)
    return parse(f"${truth}$") or parse(truth)


def _without_dollars(text: str) -> str:
    """Return the text without dollar signs of amounts, which would end the LaTeX around them."""
    return text.replace("\\$", "")
