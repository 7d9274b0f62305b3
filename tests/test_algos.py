"""The battery that every algorithm passes. A new one is a row of CASES.

In float64 and on one packed shape, so that a case compiles its loss once for all proofs of its mathematics, and its
update step once for the proofs of its bits.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import tiny
from tpu_rl import training
from tpu_rl.algos import GrpoConfig, PpoConfig, SftConfig, ValuePretrainingConfig, grpo, ppo, sft, value_pretraining
from tpu_rl.algos.a_star_po import AStarPoConfig, a_star_po
from tpu_rl.algos.distill import DistillConfig, distill
from tpu_rl.algos.dpo import DpoConfig, dpo
from tpu_rl.algos.kto import KtoConfig, kto
from tpu_rl.algos.mini_llm import MiniLlmConfig, mini_llm
from tpu_rl.algos.process_reward import ProcessRewardConfig, process_reward
from tpu_rl.algos.q_sharp import QSharpConfig, q_sharp
from tpu_rl.algos.reinforce import ReinforceConfig, reinforce
from tpu_rl.algos.reward_model import RewardModelConfig, reward_model
from tpu_rl.algos.sentence_reward import SentenceRewardConfig, sentence_reward
from tpu_rl.critics import Critic
from tpu_rl.needs import RoleSpec
from tpu_rl.types import Algorithm, Demonstrations, Params, Role, Roles, Rollout, TrainState

MODEL = tiny.attention_model()


def off_policy(groups: tiny.Groups = tiny.GROUPS, columns: int | None = None) -> Rollout:
    """Completions whose old log-probs are far enough from the policy's for clipping to bite."""
    data = tiny.rollout(groups=groups, columns=columns)
    return tiny.sampled_near(data, MODEL, tiny.init_params(MODEL)["policy"], noise=0.4)


def texts(groups: tiny.Groups = tiny.GROUPS, columns: int | None = None) -> Demonstrations:
    return tiny.demonstrations(groups=groups, columns=columns)


def with_baseline() -> Rollout:
    """Completions whose prompts' worth is known."""
    data = off_policy()
    return data.replace(baseline=jnp.asarray(np.random.default_rng(1).normal(size=5)[np.asarray(data.group_id)]))


class Case(NamedTuple):
    factory: Callable[[Any, Roles, Any], Algorithm]
    config: Any
    data: Callable[[], Any]
    groups: tiny.Groups = tiny.GROUPS
    """Of the data."""
    learned: Literal["weights", "actions", "ends", "ends and starts"] = "weights"
    """Which tokens have a gradient: those with a weight, or (sequence-level losses) all that are actions, or those that
    the batch names as its ends, or with them the slots that it names as their starts."""
    reads: Literal["previous", "own"] = "previous"
    """Whose hidden state a learned token's gradient reaches: that of the token before it, or its own."""


