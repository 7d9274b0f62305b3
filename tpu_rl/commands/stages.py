"""The stages of a run and when they end: at their last step, or earlier, on a plateau or by --stop.

If a stage ends early, the metrics row of its last step says so. A run that resumes from any
checkpoint therefore has the same stages as before.
"""

from __future__ import annotations

import difflib
import math
from collections import deque
from pathlib import Path
from typing import Any

from tpu_rl import run_files
from tpu_rl.commands.config import ExperimentConfig, Plateau, Stage, StopConfig
from tpu_rl.errors import InputError
from tpu_rl.runtime import processes

ENDED = "run/phase_ended"
"""1 in the metrics row of the step after which a stage ended early."""


def of_run(config: ExperimentConfig, run_dir: Path, step: int) -> tuple[Stage, ...]:
    """Return the stages of a run that has taken `step` steps. All processes call it together."""

    def early_ends() -> list[int]:
        return [
            row["step"]
            for row in run_files.read_metrics(run_dir)
            if row.get(ENDED) and row["step"] <= step
        ]

    return config.stages_ended(processes.from_first(early_ends))


class PlateauDetector:
    """Watches the metric that ends a stage early."""

    def __init__(self, stage: Stage, run_dir: Path, step: int):
        """Read the metrics of the stage's steps up to `step`, which earlier jobs took.

        All processes call it together.
        """
        self._plateau = stage.ends_when_flat
        self._values: deque[float] = deque(maxlen=2 * self._plateau.over if self._plateau else 0)
        if self._plateau is None:
            return
        metric = self._plateau.metric

        def earlier_values() -> list[float | None]:
            rows = run_files.read_metrics(run_dir)
            return [row.get(metric) for row in rows if stage.first <= row["step"] <= step]

        for value in processes.from_first(earlier_values):
            self.reached({metric: value})

    def reached(self, row: dict[str, Any]) -> bool:
        """Record a step's metrics row and return whether the stage has reached its plateau."""
        if self._plateau is None:
            return False
        value = row.get(self._plateau.metric)
        if value is None:
            return False
        self._values.append(value)
        return is_flat(self._plateau, list(self._values))


class StopRules:
    """Reads the rows of the main algorithm one after the other, and says when --stop ends it."""

    def __init__(self, stop: StopConfig):
        self._stop = stop
        self._windows = {rule: deque[float](maxlen=stop.over) for rule in stop.rules}
        self._without_gain = 0
        self._best = math.nan
        self.best_step = -1
        """The step of the best evaluation so far; -1 before the first one."""

    def add(self, row: dict[str, Any]) -> str:
        """Read the row of a step, and return why the run ends with it; "" if it does not."""
        reasons = []
        value = row.get(self._stop.metric)
        if value is not None:
            sign = 1 if self._stop.goal == "highest" else -1
            # The first value is better than none.
            if not sign * (value - self._best) <= 0:
                self._best = value
                self.best_step = row["step"]
                self._without_gain = 0
            else:
                self._without_gain += 1
            if 0 < self._stop.patience <= self._without_gain:
                reasons.append(
                    f"{self._stop.metric} was best at step {self.best_step} ({self._best:.4g}), "
                    f"{self._without_gain} evaluations ago"
                )
        for rule, window in self._windows.items():
            if row.get(rule.metric) is None:
                continue
            window.append(row[rule.metric])
            mean = sum(window) / len(window)
            is_out = mean > rule.limit if rule.is_upper else mean < rule.limit
            if len(window) == self._stop.over and is_out:
                bound = f"{'>' if rule.is_upper else '<'} {rule.limit:g}"
                reasons.append(f"the mean of {rule.metric} is {mean:.4g} {bound}")
        return "; ".join(reasons)


def stop_rules(config: ExperimentConfig, run_dir: Path, stage: Stage, step: int) -> StopRules:
    """Return the rules after the steps of the main algorithm up to `step`.

    All processes call it together. The rules of an earlier stage are empty.
    """
    if stage.index != len(config.phases):
        return StopRules(StopConfig())

    def earlier_rows() -> list[dict[str, Any]]:
        rows = run_files.read_metrics(run_dir)
        return [row for row in rows if stage.first <= row["step"] <= step]

    rules = StopRules(config.stop)
    for row in processes.from_first(earlier_rows):
        rules.add(row)
    return rules


def require_metrics(stop: StopConfig, row: dict[str, Any], prefix: str) -> None:
    """Raise InputError if --stop looks at a metric that a run does not have.

    Args:
        prefix: what metrics of that kind begin with: "eval/", or "" for all others.
    """
    for metric in filter(None, (stop.metric, *(rule.metric for rule in stop.rules))):
        is_of_kind = metric.startswith("eval/") == bool(prefix)
        if not is_of_kind or metric in row:
            continue
        names = sorted(name for name in row if name.startswith("eval/") == bool(prefix))
        nearest = difflib.get_close_matches(metric, names, n=3, cutoff=0.0)
        raise InputError(
            f"the run has no metric {metric}",
            where="--stop.metric, --stop.when",
            why="evaluations do not measure it" if prefix else "a step does not measure it",
            fix=f"in another --run-dir use {' or '.join(nearest)}"
            if nearest
            else "give held-out rows, and a reward that judges them",
        )


def is_flat(plateau: Plateau, values: list[float]) -> bool:
    """Return True if a metric has stopped rising.

    That is, the mean of its last `over` values is less than `gain` above the mean of the `over`
    values before. False as long as there are fewer values.
    """
    n = plateau.over
    return len(values) >= 2 * n and sum(values[-n:]) - sum(values[-2 * n : -n]) < plateau.gain * n
