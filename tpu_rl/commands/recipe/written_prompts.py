"""Prompts that a model writes: the filter `keep: {rows: written}` of a recipe.

A completion that passes becomes the prompt of a new row, in the form of the prompt that asked for
it, and a function of the user adds columns, such as the answer. So a chain trains on problems of
its own: easier variants (LADDER, arXiv 2503.00735), problems of weak concepts (SwS, arXiv
2506.08989), or instructions (arXiv 2404.12195).
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tpu_rl import user_code
from tpu_rl.commands.recipe.recipe_file import Keep
from tpu_rl.data import Row
from tpu_rl.errors import InputError, printable
from tpu_rl.rewards import worker_process
from tpu_rl.rewards.worker_process import RewardFailure
from tpu_rl.rollout import scoring
from tpu_rl.rollout.scoring import Scored

WHERE = "keep: columns"
TEXTS = "texts"
"""The parameter of the user's function that has the texts."""


def load(path: str) -> Callable[..., Any]:
    """Return the function of `keep: columns`.

    Raises InputError if there is none, or it does not take texts.
    """
    function = user_code.load_function(path, "columns")
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if not takes_all and TEXTS not in [p.name for p in parameters]:
        raise InputError(
            "the function takes no texts",
            where=f"{WHERE}: {path}",
            fix="write def NAME(texts, **columns), which returns a dict or None for each text",
        )
    return function


def as_prompt(row: Row, text: str) -> Any:
    """Return a text in the form of the prompt that asked for it: a text, or a user's message.

    A system message said how to write problems, so that the new prompt has none.
    """
    return text if isinstance(row["prompt"], str) else [{"role": "user", "content": text}]


def columns_of(
    keep: Keep, asking: Sequence[Row], scored: Scored, numbers: Sequence[int]
) -> list[dict[str, Any] | None]:
    """Return the columns that the user's function gives to some completions; None of no problem.

    A text on which it fails is no problem. A warning says how many there were. Raises InputError if
    it fails on all texts, or returns something else than columns.
    """
    if not keep.columns or not numbers:
        return [{} for _ in numbers]
    function = load(keep.columns)
    texts = [scored.completions[i] for i in numbers]
    prompts, columns = scoring.repeat_rows(list(asking), 1)
    arguments: dict[str, list[Any]] = {**columns, "prompts": prompts, TEXTS: texts}
    parameters = inspect.signature(function).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        names = [p.name for p in parameters]
        arguments = {name: values for name, values in arguments.items() if name in names}
    values = worker_process.call(function, arguments, len(texts))
    if isinstance(values, RewardFailure) and values.is_wrong_count:
        raise InputError(
            "the function returned a wrong number of values",
            where=f"{WHERE}: {keep.columns}",
            why=str(values).replace("completions", "texts"),
            fix="return a dict or None for each text, in their order",
        )
    if isinstance(values, RewardFailure):
        values = [_of_one(function, arguments, i) for i in range(len(texts))]
    failures = [value for value in values if isinstance(value, RewardFailure)]
    if failures:
        message = f"{keep.columns} fails on {len(failures)} of {len(texts)} texts: {failures[0]}"
        if len(failures) == len(texts):
            raise InputError(printable(message), where=WHERE, fix="repair the function")
        print(f"warning: {printable(message)}", file=sys.stderr)
    return [
        None if isinstance(value, RewardFailure) else _checked(value, keep.columns)
        for value in values
    ]


def _of_one(
    function: Callable[..., Any], arguments: Mapping[str, list[Any]], index: int
) -> Any | RewardFailure:
    """Return the function's value of one text, or why there is none."""
    alone = {name: [values[index]] for name, values in arguments.items()}
    value = worker_process.call(function, alone, 1)
    return value if isinstance(value, RewardFailure) else value[0]


def _checked(value: Any, path: str) -> dict[str, Any] | None:
    """Raise InputError unless a value is None or columns that a file of rows can hold."""
    if value is None:
        return None
    try:
        if isinstance(value, dict) and all(isinstance(name, str) for name in value):
            json.dumps(value)
            if isinstance(value.get("prompt", ""), str):
                return value
    except (TypeError, ValueError):
        pass
    raise InputError(
        "the function returned no columns",
        where=f"{WHERE}: {path}",
        why=f"it returned {value!r}"[:120],
        fix='return a dict such as {"answer": "42"} for each text, or None; a `prompt` is a text',
    )


def once(lines: Sequence[str]) -> list[str]:
    """Return the lines of new rows whose prompt no earlier line has."""
    first: dict[str, str] = {}
    for line in lines:
        first.setdefault(json.dumps(json.loads(line)["prompt"]), line)
    return list(first.values())
