"""REINFORCE with a baseline in place of a critic: REINFORCE++, ReMax and Nash-MD.

    G_t  = sum over t' >= t of gamma^(t' - t)
           (reward_t' - kl_reward_coef (log pi_old - log pi_reference)(y_t'))
    A_t  = G_t - b(x), whitened over the batch's tokens if `whiten`
    loss = sum_t w_t [ -min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t)
                       - entropy_coef H_t + kl_loss_coef KL_t ]

    REINFORCE++            b = 0, whitened                       arXiv 2501.03262, eq. 4 and 5
    REINFORCE++-baseline   b = the mean reward of the prompt's
                           completions, whitened                 the same, section 3.3
    per turn               credit "turn": t counts turns, and b is
                           the mean return of the group's turns t
    ReMax                  b = the reward of the greedy
                           completion, not whitened; weights
                           "constant_length": sums over a
                           completion's tokens                   arXiv 2310.10505, algorithm 1
    Nash-MD                reward = P(y is preferred to y') - 1/2,
                           y' ~ policy^(1 - s) reference^s, with
                           s = `opponent_mix`, b = 0, not
                           whitened, a KL coefficient           arXiv 2312.00886, section 7

Deviations: Nash-MD's P is sigmoid(r(y) - r(y')) of the rewards, as in TRL. TRL's KL has the
gradient of `kl_loss_coef` with k2 and "sequence_sum": each token's own log-ratio. The paper's is
that of the whole completion, as `kl_reward_coef` has it from a token on. ReMax has no ratio. With
one update per batch the ratio is 1 and the gradient the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import jax.numpy as jnp

from tpu_rl.algorithm_spec import ExperienceSpec, Opponent, PromptValue, RoleSpec
from tpu_rl.algos.controllers import combined, kl_controllers
from tpu_rl.algos.roles import with_reference
from tpu_rl.errors import InputError
from tpu_rl.losses import advantages, masked
from tpu_rl.losses.log_probs import token_log_probs
from tpu_rl.losses.policy_batch import (
    PolicyBatch,
    corrected,
    learned_tokens,
    pack_policy_batch,
    reference_penalty,
)
from tpu_rl.losses.policy_gradient import clipped_surrogate, policy_loss
from tpu_rl.losses.reference_kl import ReferenceKl
from tpu_rl.losses.sampler_correction import SamplerCorrection
from tpu_rl.ranges import In, NotNegative, Positive, Share
from tpu_rl.types import Algorithm, Array, Experience, Metrics, Params, Roles, Rollout, Sampling


@dataclass(frozen=True)
class ReinforceConfig(SamplerCorrection, ReferenceKl):
    """Coefficients multiply nats."""

    baseline: Literal["none", "group", "greedy"] = "none"
    """none: 0. group: the mean return of the prompt's completions. greedy: the reward of one more
    completion per prompt, the greedy one, which is not learned from."""
    whiten: bool = True
    """Scale advantages to mean 0 and variance 1 over the batch."""
    opponent_mix: Share | None = None
    """Nash-MD: replace each reward by the chance to win against another sampler's completion of
    the prompt, less 1/2. The sampler is the geometric mixture of policy and reference with this
    share of the reference; 0.5 is usual, 0 is self-play."""
    loss_aggregation: Literal["token_mean", "sequence_sum", "constant_length"] = "token_mean"
    gamma: Annotated[float, In("(0, 1]")] = 1.0
    """Discount per token, or per turn if `credit` is."""
    clip_low: Annotated[float, In("(0, 1]")] = 0.2
    """A ratio below 1 - clip_low has no gradient where the advantage is negative."""
    clip_high: Positive = 0.2
    """A ratio above 1 + clip_high has no gradient where the advantage is positive."""
    dual_clip: Annotated[float, In("(1, inf)")] | None = None
    """Cap on the loss of a bad action, in units of |A|; 3 is usual."""
    entropy_coef: NotNegative = 0.0
    """Coefficient of the entropy bonus."""
    credit: Literal["token", "turn"] = "token"
    """Return of a token: the rewards from it on (token), or from its turn on (turn). With turn, the
    group's baseline is the mean return of the same turn of the group's episodes."""

    def __post_init__(self):
        SamplerCorrection.__post_init__(self)
        ReferenceKl.__post_init__(self)
        if self.opponent_mix is not None and self.baseline == "greedy":
            raise InputError(
                "the greedy baseline is a reward, and the return is a chance to win",
                where="--algorithm.opponent-mix, --algorithm.baseline",
                fix="use --algorithm.baseline none",
            )

    @property
    def experience(self) -> ExperienceSpec:
        smallest_group = 2 if self.baseline == "group" else 1
        prompt_value = None
        if self.baseline == "greedy":
            prompt_value = PromptValue("policy", samples=1, beta=1.0, greedy=True)
        spec = ExperienceSpec("rollouts", smallest_group=smallest_group, prompt_value=prompt_value)
        if self.opponent_mix is None:
            return spec
        return spec._replace(opponent=Opponent(self.opponent_mix), raw_returns=True)

    @property
    def roles(self) -> dict[str, RoleSpec]:
        policy = {"policy": RoleSpec(trainable=True)}
        needed = self.has_kl or bool(self.opponent_mix)
        return with_reference(policy, needed, self.reference_reset_every > 0)


def reinforce(config: ReinforceConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build REINFORCE. It learns from a Rollout, whose `baseline` is the greedy baseline.

    Its state is the scale of the KL coefficients, if that adapts.
    """
    weighting = masked.weighting(config.loss_aggregation, length=sampling.max_new_tokens)
    surrogate = partial(
        clipped_surrogate,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )
    by_turn = config.credit == "turn"
    controllers = kl_controllers(config)
    returns_of = advantages.turn_returns if by_turn else advantages.returns_to_go

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[PolicyBatch, Any]:
        rollout, layout = experience
        rewards = rollout.rewards
        learned = learned_tokens(rollout)
        reference_log_probs = None
        if config.has_kl:
            scale = state["kl_scale"] if "kl_scale" in controllers else 1.0
            reference_log_probs, penalty = reference_penalty(
                config, roles["reference"], params, rollout, layout, sampling.temperature, scale
            )
            rewards -= penalty
        advantage = returns_of(rewards, learned, config.gamma, rollout.episode_id)
        advantage -= baseline(rollout, learned)
        correction = corrected(
            config, roles["policy"], params, rollout, layout, sampling.temperature
        )
        kept_tokens = correction.keep(learned)
        if config.whiten:
            advantage = masked.whiten(advantage, kept_tokens)
        else:
            advantage = jnp.where(kept_tokens, advantage, 0.0)
        weights = weighting(kept_tokens, layout.minibatch, layout.minibatches)
        batch = pack_policy_batch(
            rollout, layout, advantage, weights, reference_log_probs, correction
        )
        if "kl_scale" in controllers:
            batch.weights["kl"] = batch.weights["policy"] * state["kl_scale"]
        return batch, state

    def baseline(rollout: Rollout, learned: Array) -> Array:
        """Return b of each token, [N, T] or [N, 1]."""
        scored = learned.any(-1)
        match config.baseline:
            case "none":
                return jnp.zeros_like(rollout.rewards[:, :1])
            case "group" if config.credit == "turn":
                returns = returns_of(rollout.rewards, learned, config.gamma, rollout.episode_id)
                return returns - advantages.per_turn(
                    advantages.group_centered,
                    returns,
                    learned,
                    rollout.group_id,
                    scored,
                    rollout.episode_id,
                )
            case "group":
                row_returns = masked.total(rollout.rewards, rollout.action_mask, axis=-1)
                returns = advantages.episode_totals(row_returns, rollout.episode_id)
                centered = advantages.per_episode(
                    advantages.group_centered,
                    row_returns,
                    rollout.group_id,
                    scored,
                    rollout.episode_id,
                )
                return (returns - centered)[:, None]
            case "greedy":
                assert rollout.baseline is not None
                return rollout.baseline[:, None]

    def loss(params: Params, batch: PolicyBatch) -> tuple[Array, Metrics]:
        policy = token_log_probs(
            roles["policy"],
            params,
            batch.rows,
            sampling.temperature,
            entropy_gradient=config.entropy_coef > 0,
        )
        return policy_loss(
            policy,
            batch,
            surrogate,
            entropy_coef=config.entropy_coef,
            kl_coef=config.kl_loss_coef,
            kl_estimator=config.kl_estimator,
        )

    return Algorithm(make_batch, loss, *combined(controllers))
