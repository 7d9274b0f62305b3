"""Objectives of policy-gradient methods: log-probabilities in, a loss for every token out; and what most of them share,
the batch that they learn from and PPO's loss of it."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from tpu_rl import masked
from tpu_rl.log_probs import TokenLogProbs, k1, k3
from tpu_rl.types import Array, First, Layout, Max, Metrics, Min, Rollout, Rows, Sum


@struct.dataclass
class PolicyBatch:
    """What a method with an importance ratio learns from. Leaves [M, K, R, S]; the loss sees [R, S]."""

    rows: Rows
    weights: dict[str, Array]
    """What a token counts as "policy"; as "kl", too, where the KL to the reference weighs otherwise."""
    action_mask: Array
    """Tokens that metrics are about."""
    advantages: Array
    old_log_probs: Array
    reference_log_probs: Array | None
    """None where nothing needs them."""
    importance: Array | None
    """What a token's loss is multiplied by as it was drawn from another distribution; None: it was not, or so it is
    taken."""
    sampler_log_probs: Array | None
    """Where the old log-probs are not the sampler's own: those, for the gap between sampler and trainer."""


def importance_ratio(log_probs: Array, old_log_probs: Array) -> Array:
    """policy / old policy of each token."""
    return jnp.exp(log_probs - old_log_probs)


def clipped_surrogate(ratio: Array, advantages: Array, clip_low: float, clip_high: float) -> Array:
    """-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A): PPO (arXiv 1707.06347, eq. 7), bounds as in DAPO."""
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return -jnp.minimum(ratio * advantages, clipped * advantages)


def dual_clip(losses: Array, advantages: Array, bound: float) -> Array:
    """Losses of bad actions capped at bound x |A|, so that one with a huge ratio cannot dominate (arXiv 1912.09729)."""
    return jnp.where(advantages < 0, jnp.minimum(losses, -bound * advantages), losses)


def clip_shares(ratio: Array, advantages: Array, clip_low: float, clip_high: float) -> tuple[Array, Array]:
    """Which tokens have no gradient because their ratio fell below, or rose above, the clip range. Two bool arrays."""
    return (ratio < 1.0 - clip_low) & (advantages < 0), (ratio > 1.0 + clip_high) & (advantages > 0)


def kl_loss(log_probs: Array, old_log_probs: Array, reference_log_probs: Array) -> Array:
    """A term whose value estimates the KL(policy || reference) of a token's distribution, with exactly its gradient.

    ratio x k3, differentiated through both: E_old[ratio k3] = E_policy[k3] = KL for every policy, so the gradients
    agree too, on and off policy. k3 alone misses the change of the distribution that tokens come from. Which prefixes
    are visited is taken as given: the KL of whole sequences needs k1 in the reward.
    """
    return importance_ratio(log_probs, old_log_probs) * k3(log_probs, reference_log_probs)


def adapted_kl_scale(scale: Array, kl: Array, target: float, horizon: float) -> Array:
    """scale x (1 + clip(kl / target - 1, +-0.2) / horizon): an adaptive KL coefficient (arXiv 1909.08593, eq. 4).

    `kl` and `target` are nats a completion; `horizon` is in optimizer steps: the paper's, in completions, over the
    completions of one step.
    """
    return scale * (1.0 + jnp.clip(kl / target - 1.0, -0.2, 0.2) / horizon)


def reference_metrics(log_probs: Array, reference_log_probs: Array, mask: Array, sequence_ids: Array) -> Metrics:
    """How far the policy is from the reference; all [R, S]. Per token by k3, and per completion, in nats, by k1."""
    completions = sequence_ids.max(-1).sum()
    return {
        "policy/kl_reference": Sum(
            masked.total(k3(log_probs, reference_log_probs), mask), mask.sum().astype(jnp.float32)
        ),
        "policy/kl_completion": Sum(
            masked.total(k1(log_probs, reference_log_probs), mask), completions.astype(jnp.float32)
        ),
    }


def policy_metrics(
    mask: Array,
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    clip_low: float,
    clip_high: float,
    sampler_log_probs: Array | None = None,
) -> Metrics:
    """What every method with an importance ratio reports of the tokens in `mask`; all [R, S].

    The gap is to the sampler's log-probs, which are the old ones unless others are given.
    """
    count = mask.sum().astype(jnp.float32)

    def average(values: Array) -> Sum:
        return Sum(masked.total(values.astype(jnp.float32), mask), count)

    ratio = importance_ratio(log_probs, old_log_probs)
    low, high = clip_shares(ratio, advantages, clip_low, clip_high)
    gap = jnp.abs(log_probs - (old_log_probs if sampler_log_probs is None else sampler_log_probs))
    return {
        "policy/ratio_min": Min(jnp.where(mask, ratio, jnp.inf).min()),
        "policy/ratio_max": Max(jnp.where(mask, ratio, 0.0).max()),
        "policy/clip_low": average(low),
        "policy/clip_high": average(high),
        "policy/kl_old": average(k3(log_probs, old_log_probs)),
        "policy/log_prob_gap_mean": First(average(gap)),
        "policy/log_prob_gap_max": First(Max(jnp.where(mask, gap, 0.0).max())),
    }


