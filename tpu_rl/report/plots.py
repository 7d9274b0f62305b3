"""Small charts for a run's report, with labels at the lines instead of legends.

Every chart function returns a matplotlib figure; `as_svg` and `save_png` turn it into text or a
file. Figures do not touch the global state of pyplot.
"""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1f2430"
MUTED = "#6b7280"
GRID = "#e6e8ec"
PALE = "#9aa1ab"
REST = "#c3c7cd"
"""Color of the last part of a stacked chart, which is what remains."""
COLORS = ("#2a6496", "#d4762c", "#3a9188", "#b5495b", "#7a6aa8", "#8a8f98")
WIDE = (10.4, 3.1)
SMALL = (5.0, 2.3)
"""Figure sizes in inches. The page shows both at the same scale."""
MAX_POINTS = 500
FEW_VALUES = 8
"""A histogram with at most so many distinct values has one bar per value."""
BINS = 20
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


class Series(NamedTuple):
    """A line: finite `y` [n] over `x` [n], with an optional band from `low` to `high`."""

    label: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None


def as_svg(figure: Figure) -> str:
    """Return the figure as an SVG document. Its text uses the reader's sans-serif font."""
    buffer = io.StringIO()
    with _style():
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    return buffer.getvalue().replace(
        "'DejaVu Sans'", "system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', Arial"
    )


