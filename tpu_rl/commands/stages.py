"""The stages of a run and when they end: at their last step, or earlier on a plateau.

If a stage ends early, the metrics row of its last step says so. A run that resumes from any
checkpoint therefore has the same stages as before.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from tpu_rl import run_files
from tpu_rl.commands.config import ExperimentConfig, Plateau, Stage
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


def is_flat(plateau: Plateau, values: list[float]) -> bool:
    """Return True if a metric has stopped rising.

    That is, the mean of its last `over` values is less than `gain` above the mean of the `over`
    values before. False as long as there are fewer values.
    """
    n = plateau.over
    return len(values) >= 2 * n and sum(values[-n:]) - sum(values[-2 * n : -n]) < plateau.gain * n
