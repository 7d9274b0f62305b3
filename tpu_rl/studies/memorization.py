"""Memorization scores, from answers to problems of the training and to variants of them.

A model that has memorized a problem answers its variants worse, and with what it remembers of the
original (arXiv 2503.02296):

    score = S D,    D = max(0, (A - A') / A)

A and A' are the accuracies on the originals and on their variants, and S is the mean similarity of
the answer to a variant with the answer to its original. A model that has learned how to solve the
problems has D = 0, and one that solves nothing of both has no score.

Deviation: the paper compares syntax trees of programs; here the similarity is difflib's ratio of
the texts, which fits any answer.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import numpy as np

from tpu_rl.evaluation.intervals import Estimate
from tpu_rl.studies.comparison import RESAMPLES


def similarities(
    originals: Sequence[Sequence[str]], variants: Sequence[Sequence[str]]
) -> np.ndarray:
    """Return [n] the mean similarity of the answers to a problem with those to its variant.

    It is between 0 and 1.

    Args:
        originals: [n][k] answers to each problem.
        variants: [n][k] answers to its variant. The j-th of both are compared.
    """
    ratios = [
        [
            difflib.SequenceMatcher(None, a, b, autojunk=False).ratio()
            for a, b in zip(*pair, strict=True)
        ]
        for pair in zip(originals, variants, strict=True)
    ]
    return np.array(ratios).mean(1)


def score(original: np.ndarray, variant: np.ndarray, similarity: np.ndarray) -> Estimate:
    """Return the memorization score with its 95 % bootstrap interval over problems.

    The interval is at least as wide as if an outcome that no problem showed were possible.

    Args:
        original: [n] the accuracy on each problem.
        variant: [n] the accuracy on its variant.
        similarity: [n] those of `similarities`.
    """
    n = len(original)
    columns = np.stack([original, variant, similarity], axis=1).astype(np.float64)

    def of(means: np.ndarray) -> np.ndarray:
        accuracy, on_variants, likeness = np.moveaxis(means, -1, 0)
        drop = np.maximum(accuracy - on_variants, 0.0)
        return likeness * drop / np.where(accuracy > 0, accuracy, np.inf)

    rng = np.random.default_rng(0)
    # A hundred resamples at a time bound the memory.
    means = [columns[rng.integers(n, size=(100, n))].mean(1) for _ in range(RESAMPLES // 100)]
    low, high = np.percentile(of(np.concatenate(means)), [2.5, 97.5])
    value = float(of(columns.mean(0)))
    # What none of n problems showed may be the outcome of this share of all (p^n = 0.025).
    unseen = 1 - 0.025 ** (1 / n)
    low = min(low, value * (1 - unseen))
    high = max(high, value + (1 - value) * unseen)
    return Estimate(value, float(low), float(high), n)
