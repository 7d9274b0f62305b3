"""Cross-entropy on observations: which tokens it is about, and its value."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_rl.algos import GrpoConfig, PpoConfig, grpo, ppo
from tpu_rl.commands import config
from tpu_rl.errors import InputError
from tpu_rl.losses.observations import ObservationLoss, observation_loss, observed
from tpu_rl.losses.policy_batch import begin
from tpu_rl.proofs import cases, tiny
from tpu_rl.train import update_step
from tpu_rl.types import RowSource


def test_observations_stand_between_actions_and_count_once():
    # p prompt, a action, o observation, . after the row's last action.
    rows = ["ppaooa..", "ppaooaoa", "ppaooa..", "ppaooaoa"]
    data = tiny.rollout(groups=((2, (6, 6)), (2, (6, 6))))
    letters = np.array([list(row) for row in rows])
    data = replace(data, action_mask=jnp.asarray(letters == "a"), scored=jnp.ones(4, bool))
    expected = letters == "o"
    np.testing.assert_array_equal(observed(data), expected)
    # The second row repeats five tokens of the first; the third is not scored, the last no row of
    # the policy.
    branches = replace(
        data,
        action_mask=data.action_mask.at[1, :5].set(False),
        parent=jnp.array([0, 0, 2, 3]),
        shared=jnp.array([0, 5, 0, 0]),
        scored=jnp.array([True, True, False, True]),
        source=jnp.array([0, 0, 0, RowSource.EXPERT], jnp.int8),
    )
    expected[1, :5] = False
    expected[2:] = False
    np.testing.assert_array_equal(observed(branches), expected)


def test_weights_add_up_to_the_coefficient():
    data = cases.off_policy()
    part = observation_loss(0.3)
    draft = begin(tiny.experience(data), {}, tiny.role(cases.MODEL, "policy"), 1.0)
    batch = part.batch(draft.pack(draft.rewards), draft, None)
    weights = draft.layout.unpack(batch.weights["observation"])
    assert float(weights.sum()) == pytest.approx(0.3)
    assert np.array_equal(weights > 0, observed(data))
    assert batch.rows.actions is None
    assert ObservationLoss().observation_parts() == ()
    pictures = draft._replace(layout=draft.layout.replace(images=jnp.zeros(())))
    with pytest.raises(InputError, match="images cannot be predicted"):
        part.batch(batch, pictures, None)


def test_single_turns_have_no_observations():
    flags = ["arithmetic_grpo", "--algorithm.observation-coef", "0.1"]
    with pytest.raises(InputError, match="no observations to predict"):
        config.parse(flags)


@pytest.mark.slow
@pytest.mark.parametrize(("factory", "settings"), [(grpo, GrpoConfig), (ppo, PpoConfig)])
def test_the_term_is_the_mean_log_prob_of_observations(factory, settings):
    data = cases.off_policy()
    chosen = settings(observation_coef=0.3)
    roles, params = tiny.cast(chosen.roles)
    algorithm = factory(chosen, roles, tiny.SAMPLING)
    batch, _ = algorithm.make_batch(tiny.experience(data), params, ())
    batch = update_step.minibatch(batch, 0)
    parts = [update_step.minibatch(batch, k) for k in range(len(batch.rows.tokens))]
    metrics = jax.device_get([jax.jit(algorithm.loss)(params, part)[1] for part in parts])
    found = sum(float(part["policy/observation_loss"].value) for part in metrics)
    log_probs = tiny.plain_log_probs(
        cases.MODEL, params["policy"], data.tokens, tiny.SAMPLING.temperature
    )
    expected = -0.3 * float(log_probs[np.asarray(observed(data))].mean())
    assert found == pytest.approx(expected, rel=1e-5)
