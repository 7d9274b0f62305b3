"""GPG (arXiv 2504.02546): the policy gradient itself; with `advantages` "gpg".

loss = -A log policy
"""

from __future__ import annotations

import jax

from tpu_rl.losses.policy_gradient import Surrogate, importance_ratio
from tpu_rl.losses.shapes import FloatRS
from tpu_rl.types import PackedRows


def gpg(
    log_probs: FloatRS, old_log_probs: FloatRS, advantages: FloatRS, rows: PackedRows
) -> Surrogate:
    """Compute the loss of each token; arrays are [R, S]."""
    ratio = importance_ratio(jax.lax.stop_gradient(log_probs), old_log_probs)
    return Surrogate(-log_probs * advantages, ratio)
