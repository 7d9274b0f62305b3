"""Compare answers with the ground truth, or with each other, by math-verify.

Only worker processes import this file, because math-verify can hang.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from math_verify import parse, verify  # pyright: ignore[reportMissingImports]  # of the extra [math]

from tpu_rl.environments.answer_text import answer_text
from tpu_rl.environments.answers import is_denied

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
        answer = _parse_answer(completion)
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
    answer = _parse_answer(completion)
    is_other = _other_marks(answer) - _other_marks(expected)
    return float(not is_other and verify(expected, answer))


def _parse_answer(completion: str) -> list[Any]:
    """Return the parsed answer of a completion; [] without one, or if the text denies it."""
    text = _without_dollars(answer_text(completion))
    has_words = re.search(r"(?<![\\A-Za-z])[A-Za-z]{3,}", text) is not None
    is_whole = "<answer>" in completion and not any(mark in text for mark in LATEX_MARKS)
    # Searched as a text, 2\sqrt{3} would be a 2.
    answer = (parse(f"${text}$") if is_whole and not has_words else []) or parse(text)
    answer = answer or (parse(f"${text}$") if is_whole else [])
    place = text.rfind(str(answer[-1])) if answer else -1
    before = re.sub(r"\\boxed\s*{\s*$", "", text[: max(place, 0)])
    return [] if is_denied(before) or _HEDGE.search(before) else answer


def _other_marks(parsed: list[Any]) -> set[str]:
    """Return marks of a parsed text that make it another number, and that math-verify drops."""
    return set(_OTHER_MARKS.findall(str(parsed[-1]))) if parsed else set()


_OTHER_MARKS = re.compile(
    r"\\n(?:eg?|eq|ot)(?![A-Za-z])|\\(?:lnot|sim)|[¬≠~]|(?<=[0-9])_{?[0-9]+}?"
)
_HEDGE = re.compile(r"[0-9]\W*\bor\W*\Z")
"""A number and "or" before the last one."""


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
