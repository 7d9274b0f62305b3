"""The battery that every algorithm passes, `tpu_rl.proofs`. A new algorithm is a row of CASES."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixtures.algorithm_cases import CASES, QUICK, unless_quick
from tpu_rl.algos import ALGORITHMS, GrpoConfig, factory_of, grpo
from tpu_rl.algos.surrogates import SURROGATES, SurrogatesConfig
from tpu_rl.proofs import PROOFS, Battery, tiny
from tpu_rl.proofs.cases import MODEL, off_policy
from tpu_rl.types import Params, Rollout

SLOW = {"shape", "bits"}
"""The proofs that compile programs of their own: slow for the cases that are quick. The cases that
are not quick have all their proofs at night."""


def test_every_algorithm_has_a_case_and_a_quick_one():
    registered = {row.factory for row in ALGORITHMS.values()}
    assert {case.factory for case in CASES.values()} == registered
    assert {CASES[name].factory for name in QUICK} == registered
    for case in CASES.values():
        assert factory_of(type(case.config)) is case.factory


def test_every_surrogate_has_a_case():
    configs = [case.config for case in CASES.values()]
    proved = {config.surrogate for config in configs if isinstance(config, SurrogatesConfig)}
    # GRPO's own surrogate is that of the cases of grpo.
    assert proved | {"clipped"} == SURROGATES.keys()


@functools.cache
def battery(name: str) -> Battery:
    return Battery(CASES[name])


def parameters(name: str, proof: str) -> Any:
    if name not in QUICK:
        return pytest.param(name, proof, marks=pytest.mark.nightly)
    return pytest.param(name, proof, marks=[pytest.mark.slow] * (proof in SLOW))


@pytest.mark.parametrize(
    ("name", "proof"), [parameters(name, proof) for name in CASES for proof in PROOFS]
)
def test_battery(name, proof):
    PROOFS[proof](battery(name))


@pytest.fixture
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


# --- GRPO against its formula, a completion at a time ---


PARTS_BESIDE_THE_FORMULA = {
    "off_policy_mask",
    "rejected_completions",
    "texts_beside",
    "top_entropy",
}
"""Cases with a part that the plain formula below has not. The tests of parts have their values."""
GRPO = [
    name
    for name, case in CASES.items()
    # test_step_credit has the returns of process supervision.
    if case.factory is grpo and case.config.credit != "reward"
    if name not in PARTS_BESIDE_THE_FORMULA
]
REINFORCE = [
    name
    for name in GRPO
    if not CASES[name].config.kl_loss_coef and not CASES[name].config.entropy_coef
]


def plain_advantages(
    config: GrpoConfig, data: Rollout, reference_log_probs: np.ndarray
) -> np.ndarray:
    """[N, T], one completion and one turn after the other."""
    mask, group_id = np.asarray(data.action_mask), np.asarray(data.group_id)
    rewards = np.asarray(data.rewards) - config.kl_reward_coef * (
        np.asarray(data.log_probs) - reference_log_probs
    )
    if config.overlong_buffer:
        limit, buffer = tiny.SAMPLING.max_new_tokens, config.overlong_buffer
        for row in np.flatnonzero(mask.any(1)):
            actions = np.flatnonzero(mask[row])
            # The output of a tool counts, as it does at the limit.
            penalty = (limit - buffer - (actions[-1] - actions[0] + 1)) / buffer
            rewards[row, actions[-1]] += min(0.0, max(-1.0, penalty))

    def against_peers(returns: dict[Any, float], peers: dict[Any, Any]) -> dict[Any, float]:
        """Compare the returns that have the same value in `peers`."""
        result = {}
        for key, value in returns.items():
            group = np.array([returns[other] for other in returns if peers[other] == peers[key]])
            every, center = np.array([*returns.values()]), value - group.mean()
            if len(group) == 1:
                result[key] = 0.0
                continue
            result[key] = {
                "group": center / (group.std(ddof=1) + 1e-6),
                "batch": center / (every.std(ddof=1) + 1e-6),
                "centered": center,
                "leave_one_out": value - (group.sum() - value) / (len(group) - 1),
            }[config.advantages]
        return result

    episodes, turns, columns, observations = {}, {}, {}, {}
    for row in np.flatnonzero(mask.any(1)):
        episodes[row] = rewards[row][mask[row]].sum()
        starts = [t for t in np.flatnonzero(mask[row]) if not mask[row, t - 1]]
        following = 0.0
        for k in reversed(range(len(starts))):
            stop = starts[k]
            while stop < mask.shape[1] and mask[row, stop]:
                stop += 1
            columns[row, k] = slice(starts[k], stop)
            following = rewards[row, columns[row, k]].sum() + config.gamma * following
            turns[row, k] = following
            before = np.flatnonzero(mask[row, : starts[k]])
            first = before[-1] + 1 if len(before) else 0
            observations[row, k] = (group_id[row], *np.asarray(data.tokens)[row, first : starts[k]])
    result = np.zeros(mask.shape)
    if config.credit != "turn":
        for row, value in against_peers(episodes, dict(enumerate(group_id))).items():
            result[row, mask[row]] = value
    if config.credit != "episode":
        same_turn = {(row, k): (group_id[row], k) for row, k in turns}
        peers = observations if config.credit == "step" else same_turn
        scale = config.step_coef if config.credit == "step" else 1.0
        for turn, value in against_peers(turns, peers).items():
            result[turn[0], columns[turn]] += scale * value
    for row in np.flatnonzero(mask.any(1)) if config.thought_weight != 1 else ():
        for place in range(int(mask[row].argmax()), mask.shape[1]):
            result[row, place] *= config.thought_weight
            if np.asarray(data.tokens)[row, place] == config.thought_end[0]:
                break
    return result


def plain_weights(config: GrpoConfig, data: Rollout) -> np.ndarray:
    """[N, T], one completion after the other."""
    mask = np.asarray(data.action_mask) & ~(
        np.asarray(data.truncated)[:, None] & config.mask_truncated
    )
    sequences = mask.any(1).sum()
    weights = np.zeros(mask.shape)
    for row, learned in zip(weights, mask, strict=True):
        row[learned] = {
            "token_mean": 1 / mask.sum(),
            "sequence_mean": 1 / (max(learned.sum(), 1) * sequences),
            "constant_length": 1 / (tiny.SAMPLING.max_new_tokens * sequences),
        }[config.loss_aggregation]
    if config.robust_radius:
        assert config.robust_ball == "kl"
        group_id, returns = np.asarray(data.group_id), (np.asarray(data.rewards) * mask).sum(1)
        groups = np.unique(group_id[mask.any(1)])
        means = [returns[(group_id == group) & mask.any(1)].mean() for group in groups]
        tilted = np.exp(-np.array(means) / config.robust_radius)
        for group, share in zip(groups, tilted / tilted.mean(), strict=True):
            weights[group_id == group] *= share
    return weights


def plain_observations(config: GrpoConfig, data: Rollout) -> np.ndarray:
    """[N, T], the coefficients of the log-probs between actions."""
    between = np.zeros(data.action_mask.shape)
    for row, mask in zip(between, np.asarray(data.action_mask), strict=True):
        actions = np.flatnonzero(mask)
        for place in range(*actions[[0, -1]]) if len(actions) else ():
            row[place] = not mask[place]
    return config.observation_coef * between / between.sum()


@functools.cache
def plain_policy() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """([N, T] log-probs, [N, T] entropies of the policy, [N, T] log-probs of the reference). Only
    within float64."""
    params, tokens = tiny.init_params(MODEL), off_policy().tokens
    every = tiny.plain_distributions(MODEL, params["policy"], tokens, tiny.SAMPLING.temperature)
    entropy = jnp.pad(-jnp.sum(jnp.exp(every) * every, -1), ((0, 0), (1, 0)))
    log_probs = [
        tiny.plain_log_probs(MODEL, params[role], tokens, tiny.SAMPLING.temperature)
        for role in tiny.ROLES
    ]
    return np.asarray(log_probs[0]), np.asarray(entropy), np.asarray(log_probs[1])


@pytest.mark.parametrize("name", unless_quick(pytest.mark.slow, GRPO))
def test_the_loss_is_its_formula(float64, name):
    config, data = CASES[name].config, off_policy()
    log_probs, entropy, reference = plain_policy()
    old = log_probs if config.recomputes else np.asarray(data.log_probs)
    importance = np.exp(old - np.asarray(data.behaviour_log_probs))
    weights, advantages = plain_weights(config, data), plain_advantages(config, data, reference)
    expected = -(plain_observations(config, data) * log_probs).sum()
    for n, t in np.argwhere(weights > 0):
        ratio, advantage = np.exp(log_probs[n, t] - old[n, t]), advantages[n, t]
        clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        loss = -min(ratio * advantage, clipped * advantage)
        if config.dual_clip and advantage < 0:
            loss = min(loss, config.dual_clip * -advantage)
        loss *= (
            1
            if config.importance_sampling_cap is None
            else min(importance[n, t], config.importance_sampling_cap)
        )
        log_ratio = reference[n, t] - log_probs[n, t]
        loss += config.kl_loss_coef * ratio * (np.exp(log_ratio) - 1 - log_ratio)
        expected += weights[n, t] * (loss - config.entropy_coef * entropy[n, t])
    np.testing.assert_allclose(battery(name).original[1].loss, expected, rtol=1e-6, atol=1e-8)


@functools.cache
def plain_policy_gradient() -> Callable[[Params, jax.Array, jax.Array], Params]:
    """jitted gradient of - sum coefficients x log-probs, a row a completion."""

    def loss(policy: Params, tokens: jax.Array, coefficients: jax.Array) -> jax.Array:
        return -jnp.sum(
            coefficients * tiny.plain_log_probs(MODEL, policy, tokens, tiny.SAMPLING.temperature)
        )

    return jax.jit(jax.grad(loss))


@pytest.mark.parametrize("name", unless_quick(pytest.mark.slow, REINFORCE))
def test_on_policy_the_ratio_is_one_and_the_gradient_reinforce(float64, name):
    params, config = tiny.init_params(MODEL), CASES[name].config
    data = tiny.sampled_near(tiny.rollout(), MODEL, params["policy"], noise=0.0)
    step = battery(name).step(battery(name).batch(data))
    assert abs(step.metrics["policy/ratio_min"] - 1) < 1e-6
    assert abs(step.metrics["policy/ratio_max"] - 1) < 1e-6
    assert step.metrics["policy/clip_low"] == step.metrics["policy/clip_high"] == 0
    reference = tiny.plain_log_probs(
        MODEL, params["reference"], data.tokens, tiny.SAMPLING.temperature
    )
    coefficients = plain_weights(config, data) * plain_advantages(
        config, data, np.asarray(reference)
    )
    coefficients += plain_observations(config, data)
    expected = plain_policy_gradient()(params["policy"], data.tokens, jnp.asarray(coefficients))
    for a, b in zip(*map(jax.tree.leaves, (step.gradients["policy"], expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max())


@pytest.mark.slow
def test_nash_md_has_the_gradient_of_trl(float64):
    """An earlier TRL, `NashMDTrainer._compute_losses`: the mean of beta sum_t x_t log pi_t
    - (P - 1/2) sum_t log pi_t, where x is the log-ratio to the reference, without a gradient."""
    params, config = tiny.init_params(MODEL), CASES["nash_md"].config
    data = tiny.sampled_near(tiny.rollout(), MODEL, params["policy"], noise=0.0)
    mask = np.asarray(data.action_mask)
    exists = mask.any(1)
    chance = np.random.default_rng(3).random(len(mask)) - 0.5
    last = mask & (np.cumsum(mask, 1) == mask.sum(1)[:, None])
    data = replace(data, rewards=jnp.asarray(np.where(last, chance[:, None], 0.0)))
    step = battery("nash_md").step(battery("nash_md").batch(data))
    log_probs, reference = (
        np.asarray(tiny.plain_log_probs(MODEL, params[name], data.tokens, 0.7))
        for name in ("policy", "reference")
    )
    coefficients = chance[:, None] - config.kl_loss_coef * (log_probs - reference)
    coefficients = np.where(mask, coefficients, 0.0) / exists.sum()
    expected = plain_policy_gradient()(params["policy"], data.tokens, jnp.asarray(coefficients))
    for a, b in zip(*map(jax.tree.leaves, (step.gradients["policy"], expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max())


@pytest.mark.slow
def test_the_cases_reach_every_branch_of_the_loss(float64):
    """Otherwise the battery would prove less than it says."""
    for name in GRPO:
        metrics = battery(name).original[1].metrics
        if CASES[name].config.recomputes:
            # Before the first update nothing is clipped; some weights are capped, and some are
            # below the cap.
            assert (
                0.9
                < metrics["policy/importance"]
                < CASES[name].config.importance_sampling_cap - 0.05
            ), name
            assert 0 < metrics["policy/importance_capped"] < 1, name
            continue
        assert metrics["policy/clip_low"] > 0.02, name
        assert metrics["policy/clip_high"] > 0.02, name
    data, config = off_policy(), CASES["batch_scaled"].config
    ratio = np.exp(plain_policy()[0] - np.asarray(data.log_probs))
    bad = plain_advantages(config, data, np.zeros(ratio.shape)) < 0
    assert np.mean(ratio[data.action_mask & bad] > config.dual_clip) > 0.05
    assert 2 < data.truncated.sum() < len(data.truncated)
