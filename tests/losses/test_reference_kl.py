"""Estimators of the KL to the reference, over all tokens of a softmax of four."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_rl.algos import GrpoConfig, PpoConfig, ReinforceConfig, grpo, reinforce
from tpu_rl.errors import InputError
from tpu_rl.losses.reference_kl import (
    ReferenceKl,
    adapted_kl_scale,
    kl_loss,
    reference_penalty,
)
from tpu_rl.proofs import tiny

LOGITS = jnp.array([0.3, -1.2, 0.8, 0.0])
OTHER = jnp.array([0.9, 0.2, -0.7, 0.4])
REFERENCE = jax.nn.log_softmax(jnp.array([-0.4, 0.5, 0.1, -0.9]))


def kl(logits: jax.Array) -> jax.Array:
    log_p = jax.nn.log_softmax(logits)
    return jnp.sum(jnp.exp(log_p) * (log_p - REFERENCE))


def reverse_kl(logits: jax.Array) -> jax.Array:
    return jnp.sum(jnp.exp(REFERENCE) * (REFERENCE - jax.nn.log_softmax(logits)))


def distance(logits: jax.Array) -> jax.Array:
    return jnp.sum(jnp.abs(jax.nn.softmax(logits) - jnp.exp(REFERENCE)))


def nothing(logits: jax.Array) -> jax.Array:
    return jnp.sum(0 * logits)


@pytest.mark.parametrize(
    ("estimator", "old_logits", "is_kl", "descends"),
    [
        ("exact", LOGITS, True, kl),
        ("exact", OTHER, True, kl),
        ("k1", LOGITS, True, nothing),
        ("k2", LOGITS, False, kl),
        ("k3", LOGITS, True, reverse_kl),
        ("abs", LOGITS, False, distance),
        ("k3", OTHER, False, None),
    ],
)
def test_values_and_gradients_of_the_kl_in_the_loss(estimator, old_logits, is_kl, descends):
    """E_old over all tokens: whether the value is the KL, and whose gradient it has; off policy,
    estimators without a ratio have neither."""
    old = jax.nn.log_softmax(old_logits)

    def expected(logits: jax.Array) -> jax.Array:
        losses = kl_loss(jax.nn.log_softmax(logits), old, REFERENCE, estimator)
        return jnp.sum(jnp.exp(old) * losses)

    value, gradient = jax.value_and_grad(expected)(LOGITS)
    assert np.isclose(value, kl(LOGITS), rtol=1e-4) == is_kl
    if descends is None:
        assert np.abs(gradient - jax.grad(kl)(LOGITS)).max() > 0.05
        assert np.abs(gradient - jax.grad(reverse_kl)(LOGITS)).max() > 0.05
    else:
        exact = jax.grad(descends)(LOGITS)
        np.testing.assert_allclose(gradient, exact, rtol=1e-5, atol=2e-6)
        assert np.abs(exact).max() > 0.1 or estimator == "k1"


def test_estimates_by_hand():
    log_probs, reference = jnp.log(jnp.array([0.5, 0.2])), jnp.log(jnp.array([0.25, 0.4]))
    x = np.log([2.0, 0.5])
    for estimator, expected in {
        "k1": x,
        "k2": x**2 / 2,
        "k3": [0.5 - 1 + x[0], 2 - 1 + x[1]],
        "abs": np.abs(x),
    }.items():
        estimate = kl_loss(log_probs, log_probs, reference, estimator)
        np.testing.assert_allclose(estimate, expected, rtol=1e-5)


def test_the_kl_scale_moves_by_at_most_a_fifth_in_a_horizon():
    """scale (1 + clip(kl / target - 1, +-0.2) / horizon): on target it stays."""
    scale = jnp.float32(2.0)
    for kl, expected in (
        (6.0, 2.0),
        (6.6, 2 * (1 + 0.1 / 4)),
        (60.0, 2.1),
        (0.0, 1.9),
        (-3.0, 1.9),
    ):
        np.testing.assert_allclose(
            adapted_kl_scale(scale, jnp.float32(kl), 6.0, 4.0), expected, rtol=1e-6
        )


def test_the_penalty_of_the_reward_has_its_scale():
    config = GrpoConfig(kl_reward_coef=0.1)
    roles, params = tiny.cast(config.roles)
    rollout = tiny.rollout()
    layout = tiny.experience(rollout).layout
    reference, penalty = reference_penalty(
        config, roles["reference"], params, rollout, layout, 1.0, 3.0
    )
    x = rollout.log_probs - layout.unpack(reference)
    expected = np.where(rollout.action_mask, 3 * 0.1 * x, 0)
    np.testing.assert_allclose(penalty, expected, rtol=1e-5)
    assert np.abs(expected).max() > 0.1


@pytest.mark.parametrize(("factory", "config"), [(grpo, GrpoConfig), (reinforce, ReinforceConfig)])
def test_the_kl_scale_and_the_schedule_of_the_reference(factory, config):
    """As in PPO: on target the scale stays. The reference is reset at the second update."""
    settings = config(kl_loss_coef=0.1, kl_target=2.0, kl_horizon=4.0, reference_reset_every=2)
    roles, params = tiny.cast(settings.roles)
    algorithm = factory(settings, roles, tiny.SAMPLING)
    state = algorithm.init_state(params)
    assert float(state["kl_scale"]) == 1
    metrics = {"policy/kl_completion": jnp.float32(9.0)}
    after_one, state = algorithm.after_update(params, state, metrics)
    assert float(state["kl_scale"]) == pytest.approx(1.05)
    leaves = [jax.tree.leaves(after_one[role])[0] for role in ("policy", "reference")]
    assert np.abs(leaves[0] - leaves[1]).max() > 0
    after_two, _ = algorithm.after_update(after_one, state, metrics)
    jax.tree.map(np.testing.assert_array_equal, after_two["policy"], after_two["reference"])
    assert settings.roles["reference"].tracks_policy == 1
    batch, _ = algorithm.make_batch(tiny.experience(tiny.rollout()), params, state)
    np.testing.assert_allclose(batch.weights["kl"], 1.05 * batch.weights["policy"], rtol=1e-6)


def test_a_reference_is_a_moving_average():
    settings = GrpoConfig(kl_loss_coef=0.1, reference_reset_every=2, reference_reset_share=0.25)
    roles, params = tiny.cast(settings.roles)
    assert settings.roles["reference"].tracks_policy == 0.25
    algorithm = grpo(settings, roles, tiny.SAMPLING)
    state = algorithm.init_state(params)
    after_one, state = algorithm.after_update(params, state, {})
    jax.tree.map(np.testing.assert_array_equal, after_one["reference"], params["reference"])
    after_two, _ = algorithm.after_update(after_one, state, {})
    for old, policy, moved in zip(
        *(jax.tree.leaves(tree) for tree in (params["reference"], params["policy"])),
        jax.tree.leaves(after_two["reference"]),
        strict=True,
    ):
        np.testing.assert_allclose(moved, 0.75 * old + 0.25 * policy, rtol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"kl_target": 1.0},
        {"kl_loss_coef": 0.1, "kl_target": 0.0},
        {"kl_reward_coef": -0.1},
        {"kl_estimator": "k3"},
        {"reference_reset_every": 5},
        {"kl_loss_coef": 0.1, "reference_reset_share": 0.5},
    ],
)
def test_settings_that_do_nothing_are_refused(settings):
    for config in (GrpoConfig, PpoConfig, ReinforceConfig, ReferenceKl):
        with pytest.raises(InputError):
            config(**settings)
