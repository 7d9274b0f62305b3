"""Small, quiet line charts for a run's report: thin lines, direct labels, no legends.

Every function returns a matplotlib figure; `as_svg` and `save_png` turn it into text or a file. Figures do not touch
pyplot's global state.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2430", "#6b7280", "#e6e8ec"
COLORS = ("#2a6496", "#d4762c", "#3a9188", "#b5495b", "#7a6aa8", "#8a8f98")
WIDE, SMALL = (10.4, 3.1), (5.0, 2.3)
"""Figure sizes in inches; the page shows both at the same scale."""
MOST_POINTS = 500
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
    """One line: finite `y` [n] over `x` [n], with an optional band from `low` to `high`."""

    label: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None


def as_svg(figure: Figure) -> str:
    """The figure as an SVG document; its text is set in the reader's own sans serif."""
    buffer = io.StringIO()
    with _style():
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    return buffer.getvalue().replace("'DejaVu Sans'", "system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', Arial")


def save_png(figure: Figure, path: str | os.PathLike[str]) -> None:
    with _style():
        figure.savefig(path, format="png", dpi=200, facecolor="white")


def line_chart(
    series: Sequence[Series],
    *,
    size: tuple[float, float] = SMALL,
    percent: bool = False,
    log: bool = False,
) -> Figure:
    """Lines over steps. Long noisy ones are drawn pale, with their running mean on top."""
    with _style():
        figure, axes = _new_figure(size, labels=len(series) > 1)
        ends = []
        for number, one in enumerate(series):
            color = COLORS[number % len(COLORS)]
            x, y, low, high = (_thin_out(values) for values in (one.x, one.y, one.low, one.high))
            if low is not None and high is not None:
                axes.fill_between(x, low, high, color=color, alpha=0.16, linewidth=0)
            smooth = _running_mean(y)
            if smooth is not y:
                axes.plot(x, y, color=color, alpha=0.3, linewidth=0.8)
            axes.plot(x, smooth, color=color, marker="o" if len(x) == 1 else "", markersize=4)
            ends.append((one.label, float(smooth[-1]), color))
        if log:
            axes.set_yscale("log")
        _finish(axes, percent=percent, log=log)
        if len(series) > 1:
            _label_ends(axes, ends)
        return figure


def learning_curve(series: Series, *, title: str = "") -> Figure:
    """A measured share with its interval: points, band, and the first and last value in figures."""
    with _style():
        figure, axes = _new_figure(WIDE, labels=True)
        color = COLORS[0]
        if series.low is not None and series.high is not None:
            axes.fill_between(series.x, series.low, series.high, color=color, alpha=0.16, linewidth=0)
            if len(series.x) == 1:
                axes.plot(np.repeat(series.x, 2), [series.low[0], series.high[0]], color=color, alpha=0.4)
        axes.axhline(series.y[0], color="#9aa1ab", linewidth=0.9, linestyle=(0, (4, 4)))
        axes.plot(series.x, series.y, color=color, linewidth=2.2, marker="o", markersize=4.5, markeredgecolor="white")
        axes.set_ylim(0, min(1.0, 1.15 * np.max(series.y if series.high is None else series.high)))
        _finish(axes, percent=True, log=False)
        values = {float(series.y[0]): MUTED} | {float(value): color for value in series.y[1:][-1:]}
        _label_ends(axes, [(f"{value:.1%}", value, shade) for value, shade in values.items()], size=11)
        axes.text(0.005, 0.985, title, transform=axes.transAxes, va="top", fontsize=10, parse_math=False)
        return figure


def trade_off(series: Sequence[Series]) -> Figure:
    """Shares over what they cost, with points and bands: KL in nats on the x axis."""
    with _style():
        figure, axes = _new_figure(WIDE, labels=True)
        for number, one in enumerate(series):
            color = COLORS[number % len(COLORS)]
            if one.low is not None and one.high is not None:
                axes.fill_between(one.x, one.low, one.high, color=color, alpha=0.12, linewidth=0)
            axes.plot(one.x, one.y, color=color, marker="o", markersize=4.5, markeredgecolor="white")
        _finish(axes, percent=True, log=False, over="KL, nats")
        _label_ends(axes, [(one.label, float(one.y[-1]), COLORS[i % len(COLORS)]) for i, one in enumerate(series)])
        return figure


