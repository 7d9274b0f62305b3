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

`group_policy_gradient` is the same algorithm with any surrogate: see `gspo`, `cispo` and
`surrogates`.

Deviations: the default weights are "token_mean", as in TRL and verl, also in the presets named
after GRPO. The standard deviation of a group is the sample one (n - 1), as there. Two states of
GiGPO are the same if the observations have the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Literal

import jax.numpy as jnp

from tpu_rl.algorithm_spec import ExperienceSpec, RoleSpec
from tpu_rl.algos.controllers import (
    applied_entropy_coef,
    combined,
    entropy_controller,
    kl_controllers,
    stagnation_controller,
    temperature_controller,
    temperature_factor,
    with_return,
)
from tpu_rl.algos.roles import with_reference
from tpu_rl.errors import InputError
from tpu_rl.losses import advantages, masked, robust
from tpu_rl.losses.log_probs import token_log_probs
from tpu_rl.losses.observations import ObservationLoss, observation_terms
from tpu_rl.losses.policy_batch import (
    Credit,
    PolicyBatch,
    learned_tokens,
    make_policy_batch,
    normalized_advantages,
)
from tpu_rl.losses.policy_gradient import (
    LossTerm,
    SurrogateFunction,
    clipped_surrogate,
    policy_loss,
)
from tpu_rl.losses.pretraining_mix import PretrainingMix, text_terms
from tpu_rl.losses.reference_kl import ReferenceKl
from tpu_rl.losses.robust import Ball
from tpu_rl.losses.sampler_correction import SamplerCorrection
from tpu_rl.ranges import CountOrNone, In, NotNegative, Positive
from tpu_rl.types import (
    Algorithm,
    Array,
    Experience,
    Layout,
    Max,
    Metrics,
    Params,
    Roles,
    Rollout,
    Sampling,
)

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
class GroupPolicyConfig(SamplerCorrection, ReferenceKl, PretrainingMix, ObservationLoss):
    """Settings of every method with a group baseline. Lengths are tokens; coefficients multiply
    nats."""

    advantages: Literal[
        "group",
        "batch",
        "centered",
        "leave_one_out",
        "opo",
        "pass_at_k",
        "pass_at_k_scaled",
        "max_rl",
        "gpg",
    ] = "group"
    """Baseline and scale: return minus the group's mean over its standard deviation (group) or the
    batch's (batch), unscaled (centered), over the mean (max_rl, for returns of at least 0), or
    times N over the completions in groups of unequal returns (gpg); minus the mean of the others
    (leave_one_out); minus the mean weighted by length (opo); the best completion's lead over the
    second best (pass_at_k), also over the group's deviation (pass_at_k_scaled)."""
    normalize_advantages: bool = False
    """Scale the advantages to mean 0 and standard deviation 1 over the batch's completions, after
    the baseline (RLOO in TRL)."""
    reward_clip_range: tuple[float, float] | None = None
    """Smallest and largest return of an episode, before penalties and the KL."""
    loss_aggregation: masked.LossAggregation = "token_mean"
    """Weights of the tokens: every token alike, every completion alike, the sum over a completion
    (sequence_sum), or that divided by the length limit (constant_length)."""
    entropy_coef: NotNegative = 0.0
    """Coefficient of the entropy bonus. With an entropy target, its initial value."""
    entropy_target: NotNegative | None = None
    """Nats per token. After each optimizer step the coefficient of the entropy bonus rises if the
    entropy is at most this, and falls otherwise; above the target there is no bonus (Skywork-OR1,
    arXiv 2505.22312)."""
    entropy_coef_delta: NotNegative = 0.005
    """Change of the entropy coefficient per optimizer step, with an entropy target."""
    entropy_coef_max: NotNegative = 1.0
    """Largest entropy coefficient, with an entropy target."""
    sampled_entropy: Positive | None = None
    """Nats per token. The sampling temperature rises while the entropy of the distributions sampled
    from is below this, and falls while it is above; 0.3 is usual (AceReason-Nemotron 1.1)."""
    sampled_entropy_rate: Positive = 0.1
    """Change of the logarithm of the temperature per nat of entropy that is missing and step."""
    top_entropy_quantile: Annotated[float, In("(0, 1]")] = 1.0
    """Learn only from this share of the batch's tokens, those with the highest entropy before the
    update (arXiv 2506.01939); 0.2 is usual. The KL in the loss is about all tokens."""
    reference_reset_patience: CountOrNone = 0
    """Reset the reference to the policy when the mean return of so many batches was not above the
    best one before (ProRL, arXiv 2505.24864); 0 never. The moments of the optimizer stay."""
    robust_radius: float = 0.0
    """Share of the weight that the worst case may move between the prompts of a step, towards those
    with the lowest mean returns (distributionally robust RLHF, arXiv 2503.00539)."""
    robust_ball: Ball = "tv"
    """Divergence that bounds the worst case. With kl and chi_square, robust_radius is its
    coefficient, in units of the return."""
    overlong_buffer: CountOrNone = 0
    """Soft overlong penalty (DAPO) over this many tokens before the length limit; 0 is off. An
    episode has one, and its observations count."""
    mask_truncated: bool = False
    """Do not learn from completions that reached the length limit. They stay in their group's
    baseline."""
    credit: Credit = "episode"
    """The returns that a group compares. episode: of whole episodes. turn: from a turn on, among
    turns with the same number. step: of episodes and, among turns that answer the same observation,
    from a turn on (GiGPO). reward: the rewards of all turns of the group are compared, and a turn
    has the sum of the results from it on. token: from a token on, among tokens with the same
    number; with --algorithm.advantages opo this is the optimal token baseline."""
    separators: tuple[int, ...] = ()
    """Ids of tokens that end a turn, with credit turn or reward: the steps of a text."""
    gamma: Annotated[float, In("[-1, 1]")] = 1.0
    """Discount per turn of the returns from a turn on; 0: a turn has its own reward alone. -1: two
    sides move in turn, and one wins what the other loses, as in self-play."""
    step_coef: NotNegative = 1.0
    """Coefficient of the advantages among turns that answer the same observation; GiGPO's omega."""

    def __post_init__(self):
        SamplerCorrection.__post_init__(self)
        ReferenceKl.__post_init__(self)
        PretrainingMix.__post_init__(self)
        if self.reward_clip_range is not None and not (
            self.reward_clip_range[0] < self.reward_clip_range[1]
        ):
            raise InputError(
                f"the reward clip range {self.reward_clip_range} holds nothing",
                where="--algorithm.reward-clip-range",
                fix="give the smallest return, then the largest",
            )
        problem = robust.conflict(self.robust_radius, self.robust_ball)
        if problem:
            raise InputError(problem, where="--algorithm.robust-radius", fix="see --help-all")
        if self.sampled_entropy is None and self.sampled_entropy_rate != 0.1:
            raise InputError(
                "the temperature does not move without an entropy to keep",
                where="--algorithm.sampled-entropy-rate",
                fix="give --algorithm.sampled-entropy, too",
            )
        if self.entropy_target and self.entropy_coef > self.entropy_coef_max:
            raise InputError(
                f"the entropy coefficient {self.entropy_coef:g} begins above its largest value",
                where="--algorithm.entropy-coef, --algorithm.entropy-coef-max",
                fix=f"use at most {self.entropy_coef_max:g}, or raise the largest value",
            )
        if self.entropy_target is None and (
            (self.entropy_coef_delta, self.entropy_coef_max) != (0.005, 1.0)
        ):
            raise InputError(
                "the entropy coefficient does not move without a target",
                where="--algorithm.entropy-coef-delta, --algorithm.entropy-coef-max",
                fix="give --algorithm.entropy-target, too, near the entropy that runs have",
            )
        patience = self.reference_reset_patience
        if patience and (self.reference_reset_every or not self.has_kl):
            raise InputError(
                "nothing reads the reference, or a schedule resets it",
                where="--algorithm.reference-reset-patience",
                fix="give a KL coefficient, and no --algorithm.reference-reset-every",
            )
        if self.credit in ("episode", "token") and self.gamma != 1:
            raise InputError(
                f"gamma {self.gamma} discounts turns, and credit is not given to turns",
                where="--algorithm.gamma, --algorithm.credit",
                fix="use --algorithm.credit turn or step, or --algorithm.gamma 1",
            )
        if self.gamma < 0 and self.credit == "step":
            raise InputError(
                f"gamma {self.gamma} is for two sides, and the return of an episode mixes them",
                where="--algorithm.gamma, --algorithm.credit",
                why="credit step adds the advantage of the whole episode",
                fix="use --algorithm.credit turn or reward",
            )
        if self.separators and self.credit not in ("turn", "reward"):
            raise InputError(
                f"credit is given to each {self.credit}, and steps have none",
                where="--algorithm.separators, --algorithm.credit",
                fix="use --algorithm.credit turn or reward, or leave the separators out",
            )
        if self.advantages == "max_rl" and (self.kl_reward_coef or self.overlong_buffer):
            raise InputError(
                "max_rl takes no penalties in the return",
                where="--algorithm.advantages, --algorithm.kl-reward-coef or .overlong-buffer",
                why="it divides by the mean return of a group, which they may bring below 0",
                fix="use --algorithm.kl-loss-coef or --algorithm.mask-truncated",
            )
        if self.advantages == "max_rl" and self.credit != "episode":
            raise InputError(
                "max_rl compares whole episodes",
                where="--algorithm.advantages, --algorithm.credit",
                why="returns from a turn on may be below 0 where that of the episode is not",
                fix="use --algorithm.credit episode",
            )
        if self.credit != "step" and self.step_coef != 1:
            raise InputError(
                "there is no coefficient of steps without step groups",
                where="--algorithm.step-coef, --algorithm.credit",
                fix="use --algorithm.credit step",
            )

    @property
    def experience(self) -> ExperienceSpec:
        # The completions of a prompt are compared: one alone would always have advantage 0.
        reads_returns = self.advantages == "max_rl" or self.reward_clip_range is not None
        adapts = self.sampled_entropy is not None
        spec = ExperienceSpec("rollouts", smallest_group=2, raw_returns=reads_returns)
        spec = self.with_texts(spec._replace(adapts_temperature=adapts))
        clip = self.reward_clip_range
        if self.advantages != "max_rl" or (clip is not None and clip[0] >= 0):
            return spec
        return spec._replace(transforms=lambda tokenizer: (require_returns_above_zero,))

    @property
    def roles(self) -> dict[str, RoleSpec]:
        policy = {"policy": RoleSpec(trainable=True)}
        return with_reference(policy, self.has_kl, self.resets_reference)

    @property
    def resets_reference(self) -> bool:
        """True if the reference is made equal to the policy now and then."""
        return bool(self.reference_reset_every or self.reference_reset_patience)


