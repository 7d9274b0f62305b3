"""Per-token objectives by hand, and what they average to on problems small enough to enumerate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_rl import masked
from tpu_rl.policy_gradients import clip_shares, clipped_surrogate, dual_clip, importance_ratio, kl_loss

RATIO = jnp.array([0.5, 0.8, 1.0, 1.25, 2.0, 0.5, 0.8, 1.0, 1.25, 2.0])
ADVANTAGES = jnp.array([3.0] * 5 + [-3.0] * 5)


def test_importance_ratio():
    np.testing.assert_allclose(importance_ratio(jnp.log(jnp.array([0.2])), jnp.log(jnp.array([0.5]))), [0.4], rtol=1e-6)


def test_clipped_surrogate_by_hand():
    expected = [-1.5, -2.4, -3.0, -3.75, -3.9, 2.25, 2.4, 3.0, 3.75, 6.0]
    np.testing.assert_allclose(clipped_surrogate(RATIO, ADVANTAGES, 0.25, 0.3), expected, rtol=1e-6)


def gradients(objective) -> jax.Array:
    return jax.grad(lambda ratio: jnp.sum(objective(ratio)))(RATIO)


def test_clipped_tokens_have_no_gradient_and_the_shares_count_them():
    gradient = gradients(lambda ratio: clipped_surrogate(ratio, ADVANTAGES, 0.25, 0.3))
    np.testing.assert_allclose(gradient, [-3, -3, -3, -3, 0, 0, 3, 3, 3, 3])
    low, high = clip_shares(RATIO, ADVANTAGES, 0.25, 0.3)
    np.testing.assert_array_equal(low, [0, 0, 0, 0, 0, 1, 0, 0, 0, 0])
    np.testing.assert_array_equal(high, [0, 0, 0, 0, 1, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(gradient == 0, low | high)


def test_dual_clip_caps_bad_actions_only():
    def objective(ratio: jax.Array) -> jax.Array:
        return dual_clip(clipped_surrogate(ratio, ADVANTAGES, 0.25, 0.3), ADVANTAGES, 1.5)

    np.testing.assert_allclose(objective(RATIO), [-1.5, -2.4, -3.0, -3.75, -3.9, 2.25, 2.4, 3.0, 3.75, 4.5], rtol=1e-6)
    np.testing.assert_allclose(gradients(objective), [-3, -3, -3, -3, 0, 0, 3, 3, 3, 0])


# --- the KL as a loss ----------------------------------------------------------------------------------------------

LOGITS = jnp.array([0.3, -1.2, 0.8, 0.0])
REFERENCE = jax.nn.log_softmax(jnp.array([-0.4, 0.5, 0.1, -0.9]))


def exact_kl(logits: jax.Array) -> jax.Array:
    log_p = jax.nn.log_softmax(logits)
    return jnp.sum(jnp.exp(log_p) * (log_p - REFERENCE))


@pytest.mark.parametrize("old_logits", [LOGITS, jnp.array([0.9, 0.2, -0.7, 0.4])], ids=["on-policy", "off-policy"])
def test_kl_loss_has_the_value_and_the_gradient_of_the_kl(old_logits):
    old = jax.nn.log_softmax(old_logits)

    def expected(logits: jax.Array) -> jax.Array:
        return jnp.sum(jnp.exp(old) * kl_loss(jax.nn.log_softmax(logits), old, REFERENCE))

    value, gradient = jax.value_and_grad(expected)(LOGITS)
    exact, exact_gradient = jax.value_and_grad(exact_kl)(LOGITS)
    np.testing.assert_allclose(value, exact, rtol=1e-5)
    np.testing.assert_allclose(gradient, exact_gradient, rtol=1e-5, atol=1e-6)
    assert jnp.max(jnp.abs(exact_gradient)) > 0.1


# --- the bias of 1 / length ----------------------------------------------------------------------------------------


def test_dividing_by_length_lengthens_wrong_answers_and_a_constant_does_not():
    """A first token chooses: right (1 token), wrong and short (1 token), wrong and long (5 tokens).

    The wrong answers are equally likely and equally wrong, so an unbiased gradient moves their first tokens alike.
    With 1 / length a long wrong answer is punished a fifth as much (arXiv 2503.20783, section 3.1).
    """
    lengths, rewards = np.array([1, 1, 5]), np.array([1.0, 0.0, 0.0])
    logits = jnp.array([0.0, 0.4, 0.4])
    probabilities = np.asarray(jax.nn.softmax(logits))
    mask = jnp.asarray(np.arange(5)[None] < lengths[:, None])
    advantages = jnp.asarray(rewards - probabilities @ rewards)
    step = jnp.zeros(3, jnp.int32)

    def preference_for_long(weights: jax.Array) -> jax.Array:
        """How fast descent raises log p(long) - log p(short): the first tokens' expected loss, over all answers."""

        def expected_loss(logits: jax.Array) -> jax.Array:
            ratio = importance_ratio(jax.nn.log_softmax(logits), jnp.log(jnp.asarray(probabilities)))
            return jnp.sum(jnp.asarray(probabilities) * weights[:, 0] * clipped_surrogate(ratio, advantages, 0.2, 0.2))

        gradient = jax.grad(expected_loss)(logits)
        return gradient[1] - gradient[2]

    assert preference_for_long(masked.sequence_mean(mask, step, 1)) > 0.01
    assert abs(preference_for_long(masked.constant_length(mask, step, 1, 5))) < 1e-7
    assert abs(preference_for_long(masked.token_mean(mask, step, 1))) < 1e-7
