"""Charts of the page: inline SVG for lines and areas, HTML for text.

The SVG of a chart is stretched to the width that its figure has, and strokes are not. Text is HTML,
so it has one size on every screen. Below the pointer a chart shows the numbers of a point. The
style sheet does that: no chart needs a script, and colors come from the style sheet, so there is a
dark mode. templates/parts.html writes what is drawn here. Places are from 0 to 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tpu_rl.report import axes, html_page
from tpu_rl.report.axes import Axis
from tpu_rl.report.series import Series, running_mean, thin_out

NUM_COLORS = 6
MAX_HOVERS = 120
"""Places of a chart that show their numbers, at most; each stands for some neighboring points."""
MAX_DOTS = 60
"""A learning curve with more points has no dots."""
HEIGHT = 170
TALL_HEIGHT = 250
"""Heights of a chart in pixels, as in the style sheet."""
LINE_HEIGHT = 15
FEW_VALUES = 8
"""A histogram with at most so many distinct values has one bar per value."""
BINS = 20


class Mark(NamedTuple):
    """A path of SVG."""

    classes: str
    """Classes of the style sheet."""
    path: str
    """Its points, in percent. The vertical axis of SVG goes down."""


class Label(NamedTuple):
    """Text at the right edge, beside the end of a line."""

    text: str
    place: float
    color: str
    """A class of the style sheet."""


class Hover(NamedTuple):
    """The numbers to show where the pointer is near a place of the horizontal axis."""

    place: float
    text: str
    link: str = ""
    """The target of a click, such as "#step-40"; "" for none."""


class Drawing(NamedTuple):
    """A chart as its template reads it."""

    marks: Sequence[Mark]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    """(place from the top, text)."""
    labels: list[Label]
    strips: list[tuple[Hover, float, float]]
    """(what to show, left end, right end), beside each other."""
    tall: bool
    """True if it has a row of the page for itself."""
    x_name: str
    keys: Sequence[tuple[str, str]]
    """The legend: (class of the color, text)."""


def line_chart(
    lines: Sequence[Series],
    *,
    percent: bool = False,
    log: bool = False,
    resolution: float = axes.RESOLUTION,
    tall: bool = False,
    pages: Sequence[int] = (),
    dots: bool = False,
    headline: bool = False,
    x_name: str = "step",
) -> Drawing:
    """Draw lines over steps. Long noisy lines are pale, with their running mean on top.

    Args:
        lines: what to draw, without an order.
        percent: whether the values are shares.
        log: whether the vertical axis is logarithmic; then all values are positive.
        resolution: see `axes.value_axis`.
        tall: whether the chart has a row of the page for itself.
        pages: steps with a page; a click on a point leads to the nearest of them.
        dots: draw the points of short lines.
        headline: draw one line whole, with its first and last value as labels.
        x_name: what the lines are over, if not steps.
    """
    x = np.concatenate([line.x for line in lines])
    values = np.concatenate([line.values() for line in lines])
    x_axis = axes.step_axis(x) if x_name == "step" else axes.value_axis(x, from_zero=True)
    y_axis = (
        axes.log_axis(values)
        if log
        else axes.value_axis(
            values,
            percent=percent,
            resolution=resolution,
            from_zero=headline and float(values.min()) >= 0,
        )
    )
    marks = []
    labels = []
    for number, line in enumerate(line.thinned() for line in lines):
        color = color_of(number)
        x, y = x_axis.place(line.x), y_axis.place(line.y)
        if headline:
            marks.append(_path(np.array([0.0, 1.0]), np.repeat(y[0], 2), "first"))
        marks += _band(line, x, y_axis, color)
        smooth = line.y
        if not log and not headline:
            smooth = running_mean(line.y, noise=0.05 * (y_axis.high - y_axis.low))
        if smooth is not line.y:
            marks.append(_path(x, y, f"raw {color}"))
            y = y_axis.place(smooth)
        if len(x) > 1:
            marks.append(_path(x, y, f"main {color}" if headline else color))
        if len(x) == 1 or (dots and len(x) <= MAX_DOTS):
            marks.append(_dots(x, y, color))
        labels.append(Label(line.label, float(y[-1]), color))
        if headline:
            first, last = (_number(float(value), percent) for value in (line.y[0], line.y[-1]))
            labels = [Label(first, float(y[0]), ""), Label(last, float(y[-1]), color)]
            labels = labels[: 1 + (line.y[0] != line.y[-1])]  # Equal values share a label.
    hovers = _line_hovers(lines, x_axis, percent=percent, pages=pages, x_name=x_name)
    shown = labels if headline or dots or len(lines) > 1 else []
    return _chart(x_axis, y_axis, marks, shown, hovers, tall=tall, x_name=x_name)


def stacked_areas(
    x: np.ndarray, parts: Sequence[tuple[str, np.ndarray]], pages: Sequence[int] = ()
) -> Drawing:
    """Draw the parts [n] of a whole over steps, the first at the bottom, the last one gray.

    Args:
        x: the steps [n].
        parts: each (label, values), in seconds.
        pages: see `line_chart`.
    """
    x_axis = axes.step_axis(x)
    thin_x = x_axis.place(thin_out(x))
    values = [thin_out(part) for _, part in parts]
    tops = np.cumsum(values, axis=0)
    # One step that compiled would flatten all others.
    limit = min(tops[-1].max(), 3 * float(np.median(tops[-1])))
    y_axis = axes.value_axis(np.array([0.0, limit]))
    colors = [*(color_of(i) for i in range(len(parts) - 1)), "rest"]
    bottoms = [np.zeros_like(tops[0]), *tops[:-1]]
    marks = [
        _area(thin_x, y_axis.place(bottom), y_axis.place(top), f"stack {color}")
        for bottom, top, color in zip(bottoms, tops, colors, strict=True)
    ]
    late = max(1, len(thin_x) // 4)
    heights = np.array([np.mean(part[-late:]) for part in values])
    middles = y_axis.place(np.cumsum(heights) - heights / 2)
    labels = [
        Label(name, float(middle), color)
        for (name, _), middle, color in zip(parts, middles, colors, strict=True)
    ]
    lines = [Series(name, x, part) for name, part in parts]
    return _chart(x_axis, y_axis, marks, labels, _line_hovers(lines, x_axis, pages=pages))


def histogram(groups: Sequence[tuple[str, np.ndarray]], x_name: str) -> Drawing:
    """Draw the shares of values in two groups, each (label, values).

    Few distinct values have one bar each; many fall into equal bins with round borders.
    """
    # Rewards are float32: what differs by rounding is one value.
    groups = [(label, np.round(values, 6)) for label, values in groups]
    distinct = np.unique(np.concatenate([values for _, values in groups]))
    if len(distinct) <= FEW_VALUES:
        counts = [[int((values == value).sum()) for value in distinct] for _, values in groups]
        names = axes.names_of(distinct)
        ticks = dict(enumerate(names))
    else:
        width = axes.nice_step((distinct[-1] - distinct[0]) / BINS)
        # A value at an edge may differ from it by rounding.
        first = math.floor(distinct[0] / width + 1e-6)
        last = math.ceil(distinct[-1] / width - 1e-6)
        edges = width * np.arange(first, last + 1)
        edge_names = axes.names_of(edges)
        edges[0] = min(edges[0], distinct[0])
        edges[-1] = max(edges[-1], distinct[-1])
        counts = [np.histogram(values, edges)[0].tolist() for _, values in groups]
        names = [f"{low} to {high}" for low, high in itertools.pairwise(edge_names)]
        every = math.ceil((last - first) / 5)
        ticks = {i - 0.5: name for i, name in enumerate(edge_names) if (first + i) % every == 0}
    shares = [
        np.array(group_counts) / len(values)
        for group_counts, (_, values) in zip(counts, groups, strict=True)
    ]
    y_axis = axes.value_axis(np.concatenate(shares), percent=True, from_zero=True)
    slot = 1 / len(names)
    width = 0.8 * slot / len(groups)
    colors = ("rest", color_of(0))
    marks = []
    for number, (group_shares, color) in enumerate(zip(shares, colors, strict=False)):
        for i, top in enumerate(y_axis.place(group_shares)):
            left = (i + 0.1) * slot + number * width
            edges_x = np.array([left, left + width])
            marks.append(_area(edges_x, np.zeros(2), np.repeat(top, 2), f"bar {color}"))
    x_axis = Axis(-0.5, len(names) - 0.5, tuple(ticks), tuple(ticks.values()))
    hovers = [
        Hover(
            (i + 0.5) * slot,
            f"{x_name} {name} · "
            + " · ".join(
                f"{label}: {_number(group_shares[i], percent=True)}"
                for (label, _), group_shares in zip(groups, shares, strict=True)
            ),
        )
        for i, name in enumerate(names)
    ]
    keys = [(color, label) for (label, _), color in zip(groups, colors, strict=False)]
    return _chart(x_axis, y_axis, marks, [], hovers, x_name=x_name, keys=keys)


def color_of(number: int) -> str:
    """Return the class of a line's color."""
    return f"c{number % NUM_COLORS}"


