"""Controllers stay where they are in steps that learn nothing."""

import jax.numpy as jnp
import pytest

from tpu_rl.algos.controllers import (
    entropy_controller,
    kl_controllers,
    stagnation_controller,
    with_return,
)
from tpu_rl.algos.grpo import GrpoConfig
from tpu_rl.errors import InputError
from tpu_rl.losses.reference_kl import ReferenceKl
from tpu_rl.proofs import tiny


@pytest.mark.parametrize("is_empty", [False, True])
def test_coefficients_move_only_in_steps_that_learn(is_empty):
    empty = {"optim/empty": jnp.float32(is_empty)}
    init, update = kl_controllers(ReferenceKl(kl_loss_coef=0.1, kl_target=0.5))["kl_scale"]
    metrics = empty | {"policy/kl_completion": jnp.float32(5.0)}
    assert (update({}, init({}), metrics)[1] != 1.0) == (not is_empty)
    init, update = entropy_controller(0.1, target=2.0, delta=0.01, largest=1.0)
    coef, entropy = update({}, init({}), empty | {"policy/entropy": jnp.float32(0.0)})[1]
    assert float(coef) == pytest.approx(0.1 if is_empty else 0.11)
    # The entropy of an empty step is that of no token.
    assert jnp.isinf(entropy) if is_empty else entropy == 0


def test_a_reset_counts_all_steps():
    """Rounds and schedules go by the steps of the run."""
    config = ReferenceKl(kl_loss_coef=0.1, reference_reset_every=2)
    init, update = kl_controllers(config)["reference"]
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
