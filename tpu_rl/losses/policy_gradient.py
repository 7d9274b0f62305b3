"""Losses of policy-gradient methods: surrogates, the KL as a loss, and the loss that puts them
together.

A surrogate is a function of log-probs and advantages, one loss per token. `policy_loss` takes it as
an argument and adds the entropy bonus, the KL term and the metrics. A method with another surrogate
(PPO's, GSPO's, CISPO's) writes that function only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax.numpy as jnp

from tpu_rl.losses import masked
from tpu_rl.losses.log_probs import TokenLogProbs, k1, k3
from tpu_rl.losses.policy_batch import PolicyBatch
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


def kl_loss(log_probs: Array, old_log_probs: Array, reference_log_probs: Array) -> Array:
    """Return a term per token whose expectation is the KL(policy || reference) of the token's
    distribution, with exactly the KL's gradient.

    The term is ratio x k3, differentiated through both factors. E_old[ratio k3] = E_policy[k3] = KL
    for every policy, so the gradients agree too, on and off policy. The gradient of k3 alone misses
    that the distribution of the tokens changes. The prefixes are taken as given: for the KL of
    whole sequences, put k1 into the reward.
    """
    return importance_ratio(log_probs, old_log_probs) * k3(log_probs, reference_log_probs)


def adapted_kl_scale(scale: Array, kl: Array, target: float, horizon: float) -> Array:
    """Return scale x (1 + clip(kl / target - 1, +-0.2) / horizon): an adaptive KL coefficient
    (arXiv 1909.08593, eq. 4).

    `kl` and `target` are nats per completion. `horizon` is in optimizer steps: the paper's horizon,
    in completions, divided by the completions of one step.
    """
    return scale * (1.0 + jnp.clip(kl / target - 1.0, -0.2, 0.2) / horizon)


def policy_loss(
    policy: TokenLogProbs,
    batch: PolicyBatch,
    surrogate: SurrogateFunction,
    *,
    entropy_coef: float = 0.0,
    kl_coef: float = 0.0,
    further_terms: Mapping[str, LossTerm] = MappingProxyType({}),
) -> tuple[Array, Metrics]:
    """Return the loss of one micro-batch [R, S], and metrics.

        sum_t w_t (c_t losses_t - entropy_coef H_t + kl_coef c_t KL_t)  +  further terms

    losses_t come from `surrogate`. c_t is the batch's `importance`, or 1: both terms with it are
    expectations under the old policy. KL_t is `kl_loss` to the reference, if the batch has
    reference log-probs. Its weights are "kl" if the batch has those.

    Args:
      policy: log-probs and entropies of the tokens under the params being trained.
      batch: one micro-batch.
      surrogate: the policy loss of each token.
      entropy_coef: coefficient of the entropy bonus.
      kl_coef: coefficient of the KL to the reference.
      further_terms: terms by name, each with weights of that name in the batch.
    """
    mask = batch.action_mask
    weights = batch.weights["policy"]
    # Outside the mask, a number without a gradient: zero times an infinite ratio would be NaN.
    log_probs = jnp.where(mask, policy.log_probs, 0.0)
    action_ids = jnp.where(mask, batch.rows.sequence_ids, 0)
    rows = dataclasses.replace(batch.rows, sequence_ids=action_ids)
    terms = surrogate(log_probs, batch.old_log_probs, batch.advantages, rows)
    losses = terms.losses
    if batch.importance is not None:
        losses *= batch.importance
    learned = weights > 0
    loss = masked.total(weights * (losses - entropy_coef * policy.entropy), learned)
    metrics = policy_metrics(terms, mask, log_probs, batch.old_log_probs, batch.sampler_log_probs)
    metrics["policy/loss"] = Sum(loss, weights.sum())
    metrics["policy/entropy"] = masked.average(policy.entropy, mask)
    metrics |= token_metrics(policy, mask, batch.sampler_log_probs, batch.old_log_probs)
    if batch.importance is not None:
        metrics["policy/importance"] = masked.average(batch.importance, mask)
        if batch.importance_cap is not None:
            is_capped = batch.importance >= batch.importance_cap
            capped = masked.average(is_capped.astype(jnp.float32), mask)
            metrics["policy/importance_capped"] = capped
    if batch.compared is not None:
        metrics["policy/compared"] = masked.average(batch.compared, mask)
    if batch.reference_log_probs is not None:
        kl = kl_loss(log_probs, batch.old_log_probs, batch.reference_log_probs)
        if batch.importance is not None:
            kl *= batch.importance
        kl_weights = batch.weights.get("kl", weights)
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
