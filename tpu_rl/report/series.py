"""Series of measured values, and means that make long ones readable."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

MAX_POINTS = 500


class Series(NamedTuple):
    """A line: finite `y` [n] over `x` [n], with an optional band around it."""

    label: str
    x: np.ndarray
    y: np.ndarray
    band: tuple[np.ndarray, np.ndarray] | None = None
    """The lower and the upper limits, each [n]."""

    def values(self) -> np.ndarray:
        """Return all numbers that a vertical axis has to show."""
        return np.concatenate([self.y, *(self.band or ())])

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> Series:
        """Apply a function [n] -> [m] to the coordinates and the limits."""
        band = self.band and (function(self.band[0]), function(self.band[1]))
        return Series(self.label, function(self.x), function(self.y), band)

    def thinned(self) -> Series:
        """Take means over runs of neighbors, at most `MAX_POINTS` of them."""
        return self.map(thin_out)


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
