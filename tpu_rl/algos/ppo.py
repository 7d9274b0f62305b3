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

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import jax.numpy as jnp

from tpu_rl.algorithm_spec import ExperienceSpec, Nucleus, RoleSpec
from tpu_rl.algos.policy_gradient import policy_gradient
from tpu_rl.algos.roles import with_reference
from tpu_rl.losses import advantages, masked, value_loss
from tpu_rl.losses.controllers import moving_reference
from tpu_rl.losses.entropy import entropy_bonus
from tpu_rl.losses.nucleus import restricted_role
from tpu_rl.losses.observations import ObservationLoss
from tpu_rl.losses.policy_batch import Draft, Part, PolicyBatch, Prediction, learned_tokens
from tpu_rl.losses.policy_gradient import ClipSettings
from tpu_rl.losses.pretraining_mix import PretrainingMix
from tpu_rl.losses.reference_kl import ReferenceKl
from tpu_rl.losses.returns import normalized_by_deviation
from tpu_rl.losses.sampler_correction import SamplerCorrection
from tpu_rl.losses.value_loss import Critic
from tpu_rl.ranges import Conflicts, Count, In, Needs, NotNegative, Positive, ReadOnlyWith, Share
from tpu_rl.train import packing
from tpu_rl.types import Algorithm, Array, Layout, Metrics, Role, Roles, Rollout, Sampling


@dataclass(frozen=True)
class PpoConfig(SamplerCorrection, ReferenceKl, ClipSettings, PretrainingMix, ObservationLoss):
    """Coefficients multiply nats, or units of reward."""

    critic: Critic = Critic()
    lam: Share = 0.95
    """Lambda of the advantages."""
    lam_alpha: Annotated[
        Positive | None,
        Conflicts("credit", why="a lambda of the number of tokens does not suit turns"),
    ] = None
    """If given, a completion of l tokens has lambda 1 - 1 / (alpha l) instead."""
    whiten: bool = True
    """Scale advantages to mean 0 and variance 1 over the batch."""
    normalized_reward_clip: Positive | None = None
    """Divide rewards by the running standard deviation of all returns so far, and clip them to this
    many of it (PPO-max, arXiv 2307.04964); 10 is usual, none leaves rewards alone."""
    entropy_coef: NotNegative = 0.0
    """Coefficient of the entropy bonus."""
    positive_coef: NotNegative = 0.0
    """Coefficient of the negative log-likelihood of right answers."""
    credit: Literal["token", "turn"] = "token"
    """Unit of the critic's gamma and of lambda: a token, or a turn. With turn, values are learned
    and used at the first token of each turn only."""
    mask_top_p: Annotated[
        Annotated[float, In("(0, 1)")] | None,
        Conflicts(
            "pretraining_path", "observation_coef", why="the mask is about the policy's own tokens"
        ),
        Conflicts("critic.trunk shared", why="the mask is about the head of the policy alone"),
    ] = None
    """NLPO: sample and learn within the likeliest tokens of an older policy that together have this
    probability; 0.9 is usual."""
    mask_every: Annotated[Count, Needs("mask_top_p", why="there is no mask")] = 20
    """Optimizer steps between two times that the older policy becomes the policy; whole batches."""
    separators: Annotated[
        tuple[int, ...],
        ReadOnlyWith("credit", "turn", why="other credit has no steps: steps have none"),
    ] = ()
    """Ids of tokens that end a turn, with credit turn: the steps of a text."""

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
        return with_reference(trained, self.has_kl, self.reference_tracks_policy)

    def parts(self, roles: Roles) -> tuple[Part, ...]:
        """List the parts that are on, in the order of their effects."""
        clip = self.normalized_reward_clip
        mask = Part(name="mask", controller=moving_reference(self.mask_every, role="mask"))
        return (
            *([] if clip is None else [normalized_by_deviation(clip)]),
            *(self.kl_parts(roles["reference"]) if self.has_kl else ()),
            *self.correction_parts(),
            *([entropy_bonus(self.entropy_coef)] if self.entropy_coef else []),
            *self.text_parts(),
            *self.observation_parts(),
            critic_loss(self.critic, roles["value"]),
            *([imitated_answers(self.positive_coef)] if self.positive_coef else []),
            *([] if self.mask_top_p is None else [mask]),
        )


