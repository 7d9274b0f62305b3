"""Group baselines by hand, and what must not change them."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from tpu_rl.algos.grpo import ADVANTAGES
from tpu_rl.losses import advantages
from tpu_rl.losses.advantages import (
    batch_scaled,
    best_minus_second,
    best_minus_second_scaled,
    group_centered,
    group_scaled,
    leave_one_out,
    length_weighted,
    mean_scaled,
    unequal_groups,
)

NAN = float("nan")
EVERY = [group_centered, group_scaled, batch_scaled, leave_one_out]

# Three groups: of 1, 2, 6; of equal returns; of 4 and 8 beside a row that nobody scored.
RETURNS = jnp.array([1.0, 2.0, 6.0, 5.0, 5.0, 4.0, NAN, 8.0])
GROUP = jnp.array([0, 0, 0, 1, 1, 2, 2, 2])
SCORED = jnp.array([True] * 6 + [False, True])


def test_group_centered():
    np.testing.assert_array_equal(
        group_centered(RETURNS, GROUP, SCORED), [-2, -1, 3, 0, 0, -2, 0, 2]
    )


def test_group_scaled():
    deviations = np.sqrt([7.0, 8.0])  # sample variances (4 + 1 + 9) / 2 and (4 + 4) / 1
    expected = np.concatenate(
        [np.array([-2, -1, 3]) / deviations[0], [0, 0], np.array([-2, 0, 2]) / deviations[1]]
    )
    np.testing.assert_allclose(group_scaled(RETURNS, GROUP, SCORED), expected, rtol=2e-6)


def test_batch_scaled():
    deviation = np.std([1, 2, 6, 5, 5, 4, 8], ddof=1)
    expected = np.array([-2, -1, 3, 0, 0, -2, 0, 2]) / deviation
    np.testing.assert_allclose(batch_scaled(RETURNS, GROUP, SCORED), expected, rtol=2e-6)


def test_leave_one_out():
    # Each return minus the mean of the others of its group that were scored.
    np.testing.assert_allclose(
        leave_one_out(RETURNS, GROUP, SCORED),
        [1 - 4, 2 - 3.5, 6 - 1.5, 0, 0, 4 - 8, 0, 8 - 4],
        rtol=1e-6,
    )


def test_length_weighted_has_verls_numbers():
    """verl 0.9.1's OPO for returns 1, 2, 3 of 4, 3 and 2 tokens: the baseline is 16 / 9."""
    actual = length_weighted(jnp.array([1.0, 2.0, 3.0]), jnp.zeros(3, int), jnp.array([4, 3, 2]))
    np.testing.assert_allclose(actual, [-7 / 9, 2 / 9, 11 / 9], rtol=1e-6)
    # A row that is not scored has length 0.
    lengths = jnp.array([1, 3, 1, 2, 2, 1, 0, 3])
    expected = [1 - 13 / 5, 2 - 13 / 5, 6 - 13 / 5, 0, 0, 4 - 7, 0, 8 - 7]
    np.testing.assert_allclose(length_weighted(RETURNS, GROUP, lengths), expected, rtol=1e-6)


def test_best_minus_second():
    lead = [0, 0, 4, 0, 0, 0, 0, 4]
    np.testing.assert_array_equal(best_minus_second(RETURNS, GROUP, SCORED), lead)
    scaled = best_minus_second_scaled(RETURNS, GROUP, SCORED)
    np.testing.assert_allclose(
        scaled, [0, 0, 4 / np.sqrt(7), 0, 0, 0, 0, 4 / np.sqrt(8)], rtol=2e-6
    )
    # One scored completion has no second.
    alone = best_minus_second(RETURNS, GROUP, SCORED.at[5].set(False))
    np.testing.assert_array_equal(alone, [0, 0, 4, 0, 0, 0, 0, 0])


def test_unequal_groups():
    """5 of 7 scored completions are in groups of unequal returns."""
    expected = np.array([-2, -1, 3, 0, 0, -2, 0, 2]) * 7 / 5
    np.testing.assert_allclose(unequal_groups(RETURNS, GROUP, SCORED), expected, rtol=1e-6)


def test_mean_scaled():
    expected = [-2 / 3, -1 / 3, 1, 0, 0, -2 / 6, 0, 2 / 6]
    np.testing.assert_allclose(mean_scaled(RETURNS, GROUP, SCORED), expected, rtol=1e-5)
    zeros = mean_scaled(jnp.array([-1.0, 1.0, 0.0]), jnp.zeros(3, int), jnp.ones(3, bool))
    np.testing.assert_array_equal(zeros, 0)


