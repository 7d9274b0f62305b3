"""A*-PO: policy optimization by regression on optimal advantages (arXiv 2505.20686).

The optimum pi* of E[r] - beta KL(pi || reference) satisfies

    beta log(pi*(y|x) / reference(y|x)) = r(x, y) - V*(x)        for every completion y

V* is estimated once, from completions of the reference. The policy is then fitted to the equation
on its own completions, of which one per prompt is enough:

    V*(x) = value_beta log mean_i exp(r(x, y_i) / value_beta),   y_i ~ reference       eq. 4
    loss  = mean over completions of
            (beta sum_t log(pi(y_t) / reference(y_t)) - (r(x, y) - V*(x)))^2           eq. 5

Deviations: the paper samples the reference's completions before the run. Here they are sampled for
the prompts of each step, which is the same if no prompt comes twice. Log-probs are at the sampling
temperature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from tpu_rl.algorithm_spec import ExperienceSpec, PromptValue, RoleSpec
from tpu_rl.algos.roles import with_reference
from tpu_rl.errors import InputError
from tpu_rl.losses import masked
from tpu_rl.losses.log_probs import frozen_log_probs, token_log_probs
from tpu_rl.losses.policy_batch import (
    PolicyBatch,
    corrected,
    learned_tokens,
    pack_policy_batch,
)
from tpu_rl.losses.policy_gradient import (
    Surrogate,
    corrected_losses,
    importance_ratio,
    policy_metrics,
    reference_metrics,
    token_metrics,
)
from tpu_rl.losses.sampler_correction import SamplerCorrection
from tpu_rl.ranges import Count, Positive
from tpu_rl.types import (
    Algorithm,
    Array,
    Experience,
    Metrics,
    Params,
    Roles,
    Sampling,
    Sum,
)


@dataclass(frozen=True)
class AStarPoConfig(SamplerCorrection):
    """The betas are in units of reward per nat."""

    beta: Positive = 1e-3
    """KL coefficient of the problem that the policy solves."""
    value_beta: Positive = 0.5
    """KL coefficient in the estimate of V*. It is far above `beta` because a few samples say little
    about the best completions."""
    reference_samples: Count = 8
    """Completions of the reference from which the V* of a prompt is estimated."""

    @property
    def experience(self) -> ExperienceSpec:
        prompt_value = PromptValue("reference", self.reference_samples, self.value_beta)
        return ExperienceSpec("rollouts", prompt_value=prompt_value)

    @property
    def roles(self) -> dict[str, RoleSpec]:
        return with_reference({"policy": RoleSpec(trainable=True)}, needed=True)


def a_star_po(config: AStarPoConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build A*-PO. It learns from a Rollout whose `baseline` is V*."""

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[PolicyBatch, Any]:
        """Give every token the advantage r(x, y) - V*(x), and every completion the same weight."""
        rollout, layout = experience
        assert rollout.baseline is not None
        if rollout.episode_id is not None:
            raise InputError(
                "A*-PO does not learn from episodes whose history was rewritten",
                where="--algorithm",
                why="its loss needs the log-prob of an episode in one row",
                fix="use grpo, ppo or reinforce",
            )
        correction = corrected(
            config, roles["policy"], params, rollout, layout, sampling.temperature
        )
        learned = correction.keep(learned_tokens(rollout))
        advantage = masked.total(rollout.rewards, rollout.action_mask, axis=-1) - rollout.baseline
        advantage = jnp.where(learned, advantage[:, None], 0.0)
        weights = masked.sequence_mean(learned, layout.minibatch, layout.minibatches)
        rows = layout.rows(rollout.tokens)
        reference_log_probs = frozen_log_probs(
            roles["reference"], params, rows, sampling.temperature
        )
        batch = pack_policy_batch(
            rollout, layout, advantage, weights, reference_log_probs, correction
        )
        return batch, state

    def loss(params: Params, batch: PolicyBatch) -> tuple[Array, Metrics]:
        mask = batch.action_mask
        weights = batch.weights["policy"]
        sequence_ids = batch.rows.sequence_ids
        assert batch.reference_log_probs is not None
        policy = token_log_probs(roles["policy"], params, batch.rows, sampling.temperature)
        # Outside the mask, a number without a gradient.
        log_probs = jnp.where(mask, policy.log_probs, 0.0)
        token_log_ratio = jnp.where(mask, log_probs - batch.reference_log_probs, 0.0)
        log_ratio = masked.sequence_total(token_log_ratio, sequence_ids)
        losses = jnp.square(config.beta * log_ratio - batch.advantages)
        losses, metrics = corrected_losses(losses, log_probs, batch)
        value = masked.total(weights * losses, weights > 0)
        # The loss has no importance ratio and clips nothing; the ratio is reported all the same.
        surrogate = Surrogate(losses, importance_ratio(log_probs, batch.old_log_probs))
        metrics |= policy_metrics(
            surrogate, mask, log_probs, batch.old_log_probs, batch.sampler_log_probs
        )
        metrics |= reference_metrics(log_probs, batch.reference_log_probs, mask, sequence_ids)
        metrics["policy/loss"] = Sum(value, weights.sum())
        metrics["policy/entropy"] = masked.average(policy.entropy, mask)
        metrics |= token_metrics(policy, mask, batch.sampler_log_probs, batch.old_log_probs)
        return value, metrics

    return Algorithm(make_batch, loss)
