"""SFT by hand: the weights of demonstrations say what each token counts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_rl.algos import SftConfig
from tpu_rl.algos.sft import sft
from tpu_rl.proofs import tiny


def test_the_loss_is_a_weighted_mean_over_the_step():
    model = tiny.attention_model()
    params = tiny.init_params(model)
    texts: Any = tiny.demonstrations()
    weights = np.where(texts.action_mask, 0.25, 0.0).astype(np.float32)
    weights[::2] *= 8
    weights[1] = 0
    algorithm = sft(SftConfig(), tiny.roles(model), tiny.SAMPLING)
    experience = tiny.experience(texts.replace(weights=jnp.asarray(weights)))
    batch, _ = algorithm.make_batch(experience, params, None)
    assert float(batch.weights["policy"].sum()) == pytest.approx(1)
    num_micro_batches = batch.weights["policy"].shape[1]
    losses = [
        algorithm.loss(params, jax.tree.map(lambda leaf, k=k: leaf[0, k], batch))[0]
        for k in range(num_micro_batches)
    ]
    log_probs = np.asarray(tiny.plain_log_probs(model, params["policy"], texts.tokens))
    expected = -(weights * log_probs).sum() / weights.sum()
    assert float(sum(losses)) == pytest.approx(expected, rel=1e-5)
