"""Charts of the page: inline SVG for lines and areas, HTML for text.

The SVG of a chart is stretched to the width that its figure has, and strokes are not. Text is HTML,
so it has one size on every screen. Below the pointer a chart shows the numbers of a point. The
style sheet of `html_page` does that: no chart needs a script, and colors come from the style sheet,
so there is a dark mode.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tpu_rl.report import axes, completion_pages
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


def line_chart(
    lines: Sequence[Series],
    *,
    percent: bool = False,
    log: bool = False,
    resolution: float = axes.RESOLUTION,
    tall: bool = False,
    pages: Sequence[int] = (),
) -> str:
    """Return lines over steps. Long noisy lines are pale, with their running mean on top.

    Args:
        lines: what to draw, without an order.
        percent: whether the values are shares.
        log: whether the vertical axis is logarithmic; then all values are positive.
        resolution: see `axes.value_axis`.
        tall: whether the chart has a row of the page for itself.
        pages: steps with a page; a click on a point leads to the nearest of them.
    """
    x_axis = axes.step_axis(np.concatenate([line.x for line in lines]))
    values = np.concatenate([line.values() for line in lines])
    y_axis = (
        axes.log_axis(values)
        if log
        else axes.value_axis(values, percent=percent, resolution=resolution)
    )
    marks = []
    labels = []
    for number, line in enumerate(line.thinned() for line in lines):
        color = color_of(number)
        x, y = x_axis.place(line.x), line.y
        marks.append(_band(line, x, y_axis, color))
        smooth = y if log else running_mean(y, noise=0.05 * (y_axis.high - y_axis.low))
        if smooth is not y:
            marks.append(_path(x, y_axis.place(y), f"raw {color}"))
        places = y_axis.place(smooth)
        marks.append(_dots(x, places, color) if len(x) == 1 else _path(x, places, color))
        labels.append(Label(line.label, float(places[-1]), color))
    return _chart(
        x_axis,
        y_axis,
        marks,
        labels if len(lines) > 1 else [],
        _line_hovers(lines, x_axis, percent=percent, pages=pages),
        tall=tall,
    )


def learning_curve(series: Series, pages: Sequence[int] = (), *, percent: bool = True) -> str:
    """Return values with their intervals: dots, a band, and the first and last value as labels.

    For `pages` and `percent` see `line_chart`.
    """
    x_axis = axes.step_axis(series.x)
    from_zero = float(series.values().min()) >= 0
    y_axis = axes.value_axis(series.values(), percent=percent, from_zero=from_zero)
    shown = series.thinned()
    x, y = x_axis.place(shown.x), y_axis.place(shown.y)
    first, last = float(series.y[0]), float(series.y[-1])
    marks = [
        _path(np.array([0.0, 1.0]), np.repeat(y[0], 2), "first"),
        _band(shown, x, y_axis, color_of(0)),
        _path(x, y, f"main {color_of(0)}"),
    ]
    if len(x) <= MAX_DOTS:
        marks.append(_dots(x, y, color_of(0)))
    labels = [Label(_number(first, percent), float(y[0]), "")]
    if last != first:  # Equal values share a label.
        labels.append(Label(_number(last, percent), float(y[-1]), color_of(0)))
    hovers = _line_hovers([series], x_axis, percent=percent, pages=pages)
    return _chart(x_axis, y_axis, marks, labels, hovers, tall=True)


def trade_off(curves: Sequence[Series]) -> str:
    """Return shares over KL divergence in nats, with dots and bands."""
    x_axis = axes.value_axis(np.concatenate([curve.x for curve in curves]), from_zero=True)
    values = np.concatenate([curve.values() for curve in curves])
    y_axis = axes.value_axis(values, percent=True)
    marks = []
    labels = []
    hovers = []
    for number, curve in enumerate(curves):
        color = color_of(number)
        x, y = x_axis.place(curve.x), y_axis.place(curve.y)
        marks += [_band(curve, x, y_axis, color), _path(x, y, color), _dots(x, y, color)]
        labels.append(Label(curve.label, float(y[-1]), color))
        for i, place in enumerate(x):
            text = f"KL {curve.x[i]:.3g} nats · {_number_at(curve, i, percent=True)}"
            hovers.append(Hover(float(place), text))
    return _chart(x_axis, y_axis, marks, labels, hovers, tall=True, x_name="KL, nats")


def stacked_areas(
    x: np.ndarray, parts: Sequence[tuple[str, np.ndarray]], pages: Sequence[int] = ()
) -> str:
    """Return the parts [n] of a whole over steps, the first at the bottom, the last one gray.

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


