"""Losses of policy-gradient methods: surrogates, and the loss that puts them together.

A surrogate is a function of log-probs and advantages, one loss per token. `policy_loss` takes it as
an argument, lets the parts of the method change and add to it, and adds the metrics. A method with
another surrogate (PPO's, GSPO's, CISPO's) writes that function only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from types import MappingProxyType
from typing import Annotated, NamedTuple

import jax.numpy as jnp

from tpu_rl import ranges
from tpu_rl.losses import masked
from tpu_rl.losses.log_probs import TokenLogProbs, k3
from tpu_rl.losses.policy_batch import Part, PolicyBatch, Prediction
from tpu_rl.losses.shapes import BoolRS, FloatRS, FloatRSD, Floats, Scalar
from tpu_rl.ranges import In, Positive
from tpu_rl.types import Array, First, Max, Metrics, Min, PackedRows, Params, PerToken, Sum


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


def importance_ratio(log_probs: Floats, old_log_probs: Floats) -> Floats:
    """Compute policy / old policy of each token."""
    return jnp.exp(log_probs - old_log_probs)


def clipped_loss(ratio: Floats, advantages: Floats, clip_low: float, clip_high: float) -> Floats:
    """Compute -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A).

    PPO (arXiv 1707.06347, eq. 7), with separate bounds as in DAPO.
    """
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return -jnp.minimum(ratio * advantages, clipped * advantages)


def dual_clipped_loss(losses: Floats, advantages: Floats, bound: float) -> Floats:
    """Cap the losses of bad actions at bound x |A|, so that a huge ratio cannot dominate (arXiv
    1912.09729)."""
    return jnp.where(advantages < 0, jnp.minimum(losses, -bound * advantages), losses)


def clipped_ratio_surrogate(
    ratio: Floats,
    advantages: Floats,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Surrogate:
    """Compute `clipped_loss` of any ratio as a Surrogate, capped by `dual_clip` if given.

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
    log_probs: Floats,
    old_log_probs: Floats,
    advantages: Floats,
    rows: PackedRows,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Surrogate:
    """Compute PPO's and GRPO's surrogate: the clipped ratio of each token."""
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
    parts: Sequence[Part] = (),
    params: Params = MappingProxyType({}),
    hidden: FloatRSD | None = None,
) -> tuple[Scalar, Metrics]:
    """Compute the loss of a micro-batch and its metrics.

        sum_t w_t losses_t + the terms of the parts,    losses as the parts change them

    Args:
      policy: log-probs [R, S] under the params being trained.
      surrogate: the losses of tokens.
      parts: in the order of their effects.
      params: the whole params tree, for parts with models of their own.
      hidden: the policy's hidden states [R, S, D], for parts that read them.
    """
    mask = batch.action_mask
    weights = batch.weights["policy"]
    # Outside the mask, a number without a gradient: zero times an infinite ratio would be NaN.
    log_probs = jnp.where(mask, policy.log_probs, 0.0)
    action_ids = jnp.where(mask, batch.rows.sequence_ids, 0)
    rows = dataclasses.replace(batch.rows, sequence_ids=action_ids)
    prediction = Prediction(policy, log_probs, params, hidden)
    # losses_t, and w_t losses_t.
    terms = surrogate(log_probs, batch.old_log_probs, batch.advantages, rows)
    losses, metrics = terms.losses, {}
    for part in parts:
        if part.losses is not None:
            losses, others = part.losses(losses, log_probs, batch)
            metrics |= others
    values = weights * losses
    for part in parts:
        if part.weighted is not None:
            values, others = part.weighted(values, prediction, batch)
            metrics |= others
    loss = masked.total(values, weights > 0)
    metrics |= policy_metrics(terms, mask, log_probs, batch.old_log_probs, batch.sampler_log_probs)
    metrics |= token_metrics(policy, mask, batch.sampler_log_probs, batch.old_log_probs)
    metrics |= share_metrics(batch)
    metrics["policy/loss"] = Sum(loss, weights.sum())
    metrics["policy/entropy"] = masked.average(policy.entropy, mask)
    for part in parts:
        if part.term is not None:
            value, others = part.term(prediction, batch)
            loss += value
            metrics |= others
    return loss, metrics


def share_metrics(batch: PolicyBatch) -> Metrics:
    """Average `PolicyBatch.shares` over the actions."""
    mask = batch.action_mask
    return {name: masked.average(x, mask) for name, x in batch.shares.items()}


def policy_metrics(
    surrogate: Surrogate,
    mask: BoolRS,
    log_probs: FloatRS,
    old_log_probs: FloatRS,
    sampler_log_probs: FloatRS | None = None,
) -> Metrics:
    """Compute the metrics of every method with an importance ratio, over the tokens in `mask`.

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
    policy: TokenLogProbs, mask: BoolRS, sampler_log_probs: FloatRS | None, old_log_probs: FloatRS
) -> Metrics:
    """Collect the numbers of single tokens: entropy, and trainer's minus sampler's log-prob.

    All arrays are [R, S], and the results are zero outside `mask`.
    """
    if sampler_log_probs is None:
        sampler_log_probs = old_log_probs
    return {
        "token/entropy": PerToken(jnp.where(mask, policy.entropy, 0.0)),
        "token/gap": PerToken(jnp.where(mask, policy.log_probs - sampler_log_probs, 0.0)),
    }


def unclipped(
    log_probs: Floats, old_log_probs: Floats, advantages: Floats, rows: PackedRows
) -> Surrogate:
    """Compute -ratio A of each token."""
    ratio = importance_ratio(log_probs, old_log_probs)
    return Surrogate(-ratio * advantages, ratio)


def clipped(low: float, high: float, dual: float | None = None) -> SurrogateFunction:
    """Make `clipped_surrogate` with these bounds."""
    return partial(clipped_surrogate, clip_low=low, clip_high=high, dual_clip=dual)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipSettings(ranges.Checked):
    """Settings of the clipped surrogate."""

    clip_low: Annotated[float, In("(0, 1)")] = 0.2
    """A ratio below 1 - clip_low has no gradient where the advantage is negative."""
    clip_high: Positive = 0.2
    """A ratio above 1 + clip_high has no gradient where the advantage is positive."""
    dual_clip: Annotated[float, In("(1, inf)")] | None = None
    """Cap on the loss of a bad action, in units of |A|; 3 is usual."""

    @property
    def surrogate_function(self) -> SurrogateFunction:
        """The clipped surrogate with these bounds."""
        return clipped(self.clip_low, self.clip_high, self.dual_clip)
