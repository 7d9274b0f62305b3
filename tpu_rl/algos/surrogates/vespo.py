"""VESPO (arXiv 2602.10693): REINFORCE, weighed by a smooth function of the completion's ratio w.

    loss = -sg(exp(b + k log w - b w)) A log policy;    w = exp(sum of log-ratios)

k is 2 and b is 3 where A >= 0; elsewhere k is 3 and b is 2.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from tpu_rl.losses import masked
from tpu_rl.losses.policy_gradient import Surrogate
from tpu_rl.losses.shapes import FloatRS
from tpu_rl.types import PackedRows


def vespo(
    log_probs: FloatRS, old_log_probs: FloatRS, advantages: FloatRS, rows: PackedRows
) -> Surrogate:
    """Compute the loss of each token; arrays are [R, S]."""
    # As in TRL: each token's log-ratio within +-20, the sum within log 1e-8 and 20.
    log_ratio = jnp.clip(jax.lax.stop_gradient(log_probs) - old_log_probs, -20.0, 20.0)
    log_w = jnp.clip(masked.sequence_total(log_ratio, rows.sequence_ids), math.log(1e-8), 20.0)
    is_good = advantages >= 0
    k = jnp.where(is_good, 2.0, 3.0)
    b = jnp.where(is_good, 3.0, 2.0)
    weight = jnp.exp(b + k * log_w - b * jnp.exp(log_w))
    return Surrogate(-weight * advantages * log_probs, jnp.exp(log_w))
