"""A*-PO: policy optimisation by regression on optimal advantages (arXiv 2505.20686).

The optimum pi* of E[r] - beta KL(pi || reference) satisfies beta log(pi*(y|x) / reference(y|x)) = r(x, y) - V*(x) for
every completion. V* is estimated once, from completions of the reference; the policy is then fitted to the equation on
completions of its own, one a prompt being enough:

    V*(x) = value_beta log mean_i exp(r(x, y_i) / value_beta),    y_i ~ reference                          eq. 4
    loss  = mean over completions of (beta sum_t log(pi(y_t) / reference(y_t)) - (r(x, y) - V*(x)))^2      eq. 5

Deviations: the paper draws the reference's completions before the run; here the source draws those of a step's prompts
at that step, which is the same wherever no prompt comes twice. log-probs are at the sampling temperature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from tpu_rl import masked
from tpu_rl.errors import InputError
from tpu_rl.log_probs import of_frozen, token_log_probs
from tpu_rl.needs import Needs, PromptValue, RoleSpec
from tpu_rl.policy_gradients import PolicyBatch, policy_batch, policy_metrics, reference_metrics
from tpu_rl.types import Algorithm, Array, Experience, Metrics, Params, Roles, Rollout, Sampling, Sum


@dataclass(frozen=True)
class AStarPoConfig:
    """The betas are in units of reward a nat."""

    beta: float = 1e-3
    """KL coefficient of the problem that the policy solves."""
    value_beta: float = 0.5
    """KL coefficient in the estimate of V*; far above `beta`, for few samples tell little of the best ones."""
    reference_samples: int = 8
    """Completions of the reference that a prompt's V* is estimated from."""

    def __post_init__(self):
        if min(self.beta, self.value_beta, self.reference_samples) <= 0:
            raise InputError("a setting of A*-PO is not positive", where="--algorithm", fix="see --help")

    @property
    def needs(self) -> Needs:
        return Needs(Rollout, prompt_value=PromptValue("reference", self.reference_samples, self.value_beta))

    @property
    def roles(self) -> dict[str, RoleSpec]:
        return {"policy": RoleSpec(trainable=True), "reference": RoleSpec(trainable=False)}


def a_star_po(config: AStarPoConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Learns from a Rollout whose `baseline` is V*."""

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[PolicyBatch, Any]:
        """Advantages are r(x, y) - V*(x) at every token; every completion counts the same, its tokens share."""
        rollout, layout = experience
        assert rollout.baseline is not None
        learned = rollout.action_mask & rollout.scored[:, None]
        advantage = masked.total(rollout.rewards, rollout.action_mask, axis=-1) - rollout.baseline
        advantage = jnp.where(learned, advantage[:, None], 0.0)
        weights = masked.sequence_mean(learned, layout.minibatch, layout.minibatches)
        reference = of_frozen(roles["reference"], params, layout.rows(rollout.tokens), sampling.temperature)
        return policy_batch(rollout, layout, advantage, weights, reference), state

    def loss(params: Params, batch: PolicyBatch) -> tuple[Array, Metrics]:
        mask, weights, ids = batch.action_mask, batch.weights["policy"], batch.rows.sequence_ids
        log_probs, entropy = token_log_probs(roles["policy"], params, batch.rows, sampling.temperature)
        log_probs = jnp.where(mask, log_probs, 0.0)
        assert batch.reference_log_probs is not None
        log_ratio = masked.sequence_total(jnp.where(mask, log_probs - batch.reference_log_probs, 0.0), ids)
        losses = jnp.square(config.beta * log_ratio - batch.advantages)
        value = masked.total(weights * losses, weights > 0)
        metrics = policy_metrics(mask, log_probs, batch.old_log_probs, batch.advantages, 1.0, jnp.inf)
        # Nothing is clipped.
        metrics = {name: metric for name, metric in metrics.items() if not name.startswith("policy/clip")}
        metrics |= reference_metrics(log_probs, batch.reference_log_probs, mask, ids)
        metrics["policy/loss"] = Sum(value, weights.sum())
        metrics["policy/entropy"] = Sum(masked.total(entropy, mask), mask.sum().astype(jnp.float32))
        return value, metrics

    return Algorithm(make_batch, loss)
