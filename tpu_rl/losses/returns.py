"""Parts that change the rewards of a batch: penalties and running scales; and which
completions have a weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from tpu_rl import ranges
from tpu_rl.losses import advantages, masked
from tpu_rl.losses.policy_batch import Draft, Part, learned_tokens
from tpu_rl.losses.shapes import FloatN, FloatNT
from tpu_rl.ranges import CountOrNone
from tpu_rl.types import Array, Params, Rollout, unchanged


@dataclass(frozen=True, kw_only=True)
class ReturnSettings(ranges.Checked):
    """Settings of what the return of an episode is."""

    overlong_buffer: CountOrNone = 0
    """Soft overlong penalty (DAPO) over this many tokens before the length limit; 0 is off. An
    episode has one, and its observations count."""
    mask_truncated: bool = False
    """Do not learn from completions that reached the length limit. They stay in their group's
    baseline."""

    def return_parts(self) -> tuple[Part, ...]:
        """List the parts that are on."""
        return (
            *([overlong(self.overlong_buffer)] if self.overlong_buffer else []),
            *([without_truncated()] if self.mask_truncated else []),
        )


def overlong(buffer: int) -> Part:
    """Make the part that adds the soft overlong penalty over `buffer` tokens before the limit."""

    def draft(draft: Draft, state: Any) -> tuple[Draft, Any]:
        penalty = overlong_penalty(draft.rollout, draft.max_new_tokens, buffer)
        return draft.add_at_end(penalty), state

    return Part(draft)


def without_truncated() -> Part:
    """Make the part that gives truncated completions no weight. They still count in baselines."""

    def draft(draft: Draft, state: Any) -> tuple[Draft, Any]:
        learned = draft.learned & ~draft.rollout.truncated[:, None]
        return draft._replace(learned=learned), state

    return Part(draft)


def normalized_by_deviation(clip: float) -> Part:
    """Make the part "returns", which divides rewards by the running deviation of returns."""

    def init_state(params: Params) -> RunningReturns:
        return RunningReturns(*jnp.zeros((3,), jnp.float32))

    def draft(draft: Draft, state: RunningReturns) -> tuple[Draft, RunningReturns]:
        rewards, running = normalized_rewards(draft.rollout, state, clip)
        return draft.with_rewards(rewards), running

    return Part(draft, name="returns", controller=(init_state, unchanged))


def overlong_penalty(rollout: Rollout, max_new_tokens: int, buffer: int) -> FloatN:
    """Compute `advantages.soft_overlong_penalty` [N] of each episode, at the last of its rows.

    Lengths are counted as the limit counts them: all tokens after the prompt, observations too. An
    episode of several rows is as long as the longest. One that was cut at the limit has a penalty
    of 1, also if its last observation, which no row holds, took it there.
    """
    mask = rollout.action_mask
    ends = jnp.max(jnp.arange(1, mask.shape[1] + 1)[None] * mask, axis=-1)
    lengths = ends - mask.argmax(-1)
    if rollout.episode_id is not None:
        lengths = advantages.episode_lengths(mask.argmax(-1), ends, rollout.episode_id)
    lengths = jnp.where(rollout.truncated, max_new_tokens, lengths)
    penalty = advantages.soft_overlong_penalty(lengths, max_new_tokens, buffer)
    return jnp.where(_ends_episode(rollout), penalty, 0.0)


class RunningReturns(NamedTuple):
    """Moments of the returns of all scored episodes of a run so far, [] float32."""

    count: Array
    mean: Array
    squares: Array
    """Sum of (return - mean)^2."""


def normalized_rewards(
    rollout: Rollout, running: RunningReturns, clip: float
) -> tuple[FloatNT, RunningReturns]:
    """Compute rewards / running standard deviation of returns, clipped to +-clip, [N, T], and the
    moments with this batch (PPO-max, arXiv 2307.04964).

    The paper subtracts the running mean too, from its one reward at the end. Here rewards may stand
    at any action, and 0 stays 0. While all returns were equal, rewards are only clipped.
    """
    mask = rollout.action_mask
    row_returns = masked.total(rollout.rewards, learned_tokens(rollout), axis=-1)
    returns = advantages.episode_totals(row_returns, rollout.episode_id)
    # Chan's update of the moments, by the episodes of this batch.
    counted = _ends_episode(rollout) & rollout.scored
    count = counted.sum().astype(jnp.float32)
    mean = masked.mean(returns, counted)
    squares = masked.total(jnp.square(returns - mean), counted)
    total = running.count + count
    shift = mean - running.mean
    share = count / jnp.maximum(total, 1.0)
    running = RunningReturns(
        total,
        running.mean + shift * share,
        running.squares + squares + jnp.square(shift) * running.count * share,
    )
    deviation = jnp.sqrt(running.squares / jnp.maximum(total - 1.0, 1.0))
    scale = jnp.where(deviation > advantages.EPSILON, deviation, 1.0)
    return jnp.where(mask, jnp.clip(rollout.rewards / scale, -clip, clip), 0.0), running


def _ends_episode(rollout: Rollout) -> Array:
    """Mark the rows [N] with actions that are the last of their episode."""
    ends = rollout.action_mask.any(-1)
    if rollout.episode_id is None:
        return ends
    continues = rollout.episode_id[1:] == rollout.episode_id[:-1]
    return ends & ~jnp.pad(continues, (0, 1))