def histogram(groups: Sequence[tuple[str, np.ndarray]], x_name: str) -> str:
    """Return the shares of values in two groups, each (label, values).

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
    legend = "".join(
        f'<span class="key {color}">{html.escape(label)}</span>'
        for (label, _), color in zip(groups, colors, strict=False)
    )
    chart = _chart(x_axis, y_axis, marks, [], hovers, x_name=x_name)
    return f'<div class="keys">{legend}</div>{chart}'


def color_of(number: int) -> str:
    """Return the class of a line's color."""
    return f"c{number % NUM_COLORS}"


# --- marks ---


def _chart(
    x_axis: Axis,
    y_axis: Axis,
    marks: Sequence[str],
    labels: Sequence[Label],
    hovers: Sequence[Hover],
    *,
    tall: bool = False,
    x_name: str = "step",
) -> str:
    """Return a chart as HTML. Texts of labels, hovers and ticks are escaped here."""
    y_places = 1 - y_axis.place(np.array(y_axis.ticks))
    x_places = x_axis.place(np.array(x_axis.ticks))
    grid = "".join(f"M0 {_percent(place)}H100" for place in y_places)
    texts = [
        f'<span class="y" style="top:{_percent(place)}%">{html.escape(text)}</span>'
        for place, text in zip(y_places, y_axis.labels, strict=True)
    ]
    texts += [
        f'<span class="x" style="left:{_percent(place)}%">{html.escape(text)}</span>'
        for place, text in zip(x_places, x_axis.labels, strict=True)
    ]
    texts.append(f'<span class="name">{html.escape(x_name)}</span>')
    texts += _label_texts(labels, TALL_HEIGHT if tall else HEIGHT)
    classes = " ".join(filter(None, ["chart", "tall" if tall else "", "ends" if labels else ""]))
    return (
        f'<div class="{classes}"><svg viewBox="0 0 100 100" preserveAspectRatio="none"'
        f' aria-hidden="true"><path class="grid" d="{grid}"/>{"".join(marks)}</svg>'
        f"{''.join(texts)}{_hover_zones(hovers)}</div>"
    )


def _percent(place: float) -> str:
    return f"{100 * place:.2f}".rstrip("0").rstrip(".")


def _points(x: np.ndarray, y: np.ndarray) -> list[str]:
    """Return the points of a path. The vertical axis of SVG goes down."""
    return [f"{_percent(a)} {_percent(1 - b)}" for a, b in zip(x, y, strict=True)]


def _path(x: np.ndarray, y: np.ndarray, classes: str) -> str:
    return f'<path class="line {classes}" d="M{"L".join(_points(x, y))}"/>'


def _dots(x: np.ndarray, y: np.ndarray, color: str) -> str:
    """Return dots: lines without length, whose round ends no stretching deforms."""
    dots = "".join(f"M{point}h.01" for point in _points(x, y))
    return f'<path class="dots {color}" d="{dots}"/>'


def _area(x: np.ndarray, low: np.ndarray, high: np.ndarray, classes: str) -> str:
    outline = _points(x, high) + _points(x, low)[::-1]
    return f'<path class="area {classes}" d="M{"L".join(outline)}Z"/>'


