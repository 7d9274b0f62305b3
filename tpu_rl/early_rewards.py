"""Rewards of groups that have ended, computed in other processes while the other rows are still being decoded."""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from tpu_rl import rewards
from tpu_rl.rewards import Answer, Reward


class EarlyRewards:
    """Asks the reward functions that work elsewhere (see `rewards`) about whole groups, as they end."""

    def __init__(
        self,
        reward_functions: Mapping[str, Reward],
        prompts: Sequence[Any],
        columns: Mapping[str, Sequence[Any]],
        group: int,
        own: slice,
        decode: Callable[[list[int]], str],
        most: int | None = None,
    ):
        """prompts and columns are of all N completions, of which only those in `own`, whole groups, are asked about,
        and of these at most so many: each question has its share of a batch's time (`IsolatedReward.of_share`).

        Raises InputError where a function needs a column that the data lack.
        """
        for name, function in reward_functions.items():
            rewards.require_columns(name, function, columns)
        self._functions = {name: one for name, one in reward_functions.items() if rewards.works_elsewhere(one)}
        self._prompts, self._columns, self._group, self._own, self._decode = prompts, columns, group, own, decode
        self._texts: dict[int, str] = {}
        self._most = own.stop - own.start if most is None else most
        self._asked: list[tuple[list[int], Future[dict[str, Answer]]]] = []
        self._spent = dict.fromkeys(self._functions, 0.0)
        """Seconds that each has taken for this batch."""
        self._given_up = threading.Event()

    @property
    def on_finished(self) -> Callable[[dict[int, list[int]]], None] | None:
        """To be told of rows that have ended, row -> the tokens of its completion; None where nobody asks.

        The same on every process, with or without rows of its own: the sampler gathers what ended for all."""
        return self._on_finished if self._functions else None

    def _on_finished(self, ended: dict[int, list[int]]) -> None:
        mine = [row for row in ended if self._own.start <= row < self._own.stop]
        self._texts |= {row: self._decode(ended[row]) for row in mine}
        groups = sorted({row // self._group for row in mine})
        members = [list(range(group * self._group, (group + 1) * self._group)) for group in groups]
        rows = [row for group in members if all(row in self._texts for row in group) for row in group]
        if rows:
            answer: Future[dict[str, Answer]] = Future()
            _questions().put((answer, functools.partial(self._ask, rows)))
            self._asked.append((rows, answer))

    def _ask(self, rows: list[int]) -> dict[str, Answer]:
        if self._given_up.is_set():
            return {}
        prompts, texts = [self._prompts[row] for row in rows], [self._texts[row] for row in rows]
        columns = {name: [column[row] for row in rows] for name, column in self._columns.items()}
        share, found = len(rows) / self._most, {}
        for name, function in self._functions.items():
            began = time.monotonic()
            now = rewards.of_share(function, share, self._spent[name])
            found[name] = rewards.ask(name, now, prompts, texts, columns)
            self._spent[name] += time.monotonic() - began
        return found

    def answers(self, groups: Sequence[int] | None = None) -> dict[str, Answer]:
        """What each function that was asked says of the completions in `own`, or in these groups, which are all that
        was told of, once it has said it; faults are counted from there.

        Empty where nobody told of the rows. Raises what a function raises by intention: a TpuRlError.
        """
        if not self._asked:
            return {}
        own = range(self._own.start, self._own.stop)
        if groups is not None:
            own = [row for group in groups for row in range(group * self._group, (group + 1) * self._group)]
        place_of = {row: place for place, row in enumerate(own)}
        found: dict[str, Answer] = {name: (np.full(len(own), np.nan, np.float32), []) for name in self._functions}
        for rows, answer in self._asked:
            places = [place_of[row] for row in rows]
            for name, (values, faults) in answer.result().items():
                found[name][0][places] = values
                found[name][1].extend(replace(fault, row=places[fault.row]) for fault in faults)
        return {name: (values, sorted(faults, key=lambda fault: fault.row)) for name, (values, faults) in found.items()}

    def give_up(self) -> None:
        """Nobody will ask for the answers: what has not been asked yet is not."""
        self._given_up.set()


@functools.cache
def _questions() -> queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]]:
    """What one thread asks, in turn. It lives as long as the program, as workers end with the thread that starts them;
    and it is no executor's, as the interpreter would wait for those at its end."""
    questions: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()

    def answer() -> None:
        while True:
            future, ask = questions.get()
            try:
                future.set_result(ask())
            except BaseException as error:  # the asking thread's, which raises it
                future.set_exception(error)

    threading.Thread(target=answer, name="early rewards", daemon=True).start()
    return questions
