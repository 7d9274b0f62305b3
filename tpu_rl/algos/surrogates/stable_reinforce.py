"""StableReinforce (arXiv 2505.02835): PPO's clipped ratio of a bounded log-ratio.

l = clip(log policy - log old policy, -log_ratio_bound, log_ratio_bound)
loss = -min(exp(l) A, clip(exp(l), 1 - clip_low, 1 + clip_high) A)
"""

from __future__ import annotations

import jax.numpy as jnp

from tpu_rl.losses.policy_gradient import Surrogate, clipped_surrogate
from tpu_rl.types import Array, PackedRows


def stable_reinforce(
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    rows: PackedRows,
    *,
    log_ratio_bound: float,
    **clip: float,
) -> Surrogate:
    """Compute the loss of each token; arrays are [R, S]."""
    bounded = jnp.clip(log_probs - old_log_probs, -log_ratio_bound, log_ratio_bound)
    return clipped_surrogate(bounded, jnp.zeros_like(bounded), advantages, rows, **clip)
