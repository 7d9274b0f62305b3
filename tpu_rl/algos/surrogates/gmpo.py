"""GMPO (arXiv 2507.20673): the geometric mean of clipped ratios of the completion.

loss = -exp(mean_t c_t) A;    c is the log-ratio, at most clip_high where A > 0, at least
                              -clip_low where A < 0
"""

from __future__ import annotations

import jax.numpy as jnp

from tpu_rl.losses import masked
from tpu_rl.losses.policy_gradient import Surrogate
from tpu_rl.losses.shapes import FloatRS
from tpu_rl.types import PackedRows


def gmpo(
    log_probs: FloatRS,
    old_log_probs: FloatRS,
    advantages: FloatRS,
    rows: PackedRows,
    *,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """Compute the loss of each completion, at every token; arrays are [R, S]."""
    log_ratio = log_probs - old_log_probs
    is_good = advantages > 0
    is_bad = advantages < 0
    clipped = jnp.where(is_good, jnp.minimum(log_ratio, clip_high), log_ratio)
    clipped = jnp.where(is_bad, jnp.maximum(clipped, -clip_low), clipped)
    actions = (rows.sequence_ids > 0).astype(log_ratio.dtype)
    lengths = masked.sequence_total(actions, rows.sequence_ids)
    total = masked.sequence_total(clipped, rows.sequence_ids)
    ratio = jnp.exp(total / jnp.maximum(lengths, 1.0))
    return Surrogate(
        losses=-ratio * advantages,
        ratio=ratio,
        clipped_low=is_bad & (log_ratio < -clip_low),
        clipped_high=is_good & (log_ratio > clip_high),
    )
