"""Rewards that see the values of another reward, and readers of the data's references."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from tpu_rl.environments import text_of
from tpu_rl.errors import InputError, refused
from tpu_rl.rewards import scoring, worker_process
from tpu_rl.rewards.scoring import DeclaredReward, Reward
from tpu_rl.rewards.worker_process import RewardFailure
from tpu_rl.runtime.worker_child import shorten

T = TypeVar("T")

NO_READING = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, re.error)
"""Errors that a reader raises for a text that it cannot read."""


def on(of: Reward, combine: Callable[..., Sequence[Any]]) -> DeclaredReward:
    """Return a reward that is a function of another one's values.

    Args:
        of: the other reward. A completion that it does not score, or fails on, has none here.
        combine: fn(values, prompts, completions, **columns) -> a number for each completion.
            `values` has None for completions without one. Both functions get the columns that they
            name.
    """

    def score(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[Any]:
        found = values_of(of, prompts, completions, columns)
        values = [None if isinstance(value, RewardFailure) else value for value in found]
        results = combine(values, prompts, completions, **columns)
        return [
            value if value is None or isinstance(value, RewardFailure) else result
            for value, result in zip(found, results, strict=True)
        ]

    return declare(score, of, combine)


def values_of(
    of: Reward,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: Mapping[str, Sequence[Any]],
    rows: Sequence[int] | None = None,
) -> list[float | RewardFailure | None]:
    """Return a reward's value of each completion: None without one, a failure for a fault.

    With `rows`, only these completions are judged, and only their values returned.
    """
    if rows is not None:
        prompts, completions = ([values[row] for row in rows] for values in (prompts, completions))
        columns = {name: [column[row] for row in rows] for name, column in columns.items()}
    if not completions:
        return []
    name = of.__name__ if inspect.isfunction(of) else "reward"
    numbers, faults, _ = scoring.apply(name, of, prompts, completions, columns, columns)
    values: list[float | RewardFailure | None] = [
        None if np.isnan(number) else float(number) for number in numbers
    ]
    for fault in faults:
        if not fault.is_scored:
            values[fault.row] = RewardFailure(fault.message, fault.frames)
    return values


def rows_of_groups(group: Sequence[int]) -> list[list[int]]:
    """Return the rows of each group, by the number of its group that each row has."""
    rows_of: dict[int, list[int]] = defaultdict(list)
    for row, number in enumerate(group):
        rows_of[number].append(row)
    return list(rows_of.values())


def declare(score: Reward, of: Reward, *others: Callable[..., Any]) -> DeclaredReward:
    """Return `score`, which needs the columns that `of` and the others name among parameters."""
    declared = {
        p.name: p if p.kind is p.VAR_KEYWORD else p.replace(kind=p.KEYWORD_ONLY)
        for function in (of, *others)
        for p in scoring.parameters(function) or ()
        if p.name not in ("values", "prompts", "completions") and p.kind is not p.VAR_POSITIONAL
    }
    own = list(inspect.signature(score).parameters.values())[:2]
    needed = own + sorted(declared.values(), key=lambda p: p.kind)
    return DeclaredReward(score, needed, worker_process.sees_whole_batch(of))


def references(
    name: str, values: Iterable[Any], read: Callable[[Any], T], expected: str
) -> list[T]:
    """Read each value of the data's column `name` by `read`.

    Raises:
        InputError: for the first value that `read` raises an error of `NO_READING` for.
    """
    results = []
    for row, value in enumerate(values):
        with refused(
            NO_READING,
            f"the column {name!r} of the data cannot be read",
            where=f"row {row} of those scored together: {shorten(value)}",
            fix=f"write {expected}",
        ):
            results.append(read(value))
    return results


def against(
    column: str, read: Callable[[Any], T], expected: str, measure: Callable[[str, T], float]
) -> DeclaredReward:
    """Return the reward measure(text of a completion, reference), as `references` reads them."""

    def score(
        prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]
    ) -> list[float]:
        pairs = zip(completions, references(column, columns[column], read, expected), strict=True)
        return [measure(text_of(completion), reference) for completion, reference in pairs]

    *own, _ = inspect.signature(score).parameters.values()
    return DeclaredReward(score, [*own, inspect.Parameter(column, inspect.Parameter.KEYWORD_ONLY)])


NO_ANSWERS = {"none", "null", "nan", "n/a", "proof", "notfound", "not found", "[object object]"}
"""Texts that data sets write where a problem has no answer, or its answer was not found."""


def gold(value: Any, read: Callable[[str], T | None]) -> T:
    """Read the gold answer of one row: a number or a text.

    Raises:
        ValueError: if no completion could match it.
    """
    text = "" if value is None or value != value else str(value).strip()
    is_container = isinstance(value, list | tuple | Mapping)
    if text[:1] in ("{", "["):
        with contextlib.suppress(ValueError, RecursionError):
            parsed = json.loads(text)
            # [0, 1] is an interval.
            items = parsed if isinstance(parsed, list) else [{}]
            is_container |= any(isinstance(item, str | list | dict) for item in items)
    why = None
    if is_container:
        why = "holds several values; name one, as in --data.columns answer=answer.0"
    elif not text or text.lower() in NO_ANSWERS:
        why = "is no answer"
    result = None if why else read(text)
    if result is None:
        raise ValueError(f"the ground truth {shorten(value)} {why or 'contains no answer'}")
    return result


def no_score(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[None]:
    """Score nothing: stands for a model or a reward that is not named."""
    return [None] * len(completions)


def require(condition: bool, setting: str, fix: str) -> None:
    """Raise InputError if a setting of a reward is impossible."""
    if not condition:
        raise InputError("a reward has an impossible setting", where=setting, fix=fix)