def save_png(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write the figure as a PNG."""
    with _style():
        figure.savefig(path, format="png", dpi=200, facecolor="white")


def line_chart(
    lines: Sequence[Series],
    *,
    size: tuple[float, float] = SMALL,
    percent: bool = False,
    log: bool = False,
) -> Figure:
    """Plot lines over steps. Long noisy lines are pale, with their running mean on top."""
    with _style():
        figure, axes = _new_figure(size, labels=len(lines) > 1)
        labels = []
        for line, color in zip(lines, itertools.cycle(COLORS), strict=False):
            x, y = _thin_out(line.x), _thin_out(line.y)
            if line.low is not None and line.high is not None:
                low, high = _thin_out(line.low), _thin_out(line.high)
                axes.fill_between(x, low, high, color=color, alpha=0.16, linewidth=0)
            smooth = _running_mean(y)
            if smooth is not y:
                axes.plot(x, y, color=color, alpha=0.3, linewidth=0.8)
            axes.plot(x, smooth, color=color, marker="o" if len(x) == 1 else "", markersize=4)
            labels.append(_Label(line.label, float(smooth[-1]), color))
        if log:
            axes.set_yscale("log")
        _finish(axes, percent=percent, log=log)
        if len(lines) > 1:
            _label_ends(axes, labels)
        return figure


def learning_curve(series: Series, *, title: str = "") -> Figure:
    """Plot a share with its interval: points, a band, and the first and last value as labels."""
    with _style():
        figure, axes = _new_figure(WIDE, labels=True)
        color = COLORS[0]
        x, y, low, high = series.x, series.y, series.low, series.high
        if low is not None and high is not None:
            axes.fill_between(x, low, high, color=color, alpha=0.16, linewidth=0)
            if len(x) == 1:
                axes.plot(np.repeat(x, 2), [low[0], high[0]], color=color, alpha=0.4)
        axes.axhline(y[0], color=PALE, linewidth=0.9, linestyle=(0, (4, 4)))
        axes.plot(x, y, color=color, linewidth=2.2, **_POINTS)
        axes.set_ylim(0, min(1.0, 1.15 * np.max(y if high is None else high)))
        _finish(axes, percent=True)
        label_colors = {float(y[0]): MUTED}
        if len(y) > 1:
            label_colors[float(y[-1])] = color  # Equal values share a label.
        labels = [_Label(f"{value:.1%}", value, ink) for value, ink in label_colors.items()]
        _label_ends(axes, labels, size=11)
        axes.text(
            0.005, 0.985, title, transform=axes.transAxes, va="top", fontsize=10, parse_math=False
        )
        return figure


def trade_off(curves: Sequence[Series]) -> Figure:
    """Plot shares over KL divergence in nats, with points and bands."""
    with _style():
        figure, axes = _new_figure(WIDE, labels=True)
        labels = []
        for curve, color in zip(curves, itertools.cycle(COLORS), strict=False):
            if curve.low is not None and curve.high is not None:
                axes.fill_between(
                    curve.x, curve.low, curve.high, color=color, alpha=0.12, linewidth=0
                )
            axes.plot(curve.x, curve.y, color=color, **_POINTS)
            labels.append(_Label(curve.label, float(curve.y[-1]), color))
        _finish(axes, percent=True, x_label="KL, nats")
        _label_ends(axes, labels)
        return figure


def stacked_areas(x: np.ndarray, parts: Sequence[tuple[str, np.ndarray]]) -> Figure:
    """Plot the parts [n] of a whole over steps, the first at the bottom."""
    with _style():
        figure, axes = _new_figure(SMALL, labels=True)
        values = [_thin_out(part) for _, part in parts]
        colors = COLORS[: len(parts) - 1] + (REST,)
        axes.stackplot(_thin_out(x), values, colors=colors, alpha=0.85, linewidth=0)
        tops = np.cumsum([np.mean(part[-max(1, len(part) // 4) :]) for part in values])
        middles = tops - np.diff(tops, prepend=0) / 2
        # One step that compiled would flatten all others.
        total = np.sum(values, axis=0)
        axes.set_ylim(0, min(total.max(), 3 * np.median(total)) * 1.05)
        _finish(axes)
        text_colors = (*colors[:-1], MUTED)
        labels = [
            _Label(name, middle, color)
            for (name, _), middle, color in zip(parts, middles, text_colors, strict=True)
        ]
        _label_ends(axes, labels)
        return figure


def histogram(groups: Sequence[tuple[str, np.ndarray]]) -> Figure:
    """Plot the shares of values in two groups, each (label, values).

    Few distinct values have one bar each; many fall into equal bins.
    """
    with _style():
        figure, axes = _new_figure(SMALL, labels=False)
        distinct = np.unique(np.concatenate([values for _, values in groups]))
        few = len(distinct) <= FEW_VALUES
        edges = np.linspace(distinct[0], distinct[-1], BINS + 1)
        if few:
            places = np.arange(len(distinct))
            width = 0.8 / len(groups)
        else:
            places = (edges[1:] + edges[:-1]) / 2
            width = (edges[1] - edges[0]) * 0.9 / len(groups)
        bar_colors = ("#b7bec8", COLORS[0])
        text_colors = (MUTED, COLORS[0])
        for number, (label, values) in enumerate(groups):
            if few:
                counts = np.array([(values == value).sum() for value in distinct])
            else:
                counts, _ = np.histogram(values, edges)
            offset = (number - (len(groups) - 1) / 2) * width
            shares = counts / len(values)
            axes.bar(places + offset, shares, width * 0.92, color=bar_colors[number])
            axes.text(
                0,
                1.08 - 0.11 * number,
                label,
                transform=axes.transAxes,
                color=text_colors[number],
                va="top",
                fontsize=8.5,
            )
        axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
        _finish(axes, percent=True)
        axes.set_xlabel("reward", color=MUTED)
        axes.grid(False, axis="x")
        if few:
            axes.set_xticks(places, [f"{value:.3g}" for value in distinct])
        return figure


# --- parts of a chart ---

_POINTS: dict[str, Any] = {"marker": "o", "markersize": 4.5, "markeredgecolor": "white"}


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


def _finish(axes: Axes, *, percent: bool = False, log: bool = False, x_label: str = "step") -> None:
    """Set few, round ticks, and the label of the x axis."""
    from matplotlib import ticker

    axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=x_label == "step"))
    axes.margins(x=0.02)
    if log:
        low, high = np.log10(axes.get_ylim())
        axes.set_ylim(10 ** np.floor(low), 10 ** np.ceil(high))
        axes.yaxis.set_major_locator(ticker.LogLocator(numticks=5))
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    else:
        axes.yaxis.set_major_locator(ticker.MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
        axes.yaxis.set_major_formatter(
            ticker.FuncFormatter(_percent_text if percent else _number_text(axes))
        )
    axes.set_xlabel(x_label, color=MUTED, loc="right", labelpad=1)


def _percent_text(value: float, position: int) -> str:
    del position
    return f"{100 * value:.3g}%"


def _number_text(axes: Axes) -> Callable[[float, int], str]:
    """Return a formatter of short numbers: 1.2k, 3M, and exponents where all are tiny."""

    def text(value: float, position: int) -> str:
        del position
        largest = max(abs(limit) for limit in axes.get_ylim())
        if value and largest < 1e-3:
            return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")
        for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if largest >= 2 * size:
                return f"{value / size:.3g}{unit}"
        return f"{value:.4g}"

    return text


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


def _thin_out(values: np.ndarray) -> np.ndarray:
    """Return means over runs of neighbors, at most MAX_POINTS of them."""
    if len(values) <= MAX_POINTS:
        return values
    return np.array([part.mean() for part in np.array_split(values, MAX_POINTS)])


def _running_mean(values: np.ndarray) -> np.ndarray:
    """Return the mean over a centered window of a tenth of all points, shorter at the ends.

    Short series, and smooth ones such as schedules, are returned unchanged.
    """
    total_change = np.abs(np.diff(values)).sum()
    if len(values) < 40 or total_change <= 2.5 * np.ptp(values):
        return values
    half = len(values) // 20
    return np.array([np.mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))])
