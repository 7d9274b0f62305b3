"""Self-distillation: the policy learns to write without a hint what it would write with one.

    r_t  = ln teacher(y_t | hint, x, y_<t) - ln policy(y_t | x, y_<t)       y: the policy's own

    loss = - mean over completions of mean_t clip(ratio_t) r_t

The teacher is the model that the run begins with, or follows the policy (`reference_mix`). Its
prompt has a demonstration, a solution or feedback in it, from a column of the data. The gradient is
that of the reverse KL of each token's distribution, estimated by the token that was sampled.

    SDFT   the teacher sees a demonstration and is a moving average     arXiv 2601.19897
    OPSD   the teacher sees the solution and is the first model         arXiv 2601.18734

Deviations: both papers, and TRL 1.16's SDFTTrainer by default, compare whole distributions or their
largest logits; TRL's `distillation_mode="sampled_token"` with `distillation_alpha=1` has this
gradient. Completions whose text with the hint is longer than a row of the run teach nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import jax.numpy as jnp

from tpu_rl.algorithm_spec import ExperienceSpec, Hint, RoleSpec
from tpu_rl.algos.policy_gradient import policy_gradient
from tpu_rl.errors import InputError
from tpu_rl.losses import masked
from tpu_rl.losses.controllers import moving_reference
from tpu_rl.losses.policy_batch import Draft, Part, PolicyBatch, learned_tokens
from tpu_rl.losses.policy_gradient import clipped
from tpu_rl.losses.sampler_correction import SamplerCorrection
from tpu_rl.ranges import In, Share
from tpu_rl.types import Algorithm, Array, Metrics, Roles, Sampling


@dataclass(frozen=True)
class SelfDistillConfig(SamplerCorrection):
    column: str = "solution"
    """Column of the data rows that holds the hint, as a text."""
    template: str = "{prompt}\n\n{hint}"
    """The teacher's prompt. In a conversation, its last message is the {prompt}."""
    reference_mix: Share = 0.0
    """The share by which the teacher moves towards the policy at each update; 0: it stays the first
    model."""
    clip: Annotated[float, In("(0, 1)")] = 0.2
    """The ratio is clipped to 1 - clip and 1 + clip."""

    def __post_init__(self):
        super().__post_init__()
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

    def log_ratios(draft: Draft) -> Draft:
        mask = learned_tokens(draft.rollout)
        return draft._replace(advantages=jnp.where(mask, draft.rewards, 0.0))

    def metrics(losses: Array, log_probs: Array, batch: PolicyBatch) -> tuple[Array, Metrics]:
        mean = masked.average(batch.advantages, batch.weights["policy"] > 0)
        return losses, {"distill/log_ratio": mean}

    teacher = Part(losses=metrics)
    if config.reference_mix:
        controller = moving_reference(1, config.reference_mix)
        teacher = teacher._replace(name="reference", controller=controller)
    return policy_gradient(
        roles,
        sampling,
        advantages=log_ratios,
        surrogate=clipped(config.clip, config.clip),
        weights=masked.sequence_mean,
        parts=(*config.correction_parts(), teacher),
    )
