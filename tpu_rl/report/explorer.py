"""The data of the part of a page that answers clicks: any metric over any axis.

page.js, the only script of a finished page, draws it, and sorts tables. It writes texts of the run
by `textContent` alone. Without it everything else of the page stays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tpu_rl.metrics import flat_settings
from tpu_rl.report.run_data import Run
from tpu_rl.report.series import thin_out

MAX_POINTS = 150
"""Points of a line, at most."""
SAME_GROUP = {"seed", "run_dir"}
"""Settings in which runs of a group differ."""
UNSHOWN = {"step", "time"}
LIMITS = ("_low", "_high")


def settings_of(run: Run) -> dict[str, str]:
    """Return the run's settings by names such as "optimizer.learning_rate", as texts."""
    return dict(flat_settings(run.config))


def differing(all_settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the names of the settings in which runs differ, in their order."""
    names = dict.fromkeys(name for settings in all_settings for name in settings)
    return [name for name in names if len({of.get(name) for of in all_settings}) > 1]


def data(runs: Sequence[Run], names: Sequence[str]) -> list[Any]:
    """Return the data of the chart of free choice, one object for each run."""
    settings = [settings_of(run) for run in runs]
    changed = [name for name in differing(settings) if name != "run_dir"]
    return [
        _data(run, name, of, changed) for run, name, of in zip(runs, names, settings, strict=True)
    ]


def _data(run: Run, name: str, settings: Mapping[str, str], changed: Sequence[str]) -> Any:
    """Return the data of a run for the script: lines [steps, values], and times and tokens."""
    lines = {}
    for metric in run.metric_names():
        series = run.series(metric)
        if series is not None and metric not in UNSHOWN and not metric.endswith(LIMITS):
            lines[metric] = [_short(thin_out(part, MAX_POINTS)) for part in (series.x, series.y)]
    steps = np.array([row["step"] for row in run.rows], float)
    times = np.array([row["time"] for row in run.rows], float)
    tokens = np.cumsum([row.get("rollout/tokens") or _tokens(row) for row in run.rows])
    by_step = [steps, (times - times[0]) / 60, tokens]
    return {
        "name": name,
        "group": json.dumps({key: settings.get(key) for key in changed if key not in SAME_GROUP}),
        "settings": {key: settings.get(key, "") for key in changed},
        "lines": lines,
        "axes": [_short(thin_out(part, MAX_POINTS)) for part in by_step],
    }


def _tokens(row: Mapping[str, Any]) -> float:
    return (row.get("perf/train_tokens_per_second") or 0) * (row.get("time/update") or 0)


def _short(values: np.ndarray) -> list[float]:
    return [float(f"{value:.5g}") for value in values]
