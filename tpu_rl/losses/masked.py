"""Reductions over a mask, and the weights that turn a loss into a plain sum.

No other module of the library reduces over tokens on its own. A mask is True where a value counts.
A masked-out value never reaches a result, not even as NaN times zero.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from tpu_rl.losses.shapes import (
    BoolNT,
    BoolRS,
    Bools,
    FloatNT,
    FloatRS,
    Floats,
    IntN,
    IntRS,
    NumberNT,
)
from tpu_rl.types import Array, Sum


def total(values: Array, mask: Array, axis: int | tuple[int, ...] | None = None) -> Array:
    """Compute the sum of `values` where `mask` is True."""
    return jnp.sum(jnp.where(mask, values, 0.0), axis=axis)


def mean(values: Array, mask: Array, axis: int | tuple[int, ...] | None = None) -> Array:
    """Compute the mean of `values` where `mask` is True, or zero where the mask is empty."""
    return total(values, mask, axis) / jnp.maximum(jnp.sum(mask, axis=axis), 1)


def last(mask: BoolRS) -> BoolRS:
    """Mark the last token of each row's mask, [N, T]."""
    following = jnp.cumsum(mask[:, ::-1], axis=1)[:, ::-1]
    return mask & (following == 1)


def average(values: Floats, mask: Bools) -> Sum:
    """Make a metric: the mean of `values` where `mask` is True."""
    return Sum(total(values, mask), mask.sum().astype(jnp.float32))


def weighted_average(values: Floats, weights: Floats) -> Sum:
    """Make a metric: the mean of `values` under `weights`; zero weights count nothing."""
    return Sum(total(weights * values, weights > 0), weights.sum())


def whiten(values: Floats, mask: Bools, shift_mean: bool = True, epsilon: float = 1e-8) -> Floats:
    """Scale `values` to variance one over the mask, and shift them to mean zero if `shift_mean`."""
    # Subtract the smallest value first. The float32 mean of many equal values is not quite their
    # value, and dividing that rounding error by itself would give an advantage near one.
    smallest = jnp.min(values, initial=jnp.inf, where=mask)
    values = jnp.where(mask, values - smallest, 0.0)
    center = mean(values, mask)
    variance = mean(jnp.square(values - center), mask)
    white = (values - center) * jax.lax.rsqrt(variance + epsilon)
    return jnp.where(mask, white if shift_mean else white + center + smallest, 0.0)


def sequence_total(values: FloatRS, sequence_ids: IntRS) -> FloatRS:
    """Sum `values` over each token's own sequence, in packed rows.

    Args:
      values: [R, S].
      sequence_ids: [R, S], as in `types.PackedRows`; 0 at prompt and padding.

    Returns:
      [R, S]. Every token of a sequence holds the sequence's sum, so that a sequence-level term is
      one more per-token array with weights (GSPO's ratio, DPO's margin). Zero where the id is 0.
    """

    def row_totals(row: Array, ids: Array) -> Array:
        # One segment for each possible id, and one for id 0.
        sums = jax.ops.segment_sum(row, ids, num_segments=row.shape[0] + 1)
        return jnp.where(ids > 0, sums[ids], 0.0)

    return jax.vmap(row_totals)(values, sequence_ids)


def sequence_count(mask: BoolRS, sequence_ids: IntRS) -> Array:
    """Count the sequences, [], that have a token in `mask`, in packed rows [R, S]."""

    def row_count(row: Array, ids: Array) -> Array:
        tokens = jax.ops.segment_sum(row.astype(jnp.int32), ids, num_segments=row.shape[0] + 1)
        return (tokens[1:] > 0).sum()

    return jax.vmap(row_count)(mask, sequence_ids).sum()


def sequence_max(values: FloatRS, sequence_ids: IntRS) -> FloatRS:
    """Compute the largest value of each token's own sequence, in packed rows [R, S] -> [R, S].

    Zero where the sequence id is 0; see `sequence_total`.
    """

    def row_maxima(row: Array, ids: Array) -> Array:
        maxima = jax.ops.segment_max(row, ids, num_segments=row.shape[0] + 1)
        return jnp.where(ids > 0, maxima[ids], 0.0)

    return jax.vmap(row_maxima)(values, sequence_ids)


# Weights of tokens in one optimizer step.
#
# Each function takes mask [N, T] bool, minibatch [N] (the optimizer step that learns from a row;
# `minibatches` if none does) and the number of optimizer steps. Each returns [N, T] float32,
# normalized over the whole optimizer step, so that micro-batches, devices and packing add up.

Weighting = Callable[[Array, Array, int], Array]
"""(mask, minibatch, minibatches) -> weights."""
LossAggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant_length"]


def token_mean(mask: NumberNT, minibatch: IntN, minibatches: int) -> FloatNT:
    """Weigh every token of the step alike: 1 / number of tokens (DAPO, arXiv 2503.14476).

    In place of a mask, tokens may have weights, which then sum to 1 over the step.
    """
    return mask / _per_minibatch(mask.sum(-1), minibatch, minibatches)


def sequence_mean(mask: BoolNT, minibatch: IntN, minibatches: int) -> FloatNT:
    """Weigh every sequence alike, and its tokens alike: 1 / (number of sequences x its length).

    This is GRPO's original aggregation (arXiv 2402.03300).
    """
    lengths = jnp.maximum(mask.sum(-1, keepdims=True), 1)
    return mask / lengths / _per_minibatch(mask.any(-1), minibatch, minibatches)


def constant_length(mask: BoolNT, minibatch: IntN, minibatches: int, length: int) -> FloatNT:
    """Weigh every token 1 / (number of sequences x a constant length).

    Unlike the other two it has no length bias (Dr. GRPO, arXiv 2503.20783). With length 1 it is the
    sum over each sequence (LUSPO, arXiv 2602.05261).
    """
    return mask / (length * _per_minibatch(mask.any(-1), minibatch, minibatches))


def weighting(aggregation: LossAggregation, length: int = 1) -> Weighting:
    """Make the weights' function of that name; `length` is the one of "constant_length"."""
    match aggregation:
        case "token_mean":
            return token_mean
        case "sequence_mean":
            return sequence_mean
        case "sequence_sum":
            return partial(constant_length, length=1)
        case "constant_length":
            return partial(constant_length, length=length)


def _per_minibatch(counts: Array, minibatch: Array, minibatches: int) -> Array:
    """[N] counts -> [N, 1]: their sum over the row's optimizer step, one if it is zero."""
    # The extra segment takes the rows that no optimizer step learns from.
    sums = jax.ops.segment_sum(counts.astype(jnp.float32), minibatch, num_segments=minibatches + 1)
    return jnp.where(sums > 0, sums, 1.0)[minibatch][:, None]
