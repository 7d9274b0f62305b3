"""Learning rates by hand, and what weight decay leaves alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_rl.errors import InputError
from tpu_rl.models.config import WEIGHT_AXES
from tpu_rl.train import optimizers
from tpu_rl.train.optimizers import OptimizerConfig


def rates(schedule: str, steps: int, **config: float) -> list[float]:
    schedule_of = optimizers.learning_rate(
        OptimizerConfig(learning_rate=2.0, schedule=schedule, **config), steps
    )
    return [float(schedule_of(step)) for step in range(steps)]


def test_constant():
    assert rates("constant", 3) == [2, 2, 2]


def test_warm_up_moves_at_once_and_reaches_the_peak_at_its_last_step():
    np.testing.assert_allclose(
        rates("constant", 6, warmup_steps=4), [0.5, 1, 1.5, 2, 2, 2], rtol=1e-6
    )
    np.testing.assert_allclose(rates("constant", 2, warmup_steps=1), [2, 2], rtol=1e-6)


def test_linear_ends_on_the_final_share_at_the_last_step():
    np.testing.assert_allclose(
        rates("linear", 5, final_share=0.1), [2, 1.55, 1.1, 0.65, 0.2], rtol=1e-6
    )
    np.testing.assert_allclose(
        rates("linear", 5, final_share=0.0, warmup_steps=2), [1, 2, 2, 1, 0], atol=1e-6
    )


def test_cosine_ends_on_the_final_share_at_the_last_step():
    np.testing.assert_allclose(rates("cosine", 3, final_share=0.5), [2, 1.5, 1], rtol=1e-6)
    half = (1 + np.cos(np.pi / 4)) / 2
    np.testing.assert_allclose(
        rates("cosine", 5, final_share=0.0), [2, 2 * half, 1, 2 - 2 * half, 0], atol=1e-6
    )


def test_runs_of_one_step_have_a_rate():
    for schedule in ("constant", "linear", "cosine"):
        assert rates(schedule, 1) == [2]


def test_weight_decay_spares_norms_and_biases_however_many_dimensions_they_have():
    config = OptimizerConfig(learning_rate=0.5, weight_decay=0.1)
    optimizer = optimizers.build(config, optimizers.learning_rate(config, 1))
    params = {
        "embedding": jnp.ones((3, 2)),
        "layers": {"mlp_norm": jnp.ones((4, 2)), "query": None},
    }
    gradients = {
        "embedding": jnp.zeros((3, 2)),
        "layers": {"mlp_norm": jnp.zeros((4, 2)), "query": None},
    }
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    np.testing.assert_allclose(updates["embedding"], np.full((3, 2), -0.5 * 0.1), rtol=1e-6)
    assert not np.any(updates["layers"]["mlp_norm"])


def test_weight_decay_knows_the_decoders_names():
    spared = {
        name
        for name, decays in optimizers.decay_mask(dict.fromkeys(WEIGHT_AXES, 0.0)).items()
        if not decays
    }
    norms_and_biases = {name for name in WEIGHT_AXES if "norm" in name or "bias" in name}
    others = {name for name in WEIGHT_AXES if name.endswith(("_gain", "_min", "_max"))}
    assert spared == norms_and_biases | others | {"delta_decay_log", "layer_scalar"}
    assert {"embedding", "query", "down"}.isdisjoint(spared)


def test_first_adam_step_is_the_rate_against_the_gradients_sign():
    config = OptimizerConfig(learning_rate=0.5, max_grad_norm=100.0)
    optimizer = optimizers.build(config, optimizers.learning_rate(config, 1))
    params = {"kernel": jnp.zeros(3)}
    updates, _ = optimizer.update(
        {"kernel": jnp.array([3.0, -0.2, 0.0])}, optimizer.init(params), params
    )
    np.testing.assert_allclose(updates["kernel"], [-0.5, 0.5, 0], rtol=1e-5)


def test_gradients_are_clipped_to_their_global_norm():
    """With an epsilon far above the gradient, Adam's step is rate x gradient / epsilon."""
    config = OptimizerConfig(learning_rate=1.0, epsilon=1e6, max_grad_norm=1.0)
    optimizer = optimizers.build(config, optimizers.learning_rate(config, 1))
    params = {"kernel": jnp.zeros(1), "other": jnp.zeros(1)}
    for gradient, clipped in (([3.0, 4.0], [0.6, 0.8]), ([0.3, 0.4], [0.3, 0.4])):
        gradients = dict(zip(params, map(jnp.atleast_1d, jnp.array(gradient)), strict=True))
        updates, _ = optimizer.update(gradients, optimizer.init(params), params)
        np.testing.assert_allclose([-1e6 * updates[name][0] for name in params], clipped, rtol=1e-4)