@dataclass(frozen=True)
class ClippedPolicyConfig(GroupPolicyConfig):
    """Lengths are tokens; coefficients multiply nats."""

    clip_low: Annotated[float, In("(0, 1)")] = 0.2
    """A ratio below 1 - clip_low has no gradient where the advantage is negative."""
    clip_high: Positive = 0.2
    """A ratio above 1 + clip_high has no gradient where the advantage is positive."""
    dual_clip: Annotated[float, In("(1, inf)")] | None = None
    """Cap on the loss of a bad action, in units of |A|; 3 is usual."""


@dataclass(frozen=True)
class GrpoConfig(ClippedPolicyConfig):
    """Lengths are tokens; coefficients multiply nats."""

    thought_weight: NotNegative = 1.0
    """Factor of the advantages of thoughts, the actions up to --algorithm.thought-end; those of
    answers keep the factor 1. Of single turns."""
    thought_end: tuple[int, ...] = ()
    """Ids of the tokens that end a thought, in their order, such as that of </think>. A completion
    without them is all thought; policy/thoughts is the share of actions in thoughts."""

    def __post_init__(self):
        super().__post_init__()
        if self.thought_end and self.thought_weight == 1:
            raise InputError(
                "nothing differs between thoughts and answers",
                where="--algorithm.thought-end",
                fix="give --algorithm.thought-weight, too, as in 2",
            )