# --- marks ---


def _chart(
    x_axis: Axis,
    y_axis: Axis,
    marks: Sequence[Mark],
    labels: Sequence[Label],
    hovers: Sequence[Hover],
    *,
    tall: bool = False,
    x_name: str = "step",
    keys: Sequence[tuple[str, str]] = (),
) -> Drawing:
    x_places = x_axis.place(np.array(x_axis.ticks))
    y_places = 1 - y_axis.place(np.array(y_axis.ticks))
    return Drawing(
        marks,
        list(zip(x_places, x_axis.labels, strict=True)),
        list(zip(y_places, y_axis.labels, strict=True)),
        _apart(labels, LINE_HEIGHT / (TALL_HEIGHT if tall else HEIGHT)),
        _strips(hovers),
        tall,
        x_name,
        keys,
    )


def _points(x: np.ndarray, y: np.ndarray) -> list[str]:
    percent = html_page.place
    return [f"{percent(a)} {percent(1 - b)}" for a, b in zip(x, y, strict=True)]


def _path(x: np.ndarray, y: np.ndarray, classes: str) -> Mark:
    return Mark(f"line {classes}", f"M{'L'.join(_points(x, y))}")


def _dots(x: np.ndarray, y: np.ndarray, color: str) -> Mark:
    """Draw dots: lines without length, whose round ends no stretching deforms."""
    return Mark(f"dots {color}", "".join(f"M{point}h.01" for point in _points(x, y)))