CASES = {
    "sft": Case(sft, SftConfig(), texts),
    "grpo": Case(grpo, GrpoConfig(weights="sequence_mean"), off_policy),
    "grpo_decoupled": Case(grpo, GrpoConfig(old_log_probs="recomputed", importance_cap=1.2), off_policy),
    "dr_grpo": Case(grpo, GrpoConfig(advantages="centred", weights="constant_length"), off_policy),
    "rloo": Case(grpo, GrpoConfig(advantages="leave_one_out", kl_reward_coef=0.1), off_policy),
    "dapo": Case(grpo, GrpoConfig(clip_high=0.28, overlong_buffer=3, mask_truncated=True), off_policy),
    "batch_scaled": Case(grpo, GrpoConfig(advantages="batch", dual_clip=1.1), off_policy),
    "kl_and_entropy": Case(grpo, GrpoConfig(kl_loss_coef=0.1, entropy_coef=0.01), off_policy),
    "gkd": Case(distill, DistillConfig("t", beta=0.3), tiny.completions),
    "gkd_top_k": Case(distill, DistillConfig("t", beta=0.0, top_k=3, weights="token_mean"), tiny.completions),
    "extrapolated": Case(distill, DistillConfig("t", target="extrapolated", alpha=2.0), tiny.completions),
    "align_distil": Case(
        distill,
        DistillConfig("t", "r", "contrastive", alpha=1.5, adaptive=True, tvd_half=False, beta0=0.1),
        tiny.completions,
    ),
    "mini_llm": Case(mini_llm, MiniLlmConfig("t"), off_policy),
    "mini_llm_by_sampling": Case(mini_llm, MiniLlmConfig("t", 0.9, False, single_step=False), off_policy),
    "ppo": Case(ppo, PpoConfig(), off_policy),
    "ppo_shared_trunk": Case(
        ppo, PpoConfig(Critic(trunk="shared", clip=0.05, gamma=0.9), entropy_coef=0.01, whiten=False), off_policy
    ),
    "ppo_kl_control": Case(
        ppo, PpoConfig(kl_reward_coef=0.1, kl_loss_coef=0.1, kl_target=0.5, kl_horizon=2.0), off_policy
    ),
    "vc_ppo": Case(ppo, PpoConfig(Critic(lam=1.0, clip=None)), off_policy),
    "vapo": Case(ppo, PpoConfig(Critic(lam=1.0), lam_alpha=0.5, clip_high=0.28, positive_coef=0.1), off_policy),
    "reinforce_pp": Case(reinforce, ReinforceConfig(kl_reward_coef=0.1), off_policy),
    "reinforce_pp_baseline": Case(reinforce, ReinforceConfig("group", kl_loss_coef=0.1, gamma=0.9), off_policy),
    "remax": Case(
        reinforce, ReinforceConfig("greedy", whiten=False, weights="constant_length", entropy_coef=0.01), with_baseline
    ),
    "a_star_po": Case(a_star_po, AStarPoConfig(beta=0.3), with_baseline),
    "value_pretraining": Case(value_pretraining, ValuePretrainingConfig(), off_policy),
    "bradley_terry": Case(reward_model, RewardModelConfig(), tiny.pairs, tiny.PAIRS, "ends", "own"),
    "reward_ensemble": Case(
        reward_model,
        RewardModelConfig(heads=2, trunks=2, penalty=0.5, bootstrap=True, centring_coef=0.1),
        tiny.pairs, tiny.PAIRS, "ends", "own",
    ),
    "robust_reward": Case(
        reward_model, RewardModelConfig(robust_radius=0.3, centring_coef=0.01), tiny.pairs, tiny.PAIRS, "ends", "own"
    ),
    "sentence_reward": Case(
        sentence_reward, SentenceRewardConfig((3, 7), centring_coef=0.01),
        tiny.pairs, tiny.PAIRS, "ends and starts", "own",
    ),
    "sentence_sum": Case(
        sentence_reward, SentenceRewardConfig((3, 7), "sum"), tiny.pairs, tiny.PAIRS, "ends and starts", "own"
    ),
    "q_sharp": Case(q_sharp, QSharpConfig(), tiny.q_examples, reads="own"),
    "q_sharp_by_token": Case(q_sharp, QSharpConfig(q_type="q", weights="token_mean"), tiny.q_examples),
    "q_sharp_histogram": Case(
        q_sharp,
        QSharpConfig(q_type="q", distribution="histogram", support=(0, 1, 3), labels="two_hot"),
        tiny.q_examples,
    ),
    "q_sharp_single": Case(
        q_sharp, QSharpConfig(distribution="squared_error", prefixes="single"), tiny.q_examples, reads="own"
    ),
    "process_reward": Case(process_reward, ProcessRewardConfig(), tiny.q_examples, reads="own"),
    "process_by_completion": Case(
        process_reward, ProcessRewardConfig(weights="sequence_mean"), tiny.q_examples, reads="own"
    ),
}  # fmt: skip
CASES |= {
    name: Case(dpo, config, tiny.pairs, tiny.PAIRS, "actions")
    for name, config in {
        "dpo": DpoConfig(),
        "conservative_dpo": DpoConfig(label_smoothing=0.1),
        "robust_dpo": DpoConfig(loss="robust", label_smoothing=0.1),
        "reverse_rpo": DpoConfig(reverse=True, rpo_coef=0.5),
        "online_dpo": DpoConfig(pairs="policy", loss="sigmoid_norm"),
        "tr_dpo": DpoConfig(reference_mix=0.6),  # its reference does not move in the few steps of the battery
        "ipo": DpoConfig(loss="ipo"),
        "hinge": DpoConfig(loss="hinge", f_divergence="forward_kl"),
        "simpo": DpoConfig(loss="simpo", beta=2.0),
        "orpo": DpoConfig(loss="orpo"),
        "exo": DpoConfig(loss="exo", label_smoothing=0.1, f_divergence="alpha"),
        "discopop": DpoConfig(loss="discopop", f_divergence="js"),
        "apo_zero": DpoConfig(loss="apo_zero"),
        "apo_down": DpoConfig(loss="apo_down"),
        "nca": DpoConfig(loss="nca"),
        "sppo": DpoConfig(loss="sppo"),
    }.items()
}
CASES |= {
    "worst_case_dpo": Case(dpo, DpoConfig(robust_radius=0.1), tiny.pairs, tiny.PAIRS, "actions"),
    "kto": Case(kto, KtoConfig(good_weight=1.5), tiny.pairs, tiny.PAIRS, "actions"),
    "kto_apo_zero": Case(kto, KtoConfig(loss="apo_zero", bad_weight=1.5), tiny.pairs, tiny.PAIRS, "actions"),
    "bco": Case(kto, KtoConfig(loss="bco"), tiny.pairs, tiny.PAIRS, "actions"),
}
every_case = pytest.mark.parametrize("name", CASES)


