"""Soft adaptive policy optimization (SAPO; arXiv 2511.20347), a method in one file of the user's.

    tpu-rl check recipes/sapo.py:sapo
    python launch/run.py grpo --algorithm recipes/sapo.py:sapo --model.path DIR --data.path FILE ...

GRPO with a soft gate in place of the clipped ratio r = policy / old policy of each token:

    loss = -sum_t w_t gate(r_t) A,   gate(r) = 4 / tau sigmoid(tau (r - 1))

The slope of the gate is 1 at r = 1, so the first update is that of GRPO, and it falls to 0 on both
sides. tau is tau_negative where A is negative, and tau_positive elsewhere.

`--algorithm surrogates` has it too, among others: see `tpu_rl/algos/surrogates/`.

Deviations: the default weights are "token_mean", as in `algos/grpo.py`.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from tpu_rl.algos.grpo import GroupPolicyConfig, group_policy_gradient
from tpu_rl.errors import InputError
from tpu_rl.losses.policy_gradient import Surrogate, importance_ratio
from tpu_rl.types import Algorithm, Array, PackedRows, Roles, Sampling


@dataclass(frozen=True)
class SapoConfig(GroupPolicyConfig):
    """Lengths are tokens; coefficients multiply nats."""

    tau_positive: float = 1.0
    """Steepness of the gate of tokens whose advantage is not negative."""
    tau_negative: float = 1.05
    """Steepness of the gate of tokens whose advantage is negative: larger, so that their gradients
    fall faster."""

    def __post_init__(self):
        super().__post_init__()
        if min(self.tau_positive, self.tau_negative) <= 0:
            raise InputError("a tau is not above 0", where="--algorithm", fix="1 is usual")


def soft_gate_surrogate(
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    rows: PackedRows,
    *,
    tau_positive: float,
    tau_negative: float,
) -> Surrogate:
    """Compute -gate(ratio) A of each token. All arrays are [R, S]."""
    del rows
    ratio = importance_ratio(log_probs, old_log_probs)
    tau = jnp.where(advantages < 0, tau_negative, tau_positive)
    gate = 4.0 / tau * jax.nn.sigmoid(tau * (ratio - 1.0))
    return Surrogate(losses=-gate * advantages, ratio=ratio)


def sapo(config: SapoConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build SAPO. It learns from a Rollout."""
    surrogate = partial(
        soft_gate_surrogate, tau_positive=config.tau_positive, tau_negative=config.tau_negative
    )
    return group_policy_gradient(config, roles, sampling, surrogate)
