"""Axes of charts: limits and ticks that differ, fit what is measured, and keep noise flat."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

RESOLUTION = 1e-7
"""The height of an axis is at least this: smaller differences are rounding of float32."""
RELATIVE_RESOLUTION = 0.01
"""The height of an axis is at least this share of the largest magnitude on it."""
SHARE_RESOLUTION = 0.01
"""The height of an axis of shares is at least this: one percentage point."""


class Axis(NamedTuple):
    """The limits of an axis, and its ticks with their labels."""

    low: float
    high: float
    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    is_log: bool = False

    def place(self, values: np.ndarray) -> np.ndarray:
        """Return the places of values on the axis: 0 is its low end, and 1 its high end."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, values = math.log10(low), math.log10(high), np.log10(values)
        return np.clip((np.asarray(values, float) - low) / (high - low), 0.0, 1.0)


def value_axis(
    values: np.ndarray,
    *,
    percent: bool = False,
    resolution: float = RESOLUTION,
    from_zero: bool = False,
) -> Axis:
    """Return an axis that ends at ticks.

    Args:
        values: the numbers to show.
        percent: whether they are shares, which an axis from 0 % to 100 % can show.
        resolution: the least height of the axis.
        from_zero: whether the axis begins at 0.
    """
    low, high = float(np.min(values)), float(np.max(values))
    is_positive = low >= 0
    magnitude = max(abs(low), abs(high))
    height = max(RELATIVE_RESOLUTION * magnitude, SHARE_RESOLUTION if percent else resolution)
    # All values are 0, and the chart has no resolution of its own.
    height = height or 1.0
    if from_zero:
        low = 0.0
    if high - low < height:
        low = (low + high - height) / 2
        if is_positive or percent:
            low = max(low, 0.0)
        if percent:
            low = min(low, 1.0 - height)
        high = low + height
    step = nice_step((high - low) / 4)
    first = math.floor(low / step + 1e-6)
    last = math.ceil(high / step - 1e-6)
    if percent:
        # Shares are at most 1, whatever the rounding of those that a run computed.
        first = max(first, 0)
        last = max(min(last, round(1 / step)), first + 1)
    ticks = tuple(number * step for number in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], ticks, labels_of(ticks, step, percent))


def log_axis(values: np.ndarray) -> Axis:
    """Return an axis of whole powers of ten around positive values."""
    low = math.floor(math.log10(np.min(values)))
    high = max(math.ceil(math.log10(np.max(values))), low + 1)
    stride = -(-(high - low) // 5)
    powers = range(low, high + 1, stride)
    ticks = tuple(10.0**power for power in powers)
    labels = tuple(f"{10.0**power:g}" if -3 <= power <= 3 else f"1e{power}" for power in powers)
    return Axis(10.0**low, 10.0**high, ticks, labels, is_log=True)


def step_axis(steps: np.ndarray) -> Axis:
    """Return an axis from the first to the last step, with at most 7 ticks at round steps."""
    low, high = float(np.min(steps)), float(np.max(steps))
    if low == high:
        return Axis(low - 0.5, high + 0.5, (low,), (f"{low:,.0f}",))
    step = max(1.0, nice_step((high - low) / 6))
    if step == 2.5:
        step = 5.0
    ticks = tuple(n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1))
    return Axis(low, high, ticks, tuple(f"{tick:,.0f}" for tick in ticks))


def nice_step(least: float) -> float:
    """Return the least of 1, 2, 2.5 and 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    # 10.0 ** -7 is not exactly 1e-7: a small tolerance keeps a round `least`.
    return next(f * power for f in (1.0, 2.0, 2.5, 5.0, 10.0) if f * power >= least * (1 - 1e-9))


def labels_of(ticks: tuple[float, ...], step: float, percent: bool = False) -> tuple[str, ...]:
    """Return the ticks' labels with as many digits as the distance of ticks needs."""
    if percent:
        digits = decimals(100 * step)
        return tuple(f"{100 * tick:.{digits}f}%" for tick in ticks)
    largest = max(abs(tick) for tick in ticks)
    unit, suffix = 1.0, ""
    if largest < 1e-3:
        exponent = math.floor(math.log10(largest) + 1e-9)
        unit, suffix = 10.0**exponent, f"e{exponent}"
    for size, name in ((1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T")):
        if largest >= 2 * size:
            unit, suffix = size, name
    digits = decimals(step / unit)
    return tuple(
        f"{tick / unit:.{digits}f}{suffix}" if abs(tick) > step / 2 else "0" for tick in ticks
    )


def names_of(values: np.ndarray) -> list[str]:
    """Return different numbers as texts that differ, with at least three digits."""
    for digits in range(3, 12):
        names = [f"{value:.{digits}g}" for value in values]
        if len(set(names)) == len(names):
            return names
    return [repr(float(value)) for value in values]


def decimals(step: float) -> int:
    """Return the number of decimals that tell multiples of `step` apart."""
    for digits in range(12):
        if abs(round(step, digits) - step) < 1e-6 * step:
            return digits
    return 12