@pytest.mark.parametrize("rate", [0.0, -1.0, 1e-30, 1e30, float("inf"), float("nan")])
def test_a_learning_rate_must_be_a_positive_number(rate):
    with pytest.raises(InputError, match="learning_rate is"):
        OptimizerConfig(learning_rate=rate)


def test_max_grad_norm_must_be_positive():
    with pytest.raises(InputError, match="max_grad_norm"):
        OptimizerConfig(max_grad_norm=0.0)


# --- several roles ---


def test_each_role_has_its_own_rate_and_its_own_norm():
    """Linear Adam again: the value's huge gradient takes nothing from the policy's, and has a tenth
    of the rate."""
    config = OptimizerConfig(learning_rate=1.0, epsilon=1e6, max_grad_norm=1.0)
    schedule = optimizers.learning_rate(config, 1)
    optimizer = optimizers.by_role(config, schedule, {"policy": 1.0, "value": 0.1})
    params = {
        "policy": {"kernel": jnp.zeros(2)},
        "value": {"score": jnp.zeros(2)},
        "reference": {"kernel": None},
    }
    gradients = {
        "policy": {"kernel": jnp.array([0.3, 0.4])},
        "value": {"score": jnp.array([30.0, 40.0])},
        "reference": {"kernel": None},
    }
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    np.testing.assert_allclose(-1e6 * updates["policy"]["kernel"], [0.3, 0.4], rtol=1e-4)
    np.testing.assert_allclose(-1e6 * updates["value"]["score"], [0.06, 0.08], rtol=1e-4)
    assert updates["reference"]["kernel"] is None


def test_one_role_alone_is_the_plain_optimizer():
    config = OptimizerConfig()
    schedule = optimizers.learning_rate(config, 1)
    params = {"policy": {"kernel": jnp.zeros(2)}}
    one, plain = (
        optimizers.by_role(config, schedule, {"policy": 1.0}),
        optimizers.build(config, schedule),
    )
    assert jax.tree.structure(one.init(params)) == jax.tree.structure(plain.init(params))


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon", "lion", "sgd"])
def test_moments_begin_anew_and_the_schedule_goes_on(name):
    """Steps after a reset are those of a new optimizer whose schedule is as far."""
    config = OptimizerConfig(name=name, schedule="linear", learning_rate=0.5, weight_decay=0.1)
    rate = optimizers.learning_rate(config, 8)
    axes = {"query": ((0,), (1,))}.get
    params = {"query": jnp.linspace(-1, 1, 12).reshape(4, 3)}
    scales = (10.0, 9.0, 8.0, -0.005, -0.01)
    gradients = [{"query": scale * jnp.cos(params["query"])} for scale in scales]

    def updates(reset_every: int, schedule, gradients) -> list:
        with_reset = dataclasses.replace(config, reset_every=reset_every)
        optimizer = optimizers.build(with_reset, schedule, axes)
        state, found = optimizer.init(params), []
        for gradient in gradients:
            update, state = optimizer.update(gradient, state, params)
            found.append(update["query"])
        return found

    whole = updates(3, rate, gradients)
    later = updates(0, lambda step: rate(step + 3), gradients[3:])
    np.testing.assert_array_equal(whole[3:], later)
    np.testing.assert_array_equal(whole[:3], updates(0, rate, gradients)[:3])
    assert not np.array_equal(whole[3], updates(0, rate, gradients)[3])
