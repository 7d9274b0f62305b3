"""Statistics of comparisons, against hand values and simulations."""

import math

import numpy as np
import pytest

from tpu_rl.studies import comparison


def test_mcnemar_counts_both_tails():
    a = np.array([1, 1, 1, 1, 1, 0, 0], bool)
    b = np.array([0, 0, 0, 0, 1, 1, 0], bool)
    # Four problems against one: 2 (C(5, 0) + C(5, 1)) / 2^5.
    assert comparison.mcnemar(a, b) == pytest.approx(2 * 6 / 32)
    assert comparison.mcnemar(b, a) == pytest.approx(2 * 6 / 32)
    assert comparison.mcnemar(a, a) == 1.0
    assert comparison.agreement(a, b) == pytest.approx(2 / 7)


def test_iqm_is_the_mean_of_the_middle_half():
    assert comparison.iqm(np.array([[100.0, 1, 2, 3, 4, 5, 6, -100]])) == 3.5
    assert comparison.iqm(np.array([[1.0, 2, 6]])) == 3.0


def test_probability_of_improvement_counts_ties_half():
    x = np.array([[1.0, 0], [2, 0]])
    y = np.array([[1.0, 1], [0, 0]])
    # Task 1: 1=1, 1>0, 2>1, 2>0. Task 2: 0<1, 0=0, 0<1, 0=0.
    assert comparison.probability_of_improvement(x, y) == pytest.approx((3.5 + 1.0) / 8)
    assert comparison.probability_of_improvement(y, x) == pytest.approx((0.5 + 3.0) / 8)


def test_profile_is_a_share_above():
    shares = comparison.performance_profile(np.array([[0.1, 0.5], [0.5, 0.9]]), (0, 0.5, 0.9))
    assert shares.tolist() == [1.0, 0.25, 0.0]


@pytest.mark.parametrize("n", [8, 12, 50, 500])
@pytest.mark.parametrize(
    ("only_a", "only_b"), [(0, 0), (0, 0.02), (0.02, 0.02), (0.2, 0.3), (0.5, 0.5), (0, 1)]
)
def test_the_interval_of_a_change_of_verdicts_covers(n, only_a, only_b):
    """Of simulated pairs, at least 93 % of the intervals have the true difference."""
    counts = np.random.default_rng(1).multinomial(n, [only_a, only_b, 1 - only_a - only_b], 2000)
    distinct, times = np.unique(counts, axis=0, return_counts=True)
    covered = 0
    for (lost, won, kept), weight in zip(distinct, times, strict=True):
        a = np.repeat([1.0, 0.0, 1.0], [lost, won, kept])
        b = np.repeat([0.0, 1.0, 1.0], [lost, won, kept])
        value = comparison.paired_difference(a, b)
        assert value.low < value.high
        covered += weight * (value.low <= only_b - only_a <= value.high)
    assert covered >= 0.93 * 2000


def test_the_interval_of_verdicts_is_bonett_and_prices():
    # 3 problems lost, 9 won, of 40: p12 = 4 / 42, p21 = 10 / 42.
    a = np.repeat([1.0, 0.0, 1.0], [3, 9, 28])
    b = np.repeat([0.0, 1.0, 1.0], [3, 9, 28])
    half = 1.959964 * math.sqrt((4 / 42 + 10 / 42 - (6 / 42) ** 2) / 42)
    value = comparison.paired_difference(a, b)
    assert value == pytest.approx((6 / 40, 6 / 42 - half, 6 / 42 + half, 40), abs=1e-6)


def test_graded_differences_have_an_interval_that_never_claims_certainty():
    rng = np.random.default_rng(2)
    covered = 0
    for _ in range(400):
        a = rng.normal(3, 1, 12)
        value = comparison.paired_difference(a, a + rng.normal(0.1, 0.2, 12))
        covered += value.low <= 0.1 <= value.high
    assert 376 <= covered < 400
    # All differ by as much: the two further problems give the interval a width.
    shifted = comparison.paired_difference(np.arange(8.0), np.arange(8.0) + 0.5)
    assert shifted.low < shifted.value == 0.5 <= shifted.high
    unchanged = comparison.paired_difference(np.array([0.25, 1.0]), np.array([0.25, 1.0]))
    assert (unchanged.value, unchanged.low) == (0, -unchanged.high)
    assert unchanged.low < 0
    assert math.isnan(comparison.paired_difference(np.full(9, 7.0), np.full(9, 7.0)).low)


def test_the_stratified_bootstrap_draws_seeds_for_each_task():
    scores = np.array([[0.0, 10.0], [1.0, 11.0]])
    value = comparison.stratified_bootstrap(lambda x: float(x.mean()), scores)
    assert value.value == 5.5
    assert (value.low, value.high) == (5.0, 6.0)
    alone = comparison.stratified_bootstrap(lambda x: float(x.mean()), scores[:1])
    assert (alone.value, math.isnan(alone.low)) == (5.0, True)
    with pytest.raises(ValueError, match="numbers against"):
        comparison.paired_difference(np.zeros(2), np.zeros(3))
    assert math.isclose(comparison.iqm(scores), 5.5)
