"""Parts that change the returns, the advantages and the entropy of a batch."""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from tpu_rl.algos import GrpoConfig
from tpu_rl.errors import InputError
from tpu_rl.losses.entropy import entropy_bonus, top_entropy, top_entropy_tokens
from tpu_rl.losses.log_probs import TokenLogProbs
from tpu_rl.losses.policy_batch import PolicyBatch
from tpu_rl.losses.policy_gradient import clipped_surrogate, policy_loss
from tpu_rl.losses.reference_kl import ReferenceKl, kl_to_reference
from tpu_rl.losses.returns import RunningReturns, normalized_rewards
from tpu_rl.proofs import tiny
from tpu_rl.types import PackedRows


def test_the_top_entropy_tokens_are_those_of_trls_quantile():
    """torch.quantile interpolates: of 1 to 5, the top 0.4 begins at 1 + 0.6 x 4 = 3.4."""
    entropy = jnp.array([[9.0, 1.0, 4.0], [2.0, 5.0, 3.0]])
    learned = jnp.array([[False, True, True], [True, True, True]])
    np.testing.assert_array_equal(top_entropy(entropy, learned, 0.4), [[0, 0, 1], [0, 1, 0]])
    np.testing.assert_array_equal(top_entropy(entropy, learned, 0.5), [[0, 0, 1], [0, 1, 1]])
    assert not top_entropy(entropy, learned & False, 0.5).any()


def test_the_loss_has_the_top_tokens_and_the_bonus_by_hand():
    """Two learned tokens of weight 0.5, of which the second has a low entropy, and one without."""
    ids = jnp.ones((1, 3), jnp.int32)
    half = jnp.array([[0.5, 0.5, 0.0]])
    zeros = jnp.zeros((1, 3))
    batch = PolicyBatch(
        rows=PackedRows(ids, ids, ids, ids, ids, ids),
        weights={"policy": half, "kl": 3.0 * half},
        action_mask=ids > 0,
        advantages=jnp.array([[1.0, 2.0, 9.0]]),
        old_log_probs=zeros,
        reference_log_probs=zeros - 1.0,
        importance=None,
        sampler_log_probs=None,
        high_entropy=jnp.array([[1.0, 0.0, 0.0]]),
    )
    policy = TokenLogProbs(zeros, jnp.array([[0.6, 0.7, 0.8]]))
    surrogate = partial(clipped_surrogate, clip_low=0.2, clip_high=0.2)
    kl = ReferenceKl(kl_loss_coef=0.1, kl_estimator="k2")
    parts = [
        top_entropy_tokens(0.5),
        entropy_bonus(0.2),
        kl_to_reference(kl, reference=None),
    ]
    loss, metrics = policy_loss(policy, batch, surrogate, parts)
    # k2 of a log-ratio of 1 is 1/2, at both tokens.
    expected = -0.5 * 1.0 - 0.2 * 0.5 * 0.6 + 0.1 * 3 * 0.5
    assert float(loss) == pytest.approx(expected)
    shares = {name: float(metrics[f"policy/{name}"].value) for name in ("high_entropy", "kl_scale")}
    assert shares == {"high_entropy": 1, "kl_scale": 3}


def test_rewards_are_divided_by_the_running_deviation():
    """Episodes of two batches, with one of two rows and one that is not scored, against numpy."""
    random = np.random.default_rng(0)
    running = RunningReturns(*jnp.zeros(3))
    mask = jnp.ones((5, 2), bool).at[:, 0].set(False)
    seen = []
    for _ in range(2):
        rewards = random.normal(3.0, 2.0, (5, 2)).astype(np.float32)
        rollout = replace(
            tiny.rollout(),
            action_mask=mask,
            rewards=jnp.asarray(rewards),
            scored=jnp.array([True, True, True, True, False]),
            truncated=jnp.zeros(5, bool),
            episode_id=jnp.array([0, 1, 1, 2, 3]),
        )
        actual, running = normalized_rewards(rollout, running, 1.5)
        single = rewards[:, 1]
        seen += [single[0], single[1] + single[2], single[3]]
        expected = np.clip(single / np.std(seen, ddof=1), -1.5, 1.5)
        np.testing.assert_allclose(actual[:, 1], expected, rtol=1e-5)
        np.testing.assert_array_equal(actual[:, 0], 0)
    np.testing.assert_allclose(running.mean, np.mean(seen), rtol=1e-5)
    assert float(running.count) == 6


@pytest.mark.parametrize("settings", [{"top_entropy_quantile": 0.0}, {"entropy_coef": -1.0}])
def test_entropy_settings_out_of_range_are_refused(settings):
    with pytest.raises(InputError):
        GrpoConfig(**settings)
