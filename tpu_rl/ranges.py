"""Ranges of settings: intervals of numbers, and settings that belong to others.

Each is declared on its field, and `check` refuses what breaks it:

    lam: Share = 0.95
    clip: Annotated[float, In("(0, 1)")] | None = None
    gamma: Annotated[Share, ReadOnlyWith("credit", "turn", why="it discounts turns")] = 1.0
    kl_target: Annotated[Positive | None, Needs("kl_reward_coef", "kl_loss_coef")] = None
    reference_free: Annotated[bool, Conflicts("reference_mix")] = False

A setting is set if it is not its default. It is on if it differs from the default of the class
that declared it first, and is neither False, nor 0, nor empty; if that default is None, any number
is on. Settings that the dataclass does not have are off. Those of a field that is a dataclass have
dotted paths: Conflicts("data.templates"). With a value behind it, a setting is on if it has that
value: Conflicts("critic.trunk shared"). A dataclass that inherits from `Checked`
is checked whenever one is made.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from tpu_rl.errors import InputError, unknown_name
from tpu_rl.plain_values import fields_of

Flag = Callable[[str], str]
"""Name of a setting -> its flag."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A setting that breaks what its field declares."""

    what: str
    others: tuple[str, ...]
    """Names of the other settings where the user has to look."""
    fix: str


class ReadOnlyWith:
    """The setting may be set only while another setting has one of these values."""

    def __init__(self, other: str, *values: Any, why: str = ""):
        self.other, self.values, self.why = other, values, why

    def problem(self, settings: Any, name: str, flag: Flag) -> Problem | None:
        """Find the setting `name` set without that value."""
        value = fields_of(settings).get(self.other)
        if not is_set(settings, name) or value in self.values:
            return None
        *first, last = map(str, self.values)
        values = f"{', '.join(first)} or {last}" if first else last
        default = next(x.default for x in dataclasses.fields(settings) if x.name == name)
        known = f" (the default is {default})" if isinstance(default, int | float) else ""
        fix = f"use {flag(self.other)} {values}, or leave {flag(name)} out{known}"
        return Problem(f"{name} is not read with {self.other} {value}", (self.other,), fix)


class Needs:
    """The setting may be set, or have the value `when`, only if one of the others is on."""

    def __init__(self, *others: str, when: Any = None, why: str = ""):
        self.others, self.when, self.why = others, when, why

    def problem(self, settings: Any, name: str, flag: Flag) -> Problem | None:
        """Find the setting `name` without any of the others."""
        applies = is_set(settings, name) if self.when is None else _has(settings, name, self.when)
        if not applies or any(is_on(settings, other) for other in self.others):
            return None
        setting = name if self.when is None else f"{name} {fields_of(settings)[name]}"
        fix = f"give {' or '.join(map(flag, self.others))}, too"
        # The others are not there to be found, so that only the fix names them.
        return Problem(f"{setting} does nothing without {' or '.join(self.others)}", (), fix)


class Conflicts:
    """The setting may not be on, or have the value `when`, while one of the others is on.

    `when` is one value, or a tuple of several.
    """

    def __init__(self, *others: str, when: Any = None, why: str = ""):
        self.others, self.when, self.why = others, when, why

    def problem(self, settings: Any, name: str, flag: Flag) -> Problem | None:
        """Find another setting that is on together with the setting `name`."""
        applies = _is_on(settings, name) if self.when is None else _has(settings, name, self.when)
        on = tuple(other for other in self.others if applies and is_on(settings, other))
        if not on:
            return None
        setting = name if self.when is None else f"{name} {fields_of(settings)[name]}"
        # A flag with a value, as in "samples 1", may have that as its default.
        first = " and ".join(flag(other.partition(" ")[0]) for other in on)
        verb = f"change {first}" if any(" " in other for other in on) else f"leave {first} out"
        fix = f"{verb}, or change {flag(name)}"
        return Problem(f"{setting} does not go with {' and '.join(on)}", on, fix)


Relation = ReadOnlyWith | Needs | Conflicts


