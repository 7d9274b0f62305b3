"""Rewards of complete groups, computed in other processes while other rows are still decoded."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from tpu_rl import rewards
from tpu_rl.rewards import FunctionScores, Reward
from tpu_rl.runtime import task_threads


class StreamingRewards:
    """Asks the reward functions that work in other processes about each group once it is complete.

    Functions that work in this process are left to `scoring.score`, after the last row has ended.
    """

    def __init__(
        self,
        reward_functions: Mapping[str, Reward],
        prompts: Sequence[Any],
        columns: Mapping[str, Sequence[Any]],
        group_size: int,
        local: slice,
        decode: Callable[[Any, list[int]], str],
        max_completions: int | None = None,
        step: int = 0,
        is_truncated: Callable[[list[int]], bool] | None = None,
    ):
        """Prepare for N completions.

        Args:
            prompts: [N] the prompt of each completion.
            columns: the other columns of the data rows, [N] each.
            local: the completions, in whole groups, that this process asks about.
            decode: returns the text of a completion: (its prompt, its token ids).
            max_completions: the most completions that will be asked about; by default all of
                `local`. A question about some of them may take that share of the time that a batch
                may take (`IsolatedReward.limited_to_share`).
            is_truncated: returns True if a completion of these token ids has no end. Without it,
                functions that ask for `truncated` are called after the last row has ended.

        Raises:
            InputError: if a function needs a column that the data lack.
        """
        for name, function in reward_functions.items():
            rewards.require_columns(name, function, columns, rewards.ROLLOUT_COLUMNS)
        # Environments are known when all episodes are over.
        known_at_end = {"environments", "environment_rewards"} | (
            set() if is_truncated else {"truncated"}
        )
        self._functions = {
            name: function
            for name, function in reward_functions.items()
            if rewards.runs_during_sampling(function)
            and not known_at_end & rewards.requested_columns(function)
        }
        self._step = step
        requested = [rewards.requested_columns(function) for function in self._functions.values()]
        self._is_truncated = (
            is_truncated if any("truncated" in names for names in requested) else None
        )
        self._token_ids: dict[int, list[int]] = {}
        self._prompts = prompts
        self._columns = columns
        self._group_size = group_size
        self._local = local
        self._decode = decode
        self._max_completions = max_completions or local.stop - local.start
        self._answers: dict[int, Any] = {}
        """By row: its completion as reward functions see it."""
        self._questions: list[tuple[list[int], Future[dict[str, FunctionScores]]]] = []
        self._seconds_spent = dict.fromkeys(self._functions, 0.0)
        self._cancelled = threading.Event()

    @property
    def on_finished(self) -> Callable[[dict[int, list[int]]], None] | None:
        """Callback for the sampler: row -> token ids of its completion, of rows that have ended.

        None if no function works in another process. It is the same on every process, also on one
        without rows of its own, because the sampler gathers what has ended for all of them.
        """
        return self._on_finished if self._functions else None

    def _on_finished(self, ended: dict[int, list[int]]) -> None:
        local = [row for row in ended if self._local.start <= row < self._local.stop]
        prompts = [self._prompts[row] for row in local]
        texts = [self._decode(self._prompts[row], ended[row]) for row in local]
        answers = rewards.as_answers(prompts, texts)
        self.on_answered(dict(zip(local, answers, strict=True)), ended)

    def on_answered(self, answers: Mapping[int, Any], token_ids: Mapping[int, list[int]]) -> None:
        """Take completions of local rows that have ended: as functions see them, and their ids."""
        if not self._functions:
            return
        local = list(answers)
        self._answers |= answers
        self._token_ids |= {row: token_ids[row] for row in local}
        complete: list[int] = []
        for group in sorted({row // self._group_size for row in local}):
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
        return range(group * self._group_size, (group + 1) * self._group_size)

    def _ask(self, rows: list[int]) -> dict[str, FunctionScores]:
        if self._cancelled.is_set():
            return {}
        prompts = [self._prompts[row] for row in rows]
        answers_of_rows = [self._answers[row] for row in rows]
        columns = {name: [column[row] for row in rows] for name, column in self._columns.items()}
        rollout_columns = self._rollout_columns(rows)
        share = len(rows) / self._max_completions
        answers = {}
        for name, function in self._functions.items():
            began = time.monotonic()
            limited = rewards.limited_to_share(function, share, self._seconds_spent[name])
            answers[name] = rewards.apply(
                name, limited, prompts, answers_of_rows, columns, rollout_columns
            )
            self._seconds_spent[name] += time.monotonic() - began
        return answers

    def _rollout_columns(self, rows: list[int]) -> dict[str, list[Any]]:
        """Return everything that functions may ask about these rows of the rollout."""
        token_ids = [self._token_ids[row] for row in rows]
        columns: dict[str, list[Any]] = {
            "completion_ids": token_ids,
            "token_counts": [len(row_ids) for row_ids in token_ids],
            "group": [row // self._group_size for row in rows],
            "step": [self._step] * len(rows),
        }
        if self._is_truncated is not None:
            columns["truncated"] = [self._is_truncated(row_ids) for row_ids in token_ids]
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
        values = {name: np.full(len(rows), np.nan, np.float32) for name in self._functions}
        faults: dict[str, list[rewards.RewardFault]] = {name: [] for name in self._functions}
        segments: dict[str, dict[int, Any]] = {name: {} for name in self._functions}
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
            for name in self._functions
        }

    def cancel(self) -> None:
        """Do not ask the questions that are still waiting."""
        self._cancelled.set()
