"""Clipped importance sampling policy optimization (CISPO; MiniMax-M1, arXiv 2506.13585, eq. 4).

    loss = -sum_t w_t stop_gradient(clip(r_t, 1 - clip_low, 1 + clip_high)) A log policy(y_t)

This is REINFORCE with the ratio r_t = policy / old policy as a clipped weight. PPO's clipping takes
the gradient away from tokens whose ratio has moved far, often the rare ones on which reasoning
turns. Here every token keeps a gradient, with a bounded weight.

With old completions this is AIPO (LlamaRL, arXiv 2505.24034): the old policy is the one that
sampled, so r_t is the importance weight of the policy gradient, truncated at rho = 1 + clip_high
(2 to 10 in the paper). Without truncation, its expectation over what the older policy samples is
the policy gradient of the present one, up to the prefixes, which are taken as given.

Deviations: as in the paper's experiments and in TRL, there is no lower bound unless `clip_low` is
given. The upper bound is 1 + clip_high as in the paper; TRL's `epsilon_high` is the bound itself,
so its 5.0 is clip_high 4.0. The metric policy/clip_high is the share of tokens whose weight is
clipped, whatever the sign of their advantage; TRL counts those with A > 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import jax
import jax.numpy as jnp

from tpu_rl.algos.grpo import GroupPolicyConfig, group_policy_gradient
from tpu_rl.losses.policy_gradient import Surrogate, importance_ratio
from tpu_rl.losses.shapes import Floats
from tpu_rl.ranges import In, Positive
from tpu_rl.types import Algorithm, PackedRows, Roles, Sampling


@dataclass(frozen=True)
class CispoConfig(GroupPolicyConfig):
    """Lengths are tokens; coefficients multiply nats."""

    clip_low: Annotated[float, In("(0, 1)")] | None = None
    """The ratio's weight is at least 1 - clip_low; None sets no lower bound."""
    clip_high: Positive = 4.0
    """The ratio's weight is at most 1 + clip_high."""


def cispo_surrogate(
    log_probs: Floats,
    old_log_probs: Floats,
    advantages: Floats,
    rows: PackedRows,
    *,
    clip_low: float | None,
    clip_high: float,
) -> Surrogate:
    """Compute -stop_gradient(clipped ratio) A log policy of each token."""
    lowest = None if clip_low is None else 1.0 - clip_low
    highest = 1.0 + clip_high
    ratio = jax.lax.stop_gradient(importance_ratio(log_probs, old_log_probs))
    return Surrogate(
        losses=-jnp.clip(ratio, lowest, highest) * advantages * log_probs,
        ratio=ratio,
        clipped_low=None if lowest is None else ratio < lowest,
        clipped_high=ratio > highest,
    )


def cispo(config: CispoConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build CISPO. It learns from a Rollout."""
    surrogate = partial(cispo_surrogate, clip_low=config.clip_low, clip_high=config.clip_high)
    algorithm = group_policy_gradient(config, roles, sampling, surrogate)
    return algorithm._replace(stops_gradient=True)