class In:
    """The interval of a setting: [0, 1] has its ends, and (0, 1) has not."""

    def __init__(self, interval: str, fix: str = "", zero: bool = False):
        """Read an interval, as in "(0, inf)"; `fix` is the advice for a number outside.

        With `zero`, 0 is in it, too.
        """
        self.fix, self.zero = fix, zero
        match = re.fullmatch(r"([\[(])(\S+), (\S+)([\])])", interval)
        assert match is not None, f"{interval} is no interval"
        self.low, self.high = float(match[2]), float(match[3])
        self.has_low, self.has_high = match[1] == "[", match[4] == "]"

    def __contains__(self, value: float) -> bool:
        above = value >= self.low if self.has_low else value > self.low
        below = value <= self.high if self.has_high else value < self.high
        return (above and below) or (self.zero and value == 0)

    def __str__(self) -> str:
        """Say the interval in words, as in "above 0 and at most 1"."""
        parts = []
        if self.low > -math.inf:
            parts.append(f"{'at least' if self.has_low else 'above'} {self.low:g}")
        if self.high < math.inf:
            parts.append(f"{'at most' if self.has_high else 'below'} {self.high:g}")
        return "0, or " * self.zero + (" and ".join(parts) or "a number")


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
    """Check the settings of a dataclass against what their fields declare.

    Args:
        settings: the dataclass. A field without an interval may have any number but NaN.
        flag: the beginning of the names of its flags.

    Raises:
        InputError: for the first number that is not in its interval, or value that is none of its
          Literal, or the first setting that breaks a relation to another, by the names of their
          flags.
    """
    declared = _declared(type(settings))
    choices = _choices(type(settings))
    values = fields_of(settings)
    for field in dataclasses.fields(settings):
        value = values[field.name]
        interval = next((x for x in declared[field.name] if isinstance(x, In)), ANY)
        for item in value if isinstance(value, tuple) else (value,):
            if item not in choices.get(field.name, (item,)):
                names = [str(choice) for choice in choices[field.name] if choice is not None]
                raise unknown_name(field.name, str(item), names, _flag(flag, field.name))
            if not isinstance(item, int | float) or item in interval:
                continue
            finite = "" if math.isfinite(item) else "finite and "
            known = field.default is not dataclasses.MISSING
            raise InputError(
                f"{field.name} is {item:g}",
                where=_flag(flag, field.name),
                why=f"it must be {finite}{interval}",
                fix=interval.fix
                or (f"the default is {field.default}" if known else "give another number"),
            )
    flag_of = functools.partial(_flag, flag)
    for name, metadata in declared.items():
        for relation in metadata:
            if isinstance(relation, In):
                continue
            problem = relation.problem(settings, name, flag_of)
            if problem is not None:
                others = [setting.partition(" ")[0] for setting in problem.others]
                where = ", ".join(map(flag_of, (name, *others)))
                raise InputError(problem.what, where=where, why=relation.why, fix=problem.fix)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """Settings, by default of an algorithm, that are checked when they are made.

    A subclass with checks of its own calls `super().__post_init__()` first.
    """

    FLAG: ClassVar[str] = "--algorithm"
    """The beginning of the names of the flags."""

    def __post_init__(self):
        check(self, self.FLAG)


def check_all(settings: Any, flag: str = "--") -> None:
    """Check a dataclass and the dataclasses that its fields hold, as `check` does."""
    check(settings, flag)
    for name, value in fields_of(settings).items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            check_all(value, _flag(flag, name))


def is_on(settings: Any, setting: str) -> bool:
    """Say whether the setting at a dotted path is on, or has the value behind it."""
    path, _, value = setting.partition(" ")
    *parents, name = path.split(".")
    for parent in parents:
        settings = fields_of(settings)[parent]
    return str(fields_of(settings).get(name)) == value if value else _is_on(settings, name)


def _flag(flag: str, name: str) -> str:
    """Write the flag of a field, as in "--algorithm.kl-coef"; `flag` is "--" for the first."""
    return f"{flag}{'' if flag == '--' else '.'}{name.replace('_', '-')}"


def _has(settings: Any, name: str, values: Any) -> bool:
    """Say whether a setting has the value, or one of several."""
    value = fields_of(settings)[name]
    return value in values if isinstance(values, tuple) else value == values


def is_set(settings: Any, name: str) -> bool:
    """Say whether the dataclass has the setting, and not at its default."""
    defaults = {field.name: field.default for field in dataclasses.fields(settings)}
    return name in defaults and fields_of(settings)[name] != defaults[name]


def _is_on(settings: Any, name: str) -> bool:
    # A subclass may have another default, at which the setting is on.
    bases = [base for base in reversed(type(settings).__mro__) if dataclasses.is_dataclass(base)]
    defaults = [f.default for base in bases for f in dataclasses.fields(base) if f.name == name]
    if not defaults:
        return False
    value = fields_of(settings)[name]
    if defaults[0] is None:
        return value is not None
    return value != defaults[0] and bool(value)


@functools.cache
def _declared(kind: type) -> dict[str, list[In | Relation]]:
    """List the intervals and relations of each field of a dataclass."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {
        field.name: [x for x in _metadata(hints[field.name]) if isinstance(x, In | Relation)]
        for field in dataclasses.fields(kind)
    }


@functools.cache
def _choices(kind: type) -> dict[str, tuple[Any, ...]]:
    """List the values of each field of a dataclass whose type is a Literal, or a tuple of it."""
    hints = typing.get_type_hints(kind)
    values = {field.name: _literals(hints[field.name]) for field in dataclasses.fields(kind)}
    return {name: literals for name, literals in values.items() if literals}


def _literals(hint: Any) -> tuple[Any, ...]:
    """List the values of a Literal, or a tuple or an optional of it; of other types, none."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return arguments
    of_parts = [_literals(part) for part in arguments if part not in (types.NoneType, ...)]
    if not of_parts or not all(of_parts):
        return ()
    none = (None,) if types.NoneType in arguments else ()
    return (*itertools.chain(*of_parts), *none)


def _metadata(hint: Any) -> list[Any]:
    """List the metadata of a type and of the types in it, the outermost first."""
    if typing.get_origin(hint) is Annotated:
        inner, *own = typing.get_args(hint)
        return [*own, *_metadata(inner)]
    return [x for option in typing.get_args(hint) for x in _metadata(option)]
