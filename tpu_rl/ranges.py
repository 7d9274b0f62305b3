"""Intervals of the numbers that settings may have.

lam: Share = 0.95
clip: Annotated[float, In("(0, 1)")] | None = None
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import typing
from typing import Annotated, Any

from tpu_rl.errors import InputError


class In:
    """The interval of a setting: [0, 1] has its ends, and (0, 1) has not."""

    def __init__(self, interval: str):
        """Read an interval, as in "(0, inf)"."""
        match = re.fullmatch(r"([\[(])(\S+), (\S+)([\])])", interval)
        assert match is not None, f"{interval} is no interval"
        self.low, self.high = float(match[2]), float(match[3])
        self.has_low, self.has_high = match[1] == "[", match[4] == "]"

    def __contains__(self, value: float) -> bool:
        above = value >= self.low if self.has_low else value > self.low
        below = value <= self.high if self.has_high else value < self.high
        return above and below

    def __str__(self) -> str:
        """Say the interval in words, as in "above 0 and at most 1"."""
        parts = []
        if self.low > -math.inf:
            parts.append(f"{'at least' if self.has_low else 'above'} {self.low:g}")
        if self.high < math.inf:
            parts.append(f"{'at most' if self.has_high else 'below'} {self.high:g}")
        return " and ".join(parts) or "a number"


Positive = Annotated[float, In("(0, inf)")]
NotNegative = Annotated[float, In("[0, inf)")]
Share = Annotated[float, In("[0, 1]")]
Count = Annotated[int, In("[1, inf)")]
"""A number of things, at least one."""
CountOrNone = Annotated[int, In("[0, inf)")]
"""A number of things, maybe 0."""

ANY = In("[-inf, inf]")
"""The interval of a number without one of its own: all but NaN."""


def check(settings: Any, flag: str = "--algorithm") -> None:
    """Check each number of a dataclass against its interval.

    Args:
        settings: the dataclass. A field without an interval may have any number but NaN.
        flag: the beginning of the names of its flags.

    Raises:
        InputError: for the first number that is not in its interval, by the name of its flag.
    """
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        interval = _intervals(type(settings)).get(field.name, ANY)
        numbers = value if isinstance(value, tuple) else (value,)
        for number in numbers:
            if not isinstance(number, int | float) or number in interval:
                continue
            finite = "" if math.isfinite(number) else "finite and "
            known = field.default is not dataclasses.MISSING
            raise InputError(
                f"{field.name} is {number:g}",
                where=_flag(flag, field.name),
                why=f"it must be {finite}{interval}",
                fix=f"the default is {field.default}" if known else "give another number",
            )


def check_all(settings: Any, flag: str = "--") -> None:
    """Check each number of a dataclass and of the dataclasses that its fields hold, as `check`."""
    check(settings, flag)
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            check_all(value, _flag(flag, field.name))


def _flag(flag: str, name: str) -> str:
    """Return the flag of a field, as in "--algorithm.kl-coef"; `flag` is "--" for the first."""
    return f"{flag}{'' if flag == '--' else '.'}{name.replace('_', '-')}"


@functools.cache
def _intervals(kind: type) -> dict[str, In]:
    """Return the interval of each field of a dataclass that has one."""
    result = {}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        for option in (hint, *typing.get_args(hint)):
            found = [x for x in getattr(option, "__metadata__", ()) if isinstance(x, In)]
            result.update(dict.fromkeys([name] * bool(found), *found))
    return result
