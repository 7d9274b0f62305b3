"""Estimates with their 95 % intervals, over problems or texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

NORMAL_95 = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""


class Estimate(NamedTuple):
    """A number of n problems with its 95 % interval. NaN as an end: the numbers tell none."""

    value: float
    low: float
    high: float
    n: int

    def as_metrics(self, name: str, n: str = "") -> dict[str, float]:
        """Return it as four metrics; `n` is the name of the last, if not that of the value."""
        ends = {f"{name}_low": self.low, f"{name}_high": self.high}
        return {name: self.value, **ends, n or f"{name}_n": self.n}


def estimate(shares: Sequence[float]) -> Estimate:
    """Return the mean of one number in [0, 1] per problem, with its interval.

    Without any problem the value is NaN, and the interval is 0 to 1.
    """
    n = len(shares)
    value = math.fsum(shares) / n if n else math.nan
    return Estimate(value, *share_interval(math.fsum(shares), n), n)


def mean_estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of one number per problem, with its 95 % interval.

    The interval is that of a share (`share_interval`) if all values are 0 or 1, or all are -1 or 1,
    and Student's t otherwise. Without any problem the value is NaN. The interval is NaN with fewer
    than two problems, and if all values are equal, for then their spread is unknown.
    """
    n = len(values)
    distinct = set(values)
    if n >= 2 and distinct <= {0.0, 1.0}:
        return estimate(values)
    if n >= 2 and distinct <= {-1.0, 1.0}:
        share = estimate([(value + 1) / 2 for value in values])
        return Estimate(2 * share.value - 1, 2 * share.low - 1, 2 * share.high - 1, n)
    mean = math.fsum(values) / n if n else math.nan
    if len(distinct) < 2:
        return Estimate(mean, math.nan, math.nan, n)
    standard_error = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)
    half = t_quantile(n - 1) * standard_error
    return Estimate(mean, mean - half, mean + half, n)


def ratio_estimate(totals: Sequence[float], counts: Sequence[int]) -> Estimate:
    """Return the sum of totals over the sum of counts, with its 95 % interval by Student's t.

    For a mean per token, with one total and one count of tokens for each text. Texts are
    independent of each other and tokens are not, so that the interval is over texts (the ratio
    estimator; W. G. Cochran, Sampling Techniques, 1977, equation 6.13). Texts without tokens do not
    count. Without any text the value is NaN. The interval is NaN with fewer than two texts, and if
    all have the same mean.
    """
    texts = [(total, count) for total, count in zip(totals, counts, strict=True) if count]
    n = len(texts)
    num_tokens = sum(count for _, count in texts)
    value = math.fsum(total for total, _ in texts) / num_tokens if n else math.nan
    squares = math.fsum((total - value * count) ** 2 for total, count in texts)
    if n < 2 or not squares:
        return Estimate(value, math.nan, math.nan, n)
    standard_error = math.sqrt(squares * n / (n - 1)) / num_tokens
    half = t_quantile(n - 1) * standard_error
    return Estimate(value, value - half, value + half, n)


def t_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t with some degrees of freedom."""
    from scipy import special  # It takes time to import, and most commands need no interval.

    return float(special.stdtrit(degrees, 0.975))


def wilson(successes: float, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of n trials (E. B. Wilson, JASA 22, 1927).

    `successes` may be fractional. A sum of numbers in [0, 1] varies at most as much as a count with
    the same mean, so the interval is then conservative. Raises ValueError if `successes` is not
    between 0 and n.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes in {n} trials")
    if n == 0:
        return 0.0, 1.0
    z = NORMAL_95
    share = successes / n
    center = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low = center - half if successes else 0.0
    high = center + half if successes < n else 1.0
    return max(0.0, low), min(1.0, high)


def share_interval(successes: float, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of n trials: Wilson's, mended near 0 and 1.

    Wilson's interval covers too rarely where one to three successes, or failures, are likely. There
    its end is that of a Poisson count, chi2(0.05; 2 successes) / 2n (L. D. Brown, T. T. Cai and A.
    DasGupta, Statistical Science 16, 2001, section 4.1.1; there up to two for n <= 50). `successes`
    may be fractional, as in `wilson`. Raises ValueError if `successes` is not between 0 and n.
    """
    low, high = wilson(successes, n)
    failures = n - successes
    if 0 < successes <= min(3, n / 2):
        low = min(low, _poisson_low(successes) / n)
    if 0 < failures <= min(3, n / 2):
        high = max(high, 1 - _poisson_low(failures) / n)
    return low, high


def _poisson_low(count: float) -> float:
    """Return the 95 % lower bound of the mean of a Poisson variable from one count of it."""
    from scipy import special  # It takes time to import, and most commands need no interval.

    return float(special.chdtri(2 * count, 0.95)) / 2
