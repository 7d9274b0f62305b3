"""SAPO (arXiv 2511.20347): a soft gate in place of the clipped ratio r.

loss = -4 / tau sigmoid(tau (r - 1)) A;    tau_positive where A > 0, tau_negative elsewhere
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpu_rl.losses.policy_gradient import Surrogate, importance_ratio
from tpu_rl.losses.shapes import FloatRS
from tpu_rl.types import PackedRows


def sapo(
    log_probs: FloatRS,
    old_log_probs: FloatRS,
    advantages: FloatRS,
    rows: PackedRows,
    *,
    tau_positive: float,
    tau_negative: float,
) -> Surrogate:
    """Compute the loss of each token; arrays are [R, S]."""
    ratio = importance_ratio(log_probs, old_log_probs)
    tau = jnp.where(advantages > 0, tau_positive, tau_negative)
    return Surrogate(-4.0 / tau * jax.nn.sigmoid(tau * (ratio - 1.0)) * advantages, ratio)