@pytest.mark.parametrize("p", [0.1, 0.7])
@pytest.mark.parametrize(
    ("advantage", "objective_slope", "completions"),
    [
        # d/dp of -sum_k (1 - p)^k / k for k < n, from the mean over completions.
        (mean_scaled, lambda p, n: sum((1 - p) ** (k - 1) for k in range(1, n)), "mean"),
        # d/dp of pass@n = 1 - (1 - p)^n, from the sum over completions.
        (best_minus_second, lambda p, n: n * (1 - p) ** (n - 1), "sum"),
    ],
    ids=["max_rl", "pass_at_k"],
)
def test_the_expected_gradient_is_that_of_the_papers_objective(
    advantage, objective_slope, completions, p
):
    """All 2^4 outcomes of a policy that succeeds with probability p = sigmoid(logit)."""
    n = 4
    outcomes = np.array(list(itertools.product([0.0, 1.0], repeat=n)))
    group = np.repeat(np.arange(len(outcomes)), n)
    values = advantage(jnp.asarray(outcomes.reshape(-1)), group, jnp.ones(len(group), bool))
    scores = outcomes - p  # d log policy / d logit
    chances = np.prod(np.where(outcomes > 0, p, 1 - p), axis=1)
    gradient = np.sum(chances * np.sum(np.asarray(values).reshape(-1, n) * scores, axis=1))
    gradient /= n if completions == "mean" else 1
    np.testing.assert_allclose(gradient, objective_slope(p, n) * p * (1 - p), rtol=1e-5)


@pytest.mark.parametrize("advantage", ADVANTAGES.values())
@pytest.mark.parametrize("level", [0.0, 0.1, 1 / 3, 100.1, -12345.6])
def test_equal_returns_give_exactly_zero(advantage, level):
    """Also where the mean of equal float32 numbers is not that number: 3 x 100.1 / 3 differs in the
    last place."""
    returns, scored = jnp.full(16, level), jnp.ones(16, bool)
    group = jnp.array([0] * 3 + [1] * 6 + [2] * 7)
    np.testing.assert_array_equal(advantage(returns, group, scored), np.zeros(16))


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
    np.testing.assert_allclose(
        advantage(RETURNS[kept], GROUP[kept], SCORED[kept]), with_them[kept], rtol=1e-6
    )


@pytest.mark.parametrize("advantage", EVERY)
def test_order_and_names_of_groups_do_not_matter(advantage):
    expected = np.asarray(advantage(RETURNS, GROUP, SCORED))
    order = np.array([5, 6, 7, 0, 1, 2, 3, 4])
    np.testing.assert_allclose(
        advantage(RETURNS[order], GROUP[order], SCORED[order]), expected[order], rtol=1e-6
    )
    # Ids of a long run are larger than the batch.
    np.testing.assert_array_equal(advantage(RETURNS, 1000 - 7 * GROUP, SCORED), expected)


@pytest.mark.parametrize("advantage", EVERY)
def test_a_lone_completion_has_no_advantage(advantage):
    values = advantage(
        jnp.array([3.0, 1.0, NAN]), jnp.array([0, 1, 2]), jnp.array([True, True, False])
    )
    np.testing.assert_array_equal(values, np.zeros(3))


def test_soft_overlong_penalty_at_its_corners():
    lengths = jnp.array([0, 12, 13, 14, 16, 17])
    np.testing.assert_allclose(
        advantages.soft_overlong_penalty(lengths, limit=16, buffer=4),
        [0, 0, -0.25, -0.5, -1, -1],
        rtol=1e-6,
    )


# --- tokens against a critic ---
# Three chosen tokens with tool output between them; and a row whose every token is chosen.
REWARDS = jnp.array([[NAN, 1.0, NAN, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0, 1.0]])
VALUES = jnp.array([[9.0, 0.5, 9.0, 1.0, 1.5], [0.1, 0.2, 0.3, 0.4, 0.5]])
MASK = jnp.array([[False, True, False, True, True], [True] * 5])


def plain_gae(rewards, values, mask, gamma: float, lam: float) -> np.ndarray:
    """A_t = sum_k (gamma lam)^k delta_(t+k), token by token over those that were chosen (arXiv
    1506.02438, eq. 16)."""
    result = np.zeros(np.shape(rewards))
    for row in range(len(result)):
        chosen = np.flatnonzero(mask[row])
        v = [float(values[row, t]) for t in chosen] + [0.0]
        deltas = [float(rewards[row, t]) + gamma * v[i + 1] - v[i] for i, t in enumerate(chosen)]
        for i, t in enumerate(chosen):
            result[row, t] = sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[i:]))
    return result


