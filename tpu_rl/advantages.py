"""How much better a completion did than expected.

Group baselines: completions of one prompt are compared with each other. All take returns [N] float32, group_id [N]
and scored [N] bool (rows without a reward count in no mean) and give [N] float32, zero for rows not scored.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpu_rl import masked
from tpu_rl.types import Array

EPSILON = 1e-6


def _group_moments(returns: Array, group_id: Array, scored: Array) -> tuple[Array, Array, Array]:
    """(count, return minus its group's mean, the group's standard deviation), each [N]."""
    size = group_id.shape[0]
    # Group ids may be of any size; segments are below N.
    segment = jnp.searchsorted(jnp.sort(group_id), group_id)

    def of_group(values: Array) -> Array:
        return jax.ops.segment_sum(values, segment, num_segments=size)[segment]

    # Relative to the group's lowest return, so that equal returns are exactly zero: the float32 mean of three 100.1
    # is not 100.1, and that last place divided by itself would be an advantage near one.
    lowest = jax.ops.segment_min(jnp.where(scored, returns, jnp.inf), segment, num_segments=size)[segment]
    above = jnp.where(scored, returns - lowest, 0.0)
    count = of_group(scored.astype(jnp.float32))
    centred = jnp.where(scored, above - of_group(above) / jnp.maximum(count, 1.0), 0.0)
    variance = of_group(jnp.square(centred)) / jnp.maximum(count - 1.0, 1.0)
    return count, centred, jnp.sqrt(variance)


def group_centred(returns: Array, group_id: Array, scored: Array) -> Array:
    """Return minus the group's mean, unscaled (Dr. GRPO, arXiv 2503.20783)."""
    return _group_moments(returns, group_id, scored)[1]


def group_scaled(returns: Array, group_id: Array, scored: Array) -> Array:
    """(return - group mean) / group standard deviation (GRPO, arXiv 2402.03300, section 4.1.2).

    The deviation is the sample one (n - 1), as in TRL and verl. A group whose returns are all equal gets zero.
    """
    _, centred, deviation = _group_moments(returns, group_id, scored)
    return jnp.where(deviation > EPSILON, centred / (deviation + EPSILON), 0.0)


def batch_scaled(returns: Array, group_id: Array, scored: Array) -> Array:
    """(return - group mean) / standard deviation of all returns of the batch (arXiv 2508.08221)."""
    centred = group_centred(returns, group_id, scored)
    squared = jnp.square(returns - masked.mean(returns, scored))
    deviation = jnp.sqrt(masked.total(squared, scored) / jnp.maximum(scored.sum() - 1.0, 1.0))
    return jnp.where(deviation > EPSILON, centred / (deviation + EPSILON), 0.0)


def leave_one_out(returns: Array, group_id: Array, scored: Array) -> Array:
    """Return minus the mean of the *other* completions of the group (RLOO, arXiv 2402.14740)."""
    count, centred, _ = _group_moments(returns, group_id, scored)
    return centred * count / jnp.maximum(count - 1.0, 1.0)


def zero_variance_groups(returns: Array, group_id: Array, scored: Array) -> Array:
    """[N] bool: rows whose group's scored returns are all equal, so that the group teaches nothing."""
    return _group_moments(returns, group_id, scored)[2] <= EPSILON


def soft_overlong_penalty(lengths: Array, limit: int, buffer: int) -> Array:
    """0 up to limit - buffer tokens, then falling linearly to -1 at `limit` (DAPO, arXiv 2503.14476, eq. 13). [N]."""
    return jnp.clip((limit - buffer - lengths) / buffer, -1.0, 0.0)