def require_returns_above_zero(scored: Any, step: int, state: Any) -> Any:
    """Return scored completions as they are: the transform of max_rl.

    Raises:
        InputError: if the return of an episode is below 0.
    """
    del step, state
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


def grpo(config: GrpoConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build GRPO. It learns from a Rollout."""
    surrogate = partial(
        clipped_surrogate,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )
    algorithm = group_policy_gradient(config, roles, sampling, surrogate)
    if config.thought_weight == 1:
        return algorithm

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[PolicyBatch, Any]:
        batch, state = algorithm.make_batch(experience, params, state)
        rollout, layout = experience
        is_thought = advantages.thoughts(rollout.tokens, rollout.action_mask, config.thought_end)
        in_thought = layout.pack(is_thought.astype(batch.advantages.dtype))
        factors = 1.0 + (config.thought_weight - 1.0) * in_thought
        return replace(batch, advantages=batch.advantages * factors, thoughts=in_thought), state

    return algorithm._replace(make_batch=make_batch)


def worst_prompts(rollout: Rollout, layout: Layout, config: GroupPolicyConfig) -> Array:
    """Return the factor of each action's weight in the worst case over prompts, [N, T]."""
    mask = learned_tokens(rollout)
    factors = robust.worst_prompts(
        masked.total(rollout.rewards, mask, axis=-1),
        rollout.group_id,
        mask.any(-1),
        rollout.episode_id,
        layout.minibatch,
        layout.minibatches,
        config.robust_radius,
        config.robust_ball,
    )
    return jnp.where(mask, factors[:, None], 0.0)


def group_policy_gradient(
    config: GroupPolicyConfig,
    roles: Roles,
    sampling: Sampling,
    surrogate: SurrogateFunction,
    further_terms: Mapping[str, LossTerm] = MappingProxyType({}),
) -> Algorithm:
    """Build the method with a group baseline, this surrogate and further terms of the loss.

    It learns from a Rollout. Its state is that of the controllers of its configuration.
    """
    further_terms = {**further_terms, **text_terms(config), **observation_terms(config)}
    advantage = ADVANTAGES[config.advantages]
    if config.normalize_advantages:
        advantage = partial(normalized_advantages, advantage)
    controllers = kl_controllers(config)
    if config.reference_reset_patience:
        controllers["stagnation"] = stagnation_controller(config.reference_reset_patience)
    if config.entropy_target is not None:
        controllers["entropy"] = entropy_controller(
            config.entropy_coef,
            config.entropy_target,
            config.entropy_coef_delta,
            config.entropy_coef_max,
        )

    if config.sampled_entropy is not None:
        controllers["temperature"] = temperature_controller(
            config.sampled_entropy, config.sampled_entropy_rate
        )

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[PolicyBatch, Any]:
        temperature: Array | float = sampling.temperature
        if config.sampled_entropy is not None:
            temperature *= temperature_factor(state)
        batch = make_policy_batch(
            experience,
            params,
            policy=roles["policy"],
            reference=roles["reference"] if "reference" in config.roles else None,
            advantage=advantage,
            reward_clip_range=config.reward_clip_range,
            weighting=masked.weighting(config.loss_aggregation, length=sampling.max_new_tokens),
            temperature=temperature,
            max_new_tokens=sampling.max_new_tokens,
            kl=config,
            kl_scale=state["kl_scale"] if "kl_scale" in controllers else 1.0,
            overlong_buffer=config.overlong_buffer,
            mask_truncated=config.mask_truncated,
            correction=config,
            top_entropy_quantile=config.top_entropy_quantile,
            credit=config.credit,
            gamma=config.gamma,
            step_coef=config.step_coef,
            separators=config.separators,
        )
        rollout, layout = experience
        if config.reference_reset_patience:
            state = state | {"stagnation": with_return(state["stagnation"], rollout)}
        if config.robust_radius:
            worst = batch.weights["policy"] * layout.pack(worst_prompts(rollout, layout, config))
            batch = replace(batch, weights=batch.weights | {"policy": worst})
        weights = {
            name: layout.pack(term.weights(rollout, layout))
            for name, term in further_terms.items()
            if term.weights is not None
        }
        if "kl_scale" in controllers:
            weights["kl"] = batch.weights["policy"] * state["kl_scale"]
        if config.entropy_target is not None:
            coef = applied_entropy_coef(state["entropy"], config.entropy_target)
            weights["entropy"] = batch.weights["policy"] * coef
        if config.sampled_entropy is not None:
            temperatures = jnp.broadcast_to(temperature, batch.advantages.shape)
            batch = replace(batch, temperature=temperatures)
        rows = config.rows_of(batch.rows)
        return replace(batch, rows=rows, weights=batch.weights | weights), state

    def loss(params: Params, batch: PolicyBatch) -> tuple[Array, Metrics]:
        changed = batch.temperature
        policy = token_log_probs(
            roles["policy"],
            params,
            batch.rows,
            sampling.temperature if changed is None else changed.max(),
            entropy_gradient=config.entropy_coef > 0 or config.entropy_target is not None,
        )
        value, metrics = policy_loss(
            policy,
            batch,
            surrogate,
            entropy_coef=config.entropy_coef,
            kl_coef=config.kl_loss_coef,
            kl_estimator=config.kl_estimator,
            further_terms=further_terms,
        )
        if changed is not None:
            metrics["policy/temperature"] = Max(changed.max())
        return value, metrics

    return Algorithm(make_batch, loss, *combined(controllers))