# --- the mathematics, in float64 -----------------------------------------------------------------------------------


@pytest.fixture
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def probed_roles(specs: dict[str, RoleSpec]) -> Roles:
    """The hidden states of the first role that trains, and of heads on its trunk, plus params["probe"] [R, S, D],
    whose gradient shows which states learn."""
    roles = dict(tiny.cast(specs)[0])
    probed = product(specs)
    trunk = roles[probed].hidden
    for name, spec in specs.items():
        if name == probed or spec.trunk_of == probed:
            roles[name] = Role(lambda params, rows: trunk(params, rows) + params["probe"], roles[name].logits)
    return roles


def product(specs: dict[str, RoleSpec]) -> str:
    """The first role that trains."""
    return next(name for name, spec in specs.items() if spec.trainable)


def probed_params(name: str) -> Params:
    probe = jnp.zeros((tiny.ROWS["micro_batch_rows"], tiny.ROWS["row_length"], 8))
    return tiny.cast(CASES[name].config.roles)[1] | {"probe": probe}


class Compiled(NamedTuple):
    algorithm: Algorithm
    loss: Any
    """jitted (params, micro-batch) -> ((loss, metrics), gradients of every role and the probe)."""


@functools.cache
def compiled(name: str) -> Compiled:
    case = CASES[name]
    algorithm = case.factory(case.config, probed_roles(case.config.roles), tiny.SAMPLING)
    return Compiled(algorithm, jax.jit(jax.value_and_grad(algorithm.loss, has_aux=True), compiler_options=tiny.QUICKLY))


