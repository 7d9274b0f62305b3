"""Self-distillation: the policy learns to write without a hint what it would write with one.

    r_t  = ln teacher(y_t | hint, x, y_<t) - ln policy(y_t | x, y_<t)       y: the policy's own
    A_t  = sum_{i>=t} discount^(i-t) r_i

    loss = - mean over completions of mean_t clip(ratio_t) A_t

The teacher is the model that the run begins with, or follows the policy (`reference_mix`). Its
prompt has a demonstration, a solution or feedback in it, from a column of the data. With discount
0 the gradient is that of the reverse KL of each token's distribution, estimated by the token that
was sampled.

    SDFT   the teacher sees a demonstration and is a moving average     arXiv 2601.19897
    OPSD   the teacher sees the solution and is the first model         arXiv 2601.18734

Deviations: both papers, and TRL 1.16's SDFTTrainer by default, compare whole distributions or their
largest logits; TRL's `distillation_mode="sampled_token"` with `distillation_alpha=1` has this
gradient. Completions whose text with the hint is longer than a row of the run teach nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import jax.numpy as jnp

from tpu_rl.algorithm_spec import ExperienceSpec, Hint, RoleSpec
from tpu_rl.algos.roles import moving_reference
from tpu_rl.errors import InputError
from tpu_rl.losses import advantages, masked
from tpu_rl.losses.log_probs import token_log_probs
from tpu_rl.losses.policy_batch import PolicyBatch, corrected, learned_tokens, pack_policy_batch
from tpu_rl.losses.policy_gradient import clipped_surrogate, corrected_losses, policy_metrics
from tpu_rl.losses.sampler_correction import SamplerCorrection
from tpu_rl.ranges import In, Share
from tpu_rl.types import (
    Algorithm,
    Array,
    Experience,
    Metrics,
    Params,
    Roles,
    Rollout,
    Sampling,
    Sum,
)


@dataclass(frozen=True)
class SelfDistillConfig(SamplerCorrection):
    column: str = "solution"
    """Column of the data rows that holds the hint, as a text."""
    template: str = "{prompt}\n\n{hint}"
    """The teacher's prompt. In a conversation, its last message is the {prompt}."""
    reference_mix: Share = 0.0
    """The share by which the teacher moves towards the policy; 0: it stays the first model."""
    reference_every: int = 1
    """Updates between these moves."""
    discount: Share = 0.0
    """Discount, per token, of the log-ratios of later tokens."""
    clip: Annotated[float, In("(0, 1)")] = 0.2
    """The ratio is clipped to 1 - clip and 1 + clip."""

    def __post_init__(self):
        super().__post_init__()
        if self.reference_every < 1 or (self.reference_every > 1 and not self.reference_mix):
            raise InputError(
                f"the teacher moves every {self.reference_every} updates, by nothing",
                where="--algorithm.reference-every, --algorithm.reference-mix",
                fix="use a mix above 0, and at least 1 update",
            )
        missing = [name for name in ("{prompt}", "{hint}") if name not in self.template]
        if missing:
            raise InputError(
                f"the teacher's prompt has no {missing[0]}",
                where="--algorithm.template",
                why=f"it is {self.template!r}",
                fix="write a text with {prompt} and {hint}",
            )

    @property
    def experience(self) -> ExperienceSpec:
        return ExperienceSpec(
            "rollouts",
            columns=("prompt", self.column),
            hint=Hint("reference", self.column, self.template),
        )

    @property
    def roles(self) -> dict[str, RoleSpec]:
        return {
            "policy": RoleSpec(trainable=True),
            "reference": RoleSpec(trainable=False, tracks_policy=self.reference_mix),
        }


def self_distill(config: SelfDistillConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build self-distillation. It learns from a Rollout whose `rewards` are the log-ratios r_t."""
    temperature = sampling.temperature
    surrogate = partial(clipped_surrogate, clip_low=config.clip, clip_high=config.clip)

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[PolicyBatch, Any]:
        rollout, layout = experience
        assert isinstance(rollout, Rollout)
        mask = learned_tokens(rollout)
        correction = corrected(config, roles["policy"], params, rollout, layout, temperature)
        weights = masked.sequence_mean(correction.keep(mask), layout.minibatch, layout.minibatches)
        log_ratios = jnp.where(mask, rollout.rewards, 0.0)
        advantage = advantages.returns_to_go(log_ratios, mask, config.discount)
        return pack_policy_batch(rollout, layout, advantage, weights, None, correction), state

    def loss(params: Params, batch: PolicyBatch) -> tuple[Array, Metrics]:
        weights = batch.weights["policy"]
        mask = batch.action_mask
        computed = token_log_probs(roles["policy"], params, batch.rows, temperature)
        log_probs = jnp.where(mask, computed.log_probs, 0.0)
        terms = surrogate(log_probs, batch.old_log_probs, batch.advantages, batch.rows)
        losses, metrics = corrected_losses(terms.losses, log_probs, batch)
        value = masked.total(weights * losses, weights > 0)
        metrics |= policy_metrics(
            terms, mask, log_probs, batch.old_log_probs, batch.sampler_log_probs
        )
        metrics["policy/loss"] = Sum(value, weights.sum())
        metrics["distill/log_ratio"] = masked.average(batch.advantages, weights > 0)
        return value, metrics

    if not config.reference_mix:
        return Algorithm(make_batch, loss)
    init_state, after_update = moving_reference(config.reference_every, config.reference_mix)
    return Algorithm(make_batch, loss, init_state, after_update)
