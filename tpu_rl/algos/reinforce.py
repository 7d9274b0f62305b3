"""REINFORCE with a baseline in place of a critic: REINFORCE++ and ReMax.

    G_t  = sum over t' >= t of gamma^(t' - t) (reward_t' - kl_reward_coef (log pi_old - log pi_reference)(y_t'))
    A_t  = G_t - b(x), whitened over the batch's tokens if asked
    loss = sum_t w_t [ -min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t) - entropy_coef H_t
                       + kl_loss_coef KL_t ]

    REINFORCE++            b = 0, whitened                                               arXiv 2501.03262, eq. 4 and 5
    REINFORCE++-baseline   b = the mean reward of the prompt's completions, whitened     the same, section 3.3
    ReMax                  b = the reward of the greedy completion, not whitened,        arXiv 2310.10505, algorithm 1
                           weights "constant_length": sums over a completion's tokens

Deviations: ReMax has no ratio; with one update a batch the ratio is 1 and the gradient the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax.numpy as jnp

from tpu_rl import advantages, masked
from tpu_rl.errors import InputError
from tpu_rl.log_probs import k1, of_frozen, token_log_probs
from tpu_rl.needs import Needs, PromptValue, RoleSpec
from tpu_rl.policy_gradients import PolicyBatch, policy_batch, proximal_loss
from tpu_rl.types import Algorithm, Array, Experience, Metrics, Params, Roles, Rollout, Sampling


@dataclass(frozen=True)
class ReinforceConfig:
    """Coefficients multiply nats."""

    baseline: Literal["none", "group", "greedy"] = "none"
    """greedy: one more completion a prompt is sampled, the most likely one, and is not learned from."""
    whiten: bool = True
    """Advantages are scaled to mean 0 and variance 1 over the batch."""
    weights: Literal["token_mean", "constant_length"] = "token_mean"
    gamma: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_reward_coef: float = 0.0
    """KL to the reference, estimated by k1, subtracted from the reward of every token."""
    kl_loss_coef: float = 0.0
    """KL to the reference of each token's distribution, added to the loss with its exact gradient."""
    entropy_coef: float = 0.0

    def __post_init__(self):
        numbers = [x for x in vars(self).values() if isinstance(x, int | float)]
        if min(numbers) < 0 or 0 in (self.clip_low, self.clip_high, self.gamma) or max(self.clip_low, self.gamma) > 1:
            raise InputError("a setting of REINFORCE is out of range", where="--algorithm", fix="see --help")

    @property
    def needs(self) -> Needs:
        value = PromptValue("policy", samples=1, beta=1.0, greedy=True) if self.baseline == "greedy" else None
        return Needs(Rollout, smallest_group=2 if self.baseline == "group" else 1, prompt_value=value)

    @property
    def roles(self) -> dict[str, RoleSpec]:
        reference = {"reference": RoleSpec(trainable=False)}
        return {"policy": RoleSpec(trainable=True)} | (reference if self.kl_reward_coef or self.kl_loss_coef else {})


def reinforce(config: ReinforceConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Learns from a Rollout; with the greedy baseline, from one that has it as its `baseline`."""
    weigh = masked.token_mean
    if config.weights == "constant_length":
        weigh = partial(masked.constant_length, length=sampling.max_new_tokens)

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[PolicyBatch, Any]:
        rollout, layout = experience
        rewards, learned = rollout.rewards, rollout.action_mask & rollout.scored[:, None]
        reference_log_probs = None
        if "reference" in config.roles:
            rows = layout.rows(rollout.tokens)
            reference_log_probs = of_frozen(roles["reference"], params, rows, sampling.temperature)
            rewards = rewards - config.kl_reward_coef * k1(rollout.log_probs, layout.unpack(reference_log_probs))
        advantage = advantages.returns_to_go(rewards, learned, config.gamma) - baseline(rollout)[:, None]
        advantage = masked.whiten(advantage, learned) if config.whiten else jnp.where(learned, advantage, 0.0)
        weights = weigh(learned, layout.minibatch, layout.minibatches)
        return policy_batch(rollout, layout, advantage, weights, reference_log_probs), state

    def baseline(rollout: Rollout) -> Array:
        total = masked.total(rollout.rewards, rollout.action_mask, axis=-1)
        match config.baseline:
            case "none":
                return jnp.zeros_like(total)
            case "group":
                return total - advantages.group_centred(total, rollout.group_id, rollout.scored)
            case "greedy":
                assert rollout.baseline is not None
                return rollout.baseline

    def loss(params: Params, batch: PolicyBatch) -> tuple[Array, Metrics]:
        bonus = config.entropy_coef > 0
        found = token_log_probs(roles["policy"], params, batch.rows, sampling.temperature, entropy_gradient=bonus)
        clip = (config.clip_low, config.clip_high)
        return proximal_loss(found, batch, clip, entropy_coef=config.entropy_coef, kl_coef=config.kl_loss_coef)

    return Algorithm(make_batch, loss)
