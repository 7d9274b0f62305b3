"""Group relative policy optimisation (DeepSeekMath, arXiv 2402.03300) and its relatives.

Several completions of one prompt are their own baseline: a completion's advantage A is its return against its
group's, and every token of it is pushed by A through PPO's clipped ratio:

    loss = sum_t w_t [ -min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A) + kl_loss_coef KL_t - entropy_coef H_t ]

The variants differ in functions, chosen by name: which baseline and scale (ADVANTAGES), what a token counts
(WEIGHTS), where the KL to the reference goes (k1 in the reward, or in the loss with its exact gradient).

    GRPO       advantages "group",  weights "sequence_mean"
    Dr. GRPO   advantages "centred", weights "constant_length"                       arXiv 2503.20783
    RLOO       advantages "leave_one_out", kl_reward_coef > 0                        arXiv 2402.14740
    DAPO       weights "token_mean", clip_high 0.28, overlong_buffer, and dynamic sampling in `rollouts`  2503.14476

Deviations: none known. The group deviation is the sample one (n - 1), as in TRL and verl.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax.numpy as jnp
from flax import struct

from tpu_rl import advantages, masked, packing
from tpu_rl.errors import InputError
from tpu_rl.log_probs import k1, k3, token_log_probs
from tpu_rl.policy_gradients import clip_shares, clipped_surrogate, dual_clip, importance_ratio, kl_loss
from tpu_rl.types import (
    Algorithm,
    Array,
    Experience,
    First,
    Max,
    Metrics,
    Min,
    Params,
    Role,
    Roles,
    Rollout,
    Rows,
    Sampling,
    Sum,
)

ADVANTAGES = {
    "group": advantages.group_scaled,
    "batch": advantages.batch_scaled,
    "centred": advantages.group_centred,
    "leave_one_out": advantages.leave_one_out,
}
WEIGHTS = {
    "token_mean": masked.token_mean,
    "sequence_mean": masked.sequence_mean,
    "constant_length": masked.constant_length,
}


@dataclass(frozen=True)
class GrpoConfig:
    """Lengths are tokens; coefficients multiply nats."""

    advantages: Literal["group", "batch", "centred", "leave_one_out"] = "group"
    weights: Literal["token_mean", "sequence_mean", "constant_length"] = "token_mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    """Cap on a bad action's loss, in units of |A|; 3 is usual."""
    kl_reward_coef: float = 0.0
    """KL to the reference, estimated by k1, subtracted from the reward of every token."""
    kl_loss_coef: float = 0.0
    """KL to the reference of each token's distribution, added to the loss with its exact gradient."""
    entropy_coef: float = 0.0
    overlong_buffer: int = 0
    """Soft overlong penalty over the last so many tokens before the limit; 0 is off."""
    mask_truncated: bool = False
    """Completions that ran into the limit stay in their group's baseline but are not learned from."""

    def __post_init__(self):
        if min(self.kl_reward_coef, self.kl_loss_coef, self.entropy_coef, self.overlong_buffer) < 0:
            raise InputError(
                "a coefficient or the overlong buffer is negative", where="--algorithm", fix="use 0 or more"
            )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise InputError(
                f"dual clip {self.dual_clip} is not above 1", where="--algorithm.dual-clip", fix="use e.g. 3"
            )
        if not 0 < self.clip_low < 1 or self.clip_high <= 0:
            raise InputError(
                f"clip range 1 - {self.clip_low} .. 1 + {self.clip_high} is not around 1",
                where="--algorithm.clip-low, --algorithm.clip-high",
                fix="use e.g. 0.2 and 0.28",
            )

    @property
    def needs_reference(self) -> bool:
        """Without a KL term no reference model is kept and no reference pass is made."""
        return self.kl_reward_coef > 0 or self.kl_loss_coef > 0


@struct.dataclass
class Batch:
    """Leaves [M, K, R, S]; the loss sees [R, S]."""

    rows: Rows
    weights: dict[str, Array]
    """"policy": what a token counts."""
    action_mask: Array
    """Tokens that metrics are about."""
    advantages: Array
    old_log_probs: Array
    reference_log_probs: Array | None


