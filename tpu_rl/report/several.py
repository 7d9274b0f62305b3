"""Several runs on one page: a table, the settings that differ, and charts with a line for each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tpu_rl.errors import InputError
from tpu_rl.report import explorer, html_page
from tpu_rl.report.chart_list import BEHAVIOR, LOSSES, OPTIMIZATION, THROUGHPUT, Chart
from tpu_rl.report.html_page import Figure
from tpu_rl.report.page import lines_figure
from tpu_rl.report.run_data import Run, read_run

MOST = 64
"""Runs of a page."""
MOST_LINES = 4
"""Runs whose lines every chart has; more cannot be told apart, and the chart of free choice has
them."""
HEADLINES = (
    Chart("Accuracy", "Share of what was held out; bands: 95 %.", {"eval/accuracy": ""}, True),
    Chart("Held-out reward", "Mean; bands: 95 % intervals.", {"eval/reward": ""}),
    Chart("Held-out loss", "Nats per token; bands: 95 % intervals.", {"eval/loss": ""}),
    Chart("Reward", "Mean of a step's completions.", {"reward/mean": ""}),
    *(Chart("Loss", name, {name: ""}) for name in LOSSES),
)
SECTIONS = {"Learning": HEADLINES, "Completions": BEHAVIOR, "Optimization": OPTIMIZATION}
SECTIONS |= {"Performance": (THROUGHPUT,)}


def build_comparison(
    run_dirs: Sequence[str | os.PathLike[str]], refresh_seconds: int | None = None
) -> str:
    """Return the page of several runs as HTML.

    Args:
        refresh_seconds: after how long the page reloads itself if a run is not finished.

    Raises:
        InputError: if there are too few or too many runs, or one has no metrics.
        DamagedDataError: if a file of a run cannot be read.
    """
    if not 2 <= len(run_dirs) <= MOST:
        raise InputError(
            f"{len(run_dirs)} runs on one page", where="RUN_DIR ...", fix=f"name 2 to {MOST}"
        )
    runs = [read_run(Path(folder), live=refresh_seconds is not None) for folder in run_dirs]
    names = names_of([Path(folder) for folder in run_dirs])
    if all(run.summary for run in runs):
        refresh_seconds = None
    metrics = [
        metric
        for chart in HEADLINES
        for metric in chart.metrics
        if any(run.series(metric) is not None for run in runs)
    ]
    settings = [explorer.settings_of(run) for run in runs]
    shown = SECTIONS if len(runs) <= MOST_LINES else {}
    return html_page.render(
        "several.html",
        " · ".join(names),
        refresh_seconds,
        runs=list(zip(names, runs, strict=True)),
        metrics=metrics,
        explorer=explorer.data(runs, names),
        settings=settings,
        differing=explorer.differing(settings),
        sections={title: overlaid(runs, names, chart_list) for title, chart_list in shown.items()},
    )


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return the names of folders, with that of the folder above where two would be the same."""
    names = [folder.absolute().name for folder in folders]
    if len(set(names)) == len(names):
        return names
    return ["/".join(folder.absolute().parts[-2:]) for folder in folders]


def overlaid(
    runs: Sequence[Run], names: Sequence[str], chart_list: Sequence[Chart]
) -> list[Figure]:
    """Return a chart for each metric that a run has, with a line for each run."""
    figures = []
    for chart in chart_list:
        for metric, label in chart.metrics.items():
            lines = [run.with_limits(metric, name) for run, name in zip(runs, names, strict=True)]
            if chart.log:
                lines = [line for line in lines if line is not None and (line.y > 0).all()]
            title = f"{chart.title}: {label}" if label else chart.title
            figures += lines_figure(chart._replace(title=title), lines)
    return figures
