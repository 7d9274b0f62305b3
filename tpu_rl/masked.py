"""Reductions over a mask, and the weights that turn a loss into a plain sum: the only reductions of the library.

A mask is True where a value counts. What is masked out never reaches a result, not even as NaN times zero.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpu_rl.types import Array


def total(values: Array, mask: Array, axis: int | tuple[int, ...] | None = None) -> Array:
    """The sum of `values` where `mask` is True."""
    return jnp.sum(jnp.where(mask, values, 0.0), axis=axis)


def mean(values: Array, mask: Array, axis: int | tuple[int, ...] | None = None) -> Array:
    """The mean of `values` where `mask` is True; zero where nothing is."""
    return total(values, mask, axis) / jnp.maximum(jnp.sum(mask, axis=axis), 1)


def whiten(values: Array, mask: Array, shift_mean: bool = True, epsilon: float = 1e-8) -> Array:
    """`values` scaled to variance one over the mask, and shifted to mean zero unless told to keep the mean."""
    # Seen from the least of them, so that of equal values nothing is left: a float32 mean of many is not quite theirs.
    least = jnp.min(values, initial=jnp.inf, where=mask)
    values = jnp.where(mask, values - least, 0.0)
    centre = mean(values, mask)
    variance = mean(jnp.square(values - centre), mask)
    white = (values - centre) * jax.lax.rsqrt(variance + epsilon)
    return jnp.where(mask, white if shift_mean else white + centre + least, 0.0)


def sequence_total(values: Array, sequence_ids: Array) -> Array:
    """Each token's own sequence's sum, in packed rows: [R, S] values -> [R, S]; zero at prompt and padding.

    `sequence_ids` [R, S] are those of `types.Rows`. The result stays at the tokens, so that a sequence-level term is
    one more per-token array with weights (GSPO's ratio, DPO's margin).
    """

    def one_row(row: Array, ids: Array) -> Array:
        sums = jax.ops.segment_sum(row, ids, num_segments=row.shape[0] + 1)
        return jnp.where(ids > 0, sums[ids], 0.0)

    return jax.vmap(one_row)(values, sequence_ids)


# --- weights: what a token counts in one optimizer step ----------------------------------------------------------
# All take mask [N, T] bool, minibatch [N] (the optimizer step a row belongs to; `minibatches` for none) and return
# [N, T] float32. They are normalised over the whole optimizer step, so that micro-batches, devices and packing add up.


def _per_minibatch(counts: Array, minibatch: Array, minibatches: int) -> Array:
    """[N] counts -> [N, 1]: their sum over the row's optimizer step, at least one."""
    sums = jax.ops.segment_sum(counts.astype(jnp.float32), minibatch, num_segments=minibatches + 1)
    return jnp.maximum(sums, 1.0)[minibatch][:, None]


def token_mean(mask: Array, minibatch: Array, minibatches: int) -> Array:
    """Every token of the step counts the same (DAPO, arXiv 2503.14476): 1 / number of tokens."""
    return mask / _per_minibatch(mask.sum(-1), minibatch, minibatches)


def sequence_mean(mask: Array, minibatch: Array, minibatches: int) -> Array:
    """Every sequence counts the same, its tokens share (GRPO, arXiv 2402.03300): 1 / (sequences x its length)."""
    lengths = jnp.maximum(mask.sum(-1, keepdims=True), 1)
    return mask / lengths / _per_minibatch(mask.any(-1), minibatch, minibatches)


def constant_length(mask: Array, minibatch: Array, minibatches: int, length: int) -> Array:
    """Every token counts 1 / (sequences x a constant length) (Dr. GRPO, arXiv 2503.20783): no length bias."""
    return mask / (length * _per_minibatch(mask.any(-1), minibatch, minibatches))
