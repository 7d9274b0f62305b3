"""Credit to the steps of a text: regression on advantages, and rewards from outcomes alone."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_rl.algos.direct_advantage import DirectAdvantageConfig, direct_advantage, step_advantages
from tpu_rl.algos.grpo import GrpoConfig
from tpu_rl.algos.ppo import PpoConfig
from tpu_rl.algos.prime import PrimeConfig, prime, process_advantages
from tpu_rl.errors import InputError
from tpu_rl.losses import advantages
from tpu_rl.proofs import cases, tiny
from tpu_rl.train import update_step


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


# Two completions of one prompt, of the steps [2 3], [4 9] and [5], [6]; 3, 4 and 5 end a step, and
# 0 is the prompt. Their rewards are at ends.
TOKENS = jnp.array([[0, 2, 3, 7, 4, 9], [0, 5, 6, 0, 0, 0]])
MASK = jnp.array([[0, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0]], bool)
REWARDS = jnp.array([[0, 0, 1.0, 0, 3.0, 2.0], [0, 4.0, 0.0, 0, 0, 0]])
GROUP = jnp.zeros(2, jnp.int32)
SCORED = jnp.ones(2, bool)
ENDS = advantages.step_ends(TOKENS, MASK, (3, 4, 5))


def test_steps_end_at_separators_and_with_the_completion():
    np.testing.assert_array_equal(
        advantages.turn_ids(MASK, None, ENDS), [[0, 1, 1, 2, 2, 3], [0, 1, 2, 0, 0, 0]]
    )
    np.testing.assert_array_equal(
        advantages.turn_sums(REWARDS, MASK, ENDS), [[0, 1, 0, 3, 0, 2], [0, 4, 0, 0, 0, 0]]
    )
    assert advantages.step_ends(TOKENS, MASK, ()) is None


def test_gae_over_steps_by_hand():
    """gamma 0.5, lambda 0.5 and V = 1 before each step: deltas 1 + .5 - 1, 3 + .5 - 1, 2 - 1."""
    values = jnp.ones_like(REWARDS)
    actual = advantages.turn_gae(REWARDS, values, MASK, 0.5, 0.5, None, ENDS)
    third = 1.0
    second = 2.5 + 0.25 * third
    first = 0.5 + 0.25 * second
    np.testing.assert_allclose(actual[0], [0, first, first, second, second, third], rtol=1e-6)
    # 4 + .5 - 1 - .25 of the last delta, 0 - 1.
    np.testing.assert_allclose(actual[1, 1:3], [3.5 + 0.25 * -1.0, -1.0], rtol=1e-6)


@pytest.mark.slow
def test_the_kth_steps_of_a_group_are_compared():
    """Returns from the first step on: 6 and 4; from the second on: 5 and 0; the third is alone."""
    returns = advantages.turn_returns(REWARDS, MASK, 1.0, None, ENDS)
    actual = advantages.per_turn(
        advantages.group_centered, returns, MASK, GROUP, SCORED, None, ENDS
    )
    np.testing.assert_allclose(actual, [[0, 1, 1, 2.5, 2.5, 0], [0, -1, -2.5, 0, 0, 0]])


def test_process_supervision_scales_the_rewards_of_all_steps_together():
    """DeepSeekMath, 4.1.3: rewards 1, 3, 2, 4, 0 of the group; those from a step on add up."""
    actual = advantages.of_rewards(
        advantages.group_scaled, REWARDS, MASK, GROUP, SCORED, 1.0, None, ENDS
    )
    rewards = np.array([1.0, 3.0, 2.0, 4.0, 0.0])
    scaled = (rewards - rewards.mean()) / rewards.std(ddof=1)
    first = np.cumsum(scaled[2::-1])[::-1]
    second = np.cumsum(scaled[:2:-1])[::-1]
    expected = [[0, first[0], first[0], first[1], first[1], first[2]], [0, *second, 0, 0, 0]]
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    # A row that nobody scored counts nowhere.
    alone = advantages.of_rewards(
        advantages.group_centered, REWARDS, MASK, GROUP, jnp.array([True, False]), 1.0, None, ENDS
    )
    np.testing.assert_allclose(alone, [[0, 0, 0, 1, 1, 0], [0] * 6], atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GrpoConfig(separators=(3,)), "steps have none"),
        (lambda: PpoConfig(separators=(3,)), "steps have none"),
        (lambda: DirectAdvantageConfig(beta=0), "beta"),
        (lambda: PrimeConfig(kl_loss_coef=0.1, reference_reset_every=5), "stays"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


# --- direct advantage policy optimization ---


def test_advantages_of_steps_are_changes_of_the_value():
    """V of the prompt is the group's mean of V after step 1: (1 + 4) / 2."""
    data = tiny.rollout(groups=((1, (5, 2)),)).replace(
        tokens=TOKENS, action_mask=MASK, rewards=REWARDS
    )
    actual = step_advantages(data, MASK, ENDS)
    np.testing.assert_allclose(actual, [[0, -1.5, -1.5, 3, 3, 2], [0, 1.5, 0, 0, 0, 0]])