def importance_weights(log_probs: Array, behaviour_log_probs: Array, cap: float) -> Array:
    """min(old policy / behaviour, cap) of each token: truncated importance sampling (Ionides 2008).

    Without a cap the loss's expectation is that under the old policy, wherever the behaviour draws what that may draw;
    the cap bounds the variance and leaves a bias. The behaviour is what really drew: top-k and its like, penalties, a
    guide, or the same weights in other programs. With the proximal policy's log-probs as `log_probs` it is the weight
    of the decoupled objective (AReaL, arXiv 2505.24298, eq. 5).
    """
    return jnp.minimum(jnp.exp(log_probs - behaviour_log_probs), cap)


def policy_batch(
    rollout: Rollout,
    layout: Layout,
    advantages: Array,
    weights: Array,
    reference_log_probs: Array | None,
    *,
    old_log_probs: Array | None = None,
    importance_cap: float | None = None,
) -> PolicyBatch:
    """Advantages and weights [N, T], one completion a row; log-probs of models are packed [M, K, R, S].

    `old_log_probs`: the ratio's, in place of the sampler's. With a cap, losses are weighted by `importance_weights`.
    """
    sampled = layout.pack(rollout.log_probs)
    old = sampled if old_log_probs is None else old_log_probs
    importance, drawn = None, layout.pack(rollout.action_mask)
    if importance_cap is not None:
        found = importance_weights(old, layout.pack(rollout.behaviour_log_probs), importance_cap)
        importance = jnp.where(drawn, found, 1.0)
    return PolicyBatch(
        rows=layout.rows(rollout.tokens),
        weights={"policy": layout.pack(weights)},
        action_mask=drawn,
        advantages=layout.pack(advantages),
        old_log_probs=old,
        reference_log_probs=reference_log_probs,
        importance=importance,
        sampler_log_probs=None if old_log_probs is None else sampled,
    )


def proximal_loss(
    found: TokenLogProbs,
    batch: PolicyBatch,
    clip: tuple[float, float],
    *,
    entropy_coef: float = 0.0,
    kl_coef: float = 0.0,
    bound: float | None = None,
) -> tuple[Array, Metrics]:
    """(sum w [-c min(ratio A, clip(ratio) A) - entropy_coef H + kl_coef c KL], metrics) of a micro-batch [R, S].

    c is the batch's `importance`, if it has one: both terms are expectations under the old policy.

    `found` is what the policy gives its tokens now, `clip` is (low, high), `bound` caps a bad action's loss
    (`dual_clip`). The KL is `kl_loss`, to the reference whose log-probs the batch has, if any.
    """
    mask, weights, old, advantages = batch.action_mask, batch.weights, batch.old_log_probs, batch.advantages
    # A number, and no gradient, outside the mask: zero times an infinite ratio would be NaN.
    log_probs = jnp.where(mask, found.log_probs, 0.0)
    losses = clipped_surrogate(importance_ratio(log_probs, old), advantages, *clip)
    if bound is not None:
        losses = dual_clip(losses, advantages, bound)
    if batch.importance is not None:
        losses *= batch.importance
    learned = weights["policy"] > 0
    value = masked.total(weights["policy"] * (losses - entropy_coef * found.entropy), learned)
    metrics = policy_metrics(mask, log_probs, old, advantages, *clip, batch.sampler_log_probs) | {
        "policy/loss": Sum(value, weights["policy"].sum()),
        "policy/entropy": Sum(masked.total(found.entropy, mask), mask.sum().astype(jnp.float32)),
    }
    if batch.importance is not None:
        metrics["policy/importance"] = Sum(masked.total(batch.importance, mask), mask.sum().astype(jnp.float32))
    if batch.reference_log_probs is not None:
        kl = kl_loss(log_probs, old, batch.reference_log_probs)
        if batch.importance is not None:
            kl *= batch.importance
        value += kl_coef * masked.total(weights.get("kl", weights["policy"]) * kl, learned)
        metrics |= reference_metrics(log_probs, batch.reference_log_probs, mask, batch.rows.sequence_ids)
    return value, metrics
