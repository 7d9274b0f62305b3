"""Group relative policy optimization (GRPO; DeepSeekMath, arXiv 2402.03300) and its relatives.

Several completions of one prompt are each other's baseline. The advantage A of a completion
compares its return with the returns of its group, and every token of the completion is pushed by A
through PPO's clipped ratio r_t = policy / old policy:

    loss = sum_t w_t [ -min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A)
                       + kl_loss_coef KL_t - entropy_coef H_t ]

The variants differ in the advantage, in the weights w, and in where the KL to the reference goes:
into the reward (k1), or into the loss (with its exact gradient); `losses.reference_kl` has
other forms.

    GRPO       advantages "group", weights "sequence_mean"
    Dr. GRPO   advantages "centered", weights "constant_length"          arXiv 2503.20783
    RLOO       advantages "leave_one_out", kl_reward_coef > 0            arXiv 2402.14740
    DAPO       weights "token_mean", clip_high 0.28, overlong_buffer,
               and dynamic sampling (a setting of the batch)             arXiv 2503.14476
    OPO        advantages "opo"                                          arXiv 2505.23585
    pass@k     advantages "pass_at_k"                                    arXiv 2503.19595
    MaxRL      advantages "max_rl"                                       arXiv 2602.02710
    decoupled  importance_sampling_cap 2: the ratio is to the
               recomputed policy, and a weight corrects for
               the policy that sampled (AReaL)                           arXiv 2505.24298

In conversations of several turns, `credit` says what A is about: the episode; the return from each
turn on, compared with the same turn of the group's other episodes; or, in addition to the
episode's, the return from each turn on, compared with turns that began in the same state.

    per turn   credit "turn"
    process supervision   credit "reward"                            arXiv 2402.03300, 4.1.3
    GiGPO      credit "step", gamma 0.95                             arXiv 2505.10978

With `separators`, the steps of a text are turns: a turn ends with each of these tokens. Rewards of
steps come from a reward of segments (`runtime.segments`).

With `credit` "token" the returns from the k-th token on are compared with those of the group's
other k-th tokens. Another forward pass of the policy gives each token a weight, W_ik = sum_(j <= k)
|d log policy(y_ij) / d logits|^2. With advantages "opo", which reads weights, this is the optimal
token baseline, as in verl with handle_zero_tail off.

    optimal token baseline   credit "token", advantages "opo"

With `thought_weight` w, the advantages of thoughts, up to `thought_end`, count w times as much as
those of answers: exploration is learned faster than execution, or slower.

    E2C        thought_weight above 1                                    arXiv 2509.23946

`group_policy_gradient` is the same algorithm with any surrogate and further parts: see `gspo`,
`cispo`, `surrogates`, `mixed` and `prime`.

Deviations: the default weights are "token_mean", as in TRL and verl, also in the presets named
after GRPO. The standard deviation of a group is the sample one (n - 1), as there. Two states of
GiGPO are the same if the observations have the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import jax.numpy as jnp

from tpu_rl.algorithm_spec import ExperienceSpec, RoleSpec
from tpu_rl.algos.policy_gradient import policy_gradient
from tpu_rl.algos.roles import with_reference
from tpu_rl.errors import InputError
from tpu_rl.losses import advantages, masked
from tpu_rl.losses.credit import CreditSettings
from tpu_rl.losses.entropy import EntropySettings
from tpu_rl.losses.observations import ObservationLoss
from tpu_rl.losses.policy_batch import Draft, Part, PolicyBatch
from tpu_rl.losses.policy_gradient import ClipSettings, SurrogateFunction
from tpu_rl.losses.pretraining_mix import PretrainingMix
from tpu_rl.losses.reference_kl import StagnationReset
from tpu_rl.losses.returns import ReturnSettings
from tpu_rl.losses.robust import RobustSettings
from tpu_rl.losses.sampler_correction import SamplerCorrection
from tpu_rl.ranges import Conflicts, Needs, NotNegative
from tpu_rl.types import Algorithm, Roles, Sampling

ADVANTAGES = {
    "group": advantages.group_scaled,
    "batch": advantages.batch_scaled,
    "centered": advantages.group_centered,
    "leave_one_out": advantages.leave_one_out,
    "opo": advantages.length_weighted,
    "pass_at_k": advantages.best_minus_second,
    "pass_at_k_scaled": advantages.best_minus_second_scaled,
    "max_rl": advantages.mean_scaled,
    "gpg": advantages.unequal_groups,
}


@dataclass(frozen=True)
class GroupPolicyConfig(
    SamplerCorrection,
    StagnationReset,
    EntropySettings,
    ReturnSettings,
    CreditSettings,
    RobustSettings,
    PretrainingMix,
    ObservationLoss,
):
    """Settings of every method with a group baseline. Lengths are tokens; coefficients multiply
    nats."""

    advantages: Annotated[
        Literal[
            "group",
            "batch",
            "centered",
            "leave_one_out",
            "opo",
            "pass_at_k",
            "pass_at_k_scaled",
            "max_rl",
            "gpg",
        ],
        Conflicts(
            "kl_reward_coef",
            "overlong_buffer",
            when="max_rl",
            why="it divides by the mean return of a group, which penalties may bring below 0",
        ),
        Conflicts(
            "credit",
            when="max_rl",
            why="returns from a turn on may be below 0 where that of the episode is not",
        ),
    ] = "group"
    """Baseline and scale: return minus the group's mean over its standard deviation (group) or the
    batch's (batch), unscaled (centered), over the mean (max_rl, for returns of at least 0), or
    times N over the completions in groups of unequal returns (gpg); minus the mean of the others
    (leave_one_out); minus the mean weighted by length (opo); the best completion's lead over the
    second best (pass_at_k), also over the group's deviation (pass_at_k_scaled)."""
    loss_aggregation: masked.LossAggregation = "token_mean"
    """Weights of the tokens: every token alike, every completion alike, the sum over a completion
    (sequence_sum), or that divided by the length limit (constant_length)."""

    @property
    def experience(self) -> ExperienceSpec:
        # The completions of a prompt are compared: one alone would always have advantage 0.
        adapts = self.sampled_entropy is not None
        spec = ExperienceSpec("rollouts", smallest_group=2, adapts_temperature=adapts)
        if self.advantages == "max_rl":
            spec = spec._replace(
                raw_returns=True, transforms=lambda tokenizer: (require_returns_above_zero,)
            )
        return self.with_texts(spec)

    @property
    def roles(self) -> dict[str, RoleSpec]:
        policy = {"policy": RoleSpec(trainable=True)}
        return with_reference(policy, self.has_kl, self.reference_tracks_policy)

    def parts(self, roles: Roles) -> tuple[Part, ...]:
        """List the parts that are on, in the order of their effects."""
        reads_reference = "reference" in self.roles
        return (
            *self.temperature_parts(),
            *self.return_parts(),
            *self.correction_parts(),
            *self.robust_parts(),
            *(self.kl_parts(roles["reference"]) if reads_reference else ()),
            *self.entropy_parts(),
            *self.text_parts(),
            *self.observation_parts(),
        )