def ppo(config: PpoConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build PPO. It learns from a Rollout."""
    policy = roles["policy"]
    if config.mask_top_p is not None:
        policy = restricted_role(policy, roles["mask"], config.mask_top_p, sampling.temperature)
    return policy_gradient(
        {**roles, "policy": policy},
        sampling,
        advantages=of_critic(config, roles["value"]),
        surrogate=config.surrogate_function,
        weights=masked.token_mean,
        parts=config.parts(roles),
    )


def of_critic(config: PpoConfig, critic: Role) -> Callable[[Draft], Draft]:
    """Make the function that gives a batch the advantages A_t, and the critic its targets R_t."""
    gamma = config.critic.gamma
    by_turn = config.credit == "turn"

    def estimate_advantages(draft: Draft) -> Draft:
        rollout = draft.rollout
        layout = draft.layout
        rewards = draft.rewards
        mask = rollout.action_mask
        episode_id = rollout.episode_id
        # V_t, [N, T], of the critic before the update.
        values = layout.unpack(
            packing.over_micro_batches(
                partial(value_loss.values, critic, draft.params), layout.rows(rollout.tokens)
            )
        )
        lam = config.lam
        if config.lam_alpha is not None:
            lengths = advantages.episode_totals(mask.sum(-1), episode_id)
            lam = advantages.length_adaptive_lambda(lengths, config.lam_alpha)
        # A_t = sum_k (gamma lam)^k delta_{t+k}, delta_t = r_t + gamma V_{t+1} - V_t. The targets of
        # the critic, R_t = V_t + A_t, have a lambda of their own.
        ends = advantages.step_ends(rollout.tokens, mask, config.separators)
        estimate = partial(advantages.turn_gae, ends=ends) if by_turn else advantages.gae
        advantage = estimate(rewards, values, mask, gamma, lam, episode_id)
        returns = values + estimate(rewards, values, mask, gamma, config.critic.lam, episode_id)
        # The policy learns from actions of scored rows; with credit by turn, the critic only from
        # the first action of each turn. Whitened: (A - mean A) / std A over the learned tokens.
        learned = learned_tokens(rollout)
        valued = learned & advantages.turn_starts(mask, ends) if by_turn else learned
        if config.whiten:
            advantage = masked.whiten(advantage, draft.learned)
        else:
            advantage = jnp.where(draft.learned, advantage, 0.0)
        weights = masked.token_mean(valued, layout.minibatch, layout.minibatches)
        targets = value_loss.targets(returns, values, valued, layout)
        draft = draft.with_fields(extras={"targets": targets})
        return draft._replace(advantages=advantage, weights={"value": weights})

    return estimate_advantages


def critic_loss(critic: Critic, role: Role) -> Part:
    """Make the part that fits the critic to its targets, which `of_critic` has put into the batch.

    + coef * sum w 1/2 (V - R)^2, clipped around the V before the update.
    """

    def term(prediction: Prediction, batch: PolicyBatch) -> tuple[Array, Metrics]:
        # On a shared trunk the hidden states serve the policy and the critic.
        hidden = prediction.hidden if critic.trunk == "shared" else None
        values = value_loss.values(role, prediction.params, batch.rows, hidden)
        value, metrics = value_loss.value_loss(
            values, batch.extras["targets"], batch.weights["value"], critic
        )
        return critic.coef * value, metrics

    return Part(term=term)


def imitated_answers(coef: float) -> Part:
    """Make VAPO's part that imitates right answers: - positive_coef sum_t u_t log pi(y_t).

    Right are episodes that earned more than 0, before the KL is subtracted.
    """

    def weights(rollout: Rollout, layout: Layout) -> Array:
        learned = learned_tokens(rollout)
        earned = masked.total(rollout.rewards, learned, axis=-1)
        right = advantages.episode_totals(earned, rollout.episode_id) > 0
        return masked.token_mean(learned & right[:, None], layout.minibatch, layout.minibatches)

    def batch(batch: PolicyBatch, draft: Draft, state: Any) -> PolicyBatch:
        packed = draft.layout.pack(weights(draft.rollout, draft.layout))
        return batch.with_weights(positive=packed)

    def term(prediction: Prediction, batch: PolicyBatch) -> tuple[Array, Metrics]:
        positive = batch.weights["positive"]
        imitated = masked.total(positive * prediction.tokens.log_probs, positive > 0)
        return -coef * imitated, {}

    return Part(batch=batch, term=term)
