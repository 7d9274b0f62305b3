"""Scores of whole completions, from the outputs of a reward model at some of their tokens.

The algorithms that train reward models share this with `rewards.reward_model`, which uses them, so
that a completion has one score. Arrays are packed rows [R, S], or one completion per row [N, T].
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from tpu_rl.losses import masked
from tpu_rl.losses.shapes import (
    BoolNT,
    BoolRS,
    FloatNT,
    FloatRS,
    FloatRSD,
    Floats,
    FloatsV,
    IntNT,
    IntRS,
)
from tpu_rl.types import Array

Aggregate = Literal["attention", "sum"]
"""Score of a completion from the worths of its sentences: a learned weighted mean, or the sum."""

StepAggregate = Literal["min", "product", "mean"]
"""Score of a completion from the probabilities of its steps: the log of the smallest one or of the
product, or their mean."""


def last_actions(action_mask: BoolNT) -> BoolNT:
    """Mark the last action of each row, [N, T] bool -> [N, T] bool."""
    return action_mask & (jnp.cumsum(action_mask[:, ::-1], axis=-1)[:, ::-1] == 1)


def sentence_ends(tokens: IntNT, action_mask: BoolNT, separators: tuple[int, ...]) -> BoolNT:
    """Mark the actions that end a sentence or a step, [N, T] bool.

    These are the separator tokens and the last action of each row.
    """
    if not separators:
        return last_actions(action_mask)
    is_separator = jnp.isin(tokens, jnp.asarray(separators, tokens.dtype))
    return (is_separator & action_mask) | last_actions(action_mask)


def sentence_starts(ends: BoolNT, action_mask: BoolNT) -> IntNT:
    """Compute the column where each token's sentence starts, [N, T] int32.

    That is the end of the sentence before it, or the last token of the prompt; column 0 if there is
    no prompt. `ends` are those of `sentence_ends`.
    """
    columns = jnp.arange(ends.shape[1])[None]
    first_action = jnp.argmax(action_mask, axis=1)[:, None]
    latest_end = jax.lax.cummax(jnp.where(ends, columns, -1), axis=1)
    end_before = jnp.pad(latest_end[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    return jnp.maximum(jnp.maximum(end_before, first_action - 1), 0).astype(jnp.int32)


def means_and_deviations(outputs: Array) -> tuple[Array, Array]:
    """Compute the means and deviations that K heads predict, [..., 2 K] -> two [..., K].

    Each head has two neighboring outputs: a mean m, and x of the deviation s = log(1 + e^x).
    """
    return outputs[..., ::2], jax.nn.softplus(outputs[..., 1::2])


def pessimistic(
    outputs: FloatsV, penalty: float, worst_share: float = 0.0, deviations: bool = False
) -> Floats:
    """Compute an ensemble's prediction, [..., K] -> [...].

        (1 - worst_share) mean + worst_share min - penalty x standard deviation

    With `deviations`, [..., 2 K] are means and deviations (`means_and_deviations`). The head with
    the smallest deviation then takes the place of the mean, as in BRME, and the standard deviation
    is that of the mixture of the heads: sqrt(variance of m + mean of s^2).

    Where the K members disagree, the data say little, and a policy should not be led there (arXiv
    2310.02743, "uncertainty-weighted optimization", with the standard deviation instead of the
    variance). The mix with the smallest member is that of reward-robust RLHF (arXiv 2409.15360).
    """
    means = outputs
    center = outputs.mean(-1)
    if deviations:
        means, own = means_and_deviations(outputs)
        surest = jnp.argmin(own, axis=-1, keepdims=True)
        center = jnp.take_along_axis(means, surest, axis=-1)[..., 0]
    if worst_share:
        center = (1 - worst_share) * center + worst_share * means.min(-1)
    return center - penalty * deviation(outputs, deviations)


def deviation(outputs: FloatsV, deviations: bool = False) -> Floats:
    """Compute the standard deviation of an ensemble's prediction, [..., K] or [..., 2 K] -> [...].

    It is that of the members, or of the mixture of members with deviations of their own.
    """
    if not deviations:
        return outputs.std(-1)
    means, own = means_and_deviations(outputs)
    return jnp.sqrt(means.var(-1) + jnp.square(own).mean(-1))


def sentence_scores(
    outputs: FloatRSD, ends: BoolRS, starts: IntRS, sequence_ids: IntRS, aggregate: Aggregate
) -> FloatRS:
    """Compute the score of each token's completion: the sum of `sentence_shares`.

    The result is [R, S], zero at prompt and padding.
    """
    shares = sentence_shares(outputs, ends, starts, sequence_ids, aggregate)
    return masked.sequence_total(shares, sequence_ids)


def sentence_shares(
    outputs: FloatRSD, ends: BoolRS, starts: IntRS, sequence_ids: IntRS, aggregate: Aggregate
) -> FloatRS:
    """Compute the share of each sentence in the score of its completion (arXiv 2503.04793).

    Sentence i is worth r_i = h(its end) - h(its start), so all together are worth h(end) -
    h(prompt). "attention" is sum_i softmax_i(a(its end)) r_i and "sum" is sum_i r_i. The paper does
    not say how the attention is parametrized; here it is one more output of the head.

    Args:
      outputs: [R, S, 2], a level h and an attention logit a.
      ends: [R, S] bool, True on the last token of a sentence.
      starts: [R, S] int32, the slot of the start of each token's sentence.
      sequence_ids: [R, S], as in `types.PackedRows`.
      aggregate: "attention" or "sum".

    Returns:
      [R, S]: softmax_i(a) r_i or r_i at the ends of sentences, zero elsewhere.
    """
    level = outputs[..., 0]
    attention = outputs[..., 1]
    worth = level - jnp.take_along_axis(level, starts, axis=1)
    if aggregate == "sum":
        return jnp.where(ends, worth, 0.0)
    # The softmax is over the ends of a sequence; its largest logit is subtracted first.
    logits = jnp.where(ends, attention, -jnp.inf)
    highest = jax.lax.stop_gradient(masked.sequence_max(logits, sequence_ids))
    weight = jnp.where(ends, jnp.exp(jnp.where(ends, attention - highest, 0.0)), 0.0)
    normalizer = masked.sequence_total(weight, sequence_ids)
    return jnp.where(ends, weight * worth / jnp.where(normalizer > 0, normalizer, 1.0), 0.0)


def prefix_shares(prefix_scores: FloatNT, ends: BoolNT, action_mask: BoolNT) -> FloatNT:
    """Compute the share of each part in the score of a completion, [N, T], at the ends of parts.

    `prefix_scores` [N, T] are scores of everything up to a token. A part is worth s(its end) -
    s(the end before it), and the first one s(its end), so that they add up to the score at the last
    action. As a reward this is potential-based shaping (Ng et al., ICML 1999): it moves credit, and
    changes no return.
    """
    starts = sentence_starts(ends, action_mask)
    before = jnp.take_along_axis(prefix_scores, starts, axis=1)
    has_before = jnp.take_along_axis(action_mask, starts, axis=1)
    return jnp.where(ends, prefix_scores - jnp.where(has_before, before, 0.0), 0.0)


def step_shares(
    logits: FloatNT, ends: BoolNT, action_mask: BoolNT, aggregate: StepAggregate
) -> FloatNT:
    """Compute the share of each step in `step_scores`, [N, T], at the ends of steps.

    "product": log p_k. "mean": p_k over the number of steps. "min": the fall of the smallest log p
    so far, from 0 (PURE, arXiv 2504.15275, has this credit in the limit).
    """
    log_probability = jnp.where(ends, jax.nn.log_sigmoid(logits), 0.0)
    if aggregate == "product":
        return log_probability
    if aggregate == "mean":
        probability = jnp.where(ends, jax.nn.sigmoid(logits), 0.0)
        return probability / jnp.maximum(ends.sum(axis=1, keepdims=True), 1)
    return prefix_shares(jax.lax.cummin(log_probability, axis=1), ends, action_mask)


def step_scores(
    logits: FloatRS, ends: BoolRS, sequence_ids: IntRS, aggregate: StepAggregate
) -> FloatRS:
    """Compute the score of each token's completion, made of its steps (arXiv 2305.20050).

    "min" is the log-probability of the weakest step being right, "product" that of all steps being
    right as if they were independent. "mean" is the mean probability of a step, from 0 to 1, as
    ReasonFlux-PRM adds it to the outcome (arXiv 2506.18896). All arrays are [R, S]: `logits` of a
    step being right, `ends` True on the last token of a step. The result is zero at prompt and
    padding.
    """
    log_probability = jnp.where(ends, jax.nn.log_sigmoid(logits), 0.0)
    if aggregate == "product":
        return masked.sequence_total(log_probability, sequence_ids)
    if aggregate == "mean":
        probability = jnp.where(ends, jax.nn.sigmoid(logits), 0.0)
        count = masked.sequence_total(ends.astype(probability.dtype), sequence_ids)
        return masked.sequence_total(probability, sequence_ids) / jnp.maximum(count, 1)
    return -masked.sequence_max(-log_probability, sequence_ids)
