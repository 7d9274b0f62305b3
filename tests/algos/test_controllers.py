"""Controllers stay where they are in steps that learn nothing."""

import jax
import jax.numpy as jnp
import pytest

from tpu_rl.algos.grpo import GrpoConfig, grpo
from tpu_rl.errors import InputError
from tpu_rl.losses.controllers import moving_reference
from tpu_rl.losses.entropy import temperature_controller, temperature_factor
from tpu_rl.losses.reference_kl import kl_scale_controller, stagnation_controller, with_return
from tpu_rl.proofs import tiny
from tpu_rl.train import update_step
from tpu_rl.types import Sampling


@pytest.mark.parametrize("is_empty", [False, True])
def test_coefficients_move_only_in_steps_that_learn(is_empty):
    empty = {"optim/empty": jnp.float32(is_empty)}
    init, update = kl_scale_controller(0.5, 100.0)
    metrics = empty | {"policy/kl_completion": jnp.float32(5.0)}
    assert (update({}, init({}), metrics)[1] != 1.0) == (not is_empty)


def test_the_temperature_follows_the_entropy():
    """ln T moves by 0.1 (0.3 - H): H = 0.1 and 0.7 cancel to -0.02; 1.3 and 9 count as one nat."""
    init, update = temperature_controller(0.3)
    factor = init({})
    for entropy, log_factor in ((0.1, 0.02), (0.7, -0.02), (1.3, -0.12), (9.0, -0.22)):
        factor = update({}, factor, {"policy/entropy": jnp.float32(entropy)})[1]
        assert float(jnp.log(factor)) == pytest.approx(log_factor, abs=1e-6)
    metrics = {"policy/entropy": jnp.float32(0.0), "optim/empty": jnp.float32(1.0)}
    assert update({}, factor, metrics)[1] == factor
    for _ in range(25):
        factor = update({}, factor, {"policy/entropy": jnp.float32(9.0)})[1]
    assert float(factor) == pytest.approx(0.1)
    assert temperature_factor({"temperature": 2.0}) == 2.0


def test_a_batch_is_learned_at_the_temperature_of_its_state():
    """Twice the temperature by the state is GRPO at twice the temperature, value and metrics."""
    model = tiny.attention_model()
    params = tiny.init_params(model)
    results = []
    for config, factor in ((GrpoConfig(kl_loss_coef=0.1), 2.0), (None, 1.0)):
        config = config or GrpoConfig(kl_loss_coef=0.1, sampled_entropy=0.5)
        temperature = 0.35 * factor
        sampling = Sampling(temperature=temperature, max_new_tokens=6)
        algorithm = grpo(config, tiny.roles(model), sampling)
        state = algorithm.init_state(params)
        if factor == 1.0:
            state = state | {"temperature": jnp.float32(2.0)}
        batch, _ = algorithm.make_batch(tiny.experience(tiny.rollout()), params, state)
        part = update_step.minibatch(update_step.minibatch(batch, 0), 0)
        results.append(jax.jit(algorithm.loss)(params, part))
    (value, metrics), (other, others) = results
    assert float(value) == pytest.approx(float(other), rel=1e-6)
    assert float(others.pop("policy/temperature").value) == pytest.approx(0.7)
    assert metrics.keys() == others.keys()
    for name in ("policy/entropy", "policy/kl_reference"):
        assert float(metrics[name].value) == pytest.approx(float(others[name].value), rel=1e-6)


def test_a_reset_counts_all_steps():
    """Rounds and schedules go by the steps of the run."""
    init, update = moving_reference(2)
    params = {"policy": jnp.ones(2), "reference": jnp.zeros(2)}
    empty = {"optim/empty": jnp.float32(1.0)}
    params, count = update(params, init(params), empty)
    assert not params["reference"].any()
    params, count = update(params, count, empty)
    assert params["reference"].all()


def test_a_reference_is_reset_when_returns_stagnate():
    """Mean returns 1, 3, 2, 3: two batches without a new best. Then all begins anew."""
    init, update = stagnation_controller(2)
    params = {"policy": jnp.ones(2), "reference": jnp.zeros(2)}
    state = init(params)
    template = tiny.rollout(groups=((1, (1, 1)),))

    def batch(state, *returns):
        rewards = jnp.where(template.action_mask, jnp.array(returns)[:, None], 0.0)
        return with_return(state, template.replace(rewards=rewards))

    for returns in ((0.0, 2.0), (2.0, 4.0), (2.0, 2.0)):
        params, state = update(params, batch(state, *returns), {})
        assert not params["reference"].any()
    assert (float(state.best), float(state.batches)) == (3.0, 1.0)
    # Nobody scored this batch.
    nothing = template.replace(scored=jnp.zeros(2, bool))
    assert with_return(state, nothing) == state
    params, state = update(params, batch(state, 3.0, 3.0), {})
    assert params["reference"].all()
    assert (float(state.best), float(state.batches)) == (-jnp.inf, 0.0)


def test_a_patience_without_a_reference_is_refused():
    with pytest.raises(InputError, match="patience"):
        GrpoConfig(reference_reset_patience=5)
