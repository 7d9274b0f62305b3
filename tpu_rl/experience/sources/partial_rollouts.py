"""Partial rollouts: completions that are unfinished when a batch is complete continue in the next
step.

`--batch.prompts` plus `--rollout.partial` groups are sampled at once. The batch of a step consists
of all groups that were begun before it and, of the new ones, those that end first. The others
continue in the next step, under its policy and with their own random keys. So a step waits only
for what the previous one left of its longest completions, and no token is older than one step.

The price: a continued completion was sampled by two policies, and each batch has few of the
longest completions of its own prompts. Each token keeps the log-probs that it was sampled with.
They are the old log-probs of the ratio, so its metrics and policy/log_prob_gap now also measure how
far the policy has moved. An `--algorithm.importance-sampling-cap` corrects for it (AReaL, arXiv
2505.24298).

Conversations go on, too (`rollout.conversations`). A continued episode is replayed
from its log, with the environment that it had or, after a kill, a new one with the same state.

A run that goes back after steps with non-finite gradients keeps its unfinished completions. Once,
these are then more than one step old.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tpu_rl import data, wings
from tpu_rl.data import Row
from tpu_rl.experience.config import BatchConfig
from tpu_rl.experience.source import Source, StepExperience, from_scored
from tpu_rl.experience.transforms import Transform, apply
from tpu_rl.rollout.engine import Engine, RolloutRequest
from tpu_rl.rollout.scoring import PartialGroup
from tpu_rl.runtime import typed_json
from tpu_rl.sampler import PartialCompletion
from tpu_rl.types import TrainState

STALE = "rollout/stale"
"""Metric: the share of a batch's tokens that were sampled by an earlier policy than the one that
the step updates."""


def partial_source(
    engine: Engine,
    stream: data.RowStream,
    batch: BatchConfig,
    max_unfinished: int,
    transforms: Sequence[Transform] = (),
) -> Source:
    """Return the source of partial rollouts; `max_unfinished` groups continue after each step."""
    unfinished: list[PartialGroup] = []
    waiting: list[Row] = []

    def draw(step: int, state: TrainState) -> StepExperience:
        nonlocal unfinished, waiting
        rows = list(waiting)
        num_new = batch.prompts + max_unfinished - len(unfinished)
        while len(rows) < num_new:
            rows += next(stream)[1]
        groups = interleave(unfinished, [PartialGroup(row) for row in rows[:num_new]])
        request = RolloutRequest(
            [group.row for group in groups],
            step,
            policy_step=int(state.step),
            resumed=[
                completion
                for group in groups
                for completion in group.completions or [None] * batch.group_size
            ],
            logs=[log for group in groups for log in group.logs or [None] * batch.group_size],
            first_groups=batch.prompts,
        )
        sampled = engine.generate(state.params, request)
        scored = engine.score(sampled)
        unfinished = sampled.unfinished
        waiting = rows[num_new:]
        experience = from_scored(apply(transforms, scored, step, state), step)
        experience.metrics[STALE] = sampled.num_resumed_tokens / max(int(scored.lengths.sum()), 1)
        return experience

    def snapshot() -> Callable[[], dict[str, Any]]:
        stream_state = stream.get_state()
        groups = [replace(group, logs=[log.copy() for log in group.logs]) for group in unfinished]
        rows = waiting
        return lambda: {
            "stream": stream_state,
            "unfinished": typed_json.to_json(groups),
            "waiting": rows,
        }

    def set_state(state: dict[str, Any]) -> None:
        nonlocal unfinished, waiting
        stream.set_state(state["stream"])
        logs = wings.MODULES["episode_log"].CLASSES
        unfinished = typed_json.of_checkpoint(
            state["unfinished"], PartialGroup, PartialCompletion, *logs
        )
        waiting = state["waiting"]

    def close() -> None:
        for group in unfinished:
            for log in group.logs:
                log.end()

    return Source(draw, snapshot, set_state, close)


def interleave(old: list[PartialGroup], new: list[PartialGroup]) -> list[PartialGroup]:
    """Return all groups, with the old ones evenly spaced.

    Each device takes neighboring rows, and old groups start with tokens to prefill.
    """
    count = len(old) + len(new)
    old_at = {index * count // len(old): group for index, group in enumerate(old)}
    remaining = iter(new)
    return [old_at[index] if index in old_at else next(remaining) for index in range(count)]