@dataclass(frozen=True)
class ClippedPolicyConfig(GroupPolicyConfig, ClipSettings):
    """Lengths are tokens; coefficients multiply nats."""


@dataclass(frozen=True)
class GrpoConfig(ClippedPolicyConfig):
    """Lengths are tokens; coefficients multiply nats."""

    thought_weight: NotNegative = 1.0
    """Factor of the advantages of thoughts, the actions up to --algorithm.thought-end; those of
    answers keep the factor 1. Of single turns."""
    thought_end: Annotated[
        tuple[int, ...], Needs("thought_weight", why="nothing differs between thoughts and answers")
    ] = ()
    """Ids of the tokens that end a thought, in their order, such as that of </think>. A completion
    without them is all thought; policy/thoughts is the share of actions in thoughts."""

    def parts(self, roles: Roles) -> tuple[Part, ...]:
        """List the parts that are on, in the order of their effects."""
        parts = super().parts(roles)
        if self.thought_weight == 1:
            return parts
        return *parts, weighted_thoughts(self.thought_weight, self.thought_end)


def require_returns_above_zero(scored: Any, step: int, state: Any) -> Any:
    """Check that returns are at least 0: the transform of max_rl.

    Raises:
        InputError: if the return of an episode is below 0.
    """
    rollout = scored.rollout
    returns = jnp.asarray(rollout.rewards).sum(-1)
    lowest = float(advantages.episode_totals(returns, rollout.episode_id).min())
    if lowest < 0:
        raise InputError(
            f"a completion has the return {lowest:g}",
            where="--algorithm.advantages max_rl",
            why="it divides by the mean return of a group, so that returns must be 0 or more",
            fix="use rewards of at least 0, or other advantages",
        )
    return scored


def weighted_thoughts(weight: float, end: tuple[int, ...]) -> Part:
    """Make the part that multiplies the advantages of thoughts, which go up to `end`."""

    def batch(batch: PolicyBatch, draft: Draft, state: Any) -> PolicyBatch:
        rollout = draft.rollout
        is_thought = advantages.thoughts(rollout.tokens, rollout.action_mask, end)
        in_thought = draft.layout.pack(is_thought.astype(batch.advantages.dtype))
        factors = 1.0 + (weight - 1.0) * in_thought
        return replace(
            batch,
            advantages=batch.advantages * factors,
            shares=batch.shares | {"policy/thoughts": in_thought},
        )

    return Part(batch=batch)


def grpo(config: GrpoConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build GRPO. It learns from a Rollout."""
    return group_policy_gradient(config, roles, sampling, config.surrogate_function)


def group_policy_gradient(
    config: GroupPolicyConfig,
    roles: Roles,
    sampling: Sampling,
    surrogate: SurrogateFunction,
    parts: Sequence[Part] = (),
) -> Algorithm:
    """Build the method that a configuration describes, with this surrogate and further parts.

    It learns from a Rollout. Its state is that of its parts, by their names.
    """
    return policy_gradient(
        roles,
        sampling,
        advantages=config.compared(ADVANTAGES[config.advantages]),
        surrogate=surrogate,
        weights=masked.weighting(config.loss_aggregation, length=sampling.max_new_tokens),
        parts=(*config.parts(roles), *parts),
    )
