"""Partial rollouts: completions that are unfinished when a batch is complete go on in the next step.

--batch.prompts and --batch.carry-over groups are on their way at once. A step's batch is all that were begun before it
and of the new ones those that end first; the others go on in the next step, under its policy and with their own keys.
So a step waits only for what the one before has left of the longest, and no token is older than one step.

Its price: what is carried over was drawn by two policies, and each batch has few of the longest of its own prompts.
Each token has the log-probs that it was drawn with, which `--algorithm.old-log-probs recomputed` with an
`--algorithm.importance-cap` corrects for (AReaL, arXiv 2505.24298).
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from launch import dataset
from launch.config import Stage
from launch.sources import Drawn, Setup, Source, prompt_values, reward_functions, sampling, with_baseline
from tpu_rl import data, processes, rollouts, sampler
from tpu_rl.types import Params, TrainState


class Group(NamedTuple):
    """A prompt whose completions are on their way."""

    row: data.Row
    completions: list[sampler.Begun]

    @staticmethod
    def of(values: Any) -> Group:
        """From what JSON makes of one."""
        row, completions = values
        return Group(row, [sampler.Begun(*one) for one in completions])


def in_groups(rows: list[data.Row], completions: list[sampler.Begun]) -> list[Group]:
    """Rows, each with as many of the completions."""
    size = len(completions) // len(rows)
    return [Group(row, completions[i * size : (i + 1) * size]) for i, row in enumerate(rows)]


class Batch:
    """Takes groups as they end, until there are enough: all that were begun before, and of the new ones the first."""

    def __init__(self, size: int, group: int, begun: list[Group], tell: sampler.OnFinished | None):
        """tell: is told of the completions of a group that is taken."""
        self.groups: list[int] = []
        self._size, self._group, self._old, self._tell = size, group, len(begun), tell
        completions = [one for some in begun for one in some.completions]
        self._texts = {row: one.tokens for row, one in enumerate(completions) if one.ended}
        self.ended = np.zeros(0, bool)
        """[N], of the rows, when last looked at."""

    def on_finished(self, rows: dict[int, list[int]]) -> None:
        self._texts |= rows

    def is_enough(self, ended: np.ndarray) -> bool:
        self.ended = ended
        whole = np.flatnonzero(ended.reshape(-1, self._group).all(1)).tolist()
        room = self._size - self._old - sum(one >= self._old for one in self.groups)
        fresh = [one for one in whole if one not in self.groups]
        new = [one for one in fresh if one < self._old] + [one for one in fresh if one >= self._old][:room]
        self.groups += new
        if new and self._tell is not None:
            rows = [row for one in new for row in range(one * self._group, (one + 1) * self._group)]
            self._tell({row: self._texts[row] for row in rows})
        return len(self.groups) == self._size


def partial_source(setup: Setup, stage: Stage, params: Params) -> Source:
    """Completions of the stream's prompts by the current policy and, what was begun before, by the one before."""
    del params
    config, lang = setup.config, setup.language
    stream, functions = dataset.make_stream(config, stage, lang), reward_functions(config)
    sample, worth = sampling(setup), prompt_values(setup, stage)
    size, group = config.batch.prompts, config.batch.completions
    on_the_way: list[Group] = []
    waiting: list[data.Row] = []

    def draw(step: int, state: TrainState) -> Drawn:
        nonlocal on_the_way, waiting
        began, rows = time.perf_counter(), [one.row for one in on_the_way] + waiting
        while len(rows) < size + config.batch.carry_over:
            rows += next(stream)[1]
        rows, later = rows[: size + config.batch.carry_over], rows[size + config.batch.carry_over :]
        begun: list[sampler.Begun | None] = [one for some in on_the_way for one in some.completions]
        begun += [None] * (len(rows) * group - len(begun))
        prompts = rollouts.encode(rows, lang.tokenizer, config.sampling.max_prompt_tokens)
        with rollouts.asking(rows, group, lang.tokenizer, functions) as early:
            # Which process asks about a group is only known when all are taken.
            batch = Batch(size, group, on_the_way, early.on_finished if processes.count() == 1 else None)
            found = sample(
                step, state, prompts, np.arange(len(begun)), batch.on_finished, begun=begun, enough=batch.is_enough
            )
        taken = sorted(batch.groups)
        chosen = [rows[one] for one in taken]
        sampled = replace(
            rollouts.unscored(chosen, _groups(found.rollout, taken, group), lang.tokenizer),
            seconds_rollout=time.perf_counter() - began,
            drafts=found.drafts,
            tokens_of_drafts=found.tokens_of_drafts,
        )
        share = config.reward_limits.fault_share
        scored = rollouts.score(sampled, chosen, functions, share, lambda: early.answers(taken))
        if worth is not None:
            scored = with_baseline(scored, worth(step, state, chosen, 0))
        older = sum(len(one.tokens) for i in taken for one in begun[i * group : (i + 1) * group] if one)
        more = {"rollout/carried_over": older / max(int(scored.lengths.sum()), 1)}

        groups = in_groups(rows, sampler.begun(found.rollout, batch.ended))
        on_the_way = [some for one, some in enumerate(groups) if one not in taken]
        waiting = later
        metrics = rollouts.metrics(scored) | more
        return Drawn(scored.rollout, metrics, rollouts.records(scored, step), rollouts.warnings(scored))

    def get_state() -> dict[str, Any]:
        return {"stream": stream.get_state(), "on_the_way": [list(one) for one in on_the_way], "waiting": waiting}

    def set_state(state: dict[str, Any]) -> None:
        nonlocal on_the_way, waiting
        stream.set_state(state["stream"])
        on_the_way, waiting = [Group.of(one) for one in state["on_the_way"]], state["waiting"]

    return Source(draw, get_state, set_state)


def _groups(rollout: Any, taken: list[int], group: int) -> Any:
    """Some groups of a rollout, numbered anew."""
    rows = (np.asarray(taken)[:, None] * group + np.arange(group)).reshape(-1)
    part = jax.tree.map(lambda leaf: np.asarray(leaf)[rows], rollout)
    return replace(part, group_id=np.repeat(np.arange(len(taken), dtype=np.int32), group))
