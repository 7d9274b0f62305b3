"""The rows that come next, chosen by how often their completions passed, and starts from solutions.

    next(curriculum)  -> rows: those to repeat with a hint, then the stream's rows that are wanted
    observe(scored)   -> the pass rates of what was sampled, the first transform of each batch

Each row has a history: the share of its completions that passed, once for each time that it was
sampled. A row is wanted if it has no history, or if

    low <= its latest pass rate <= high                              (bands: DRIVE, Dr. SCI, LADDER)
    1 - sum_k (a_k - m_k)^2 / sum_k (1 - m_k)^2 >= impact            (LIM: LIMR, arXiv 2502.11886)

a_k is the row's pass rate at its k-th time, and m_k the mean of all rows at theirs. LIMR scores
rows after a pilot run; here the score is that of this run so far, from a row's second time on.

Starts from solutions (GHPO, arXiv 2507.10628; snapshots of S3RL): the prompt ends with the first
parts of a reference solution. Their share falls with the batches, or a row whose completions all
fail comes again with a quarter, a half, and three quarters. GHPO repeats such a prompt within the
step; here it is in the next batch. Histories count prompts without such a start alone.

The history, the rows to repeat and the position are the state of the stream, and so part of each
checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tpu_rl import data
from tpu_rl.data import Row
from tpu_rl.experience.config import CurriculumConfig
from tpu_rl.experience.rows import last_text
from tpu_rl.experience.transforms import text_of_column
from tpu_rl.rollout.dynamic_sampling import all_sampled
from tpu_rl.rollout.scoring import Scored, by_episode
from tpu_rl.types import TrainState

START = "solution_start"
"""Column of the text that a prompt has beyond its own."""
HINTS = (0.25, 0.5, 0.75)
"""Shares of the solution that a row has which comes again."""
MAX_PASSED_OVER = 64
"""Rows that may be passed over for each row of a batch; what comes then is taken."""


class Curriculum(data.RowStream):
    """A stream of batches whose rows are chosen by their history; see the module."""

    def __init__(
        self,
        stream: data.RowStream,
        batch_size: int,
        config: CurriculumConfig,
        fits: Callable[[Row], bool] = lambda row: True,
    ):
        """Choose from `stream`, which has one row at a time.

        `fits` says whether a prompt is short enough. A start that is too long loses its last parts.
        """
        self._rows = stream
        self._batch_size = batch_size
        self._config = config
        self._fits = fits
        self._batches = 0
        self._history: dict[str, list[float]] = {}
        """Digest of a row -> times it was passed over since it was sampled, then its pass rates."""
        self._sums: list[list[float]] = []
        """[sum of pass rates, number of rows] of the k-th times of all rows."""
        self._repeated: list[tuple[Row, int]] = []
        """Rows to repeat, each with the index of its hint."""
        self._started = 0
        self._passed_over = 0

    def __next__(self) -> tuple[np.ndarray, list[Row]]:
        return self._next(self._batch_size)

    def take(self, count: int) -> list[Row]:
        return self._next(count)[1]

    def _next(self, count: int) -> tuple[np.ndarray, list[Row]]:
        again = self._repeated[:count]
        self._repeated = self._repeated[len(again) :]
        rows = [self._with_start(row, HINTS[hint]) for row, hint in again]
        ids = [np.full(len(rows), -1, np.int64)]
        share = self._share()
        self._passed_over = 0
        while len(rows) < count:
            row_id, (row,) = next(self._rows)
            limit = MAX_PASSED_OVER * count
            if self._passed_over < limit and not self._is_wanted(row):
                self._passed_over += 1
                continue
            rows.append(self._with_start(row, share))
            ids.append(row_id)
        self._batches += 1
        self._started = sum(bool(row.get(START)) for row in rows)
        return np.concatenate(ids), rows

    def observe(self, scored: Scored, step: int, state: TrainState) -> Scored:
        """Note the pass rates of a batch: a transform that changes nothing."""
        sampled = by_episode(all_sampled(scored))
        judged = next(iter(sampled.parts.values()), sampled.rewards)
        for row, rewards in zip(sampled.rows, judged.reshape(len(sampled.rows), -1), strict=True):
            finite = rewards[np.isfinite(rewards)]
            if finite.size:
                self._note(row, float(np.mean(finite > 0.5)))
        return scored

    def metrics(self) -> dict[str, float]:
        """Return the curriculum's part of a metrics row."""
        return {
            "rollout/rows_with_history": float(len(self._history)),
            "rollout/rows_passed_over": float(self._passed_over),
            "rollout/rows_started": float(self._started),
        }

    def get_state(self) -> dict[str, Any]:
        return {
            "rows": self._rows.get_state(),
            "batches": self._batches,
            # Lists inside are replaced and never changed.
            "history": dict(self._history),
            "sums": list(self._sums),
            "repeated": [[row, hint] for row, hint in self._repeated],
            "last": [self._started, self._passed_over],
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self._rows.set_state(state["rows"])
        self._batches = state["batches"]
        self._history = dict(state["history"])
        self._sums = list(state["sums"])
        self._repeated = [(row, hint) for row, hint in state["repeated"]]
        self._started, self._passed_over = state["last"]

    # --- choice ---

    def _is_wanted(self, row: Row) -> bool:
        key = data.row_digest(row)
        if key not in self._history:
            return True
        passed_over, *rates = self._history[key]
        low, high = self._config.pass_rate
        impact = self._config.impact
        if low <= rates[-1] <= high and (
            impact is None or len(rates) < 2 or self._impact(rates) >= impact
        ):
            return True
        self._history[key] = [passed_over + 1, *rates]
        return 0 < self._config.refresh <= passed_over + 1

    def _impact(self, rates: list[float]) -> float:
        means = [total / count for total, count in self._sums[: len(rates)]]
        return learning_impact(rates, means)

    def _note(self, row: Row, rate: float) -> None:
        row, start = without_start(row)
        if rate == 0 and self._config.hints:
            hint = 0 if not start else self._hint_after(row, start)
            if hint < len(HINTS):
                self._repeated = [*self._repeated, (row, hint)]
        if start:
            return
        key = data.row_digest(row)
        _, *rates = self._history.get(key, [0])
        self._history[key] = [0, *rates, rate]
        times = len(rates)
        total, count = self._sums[times] if times < len(self._sums) else (0.0, 0)
        self._sums[times : times + 1] = [[total + rate, count + 1]]

    # --- starts ---

    def _share(self) -> float:
        """Return the share of solutions with which prompts of the next batch end."""
        first, last = self._config.start
        progress = min(1.0, self._batches / max(self._config.start_batches, 1))
        return first + (last - first) * progress

    def _hint_after(self, row: Row, start: str) -> int:
        """Return the index of the first hint that is longer than `start`."""
        longer = (len(self._start(row, share)) > len(start) for share in HINTS)
        return next((index for index, is_longer in enumerate(longer) if is_longer), len(HINTS))

    def _start(self, row: Row, share: float) -> str:
        """Return the text for the end of a prompt; "" if that share has no whole part."""
        solution = text_of_column(row, self._config.solution_column)
        parts = solution_parts(solution, self._config.separator)
        for count in range(min(math.floor(share * len(parts) + 1e-9), len(parts) - 1), 0, -1):
            text = self._config.start_text + "".join(parts[:count])
            if self._fits(with_text(row, text)):
                return text
        return ""

    def _with_start(self, row: Row, share: float) -> Row:
        if self._config.start == (0.0, 0.0) and not self._config.hints:
            return row
        text = self._start(row, share) if share else ""
        return with_text(row, text) | {START: text}


def learning_impact(rates: list[float], means: list[float]) -> float:
    """Return LIM, at most 1, of a row with these pass rates, where all rows have these means."""
    distance = sum((rate - mean) ** 2 for rate, mean in zip(rates, means, strict=True))
    scale = sum((1 - mean) ** 2 for mean in means)
    return 1 - distance / scale if scale else 1.0


def solution_parts(solution: str, separator: str) -> list[str]:
    """Return the parts of a solution, each with its separator; without one, its characters."""
    if not separator:
        return list(solution)
    *parts, last = solution.split(separator)
    return [part + separator for part in parts] + [last] * bool(last)


def with_text(row: Row, text: str) -> Row:
    """Return the row with a text at the end of its prompt, or of its last message.

    Raises InputError if the last message is no text.
    """
    flags = "--rollout.curriculum.start, --rollout.curriculum.hints"
    before = last_text.of(row["prompt"], "a start of a solution has no place", flags)
    return row | {"prompt": last_text.replaced(row["prompt"], before + text)}


def without_start(row: Row) -> tuple[Row, str]:
    """Return (the row before `with_text`, the text that it has beyond it)."""
    start = row.get(START, "")
    plain = {name: value for name, value in row.items() if name != START}
    if not start:
        return plain, ""
    text = last_text.of(row["prompt"], "a start of a solution is gone", START)
    return plain | {"prompt": last_text.replaced(row["prompt"], text.removesuffix(start))}, start
