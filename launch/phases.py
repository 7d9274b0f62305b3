"""When a phase of a run ends: at its last step, or before, once what it is for no longer gets better.

That a phase ended early stands in the metrics row of its last step, so a run that is continued, from whatever
checkpoint, has the same phases as before.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.config import ExperimentConfig, Plateau, Stage
from tpu_rl import processes
from tpu_rl.metrics import METRICS_FILE

ENDED = "run/phase_ended"
"""1 in the metrics row of the step after which a phase ended early."""


def stages(config: ExperimentConfig, run_dir: Path, step: int) -> tuple[Stage, ...]:
    """The stages of a run that has come to `step`."""

    def early() -> list[int]:
        return [row["step"] for row in _rows(run_dir) if row.get(ENDED) and row["step"] <= step]

    return config.stages_ended(processes.from_first(early))


class Flatness:
    """Watches the metric that ends a stage early."""

    def __init__(self, stage: Stage, run_dir: Path, step: int):
        """Knows the stage's steps up to `step`, which earlier jobs took."""
        self._plateau = stage.ends_when_flat
        self._values: deque[float] = deque(maxlen=2 * self._plateau.over if self._plateau else 0)
        if self._plateau is not None:
            metric = self._plateau.metric
            rows = (row for row in _rows(run_dir) if stage.first <= row["step"] <= step)
            for value in processes.from_first(lambda: [row.get(metric) for row in rows]):
                self.reached({metric: value})

    def reached(self, row: dict[str, Any]) -> bool:
        """Whether the stage has nothing to gain after the step of this metrics row; without a plateau never."""
        value = row.get(self._plateau.metric) if self._plateau else None
        if self._plateau is None or value is None:
            return False
        self._values.append(value)
        return is_flat(self._plateau, list(self._values))


def is_flat(plateau: Plateau, values: list[float]) -> bool:
    """Whether the mean of the last `over` values is less than `gain` above that of the `over` before; not known before
    there are so many."""
    n = plateau.over
    return len(values) >= 2 * n and sum(values[-n:]) - sum(values[-2 * n : -n]) < plateau.gain * n


def _rows(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The rows of metrics.jsonl that are whole."""
    path = run_dir / METRICS_FILE
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else ():
        if line.endswith("\n"):
            yield json.loads(line)
