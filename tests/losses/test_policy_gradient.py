"""Per-token objectives by hand, and what they average to on problems small enough to enumerate."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_rl.losses import masked
from tpu_rl.losses.entropy import entropy_bonus
from tpu_rl.losses.log_probs import TokenLogProbs
from tpu_rl.losses.policy_batch import Part, PolicyBatch
from tpu_rl.losses.policy_gradient import (
    Surrogate,
    clipped_loss,
    clipped_ratio_surrogate,
    clipped_surrogate,
    dual_clipped_loss,
    importance_ratio,
    policy_loss,
    policy_metrics,
)
from tpu_rl.losses.reference_kl import ReferenceKl, kl_to_reference, reference_metrics
from tpu_rl.losses.sampler_correction import SamplerCorrection, correction, importance_weights
from tpu_rl.types import PackedRows

CLIPPED = partial(clipped_surrogate, clip_low=0.2, clip_high=0.2)
RATIO = jnp.array([0.5, 0.8, 1.0, 1.25, 2.0, 0.5, 0.8, 1.0, 1.25, 2.0])
ADVANTAGES = jnp.array([3.0] * 5 + [-3.0] * 5)


def test_importance_ratio():
    np.testing.assert_allclose(
        importance_ratio(jnp.log(jnp.array([0.2])), jnp.log(jnp.array([0.5]))), [0.4], rtol=1e-6
    )


def test_clipped_loss_by_hand():
    expected = [-1.5, -2.4, -3.0, -3.75, -3.9, 2.25, 2.4, 3.0, 3.75, 6.0]
    np.testing.assert_allclose(clipped_loss(RATIO, ADVANTAGES, 0.25, 0.3), expected, rtol=1e-6)


def gradients(objective) -> jax.Array:
    return jax.grad(lambda ratio: jnp.sum(objective(ratio)))(RATIO)


def test_clipped_tokens_have_no_gradient_and_the_shares_count_them():
    gradient = gradients(lambda ratio: clipped_loss(ratio, ADVANTAGES, 0.25, 0.3))
    np.testing.assert_allclose(gradient, [-3, -3, -3, -3, 0, 0, 3, 3, 3, 3])
    surrogate = clipped_ratio_surrogate(RATIO, ADVANTAGES, clip_low=0.25, clip_high=0.3)
    low = surrogate.clipped_low
    high = surrogate.clipped_high
    np.testing.assert_array_equal(low, [0, 0, 0, 0, 0, 1, 0, 0, 0, 0])
    np.testing.assert_array_equal(high, [0, 0, 0, 0, 1, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(gradient == 0, low | high)


def test_dual_clip_caps_bad_actions_only():
    def objective(ratio: jax.Array) -> jax.Array:
        return dual_clipped_loss(clipped_loss(ratio, ADVANTAGES, 0.25, 0.3), ADVANTAGES, 1.5)

    np.testing.assert_allclose(
        objective(RATIO), [-1.5, -2.4, -3.0, -3.75, -3.9, 2.25, 2.4, 3.0, 3.75, 4.5], rtol=1e-6
    )
    np.testing.assert_allclose(gradients(objective), [-3, -3, -3, -3, 0, 0, 3, 3, 3, 0])


# --- the bias of 1 / length ---


def test_dividing_by_length_lengthens_wrong_answers_and_a_constant_does_not():
    """A first token chooses: right (1 token), wrong and short (1 token), wrong and long (5 tokens).

    The wrong answers are equally likely and equally wrong, so an unbiased gradient moves their
    first tokens alike. With 1 / length a long wrong answer is punished a fifth as much (arXiv
    2503.20783, section 3.1).
    """
    lengths, rewards = np.array([1, 1, 5]), np.array([1.0, 0.0, 0.0])
    logits = jnp.array([0.0, 0.4, 0.4])
    probabilities = np.asarray(jax.nn.softmax(logits))
    mask = jnp.asarray(np.arange(5)[None] < lengths[:, None])
    advantages = jnp.asarray(rewards - probabilities @ rewards)
    step = jnp.zeros(3, jnp.int32)

    def preference_for_long(weights: jax.Array) -> jax.Array:
        """The rate at which descent raises log p(long) - log p(short).

        It is the first tokens' expected loss, over all answers."""

        def expected_loss(logits: jax.Array) -> jax.Array:
            ratio = importance_ratio(
                jax.nn.log_softmax(logits), jnp.log(jnp.asarray(probabilities))
            )
            return jnp.sum(
                jnp.asarray(probabilities)
                * weights[:, 0]
                * clipped_loss(ratio, advantages, 0.2, 0.2)
            )

        gradient = jax.grad(expected_loss)(logits)
        return gradient[1] - gradient[2]

    assert preference_for_long(masked.sequence_mean(mask, step, 1)) > 0.01
    assert abs(preference_for_long(masked.constant_length(mask, step, 1, 5))) < 1e-7
    assert abs(preference_for_long(masked.token_mean(mask, step, 1))) < 1e-7


