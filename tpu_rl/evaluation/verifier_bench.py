"""A bench for verifiers: their verdicts against labels, and on completions that are spoiled.

Rule verifiers reject right answers in other forms, and model verifiers accept empty ones
(arXiv 2505.22203). The arms spoil the same rows: half of each completion, none of it, and the
columns of another row. A verifier that still accepts them rewards something else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tpu_rl import rewards
from tpu_rl.evaluation.calibration import auroc


class Verdicts(NamedTuple):
    """The verdicts of a verifier on N labeled completions. It accepts values above 0.5."""

    accuracy: float
    """The share of the scored ones with the verdict of the label."""
    kappa: float
    """Cohen's agreement beyond chance: 1 for equal verdicts, 0 for chance; NaN if undefined."""
    auroc: float
    """The chance that a right one has the higher value; NaN if all are right, or wrong."""
    false_positives: list[int]
    """Rows that are accepted and wrong."""
    false_negatives: list[int]
    unscored: list[int]
    """Rows without a value."""


def judge(values: np.ndarray, labels: np.ndarray) -> Verdicts:
    """Compare values [N], NaN for none, with labels [N] that are right above 0.5."""
    scored = np.isfinite(values)
    accepted = values > 0.5
    right = labels > 0.5
    a = accepted[scored]
    r = right[scored]
    accuracy = float((a == r).mean()) if len(a) else float("nan")
    chance = float(a.mean() * r.mean() + (~a).mean() * (~r).mean()) if len(a) else 1.0
    return Verdicts(
        accuracy,
        (accuracy - chance) / (1 - chance) if chance < 1 else float("nan"),
        auroc(values[scored], r),
        np.flatnonzero(scored & accepted & ~right).tolist(),
        np.flatnonzero(scored & ~accepted & right).tolist(),
        np.flatnonzero(~scored).tolist(),
    )


def arms(
    function: rewards.Reward,
    prompts: Sequence[Any],
    completions: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    seed: int = 0,
) -> dict[str, float]:
    """Return arm -> the share of spoiled completions that a verifier accepts."""
    n = len(completions)
    # No row keeps its own columns: the order is a random cycle.
    cycle = np.random.default_rng(seed).permutation(n)
    other = np.empty(n, int)
    other[cycle] = np.roll(cycle, 1)
    shuffled = {name: [values[row] for row in other] for name, values in columns.items()}
    spoiled = {
        "columns of another row": (completions, shuffled),
        "first half": ([text[: len(text) // 2] for text in completions], columns),
        "empty": ([""] * n, columns),
    }
    shares = {}
    for name, (texts, arm_columns) in spoiled.items():
        answers = rewards.as_answers(prompts, texts)
        values, *_ = rewards.apply(name, function, prompts, answers, arm_columns)
        shares[name] = float((values > 0.5).mean())
    return shares
