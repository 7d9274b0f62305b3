"""GSM8K as its authors publish it: problems, demonstrations, and solutions that models wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tpu_rl.errors import InputError

Row = dict[str, Any]


def gsm8k(row: Mapping[str, Any]) -> Row:
    """Return GSM8K's columns `question` and `answer` as `prompt`, `answer` and `solution`.

    The new `answer` is the number after "####".

    Raises:
        InputError: if the row has no such number.
    """
    solution, marker, number = str(row["answer"]).rpartition("####")
    if not marker or not number.strip():
        raise InputError(
            'a GSM8K answer ends with "#### number"',
            where=f"question {str(row['question'])[:80]!r}",
            why="the column `answer` of this row does not",
            fix="drop the row, or choose another --data.format",
        )
    return {"prompt": row["question"], "answer": number.strip(), "solution": solution.strip()}


def gsm8k_demonstration(row: Mapping[str, Any]) -> Row:
    """Return a row of `gsm8k` with its column `completion`: the solution as it is published."""
    return {**row, "completion": f"{row['solution']}\n#### {row['answer']}"}


def gsm8k_solutions(row: Mapping[str, Any], problem: int) -> list[Row]:
    """Return the solutions of a GSM8K problem that models wrote, one row each.

    The rows have the columns `prompt`, `completion`, `label` and `problem`. Solutions are graded by
    the data. Calculator marks such as <<16-3=13>> are removed: they repeat what is next to them,
    and no user's model writes them. Solutions that are then equal count once.

    Args:
        row: columns as in example_model_solutions.jsonl: `question`, `ground_truth`, and for each
            model an object with `solution` and `is_correct`.
        problem: number of the problem.

    Raises:
        InputError: if the row has no solutions.
    """
    graded = {
        re.sub(r"<<[^<>]*>>", "", value["solution"]).strip(): bool(value["is_correct"])
        for value in row.values()
        if isinstance(value, dict)
        and isinstance(value.get("solution"), str)
        and "is_correct" in value
    }
    if not graded:
        raise InputError(
            "a problem has no solutions",
            where=f"question {str(row['question'])[:80]!r}",
            why="no column of the row is an object with `solution` and `is_correct`",
            fix='solutions are columns such as {"solution": "...", "is_correct": true}',
        )
    return [
        {"prompt": row["question"], "completion": text, "label": right, "problem": problem}
        for text, right in graded.items()
    ]


def pair_graded(graded: Sequence[Row]) -> list[Row]:
    """Return pairs of graded completions of one prompt, every good one with every bad one.

    The columns `completion` and `label` become `chosen` and `rejected`. Other columns are those of
    the good completion.
    """
    pairs = []
    for good in graded:
        columns = {
            name: value for name, value in good.items() if name not in ("completion", "label")
        }
        for bad in graded:
            if good["label"] and not bad["label"]:
                pair = {"chosen": good["completion"], "rejected": bad["completion"]}
                pairs.append(columns | pair)
    return pairs
