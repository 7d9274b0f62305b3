"""Self-distillation against its formula, a completion at a time."""

import jax
import numpy as np
import pytest

from tpu_rl.algos import SelfDistillConfig, self_distill
from tpu_rl.proofs import cases, tiny
from tpu_rl.train import update_step


@pytest.mark.slow
def test_the_loss_is_its_formula():
    config = SelfDistillConfig()
    roles, params = tiny.cast(config.roles)
    data = cases.off_policy()
    algorithm = self_distill(config, roles, tiny.SAMPLING)
    batch, _ = algorithm.make_batch(tiny.experience(data), params, ())
    batch = update_step.minibatch(batch, 0)
    parts = [update_step.minibatch(batch, k) for k in range(len(batch.rows.tokens))]
    value = sum(float(jax.jit(algorithm.loss)(params, part)[0]) for part in parts)

    log_probs = np.asarray(
        tiny.plain_log_probs(cases.MODEL, params["policy"], data.tokens, tiny.SAMPLING.temperature)
    )
    mask = np.asarray(data.action_mask) & np.asarray(data.scored)[:, None]
    losses = []
    for n in np.flatnonzero(mask.any(1)):
        ratios = np.exp(log_probs[n] - np.asarray(data.log_probs)[n])[mask[n]]
        advantages = np.asarray(data.rewards)[n][mask[n]]
        clipped = np.clip(ratios, 0.8, 1.2)
        losses.append(-np.minimum(ratios * advantages, clipped * advantages).mean())
    assert value == pytest.approx(np.mean(losses), rel=1e-5)
