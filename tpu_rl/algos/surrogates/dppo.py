"""DPPO (arXiv 2602.04879): a trust region of probabilities in place of one of ratios.

    loss = -sg(min(r, ratio_cap)) A log policy

0 where the divergence (tv: |policy - old policy| of the token; kl: that of the token against all
others) is above its bound and the policy went the way of A.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from tpu_rl.losses.policy_gradient import Surrogate
from tpu_rl.losses.shapes import FloatRS
from tpu_rl.types import PackedRows


def dppo(
    log_probs: FloatRS,
    old_log_probs: FloatRS,
    advantages: FloatRS,
    rows: PackedRows,
    *,
    divergence: Literal["tv", "kl"],
    clip_low: float,
    clip_high: float,
    ratio_cap: float,
) -> Surrogate:
    """Compute the loss of each token; arrays are [R, S]."""
    current = jax.lax.stop_gradient(log_probs)
    ratio = jnp.exp(current - old_log_probs)
    probs, old_probs = jnp.exp(current), jnp.exp(old_log_probs)
    moved = probs - old_probs
    distance = jnp.abs(moved)
    if divergence == "kl":
        # Of the two outcomes "this token" and "another token", as in verl.
        others = jnp.log((1.0 - old_probs + 1e-8) / (1.0 - probs + 1e-8))
        distance = old_probs * (old_log_probs - current) + (1.0 - old_probs) * others
    too_low = (advantages <= 0) & (moved < 0) & (distance > clip_low)
    too_high = (advantages > 0) & (moved > 0) & (distance > clip_high)
    weight = jnp.where(too_low | too_high, 0.0, jnp.minimum(ratio, ratio_cap))
    return Surrogate(-weight * advantages * log_probs, ratio, too_low, too_high)
