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


class EndRules:
    """Reads the rows of a stage one after the other, and says when it ends before its last step:
    the main algorithm by --stop, a phase on its plateau."""

    def __init__(self, stop: StopConfig, plateau: Plateau | None = None):
        self._stop = stop
        self._plateau = plateau
        self._values = deque[float](maxlen=2 * plateau.over if plateau else 0)
        self._windows = {rule: deque[float](maxlen=stop.over) for rule in stop.rules}
        self._without_gain = 0
        self._best = math.nan
        self.best_step = -1
        """The step of the best evaluation so far; -1 before the first one."""

    def add(self, row: dict[str, Any]) -> str:
        """Read the row of a step, and return why the stage ends with it; "" if it does not."""
        reasons = []
        if self._plateau is not None and row.get(self._plateau.metric) is not None:
            self._values.append(row[self._plateau.metric])
            if is_flat(self._plateau, list(self._values)):
                reasons.append(f"{self._plateau.metric} is flat")
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


def end_rules(config: ExperimentConfig, run_dir: Path, stage: Stage, step: int) -> EndRules:
    """Return the rules after the steps of a stage up to `step`. All processes call it together."""

    def earlier_rows() -> list[dict[str, Any]]:
        rows = run_files.read_metrics(run_dir)
        return [row for row in rows if stage.first <= row["step"] <= step]

    is_main = stage.index == len(config.phases)
    rules = EndRules(config.stop if is_main else StopConfig(), stage.ends_when_flat)
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
