"""DRO (arXiv 2405.19107): a log-likelihood with a squared log-ratio l as penalty.

loss = -(A log policy - beta / 2 l^2)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpu_rl.losses.policy_gradient import Surrogate, importance_ratio
from tpu_rl.losses.shapes import FloatRS
from tpu_rl.types import PackedRows


def dro(
    log_probs: FloatRS,
    old_log_probs: FloatRS,
    advantages: FloatRS,
    rows: PackedRows,
    *,
    beta: float,
) -> Surrogate:
    """Compute the loss of each token; arrays are [R, S]."""
    squared = jnp.square(log_probs - old_log_probs)
    losses = 0.5 * beta * squared - log_probs * advantages
    return Surrogate(losses, importance_ratio(jax.lax.stop_gradient(log_probs), old_log_probs))
