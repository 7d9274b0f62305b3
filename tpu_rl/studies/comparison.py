"""Comparison of models and of runs: paired differences, and statistics over seeds.

Paired, over the problems that two models have both answered (one number per problem):

    difference    mean of b - a, with an interval that two further problems widen
                  (D. G. Bonett and R. M. Price, J. Educational and Behavioral Statistics 37, 2012)
    McNemar       two-sided exact test on the problems that only one of them solves
                  (Q. McNemar, Psychometrika 12, 1947)
    agreement     share of problems with the same number

Over R seeds and M tasks (R. Agarwal et al., "Deep RL at the edge of the statistical precipice",
arXiv 2108.13264), with a bootstrap that resamples seeds, for each task by itself:

    IQM                          mean of the middle half of all R x M scores
    probability of improvement   mean over tasks of P(x > y) + P(x = y) / 2
    performance profile          share of scores above a threshold

Deviation from the paper's program rliable: scores are not normalized here, since accuracies and
rewards have their scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from tpu_rl.evaluation.intervals import NORMAL_95, Estimate, t_quantile

RESAMPLES = 2000
"""Resamples of a bootstrap. The ends of an interval then vary by about a 30th of its width."""


def paired_difference(a: np.ndarray, b: np.ndarray) -> Estimate:
    """Return the mean of b - a over problems, with its 95 % interval.

    The interval is that of the mean of n + 2 differences: those of the n problems, m and -m. With
    m = 1 it is Bonett and Price's for shares, which takes the normal quantile. Differences of
    other numbers take Student's t, and m is the largest of their sizes, so that a few equal
    differences do not claim certainty. If no number changed, m is 1 for numbers within [0, 1], and
    the interval of others is NaN.

    Args:
        a: [n] one number per problem.
        b: [n] of the same problems.

    Raises:
        ValueError: if the problems are none, or not as many.
    """
    if a.shape != b.shape or a.ndim != 1 or not a.size:
        raise ValueError(f"{a.shape} numbers against {b.shape}")
    difference = np.asarray(b, np.float64) - np.asarray(a, np.float64)
    n = len(difference)
    numbers = np.concatenate([a, b])
    are_shares = bool(np.isin(numbers, (0, 1)).all())
    mean = float(difference.mean())
    m = 1.0 if are_shares else float(np.abs(difference).max())
    if not m and (numbers.min() < 0 or numbers.max() > 1):
        return Estimate(mean, math.nan, math.nan, n)
    m = m or 1.0
    padded = np.concatenate([difference, [m, -m]])
    if are_shares:
        half = NORMAL_95 * padded.std() / math.sqrt(n + 2)
    else:
        half = t_quantile(n + 1) * padded.std(ddof=1) / math.sqrt(n + 2)
    middle = padded.mean()
    # The mean of the n + 2 is nearer to 0 than that of the n; the interval has both.
    return Estimate(mean, min(mean, float(middle - half)), max(mean, float(middle + half)), n)


def mcnemar(a: np.ndarray, b: np.ndarray) -> float:
    """Return the two-sided exact p-value of the hypothesis that a and b solve as many problems.

    Args:
        a: [n] bool, the problems that the first model solves.
        b: [n] bool, those of the second.
    """
    only_a = int((a & ~b).sum())
    only_b = int((b & ~a).sum())
    n = only_a + only_b
    # P(X <= min) of a binomial with p = 1/2, once for each tail.
    tail = sum(math.comb(n, k) for k in range(min(only_a, only_b) + 1))
    return min(1.0, 2 * tail / 2**n)


def agreement(a: np.ndarray, b: np.ndarray) -> float:
    """Return the share of problems with the same number."""
    return float(np.mean(a == b))


def iqm(scores: np.ndarray) -> float:
    """Return the interquartile mean: the mean without the lowest and the highest quarter.

    Of n scores, floor(n / 4) are left out at each end, as in `scipy.stats.trim_mean`.
    """
    ordered = np.sort(np.asarray(scores, np.float64), axis=None)
    cut = ordered.size // 4
    return float(ordered[cut : ordered.size - cut].mean())


def probability_of_improvement(x: np.ndarray, y: np.ndarray) -> float:
    """Return the chance that a run of x scores above a run of y, on a task chosen at random.

    Args:
        x: [R, M] scores of R seeds on M tasks.
        y: [S, M] scores of the other method.
    """
    above = (x[:, None] > y[None]).mean(dtype=np.float64)
    equal = (x[:, None] == y[None]).mean(dtype=np.float64)
    return float(above + equal / 2)


def performance_profile(scores: np.ndarray, thresholds: Sequence[float]) -> np.ndarray:
    """Return, for each threshold, the share of the scores [R, M] above it."""
    return np.array([(scores > threshold).mean() for threshold in thresholds])


def stratified_bootstrap(
    statistic: Callable[..., float], *scores: np.ndarray, seed: int = 0
) -> Estimate:
    """Return a statistic of score arrays [R, M] with its 95 % bootstrap interval.

    Each resample draws R seeds with replacement for every task by itself. `n` is the number of
    scores of the first array. The interval is NaN with one seed and wherever all resamples agree:
    their spread is then unknown.
    """
    rng = np.random.default_rng(seed)

    def resampled(array: np.ndarray) -> np.ndarray:
        rows = rng.integers(len(array), size=array.shape)
        return np.take_along_axis(array, rows, axis=0)

    values = [statistic(*map(resampled, scores)) for _ in range(RESAMPLES)]
    low, high = np.percentile(values, [2.5, 97.5])
    if low == high:
        low = high = math.nan
    return Estimate(statistic(*scores), float(low), float(high), scores[0].size)
