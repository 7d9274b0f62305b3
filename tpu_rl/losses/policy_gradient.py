"""Losses of policy-gradient methods: surrogates, and the loss that puts them together.

A surrogate is a function of log-probs and advantages, one loss per token. `policy_loss` takes it as
an argument and adds the entropy bonus, the KL term and the metrics. A method with another surrogate
(PPO's, GSPO's, CISPO's) writes that function only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tpu_rl.losses import masked
from tpu_rl.losses.log_probs import TokenLogProbs, k1, k3
from tpu_rl.losses.policy_batch import PolicyBatch
from tpu_rl.losses.reference_kl import LossEstimator, kl_loss
from tpu_rl.types import Array, First, Layout, Max, Metrics, Min, PackedRows, PerToken, Rollout, Sum


class Surrogate(NamedTuple):
    """Policy loss of each token, and what to report about it. All [R, S]."""

    losses: Array
    """To be minimized: the negative of the objective."""
    ratio: Array
    """Importance ratio that the losses use, of the token or of its sequence."""
    clipped_low: Array | None = None
    """bool: tokens where the lower bound of the ratio took effect; None without a lower bound."""
    clipped_high: Array | None = None
    """bool: tokens where the upper bound took effect; None without an upper bound."""


SurrogateFunction = Callable[[Array, Array, Array, PackedRows], Surrogate]
"""(log_probs, old_log_probs, advantages, rows) -> Surrogate; arrays are [R, S].

