"""The battery that every algorithm passes. A new one is a row of CASES.

In float64 and on one packed shape, so that a case compiles its loss once for all proofs of its
mathematics, and its update step once for the proofs of its bits.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.fixtures import tiny
from tests.fixtures.algorithm_cases import CASES, MODEL, QUICK, off_policy, unless_quick
from tpu_rl.algorithm_spec import RoleSpec
from tpu_rl.algos import GrpoConfig, grpo
from tpu_rl.train import update_step as training
from tpu_rl.types import Algorithm, Experience, Params, Role, Roles, Rollout, TrainState

every_case = pytest.mark.parametrize("name", unless_quick(pytest.mark.slow, CASES))
# Tests that compile programs of their own.
every_case_at_night = pytest.mark.parametrize("name", unless_quick(pytest.mark.nightly, CASES))


def test_every_algorithm_has_a_quick_case():
    assert {case.factory for case in CASES.values()} == {CASES[name].factory for name in QUICK}


# --- the mathematics, in float64 ---


@pytest.fixture
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def probed_roles(specs: dict[str, RoleSpec]) -> Roles:
    """The hidden states of the first role that trains, and of heads on its trunk, plus
    params["probe"] [R, S, D], whose gradient shows which states learn."""
    roles = dict(tiny.cast(specs)[0])
    probed = product(specs)
    trunk = roles[probed].hidden
    for name, spec in specs.items():
        if name == probed or spec.trunk_of == probed:
            roles[name] = Role(
                lambda params, rows: trunk(params, rows) + params["probe"], roles[name].logits
            )
    return roles


def product(specs: dict[str, RoleSpec]) -> str:
    """The first role that trains."""
    return next(name for name, spec in specs.items() if spec.trainable)


@functools.cache
def probed_params(name: str) -> Params:
    """Only within float64."""
    probe = jnp.zeros((tiny.ROWS["micro_batch_rows"], tiny.ROWS["row_length"], 8))
    return tiny.cast(CASES[name].config.roles)[1] | {"probe": probe}


class Compiled(NamedTuple):
    make_batch: Any
    """jitted (experience, params) -> batch."""
    loss: Any
    """jitted (params, micro-batch) -> ((loss, metrics), gradients of every role and the probe)."""


@functools.cache
def compiled(name: str) -> Compiled:
    case = CASES[name]
    algorithm = case.factory(case.config, probed_roles(case.config.roles), tiny.SAMPLING)

    def make_batch(experience: Experience, params: Params) -> Any:
        return algorithm.make_batch(experience, params, algorithm.init_state(params))[0]

    return Compiled(
        jax.jit(make_batch, compiler_options=tiny.QUICKLY),
        jax.jit(jax.value_and_grad(algorithm.loss, has_aux=True), compiler_options=tiny.QUICKLY),
    )


def batch_of(name: str, data: Any, **cut: int) -> Any:
    """The [K, R, S] batch of the case's only optimizer step."""
    batch = compiled(name).make_batch(tiny.experience(data, **cut), probed_params(name))
    return training.minibatch(jax.device_get(batch), 0)


class Step(NamedTuple):
    loss: float
    metrics: dict[str, float]
    gradients: Params
    probes: np.ndarray
    """[K, R, S]: largest gradient of each slot's hidden state."""


def step_of(name: str, batch: Any, params: Params | None = None) -> Step:
    """One optimizer step's loss, metrics and gradients, a micro-batch at a time."""
    params = probed_params(name) if params is None else params
    micro_batches = [training.minibatch(batch, k) for k in range(len(batch.rows.tokens))]
    results = jax.device_get(
        [compiled(name).loss(params, micro_batch) for micro_batch in micro_batches]
    )
    metrics = jax.tree.map(lambda *x: np.stack(x), *[metrics for (_, metrics), _ in results])
    gradients = [gradient for _, gradient in results]
    return Step(
        sum(float(loss) for (loss, _), _ in results),
        {
            key: float(value)
            for key, value in training.reduce_metrics(training.merge_metrics(metrics)).items()
        },
        jax.tree.map(
            lambda *x: sum(x),
            *[{role: g[role] for role in CASES[name].config.roles} for g in gradients],
        ),
        np.stack([np.abs(g["probe"]).max(-1) for g in gradients]),
    )


