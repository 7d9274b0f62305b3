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

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal

import jax.numpy as jnp

from tpu_rl.algorithm_spec import ExperienceSpec, Opponent, PromptValue, RoleSpec
from tpu_rl.algos.policy_gradient import policy_gradient
from tpu_rl.algos.roles import with_reference
from tpu_rl.losses import advantages, masked
from tpu_rl.losses.entropy import entropy_bonus
from tpu_rl.losses.policy_batch import Draft, learned_tokens
from tpu_rl.losses.policy_gradient import ClipSettings
from tpu_rl.losses.reference_kl import ReferenceKl
from tpu_rl.losses.sampler_correction import SamplerCorrection
from tpu_rl.losses.shapes import BoolNT
from tpu_rl.ranges import Conflicts, In, NotNegative, Share
from tpu_rl.types import Algorithm, Array, Roles, Rollout, Sampling


@dataclass(frozen=True)
class ReinforceConfig(SamplerCorrection, ReferenceKl, ClipSettings):
    """Coefficients multiply nats."""

    baseline: Annotated[
        Literal["none", "group", "greedy"],
        Conflicts(
            "opponent_mix",
            when="greedy",
            why="the greedy baseline is a reward, and the return is a chance to win",
        ),
    ] = "none"
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
    clip_low: Annotated[float, In("(0, 1]")] = field(default=0.2, kw_only=True)
    """A ratio below 1 - clip_low has no gradient where the advantage is negative."""
    entropy_coef: NotNegative = 0.0
    """Coefficient of the entropy bonus."""
    credit: Literal["token", "turn"] = "token"
    """Return of a token: the rewards from it on (token), or from its turn on (turn). With turn, the
    group's baseline is the mean return of the same turn of the group's episodes."""

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
        return with_reference(policy, needed, self.reference_tracks_policy)


def reinforce(config: ReinforceConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build REINFORCE. It learns from a Rollout, whose `baseline` is the greedy baseline.

    Its state is the scale of the KL coefficients, if that adapts.
    """
    return policy_gradient(
        roles,
        sampling,
        advantages=returns_above_baseline(config),
        surrogate=config.surrogate_function,
        weights=masked.weighting(config.loss_aggregation, length=sampling.max_new_tokens),
        parts=(
            *config.correction_parts(),
            *(config.kl_parts(roles["reference"]) if config.has_kl else ()),
            *([entropy_bonus(config.entropy_coef)] if config.entropy_coef else []),
        ),
    )


def returns_above_baseline(config: ReinforceConfig) -> Callable[[Draft], Draft]:
    """Make the function that gives a batch the advantages A_t = G_t - b."""
    by_turn = config.credit == "turn"
    returns_of = advantages.turn_returns if by_turn else advantages.returns_to_go

    def compare(draft: Draft) -> Draft:
        rollout = draft.rollout
        learned = learned_tokens(rollout)
        advantage = returns_of(draft.rewards, learned, config.gamma, rollout.episode_id)
        advantage -= baseline(config, rollout, learned)
        if config.whiten:
            advantage = masked.whiten(advantage, draft.learned)
        else:
            advantage = jnp.where(draft.learned, advantage, 0.0)
        return draft._replace(advantages=advantage)

    return compare


def baseline(config: ReinforceConfig, rollout: Rollout, learned: BoolNT) -> Array:
    """Compute b of each token, [N, T] or [N, 1]."""
    scored = learned.any(-1)
    match config.baseline:
        case "none":
            return jnp.zeros_like(rollout.rewards[:, :1])
        case "group" if config.credit == "turn":
            returns = advantages.turn_returns(
                rollout.rewards, learned, config.gamma, rollout.episode_id
            )
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
                advantages.group_centered, row_returns, rollout.group_id, scored, rollout.episode_id
            )
            return (returns - centered)[:, None]
        case "greedy":
            assert rollout.baseline is not None
            return rollout.baseline[:, None]
