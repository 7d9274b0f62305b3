"""Proximal policy optimisation (arXiv 1707.06347) with a critic, and what long answers need of it.

    r_t     = reward_t - kl_reward_coef (log pi_old(y_t) - log pi_reference(y_t))
    delta_t = r_t + gamma V_{t+1} - V_t,    A_t = delta_t + gamma lam A_{t+1},    R_t = V_t + A_t with the critic's lam
    loss    = sum_t w_t [ -min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t) - entropy_coef H_t
                          + kl_loss_coef KL_t + critic.coef 1/2 max((V_t - R_t)^2, (clip(V_t, V_old +- c) - R_t)^2) ]
              - positive_coef sum_t u_t log pi(y_t)

A is whitened after R is known. w: every token of an optimizer step the same; u: every token of its right answers.

    PPO      lam = critic.lam = 0.95
    VC-PPO   critic.lam = 1, and a phase of `value_pretraining` first    arXiv 2503.01491
    VAPO     besides, lam_alpha 0.05, clip_high 0.28, positive_coef 0.1, several completions a prompt    2504.05118

Deviations: VAPO's right answer is one whose rewards add up to more than 0; its lambda is 0 below 1 / alpha tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax.numpy as jnp
from flax import struct

from tpu_rl import advantages, critics, masked, packing
from tpu_rl.critics import Critic, Targets
from tpu_rl.errors import InputError
from tpu_rl.log_probs import k1, of_frozen, of_hidden
from tpu_rl.needs import Needs, RoleSpec
from tpu_rl.policy_gradients import PolicyBatch, adapted_kl_scale, proximal_loss
from tpu_rl.types import Algorithm, Array, Experience, Metrics, Params, Roles, Rollout, Sampling, Sum


@dataclass(frozen=True)
class PpoConfig:
    """Coefficients multiply nats, or units of reward."""

    critic: Critic = Critic()
    lam: float = 0.95
    """Lambda of the advantages."""
    lam_alpha: float | None = None
    """If given, a completion of l tokens has the lambda 1 - 1 / (alpha l) instead."""
    whiten: bool = True
    """Advantages are scaled to mean 0 and variance 1 over the batch."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_reward_coef: float = 0.0
    """KL to the reference, estimated by k1, subtracted from the reward of every token."""
    kl_loss_coef: float = 0.0
    """KL to the reference of each token's distribution, added to the loss with its exact gradient."""
    kl_target: float | None = None
    """Nats a completion: the KL coefficients are scaled up or down after every optimizer step to hold it."""
    kl_horizon: float = 100.0
    """Optimizer steps in which the scale can move by a fifth."""
    entropy_coef: float = 0.0
    positive_coef: float = 0.0
    """Of the negative log-likelihood of right answers."""

    def __post_init__(self):
        numbers = [x for x in vars(self).values() if isinstance(x, int | float)]
        positive = (self.clip_low, self.clip_high, self.kl_horizon, self.lam_alpha, self.kl_target)
        if min(numbers) < 0 or 0 in positive or self.lam > 1 or self.clip_low >= 1:
            raise InputError("a setting of PPO is out of range", where="--algorithm", fix="see --help")
        if self.kl_target is not None and not self.kl_reward_coef + self.kl_loss_coef:
            raise InputError("a KL target without a KL coefficient", where="--algorithm.kl-target", fix="give one, too")

    needs: ClassVar[Needs] = Needs(Rollout)

    @property
    def roles(self) -> dict[str, RoleSpec]:
        cast = {"policy": RoleSpec(trainable=True), "value": self.critic.spec}
        return cast | ({"reference": RoleSpec(trainable=False)} if self.kl_reward_coef or self.kl_loss_coef else {})


@struct.dataclass
class Batch(PolicyBatch):
    """Weights are "policy", "value", "positive" (an answer to imitate) and "kl" (the scale is in it)."""

    targets: Targets


def ppo(config: PpoConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Learns from a Rollout. Its state is the scale of the KL coefficients."""
    policy, critic, temperature = roles["policy"], config.critic, sampling.temperature

    def make_batch(experience: Experience, params: Params, kl_scale: Array) -> tuple[Batch, Array]:
        rollout, layout = experience
        rows, rewards, mask = layout.rows(rollout.tokens), rollout.rewards, rollout.action_mask
        reference_log_probs = None
        if "reference" in config.roles:
            reference_log_probs = of_frozen(roles["reference"], params, rows, temperature)
            kl = k1(rollout.log_probs, layout.unpack(reference_log_probs))
            rewards = rewards - config.kl_reward_coef * kl_scale * kl
        values = layout.unpack(packing.over_micro_batches(partial(critics.values, roles["value"], params), rows))
        alpha = config.lam_alpha
        lam = config.lam if alpha is None else advantages.length_adaptive_lambda(mask.sum(-1), alpha)
        advantage = advantages.gae(rewards, values, mask, critic.gamma, lam)
        returns = values + advantages.gae(rewards, values, mask, critic.gamma, critic.lam)
        learned = mask & rollout.scored[:, None]
        advantage = masked.whiten(advantage, learned) if config.whiten else jnp.where(learned, advantage, 0.0)
        right = learned & (masked.total(rollout.rewards, learned, axis=-1) > 0)[:, None]
        count = partial(masked.token_mean, minibatch=layout.minibatch, minibatches=layout.minibatches)
        weights, positive = layout.pack(count(learned)), layout.pack(count(right))
        batch = Batch(
            rows=rows,
            weights={"policy": weights, "value": weights, "positive": positive, "kl": weights * kl_scale},
            action_mask=layout.pack(mask),
            advantages=layout.pack(advantage),
            targets=critics.targets(returns, values, learned, layout),
            old_log_probs=layout.pack(rollout.log_probs),
            reference_log_probs=reference_log_probs,
            importance=None,
            sampler_log_probs=None,
        )
        return batch, kl_scale

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        rows, weights = batch.rows, batch.weights
        hidden = policy.hidden(params, rows)
        found = of_hidden(policy, params, hidden, rows, temperature, entropy_gradient=config.entropy_coef > 0)
        clip = (config.clip_low, config.clip_high)
        how = {"entropy_coef": config.entropy_coef, "kl_coef": config.kl_loss_coef}
        total, metrics = proximal_loss(found, batch, clip, **how)
        values = critics.values(roles["value"], params, rows, hidden if critic.trunk == "shared" else None)
        value_loss, of_values = critics.value_loss(values, batch.targets, weights["value"], critic.clip)
        total += critic.coef * value_loss
        if config.positive_coef:
            total -= config.positive_coef * masked.total(weights["positive"] * found.log_probs, weights["positive"] > 0)
        if batch.reference_log_probs is not None:
            metrics["policy/kl_scale"] = Sum(weights["kl"].sum(), weights["policy"].sum())
        return total, metrics | of_values

    def after_update(params: Params, kl_scale: Array, metrics: dict[str, Array]) -> tuple[Params, Array]:
        if config.kl_target is None:
            return params, kl_scale
        return params, adapted_kl_scale(kl_scale, metrics["policy/kl_completion"], config.kl_target, config.kl_horizon)

    return Algorithm(make_batch, loss, lambda params: jnp.ones((), jnp.float32), after_update)
