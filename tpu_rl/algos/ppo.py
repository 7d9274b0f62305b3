"""Proximal policy optimization (PPO, arXiv 1707.06347) with a critic, and its variants for long
answers.

    r_t     = reward_t - kl_reward_coef (log pi_old(y_t) - log pi_reference(y_t))
    delta_t = r_t + gamma V_{t+1} - V_t
    A_t     = delta_t + gamma lam A_{t+1}
    R_t     = V_t + A_t, with the critic's lam in place of lam
    loss    = sum_t w_t [ -min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t)
                          - entropy_coef H_t + kl_loss_coef KL_t
                          + critic.coef 1/2 max((V_t - R_t)^2,
                                                (clip(V_t, V_old +- c) - R_t)^2) ]
              - positive_coef sum_t u_t log pi(y_t)

A is whitened after R is computed. The weights w count every token of an optimizer step alike; the
weights u count every token of the step's right answers alike. With `credit` "turn", t counts turns:
r_t is the sum of a turn's rewards, V_t the value before its first token, the only one that learns
R_t, and every token of the turn gets A_t. With `separators`, the steps of a text are turns.

    PPO      lam = critic.lam = 0.95
    VC-PPO   critic.lam = 1, after a phase of `value_pretraining`         arXiv 2503.01491
    VAPO     VC-PPO with lam_alpha 0.05, clip_high 0.28, positive_coef
             0.1 and several completions per prompt                       arXiv 2504.05118
    NLPO     mask_top_p 0.9: the policy is restricted to the nucleus of
             a copy of itself that is mask_every updates old at most,
             in sampling and in every log-prob                            arXiv 2210.01241

Deviations: a right answer of VAPO is one whose rewards add up to more than 0. VAPO's lambda is 0
below 1 / alpha tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import jax.numpy as jnp
from flax import struct

from tpu_rl.algorithm_spec import ExperienceSpec, Nucleus, RoleSpec
from tpu_rl.algos.controllers import combined, kl_controllers, running_returns
from tpu_rl.algos.roles import moving_reference, with_reference
from tpu_rl.errors import InputError
from tpu_rl.losses import advantages, masked, value_loss
from tpu_rl.losses.log_probs import log_probs_of_hidden
from tpu_rl.losses.nucleus import restricted_role
from tpu_rl.losses.observations import ObservationLoss, observation_terms
from tpu_rl.losses.policy_batch import (
    PolicyBatch,
    corrected,
    learned_tokens,
    normalized_rewards,
    pack_policy_batch,
    reference_penalty,
)
from tpu_rl.losses.policy_gradient import clipped_surrogate, policy_loss
from tpu_rl.losses.pretraining_mix import PretrainingMix, text_terms
from tpu_rl.losses.reference_kl import ReferenceKl
from tpu_rl.losses.sampler_correction import SamplerCorrection
from tpu_rl.losses.value_loss import Critic, Targets
from tpu_rl.ranges import Count, In, NotNegative, Positive, Share
from tpu_rl.train import packing
from tpu_rl.types import (
    Algorithm,
    Array,
    Experience,
    Metrics,
    Params,
    Roles,
    Sampling,
)


@dataclass(frozen=True)
class PpoConfig(SamplerCorrection, ReferenceKl, PretrainingMix, ObservationLoss):
    """Coefficients multiply nats, or units of reward."""

    critic: Critic = Critic()
    lam: Share = 0.95
    """Lambda of the advantages."""
    lam_alpha: Positive | None = None
    """If given, a completion of l tokens has lambda 1 - 1 / (alpha l) instead."""
    whiten: bool = True
    """Scale advantages to mean 0 and variance 1 over the batch."""
    clip_low: Annotated[float, In("(0, 1)")] = 0.2
    """A ratio below 1 - clip_low has no gradient where the advantage is negative."""
    clip_high: Positive = 0.2
    """A ratio above 1 + clip_high has no gradient where the advantage is positive."""
    normalized_reward_clip: Positive | None = None
    """Divide rewards by the running standard deviation of all returns so far, and clip them to this
    many of it (PPO-max, arXiv 2307.04964); 10 is usual, none leaves rewards alone."""
    dual_clip: Annotated[float, In("(1, inf)")] | None = None
    """Cap on the loss of a bad action, in units of |A|; 3 is usual."""
    entropy_coef: NotNegative = 0.0
    """Coefficient of the entropy bonus."""
    positive_coef: NotNegative = 0.0
    """Coefficient of the negative log-likelihood of right answers."""
    credit: Literal["token", "turn"] = "token"
    """Unit of the critic's gamma and of lambda: a token, or a turn. With turn, values are learned
    and used at the first token of each turn only."""
    mask_top_p: Annotated[float, In("(0, 1)")] | None = None
    """NLPO: sample and learn within the likeliest tokens of an older policy that together have this
    probability; 0.9 is usual."""
    mask_every: Count = 20
    """Optimizer steps between two times that the older policy becomes the policy; whole batches."""
    separators: tuple[int, ...] = ()
    """Ids of tokens that end a turn, with credit turn: the steps of a text."""

    def __post_init__(self):
        SamplerCorrection.__post_init__(self)
        ReferenceKl.__post_init__(self)
        PretrainingMix.__post_init__(self)
        if self.credit == "turn" and self.lam_alpha is not None:
            raise InputError(
                "a lambda that depends on the number of tokens does not suit turns",
                where="--algorithm.lam-alpha, --algorithm.credit",
                fix="give --algorithm.lam alone",
            )
        if self.mask_top_p is None and self.mask_every != PpoConfig.mask_every:
            raise InputError(
                "there is no mask",
                where="--algorithm.mask-every",
                fix="give --algorithm.mask-top-p, too",
            )
        others = {
            "critic.trunk": self.critic.trunk == "shared",
            "pretraining_path": bool(self.pretraining_path),
            "observation_coef": self.observation_coef > 0,
        }
        for field, is_set in others.items():
            if self.mask_top_p is not None and is_set:
                flag = field.replace("_", "-")
                raise InputError(
                    "the mask is about the policy's own tokens, and about its head alone",
                    where=f"--algorithm.mask-top-p, --algorithm.{flag}",
                    fix="leave one of them out",
                )
        value_loss.require_turns(self.separators, self.credit)

    @property
    def experience(self) -> ExperienceSpec:
        is_raw = self.positive_coef > 0
        nucleus = None
        if self.mask_top_p is not None:
            nucleus = Nucleus(self.mask_top_p, self.mask_every)
        spec = ExperienceSpec("rollouts", raw_returns=is_raw, nucleus=nucleus)
        return self.with_texts(spec)

    @property
    def roles(self) -> dict[str, RoleSpec]:
        trained = {"policy": RoleSpec(trainable=True), "value": self.critic.spec}
        if self.mask_top_p is not None:
            trained["mask"] = RoleSpec(trainable=False, tracks_policy=1.0)
        return with_reference(trained, self.has_kl, self.reference_reset_every > 0)


@struct.dataclass
class Batch(PolicyBatch):
    """Weights are "policy", "value", "positive" (of right answers, to imitate) and "kl" (times the
    KL scale)."""

    targets: Targets


def ppo(config: PpoConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build PPO. It learns from a Rollout. Its state is the scale of the KL coefficients,
    if that adapts."""
    policy = roles["policy"]
    critic = config.critic
    controllers = kl_controllers(config) | running_returns(config.normalized_reward_clip)
    if config.mask_top_p is not None:
        policy = restricted_role(policy, roles["mask"], config.mask_top_p, sampling.temperature)
        controllers["mask"] = moving_reference(config.mask_every, role="mask")
    terms = text_terms(config) | observation_terms(config)
    surrogate = partial(
        clipped_surrogate,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[Batch, Any]:
        rollout, layout = experience
        rows = layout.rows(rollout.tokens)
        rewards = rollout.rewards
        if config.normalized_reward_clip is not None:
            rewards, running = normalized_rewards(
                rollout, state["returns"], config.normalized_reward_clip
            )
            state = state | {"returns": running}
        mask = rollout.action_mask
        # r_t <- r_t - kl_reward_coef * kl_scale * KL_t, token by token.
        kl_scale = state["kl_scale"] if "kl_scale" in controllers else 1.0
        reference_log_probs = None
        if "reference" in config.roles:
            reference_log_probs, penalty = reference_penalty(
                config, roles["reference"], params, rollout, layout, sampling.temperature, kl_scale
            )
            rewards -= penalty
        # V_t, [N, T], of the critic before the update.
        values = layout.unpack(
            packing.over_micro_batches(partial(value_loss.values, roles["value"], params), rows)
        )
        episode_id = rollout.episode_id
        lam = config.lam
        if config.lam_alpha is not None:
            lengths = advantages.episode_totals(mask.sum(-1), episode_id)
            lam = advantages.length_adaptive_lambda(lengths, config.lam_alpha)
        # A_t = sum_k (gamma lam)^k delta_{t+k}, delta_t = r_t + gamma V_{t+1} - V_t. The targets of
        # the critic, R_t = V_t + A_t, have a lambda of their own.
        by_turn = config.credit == "turn"
        ends = advantages.step_ends(rollout.tokens, mask, config.separators)
        estimate = partial(advantages.turn_gae, ends=ends) if by_turn else advantages.gae
        advantage = estimate(rewards, values, mask, critic.gamma, lam, episode_id)
        returns = values + estimate(rewards, values, mask, critic.gamma, critic.lam, episode_id)
        # The policy learns from actions of scored rows; with credit by turn, the critic only from
        # the first action of each turn. Whitened: (A - mean A) / std A over the learned tokens.
        learned = learned_tokens(rollout)
        valued = learned & advantages.turn_starts(mask, ends) if by_turn else learned
        correction = corrected(config, policy, params, rollout, layout, sampling.temperature)
        kept_tokens = correction.keep(learned)
        if config.whiten:
            advantage = masked.whiten(advantage, kept_tokens)
        else:
            advantage = jnp.where(kept_tokens, advantage, 0.0)
        # Right answers: episodes that earned more than 0, before the KL is subtracted.
        earned = masked.total(rollout.rewards, learned, axis=-1)
        right = learned & (advantages.episode_totals(earned, episode_id) > 0)[:, None]
        # w = 1 / (number of such tokens in the optimizer step), so that losses are means over it.
        weighting = partial(
            masked.token_mean, minibatch=layout.minibatch, minibatches=layout.minibatches
        )
        weights = weighting(kept_tokens)
        packed = pack_policy_batch(
            rollout, layout, advantage, weights, reference_log_probs, correction
        )
        further_weights = {
            "value": layout.pack(weighting(valued)),
            "positive": layout.pack(weighting(right)),
        }
        for name, term in terms.items():
            assert term.weights is not None
            further_weights[name] = layout.pack(term.weights(rollout, layout))
        if "kl_scale" in controllers:
            further_weights["kl"] = packed.weights["policy"] * kl_scale
        targets = value_loss.targets(returns, values, valued, layout)
        packed = replace(packed, rows=config.rows_of(packed.rows))
        batch = Batch(**vars(packed), targets=targets)
        batch.weights.update(further_weights)
        return batch, state

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        # The hidden states serve the policy and, on a shared trunk, the critic.
        hidden = policy.hidden(params, batch.rows)
        token_log_probs = log_probs_of_hidden(
            policy,
            params,
            hidden,
            batch.rows,
            sampling.temperature,
            entropy_gradient=config.entropy_coef > 0,
        )
        # - sum w min(ratio A, clip(ratio) A) - entropy_coef H + kl_loss_coef KL, and the texts'
        # - pretraining_coef mean log p.
        total, metrics = policy_loss(
            token_log_probs,
            batch,
            surrogate,
            entropy_coef=config.entropy_coef,
            kl_coef=config.kl_loss_coef,
            kl_estimator=config.kl_estimator,
            further_terms=terms,
        )
        # + coef * sum w 1/2 (V - R)^2, clipped around the V of `make_batch`.
        values = value_loss.values(
            roles["value"], params, batch.rows, hidden if critic.trunk == "shared" else None
        )
        critic_loss, value_metrics = value_loss.value_loss(
            values, batch.targets, batch.weights["value"], critic
        )
        total += critic.coef * critic_loss
        # VAPO's imitation of right answers: - positive_coef * sum w log pi.
        if config.positive_coef:
            positive = batch.weights["positive"]
            total -= config.positive_coef * masked.total(
                positive * token_log_probs.log_probs, positive > 0
            )
        return total, metrics | value_metrics

    return Algorithm(make_batch, loss, *combined(controllers))
