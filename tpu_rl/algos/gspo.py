"""Group sequence policy optimization (GSPO, arXiv 2507.18071): GRPO with one ratio per completion.

    s     = exp( 1/|y| sum_t log(policy(y_t) / old policy(y_t)) )                    eq. 7
    loss  = mean over completions of -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)   eq. 5

s is the length-normalized likelihood ratio of the completion y. Clipping drops whole completions,
and the noise of single tokens' ratios averages out, which matters for mixtures of experts.

With `importance_sampling_level` "sequence_token" the ratio is GSPO-token's (eq. 14, as in verl),

    s_t = stop_gradient(s) policy(y_t) / stop_gradient(policy(y_t))

Its value is s. Where all tokens of a completion share A and a weight, its gradient is that of s
too. It is for advantages that differ between the turns of an episode (`credit`).

With "sequence_product" the ratio is that of the completion, s^|y|, as in TRL's RLOOTrainer: with
advantages "leave_one_out" its gradient is the off-policy gradient of the expected return.

With `loss_aggregation` "sequence_sum" the loss of each completion counts as many times as it has
tokens. This is LUSPO (arXiv 2602.05261; TRL's loss_type "luspo").

Deviations: clip_low and clip_high are the paper's; TRL's default of 0.2 is far outside the usual
range of s. The metrics policy/clip_low and policy/clip_high are shares of tokens, so long
completions count more; TRL's are shares of completions. verl caps log s_t at 10, we do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from tpu_rl.algos.grpo import GroupPolicyConfig, group_policy_gradient
from tpu_rl.losses import masked
from tpu_rl.losses.policy_gradient import Surrogate, clipped_ratio_surrogate, importance_ratio
from tpu_rl.losses.shapes import FloatRS
from tpu_rl.ranges import Conflicts, In, Positive
from tpu_rl.types import Algorithm, PackedRows, Roles, Sampling

Level = Literal["sequence", "sequence_token", "sequence_product"]


@dataclass(frozen=True)
class GspoConfig(GroupPolicyConfig):
    """Lengths are tokens; coefficients multiply nats."""

    loss_aggregation: masked.LossAggregation = "sequence_mean"
    """Weights of the tokens; sequence_mean, every completion alike, is the paper's."""
    importance_sampling_level: Annotated[
        Level,
        Conflicts(
            "credit",
            when=("sequence", "sequence_product"),
            why="the ratio of a whole completion would average the advantages of its turns",
        ),
    ] = "sequence"
    """Ratio of the whole completion (GSPO), the token's form of it (GSPO-token), or the ratio
    without length normalization (RLOO in TRL), which wants wider clips: 0.2."""
    clip_low: Annotated[float, In("(0, 1)")] = 3e-4
    """The length-normalized ratio is clipped to at least 1 - clip_low, hence far smaller than
    GRPO's."""
    clip_high: Positive = 4e-4
    """The length-normalized ratio is clipped to at most 1 + clip_high."""


def sequence_ratio(
    log_probs: FloatRS, old_log_probs: FloatRS, rows: PackedRows, normalized: bool = True
) -> FloatRS:
    """Compute s [R, S], the same at every token of a completion; 1 outside completions.

    Unless `normalized`, it is policy(y) / old policy(y).
    """
    actions = rows.sequence_ids > 0
    log_ratio = masked.sequence_total(log_probs - old_log_probs, rows.sequence_ids)
    if not normalized:
        # exp of more overflows, and a clipped ratio would have the gradient 0 x inf.
        return jnp.exp(jnp.clip(log_ratio, -20.0, 20.0))
    lengths = masked.sequence_total(actions.astype(log_probs.dtype), rows.sequence_ids)
    return jnp.exp(log_ratio / jnp.maximum(lengths, 1.0))


def gspo_surrogate(
    log_probs: FloatRS,
    old_log_probs: FloatRS,
    advantages: FloatRS,
    rows: PackedRows,
    *,
    clip_low: float,
    clip_high: float,
    level: Level = "sequence",
) -> Surrogate:
    """Compute the clipped sequence ratio times the advantage, at every token."""
    ratio = sequence_ratio(log_probs, old_log_probs, rows, level != "sequence_product")
    if level == "sequence_token":
        token_ratio = importance_ratio(log_probs, jax.lax.stop_gradient(log_probs))
        ratio = jax.lax.stop_gradient(ratio) * token_ratio
    return clipped_ratio_surrogate(ratio, advantages, clip_low=clip_low, clip_high=clip_high)


def gspo(config: GspoConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build GSPO. It learns from a Rollout."""
    surrogate = partial(
        gspo_surrogate,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        level=config.importance_sampling_level,
    )
    return group_policy_gradient(config, roles, sampling, surrogate)
