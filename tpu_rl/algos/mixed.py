"""Mixed groups: GRPO whose groups also learn from a solution from the data.

Each row of the data has a solution in a column. It joins its group as one more row.

    chord    (1 - mu) GRPO - mu mean_t phi_t log p_t,  phi_t = p_t (1 - p_t) held constant
                                                            arXiv 2508.11408
    relift   GRPO - mu mean_t log p_t, over the groups without a success      arXiv 2506.07527
    luffy    the solution has the reward 1 and is compared with its group: its tokens' loss is
             -f(p_t) A,  f(p) = p / (p + 0.1)               arXiv 2504.14945, section 3.2
    visurf   the same with GRPO's own clipped ratio, to the policy before the update; where a
             completion of the group has the reward 1, too, the solution has the completions' mean
             and so about no advantage                      arXiv 2510.10606
    replay   a success of the past, in place of a solution of the data, joins the
             groups without a success; -min(r A, clip(r) A) with the ratio r to the
             policy that sampled it                         arXiv 2508.15144
    sasr     - mean_t log p_t with the probability G / (G + G_0), else GRPO
                                                            arXiv 2505.13026, algorithm 1
    amft     (1 - mu) GRPO - mu mean_t log p_t;  after each step
             mu <- clip(mu + 5e-4 (H_target - H), 0, mu_peak)
                                                            arXiv 2508.06944
    critique luffy's loss for the best answer that the policy gives after a critique of the group's
             worst one, with its own reward; see experience/refinements.py  arXiv 2506.03106

p_t is the policy's probability of the solution's token t. The means are over the optimizer step.
mu rises linearly to `mu_peak` over `mu_warmup_steps`, and stays there.

G is the norm of the gradient at the latest step that imitated, and G_0 that at the last step of the
warm-up of `mu_warmup_steps` steps, of which there is one at least. One draw decides for a batch. H
is the policy's entropy per token, and H_target that of the first step.

Deviations: AMFT adds to mu the gradient of a validation loss with respect to mu, which needs the
gradients of both terms apart; here it is left out. (The authors' program, whose paper is withdrawn,
multiplies it by two learning rates, about 1e-10, so that the entropy decides there too.) mu begins
at `mu_peak`. SASR's rule was not checked against a program. ReLIFT gathers the unsolved prompts in
a buffer and fine-tunes on them now and then; here the term is part of the same step, so nothing has
to be kept. CHORD's mu also falls again; here it stays. ViSurf also rewrites solutions as the policy
writes, which is for the data to do, and gives them no reward for thoughts: 1 is for the result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from tpu_rl.algorithm_spec import ExperienceSpec, Refinement, Replay
from tpu_rl.algos.grpo import ClippedPolicyConfig, group_policy_gradient
from tpu_rl.errors import InputError
from tpu_rl.losses import masked
from tpu_rl.losses.controllers import is_empty
from tpu_rl.losses.policy_batch import (
    Controller,
    Draft,
    Part,
    PolicyBatch,
    Prediction,
    actions_of,
    learned_tokens,
    term_of,
)
from tpu_rl.losses.shapes import BoolN, FloatN, NumberN
from tpu_rl.ranges import Conflicts, CountOrNone, ReadOnlyWith, Share
from tpu_rl.types import (
    Algorithm,
    Array,
    Layout,
    Metrics,
    Params,
    Roles,
    Rollout,
    RowSource,
    Sampling,
    Sum,
)

Method = Literal["chord", "relift", "luffy", "visurf", "sasr", "amft", "replay", "critique"]


@dataclass(frozen=True)
class MixedConfig(ClippedPolicyConfig):
    """GRPO's settings, and those of the solutions. Lengths are tokens."""

    method: Annotated[
        Method,
        Conflicts(
            "top_entropy_quantile",
            when=("luffy", "visurf", "replay", "critique"),
            why="the quantile would count the solutions and filter the policy's tokens alone",
        ),
        Conflicts(
            "kl_reward_coef",
            "credit",
            when=("luffy", "visurf", "replay", "critique"),
            why="the sampler has no log-probs of a solution, and a solution has no turns",
        ),
        Conflicts(
            "pretraining_coef",
            when="sasr",
            why="it reads the gradient's norm of the solutions alone",
        ),
    ] = "chord"
    """Way to learn from the solutions; see the head of `tpu_rl/algos/mixed.py`."""
    column: Annotated[
        str,
        ReadOnlyWith("method", "chord", "relift", "luffy", "visurf", "sasr", "amft", "critique"),
    ] = "solution"
    """Column of the data rows that holds a solution of the prompt, as a text; critique: the text
    for {answer}."""
    mu_peak: Annotated[Share, ReadOnlyWith("method", "chord", "relift", "amft")] = 0.1
    """chord, relift, amft: the largest weight of the solutions' term; amft begins with it."""
    mu_warmup_steps: Annotated[CountOrNone, ReadOnlyWith("method", "chord", "relift", "sasr")] = 0
    """chord, relift: optimizer steps until the largest weight. sasr: steps that only imitate, at
    least one."""
    min_reward: Annotated[float, ReadOnlyWith("method", "relift", "replay")] = 0.5
    """relift, replay: a completion with at least this return is a success."""
    critique: Annotated[str, ReadOnlyWith("method", "critique")] = (
        "Your answer is wrong. The right answer is {answer}. Solve the problem again."
    )
    """critique: the text after the completion that is refined; {answer} stands for `column`."""

    def __post_init__(self):
        super().__post_init__()
        if self.method == "replay" and self.recomputes:
            raise InputError(
                "replay compares with the policy that sampled",
                where="--algorithm.old-log-probs, --algorithm.importance-sampling-cap",
                why="log-probs of the present policy would hide how old a success is",
                fix="use --algorithm.old-log-probs sampler",
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
        return self.method in ("luffy", "visurf", "replay", "critique")

    @property
    def source(self) -> RowSource:
        """Whose rows the solutions are."""
        return RowSource.REPLAY if self.method == "replay" else RowSource.EXPERT

    def parts(self, roles: Roles) -> tuple[Part, ...]:
        """List the parts that are on, in the order of their effects."""
        parts = super().parts(roles)
        if not self._compares_solutions:
            return *parts, imitated_solutions(self)
        if self.method != "replay":
            # Refinements bring their own rewards.
            parts = (rewarded_solutions(self.method), *parts)
        return *parts, compared_solutions(self)

    @property
    def experience(self) -> ExperienceSpec:
        spec = super().experience
        if self.method == "replay":
            replay = Replay(1000, self.min_reward)
            return spec._replace(replay=replay, rows_added=spec.rows_added + 1, raw_returns=True)
        if self.method == "critique":
            columns = ("prompt", self.column) if "{answer}" in self.critique else ("prompt",)
            refinement = Refinement(self.critique, self.column)
            added = spec.rows_added + 1
            spec = spec._replace(columns=columns, refinement=refinement, rows_added=added)
            return spec._replace(raw_returns=True)
        return spec._replace(
            columns=("prompt", self.column),
            expert_column=self.column,
            rows_added=spec.rows_added + 1,
            raw_returns=True,
        )


def mu(config: MixedConfig, step: Array) -> Array:
    """Compute the weight of the solutions' term at an optimizer step, from 0."""
    rising = jnp.minimum(step / max(config.mu_warmup_steps, 1), 1.0)
    return jnp.asarray((rising if config.mu_warmup_steps else 1.0) * config.mu_peak)


class Sasr(NamedTuple):
    """State of SASR's controller, [] float32."""

    imitates: Array
    """1 if this batch imitates, else 0."""
    warms_up: Array
    """1 if it belongs to the warm-up."""
    first: Array
    """G_0: norm of the gradient at the end of the warm-up."""
    latest: Array
    """G: norm at the latest step that imitated."""


def chosen(state: Sasr, config: MixedConfig, rollout: Rollout) -> Sasr:
    """Put the choice for a batch into the state, drawn by the keys of its rows."""
    step = jnp.max(rollout.policy_step)
    warms_up = (step < config.mu_warmup_steps) | (state.first == 0)
    # The sum of the keys is the same for any order of the rows.
    key_data = jnp.sum(rollout.birth_key, axis=0, dtype=jnp.uint32)
    key = jax.random.wrap_key_data(key_data, impl="threefry2x32")
    probability = state.latest / (state.latest + state.first + 1e-30)
    imitates = warms_up | (jax.random.uniform(key) < probability)
    return state._replace(imitates=imitates * 1.0, warms_up=warms_up * 1.0)


def sasr_controller() -> Controller:
    """Make the controller that reads "optim/grad_norm" at steps that imitate."""

    def init_state(params: Params) -> Sasr:
        return Sasr(*jnp.zeros((4,), jnp.float32))

    def after_update(params: Params, state: Sasr, metrics: dict[str, Array]) -> tuple[Params, Sasr]:
        reads = (state.imitates > 0) & ~is_empty(metrics)
        norm = metrics["optim/grad_norm"]
        first = jnp.where(reads & (state.warms_up > 0), norm, state.first)
        return params, state._replace(first=first, latest=jnp.where(reads, norm, state.latest))

    return init_state, after_update


def amft_controller(config: MixedConfig) -> Controller:
    """Make the controller whose state is (mu, entropy to keep or -1), from "policy/entropy"."""

    def init_state(params: Params) -> tuple[Array, Array]:
        return jnp.asarray(config.mu_peak, jnp.float32), jnp.asarray(-1.0, jnp.float32)

    def after_update(
        params: Params, state: tuple[Array, Array], metrics: dict[str, Array]
    ) -> tuple[Params, tuple[Array, Array]]:
        entropy = metrics["policy/entropy"].astype(jnp.float32)
        target = jnp.where(state[1] < 0, entropy, state[1])
        moved = jnp.clip(state[0] + 5e-4 * (target - entropy), 0.0, config.mu_peak)
        stays = is_empty(metrics)
        return params, (jnp.where(stays, state[0], moved), jnp.where(stays, state[1], target))

    return init_state, after_update


def group_total(rollout: Rollout, values: NumberN) -> FloatN:
    """Sum values [N] over the scored rows of each row's group, [N]."""
    group = jnp.searchsorted(jnp.sort(rollout.group_id), rollout.group_id)
    scored = jnp.where(rollout.scored, values, 0.0)
    return jax.ops.segment_sum(scored, group, num_segments=len(group))[group]


def successes(rollout: Rollout, min_reward: float) -> FloatN:
    """Count the completions with such a return in each row's group, [N]."""
    returns = masked.total(rollout.rewards, rollout.action_mask, axis=-1)
    return group_total(rollout, returns >= min_reward)


def without_success(rollout: Rollout, min_reward: float) -> BoolN:
    """Mark the rows [N] of a group that has scored completions, and none with such a return."""
    is_scored = group_total(rollout, jnp.ones(len(rollout.group_id))) > 0
    return (successes(rollout, min_reward) == 0) & is_scored


def smoothed_reward(rollout: Rollout) -> FloatN:
    """Compute the reward of a solution in each row's group, [N]: 1, or the mean return of the
    completions where one of them has at least 1."""
    returns = masked.total(rollout.rewards, rollout.action_mask, axis=-1)
    count = group_total(rollout, jnp.ones_like(returns))
    mean = group_total(rollout, returns) / jnp.maximum(count, 1.0)
    return jnp.where(successes(rollout, 1.0) > 0, mean, 1.0)


def mixed(config: MixedConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build GRPO on mixed groups. It learns from a Rollout with rows of `RowSource.EXPERT`."""
    return group_policy_gradient(config, roles, sampling, config.surrogate_function)


def rewarded_solutions(method: Method) -> Part:
    """Make the part by which solutions are scored: with 1, or the rewards that they bring."""

    def draft(draft: Draft, state: Any) -> tuple[Draft, Any]:
        rollout = draft.rollout
        is_solution = actions_of(rollout, RowSource.EXPERT)
        rewards = rollout.rewards
        if method != "critique":
            reward = smoothed_reward(rollout)[:, None] if method == "visurf" else 1.0
            rewards = jnp.where(masked.last(is_solution), reward, rewards)
        scored = rollout.scored | is_solution.any(-1)
        rollout = replace(rollout, rewards=rewards, scored=scored)
        draft = draft._replace(rollout=rollout, learned=learned_tokens(rollout))
        return draft.with_rewards(rewards), state

    return Part(draft)


def compared_solutions(config: MixedConfig) -> Part:
    """Make the part of solutions that are compared with their group.

    All learned tokens count as GRPO weighs them, in the term that is theirs.
    """
    surrogate = config.surrogate_function

    def batch(batch: PolicyBatch, draft: Draft, state: Any) -> PolicyBatch:
        is_solution = draft.layout.pack(actions_of(draft.rollout, config.source))
        weights = {name: jnp.where(is_solution, 0.0, x) for name, x in batch.weights.items()}
        weights["solution"] = jnp.where(is_solution, batch.weights["policy"], 0.0)
        return replace(batch, weights=weights)

    def term(prediction: Prediction, batch: PolicyBatch) -> tuple[Array, Metrics]:
        log_probs = prediction.tokens.log_probs
        if config.method in ("luffy", "critique"):
            probabilities = jnp.exp(log_probs)
            shaped = probabilities / (probabilities + 0.1)
            losses = -shaped * batch.advantages
        else:
            losses = surrogate(log_probs, batch.old_log_probs, batch.advantages, batch.rows).losses
        return term_of("solution", losses, batch)

    return Part(batch=batch, term=term)


def imitated_solutions(config: MixedConfig) -> Part:
    """Make the part of solutions that are imitated, with the weight mu, and GRPO with 1 - mu."""
    is_chord = config.method == "chord"
    controller = None
    if config.method == "sasr":
        controller = sasr_controller()
    elif config.method == "amft":
        controller = amft_controller(config)

    def weights(rollout: Rollout, layout: Layout) -> Array:
        learned = actions_of(rollout, RowSource.EXPERT)
        if config.method == "relift":
            learned &= without_success(rollout, config.min_reward)[:, None]
        return masked.token_mean(learned, layout.minibatch, layout.minibatches)

    def draft(draft: Draft, state: Any) -> tuple[Draft, Any]:
        return draft, chosen(state, config, draft.rollout) if config.method == "sasr" else state

    def batch(batch: PolicyBatch, draft: Draft, state: Any) -> PolicyBatch:
        # mu is scheduled, drawn (1 or 0), or the state of a controller.
        share = mu(config, jnp.max(draft.rollout.policy_step))
        if config.method == "sasr":
            share = state.imitates
        elif config.method == "amft":
            share = state[0]
        of_policy = batch.weights
        if config.method != "relift":
            of_policy = {
                name: x if name == "pretraining" else (1.0 - share) * x
                for name, x in of_policy.items()
            }
        of_solutions = draft.layout.pack(weights(draft.rollout, draft.layout)) * share
        return replace(batch, weights={**of_policy, "solution": of_solutions})

    def term(prediction: Prediction, batch: PolicyBatch) -> tuple[Array, Metrics]:
        log_probs = prediction.tokens.log_probs
        losses = -log_probs
        if is_chord:
            # phi_t = p_t (1 - p_t), held constant.
            probabilities = jnp.exp(log_probs)
            losses = -jax.lax.stop_gradient(probabilities * (1 - probabilities)) * log_probs
        value, metrics = term_of("solution", losses, batch)
        if controller is not None:
            solutions = batch.weights["solution"].sum()
            share = Sum(solutions, solutions + batch.weights["policy"].sum())
            metrics["policy/solution_share"] = share
        return value, metrics

    name = "" if controller is None else "mixing"
    return Part(draft, batch, term=term, name=name, controller=controller, stops_gradient=is_chord)
