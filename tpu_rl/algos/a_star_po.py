"""A*-PO: policy optimization by regression on optimal advantages (arXiv 2505.20686).

The optimum pi* of E[r] - beta KL(pi || reference) satisfies

    beta log(pi*(y|x) / reference(y|x)) = r(x, y) - V*(x)        for every completion y

V* is estimated once, from completions of the reference. The policy is then fitted to the equation
on its own completions, of which one per prompt is enough:

    V*(x) = 1/2 log mean_i exp(2 r(x, y_i)),                     y_i ~ reference       eq. 4
    loss  = mean over completions of
            (beta sum_t log(pi(y_t) / reference(y_t)) - (r(x, y) - V*(x)))^2           eq. 5

The coefficient 1/2 is far above beta, because the 8 completions of a prompt say little about its
best ones.

Deviations: the paper samples the reference's completions before the run. Here they are sampled for
the prompts of each step, which is the same if no prompt comes twice. Log-probs are at the sampling
temperature.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from tpu_rl.algorithm_spec import ExperienceSpec, PromptValue, RoleSpec
from tpu_rl.algos.policy_gradient import policy_gradient
from tpu_rl.algos.roles import with_reference
from tpu_rl.errors import InputError
from tpu_rl.losses import masked
from tpu_rl.losses.policy_batch import Draft, Part, PolicyBatch
from tpu_rl.losses.policy_gradient import unclipped
from tpu_rl.losses.reference_kl import ReferenceKl, kl_to_reference
from tpu_rl.losses.sampler_correction import SamplerCorrection
from tpu_rl.ranges import Positive
from tpu_rl.types import Algorithm, Array, Metrics, Roles, Sampling


@dataclass(frozen=True)
class AStarPoConfig(SamplerCorrection):
    beta: Positive = 1e-3
    """KL coefficient of the problem that the policy solves, in units of reward per nat."""

    @property
    def experience(self) -> ExperienceSpec:
        prompt_value = PromptValue("reference", samples=8, beta=0.5)
        return ExperienceSpec("rollouts", prompt_value=prompt_value)

    @property
    def roles(self) -> dict[str, RoleSpec]:
        return with_reference({"policy": RoleSpec(trainable=True)}, needed=True)


def a_star_po(config: AStarPoConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build A*-PO. It learns from a Rollout whose `baseline` is V*."""

    def above_value(draft: Draft) -> Draft:
        """Give every token the advantage r(x, y) - V*(x)."""
        rollout = draft.rollout
        assert rollout.baseline is not None
        if rollout.episode_id is not None:
            raise InputError(
                "A*-PO does not learn from episodes whose history was rewritten",
                where="--algorithm",
                why="its loss needs the log-prob of an episode in one row",
                fix="use grpo, ppo or reinforce",
            )
        returns = masked.total(rollout.rewards, rollout.action_mask, axis=-1)
        advantage = (returns - rollout.baseline)[:, None]
        return draft._replace(advantages=jnp.where(draft.learned, advantage, 0.0))

    def regression(losses: Array, log_probs: Array, batch: PolicyBatch) -> tuple[Array, Metrics]:
        """Compute (beta log policy(y) / reference(y) - A)^2 of each completion y."""
        reference = batch.reference_log_probs
        assert reference is not None
        token_log_ratio = jnp.where(batch.action_mask, log_probs - reference, 0.0)
        log_ratio = masked.sequence_total(token_log_ratio, batch.rows.sequence_ids)
        return jnp.square(config.beta * log_ratio - batch.advantages), {}

    return policy_gradient(
        roles,
        sampling,
        advantages=above_value,
        # The loss has no importance ratio and clips nothing; the ratio is reported all the same.
        surrogate=unclipped,
        weights=masked.sequence_mean,
        parts=(
            kl_to_reference(ReferenceKl(), roles["reference"]),
            Part(losses=regression),
            *config.correction_parts(),
        ),
    )