# --- parts that algorithms share ---


def kl_part(coef: float) -> Part:
    return kl_to_reference(ReferenceKl(kl_loss_coef=coef), reference=None)


@pytest.mark.slow
def test_importance_weights_make_expectations_those_of_the_old_policy():
    """A bandit of five arms, sampled from its three likeliest ones and a uniform part: the gradient
    that learns from every arm as often as the behavior draws it is the old policy's own; capped,
    it is not."""
    logits = jnp.array([1.0, 0.5, 0.0, -0.5, -2.0])
    rewards = jnp.array([0.0, 1.0, 0.3, -1.0, 4.0])
    old = jax.nn.log_softmax(logits)
    behavior = 0.8 * jnp.where(old >= old[2], jnp.exp(old), 0.0) / jnp.exp(old[:3]).sum() + 0.2 / 5
    ids = jnp.arange(5)[None]

    def gradient(drawn_from, importance):
        rows = PackedRows(ids, ids, ids, ids, ids + 1, ids)
        batch = PolicyBatch(
            rows,
            {"policy": drawn_from[None]},
            ids >= 0,
            rewards[None],
            old[None],
            None,
            importance[None],
            None,
        )

        def loss(logits):
            token_log_probs = TokenLogProbs(jax.nn.log_softmax(logits)[None], jnp.zeros((1, 5)))
            part = correction(SamplerCorrection(importance_sampling_cap=100.0))
            return policy_loss(token_log_probs, batch, CLIPPED, [part])[0]

        return jax.grad(loss)(logits)

    exact = gradient(jnp.exp(old), jnp.ones(5))
    log_ratio, everywhere = (old - jnp.log(behavior))[None], jnp.ones((1, 5), bool)
    uncapped = SamplerCorrection(importance_sampling_cap=100.0)
    weights = importance_weights(uncapped, log_ratio, everywhere)[0][0]
    np.testing.assert_allclose(gradient(behavior, weights), exact, atol=1e-6)
    assert np.abs(gradient(behavior, jnp.ones(5)) - exact).max() > 0.05
    config = SamplerCorrection(importance_sampling_cap=1.05)
    capped = importance_weights(config, log_ratio, everywhere)[0][0]
    np.testing.assert_allclose(capped, np.minimum(np.exp(old) / behavior, 1.05), rtol=1e-6)
    assert float(capped.max()) == pytest.approx(1.05)


def test_the_kl_to_the_reference_is_the_old_policys_whatever_drew():
    """Every token counts as often as the behavior draws it: the KL and its gradient are those of
    the distributions."""
    old = jnp.log(jnp.array([0.5, 0.3, 0.2]))
    behavior, reference = jnp.array([0.2, 0.5, 0.3]), jnp.log(jnp.array([0.3, 0.3, 0.4]))
    ids = jnp.arange(3)[None]

    def added(logits, importance):
        rows, zeros = PackedRows(ids, ids, ids, ids, ids + 1, ids), jnp.zeros((1, 3))
        weights = {"policy": behavior[None]}
        batch = PolicyBatch(
            rows, weights, ids >= 0, zeros, old[None], reference[None], importance[None], None
        )
        token_log_probs = TokenLogProbs(jax.nn.log_softmax(logits)[None], zeros)
        return policy_loss(token_log_probs, batch, CLIPPED, [kl_part(1.0)])[0]

    def exact(logits):
        policy = jax.nn.log_softmax(logits)
        return (jnp.exp(policy) * (policy - reference)).sum()

    weights = jnp.exp(old) / behavior
    now = old + jnp.array([0.2, -0.1, 0.0])
    np.testing.assert_allclose(added(now, weights), exact(now), atol=1e-6)
    np.testing.assert_allclose(jax.grad(added)(now, weights), jax.grad(exact)(now), atol=1e-6)
    assert np.abs(jax.grad(added)(now, jnp.ones(3)) - jax.grad(exact)(now)).max() > 0.01


