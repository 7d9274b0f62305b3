"""Group baselines by hand, and what must not change them."""

import jax.numpy as jnp
import numpy as np
import pytest

from tpu_rl import advantages
from tpu_rl.advantages import batch_scaled, group_centred, group_scaled, leave_one_out, zero_variance_groups

NAN = float("nan")
EVERY = [group_centred, group_scaled, batch_scaled, leave_one_out]

# Three groups: of 1, 2, 6; of equal returns; of 4 and 8 beside a row that nobody scored.
RETURNS = jnp.array([1.0, 2.0, 6.0, 5.0, 5.0, 4.0, NAN, 8.0])
GROUP = jnp.array([0, 0, 0, 1, 1, 2, 2, 2])
SCORED = jnp.array([True] * 6 + [False, True])


def test_group_centred():
    np.testing.assert_array_equal(group_centred(RETURNS, GROUP, SCORED), [-2, -1, 3, 0, 0, -2, 0, 2])


def test_group_scaled():
    deviations = np.sqrt([7.0, 8.0])  # sample variances (4 + 1 + 9) / 2 and (4 + 4) / 1
    expected = np.concatenate([np.array([-2, -1, 3]) / deviations[0], [0, 0], np.array([-2, 0, 2]) / deviations[1]])
    np.testing.assert_allclose(group_scaled(RETURNS, GROUP, SCORED), expected, rtol=2e-6)


def test_batch_scaled():
    deviation = np.std([1, 2, 6, 5, 5, 4, 8], ddof=1)
    expected = np.array([-2, -1, 3, 0, 0, -2, 0, 2]) / deviation
    np.testing.assert_allclose(batch_scaled(RETURNS, GROUP, SCORED), expected, rtol=2e-6)


def test_leave_one_out():
    # Each return minus the mean of the others of its group that were scored.
    np.testing.assert_allclose(
        leave_one_out(RETURNS, GROUP, SCORED), [1 - 4, 2 - 3.5, 6 - 1.5, 0, 0, 4 - 8, 0, 8 - 4], rtol=1e-6
    )


@pytest.mark.parametrize("advantage", EVERY)
@pytest.mark.parametrize("level", [0.0, 0.1, 1 / 3, 100.1, -12345.6])
def test_equal_returns_give_exactly_zero(advantage, level):
    """Also where the mean of equal float32 numbers is not that number: 3 x 100.1 / 3 differs in the last place."""
    returns, scored = jnp.full(16, level), jnp.ones(16, bool)
    group = jnp.array([0] * 3 + [1] * 6 + [2] * 7)
    np.testing.assert_array_equal(advantage(returns, group, scored), np.zeros(16))
    assert jnp.all(zero_variance_groups(returns, group, scored))


@pytest.mark.parametrize("advantage", EVERY)
def test_sums_to_zero_in_every_group(advantage):
    values = np.asarray(advantage(RETURNS, GROUP, SCORED))
    for group in range(3):
        assert abs(values[np.asarray(GROUP) == group].sum()) < 1e-6


@pytest.mark.parametrize("advantage", EVERY)
def test_rows_without_a_score_count_nowhere(advantage):
    with_them = advantage(RETURNS, GROUP, SCORED)
    assert with_them.dtype == jnp.float32
    assert with_them[6] == 0
    kept = np.flatnonzero(SCORED)
    np.testing.assert_allclose(advantage(RETURNS[kept], GROUP[kept], SCORED[kept]), with_them[kept], rtol=1e-6)


@pytest.mark.parametrize("advantage", EVERY)
def test_order_and_names_of_groups_do_not_matter(advantage):
    expected = np.asarray(advantage(RETURNS, GROUP, SCORED))
    order = np.array([5, 6, 7, 0, 1, 2, 3, 4])
    np.testing.assert_allclose(advantage(RETURNS[order], GROUP[order], SCORED[order]), expected[order], rtol=1e-6)
    # Ids of a long run are larger than the batch.
    np.testing.assert_array_equal(advantage(RETURNS, 1000 - 7 * GROUP, SCORED), expected)


@pytest.mark.parametrize("advantage", EVERY)
def test_a_lone_completion_has_no_advantage(advantage):
    values = advantage(jnp.array([3.0, 1.0, NAN]), jnp.array([0, 1, 2]), jnp.array([True, True, False]))
    np.testing.assert_array_equal(values, np.zeros(3))


def test_zero_variance_groups():
    np.testing.assert_array_equal(zero_variance_groups(RETURNS, GROUP, SCORED), [0, 0, 0, 1, 1, 0, 0, 0])


def test_soft_overlong_penalty_at_its_corners():
    lengths = jnp.array([0, 12, 13, 14, 16, 17])
    np.testing.assert_allclose(
        advantages.soft_overlong_penalty(lengths, limit=16, buffer=4), [0, 0, -0.25, -0.5, -1, -1], rtol=1e-6
    )
