"""Series of measured values, and what makes long ones readable."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

MAX_POINTS = 500


class Series(NamedTuple):
    """A line: finite `y` [n] over `x` [n], with an optional band from `low` to `high`."""

    label: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None

    def values(self) -> np.ndarray:
        """Return all numbers that a vertical axis has to show."""
        return np.concatenate([part for part in (self.y, self.low, self.high) if part is not None])

    def thinned(self) -> Series:
        """Return means over runs of neighbors, at most `MAX_POINTS` of them."""
        low = None if self.low is None else thin_out(self.low)
        high = None if self.high is None else thin_out(self.high)
        return Series(self.label, thin_out(self.x), thin_out(self.y), low, high)


def thin_out(values: np.ndarray, max_points: int = MAX_POINTS) -> np.ndarray:
    """Return means over runs of neighbors, at most `max_points` of them."""
    if len(values) <= max_points:
        return values
    return np.array([part.mean() for part in np.array_split(values, max_points)])


def running_mean(values: np.ndarray, noise: float = 0.0) -> np.ndarray:
    """Return the mean over a centered window of a tenth of all points, shorter at the ends.

    Short series, smooth ones such as schedules, and ones that vary by less than `noise` are
    returned unchanged.
    """
    total_change = np.abs(np.diff(values)).sum()
    spread = np.ptp(values) if len(values) else 0.0
    if len(values) < 40 or spread <= noise or total_change <= 2.5 * spread:
        return values
    half = len(values) // 20
    return np.array([np.mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))])