def assert_close(actual: Step, expected: Step) -> None:
    assert abs(expected.loss) > 1e-4
    np.testing.assert_allclose(actual.loss, expected.loss, rtol=1e-9)
    for a, b in zip(*map(jax.tree.leaves, (actual.gradients, expected.gradients)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-9 * max(np.abs(b).max(), 1e-12))
    assert actual.metrics.keys() == expected.metrics.keys()
    for key, value in expected.metrics.items():
        np.testing.assert_allclose(actual.metrics[key], value, rtol=1e-5, atol=1e-6, err_msg=key)


@functools.cache
def original(name: str) -> tuple[Any, Step]:
    """(batch, step) of the case's data as they are. Only within float64."""
    batch = batch_of(name, CASES[name].data())
    return batch, step_of(name, batch)


@every_case
def test_only_predictions_of_learned_tokens_have_a_gradient(float64, name):
    data = CASES[name].data()
    batch, step = original(name)
    _, layout = tiny.experience(data)
    actions = np.asarray(layout.pack(data.action_mask))[0]
    learned = np.any([np.asarray(weights) > 0 for weights in batch.weights.values()], axis=0)
    assert np.all(learned <= actions)
    if CASES[name].learned == "actions":
        learned = actions
    if CASES[name].learned.startswith("ends"):
        learned = np.asarray(batch.ends)
    read = learned
    if CASES[name].learned == "ends and starts":
        read = learned.copy()
        for k, r, s in np.argwhere(learned):
            read[k, r, batch.starts[k, r, s]] = True
    if CASES[name].reads == "previous":
        read = np.zeros_like(learned)
        for k, r, s in np.argwhere(learned):
            read[k, r, layout.previous[0, k, r, s]] = True
    assert not step.probes[~read].any()
    assert np.mean(step.probes[read] > 0) > 0.3
    # Roles that do not train are read without gradient.
    for role, spec in CASES[name].config.roles.items():
        assert all(
            leaf.any() == spec.trainable for leaf in jax.tree.leaves(step.gradients[role])
        ), role


@every_case
def test_nothing_under_the_mask_is_read(float64, name):
    data = CASES[name].data()
    per_token = {
        key: x
        for key, x in vars(data).items()
        if x is not None and x.ndim == 2 and jnp.issubdtype(x.dtype, jnp.floating)
    }
    spoiled = data.replace(
        **{key: jnp.where(data.action_mask, x, jnp.nan) for key, x in per_token.items()}
    )
    # What stands after a row's last action is in no packed row.
    later = np.flip(np.logical_or.accumulate(np.flip(np.asarray(data.action_mask), 1), 1), 1) == 0
    spoiled = spoiled.replace(tokens=jnp.where(later, tiny.VOCABULARY - 1, data.tokens))
    jax.tree.map(
        np.testing.assert_array_equal, step_of(name, batch_of(name, spoiled)), original(name)[1]
    )


@every_case_at_night
def test_padding_changes_nothing(float64, name):
    """More columns, more rows without actions, more packed rows."""
    data = CASES[name].data()
    wider = jax.tree.map(
        lambda x: np.pad(x, [(0, 3)] + [(0, 5)] * (x.ndim > 1 and x.shape[1] > 2)), data
    )
    wider = wider.replace(group_id=np.concatenate([data.group_id, [90, 91, 91]]).astype(np.int32))
    wider = jax.tree.map(jnp.asarray, wider)
    padded = batch_of(name, wider, row_limit=8)
    assert padded.rows.tokens.shape[0] == 4
    assert_close(step_of(name, padded), original(name)[1])


@every_case
def test_the_order_of_groups_changes_nothing(float64, name):
    data = CASES[name].data()
    starts = np.cumsum([0] + [len(completions) for _, completions in CASES[name].groups])
    order = np.concatenate([np.arange(starts[g], starts[g + 1]) for g in (3, 1, 4, 0, 2)])
    permuted = jax.tree.map(lambda x: x[order], data)
    assert_close(step_of(name, batch_of(name, permuted)), original(name)[1])


@every_case
def test_the_gradient_is_that_of_the_loss(float64, name):
    """Central differences along random directions; the batch is constant: no gradient flows through
    make_batch."""
    if name == "cispo":
        pytest.skip("by design its gradient stops at the ratio; test_surrogates has TRL's gradient")
    batch, params = original(name)[0], probed_params(name)
    trained = {role for role, spec in CASES[name].config.roles.items() if spec.trainable}
    gradients = {role: original(name)[1].gradients[role] for role in trained}
    start = {role: params[role] for role in trained}
    random = np.random.default_rng(0)
    for _ in range(3):
        direction = jax.tree.map(lambda x: random.normal(size=x.shape), start)

        def moved(by: float, direction: Params = direction) -> float:
            return step_of(
                name, batch, params | jax.tree.map(lambda x, d: x + by * d, start, direction)
            ).loss

        slope = (moved(1e-5) - moved(-1e-5)) / 2e-5
        products = jax.tree.map(lambda g, d: np.sum(g * d), gradients, direction)
        np.testing.assert_allclose(sum(jax.tree.leaves(products)), slope, rtol=1e-6, atol=1e-8)


# --- the bits, in the update step of a run ---


OPTIMIZER = optax.sgd(0.1, momentum=0.9)


@functools.cache
def update_step(name: str) -> tuple[Algorithm, training.UpdateStep]:
    case = CASES[name]
    algorithm = case.factory(case.config, tiny.cast(case.config.roles)[0], tiny.SAMPLING)
    return algorithm, training.make_update_step(
        algorithm, OPTIMIZER, lambda step: 0.1, trainable(name)
    )


def trainable(name: str) -> training.Trainable:
    roles = CASES[name].config.roles
    return lambda path: roles[path.partition("/")[0]].trainable


@every_case_at_night
def test_resuming_is_no_interruption_and_frozen_roles_keep_their_bits(name):
    algorithm, update = update_step(name)
    params = tiny.cast(CASES[name].config.roles)[1]
    make_batch = training.make_batch_step(algorithm, compiler_options=tiny.QUICKLY)
    batch, _ = make_batch(tiny.experience(CASES[name].data()), params, algorithm.init_state(params))
    batch = training.minibatch(batch, 0)

    def on_disk(state: TrainState) -> TrainState:
        return jax.tree.map(np.array, state)

    def after(steps: int, saved: TrainState) -> TrainState:
        state = jax.tree.map(jnp.array, saved)
        for _ in range(steps):
            state, _ = update(state, batch)
        return on_disk(state)

    start = on_disk(training.init_train_state(params, algorithm, OPTIMIZER, trainable(name)))
    straight = after(4, start)
    resumed = after(2, after(2, start))
    jax.tree.map(np.testing.assert_array_equal, resumed, straight)
    for role, spec in CASES[name].config.roles.items():
        moved = jax.tree.map(
            lambda new, old: np.abs(new - old).max(), straight.params[role], start.params[role]
        )
        if spec.trainable:
            assert min(jax.tree.leaves(moved)) > 1e-4, role
        else:
            assert max(jax.tree.leaves(moved)) == 0, role
    assert update._cache_size() == 1


# --- GRPO against its formula, a completion at a time ---


GRPO = [name for name, case in CASES.items() if case.factory is grpo]
REINFORCE = [name for name in GRPO if not CASES[name].config.kl_loss_coef]


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
            penalty = (limit - buffer - mask[row].sum()) / buffer
            rewards[row, np.flatnonzero(mask[row])[-1]] += min(0.0, max(-1.0, penalty))

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
    return weights


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
    old = log_probs if config.old_log_probs == "recomputed" else np.asarray(data.log_probs)
    importance = np.exp(old - np.asarray(data.behaviour_log_probs))
    weights, advantages = plain_weights(config, data), plain_advantages(config, data, reference)
    expected = 0.0
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
    np.testing.assert_allclose(original(name)[1].loss, expected, rtol=1e-6, atol=1e-8)


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
    step = step_of(name, batch_of(name, data))
    assert abs(step.metrics["policy/ratio_min"] - 1) < 1e-6
    assert abs(step.metrics["policy/ratio_max"] - 1) < 1e-6
    assert step.metrics["policy/clip_low"] == step.metrics["policy/clip_high"] == 0
    reference = tiny.plain_log_probs(
        MODEL, params["reference"], data.tokens, tiny.SAMPLING.temperature
    )
    coefficients = plain_weights(config, data) * plain_advantages(
        config, data, np.asarray(reference)
    )
    expected = plain_policy_gradient()(params["policy"], data.tokens, jnp.asarray(coefficients))
    for a, b in zip(*map(jax.tree.leaves, (step.gradients["policy"], expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max())


@pytest.mark.slow
def test_the_cases_reach_every_branch_of_the_loss(float64):
    """Otherwise the battery would prove less than it says."""
    for name in GRPO:
        metrics = original(name)[1].metrics
        if CASES[name].config.old_log_probs == "recomputed":
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
