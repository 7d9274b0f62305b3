"""The contents of a run folder, as the report reads them.

Files may be missing or growing: a run that still runs or was interrupted has no summary, and
supervised training has no rewards.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tpu_rl import run_files
from tpu_rl.metrics import METRICS_FILE, SAMPLES_FILE
from tpu_rl.report.series import Series

GUIDED_FILE = "guided.json"
ROW_FILES = (METRICS_FILE, SAMPLES_FILE)
PROBLEMS = "problems"
PAIRS = "pairs"
STEPS = "steps"
"""What eval/accuracy is the share of: held-out problems that the model solves, held-out pairs that
it ranks as their labels do, or held-out steps of solutions that it judges as their labels do."""
GRADES = "grades"
"""The kind of an evaluation whose reward grades answers: it has eval/reward and no accuracy."""
EVALUATION = ("eval/accuracy", "eval/reward")
"""Metrics that every evaluation of answers, pairs or steps has one of."""


class Run(NamedTuple):
    """The content of a run folder."""

    name: str
    rows: list[dict[str, Any]]
    """One row of metrics per step."""
    config: dict[str, Any]
    config_text: str
    summary: dict[str, Any]
    """Empty unless the run is finished."""
    guided: dict[str, Any]
    """The result of `launch/evaluate.py --guide` for a run of Q#."""
    page_steps: tuple[int, ...] = ()
    """Steps with pages of completions, to which points of curves link."""

    def series(self, metric: str, label: str = "") -> Series | None:
        """Return a metric over the steps that have it, or None."""
        points = [
            (row["step"], row[metric])
            for row in self.rows
            if row.get(metric) is not None and math.isfinite(row[metric])
        ]
        if not points:
            return None
        steps, values = np.array(points, float).T
        return Series(label, steps, values)

    def with_limits(self, metric: str, label: str = "") -> Series | None:
        """Return a metric over the steps that have it, with metric_low and metric_high if all of
        these steps have them."""
        series = self.series(metric, label)
        low, high = self.series(f"{metric}_low"), self.series(f"{metric}_high")
        if series is None or low is None or high is None:
            return series
        if not len(series.x) == len(low.x) == len(high.x):
            return series
        return series._replace(band=(low.y, high.y))

    def evaluation_kinds(self) -> list[str]:
        """List the kinds of the evaluations: some of PROBLEMS, PAIRS, STEPS and GRADES.

        Stages of a run may measure different things. The latest comes last.
        """
        return list(dict.fromkeys(kind for _, kind in reversed(self._evaluations())))[::-1]

    def evaluated(self, kind: str) -> Run:
        """Return the run with the rows that have an evaluation of a kind only."""
        return self._replace(rows=[row for row, of in self._evaluations() if of == kind])

    def _evaluations(self) -> list[tuple[dict[str, Any], str]]:
        """Return the rows with evaluations, each with its kind.

        A graded reward may give only zeros and ones at some steps: those are grades, too.
        """
        rows = [row for row in self.rows if any(row.get(name) is not None for name in EVALUATION)]
        kinds = [_kind(row) for row in rows]
        if GRADES in kinds:
            kinds = [GRADES if kind == PROBLEMS else kind for kind in kinds]
        return list(zip(rows, kinds, strict=True))

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
        """Return the first and the last evaluation, each {value, low, high, n}, or None.

        The value is an accuracy or, of graded answers, the mean reward.

        They come from the summary or, before the run has ended, from the metrics. Both measure
        what the last evaluation does.
        """
        kinds = self.evaluation_kinds()
        summary = self.summary.get("eval") or {}
        before = summary.get("before") or {}
        after = summary.get("after") or {}
        is_complete = before.get("accuracy") is not None and after.get("accuracy") is not None
        if is_complete and len(kinds) <= 1 and kinds != [GRADES]:
            first, last = ({"value": one["accuracy"], **one} for one in (before, after))
            return first, last
        rows = self.evaluated(kinds[-1]).rows if kinds else []
        if len(rows) < 2:
            return None
        metric = metric_of(kinds[-1])
        return _evaluation(rows[0], metric), _evaluation(rows[-1], metric)


def metric_of(kind: str) -> str:
    """Return the metric of a kind of evaluations."""
    return "eval/reward" if kind == GRADES else "eval/accuracy"


def _kind(row: dict[str, Any]) -> str:
    """Return the kind of the accuracy in a row, known from the metrics beside it."""
    if "eval/length_only_accuracy" in row:
        return PAIRS
    if "eval/majority_accuracy" in row:
        return STEPS
    return GRADES if row.get("eval/accuracy") is None else PROBLEMS


def _evaluation(row: dict[str, Any], metric: str) -> dict[str, Any]:
    return {
        "value": row[metric],
        "low": row.get(f"{metric}_low"),
        "high": row.get(f"{metric}_high"),
        "n": int(row.get("eval/n") or 0),
    }


def read_run(folder: Path, live: bool = False) -> Run:
    """Read a run folder.

    Args:
        live: True while the run is active. Skips the (slow) check of samples.jsonl against the
            checkpoints.

    Raises:
        InputError: if it has no metrics.
        DamagedDataError: if a file in it cannot be read.
    """
    run_files.require_recorded_rows(folder, (METRICS_FILE,) if live else ROW_FILES)
    rows = run_files.require_metrics(folder, ("step", "time"))
    config_path = folder / "config.yaml"
    config: dict[str, Any] = {}
    config_text = ""
    if run_files.exists(config_path):
        config, config_text = run_files.read_config(config_path)
    return Run(
        name=folder.resolve().name,
        rows=rows,
        config=config,
        config_text=config_text,
        summary=_summary(folder, max(rows[-1]["step"], config.get("steps") or 0)),
        guided=run_files.read_json(folder / GUIDED_FILE),
    )


def _summary(folder: Path, steps: int) -> dict[str, Any]:
    """Return the summary, or {} if it is that of an earlier job with fewer steps."""
    summary = run_files.read_summary(folder)
    return summary if summary.get("steps", 0) >= steps else {}