def test_the_gap_is_to_the_sampler_whatever_the_ratio_is_to():
    log_probs, old, sampler = (jnp.log(jnp.array([[p, 0.5]])) for p in (0.5, 0.5, 0.25))
    mask = jnp.ones((1, 2), bool)
    ones = jnp.ones((1, 2))
    surrogate = Surrogate(losses=ones, ratio=importance_ratio(log_probs, old))
    same = policy_metrics(surrogate, mask, log_probs, old)
    metrics = policy_metrics(surrogate, mask, log_probs, old, sampler)
    assert "policy/clip_low" not in metrics
    assert "policy/clip_high" not in metrics
    assert float(same["policy/log_prob_gap_max"].metric.value) == 0
    assert float(metrics["policy/log_prob_gap_max"].metric.value) == pytest.approx(np.log(2))
    assert float(metrics["policy/ratio_max"].value) == 1


def test_reference_metrics_by_hand():
    """Two completions of two tokens and one; the fourth slot is padding."""
    log_probs, reference = (
        jnp.array([[-1.0, -2.0, -1.0, 7.0]]),
        jnp.array([[-1.5, -1.0, -3.0, 0.0]]),
    )
    mask, sequences = jnp.array([[True, True, True, False]]), jnp.array([[1, 1, 2, 0]])
    metrics = reference_metrics(log_probs, reference, mask, sequences)
    k1 = 0.5 - 1.0 + 2.0
    assert float(metrics["policy/kl_completion"].value) == pytest.approx(k1)
    assert float(metrics["policy/kl_completion"].weight) == 2
    k3 = sum(np.exp(d) - 1 - d for d in (-0.5, 1.0, -2.0))
    assert float(metrics["policy/kl_reference"].value) == pytest.approx(k3)
    assert float(metrics["policy/kl_reference"].weight) == 3


def test_policy_loss_by_hand():
    """Two tokens that count 0.25 and 0.5, one that counts nothing: ratios 1.1 and 2, the second
    clipped at 1.3."""
    old, advantages = jnp.log(jnp.array([[0.5, 0.2, 0.1]])), jnp.array([[2.0, 1.0, 9.0]])
    log_probs, entropy = jnp.log(jnp.array([[0.55, 0.4, 0.9]])), jnp.array([[0.6, 0.7, 0.8]])
    weights, mask = {"policy": jnp.array([[0.25, 0.5, 0.0]])}, jnp.ones((1, 3), bool)
    ones = jnp.ones((1, 3), jnp.int32)
    batch = PolicyBatch(
        PackedRows(ones, ones, ones, ones, ones, ones),
        weights,
        mask,
        advantages,
        old,
        None,
        None,
        None,
    )
    token_log_probs = TokenLogProbs(log_probs, entropy)
    surrogate = partial(clipped_surrogate, clip_low=0.25, clip_high=0.3)
    value, metrics = policy_loss(token_log_probs, batch, surrogate, [entropy_bonus(0.1)])
    assert float(value) == pytest.approx(0.25 * (-2.2 - 0.06) + 0.5 * (-1.3 - 0.07))
    assert float(metrics["policy/loss"].weight) == 0.75
    assert float(metrics["policy/entropy"].value) == pytest.approx(2.1)
    assert float(metrics["policy/clip_high"].value) == 2

    near = batch.replace(reference_log_probs=jnp.log(jnp.array([[0.55, 0.2, 0.1]])))
    k3 = (
        0.5 - 1 - np.log(0.5)
    )  # of the second token, whose ratio is 2; the first is where the reference is
    assert float(policy_loss(token_log_probs, near, surrogate, [kl_part(0.7)])[0]) == pytest.approx(
        0.25 * -2.2 + 0.5 * -1.3 + 0.7 * 0.5 * 2 * k3
    )
    scaled = near.replace(weights=weights | {"kl": 3 * weights["policy"]})
    gained = (
        policy_loss(token_log_probs, scaled, surrogate, [kl_part(0.7)])[0]
        - policy_loss(token_log_probs, near, surrogate)[0]
    )
    assert float(gained) == pytest.approx(3 * 0.7 * 0.5 * 2 * k3)
