"""Mixed groups: GRPO whose groups also learn from a solution from the data.

Each row of the data has a solution in a column. It joins its group as one more row.

    chord    (1 - mu) GRPO - mu mean_t phi_t log p_t,  phi_t = p_t (1 - p_t) held constant, or 1
                                                            arXiv 2508.11408
    relift   GRPO - mu mean_t log p_t, over the groups without a success      arXiv 2506.07527
    luffy    the solution has a reward and is compared with its group: its tokens' loss is
             -f(p_t) A,  f(p) = p / (p + shaping)           arXiv 2504.14945, section 3.2
    visurf   the same with GRPO's own clipped ratio, to the policy before the update
                                                            arXiv 2510.10606

p_t is the policy's probability of the solution's token t. The means are over the optimizer step.
mu rises linearly to `mu_peak` over `mu_warmup_steps`, then falls along a cosine to `mu_valley` over
`mu_decay_steps`; without decay it stays.

Deviations: ReLIFT gathers the unsolved prompts in a buffer and fine-tunes on them now and then;
here the term is part of the same step, so nothing has to be kept. ViSurf's controls of the
solution's reward are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from tpu_rl.algorithm_spec import ExperienceSpec
from tpu_rl.algos.grpo import GrpoConfig, group_policy_gradient
from tpu_rl.errors import InputError
from tpu_rl.losses import masked
from tpu_rl.losses.policy_batch import PolicyBatch, actions_of
from tpu_rl.losses.policy_gradient import LossTerm, clipped_surrogate
from tpu_rl.ranges import CountOrNone, Positive, Share
from tpu_rl.types import (
    Algorithm,
    Array,
    Experience,
    Layout,
    Params,
    Roles,
    Rollout,
    RowSource,
    Sampling,
)

Method = Literal["chord", "relift", "luffy", "visurf"]


_MU = ("mu_peak", "mu_valley", "mu_warmup_steps", "mu_decay_steps")
_READS: dict[Method, tuple[str, ...]] = {
    "chord": ("phi", *_MU),
    "relift": ("min_reward", *_MU),
    "luffy": ("solution_reward", "shaping"),
    "visurf": ("solution_reward",),
}
"""Method -> the settings that it reads, of those that only some methods do."""


@dataclass(frozen=True)
class MixedConfig(GrpoConfig):
    """GRPO's settings, and those of the solutions. Lengths are tokens."""

    method: Method = "chord"
    """Way to learn from the solutions; see the head of `tpu_rl/algos/mixed.py`."""
    column: str = "solution"
    """Column of the data rows that holds a solution of the prompt, as a text."""
    phi: bool = True
    """chord: weigh each token of the solution by p (1 - p)."""
    mu_peak: Share = 0.1
    """chord, relift: the largest weight of the solutions' term."""
    mu_valley: Share = 0.0
    """chord, relift: the weight after the decay."""
    mu_warmup_steps: CountOrNone = 0
    """chord, relift: optimizer steps until the largest weight."""
    mu_decay_steps: CountOrNone = 0
    """chord, relift: optimizer steps of the decay; 0 keeps the largest weight."""
    min_reward: float = 0.5
    """relift: a completion with at least this return is a success."""
    solution_reward: float = 1.0
    """luffy, visurf: the reward of a solution, before a clip and the overlong penalty."""
    shaping: Positive = 0.1
    """luffy: gamma of f(p) = p / (p + gamma); smaller numbers learn more from unlikely tokens."""

    def __post_init__(self):
        super().__post_init__()
        if self.mu_valley > self.mu_peak:
            raise InputError(
                f"mu falls to {self.mu_valley:g}, above its peak {self.mu_peak:g}",
                where="--algorithm.mu-valley, --algorithm.mu-peak",
                fix="use a valley of at most the peak",
            )
        names = {name for read in _READS.values() for name in read} - set(_READS[self.method])
        unread = sorted(n for n in names if getattr(self, n) != getattr(MixedConfig, n))
        if unread:
            raise InputError(
                f"method {self.method} does not read {', '.join(unread)}",
                where="--algorithm.method",
                fix=f"leave it out; it reads: {', '.join(_READS[self.method])}",
            )
        if self._compares_solutions and self.top_entropy_quantile < 1:
            raise InputError(
                f"{self.method} learns from all tokens of a solution",
                where="--algorithm.top-entropy-quantile",
                why="the quantile would count the solutions and filter the policy's tokens alone",
                fix="leave it out, or use --algorithm.method chord",
            )
        if self._compares_solutions and (self.kl_reward_coef or self.credit != "episode"):
            raise InputError(
                f"{self.method} compares solutions with whole completions by their rewards alone",
                where="--algorithm.kl-reward-coef, --algorithm.credit",
                why="the sampler has no log-probs of a solution, and a solution has no turns",
                fix="use --algorithm.kl-loss-coef, or --algorithm.method chord",
            )
        if self.method == "visurf" and not self.recomputes:
            raise InputError(
                "visurf compares with the policy before the update",
                where="--algorithm.old-log-probs",
                why="the sampler has no log-probs of a solution",
                fix="use --algorithm.old-log-probs recomputed",
            )

    @property
    def _compares_solutions(self) -> bool:
        return self.method in ("luffy", "visurf")

    @property
    def experience(self) -> ExperienceSpec:
        spec = super().experience
        return spec._replace(
            columns=("prompt", self.column),
            expert_column=self.column,
            rows_added=spec.rows_added + 1,
            raw_returns=True,
        )


