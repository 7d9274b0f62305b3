"""Rewards of complete groups, computed in other processes while other rows are still decoded."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tpu_rl import rewards
from tpu_rl.data import Row
from tpu_rl.rewards import FunctionScores, Reward
from tpu_rl.rewards.worker_pool import IsolatedReward
from tpu_rl.rollout import scoring
from tpu_rl.runtime import task_threads


@dataclass
class StreamingRewards:
    """Asks the reward functions that work in other processes about each group once it is complete.

    Functions that work in this process are left to `scoring.score`, after the last row has ended. A
    context manager: if sampling fails or is interrupted, questions that wait are dropped.

    Raises InputError if a function needs a column that the data lack.
    """

    functions: Mapping[str, Reward]
    rows: list[Row]
    """The data row of each group."""
    group_size: int
    decode: Callable[[Any, list[int]], str]
    """Returns the text of a completion: (its prompt, its token ids)."""
    max_groups: int | None = None
    """The most groups that will be asked about; by default all of `local`. A question about some of
    them may take that share of the time that a batch may take (`IsolatedReward.limited_to_share`).
    """
    step: int = 0
    is_truncated: Callable[[list[int]], bool] | None = None
    """Returns True if a completion of these token ids has no end. Without it, functions that ask
    for `truncated` are called after the last row has ended."""
    local: slice | None = None
    """The completions, in whole groups, that this process asks about; by default its own."""

    def __post_init__(self):
        self.prompts, self.columns = scoring.repeat_rows(self.rows, self.group_size)
        self._local = self.local or scoring.local_rows(len(self.prompts), self.group_size)
        for name, function in self.functions.items():
            rewards.require_columns(name, function, self.columns, rewards.ROLLOUT_COLUMNS)
        # Environments are known when all episodes are over.
        known_at_end = {"environments", "environment_rewards"} | (
            set() if self.is_truncated else {"truncated"}
        )
        self.functions = {
            name: function
            for name, function in self.functions.items()
            if rewards.runs_during_sampling(function)
            and not known_at_end & rewards.requested_columns(function)
        }
        asked = map(rewards.requested_columns, self.functions.values())
        if not any("truncated" in names for names in asked):
            self.is_truncated = None
        self._token_ids: dict[int, list[int]] = {}
        self._answers: dict[int, Any] = {}
        """By row: its completion as reward functions see it."""
        self._questions: list[tuple[list[int], Future[dict[str, FunctionScores]]]] = []
        self._seconds_spent = dict.fromkeys(self.functions, 0.0)
        self._cancelled = threading.Event()

    def __enter__(self) -> StreamingRewards:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None:  # Ctrl-C too.
            self.cancel()

    @property
    def on_finished(self) -> Callable[[dict[int, list[int]]], None] | None:
        """Callback for the sampler: row -> token ids of its completion, of rows that have ended.

        None if no function works in another process. It is the same on every process, also on one
        without rows of its own, because the sampler gathers what has ended for all of them.
        """
        return self._on_finished if self.functions else None

    def _on_finished(self, ended: dict[int, list[int]]) -> None:
        local = [row for row in ended if self._local.start <= row < self._local.stop]
        prompts = [self.prompts[row] for row in local]
        texts = [self.decode(self.prompts[row], ended[row]) for row in local]
        answers = rewards.as_answers(prompts, texts)
        self.on_answered(dict(zip(local, answers, strict=True)), ended)

    def on_answered(self, answers: Mapping[int, Any], token_ids: Mapping[int, list[int]]) -> None:
        """Take completions of local rows that have ended: as functions see them, and their ids."""
        if not self.functions:
            return
        local = list(answers)
        self._answers |= answers
        self._token_ids |= {row: token_ids[row] for row in local}
        complete: list[int] = []
        for group in sorted({row // self.group_size for row in local}):
            members = self._members(group)
            if all(row in self._answers for row in members):
                complete += members
        if complete:
            # One question after the other.
            future = task_threads.submit(
                "streaming rewards", functools.partial(self._ask, complete)
            )
            self._questions.append((complete, future))

    def _members(self, group: int) -> range:
        return range(group * self.group_size, (group + 1) * self.group_size)

    def _ask(self, rows: list[int]) -> dict[str, FunctionScores]:
        if self._cancelled.is_set():
            return {}
        prompts = [self.prompts[row] for row in rows]
        answers_of_rows = [self._answers[row] for row in rows]
        columns = {name: [column[row] for row in rows] for name, column in self.columns.items()}
        rollout_columns = self._rollout_columns(rows)
        of_process = self._local.stop - self._local.start
        most = of_process if self.max_groups is None else self.max_groups * self.group_size
        answers = {}
        for name, function in self.functions.items():
            began = time.monotonic()
            if isinstance(function, IsolatedReward):
                spent = self._seconds_spent[name]
                function = function.limited_to_share(len(rows) / most, spent)
            answers[name] = rewards.apply(
                name, function, prompts, answers_of_rows, columns, rollout_columns
            )
            self._seconds_spent[name] += time.monotonic() - began
        return answers

    def _rollout_columns(self, rows: list[int]) -> dict[str, list[Any]]:
        """Return everything that functions may ask about these rows of the rollout."""
        token_ids = [self._token_ids[row] for row in rows]
        columns: dict[str, list[Any]] = {
            "completion_ids": token_ids,
            "token_counts": [len(row_ids) for row_ids in token_ids],
            "group": [row // self.group_size for row in rows],
            "step": [self.step] * len(rows),
        }
        if self.is_truncated is not None:
            columns["truncated"] = [self.is_truncated(row_ids) for row_ids in token_ids]
        return columns

    def answers(self, groups: Sequence[int] | None = None) -> dict[str, FunctionScores]:
        """Return the values and faults that each function gave, once all questions are answered.

        The values are those of the local completions, or of the given groups, which must be all
        that were asked about. Faults count rows from the first of these. The result is empty if no
        row was reported. Raises TpuRlError whatever a reward function raises on purpose.
        """
        if not self._questions:
            return {}
        rows = list(range(self._local.start, self._local.stop))
        if groups is not None:
            rows = [row for group in groups for row in self._members(group)]
        index_of = {row: index for index, row in enumerate(rows)}
        values = {name: np.full(len(rows), np.nan, np.float32) for name in self.functions}
        faults: dict[str, list[rewards.RewardFault]] = {name: [] for name in self.functions}
        segments: dict[str, dict[int, Any]] = {name: {} for name in self.functions}
        for asked_rows, future in self._questions:
            indices = [index_of[row] for row in asked_rows]
            for name, some in future.result().items():
                values[name][indices] = some.values
                faults[name] += [replace(fault, row=indices[fault.row]) for fault in some.faults]
                segments[name] |= {indices[row]: parts for row, parts in some.segments.items()}
        return {
            name: FunctionScores(
                values[name], sorted(faults[name], key=lambda fault: fault.row), segments[name]
            )
            for name in self.functions
        }

    def cancel(self) -> None:
        """Do not ask the questions that are still waiting."""
        self._cancelled.set()
