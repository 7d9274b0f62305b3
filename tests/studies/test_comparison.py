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


def test_the_paired_interval_covers_and_is_narrower_than_unpaired():
    """Of 100 simulated pairs, about 95 intervals have the true difference."""
    rng = np.random.default_rng(1)
    covered = 0
    for seed in range(100):
        ability = rng.uniform(size=120)
        a = (rng.uniform(size=120) < ability).astype(float)
        b = (rng.uniform(size=120) < np.minimum(ability + 0.1, 1)).astype(float)
        truth = float((np.minimum(ability + 0.1, 1) - ability).mean())
        value = comparison.paired_difference(a, b, seed)
        covered += value.low <= truth <= value.high
    assert 88 <= covered <= 99
    same = comparison.paired_difference(a, a)
    assert (same.value, same.low, same.high) == (0, 0, 0)


def test_the_stratified_bootstrap_draws_seeds_for_each_task():
    scores = np.array([[0.0, 10.0], [1.0, 11.0]])
    value = comparison.stratified_bootstrap(lambda x: float(x.mean()), scores)
    assert value.value == 5.5
    assert (value.low, value.high) == (5.0, 6.0)
    with pytest.raises(ValueError, match="numbers against"):
        comparison.paired_difference(np.zeros(2), np.zeros(3))
    assert math.isclose(comparison.iqm(scores), 5.5)