def grpo(config: GrpoConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Learns from a Rollout; raises InputError where a KL coefficient lacks a reference."""
    reference = roles.reference if config.needs_reference else None
    if config.needs_reference and reference is None:
        raise InputError("a KL coefficient needs a reference model", where="grpo", fix="give roles.reference")
    weigh = WEIGHTS[config.weights]
    if config.weights == "constant_length":
        weigh = partial(masked.constant_length, length=sampling.max_new_tokens)

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[Batch, Any]:
        rollout, layout = experience
        assert isinstance(rollout, Rollout)
        rows = layout.rows(rollout.tokens)
        reference_log_probs = None if reference is None else reference_pass(reference, params, rows)
        returns = sequence_returns(rollout, None if reference_log_probs is None else layout.unpack(reference_log_probs))
        advantage = ADVANTAGES[config.advantages](returns, rollout.group_id, rollout.scored)
        learned = rollout.action_mask & rollout.scored[:, None] & ~(rollout.truncated[:, None] & config.mask_truncated)
        weights = weigh(learned, layout.minibatch, layout.minibatches)
        batch = Batch(
            rows=rows,
            weights={"policy": layout.pack(weights)},
            action_mask=layout.pack(rollout.action_mask),
            advantages=layout.pack(jnp.where(rollout.action_mask, advantage[:, None], 0.0)),
            old_log_probs=layout.pack(rollout.log_probs),
            reference_log_probs=reference_log_probs,
        )
        return batch, state

    def reference_pass(reference: Role, params: Params, rows: Rows) -> Array:
        """[M, K, R, S]: the reference's log-probs, one micro-batch at a time."""

        def one(micro_batch: Rows) -> Array:
            return token_log_probs(reference, params, micro_batch, sampling.temperature).log_probs

        return packing.over_micro_batches(one, rows)

    def sequence_returns(rollout: Rollout, reference_log_probs: Array | None) -> Array:
        """[N]: the rewards of a completion's tokens, less the KL and the overlong penalty."""
        rewards = rollout.rewards
        if reference_log_probs is not None:
            rewards = rewards - config.kl_reward_coef * k1(rollout.log_probs, reference_log_probs)
        returns = masked.total(rewards, rollout.action_mask, axis=-1)
        if config.overlong_buffer:
            lengths = rollout.action_mask.sum(-1)
            returns += advantages.soft_overlong_penalty(lengths, sampling.max_new_tokens, config.overlong_buffer)
        return returns

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        log_probs, entropy = token_log_probs(roles.policy, params, batch.rows, sampling.temperature)
        # No gradient passes elsewhere, not even zero times an infinite ratio: it would be NaN.
        log_probs = jnp.where(batch.action_mask, log_probs, 0.0)
        ratio = importance_ratio(log_probs, batch.old_log_probs)
        losses = clipped_surrogate(ratio, batch.advantages, config.clip_low, config.clip_high)
        if config.dual_clip is not None:
            losses = dual_clip(losses, batch.advantages, config.dual_clip)
        if config.kl_loss_coef and batch.reference_log_probs is not None:
            losses += config.kl_loss_coef * kl_loss(log_probs, batch.old_log_probs, batch.reference_log_probs)
        if config.entropy_coef:
            losses -= config.entropy_coef * entropy
        weights = batch.weights["policy"]
        value = masked.total(weights * losses, weights > 0)
        return value, loss_metrics(batch, value, log_probs, entropy, ratio)

    def loss_metrics(batch: Batch, value: Array, log_probs: Array, entropy: Array, ratio: Array) -> Metrics:
        mask, count = batch.action_mask, batch.action_mask.sum().astype(jnp.float32)

        def average(values: Array) -> Sum:
            return Sum(masked.total(values.astype(jnp.float32), mask), count)

        low, high = clip_shares(ratio, batch.advantages, config.clip_low, config.clip_high)
        gap = jnp.where(mask, jnp.abs(log_probs - batch.old_log_probs), 0.0)
        metrics: Metrics = {
            "policy/loss": Sum(value, batch.weights["policy"].sum()),
            "policy/entropy": average(entropy),
            "policy/ratio_min": Min(jnp.where(mask, ratio, 1.0).min()),
            "policy/ratio_max": Max(jnp.where(mask, ratio, 1.0).max()),
            "policy/clip_low": average(low),
            "policy/clip_high": average(high),
            "policy/kl_old": average(k3(log_probs, batch.old_log_probs)),
            "policy/log_prob_gap_mean": First(average(gap)),
            "policy/log_prob_gap_max": First(Max(gap.max())),
        }
        if batch.reference_log_probs is not None:
            metrics["policy/kl_reference"] = average(k3(log_probs, batch.reference_log_probs))
        return metrics

    return Algorithm(make_batch, loss)
