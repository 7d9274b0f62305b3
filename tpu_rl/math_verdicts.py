"""Whether an answer equals the ground truth, by math-verify. Loaded by a reward worker alone: it can hang for ever."""

from __future__ import annotations

from collections.abc import Sequence

from math_verify import parse, verify  # pyright: ignore[reportMissingImports]  # of the extra [math]


def equivalent(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """1 for each completion whose answer is the ground truth's, else 0. Raises ValueError where that holds none."""
    return [_equivalent(completion, truth) for completion, truth in zip(completions, answer, strict=True)]


def _equivalent(completion: str, truth: str) -> float:
    gold = parse(truth) or parse(f"${truth}$")
    if not gold:
        raise ValueError(f"the ground truth {truth!r} holds no answer")
    return float(verify(gold, parse(completion)))