def mu(config: MixedConfig, step: Array) -> Array:
    """Return the weight of the solutions' term at an optimizer step, from 0."""
    decay = jnp.clip((step - config.mu_warmup_steps) / max(config.mu_decay_steps, 1), 0.0, 1.0)
    falling = 0.5 * (1.0 + jnp.cos(jnp.pi * decay)) if config.mu_decay_steps else 1.0
    rising = jnp.minimum(step / max(config.mu_warmup_steps, 1), 1.0)
    warmup = rising if config.mu_warmup_steps else 1.0
    return jnp.asarray(warmup * (config.mu_valley + (config.mu_peak - config.mu_valley) * falling))


def without_success(rollout: Rollout, min_reward: float) -> Array:
    """Return [N] bool: True for rows of a group that has scored completions, and none with such a
    return."""
    returns = masked.total(rollout.rewards, rollout.action_mask, axis=-1)
    success = rollout.scored & (returns >= min_reward)
    group = jnp.searchsorted(jnp.sort(rollout.group_id), rollout.group_id)

    def count(rows: Array) -> Array:
        return jax.ops.segment_sum(rows.astype(jnp.int32), group, num_segments=len(group))[group]

    return (count(success) == 0) & (count(rollout.scored) > 0)


def mixed(config: MixedConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build GRPO on mixed groups. It learns from a Rollout with rows of `RowSource.EXPERT`."""
    surrogate = partial(
        clipped_surrogate,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )

    def solution_weights(rollout: Rollout, layout: Layout) -> Array:
        learned = actions_of(rollout, RowSource.EXPERT)
        if config.method == "relift":
            learned &= without_success(rollout, config.min_reward)[:, None]
        return masked.token_mean(learned, layout.minibatch, layout.minibatches)

    def solution_losses(log_probs: Array, batch: PolicyBatch) -> Array:
        probabilities = jnp.exp(log_probs)
        match config.method:
            case "luffy":
                shaped = probabilities / (probabilities + config.shaping)
                return -shaped * batch.advantages
            case "visurf":
                return surrogate(
                    log_probs, batch.old_log_probs, batch.advantages, batch.rows
                ).losses
            case "chord" if config.phi:
                return -jax.lax.stop_gradient(probabilities * (1 - probabilities)) * log_probs
            case _:
                return -log_probs

    term = LossTerm(solution_weights, solution_losses)
    base = group_policy_gradient(config, roles, sampling, surrogate, {"solution": term})

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[PolicyBatch, Any]:
        rollout, layout = experience
        assert isinstance(rollout, Rollout)
        is_solution = actions_of(rollout, RowSource.EXPERT)
        if config._compares_solutions:
            reward = jnp.where(masked.last(is_solution), config.solution_reward, rollout.rewards)
            scored = rollout.scored | is_solution.any(-1)
            experience = Experience(replace(rollout, rewards=reward, scored=scored), layout)
        batch, state = base.make_batch(experience, params, state)
        weights = dict(batch.weights)
        if config._compares_solutions:
            # All learned tokens count as GRPO weighs them, in the term that is theirs.
            of_solutions = layout.pack(is_solution)
            weights["solution"] = jnp.where(of_solutions, weights["policy"], 0.0)
            for name in weights.keys() - {"solution"}:
                weights[name] = jnp.where(of_solutions, 0.0, weights[name])
        else:
            share = mu(config, jnp.max(rollout.policy_step))
            weights["solution"] *= share
            if config.method == "chord":
                weights |= {
                    name: (1.0 - share) * weights[name]
                    for name in weights.keys() - {"solution", "pretraining"}
                }
        return replace(batch, weights=weights), state

    return base._replace(make_batch=make_batch)
