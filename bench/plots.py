"""Charts as files, for documents: matplotlib figures with labels at the lines instead of legends.

`line_chart` returns a figure, and `as_svg` turns it into text. Figures do not touch the global
state of pyplot.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tpu_rl.report.axes import Axis, step_axis, value_axis
from tpu_rl.report.series import Series, running_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1f2430"
MUTED = "#6b7280"
GRID = "#e6e8ec"
COLORS = ("#2a6496", "#d4762c", "#3a9188", "#b5495b", "#7a6aa8", "#8a8f98")
WIDE = (10.4, 3.1)
"""Size of a figure in inches."""
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "text.color": INK,
    "axes.edgecolor": "#c9cdd3",
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    "svg.hashsalt": "tpu_rl",
}


def as_svg(figure: Figure) -> str:
    """Return the figure as an SVG document. Its text uses the reader's sans-serif font."""
    buffer = io.StringIO()
    with _style():
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    return buffer.getvalue().replace(
        "'DejaVu Sans'", "system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', Arial"
    )


def line_chart(lines: Sequence[Series], percent: bool = False) -> Figure:
    """Plot lines over steps. Long noisy lines are pale, with their running mean on top."""
    x_axis = step_axis(np.concatenate([line.x for line in lines]))
    values = np.concatenate([line.values() for line in lines])
    y_axis = value_axis(values, percent=percent)
    with _style():
        figure, axes = _new_figure(WIDE, labels=len(lines) > 1)
        labels = []
        thinned = (line.thinned() for line in lines)
        for line, color in zip(thinned, itertools.cycle(COLORS), strict=False):
            x = line.x
            y = line.y
            if line.band is not None:
                axes.fill_between(x, *line.band, color=color, alpha=0.16, linewidth=0)
            smooth = running_mean(y)
            if smooth is not y:
                axes.plot(x, y, color=color, alpha=0.3, linewidth=0.8)
            axes.plot(x, smooth, color=color, marker="o" if len(x) == 1 else "", markersize=4)
            labels.append(_Label(line.label, float(smooth[-1]), color))
        _finish(axes, x_axis, y_axis)
        if len(lines) > 1:
            _label_ends(axes, labels)
        return figure


# --- parts of a chart ---


class _Label(NamedTuple):
    """Text at the right edge, beside the end of a line."""

    text: str
    y: float
    color: str


def _style() -> Any:
    import matplotlib

    return matplotlib.rc_context(_STYLE)


def _new_figure(size: tuple[float, float], labels: bool) -> tuple[Figure, Axes]:
    """Return a figure with one axes; `labels` leaves room for text on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size)
    width, height = size
    # Margins in inches.
    left = 0.52
    right = 0.95 if labels else 0.12
    bottom = 0.36
    top = 0.14
    box = (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
    return figure, figure.add_axes(box)


def _finish(axes: Axes, x_axis: Axis, y_axis: Axis) -> None:
    """Set limits, few round ticks, and the label of the x axis."""
    axes.set_ylim(y_axis.low, y_axis.high)
    axes.set_yticks(y_axis.ticks, y_axis.labels)
    margin = 0.02 * (x_axis.high - x_axis.low)
    axes.set_xlim(x_axis.low - margin, x_axis.high + margin)
    axes.set_xticks(x_axis.ticks, x_axis.labels)
    axes.set_xlabel("step", color=MUTED, loc="right", labelpad=1)


def _label_ends(axes: Axes, labels: Sequence[_Label], size: float = 8.5) -> None:
    """Write labels at the right edge beside the ends of lines, moved apart where they overlap."""
    points_per_inch = 72
    height = axes.get_window_extent().height / axes.figure.dpi * points_per_inch
    gap = 1.25 * size / height
    left_edge = axes.get_xlim()[0]
    placed: list[float] = []
    for label in sorted(labels, key=lambda label: label.y):
        display = axes.transData.transform((left_edge, label.y))
        y = float(axes.transAxes.inverted().transform(display)[1])
        y = max(min(y, 0.98), placed[-1] + gap) if placed else min(max(y, 0.02), 0.98)
        placed.append(y)
        text = axes.text(
            1.015,
            y,
            label.text,
            transform=axes.transAxes,
            color=label.color,
            va="center",
            fontsize=size,
        )
        text.set_parse_math(False)  # The names are the user's.
