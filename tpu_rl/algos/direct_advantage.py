"""Direct advantage policy optimization (DAPO of arXiv 2412.18279): regress the log-ratio of each
step of a solution on the step's advantage.

    A_k  = V(after step k) - V(before step k)
    loss = mean over steps of 1/2 [ sum_(t in k) log policy(y_t) / reference(y_t) - A_k / beta ]^2

V is the probability of success from a prefix. The rewards of a completion's segments are its
changes: `dense(of=RUN_DIR, values=true)` of a process reward model, which learns V from sampled
continuations (`process_reward`, --algorithm.steps monte_carlo). The first segment has V after step
1; V of the prompt is the mean of these over the group. The minimum over one step is policy =
reference exp(A / beta) where that is normalized.

Deviations: the paper samples several steps from each of few states, offline; here steps are those
of the policy's own completions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import struct

from tpu_rl import ranges
from tpu_rl.algorithm_spec import ExperienceSpec, RoleSpec
from tpu_rl.algos.roles import with_reference
from tpu_rl.losses import advantages, masked
from tpu_rl.losses.log_probs import frozen_log_probs, token_log_probs
from tpu_rl.losses.policy_batch import actions_of, learned_tokens
from tpu_rl.losses.shapes import BoolNT, FloatNT
from tpu_rl.ranges import Positive
from tpu_rl.types import (
    Algorithm,
    Array,
    Experience,
    Metrics,
    PackedRows,
    Params,
    Roles,
    Rollout,
    Sampling,
    Sum,
)


@dataclass(frozen=True)
class DirectAdvantageConfig(ranges.Checked):
    """Advantages are in units of reward."""

    beta: Positive = 0.1
    """Reward per nat of log-ratio."""
    separators: tuple[int, ...] = ()
    """Ids of the tokens that end a step. The last token of a completion always ends one."""

    @property
    def experience(self) -> ExperienceSpec:
        return ExperienceSpec("rollouts", smallest_group=2, raw_returns=True)

    @property
    def roles(self) -> dict[str, RoleSpec]:
        return with_reference({"policy": RoleSpec(trainable=True)}, needed=True)


@struct.dataclass
class Batch:
    """Leaves are [M, K, R, S]; the loss sees [R, S]."""

    rows: PackedRows
    weights: dict[str, Array]
    """"step": 1 / number of steps of the optimizer step, at the first token of each."""
    action_mask: Array
    steps: Array
    """int32: 1 + the slot of the first token of the token's step; 0 elsewhere."""
    advantages: Array
    reference_log_probs: Array


def direct_advantage(config: DirectAdvantageConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build direct advantage policy optimization. It learns from a Rollout."""

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[Batch, Any]:
        rollout, layout = experience
        assert isinstance(rollout, Rollout)
        learned = learned_tokens(rollout)
        rows = layout.rows(rollout.tokens)
        ends = advantages.step_ends(rollout.tokens, learned, config.separators)
        starts = advantages.turn_starts(learned, ends)
        weights = masked.token_mean(starts, layout.minibatch, layout.minibatches)
        # The slot of each step's first token, within its packed row, names the step.
        slots = jnp.where(starts, layout.slot % layout.source.shape[-1] + 1, 0)
        batch = Batch(
            rows=rows,
            weights={"step": layout.pack(weights)},
            action_mask=layout.pack(actions_of(rollout) & learned, False),
            steps=layout.pack(advantages.over_turns(slots, learned, ends).astype(jnp.int32)),
            advantages=layout.pack(step_advantages(rollout, learned, ends)),
            reference_log_probs=frozen_log_probs(
                roles["reference"], params, rows, sampling.temperature
            ),
        )
        return batch, state

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        policy = token_log_probs(roles["policy"], params, batch.rows, sampling.temperature)
        weights = batch.weights["step"]
        first = weights > 0
        mask = batch.action_mask
        log_ratio = jnp.where(mask, policy.log_probs - batch.reference_log_probs, 0.0)
        of_step = masked.sequence_total(log_ratio, batch.steps)
        losses = 0.5 * jnp.square(of_step - batch.advantages / config.beta)
        value = masked.total(weights * losses, first)
        return value, {
            "policy/loss": Sum(value, weights.sum()),
            "policy/entropy": masked.average(policy.entropy, mask),
            "policy/step_log_ratio": masked.average(of_step, first),
            "policy/step_advantage": masked.average(jnp.abs(batch.advantages), first),
        }

    return Algorithm(make_batch, loss)


def step_advantages(rollout: Rollout, learned: BoolNT, ends: BoolNT | None) -> FloatNT:
    """Compute A_k at every token of step k, [N, T]: the step's rewards, for the first step minus
    their mean over the group."""
    sums = advantages.turn_sums(rollout.rewards, learned, ends)
    is_first = learned & (jnp.cumsum(learned, axis=1) == 1)
    values = masked.total(sums, is_first, axis=1)
    centered = advantages.group_centered(values, rollout.group_id, learned.any(-1))
    of_starts = jnp.where(is_first, centered[:, None], sums)
    return advantages.over_turns(of_starts, learned, ends)