Log-probs are zero at tokens that the policy did not choose, and so are `rows.sequence_ids`: a sum
over a sequence is one over its actions (`masked.sequence_total`).
"""


class LossTerm(NamedTuple):
    """A further term of a loss: sum_t w_t losses_t over tokens with a weight."""

    weights: Callable[[Rollout, Layout], Array] | None
    """(rollout, layout) -> [N, T] weights, which sum to the weight of the term in each optimizer
    step, e.g. by `masked.token_mean`. None: the algorithm adds them to the batch itself."""
    losses: Callable[[Array, PolicyBatch], Array]
    """(log-probs under the params being trained, batch) -> losses, all [R, S]."""


def importance_ratio(log_probs: Array, old_log_probs: Array) -> Array:
    """Return policy / old policy of each token."""
    return jnp.exp(log_probs - old_log_probs)


def clipped_loss(ratio: Array, advantages: Array, clip_low: float, clip_high: float) -> Array:
    """Return -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A).

    PPO (arXiv 1707.06347, eq. 7), with separate bounds as in DAPO.
    """
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return -jnp.minimum(ratio * advantages, clipped * advantages)


def dual_clipped_loss(losses: Array, advantages: Array, bound: float) -> Array:
    """Cap the losses of bad actions at bound x |A|, so that a huge ratio cannot dominate (arXiv
    1912.09729)."""
    return jnp.where(advantages < 0, jnp.minimum(losses, -bound * advantages), losses)


def clipped_ratio_surrogate(
    ratio: Array,
    advantages: Array,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Surrogate:
    """Return `clipped_loss` of any ratio as a Surrogate, capped by `dual_clip` if given.

    A token counts as clipped where `clipped_loss` has no gradient.
    """
    losses = clipped_loss(ratio, advantages, clip_low, clip_high)
    if dual_clip is not None:
        losses = dual_clipped_loss(losses, advantages, dual_clip)
    return Surrogate(
        losses=losses,
        ratio=ratio,
        clipped_low=(ratio < 1.0 - clip_low) & (advantages < 0),
        clipped_high=(ratio > 1.0 + clip_high) & (advantages > 0),
    )


def clipped_surrogate(
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    rows: PackedRows,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Surrogate:
    """Return PPO's and GRPO's surrogate: the clipped ratio of each token."""
    del rows
    return clipped_ratio_surrogate(
        importance_ratio(log_probs, old_log_probs),
        advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )


def policy_loss(
    policy: TokenLogProbs,
    batch: PolicyBatch,
    surrogate: SurrogateFunction,
    *,
    entropy_coef: float = 0.0,
    kl_coef: float = 0.0,
    kl_estimator: LossEstimator = "exact",
    further_terms: Mapping[str, LossTerm] = MappingProxyType({}),
) -> tuple[Array, Metrics]:
    """Return the loss of one micro-batch [R, S], and metrics.

        sum_t w_t (c_t losses_t - entropy_coef H_t + kl_coef c_t KL_t)  +  further terms

    losses_t come from `surrogate`. c_t is the batch's `importance`, or 1: both terms with it are
    expectations under the old policy. KL_t is `reference_kl.kl_loss`, if the batch has
    reference log-probs. Its weights are "kl" if the batch has those, and those of the entropy,
    times its coefficient, are "entropy".

    Args:
      policy: log-probs and entropies of the tokens under the params being trained.
      batch: one micro-batch.
      surrogate: the policy loss of each token.
      entropy_coef: coefficient of the entropy bonus.
      kl_coef: coefficient of the KL to the reference.
      kl_estimator: its form, see `reference_kl`.
      further_terms: terms by name, each with weights of that name in the batch.
    """
    mask = batch.action_mask
    weights = batch.weights["policy"]
    # Outside the mask, a number without a gradient: zero times an infinite ratio would be NaN.
    log_probs = jnp.where(mask, policy.log_probs, 0.0)
    action_ids = jnp.where(mask, batch.rows.sequence_ids, 0)
    rows = dataclasses.replace(batch.rows, sequence_ids=action_ids)
    terms = surrogate(log_probs, batch.old_log_probs, batch.advantages, rows)
    losses, metrics = corrected_losses(terms.losses, log_probs, batch)
    learned = weights > 0
    bonus_weights = batch.weights.get("entropy", entropy_coef * weights)
    if batch.high_entropy is not None:
        losses = jnp.where(batch.high_entropy > 0, losses, 0.0)
        bonus_weights *= batch.high_entropy
        metrics["policy/high_entropy"] = masked.average(batch.high_entropy, learned)
    loss = masked.total(weights * losses - bonus_weights * policy.entropy, learned)
    metrics |= policy_metrics(terms, mask, log_probs, batch.old_log_probs, batch.sampler_log_probs)
    metrics["policy/loss"] = Sum(loss, weights.sum())
    metrics["policy/entropy"] = masked.average(policy.entropy, mask)
    if "entropy" in batch.weights:
        metrics["policy/entropy_coef"] = Sum(batch.weights["entropy"].sum(), weights.sum())
    metrics |= token_metrics(policy, mask, batch.sampler_log_probs, batch.old_log_probs)
    if batch.compared is not None:
        metrics["policy/compared"] = masked.average(batch.compared, mask)
    if batch.thoughts is not None:
        metrics["policy/thoughts"] = masked.average(batch.thoughts, mask)
    if batch.reference_log_probs is not None:
        kl = kl_loss(log_probs, batch.old_log_probs, batch.reference_log_probs, kl_estimator)
        if batch.importance is not None:
            kl *= batch.importance
        kl_weights = batch.weights.get("kl", weights)
        if "kl" in batch.weights:
            metrics["policy/kl_scale"] = Sum(kl_weights.sum(), weights.sum())
        loss += kl_coef * masked.total(kl_weights * kl, learned)
        metrics |= reference_metrics(
            log_probs, batch.reference_log_probs, mask, batch.rows.sequence_ids
        )
    for name, term in further_terms.items():
        term_weights = batch.weights[name]
        term_losses = term.losses(policy.log_probs, batch)
        value = masked.total(term_weights * term_losses, term_weights > 0)
        loss += value
        metrics[f"policy/{name}_loss"] = Sum(value, term_weights.sum())
    return loss, metrics


def corrected_losses(losses: Array, log_probs: Array, batch: PolicyBatch) -> tuple[Array, Metrics]:
    """Apply the correction for the sampler to the policy losses [R, S], and return its metrics.

    The losses are multiplied by the batch's importance weights. With an off-policy mask, a
    completion with a negative advantage has none if the mean over its tokens of log sampler - log
    policy is above the threshold (arXiv 2512.02556, eq. 9). The policy is the present one, so later
    optimizer steps of a batch mask more. `log_probs` are zero outside the mask.
    """
    mask = batch.action_mask
    metrics: Metrics = {}
    if batch.importance is not None:
        losses *= batch.importance
        metrics["policy/importance"] = masked.average(batch.importance, mask)
    if batch.importance_capped is not None:
        metrics["policy/importance_capped"] = masked.average(batch.importance_capped, mask)
    if batch.rejected is not None:
        metrics["policy/rejected"] = masked.average(batch.rejected, mask)
    if batch.off_policy_mask_threshold is not None:
        sampler = batch.sampler_log_probs
        gap = (batch.old_log_probs if sampler is None else sampler) - log_probs
        ids = jnp.where(mask, batch.rows.sequence_ids, 0)
        lengths = masked.sequence_total(mask.astype(gap.dtype), ids)
        mean_gap = masked.sequence_total(jax.lax.stop_gradient(gap), ids) / jnp.maximum(lengths, 1)
        is_off = (batch.advantages < 0) & (mean_gap > batch.off_policy_mask_threshold)
        losses = jnp.where(is_off, 0.0, losses)
        metrics["policy/off_policy_masked"] = masked.average(is_off.astype(jnp.float32), mask)
    return losses, metrics


def policy_metrics(
    surrogate: Surrogate,
    mask: Array,
    log_probs: Array,
    old_log_probs: Array,
    sampler_log_probs: Array | None = None,
) -> Metrics:
    """Return the metrics of every method with an importance ratio, over the tokens in `mask`.

    All arrays are [R, S]. The ratio and the clipped shares are the surrogate's own. The log-prob
    gap is to the sampler: to the old log-probs unless `sampler_log_probs` are given.
    """
    if sampler_log_probs is None:
        sampler_log_probs = old_log_probs
    gap = jnp.abs(log_probs - sampler_log_probs)
    metrics: Metrics = {
        "policy/ratio_min": Min(jnp.where(mask, surrogate.ratio, jnp.inf).min()),
        "policy/ratio_max": Max(jnp.where(mask, surrogate.ratio, 0.0).max()),
        "policy/kl_old": masked.average(k3(log_probs, old_log_probs), mask),
        "policy/log_prob_gap_mean": First(masked.average(gap, mask)),
        "policy/log_prob_gap_max": First(Max(jnp.where(mask, gap, 0.0).max())),
    }
    if surrogate.clipped_low is not None:
        metrics["policy/clip_low"] = masked.average(surrogate.clipped_low.astype(jnp.float32), mask)
    if surrogate.clipped_high is not None:
        metrics["policy/clip_high"] = masked.average(
            surrogate.clipped_high.astype(jnp.float32), mask
        )
    return metrics


def token_metrics(
    policy: TokenLogProbs, mask: Array, sampler_log_probs: Array | None, old_log_probs: Array
) -> Metrics:
    """Return the numbers of single tokens: entropy, and trainer's minus sampler's log-prob.

    All arrays are [R, S], and the results are zero outside `mask`.
    """
    if sampler_log_probs is None:
        sampler_log_probs = old_log_probs
    return {
        "token/entropy": PerToken(jnp.where(mask, policy.entropy, 0.0)),
        "token/gap": PerToken(jnp.where(mask, policy.log_probs - sampler_log_probs, 0.0)),
    }


def reference_metrics(
    log_probs: Array, reference_log_probs: Array, mask: Array, sequence_ids: Array
) -> Metrics:
    """Return the distance from policy to reference: per token by k3, and per completion, in nats,
    by k1. All arrays are [R, S]."""
    completions = masked.sequence_count(mask, sequence_ids)
    completion_kl = masked.total(k1(log_probs, reference_log_probs), mask)
    return {
        "policy/kl_reference": masked.average(k3(log_probs, reference_log_probs), mask),
        "policy/kl_completion": Sum(completion_kl, completions.astype(jnp.float32)),
    }
