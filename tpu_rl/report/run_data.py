"""The contents of a run folder, as the report reads them.

Files may be missing or growing: a run that still runs or was interrupted has no summary, and
supervised training has no rewards.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from tpu_rl.errors import InputError
from tpu_rl.metrics import METRICS_FILE, SAMPLES_FILE, SUMMARY_FILE
from tpu_rl.report import plots

GUIDED_FILE = "guided.json"
MAX_SAMPLED_STEPS = 20
"""Steps at either end of a run whose samples the report reads, at most."""


class Run(NamedTuple):
    """The content of a run folder."""

    name: str
    rows: list[dict[str, Any]]
    """One row of metrics per step."""
    early: list[dict[str, Any]]
    """Rewarded samples of the first steps."""
    late: list[dict[str, Any]]
    """Rewarded samples of the last steps."""
    config: dict[str, Any]
    config_text: str
    summary: dict[str, Any]
    guided: dict[str, Any]
    """The result of `launch/evaluate.py --guide` for a run of Q#."""

    def series(self, metric: str, label: str = "") -> plots.Series | None:
        """Return a metric over the steps that have it, or None."""
        points = [(row["step"], row[metric]) for row in self.rows if row.get(metric) is not None]
        if not points:
            return None
        steps, values = np.array(points, float).T
        return plots.Series(label, steps, values)

    def metric_names(self) -> list[str]:
        """Return the names of all metrics, in the order in which they first occur."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def setting(self, *names: str) -> str:
        """Return a nested value of the configuration as text; empty if it is missing."""
        value: Any = self.config
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        return "" if value is None else str(value)

    def evaluations(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Return the first and the last evaluation, each {accuracy, low, high, n}, or None.

        They come from the summary or, before the run has ended, from the metrics.
        """
        summary = self.summary.get("eval") or {}
        before = summary.get("before") or {}
        after = summary.get("after") or {}
        if before.get("accuracy") is not None and after.get("accuracy") is not None:
            return before, after
        rows = [row for row in self.rows if row.get("eval/accuracy") is not None]
        if len(rows) < 2:
            return None
        return _evaluation(rows[0]), _evaluation(rows[-1])


def _evaluation(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "accuracy": row["eval/accuracy"],
        "low": row.get("eval/accuracy_low"),
        "high": row.get("eval/accuracy_high"),
    }


def read_run(folder: Path) -> Run:
    """Read a run folder.

    Raises:
        InputError: if it has no metrics.
    """
    rows = list(_json_lines(folder / METRICS_FILE))
    if not rows:
        raise InputError(
            "There is nothing to report.",
            where=str(folder / METRICS_FILE),
            why="the file is missing or has no rows",
            fix="Give the folder of a run.",
        )
    config_path = folder / "config.yaml"
    config_text = config_path.read_text(encoding="utf-8") if config_path.exists() else ""
    early, late = _early_and_late(folder / SAMPLES_FILE)
    return Run(
        name=folder.resolve().name,
        rows=rows,
        early=early,
        late=late,
        config=yaml.safe_load(config_text) or {},
        config_text=config_text,
        summary=_json(folder / SUMMARY_FILE),
        guided=_json(folder / GUIDED_FILE),
    )


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Return the rows of a file that may be missing; an unfinished last line is left out."""
    if path.exists():
        with path.open(encoding="utf-8", newline="\n") as file:
            yield from (json.loads(line) for line in file if line.endswith("\n"))


def _rewarded(path: Path) -> Iterator[dict[str, Any]]:
    return (sample for sample in _json_lines(path) if sample.get("reward") is not None)


def _early_and_late(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return rewarded samples of the first and of the last tenth of all sampled steps.

    The file is read twice and not kept: it may be larger than memory.
    """
    steps = sorted({sample["step"] for sample in _rewarded(path)})
    if len(steps) < 2:
        return [], []
    count = max(1, min(MAX_SAMPLED_STEPS, len(steps) // 10))
    last_early, first_late = steps[count - 1], steps[-count]
    early: list[dict[str, Any]] = []
    late: list[dict[str, Any]] = []
    for sample in _rewarded(path):
        if sample["step"] <= last_early:
            early.append(sample)
        if sample["step"] >= first_late:
            late.append(sample)
    return early, late
