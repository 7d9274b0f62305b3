"""The PPO family against exact oracles: problems whose completions can all be written down, and
chains of states.

Instead of sampling, every completion is in the batch, weighted by its probability: the loss's
gradient is then the exact expectation of what the algorithm does.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixtures import tiny_data
from tpu_rl.algos import (
    AStarPoConfig,
    PpoConfig,
    ReinforceConfig,
    ValuePretrainingConfig,
    a_star_po,
    ppo,
    reinforce,
    value_pretraining,
)
from tpu_rl.errors import InputError
from tpu_rl.losses import advantages
from tpu_rl.losses.value_loss import Critic
from tpu_rl.proofs import tiny
from tpu_rl.train import packing
from tpu_rl.types import Algorithm, Array, Experience, Params, Rollout, Sampling

END, A, B = range(3)
TREE = [(END,), *itertools.product((A, B), (END, A, B))]
"""Every completion of at most two tokens: one of them shorter than the rest."""
MODEL = tiny_data.tabular_model(vocabulary=3, positions=3)
ROLES = {name: tiny.role(MODEL, name) for name in ("policy", "reference", "value")}
"""A tabular critic: V of the state before a token is the first logit there."""
SAMPLING = Sampling(temperature=1.0, max_new_tokens=1)
COUNT = len(TREE)
TOKENS = np.array(
    [(A, *completion, *(END,) * (2 - len(completion))) for completion in TREE], np.int32
)
MASK = np.array([[0 < t <= len(completion) for t in range(3)] for completion in TREE])
LAST = MASK & ~np.pad(MASK, ((0, 0), (0, 1)))[:, 1:]
REWARDS = np.random.default_rng(1).normal(size=COUNT)
LAYOUT = packing.assign_slots(MASK, np.arange(COUNT), row_length=3, micro_batch_rows=COUNT)


@pytest.fixture
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def first_params() -> Params:
    """The policy is not the reference, and the critic knows nothing."""
    return tiny.init_params(MODEL) | {"value": MODEL.init(jax.random.key(7))}


def token_log_probs(policy: Params) -> Array:
    """[COUNT, 3]"""
    return jnp.where(MASK, tiny.plain_log_probs(MODEL, policy, jnp.asarray(TOKENS)), 0.0)


def objective(policy: Params, reference: Params, kl_coef: float) -> Array:
    """E[reward] - kl_coef KL(policy || reference), from the probabilities of all completions."""
    log_p, log_r = token_log_probs(policy).sum(-1), token_log_probs(reference).sum(-1)
    return jnp.sum(jnp.exp(log_p) * (REWARDS - kl_coef * (log_p - log_r)))


def exact_gradient(params: Params, kl_coef: float) -> Array:
    """Of the objective, with respect to the policy's table."""
    gradient = jax.jit(jax.grad(objective), static_argnums=2)
    return gradient(params["policy"], params["reference"], kl_coef)["table"]


def rollout(policy: Params, baseline: Array | None = None) -> Rollout:
    """Every completion once."""
    log_probs = token_log_probs(policy)
    return Rollout(
        tokens=jnp.asarray(TOKENS),
        action_mask=jnp.asarray(MASK),
        log_probs=log_probs,
        behaviour_log_probs=log_probs,
        rewards=jnp.asarray(np.where(LAST, REWARDS[:, None], 0.0)),
        group_id=jnp.arange(COUNT, dtype=jnp.int32),
        policy_step=jnp.zeros(COUNT, jnp.int32),
        birth_key=jnp.zeros((COUNT, 2), jnp.uint32),
        truncated=jnp.zeros(COUNT, bool),
        scored=jnp.ones(COUNT, bool),
        baseline=baseline,
    )


def expected_gradient(
    algorithm: Algorithm, params: Params, baseline: Array | None = None
) -> Params:
    """Of all roles, where each completion counts as often as the policy samples it: sums over its
    tokens."""
    data = rollout(params["policy"], baseline)
    batch, _ = algorithm.make_batch(Experience(data, LAYOUT), params, algorithm.init_state(params))
    probability = LAYOUT.pack(jnp.where(MASK, jnp.exp(data.log_probs.sum(-1))[:, None], 0.0))
    batch = jax.tree.map(
        lambda x: x[0, 0], batch.replace(weights=dict.fromkeys(batch.weights, probability))
    )
    return jax.grad(lambda params: algorithm.loss(params, batch)[0])(params)


