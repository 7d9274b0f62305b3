"""The nucleus of another model: its tokens by hand, and the policy within it."""

import jax
import jax.numpy as jnp
import numpy as np

from tpu_rl.losses import nucleus
from tpu_rl.losses.log_probs import token_log_probs
from tpu_rl.proofs import tiny

MODEL = tiny.attention_model()


def test_the_nucleus_by_hand():
    """0.4, 0.3, 0.15, 0.15: the share 0.4 is the first alone, 0.6 two, and 0.8 all with the tie."""
    logits = jnp.log(jnp.array([0.15, 0.4, 0.15, 0.3]))
    for top_p, inside in ((0.39, [0, 1, 0, 0]), (0.6, [0, 1, 0, 1]), (0.8, [1, 1, 1, 1])):
        np.testing.assert_array_equal(nucleus.is_inside(logits, top_p), inside)
    own = jnp.log(jnp.array([0.1, 0.2, 0.3, 0.4]))
    sampled = jax.nn.softmax(nucleus.restrict(own, logits, 0.6, nucleus.SAMPLED_DROP))
    np.testing.assert_allclose(sampled, [0, 1 / 3, 0, 2 / 3], rtol=1e-6)
    learned = jax.nn.softmax(nucleus.restrict(own, logits, 0.6, nucleus.LEARNED_DROP))
    np.testing.assert_allclose(learned, sampled, atol=1e-8)


def test_the_role_has_the_log_probs_of_the_restricted_policy():
    """At temperature 0.7, against plain log-probs a completion at a time."""
    params = tiny.init_params(MODEL)
    data = tiny.rollout()
    experience = tiny.experience(data)
    rows = jax.tree.map(lambda x: x[0, 0], experience.layout.rows(data.tokens))
    roles = tiny.roles(MODEL)
    role = nucleus.restricted_role(roles["policy"], roles["reference"], 0.7, 0.7)
    actual = token_log_probs(role, params, rows, 0.7).log_probs
    own, other = (
        np.asarray(tiny.plain_distributions(MODEL, params[name], data.tokens, 0.7), np.float64)
        for name in ("policy", "reference")
    )
    order = np.argsort(-other, axis=-1)
    mass = np.cumsum(np.take_along_axis(np.exp(other), order, -1), -1)
    rank = np.argsort(order, axis=-1)
    inside = rank <= (mass < 0.7).sum(-1, keepdims=True)
    kept = np.where(inside, own, own - 20)
    kept -= np.logaddexp.reduce(kept, axis=-1, keepdims=True)
    tokens = np.asarray(data.tokens)[:, 1:, None]
    expected = np.pad(np.take_along_axis(kept, tokens, -1)[..., 0], ((0, 0), (1, 0)))
    packed = experience.layout.pack(jnp.where(data.action_mask, expected, 0.0))[0, 0]
    mask = experience.layout.pack(data.action_mask)[0, 0]
    assert np.sum(np.asarray(packed) < -15) > 3
    np.testing.assert_allclose(np.where(mask, actual, 0.0), packed, rtol=2e-5, atol=2e-5)
