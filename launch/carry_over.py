"""Partial rollouts: completions that are unfinished when a batch is complete go on in the next step.

--batch.prompts and --batch.carry-over groups are on their way at once. A step's batch is all that were begun before it
and of the new ones those that end first; the others go on in the next step, under its policy and with their own keys.
So a step waits only for what the one before has left of the longest, and no token is older than one step.

Its price: what is carried over was drawn by two policies, and each batch has few of the longest of its own prompts.
Each token has the log-probs that it was drawn with: they are the ratio's old ones, so that its metrics and
policy/log_prob_gap now say how far the policy has moved, too. GRPO's `--algorithm.old-log-probs recomputed` with an
`--algorithm.importance-cap` corrects for it (AReaL, arXiv 2505.24298). A run that goes back after steps that were not
finite goes on with what is on its way: once, what is carried over is then from later than one step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from launch import dataset
from launch.config import Stage
from launch.sources import Drawn, Setup, Source, as_drawn, prompt_values, reward_functions, sampling, with_baseline
from tpu_rl import data, processes, rollouts, sampler
from tpu_rl.types import Params, TrainState

STALE = "rollout/stale"
"""Metric: the share of a batch's tokens that an earlier policy than the one that it is to improve has drawn."""


class Group(NamedTuple):
    """A prompt whose completions are on their way."""

    row: data.Row
    completions: list[sampler.Begun]


def as_json(groups: list[Group]) -> dict[str, Any]:
    return {
        "rows": [one.row for one in groups],
        "completions": sampler.pack([one for some in groups for one in some.completions]),
    }


def from_json(values: dict[str, Any]) -> list[Group]:
    return in_groups(values["rows"], sampler.unpack(values["completions"]))


def in_groups(rows: list[data.Row], completions: list[sampler.Begun]) -> list[Group]:
    """Rows, each with as many of the completions."""
    size = len(completions) // max(len(rows), 1)
    return [Group(row, completions[i * size : (i + 1) * size]) for i, row in enumerate(rows)]


class Batch:
    """Takes groups as they end, until there are enough: all that were begun before, and of the new ones the first."""

    def __init__(self, size: int, group: int, begun: Sequence[sampler.Begun | None], tell: sampler.OnFinished | None):
        """begun: [N]; tell: is told of the completions of a group that is taken."""
        self.groups: list[int] = []
        self._size, self._group, self._tell = size, group, tell
        self._old = {row // group for row, one in enumerate(begun) if one is not None}
        self._texts = {row: one.tokens.tolist() for row, one in enumerate(begun) if one is not None and one.ended}
        self.ended = np.zeros(0, bool)
        """[N], of the rows, when last looked at."""

    def on_finished(self, rows: dict[int, list[int]]) -> None:
        self._texts |= rows

    def is_enough(self, ended: np.ndarray) -> bool:
        self.ended = ended
        whole = np.flatnonzero(ended.reshape(-1, self._group).all(1)).tolist()
        room = self._size - len(self._old | set(self.groups))
        fresh = [one for one in whole if one not in self.groups]
        new = [one for one in fresh if one in self._old] + [one for one in fresh if one not in self._old][:room]
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
        began, fresh = time.perf_counter(), list(waiting)
        new = size + config.batch.carry_over - len(on_the_way)
        while len(fresh) < new:
            fresh += next(stream)[1]
        going, later = dealt(on_the_way, [Group(row, []) for row in fresh[:new]]), fresh[new:]
        rows = [one.row for one in going]
        begun = [one for some in going for one in some.completions or [None] * group]
        prompts = rollouts.encode(rows, lang.tokenizer, config.sampling.max_prompt_tokens)
        with rollouts.asking(rows, group, lang.tokenizer, functions, size * group) as early:
            # Which process asks about a group is only known when all are taken.
            batch = Batch(size, group, begun, early.on_finished if processes.count() == 1 else None)
            more: dict[str, Any] = {"begun": begun, "enough": batch.is_enough}
            found = sample(step, state, prompts, np.arange(len(begun)), batch.on_finished, **more)
        taken = sorted(batch.groups)
        left = [one for one in range(len(rows)) if one not in taken]
        chosen, share = [rows[one] for one in taken], config.reward_limits.fault_share
        sampled = found._replace(rollout=_groups(found.rollout, taken, group)).unscored(chosen, lang, began)
        scored = rollouts.score(sampled, chosen, functions, share, lambda: early.answers(taken))
        if worth is not None:
            scored = with_baseline(scored, worth(step, state, chosen, 0))
        ended = batch.ended.reshape(-1, group)[left].reshape(-1)
        completions = sampler.begun(_groups(found.rollout, left, group), ended)
        on_the_way, waiting = in_groups([rows[one] for one in left], completions), later
        older = [len(one.tokens) for some in taken for one in begun[some * group : (some + 1) * group] if one]
        return as_drawn(scored, step, **{STALE: sum(older) / max(int(scored.lengths.sum()), 1)})

    def get_state() -> dict[str, Any]:
        return {"stream": stream.get_state(), "on_the_way": as_json(on_the_way), "waiting": waiting}

    def set_state(state: dict[str, Any]) -> None:
        nonlocal on_the_way, waiting
        stream.set_state(state["stream"])
        on_the_way, waiting = from_json(state["on_the_way"]), state["waiting"]

    return Source(draw, get_state, set_state)


def dealt(old: list[Group], new: list[Group]) -> list[Group]:
    """All of them, the old ones as far apart as they can be: devices take neighbours, and these begin with a load."""
    count = len(old) + len(new)
    places = {i * count // len(old): one for i, one in enumerate(old)}
    others = iter(new)
    return [places[i] if i in places else next(others) for i in range(count)]


def _groups(rollout: Any, taken: list[int], group: int) -> Any:
    """Some groups of a rollout, numbered anew."""
    rows = (np.asarray(taken)[:, None] * group + np.arange(group)).reshape(-1)
    part = jax.tree.map(lambda leaf: np.asarray(leaf)[rows], rollout)
    return replace(part, group_id=np.repeat(np.arange(len(taken), dtype=np.int32), group))