def gradient_at(algorithm: Algorithm, params: Params, baseline: Array | None = None) -> Params:
    """The same, compiled."""
    gradient = jax.jit(
        lambda params: expected_gradient(algorithm, params, baseline), compiler_options=tiny.QUICKLY
    )
    return gradient(params)


def descended(
    gradient_of: Callable[[Params], Params], params: Params, trained: dict[str, float], steps: int
) -> Params:
    """params after gradient descent, at each trained role's own rate."""

    def descend(params: Params, _: None) -> tuple[Params, None]:
        gradient = gradient_of(params)
        moved = {
            role: jax.tree.map(lambda p, g, rate=rate: p - rate * g, params[role], gradient[role])
            for role, rate in trained.items()
        }
        return params | moved, None

    return jax.jit(lambda params: jax.lax.scan(descend, params, length=steps)[0])(params)


def state_values(policy: Params, rewards: np.ndarray = REWARDS) -> np.ndarray:
    """Return [COUNT, 3]: the mean reward of the completions with the same tokens before."""
    probability = np.asarray(jnp.exp(token_log_probs(policy).sum(-1)))
    values = np.zeros(MASK.shape)
    for row, t in np.argwhere(MASK):
        same = (TOKENS[:, :t] == TOKENS[row, :t]).all(-1) & MASK[:, t]
        values[row, t] = np.sum(probability[same] * rewards[same]) / probability[same].sum()
    return values


def table_of(values: np.ndarray) -> Params:
    """The tabular critic that says `values` [COUNT, 3] before each token."""
    table = np.zeros((3, 3, 3))
    for row, t in np.argwhere(MASK):
        table[t - 1, TOKENS[row, t - 1], 0] = values[row, t]
    return {"table": jnp.asarray(table)}


# --- PPO ---


