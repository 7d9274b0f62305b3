"""MiniLLM (arXiv 2306.08543): minimize the reverse KL of whole completions, as a policy gradient.

    KL(policy || teacher) = -E sum_t r_t,    r_t = ln teacher(y_t|s_t) - ln policy(y_t|s_t)
    its gradient          = -E sum_t (r_t + R_{t+1}) grad ln policy(y_t|s_t)
                            with R_{t+1} = sum_{i>t} r_i

Unlike in `distill`, a token is also credited for the states it leads to, by R_{t+1}. The
single-step part, r_t, is computed exactly, as the KL of each token's distribution (equation 4). The
rest goes through PPO's clipped ratio, with advantage

    A_t = sum_{i>t} discount^(i-t) r_i / sum_{i>t} discount^(i-t)        (equation 6)

    loss = sum_t w_t [ KL(policy(.|s_t) || teacher(.|s_t)) - clip(ratio_t) A_t ]

Deviations: completions are the policy's own, not those of a mixture with the teacher (section 2.2).
There is no loss on pre-training texts. The exact part has no importance weight, because its states
are those of the latest policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import jax.numpy as jnp

from tpu_rl.algorithm_spec import ExperienceSpec, RoleSpec
from tpu_rl.losses import advantages, masked, teachers
from tpu_rl.losses.log_probs import frozen_log_probs, k1
from tpu_rl.losses.policy_batch import PolicyBatch, begin
from tpu_rl.losses.policy_gradient import clipped, policy_metrics, share_metrics
from tpu_rl.losses.sampler_correction import SamplerCorrection, corrected_losses
from tpu_rl.losses.shapes import BoolNT, FloatNT
from tpu_rl.ranges import In, Share
from tpu_rl.types import Algorithm, Array, Experience, Metrics, Params, Roles, Sampling, Sum


@dataclass(frozen=True)
class MiniLlmConfig(SamplerCorrection):
    teacher: str
    """A model with the policy's tokenizer, of any size: a directory, a hub id or the model folder
    of a run."""
    discount: Share = 1.0
    """Discount, per token, of the log-ratios of later tokens."""
    clip: Annotated[float, In("(0, 1)")] = 0.2
    """The ratio is clipped to 1 - clip and 1 + clip."""

    @property
    def experience(self) -> ExperienceSpec:
        return ExperienceSpec("rollouts", latest_policy=True, imitates="teacher")

    @property
    def roles(self) -> dict[str, RoleSpec]:
        return {
            "policy": RoleSpec(trainable=True),
            "teacher": RoleSpec(trainable=False, path=self.teacher),
        }


def later_log_ratios(log_ratios: FloatNT, mask: BoolNT, config: MiniLlmConfig) -> FloatNT:
    """Compute the advantages A_t [N, T] of log-ratios r_t [N, T]."""
    total = advantages.returns_to_go(log_ratios, mask, config.discount) - log_ratios
    count = advantages.returns_to_go(jnp.ones_like(log_ratios), mask, config.discount) - 1
    return jnp.where(mask, total / jnp.where(count > 0, count, 1.0), 0.0)


def mini_llm(config: MiniLlmConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build MiniLLM. It learns from a Rollout, whose rewards it does not read."""
    teachers.require_distributions(sampling)
    surrogate = clipped(config.clip, config.clip)
    corrections = config.correction_parts()

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[PolicyBatch, Any]:
        draft = begin(experience, params, roles["policy"], sampling.temperature)
        rollout = draft.rollout
        layout = draft.layout
        mask = rollout.action_mask
        draft = draft._replace(learned=mask)
        for part in corrections:
            assert part.draft is not None
            draft, _ = part.draft(draft, None)
        # r_t, and A_t from those after t.
        rows = layout.rows(rollout.tokens)
        teacher_log_probs = layout.unpack(
            frozen_log_probs(roles["teacher"], params, rows, sampling.temperature)
        )
        log_ratios = jnp.where(mask, -k1(rollout.log_probs, teacher_log_probs), 0.0)
        draft = draft._replace(advantages=later_log_ratios(log_ratios, mask, config))
        weights = masked.sequence_mean(draft.learned, layout.minibatch, layout.minibatches)
        return draft.pack(weights), state

    def loss(params: Params, batch: PolicyBatch) -> tuple[Array, Metrics]:
        weights = batch.weights["policy"]
        mask = batch.action_mask
        teacher = teachers.compose("teacher", 1.0)
        comparison = teachers.compare(
            roles, params, batch.rows, teacher, beta=1.0, temperature=sampling.temperature
        )
        log_probs = jnp.where(mask, comparison.log_probs, 0.0)
        policy_terms = surrogate(log_probs, batch.old_log_probs, batch.advantages, batch.rows)
        threshold = config.off_policy_mask_threshold
        losses, metrics = corrected_losses(policy_terms.losses, log_probs, batch, threshold)
        value = masked.total(weights * (losses + comparison.divergence), weights > 0)
        metrics |= share_metrics(batch) | policy_metrics(
            policy_terms, mask, log_probs, batch.old_log_probs, batch.sampler_log_probs
        )
        metrics["distill/loss"] = Sum(value, weights.sum())
        metrics["distill/divergence"] = masked.average(comparison.divergence, mask)
        metrics["policy/entropy"] = masked.average(comparison.entropy, mask)
        return value, metrics

    return Algorithm(make_batch, loss)