def loss_of(algorithm, data, params):
    batch, _ = algorithm.make_batch(tiny.experience(data), params, algorithm.init_state(params))
    batch = update_step.minibatch(batch, 0)
    parts = [update_step.minibatch(batch, k) for k in range(len(batch.rows.tokens))]
    outputs = [jax.jit(algorithm.loss)(params, part) for part in parts]
    return sum(float(value) for value, _ in outputs), outputs


@pytest.mark.slow
def test_the_regression_is_zero_at_the_reference_times_exp_advantage():
    """Rewards that are beta x the policy's log-ratio, step by step, leave nothing to learn; the
    first step of a completion has its group's mean as baseline, so groups have one completion here.
    """
    config = DirectAdvantageConfig(beta=0.3, separators=(3, 7))
    roles, params = tiny.cast(config.roles)
    data = cases.off_policy()
    temperature = tiny.SAMPLING.temperature
    policy, reference = (
        tiny.plain_log_probs(cases.MODEL, params[name], data.tokens, temperature)
        for name in ("policy", "reference")
    )
    ratio = jnp.where(data.action_mask, policy - reference, 0.0)
    algorithm = direct_advantage(config, roles, tiny.SAMPLING)
    value, _ = loss_of(algorithm, dataclasses.replace(data, rewards=0.0 * ratio), params)
    # Every step's log-ratio, squared and halved.
    learned = np.asarray(data.action_mask & data.scored[:, None])
    ends = advantages.step_ends(data.tokens, data.action_mask, (3, 7))
    sums = np.asarray(advantages.turn_sums(ratio, data.action_mask, ends))
    starts = np.asarray(advantages.turn_starts(data.action_mask, ends)) & learned
    assert value == pytest.approx(np.mean(0.5 * sums[starts] ** 2), rel=1e-6)
    # With rewards equal to beta x log-ratio, only the baselines of first steps are left.
    value, _ = loss_of(algorithm, dataclasses.replace(data, rewards=0.3 * ratio), params)
    is_first = starts & (np.cumsum(learned, axis=1) == 1)
    rows = np.flatnonzero(is_first.any(1))
    means = {
        group: sums[is_first & (np.asarray(data.group_id) == group)[:, None]].mean()
        for group in np.unique(np.asarray(data.group_id)[rows])
    }
    left = sum(0.5 * means[int(data.group_id[row])] ** 2 for row in rows) / starts.sum()
    assert value == pytest.approx(left, rel=1e-6)


# --- PRIME ---


def test_process_advantages_by_hand():
    """Means 1.2 and 2; each is the baseline of the other's tokens."""
    rewards = jnp.where(MASK, REWARDS, 0.0)
    actual = process_advantages(rewards, MASK, GROUP)
    first = np.cumsum((np.array([0, 1, 0, 3, 2.0]) - 2.0)[::-1])[::-1]
    second = np.cumsum((np.array([4, 0.0]) - 1.2)[::-1])[::-1]
    np.testing.assert_allclose(actual[0, 1:], first, rtol=1e-5)
    np.testing.assert_allclose(actual[1, 1:3], second, rtol=1e-5)


@pytest.mark.slow
def test_the_process_model_learns_outcomes_and_its_log_ratio_is_credit():
    config = PrimeConfig(advantages="leave_one_out", min_reward=0.1)
    roles, params = tiny.cast(config.roles)
    data = cases.off_policy()
    algorithm = prime(config, roles, tiny.SAMPLING)
    _, outputs = loss_of(algorithm, data, params)
    ratio = 0.05 * (
        tiny.plain_log_probs(cases.MODEL, params["process"], data.tokens, 0.7)
        - tiny.plain_log_probs(cases.MODEL, params["reference"], data.tokens, 0.7)
    )
    mask = data.action_mask
    logits = np.asarray(jnp.where(mask, ratio, 0.0).sum(1))
    returns = np.asarray(jnp.where(mask, data.rewards, 0.0).sum(1))
    counted = np.asarray(mask.any(1))
    signed = np.where(returns >= 0.1, logits, -logits)[counted]
    expected = np.mean(np.log1p(np.exp(-signed)))
    parts = [metrics["process/loss"] for _, metrics in outputs]
    assert float(sum(part.value for part in parts)) == pytest.approx(expected, rel=1e-6)
    # The advantages are those of the outcome plus those of the log-ratios.
    batch, _ = algorithm.make_batch(tiny.experience(data), params, ())
    layout = tiny.experience(data).layout
    outcome = advantages.leave_one_out(jnp.asarray(returns), data.group_id, mask.sum(1))
    dense = process_advantages(jnp.where(mask, ratio, 0.0), mask, data.group_id)
    expected_advantages = np.where(mask, outcome[:, None] + dense, 0.0)
    actual = np.where(mask, layout.unpack(batch.advantages), 0.0)
    np.testing.assert_allclose(actual, expected_advantages, rtol=1e-5, atol=1e-6)
