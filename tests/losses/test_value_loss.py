"""Targets, losses and metrics of a critic, by hand, and the states that it reads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_rl.errors import InputError
from tpu_rl.losses import value_loss
from tpu_rl.losses.value_loss import Critic
from tpu_rl.proofs import tiny


def test_clipped_value_loss_by_hand():
    """Old value 1, clip 0.5, return 3. V 1.2: half of 1.8^2. V 2 and 4 count as 1.5, whose error is
    larger."""
    values, old, returns = jnp.array([1.2, 2.0, 4.0, 0.0]), jnp.ones(4), jnp.full(4, 3.0)
    expected = [0.5 * 1.8**2, 0.5 * 1.5**2, 0.5 * 1.5**2, 0.5 * 3.0**2]
    np.testing.assert_allclose(
        value_loss.clipped_value_loss(values, old, returns, 0.5), expected, rtol=1e-6
    )
    plain = [0.5 * 1.8**2, 0.5, 0.5, 4.5]
    np.testing.assert_allclose(
        value_loss.clipped_value_loss(values, old, returns, None), plain, rtol=1e-6
    )


def test_a_value_that_has_moved_far_towards_its_return_has_no_gradient():
    def loss(values: jax.Array) -> jax.Array:
        return value_loss.clipped_value_loss(values, jnp.ones(2), jnp.array([3.0, 0.0]), 0.5).sum()

    np.testing.assert_allclose(jax.grad(loss)(jnp.array([2.0, 2.0])), [0.0, 2.0])


def test_explained_variance_is_numpys():
    """1 - Var(R - V) / Var(R), over the tokens of one optimizer step, not of the whole batch."""
    random = np.random.default_rng(0)
    data = tiny.rollout()
    mask = np.asarray(data.action_mask)
    returns, values = random.normal(size=(2, *mask.shape)).astype(np.float32)
    layout = tiny.experience(data, minibatches=2).layout
    targets = value_loss.targets(
        jnp.asarray(returns), jnp.asarray(values), data.action_mask, layout
    )
    packed_mask = layout.pack(data.action_mask)
    weights = packed_mask / packed_mask.sum((1, 2, 3), keepdims=True)
    for step in range(2):
        of_step = jax.tree.map(
            lambda x, step=step: x[step].reshape(-1, x.shape[-1]), (targets, weights)
        )
        _, metrics = value_loss.value_loss(of_step[0].old_values, *of_step, Critic())
        chosen = mask & (np.asarray(layout.minibatch) == step)[:, None]
        expected = 1 - np.var((returns - values)[chosen]) / np.var(returns[chosen])
        actual = metrics["value/explained_variance"]
        assert float(actual.value / actual.weight) == pytest.approx(expected, rel=1e-4)
        expected = 0.5 * np.mean((returns - values)[chosen] ** 2)
        assert float(metrics["value/loss"].value) == pytest.approx(expected, rel=1e-5)
        assert float(metrics["value/clip"].value) == 0


@pytest.mark.parametrize(
    ("huber", "quantile", "expected"),
    [
        # Errors R - V of 3, -0.5 and -2, and a distance of 1.
        (1.0, 0.5, [2.5, 0.125, 1.5]),
        (None, 0.8, [1.6 * 4.5, 0.4 * 0.125, 0.4 * 2]),
        (1.0, 0.8, [1.6 * 2.5, 0.4 * 0.125, 0.4 * 1.5]),
    ],
)
def test_huber_and_quantile_losses_by_hand(huber, quantile, expected):
    values = jnp.array([0.0, 0.0, 1.0])
    returns = values + jnp.array([3.0, -0.5, -2.0])
    losses = value_loss.clipped_value_loss(values, values, returns, None, huber, quantile)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


@pytest.mark.parametrize("quantile", [0.5, 0.75])
def test_a_small_huber_distance_fits_the_quantile(quantile):
    """Of returns 0, 1, ... 100 the loss is lowest at the quantile, give or take the distance."""
    returns = jnp.arange(101.0)[None]
    values = jnp.arange(0.0, 101.0, 0.5)[:, None]
    losses = value_loss.clipped_value_loss(values, values, returns, None, 0.1, quantile)
    assert float(values[losses.mean(1).argmin(), 0]) == pytest.approx(100 * quantile, abs=0.5)


@pytest.mark.parametrize("settings", [{"huber": 0.0}, {"quantile": 1.0}])
def test_settings_of_the_critic_out_of_range_are_refused(settings):
    with pytest.raises(InputError):
        Critic(**settings)


def test_a_value_is_that_of_the_state_before_its_token():
    """Changing a completion's token changes the values after it, not its own."""
    specs = {"policy": Critic().spec._replace(outputs=None), "value": Critic().spec}
    roles, params = tiny.cast(specs)
    data = tiny.rollout()
    layout = tiny.experience(data, minibatches=1).layout

    def values(tokens: jax.Array) -> np.ndarray:
        rows = jax.tree.map(lambda x: x[0].reshape(-1, x.shape[-1]), layout.rows(tokens))
        actual = value_loss.values(roles["value"], params, rows)
        return np.asarray(layout.unpack(actual.reshape(layout.source.shape)))

    column = 4  # the second token of the first completion
    changed = data.tokens.at[0, column].set((data.tokens[0, column] + 1) % tiny.VOCABULARY)
    moved = np.abs(values(changed) - values(data.tokens))[0] > 1e-6
    actions = np.asarray(data.action_mask)[0]
    np.testing.assert_array_equal(np.flatnonzero(moved & actions), np.flatnonzero(actions)[2:])


@pytest.mark.parametrize(
    "values",
    [
        {"gamma": 0.0},
        {"lam": 1.1},
        {"clip": 0.0},
        {"coef": 0.0},
        {"learning_rate_scale": -1.0},
        {"trunk": "shared", "model": "somewhere"},
    ],
)
def test_settings_out_of_range_are_refused(values):
    with pytest.raises(InputError):
        Critic(**values)
