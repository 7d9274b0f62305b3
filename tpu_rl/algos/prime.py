"""Process rewards from outcomes alone (PRIME, arXiv 2502.01456): GRPO with a second model whose
log-ratio to the reference is a reward of each token, and which learns from outcomes as it goes.

    r_t  = 0.05 [log process(y_t) - log reference(y_t)]                           (implicit PRM)
    A_t  = A(outcome) + sum_(s >= t) [r_s - mean of the others' mean r]
    loss = GRPO's with A_t - mean over completions of l log sigmoid(s) + (1 - l) log sigmoid(-s)

s is the sum of r_t over a completion, and l is 1 where its return is at least `min_reward`, else 0.
A model that learned from outcomes this way holds in s the log-odds of success, and in the sums of r
up to t its expectation (implicit process rewards, arXiv 2412.01981, proposition 3.1). So no step is
ever labeled. A frozen model of that kind is a reward by itself: `implicit` in
docs/reference/rewards.md.

The reference is the model as it starts, for both. The others' mean r is, over the other completions
of the group, the mean of their means over tokens (the paper's section 3.2). The authors' program
differs: it adds (r_t - the completion's own mean) / (n - 1), and then whitens.

The process model learns at twice the run's learning rate.

Deviations: rewards are those of the process model before its update of the step; the paper updates
it first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from tpu_rl.algorithm_spec import ExperienceSpec, RoleSpec
from tpu_rl.algos.grpo import ClippedPolicyConfig, group_policy_gradient
from tpu_rl.algos.roles import with_reference
from tpu_rl.errors import InputError
from tpu_rl.losses import advantages, masked
from tpu_rl.losses.log_probs import frozen_log_probs, token_log_probs
from tpu_rl.losses.policy_batch import (
    Draft,
    Part,
    PolicyBatch,
    Prediction,
    actions_of,
    learned_tokens,
)
from tpu_rl.losses.shapes import BoolNT, FloatNT, IntN
from tpu_rl.types import Algorithm, Array, Metrics, Roles, Sampling

BETA = 0.05
"""Reward per nat of the process model's log-ratio."""


@dataclass(frozen=True)
class PrimeConfig(ClippedPolicyConfig):
    """GRPO's settings, and those of the process model."""

    min_reward: float = 0.5
    """A completion with at least this return is a success."""

    def __post_init__(self):
        super().__post_init__()
        if self.sampled_entropy is not None:
            raise InputError(
                "the process model reads the run's temperature",
                where="--algorithm.sampled-entropy",
                why="its log-ratio of a completion would change with the temperature",
                fix="leave it out, or use grpo",
            )
        if self.reference_tracks_policy:
            raise InputError(
                "the reference of process rewards stays",
                where="--algorithm.reference-reset-every, --algorithm.reference-reset-patience",
                why="the process model's log-ratio would no longer be what outcomes taught it",
                fix="leave it out",
            )

    @property
    def experience(self) -> ExperienceSpec:
        return super().experience._replace(raw_returns=True)

    @property
    def roles(self) -> dict[str, RoleSpec]:
        trained = {
            "policy": RoleSpec(trainable=True),
            "process": RoleSpec(trainable=True, learning_rate_scale=2.0),
        }
        return with_reference(trained, needed=True)


def prime(config: PrimeConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build PRIME. It learns from a Rollout."""
    process = process_model(config, roles, sampling.temperature)
    return group_policy_gradient(config, roles, sampling, config.surrogate_function, [process])


def process_model(config: PrimeConfig, roles: Roles, temperature: float) -> Part:
    """Make the part of the process model: its rewards in the advantages, and its loss.

    Its weights "process" are 1 / number of completions of the optimizer step, at the last action of
    each. Its extras are "success", 1 at the last action of a success, and "start_log_probs", the
    reference's log-probs.
    """

    def batch(batch: PolicyBatch, draft: Draft, state: Any) -> PolicyBatch:
        rollout, layout = draft.rollout, draft.layout
        reference = frozen_log_probs(roles["reference"], draft.params, batch.rows, temperature)
        process = frozen_log_probs(roles["process"], draft.params, batch.rows, temperature)
        # r_t, and A_t without that of the outcome.
        log_ratio = layout.unpack(process - reference)
        learned = learned_tokens(rollout) & actions_of(rollout)
        rewards = jnp.where(learned, BETA * log_ratio, 0.0)
        dense = process_advantages(rewards, learned, rollout.group_id)
        # l and 1 / completions, at the last action of each.
        last = masked.last(rollout.action_mask) & learned
        returns = masked.total(rollout.rewards, rollout.action_mask, axis=-1)
        weights = masked.token_mean(last, layout.minibatch, layout.minibatches)
        success = last & (returns >= config.min_reward)[:, None]
        return replace(
            batch,
            advantages=batch.advantages + layout.pack(dense),
            weights=batch.weights | {"process": layout.pack(weights)},
            extras=batch.extras
            | {"success": layout.pack(success * 1.0), "start_log_probs": reference},
        )

    def term(prediction: Prediction, batch: PolicyBatch) -> tuple[Array, Metrics]:
        process = token_log_probs(roles["process"], prediction.params, batch.rows, temperature)
        start = batch.extras["start_log_probs"]
        success = batch.extras["success"]
        ratio = jnp.where(batch.action_mask, process.log_probs - start, 0.0)
        # s of each completion: the logit that it is a success.
        logits = masked.sequence_total(BETA * ratio, batch.rows.sequence_ids)
        weights = batch.weights["process"]
        losses = -jax.nn.log_sigmoid(jnp.where(success > 0, logits, -logits))
        right = ((logits > 0) == (success > 0)).astype(jnp.float32)
        return masked.total(weights * losses, weights > 0), {
            "process/loss": masked.weighted_average(losses, weights),
            "process/accuracy": masked.weighted_average(right, weights),
            "process/right": masked.weighted_average(success, weights),
        }

    return Part(batch=batch, term=term)


def process_advantages(rewards: FloatNT, mask: BoolNT, group_id: IntN) -> FloatNT:
    """Compute the advantages of process rewards, [N, T]: the sum from each token on of the reward
    minus the leave-one-out mean of the group's mean rewards."""
    means = masked.mean(rewards, mask, axis=-1)
    # mean - mean of the others = leave_one_out(mean).
    others = means - advantages.leave_one_out(means, group_id, mask.any(-1))
    return advantages.returns_to_go(rewards - others[:, None], mask, 1.0)
