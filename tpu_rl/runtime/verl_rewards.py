"""Reward functions in verl's form: one completion at a time.

    def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1.0

`data_source`, `extra_info` and `reward_model` (with `ground_truth` and `style`) are columns of
verl's data. A column `ground_truth` of its own is read too.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any


def adapt(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function in TRL's form for one in verl's; any other function as it is."""
    try:
        names = inspect.signature(function).parameters.keys()
    except (TypeError, ValueError):
        return function
    if not {"solution_str", "ground_truth"} <= names or "completions" in names:
        return function

    def score(prompts: list[Any], completions: list[Any], **columns: Any) -> list[Any]:
        return [
            _score_of(function(**_arguments(names, completion, columns, index)))
            for index, completion in enumerate(completions)
        ]

    return score


def _arguments(names: Any, completion: Any, columns: dict[str, Any], index: int) -> dict[str, Any]:
    """Return the arguments of one completion. Raises KeyError if the data lack the truth."""
    row = {name: values[index] for name, values in columns.items() if name != "step"}
    if "ground_truth" not in row:
        model = row.get("reward_model")
        if not isinstance(model, dict) or "ground_truth" not in model:
            raise KeyError(
                "the reward reads `ground_truth`, and the data have neither this column nor "
                "`reward_model` with it"
            )
        row["ground_truth"] = model["ground_truth"]
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    values = {"data_source": None, "extra_info": None, **row, "solution_str": text}
    return {name: values[name] for name in names if name in values}


def _score_of(value: Any) -> Any:
    """Return the score: verl's functions return it alone, in a dict, or as the first of several."""
    if inspect.iscoroutine(value):
        value = asyncio.run(value)
    if isinstance(value, dict) and "score" not in value:
        raise ValueError(f"it returned a dict without `score`, but with {', '.join(value)}")
    if isinstance(value, dict):
        return value["score"]
    return value[0] if isinstance(value, tuple | list) else value
