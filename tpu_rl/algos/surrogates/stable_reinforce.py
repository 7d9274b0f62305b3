"""StableReinforce (arXiv 2505.02835): PPO's clipped ratio of a bounded log-ratio.

l = clip(log policy - log old policy, -ln 1000, ln 1000)
loss = -min(exp(l) A, clip(exp(l), 1 - clip_low, 1 + clip_high) A)
"""

from __future__ import annotations

import math

import jax.numpy as jnp

from tpu_rl.losses.policy_gradient import Surrogate, clipped_surrogate
from tpu_rl.losses.shapes import FloatRS
from tpu_rl.types import PackedRows


def stable_reinforce(
    log_probs: FloatRS, old_log_probs: FloatRS, advantages: FloatRS, rows: PackedRows, **clip: float
) -> Surrogate:
    """Compute the loss of each token; arrays are [R, S]."""
    bounded = jnp.clip(log_probs - old_log_probs, -math.log(1000.0), math.log(1000.0))
    return clipped_surrogate(bounded, jnp.zeros_like(bounded), advantages, rows, **clip)