def _band(line: Series, x: np.ndarray, y_axis: Axis, color: str) -> str:
    """Return the area between the limits of a line over x [n]; empty if it has none."""
    if line.band is None:
        return ""
    low, high = map(y_axis.place, line.band)
    if len(x) == 1:
        return _path(np.repeat(x, 2), np.array([low[0], high[0]]), f"raw {color}")
    return _area(x, low, high, f"band {color}")


# --- text ---


def _label_texts(labels: Sequence[Label], height: float) -> list[str]:
    """Return labels at the right edge beside the ends of lines, moved apart where they overlap."""
    gap = LINE_HEIGHT / height
    texts = []
    # From the bottom; the labels above must fit between this one and the top.
    free = 0.0
    for index, label in enumerate(sorted(labels, key=lambda label: label.place)):
        most = 1 - gap * (len(labels) - 1 - index)
        place = max(min(label.place, most), free)
        free = place + gap
        text = html.escape(label.text)
        classes = f"end {label.color}".rstrip()
        texts.append(
            f'<span class="{classes}" style="top:{_percent(1 - place)}%" title="{text}">'
            f"{text}</span>"
        )
    return texts


def _line_hovers(
    lines: Sequence[Series], x_axis: Axis, *, percent: bool = False, pages: Sequence[int] = ()
) -> list[Hover]:
    """Return the numbers of all lines at each step that one of them has, or of some steps."""
    steps = np.unique(np.concatenate([line.x for line in lines]))
    hovers = []
    for group in np.array_split(steps, min(len(steps), MAX_HOVERS)):
        first, last = group[0], group[-1]
        numbers = []
        for line in lines:
            inside = (line.x >= first) & (line.x <= last)
            if inside.any():
                mean = line.map(lambda values, of=inside: values[of].mean(keepdims=True))
                numbers.append(_number_at(mean, 0, percent))
        name = f"step {first:,.0f}" if first == last else f"steps {first:,.0f} to {last:,.0f}, mean"
        place = float(x_axis.place(np.array([(first + last) / 2]))[0])
        link = ""
        if len(pages):
            link = f"#step-{completion_pages.nearest(pages, (first + last) / 2)}"
        hovers.append(Hover(place, " · ".join([name, *numbers]), link))
    return hovers


def _number_at(line: Series, index: int, percent: bool = False) -> str:
    """Return a point of a line as text, with its label and limits."""
    text = f"{line.label} {_number(line.y[index], percent)}".lstrip()
    if line.band is None:
        return text
    low, high = (_number(limits[index], percent) for limits in line.band)
    return f"{text} ({low} to {high})"


def _number(value: float, percent: bool = False) -> str:
    return f"{100 * value:.1f}%" if percent else f"{value:.4g}"


def _hover_zones(hovers: Sequence[Hover]) -> str:
    """Return one invisible strip per place, which ends halfway to its neighbors.

    Neighbors with the same link are inside one link.
    """
    hovers = sorted(hovers, key=lambda hover: hover.place)
    borders = [
        0.0,
        *((a.place + b.place) / 2 for a, b in zip(hovers, hovers[1:], strict=False)),
        1.0,
    ]
    zones = list(zip(hovers, borders, borders[1:], strict=False))
    parts = []
    for link, group in itertools.groupby(zones, key=lambda zone: zone[0].link):
        strips = "".join(_hover_zone(*zone) for zone in group)
        # Not in the order of the Tab key: the same pages have links of their own.
        parts.append(f'<a href="{link}" tabindex="-1">{strips}</a>' if link else strips)
    return "".join(parts)


def _hover_zone(hover: Hover, left: float, right: float) -> str:
    width = max(right - left, 1e-4)
    side = ' class="r"' if hover.place > 0.5 else ""
    guide = _percent((hover.place - left) / width)
    return (
        f'<i{side} style="left:{_percent(left)}%;width:{_percent(width)}%">'
        f'<u style="left:{guide}%"></u><b>{html.escape(hover.text)}</b></i>'
    )
