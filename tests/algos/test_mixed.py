"""Groups with a solution of the data, by the formulas of their papers."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixtures import tiny_data
from tpu_rl.algos.mixed import (
    MixedConfig,
    amft_controller,
    chosen,
    mixed,
    mu,
    sasr_controller,
    smoothed_reward,
    without_success,
)
from tpu_rl.errors import InputError
from tpu_rl.losses import advantages
from tpu_rl.proofs import cases, tiny
from tpu_rl.train import update_step
from tpu_rl.types import RowSource


class Step:
    """The loss of a step with experts, split into its terms, and the numbers of the formulas."""

    def __init__(self, config: MixedConfig, data: Any = None):
        self.params = tiny.init_params(cases.MODEL)
        self.data = tiny_data.with_experts() if data is None else data
        algorithm = mixed(config, tiny.roles(cases.MODEL), tiny.SAMPLING)
        state = algorithm.init_state(self.params)
        batch, _ = algorithm.make_batch(tiny.experience(self.data), self.params, state)
        batch = update_step.minibatch(batch, 0)
        parts = [update_step.minibatch(batch, k) for k in range(len(batch.rows.tokens))]

        def solution_loss(policy: Any) -> Any:
            params = self.params | {"policy": policy}
            metrics = [algorithm.loss(params, part)[1] for part in parts]
            return sum(of_part["policy/solution_loss"].value for of_part in metrics)

        self.loss, self.gradient = jax.jit(jax.value_and_grad(solution_loss))(self.params["policy"])
        self.policy_weight = float(batch.weights["policy"].sum())
        self.is_expert = np.asarray(self.data.source) == RowSource.EXPERT
        self.mask = np.asarray(self.data.action_mask) & self.is_expert[:, None]

    def log_probs(self, policy: Any) -> Any:
        temperature = tiny.SAMPLING.temperature
        return tiny.plain_log_probs(cases.MODEL, policy, self.data.tokens, temperature)

    def check(self, formula: Any) -> None:
        def loss(policy: Any) -> Any:
            return jnp.where(self.mask, formula(self.log_probs(policy)), 0.0).sum()

        expected, gradient = jax.jit(jax.value_and_grad(loss))(self.params["policy"])
        assert float(self.loss) == pytest.approx(float(expected), rel=1e-4)
        for a, b in zip(*map(jax.tree.leaves, (self.gradient, gradient)), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(b).max())


@pytest.mark.slow
def test_chord_weighs_the_solution_by_phi_and_both_terms_by_mu():
    step = Step(MixedConfig(mu_peak=0.3))
    stop = jax.lax.stop_gradient

    def formula(log_probs: Any) -> Any:
        p = stop(jnp.exp(log_probs))
        return -0.3 * p * (1 - p) * log_probs / step.mask.sum()

    step.check(formula)
    assert step.policy_weight == pytest.approx(0.7, rel=1e-5)


@pytest.mark.parametrize(("step", "expected"), [(0, 0.0), (5, 0.25), (10, 0.5), (99, 0.5)])
def test_mu_rises_and_stays(step, expected):
    config = MixedConfig(mu_peak=0.5, mu_warmup_steps=10)
    assert float(mu(config, jnp.asarray(step))) == pytest.approx(expected, abs=1e-6)
    assert float(mu(MixedConfig(), jnp.asarray(step))) == pytest.approx(0.1)


def test_sasr_draws_by_the_norms_of_steps_that_imitated():
    config = MixedConfig(method="sasr", mu_warmup_steps=2)
    init_state, after_update = sasr_controller()
    data = tiny_data.with_experts()
    random = np.random.default_rng(0)

    def batch(step):
        keys = random.integers(0, 2**32, data.birth_key.shape, dtype=np.uint32)
        return data.replace(policy_step=data.policy_step * 0 + step, birth_key=jnp.asarray(keys))

    def after(state, norm, empty=0.0):
        metrics = {"optim/grad_norm": jnp.asarray(norm), "optim/empty": jnp.asarray(empty)}
        return after_update({}, state, metrics)[1]

    state = init_state({})
    for step, norm in enumerate([8.0, 4.0]):
        state = chosen(state, config, batch(step))
        assert state.imitates == state.warms_up == 1
        state = after(state, norm)
    assert (state.first, state.latest) == (4.0, 4.0)
    choices = [chosen(state, config, batch(2 + step)) for step in range(80)]
    assert not any(choice.warms_up for choice in choices)
    # G / (G + G_0) = 4 / (4 + 4); 3 standard deviations are 0.17.
    assert np.mean([choice.imitates for choice in choices]) == pytest.approx(1 / 2, abs=0.17)
    explores = next(choice for choice in choices if not choice.imitates)
    assert after(explores, 9.0).latest == 4.0
    imitates = next(choice for choice in choices if choice.imitates)
    assert after(imitates, 9.0)[2:] == (4.0, 9.0)
    assert after(imitates, 9.0, empty=1.0).latest == 4.0
    one = batch(5)
    order = random.permutation(len(one.group_id))
    shuffled = jax.tree.map(lambda leaf: leaf[order], one)
    assert chosen(state, config, shuffled).imitates == chosen(state, config, one).imitates


def test_amft_raises_its_weight_while_the_entropy_is_low():
    config = MixedConfig(method="amft", mu_peak=0.6)
    init_state, after_update = amft_controller(config)
    state = init_state({})
    assert [float(leaf) for leaf in state] == [pytest.approx(0.6), -1]
    history = []
    for entropy in (2.0, 3.0, 1.5):
        metrics = {"policy/entropy": jnp.asarray(entropy)}
        state = after_update({}, state, metrics)[1]
        history.append(float(state[0]))
    # The first entropy is the target: 0.6, 0.6 + 5e-4 (2 - 3), 0.5995 + 5e-4 (2 - 1.5).
    assert history == pytest.approx([0.6, 0.5995, 0.59975])
    assert float(state[1]) == 2.0
    metrics = {"policy/entropy": jnp.asarray(9e9)}
    assert float(after_update({}, state, metrics)[1][0]) == 0
    metrics["optim/empty"] = jnp.asarray(1.0)
    assert after_update({}, state, metrics)[1] == state


@pytest.mark.slow
def test_replay_is_grpo_whose_groups_have_a_row_of_an_earlier_policy():
    data = tiny_data.with_replays()
    step = Step(MixedConfig(method="replay"), data)
    step.mask = np.asarray(data.action_mask) & (np.asarray(data.source) != 0)[:, None]
    returns = np.where(data.action_mask, data.rewards, 0.0).sum(-1).astype(np.float32)
    compared = advantages.group_scaled(jnp.asarray(returns), data.group_id, data.scored)
    learned = (np.asarray(data.action_mask) & np.asarray(data.scored)[:, None]).sum()

    def formula(log_probs: Any) -> Any:
        ratio = jnp.exp(log_probs - data.log_probs)
        clipped = jnp.clip(ratio, 0.8, 1.2)
        advantage = compared[:, None]
        return -jnp.minimum(ratio * advantage, clipped * advantage) / learned

    step.check(formula)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "solution", "policy"),
    [
        (MixedConfig(method="sasr"), 1.0, 0.0),
        (MixedConfig(method="amft", mu_peak=0.6), 0.6, 0.4),
    ],
)
def test_mixing_weighs_both_terms(config, solution, policy):
    step = Step(config)
    step.check(lambda log_probs: -solution * log_probs / step.mask.sum())
    assert step.policy_weight == pytest.approx(policy, rel=1e-5)


def test_relift_imitates_where_no_completion_succeeds():
    data = tiny_data.with_experts()
    returns = np.where(data.action_mask, data.rewards, 0.0).sum(-1)
    threshold = float(np.sort(returns[np.asarray(data.scored)])[-2])
    step = Step(MixedConfig(method="relift", min_reward=threshold), data)
    groups = np.asarray(data.group_id)
    solved = {
        g for g, r, s in zip(groups, returns, data.scored, strict=True) if s & (r >= threshold)
    }
    assert 0 < len(solved) < len(set(groups.tolist()))
    unsolved = ~np.isin(groups, list(solved))
    np.testing.assert_array_equal(without_success(data, threshold), unsolved)
    step.mask &= unsolved[:, None]
    step.check(lambda log_probs: -0.1 * log_probs / step.mask.sum())


def test_luffy_shapes_the_probability_and_compares_the_solution_with_its_group():
    check_shaped(Step(MixedConfig(method="luffy")), 1.0)


@pytest.mark.slow
def test_a_refinement_has_its_own_reward():
    data = tiny_data.with_experts()
    is_last = np.zeros(data.rewards.shape, bool)
    mask = np.asarray(data.action_mask)
    is_last[np.arange(len(mask)), mask.shape[1] - 1 - mask[:, ::-1].argmax(-1)] = True
    is_expert = np.asarray(data.source) == RowSource.EXPERT
    rewards = jnp.where(is_last & is_expert[:, None], 0.25, data.rewards)
    check_shaped(Step(MixedConfig(method="critique"), replace(data, rewards=rewards)), 0.25)


def check_shaped(step: Step, reward: float) -> None:
    data = step.data
    returns = np.where(data.action_mask, data.rewards, 0.0).sum(-1)
    returns = np.where(step.is_expert, reward, returns)
    scored = np.asarray(data.scored) | step.is_expert
    compared = advantages.group_scaled(
        jnp.asarray(returns, jnp.float32), data.group_id, jnp.asarray(scored)
    )
    learned = (np.asarray(data.action_mask) & scored[:, None]).sum()

    def formula(log_probs: Any) -> Any:
        p = jnp.exp(log_probs)
        return -p / (p + 0.1) * compared[:, None] / learned

    step.check(formula)


@pytest.mark.slow
def test_visurf_has_the_gradient_of_grpo_at_the_solution():
    step = Step(MixedConfig(method="visurf", old_log_probs="recomputed"))
    luffy = Step(MixedConfig(method="luffy"))
    assert step.policy_weight == pytest.approx(luffy.policy_weight)
    # Before the update the ratio is 1, so the loss is minus the sum of the weighted advantages.
    data = step.data
    returns = np.where(data.action_mask, data.rewards, 0.0).sum(-1)
    returns = np.where(step.is_expert, smoothed_reward(data), returns).astype(np.float32)
    scored = jnp.asarray(np.asarray(data.scored) | step.is_expert)
    compared = np.asarray(advantages.group_scaled(jnp.asarray(returns), data.group_id, scored))
    learned = (np.asarray(data.action_mask) & np.asarray(scored)[:, None]).sum()
    expected = -(step.mask * compared[:, None]).sum() / learned
    assert float(step.loss) == pytest.approx(expected, rel=1e-4)


def test_visurf_gives_a_solution_the_mean_of_a_group_with_a_success():
    data = tiny_data.with_experts()
    returns = np.where(data.action_mask, data.rewards, 0.0).sum(-1)
    scored, groups = np.asarray(data.scored), np.asarray(data.group_id)
    best = {g: returns[scored & (groups == g)].max() for g in set(groups.tolist())}
    # The best return of one group becomes 1, and those of the others are below.
    factor = 1.0 / max(best.values())
    assert factor > 0
    rewards = smoothed_reward(replace(data, rewards=data.rewards * factor))
    for g, highest in best.items():
        mean = factor * returns[scored & (groups == g)].mean()
        wanted = mean if highest * factor > 1 - 1e-6 else 1.0
        np.testing.assert_allclose(rewards[groups == g], wanted, rtol=1e-5)
    assert len({round(float(r), 4) for r in rewards}) == 2


@pytest.mark.parametrize(
    "values",
    [
        {"mu_peak": 1.5},
        {"method": "luffy", "mu_peak": 0.2},
        {"method": "luffy", "top_entropy_quantile": 0.5},
        {"method": "visurf", "old_log_probs": "sampler"},
        {"method": "luffy", "kl_reward_coef": 0.1},
        {"method": "luffy", "credit": "turn"},
    ],
)
def test_settings_that_do_not_go_together_are_refused(values):
    with pytest.raises(InputError):
        MixedConfig(**values)
