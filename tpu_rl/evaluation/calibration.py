"""Calibration of stated confidences: expected error, Brier score, AUROC, and a reliability table.

With confidences p_i and outcomes y_i in {0, 1} of n completions:

    ECE    sum over B bins of equal width of n_b / n |mean y - mean p| (arXiv 1706.04599)
    Brier  mean (p_i - y_i)^2
    AUROC  the chance that a right completion has a higher p than a wrong one; ties count half
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tpu_rl.rewards.spans import read_confidence

BINS = 10
MEASURES = ("stated", "ece", "brier", "auroc")


class Bin(NamedTuple):
    """The completions whose confidence lies in an interval."""

    low: float
    high: float
    n: int
    confidence: float
    """Their mean confidence."""
    accuracy: float
    """The share of them that is right."""


class Calibration(NamedTuple):
    """The calibration of some completions."""

    stated: float
    """Share of the scored completions that state a confidence. The rest describes these."""
    ece: float
    brier: float
    auroc: float
    """NaN if all are right, or all wrong."""
    bins: list[Bin]
    """Those that are not empty."""


def of_completions(texts: Sequence[str], judged: np.ndarray) -> Calibration | None:
    """Return the calibration of completions with rewards [N], right above 0.5; None if none states
    a confidence. NaN is no reward."""
    scored = np.isfinite(judged)
    read = np.array([read_confidence(text) for text in texts], np.float64)
    stated = scored & np.isfinite(read)
    if not stated.any():
        return None
    p = read[stated]
    y = judged[stated] > 0.5
    bins = reliability(p, y)
    return Calibration(stated.sum() / scored.sum(), ece(bins), brier(p, y), auroc(p, y), bins)


def reliability(p: np.ndarray, y: np.ndarray, count: int = BINS) -> list[Bin]:
    """Return the bins of equal width, without empty ones. A border belongs to the lower bin.

    Args:
        p: [N] confidences from 0 to 1.
        y: [N] outcomes, 0 or 1.
    """
    # 0.3 * 10 is a bit more than 3.
    index = np.clip(np.ceil(np.round(p * count, 9)) - 1, 0, count - 1).astype(int)
    members = [(b, index == b) for b in range(count) if (index == b).any()]
    return [
        Bin(b / count, (b + 1) / count, int(m.sum()), float(p[m].mean()), float(y[m].mean()))
        for b, m in members
    ]


def ece(bins: Sequence[Bin]) -> float:
    """Return the expected calibration error of bins."""
    total = sum(each.n for each in bins)
    return sum(each.n / total * abs(each.accuracy - each.confidence) for each in bins)


def brier(p: np.ndarray, y: np.ndarray) -> float:
    """Return the mean of (p - y)^2; see `reliability` for the arguments."""
    return float(np.mean((p - y) ** 2))


def auroc(scores: np.ndarray, y: np.ndarray) -> float:
    """Return the chance that a right one has the higher score; NaN if all are right, or wrong.

    Args:
        scores: [N] any numbers.
        y: [N] outcomes, 0 or 1.
    """
    is_right = y.astype(bool)
    right = scores[is_right]
    wrong = np.sort(scores[~is_right])
    if not right.size or not wrong.size:
        return float("nan")
    # The statistic of Mann and Whitney, where a tie counts half. Importing scipy.stats takes a
    # second, which every command would pay.
    num_lower = np.searchsorted(wrong, right, "left")
    num_not_higher = np.searchsorted(wrong, right, "right")
    return float((num_lower + num_not_higher).sum() / (2 * right.size * wrong.size))


def as_text(name: str, result: Calibration) -> str:
    """Return the measures and the reliability table as text."""
    lines = [
        f"{name}: {100 * result.stated:.1f} % state a confidence: ECE {result.ece:.3f}, "
        f"Brier {result.brier:.3f}, AUROC {result.auroc:.3f}"
    ]
    for each in result.bins:
        bar = "#" * round(20 * each.accuracy)
        lines.append(
            f"  confidence {each.low:.1f} to {each.high:.1f}, mean {each.confidence:.2f}: "
            f"{100 * each.accuracy:5.1f} % right of {each.n:<5} {bar}"
        )
    return "\n".join(lines)