def test_gae_by_hand():
    """Row one, gamma 0.9 and lambda 0.5, backwards: 2 - 1.5; 1.35 - 1 + 0.45 x 0.5; 1 + 0.9 - 0.5 +
    0.45 x that."""
    last, middle = 0.5, 1.35 - 1 + 0.225
    expected = [0, 1.4 + 0.45 * middle, 0, middle, last]
    np.testing.assert_allclose(
        advantages.gae(REWARDS, VALUES, MASK, 0.9, 0.5)[0], expected, rtol=1e-6
    )


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
def test_gae_is_the_sum_of_its_definition(gamma, lam):
    random = np.random.default_rng(0)
    mask = random.random((6, 9)) < 0.7
    rewards, values = random.normal(size=(2, 6, 9))
    actual = advantages.gae(
        jnp.asarray(rewards), jnp.asarray(values), jnp.asarray(mask), gamma, lam
    )
    np.testing.assert_allclose(
        actual, plain_gae(rewards, values, mask, gamma, lam), rtol=0, atol=2e-6
    )


def test_with_lambda_one_it_is_the_return_minus_the_value():
    actual = advantages.gae(REWARDS, VALUES, MASK, 1.0, 1.0)
    np.testing.assert_allclose(
        actual, [[0, 2.5, 0, 1.0, 0.5], [0.9, 0.8, 0.7, 0.6, 0.5]], rtol=1e-6
    )
    returns = advantages.returns_to_go(REWARDS, MASK)
    np.testing.assert_allclose(returns, [[0, 3, 0, 2, 2], [1] * 5], rtol=1e-6)
    np.testing.assert_allclose(actual, jnp.where(MASK, returns - VALUES, 0.0), rtol=1e-6)


def test_discounted_returns_by_hand():
    np.testing.assert_allclose(advantages.returns_to_go(REWARDS, MASK, 0.5)[0], [0, 1.5, 0, 1, 2])


def test_each_row_may_have_its_own_lambda():
    lam = jnp.array([0.3, 0.8])
    actual = advantages.gae(REWARDS, VALUES, MASK, 1.0, lam)
    for row in range(2):
        np.testing.assert_allclose(
            actual[row], advantages.gae(REWARDS, VALUES, MASK, 1.0, float(lam[row]))[row]
        )


def test_tool_output_spends_no_discount():
    """A completion with tokens of a tool in it has the advantages of the one without them."""
    chosen = jnp.array([1, 3, 4])
    short = advantages.gae(REWARDS[:1, chosen], VALUES[:1, chosen], MASK[:1, chosen], 0.9, 0.7)
    np.testing.assert_allclose(
        advantages.gae(REWARDS, VALUES, MASK, 0.9, 0.7)[0, chosen], short[0], rtol=1e-6
    )


def test_length_adaptive_lambda():
    """VAPO's own numbers, alpha 0.05: 100 tokens 0.8, 2000 tokens 0.99; nothing below 20."""
    actual = advantages.length_adaptive_lambda(jnp.array([0, 1, 20, 100, 2000]), 0.05)
    np.testing.assert_allclose(actual, [0, 0, 0, 0.8, 0.99], rtol=1e-6)
    # What it is for: the weights of a long trace add up to alpha l.
    lam, length = float(actual[4]), 2000
    np.testing.assert_allclose(sum(lam**t for t in range(length)), 0.05 * length, rtol=1e-5)


def test_optimal_value():
    """By hand: 2 log((e^0.5 + 1 + 1) / 3); the mean for a large beta, the best for a small one."""
    returns, scored = jnp.array([1.0, 0.0, 0.0, 5.0]), jnp.array([True, True, True, False])
    by_hand = 2 * np.log((np.exp(0.5) + 2) / 3)
    np.testing.assert_allclose(advantages.optimal_value(returns, scored, 2.0), by_hand, rtol=1e-6)
    np.testing.assert_allclose(advantages.optimal_value(returns, scored, 1e3), 1 / 3, rtol=1e-3)
    np.testing.assert_allclose(
        advantages.optimal_value(returns, scored, 1e-3), 1 - 1e-3 * np.log(3), rtol=1e-6
    )
    assert np.isnan(advantages.optimal_value(returns, jnp.zeros(4, bool), 2.0))
