"""Runs in a notebook: pages in a frame of their own, which takes no style from around it."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tpu_rl.errors import unknown_name
from tpu_rl.report import html_page
from tpu_rl.report.chart_list import Chart
from tpu_rl.report.page import build_page
from tpu_rl.report.run_data import read_run
from tpu_rl.report.several import HEADLINES, build_comparison, names_of, overlaid


class Page(NamedTuple):
    """A page that a notebook shows."""

    html: str
    height: int = 640
    """Of its frame, in pixels."""

    def _repr_html_(self) -> str:
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" style="width: 100%; border: 0"'
            f' height="{self.height}"></iframe>'
        )


def page_of(folders: Sequence[Path]) -> Page:
    """Return the report of a run, or the page of several."""
    return Page(build_comparison(folders) if folders[1:] else build_page(folders[0]))


def charts_of(folders: Sequence[Path], metrics: Sequence[str]) -> Page:
    """Return charts with a line for each run: of some metrics, or of what runs are judged by.

    Raises InputError if no run has one of them.
    """
    runs = [read_run(folder) for folder in folders]
    available = dict.fromkeys(name for run in runs for name in run.metric_names())
    if missing := [name for name in metrics if name not in available]:
        raise unknown_name("metric", missing[0], available, ", ".join(map(str, folders)))
    chosen = [Chart(name, "", {name: ""}) for name in metrics] or HEADLINES
    names = names_of(folders)
    figures = overlaid(runs, names, chosen)
    page = html_page.render("charts.html", " · ".join(names), figures=figures)
    return Page(page, 140 + 250 * -(-len(figures) // 2))