def _area(x: np.ndarray, low: np.ndarray, high: np.ndarray, classes: str) -> Mark:
    outline = _points(x, high) + _points(x, low)[::-1]
    return Mark(f"area {classes}", f"M{'L'.join(outline)}Z")


def _band(line: Series, x: np.ndarray, y_axis: Axis, color: str) -> list[Mark]:
    """Draw the area between the limits of a line over x [n], if it has some."""
    if line.band is None:
        return []
    low, high = map(y_axis.place, line.band)
    if len(x) == 1:
        return [_path(np.repeat(x, 2), np.array([low[0], high[0]]), f"raw {color}")]
    return [_area(x, low, high, f"band {color}")]


# --- text ---


def _apart(labels: Sequence[Label], gap: float) -> list[Label]:
    """Move labels apart where they overlap."""
    # From the bottom; the labels above must fit between this one and the top.
    free = 0.0
    apart = []
    for index, label in enumerate(sorted(labels, key=lambda label: label.place)):
        most = 1 - gap * (len(labels) - 1 - index)
        place = max(min(label.place, most), free)
        free = place + gap
        apart.append(label._replace(place=place))
    return apart


def _line_hovers(
    lines: Sequence[Series],
    x_axis: Axis,
    *,
    percent: bool = False,
    pages: Sequence[int] = (),
    x_name: str = "step",
) -> list[Hover]:
    """Return the numbers of all lines at each place that one of them has, or of some places."""
    steps = np.unique(np.concatenate([line.x for line in lines]))
    hovers = []
    for group in np.array_split(steps, min(len(steps), MAX_HOVERS)):
        first, last = group[0], group[-1]
        middle = (first + last) / 2
        name = f"step {first:,.0f}" if first == last else f"steps {first:,.0f} to {last:,.0f}, mean"
        texts = [name if x_name == "step" else f"{x_name}: {middle:.3g}"]
        for line in lines:
            inside = (line.x >= first) & (line.x <= last)
            if inside.any():
                means = (values[inside].mean() for values in (line.y, *(line.band or ())))
                value, *limits = (_number(float(mean), percent) for mean in means)
                band = f" ({limits[0]} to {limits[1]})" if limits else ""
                texts.append(f"{line.label} {value}{band}".lstrip())
        nearest = min(pages, key=lambda step, of=middle: abs(step - of), default=None)
        link = "" if nearest is None else f"#step-{nearest}"
        hovers.append(Hover(float(x_axis.place(middle)), " · ".join(texts), link))
    return hovers


def _number(value: float, percent: bool = False) -> str:
    return f"{100 * value:.1f}%" if percent else f"{value:.4g}"


def _strips(hovers: Sequence[Hover]) -> list[tuple[Hover, float, float]]:
    """Return an invisible strip per place, which ends halfway to its neighbors."""
    hovers = sorted(hovers, key=lambda hover: hover.place)
    middles = [(a.place + b.place) / 2 for a, b in itertools.pairwise(hovers)]
    return list(zip(hovers, [0.0, *middles], [*middles, 1.0], strict=True))