def batch_of(name: str, data: Any, **cut: int) -> Any:
    """The [K, R, S] batch of the case's only optimizer step."""
    algorithm = compiled(name).algorithm
    params = probed_params(name)
    return training.minibatch(
        algorithm.make_batch(tiny.experience(data, **cut), params, algorithm.init_state(params))[0], 0
    )


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
    results = jax.device_get([compiled(name).loss(params, micro_batch) for micro_batch in micro_batches])
    metrics = jax.tree.map(lambda *x: np.stack(x), *[metrics for (_, metrics), _ in results])
    gradients = [gradient for _, gradient in results]
    return Step(
        sum(float(loss) for (loss, _), _ in results),
        {key: float(value) for key, value in training.reduce_metrics(training.add_up(metrics)).items()},
        jax.tree.map(lambda *x: sum(x), *[{role: g[role] for role in CASES[name].config.roles} for g in gradients]),
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
        assert all(leaf.any() == spec.trainable for leaf in jax.tree.leaves(step.gradients[role])), role


@every_case
def test_nothing_under_the_mask_is_read(float64, name):
    data = CASES[name].data()
    per_token = {
        key: x
        for key, x in vars(data).items()
        if x is not None and x.ndim == 2 and jnp.issubdtype(x.dtype, jnp.floating)
    }
    spoiled = data.replace(**{key: jnp.where(data.action_mask, x, jnp.nan) for key, x in per_token.items()})
    # What stands after a row's last action is in no packed row.
    later = np.flip(np.logical_or.accumulate(np.flip(np.asarray(data.action_mask), 1), 1), 1) == 0
    spoiled = spoiled.replace(tokens=jnp.where(later, tiny.VOCABULARY - 1, data.tokens))
    jax.tree.map(np.testing.assert_array_equal, step_of(name, batch_of(name, spoiled)), original(name)[1])


@every_case
def test_padding_changes_nothing(float64, name):
    """More columns, more rows without actions, more packed rows."""
    data = CASES[name].data()
    wider = jax.tree.map(lambda x: np.pad(x, [(0, 3)] + [(0, 5)] * (x.ndim > 1 and x.shape[1] > 2)), data)
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
    """Central differences along random directions; the batch is constant: no gradient flows through make_batch."""
    batch, params = original(name)[0], probed_params(name)
    trained = {role for role, spec in CASES[name].config.roles.items() if spec.trainable}
    gradients = {role: original(name)[1].gradients[role] for role in trained}
    start = {role: params[role] for role in trained}
    random = np.random.default_rng(0)
    for _ in range(3):
        direction = jax.tree.map(lambda x: random.normal(size=x.shape), start)

        def moved(by: float, direction: Params = direction) -> float:
            return step_of(name, batch, params | jax.tree.map(lambda x, d: x + by * d, start, direction)).loss

        slope = (moved(1e-5) - moved(-1e-5)) / 2e-5
        products = jax.tree.map(lambda g, d: np.sum(g * d), gradients, direction)
        np.testing.assert_allclose(sum(jax.tree.leaves(products)), slope, rtol=1e-6, atol=1e-8)


# --- the bits, in the update step of a run -------------------------------------------------------------------------


OPTIMIZER = optax.sgd(0.1, momentum=0.9)


@functools.cache
def update_step(name: str) -> tuple[Algorithm, training.UpdateStep]:
    case = CASES[name]
    algorithm = case.factory(case.config, tiny.cast(case.config.roles)[0], tiny.SAMPLING)
    return algorithm, training.make_update_step(algorithm, OPTIMIZER, lambda step: 0.1, trainable(name))


def trainable(name: str) -> training.Trainable:
    roles = CASES[name].config.roles
    return lambda path: roles[path.partition("/")[0]].trainable


@every_case
def test_resuming_is_no_interruption_and_frozen_roles_keep_their_bits(name):
    algorithm, update = update_step(name)
    params = tiny.cast(CASES[name].config.roles)[1]
    batch, _ = algorithm.make_batch(tiny.experience(CASES[name].data()), params, algorithm.init_state(params))
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
        moved = jax.tree.map(lambda new, old: np.abs(new - old).max(), straight.params[role], start.params[role])
        if spec.trainable:
            assert min(jax.tree.leaves(moved)) > 1e-4, role
        else:
            assert max(jax.tree.leaves(moved)) == 0, role
    assert update._cache_size() == 1


# --- GRPO against its formula, a completion at a time ---------------------------------------------------------------

GRPO = [name for name, case in CASES.items() if case.factory is grpo]
REINFORCE = [name for name in GRPO if not CASES[name].config.kl_loss_coef]


def plain_advantages(config: GrpoConfig, data: Rollout, reference_log_probs: np.ndarray) -> np.ndarray:
    """[N], one completion after the other."""
    mask, group_id = np.asarray(data.action_mask), np.asarray(data.group_id)
    rewards = np.asarray(data.rewards) - config.kl_reward_coef * (np.asarray(data.log_probs) - reference_log_probs)
    returns = np.array([reward[row].sum() for reward, row in zip(rewards, mask, strict=True)])
    if config.overlong_buffer:
        limit, buffer = tiny.SAMPLING.max_new_tokens, config.overlong_buffer
        returns += [min(0.0, max(-1.0, (limit - buffer - row.sum()) / buffer)) for row in mask]
    scored = mask.any(1)
    result = np.zeros(len(mask))
    for n in np.flatnonzero(scored):
        group = returns[scored & (group_id == group_id[n])]
        others = returns[scored & (group_id == group_id[n]) & (np.arange(len(mask)) != n)]
        result[n] = {
            "group": (returns[n] - group.mean()) / (group.std(ddof=1) + 1e-6),
            "batch": (returns[n] - group.mean()) / (returns[scored].std(ddof=1) + 1e-6),
            "centred": returns[n] - group.mean(),
            "leave_one_out": returns[n] - others.mean(),
        }[config.advantages]
    return result


def plain_weights(config: GrpoConfig, data: Rollout) -> np.ndarray:
    """[N, T], one completion after the other."""
    mask = np.asarray(data.action_mask) & ~(np.asarray(data.truncated)[:, None] & config.mask_truncated)
    sequences = mask.any(1).sum()
    weights = np.zeros(mask.shape)
    for row, learned in zip(weights, mask, strict=True):
        row[learned] = {
            "token_mean": 1 / mask.sum(),
            "sequence_mean": 1 / (max(learned.sum(), 1) * sequences),
            "constant_length": 1 / (tiny.SAMPLING.max_new_tokens * sequences),
        }[config.weights]
    return weights


@functools.cache
def plain_policy() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """([N, T] log-probs, [N, T] entropies of the policy, [N, T] log-probs of the reference). Only within float64."""
    params, tokens = tiny.init_params(MODEL), off_policy().tokens
    every = tiny.plain_distributions(MODEL, params["policy"], tokens, tiny.SAMPLING.temperature)
    entropy = jnp.pad(-jnp.sum(jnp.exp(every) * every, -1), ((0, 0), (1, 0)))
    log_probs = [tiny.plain_log_probs(MODEL, params[role], tokens, tiny.SAMPLING.temperature) for role in tiny.ROLES]
    return np.asarray(log_probs[0]), np.asarray(entropy), np.asarray(log_probs[1])


@pytest.mark.parametrize("name", GRPO)
def test_the_loss_is_its_formula(float64, name):
    config, data = CASES[name].config, off_policy()
    log_probs, entropy, reference = plain_policy()
    old = log_probs if config.old_log_probs == "recomputed" else np.asarray(data.log_probs)
    importance = np.exp(old - np.asarray(data.behaviour_log_probs))
    weights, advantages = plain_weights(config, data), plain_advantages(config, data, reference)
    expected = 0.0
    for n, t in np.argwhere(weights > 0):
        ratio, advantage = np.exp(log_probs[n, t] - old[n, t]), advantages[n]
        clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        loss = -min(ratio * advantage, clipped * advantage)
        if config.dual_clip and advantage < 0:
            loss = min(loss, config.dual_clip * -advantage)
        loss *= 1 if config.importance_cap is None else min(importance[n, t], config.importance_cap)
        log_ratio = reference[n, t] - log_probs[n, t]
        loss += config.kl_loss_coef * ratio * (np.exp(log_ratio) - 1 - log_ratio)
        expected += weights[n, t] * (loss - config.entropy_coef * entropy[n, t])
    np.testing.assert_allclose(original(name)[1].loss, expected, rtol=1e-6, atol=1e-8)


@functools.cache
def plain_policy_gradient() -> Callable[[Params, jax.Array, jax.Array], Params]:
    """jitted gradient of - sum coefficients x log-probs, a row a completion."""

    def loss(policy: Params, tokens: jax.Array, coefficients: jax.Array) -> jax.Array:
        return -jnp.sum(coefficients * tiny.plain_log_probs(MODEL, policy, tokens, tiny.SAMPLING.temperature))

    return jax.jit(jax.grad(loss))


@pytest.mark.parametrize("name", REINFORCE)
def test_on_policy_the_ratio_is_one_and_the_gradient_reinforce(float64, name):
    params, config = tiny.init_params(MODEL), CASES[name].config
    data = tiny.sampled_near(tiny.rollout(), MODEL, params["policy"], noise=0.0)
    step = step_of(name, batch_of(name, data))
    assert abs(step.metrics["policy/ratio_min"] - 1) < 1e-6
    assert abs(step.metrics["policy/ratio_max"] - 1) < 1e-6
    assert step.metrics["policy/clip_low"] == step.metrics["policy/clip_high"] == 0
    reference = tiny.plain_log_probs(MODEL, params["reference"], data.tokens, tiny.SAMPLING.temperature)
    coefficients = plain_weights(config, data) * plain_advantages(config, data, np.asarray(reference))[:, None]
    expected = plain_policy_gradient()(params["policy"], data.tokens, jnp.asarray(coefficients))
    for a, b in zip(*map(jax.tree.leaves, (step.gradients["policy"], expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max())


def test_the_cases_reach_every_branch_of_the_loss(float64):
    """Otherwise the battery would prove less than it says."""
    for name in GRPO:
        metrics = original(name)[1].metrics
        if CASES[name].config.old_log_probs == "recomputed":
            # Before the first update nothing is clipped; some weights are capped, and some are below the cap.
            assert 0.9 < metrics["policy/importance"] < CASES[name].config.importance_cap - 0.05, name
            continue
        assert metrics["policy/clip_low"] > 0.02, name
        assert metrics["policy/clip_high"] > 0.02, name
    data, config = off_policy(), CASES["batch_scaled"].config
    ratio = np.exp(plain_policy()[0] - np.asarray(data.log_probs))
    bad = plain_advantages(config, data, np.zeros(ratio.shape))[:, None] < 0
    assert np.mean(ratio[data.action_mask & bad] > config.dual_clip) > 0.05
    assert 2 < data.truncated.sum() < len(data.truncated)