PLAIN = PpoConfig(Critic(lam=1.0, clip=None), lam=1.0, whiten=False)


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_with_lambda_one_the_expected_gradient_is_exact_whatever_the_critic_says(float64, kl_coef):
    params = first_params()
    algorithm = ppo(replace(PLAIN, kl_reward_coef=kl_coef), ROLES, SAMPLING)
    gradient = gradient_at(algorithm, params)["policy"]["table"]
    exact = exact_gradient(params, kl_coef)
    assert np.abs(exact).max() > 0.05
    np.testing.assert_allclose(gradient, -exact, rtol=0, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_a_smaller_lambda_is_exact_only_with_a_true_critic(float64, lam):
    params = first_params()
    algorithm = ppo(replace(PLAIN, lam=lam), ROLES, SAMPLING)
    exact = exact_gradient(params, 0.0)
    true = params | {"value": table_of(state_values(params["policy"]))}
    np.testing.assert_allclose(
        gradient_at(algorithm, true)["policy"]["table"], -exact, rtol=0, atol=1e-8
    )
    biased = gradient_at(algorithm, params)["policy"]["table"]
    assert np.abs(biased + exact).max() > 0.05


def test_it_ends_at_the_reference_tilted_by_the_reward_with_the_value_of_every_state(float64):
    """The optimum of E[r] - beta KL is reference x exp(r / beta) / Z; its critic says what is still
    to be earned."""
    beta, params = 0.5, first_params()
    algorithm = ppo(replace(PLAIN, kl_reward_coef=beta), ROLES, SAMPLING)
    trained = {"policy": 4.0, "value": 1.0}
    params = descended(lambda params: expected_gradient(algorithm, params), params, trained, 3000)
    log_reference = np.asarray(token_log_probs(params["reference"]).sum(-1))
    tilted = np.exp(log_reference + REWARDS / beta)
    tilted /= tilted.sum()
    assert np.abs(tilted - np.exp(log_reference)).max() > 0.05
    log_probs = token_log_probs(params["policy"])
    np.testing.assert_allclose(np.exp(log_probs.sum(-1)), tilted, rtol=0, atol=1e-5)
    # What is earned from a token on: the reward less the KL of this token and those after it.
    to_go = np.cumsum(np.asarray(log_probs - token_log_probs(params["reference"]))[:, ::-1], 1)[
        :, ::-1
    ]
    for t in (1, 2):
        soft = state_values(params["policy"], REWARDS - beta * to_go[:, t])
        actual = np.asarray(params["value"]["table"])
        for row in np.flatnonzero(MASK[:, t]):
            assert actual[t - 1, TOKENS[row, t - 1], 0] == pytest.approx(soft[row, t], abs=1e-4)


def test_value_pretraining_ends_at_the_policys_values(float64):
    params = first_params()
    algorithm = value_pretraining(ValuePretrainingConfig(Critic()), ROLES, SAMPLING)
    trained = descended(
        lambda params: expected_gradient(algorithm, params), params, {"value": 1.0}, 2000
    )
    np.testing.assert_array_equal(trained["policy"]["table"], params["policy"]["table"])
    expected = table_of(state_values(params["policy"]))["table"][..., 0]
    seen = np.asarray(expected) != 0
    np.testing.assert_allclose(
        np.asarray(trained["value"]["table"])[..., 0][seen], expected[seen], atol=1e-6
    )


@pytest.mark.slow
def test_the_first_update_is_on_policy_and_its_gradient_that_of_the_advantages():
    """Ratio 1 in float32, nothing clipped, in the value neither."""
    model = tiny.attention_model()
    config = PpoConfig(kl_loss_coef=0.1)
    roles, params = tiny.cast(config.roles)
    data = tiny.sampled_near(tiny.rollout(), model, params["policy"], noise=0.0)
    algorithm = ppo(config, roles, tiny.SAMPLING)
    batch, _ = jax.jit(algorithm.make_batch, compiler_options=tiny.QUICKLY)(
        tiny.experience(data), params, algorithm.init_state(params)
    )
    loss = jax.jit(algorithm.loss, compiler_options=tiny.QUICKLY)
    for k in range(2):
        metrics = loss(params, jax.tree.map(lambda x, k=k: x[0, k], batch))[1]
        assert float(metrics["policy/ratio_min"].value) == pytest.approx(1, abs=5e-5)
        assert float(metrics["policy/ratio_max"].value) == pytest.approx(1, abs=5e-5)
        assert float(metrics["policy/kl_old"].value / metrics["policy/kl_old"].weight) < 1e-8
        for name in ("policy/clip_low", "policy/clip_high", "value/clip"):
            assert float(metrics[name].value) == 0


def test_the_kl_scale_is_remembered_and_weighs_the_next_batch():
    config = PpoConfig(
        kl_reward_coef=0.1, kl_loss_coef=0.1, kl_target=2.0, kl_horizon=4.0, whiten=False
    )
    roles, params = tiny.cast(config.roles)
    algorithm = ppo(config, roles, tiny.SAMPLING)
    scale = algorithm.init_state(params)
    params, scale = algorithm.after_update(
        params, scale, {"policy/kl_completion": jnp.float32(9.0)}
    )
    assert float(scale["kl_scale"]) == pytest.approx(1.05)
    make_batch = jax.jit(algorithm.make_batch, compiler_options=tiny.QUICKLY)
    experience = tiny.experience(tiny.rollout())
    one, _ = make_batch(experience, params, {"kl_scale": jnp.float32(1.0)})
    three, kept = make_batch(experience, params, {"kl_scale": jnp.float32(3.0)})
    assert float(kept["kl_scale"]) == 3
    np.testing.assert_allclose(three.weights["kl"], 3 * one.weights["kl"], rtol=1e-6)
    free, _ = make_batch(experience, params, {"kl_scale": jnp.float32(0.0)})
    np.testing.assert_allclose(
        three.advantages - free.advantages,
        3 * (one.advantages - free.advantages),
        rtol=1e-4,
        atol=1e-6,
    )
    assert np.abs(one.advantages - free.advantages).max() > 0.01


# --- what VC-PPO and VAPO mend: a chain of states with a reward at its end (arXiv 2503.01491) ---


def chain(length: int, critic: float, reward: float = 1.0) -> tuple[Array, Array, Array]:
    """(rewards, values, mask), [1, length]: the critic says the same everywhere."""
    rewards = jnp.zeros((1, length)).at[0, -1].set(reward)
    return rewards, jnp.full((1, length), critic), jnp.ones((1, length), bool)


@pytest.mark.slow
def test_the_signal_of_the_end_decays_with_lambda():
    """0.95^100 = 0.0059: that much of a reward reaches a token 100 tokens before it; with lambda 1
    all of it does."""
    first = {lam: float(advantages.gae(*chain(101, 0.0), 1.0, lam)[0, 0]) for lam in (0.95, 1.0)}
    assert first[0.95] == pytest.approx(0.0059, abs=5e-5)
    assert first[1.0] == pytest.approx(1)
    assert float(advantages.gae(*chain(400, 0.0), 1.0, 0.95)[0, 0]) < 1e-8
    # VAPO's lambda gives a long answer's first token about e^(-1 / alpha), however long it is.
    for length in (400, 4000):
        lam = advantages.length_adaptive_lambda(jnp.array([length]), 0.5)
        assert float(advantages.gae(*chain(length, 0.0), 1.0, lam)[0, 0]) == pytest.approx(
            np.exp(-2), rel=0.02
        )


def steps_until_known(length: int, lam: float, rate: float = 0.5, most: int = 2000) -> int:
    """Updates until a tabular critic, which begins at 0, knows the first state's value 1 to a
    tenth."""

    @jax.jit
    def update(values: Array) -> Array:
        rewards, _, mask = chain(length, 0.0)
        return values + rate * advantages.gae(rewards, values, mask, 1.0, lam)

    values = jnp.zeros((1, length))
    for step in range(most):
        if float(values[0, 0]) > 0.9:
            return step
        values = update(values)
    return most


def test_a_critic_fitted_to_what_was_earned_learns_at_a_rate_without_length():
    assert [steps_until_known(length, 1.0) for length in (10, 100, 400)] == [4, 4, 4]
    short, middle, long = (steps_until_known(length, 0.95) for length in (10, 100, 400))
    assert short < 10
    assert middle >= 3 * short
    assert long > 2.5 * middle


def test_a_biased_critic_rewards_being_short_and_a_pretrained_one_does_not():
    """Both answers are right. With the critic at 0 the short one's first token is preferred, which
    is how answers collapse; with the critic fitted first neither is."""

    def first(length: int, critic: float) -> float:
        return float(advantages.gae(*chain(length, critic), 1.0, 0.95)[0, 0])

    assert first(10, 0.0) - first(100, 0.0) == pytest.approx(0.95**9 - 0.95**99, rel=1e-5)
    assert first(10, 0.0) - first(100, 0.0) > 0.6
    assert abs(first(10, 1.0) - first(100, 1.0)) < 1e-6


# --- REINFORCE with a baseline, and A*-PO ---


@pytest.mark.parametrize("baseline", ["none", "greedy"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_a_baseline_that_knows_only_the_prompt_leaves_the_expected_gradient_exact(
    float64, baseline, kl_coef
):
    params = first_params()
    config = ReinforceConfig(baseline, whiten=False, kl_reward_coef=kl_coef)
    algorithm = reinforce(config, ROLES, SAMPLING)
    gradient = gradient_at(algorithm, params, jnp.full(COUNT, 0.8))["policy"]["table"]
    exact = exact_gradient(params, kl_coef)
    np.testing.assert_allclose(gradient, -exact, rtol=0, atol=1e-8)


def batch_of(config: ReinforceConfig, data: Rollout) -> Any:
    roles, params = tiny.cast(config.roles)
    algorithm = reinforce(config, roles, tiny.SAMPLING)
    return jax.jit(algorithm.make_batch, compiler_options=tiny.QUICKLY)(
        tiny.experience(data), params, ()
    )[0]


@pytest.mark.slow
def test_advantages_of_reinforce_by_hand():
    """Two prompts of two completions that earn 1, 0 and 2, 2; the greedy ones earn 0.5 and 3."""
    groups = ((2, (2, 1)), (1, (1, 3)))
    data = tiny.rollout(groups=groups)
    last = data.action_mask & ~jnp.pad(data.action_mask, ((0, 0), (0, 1)))[:, 1:]
    earned = jnp.array([1.0, 0.0, 2.0, 2.0])
    data = data.replace(
        rewards=jnp.where(last, earned[:, None], 0.0), baseline=jnp.array([0.5, 0.5, 3.0, 3.0])
    )

    def actual(config: ReinforceConfig) -> np.ndarray:
        layout = tiny.experience(data).layout
        return np.asarray(layout.unpack(batch_of(config, data).advantages))[
            np.asarray(data.action_mask)
        ]

    lengths = [2, 1, 1, 3]
    greedy = actual(ReinforceConfig("greedy", whiten=False))
    np.testing.assert_allclose(greedy, np.repeat([0.5, -0.5, -1.0, -1.0], lengths))
    tokens = np.repeat(earned, lengths)
    np.testing.assert_allclose(
        actual(ReinforceConfig()), (tokens - tokens.mean()) / tokens.std(), rtol=1e-5
    )
    tokens = np.repeat([0.5, -0.5, 0.0, 0.0], lengths)
    np.testing.assert_allclose(
        actual(ReinforceConfig("group")), (tokens - tokens.mean()) / tokens.std(), rtol=1e-5
    )
    halved = actual(ReinforceConfig(whiten=False, gamma=0.5))
    np.testing.assert_allclose(halved, [0.5, 1, 0, 2, 0.5, 1, 2])


def test_a_star_po_ends_at_the_reference_tilted_by_the_reward(float64):
    """With the exact V* = beta log E_reference[exp(r / beta)], every square is 0 at the optimum."""
    beta, params = 0.5, first_params()
    reference = np.asarray(jnp.exp(token_log_probs(params["reference"]).sum(-1)))
    optimal = beta * np.log(np.sum(reference * np.exp(REWARDS / beta)))
    algorithm = a_star_po(AStarPoConfig(beta=beta), ROLES, SAMPLING)
    worth = jnp.full(COUNT, optimal)
    # The loss is a mean over completions: a token's weight is its completion's, shared.
    share = jnp.asarray(np.where(MASK, 1 / MASK.sum(1, keepdims=True), 0.0))

    def gradient_of(params: Params) -> Params:
        data = rollout(params["policy"], worth)
        batch, _ = algorithm.make_batch(Experience(data, LAYOUT), params, ())
        weights = {"policy": LAYOUT.pack(share * jnp.exp(data.log_probs.sum(-1))[:, None])}
        batch = jax.tree.map(lambda x: x[0, 0], batch.replace(weights=weights))
        return jax.grad(lambda params: algorithm.loss(params, batch)[0])(params)

    params = descended(gradient_of, params, {"policy": 2.0}, 3000)
    tilted = reference * np.exp((REWARDS - optimal) / beta)
    assert tilted.sum() == pytest.approx(1)
    np.testing.assert_allclose(
        np.exp(token_log_probs(params["policy"]).sum(-1)), tilted, rtol=0, atol=1e-5
    )


@pytest.mark.slow
def test_a_star_pos_loss_by_hand():
    """One completion of two tokens: (0.5 (log-ratio) - (1 + 0.6))^2."""
    config = AStarPoConfig(beta=0.5)
    roles, params = tiny.cast(config.roles)
    data = tiny.rollout(groups=((2, (2,)),))
    data = data.replace(rewards=jnp.where(data.action_mask, 0.5, 0.0), baseline=jnp.array([-0.6]))
    algorithm = a_star_po(config, roles, tiny.SAMPLING)
    batch, _ = jax.jit(algorithm.make_batch, compiler_options=tiny.QUICKLY)(
        tiny.experience(data), params, ()
    )
    model = tiny.attention_model()
    policy, reference = (
        tiny.plain_log_probs(model, params[role], data.tokens, tiny.SAMPLING.temperature)[
            0, 2:
        ].sum()
        for role in ("policy", "reference")
    )
    loss = jax.jit(algorithm.loss, compiler_options=tiny.QUICKLY)
    actual = loss(params, jax.tree.map(lambda x: x[0, 0], batch))[0]
    assert float(actual) == pytest.approx(float((0.5 * (policy - reference) - 1.6) ** 2), rel=1e-5)


# --- settings that are refused ---


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (PpoConfig, {"kl_loss_coef": -1.0}),
        (PpoConfig, {"clip_low": 1.0}),
        (PpoConfig, {"clip_high": 0.0}),
        (PpoConfig, {"lam": 1.1}),
        (PpoConfig, {"lam_alpha": 0.0}),
        (PpoConfig, {"kl_target": 6.0}),
        (ReinforceConfig, {"kl_loss_coef": -1.0}),
        (ReinforceConfig, {"gamma": 1.1}),
        (ReinforceConfig, {"clip_high": 0.0}),
        (AStarPoConfig, {"beta": 0.0}),
        (ValuePretrainingConfig, {"critic": Critic(trunk="shared")}),
    ],
)
def test_settings_out_of_range_are_refused(kind, values):
    with pytest.raises(InputError):
        kind(**values)


# --- several turns ---


@pytest.mark.slow
def test_by_turn_the_critic_is_read_and_taught_at_the_first_token_of_a_turn():
    data = tiny.rollout()
    config = PpoConfig(Critic(gamma=0.9, lam=0.8), lam=0.5, credit="turn", whiten=False)
    roles, params = tiny.cast(config.roles)
    experience = tiny.experience(data)
    layout = experience.layout
    algorithm = ppo(config, roles, tiny.SAMPLING)
    batch = jax.jit(lambda params: algorithm.make_batch(experience, params, jnp.ones(()))[0])(
        params
    )
    starts = np.asarray(advantages.turn_starts(data.action_mask))
    weights = layout.unpack(batch.weights["value"])
    np.testing.assert_allclose(weights, starts / starts.sum(), rtol=1e-6)
    assert starts.sum() < data.action_mask.sum()
    values = layout.unpack(batch.extras["targets"].old_values)
    arguments = (data.rewards, values, data.action_mask, 0.9)
    np.testing.assert_allclose(
        layout.unpack(batch.advantages), advantages.turn_gae(*arguments, 0.5), rtol=0, atol=1e-6
    )
    returns = values + advantages.turn_gae(*arguments, 0.8)
    np.testing.assert_allclose(
        layout.unpack(batch.extras["targets"].returns),
        np.where(starts, returns, 0),
        rtol=0,
        atol=1e-6,
    )


@pytest.mark.slow
def test_by_turn_the_baseline_of_reinforce_is_the_mean_of_the_same_turn():
    data = tiny.rollout()
    config = ReinforceConfig("group", credit="turn", gamma=0.9, whiten=False)
    roles, params = tiny.cast(config.roles)
    experience = tiny.experience(data)
    batch = reinforce(config, roles, tiny.SAMPLING).make_batch(experience, params, ())[0]
    actual = np.asarray(experience.layout.unpack(batch.advantages))
    returns = np.asarray(advantages.turn_returns(data.rewards, data.action_mask, 0.9))
    turns = np.asarray(advantages.turn_ids(data.action_mask))
    group, starts = np.asarray(data.group_id), np.asarray(advantages.turn_starts(data.action_mask))
    for row, column in np.argwhere(starts):
        peers = starts & (turns == turns[row, column]) & (group == group[row])[:, None]
        expected = returns[row, column] - returns[peers].mean()
        np.testing.assert_allclose(
            actual[row, turns[row] == turns[row, column]], expected, rtol=0, atol=1e-6
        )


def test_a_star_po_refuses_episodes_of_several_rows():
    config = AStarPoConfig()
    roles, params = tiny.cast(config.roles)
    data = replace(tiny.rollout(), baseline=jnp.zeros(18), episode_id=jnp.zeros(18, jnp.int32))
    with pytest.raises(InputError, match="rewritten"):
        a_star_po(config, roles, tiny.SAMPLING).make_batch(tiny.experience(data), params, ())