def stacked_areas(x: np.ndarray, parts: Sequence[tuple[str, np.ndarray]]) -> Figure:
    """Parts [n] of a whole over steps, the first at the bottom."""
    with _style():
        figure, axes = _new_figure(SMALL, labels=True)
        values = [_thin_out(part) for _, part in parts]
        colors = COLORS[: len(parts) - 1] + ("#c3c7cd",)
        axes.stackplot(_thin_out(x), values, colors=colors, alpha=0.85, linewidth=0)
        tops = np.cumsum([np.mean(part[-max(1, len(part) // 4) :]) for part in values])
        middles = tops - np.diff(tops, prepend=0) / 2
        # One step that compiled would flatten all others.
        total = np.sum(values, axis=0)
        axes.set_ylim(0, min(total.max(), 3 * np.median(total)) * 1.05)
        _finish(axes, percent=False, log=False)
        inks = (*colors[:-1], MUTED)
        _label_ends(axes, [(label, y, ink) for (label, _), y, ink in zip(parts, middles, inks, strict=True)])
        return figure


def histogram(groups: Sequence[tuple[str, np.ndarray]]) -> Figure:
    """Shares of values, one colour a group: bars at each value where there are few, else in equal bins."""
    with _style():
        figure, axes = _new_figure(SMALL, labels=False)
        everything = np.unique(np.concatenate([values for _, values in groups]))
        few = len(everything) <= 8
        edges = np.linspace(everything[0], everything[-1], 21)
        places = np.arange(len(everything)) if few else (edges[1:] + edges[:-1]) / 2
        width = 0.8 / len(groups) if few else (edges[1] - edges[0]) * 0.9 / len(groups)
        colors = ("#b7bec8", COLORS[0])
        for number, (label, values) in enumerate(groups):
            counts = [(values == value).sum() for value in everything] if few else np.histogram(values, edges)[0]
            offset = (number - (len(groups) - 1) / 2) * width
            axes.bar(places + offset, np.asarray(counts) / len(values), width * 0.92, color=colors[number])
            color = MUTED if number == 0 else COLORS[0]
            axes.text(0, 1.08 - 0.11 * number, label, transform=axes.transAxes, color=color, va="top", fontsize=8.5)
        axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
        _finish(axes, percent=True, log=False)
        axes.set_xlabel("reward", color=MUTED)
        axes.grid(False, axis="x")
        if few:
            axes.set_xticks(places, [f"{value:.3g}" for value in everything])
        return figure


# --- parts -------------------------------------------------------------------------------------------------------


def _style() -> Any:
    import matplotlib

    return matplotlib.rc_context(_STYLE)


def _new_figure(size: tuple[float, float], labels: bool) -> tuple[Figure, Axes]:
    """A figure with one axes; `labels` leaves room for words at the right (sizes in inches)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size)
    width, height = size
    left, right, bottom, top = 0.52, 0.95 if labels else 0.12, 0.36, 0.14
    box = (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
    return figure, figure.add_axes(box)


def _finish(axes: Axes, *, percent: bool, log: bool, over: str = "step") -> None:
    """Few, round ticks; a word under the axis's end."""
    from matplotlib import ticker

    axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=over == "step"))
    axes.margins(x=0.02)
    if log:
        low, high = np.log10(axes.get_ylim())
        axes.set_ylim(10 ** np.floor(low), 10 ** np.ceil(high))
        axes.yaxis.set_major_locator(ticker.LogLocator(numticks=5))
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    else:
        axes.yaxis.set_major_locator(ticker.MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(_percent_text if percent else _number_text(axes)))
    axes.set_xlabel(over, color=MUTED, loc="right", labelpad=1)


def _percent_text(value: float, position: int) -> str:
    del position
    return f"{100 * value:.3g}%"


def _number_text(axes: Axes) -> Callable[[float, int], str]:
    """Short numbers: 1.2k, 3M; exponents where all are tiny."""

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


def _label_ends(axes: Axes, ends: Sequence[tuple[str, float, str]], size: float = 8.5) -> None:
    """Words at the right edge beside the lines' ends, pushed apart where they would overlap."""
    height = axes.get_window_extent().height / axes.figure.dpi * 72  # points
    gap = 1.25 * size / height
    limits = axes.transData
    placed: list[float] = []
    for label, y, color in sorted(ends, key=lambda end: end[1]):
        raw = float(axes.transAxes.inverted().transform(limits.transform((axes.get_xlim()[0], y)))[1])
        position = min(max(raw, 0.02), 0.98) if not placed else max(min(raw, 0.98), placed[-1] + gap)
        placed.append(position)
        words = axes.text(1.015, position, label, transform=axes.transAxes, color=color, va="center", fontsize=size)
        words.set_parse_math(False)  # names are the user's


def _thin_out(values: np.ndarray | None) -> Any:
    """Means over runs of neighbours, so that at most MOST_POINTS remain."""
    if values is None or len(values) <= MOST_POINTS:
        return values
    return np.array([part.mean() for part in np.array_split(values, MOST_POINTS)])


def _running_mean(values: np.ndarray) -> np.ndarray:
    """The mean over a centred window of a tenth of all points, shorter at the ends.

    Series that are short, or that go hardly further than there and back once (schedules), stay as they are.
    """
    if len(values) < 40 or np.abs(np.diff(values)).sum() <= 2.5 * np.ptp(values):
        return values
    half = len(values) // 20
    return np.array([np.mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))])
