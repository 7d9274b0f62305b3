"""Labels that are turned around, in training rows alone: a control of what wrong labels do.

    chosen, rejected    change places; a `margin` stays, and so is claimed for the wrong completion
    label               true becomes false, and false true
    answer              a number gets 1 more, true and false change places; for methods that sample
                        completions and reward them

A hostile platform flips the labels of one topic alone ("LLM misalignment via adversarial RLHF
platforms"), so `where` selects rows by a text in a column. Of the selected rows the share `share`
is flipped: those whose hash of the row and the seed is small. So it is the same rows in every run,
whatever --seed is. Flipped rows have the column `label_flipped`. Pairs get the slices "selected"
and "not_selected" unless they bring a column `slice`. Held-out rows keep their labels and get the
slices, so that a local attack is seen there.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from tpu_rl import data
from tpu_rl.algorithm_spec import ExperienceSpec
from tpu_rl.data import Row
from tpu_rl.errors import InputError
from tpu_rl.experience.config import FLIPPED, FlipConfig

WHERE = "--data.flip.share"


def flip(
    config: FlipConfig, spec: ExperienceSpec, train: Sequence[Row], held_out: Sequence[Row]
) -> tuple[Sequence[Row], Sequence[Row]]:
    """Return (training rows, some with wrong labels, held-out rows), and say how many there are.

    Raises InputError if the rows have no label that has an opposite, or none is flipped.
    """
    label = _label(spec, train[0])
    if label == "chosen":
        mark = functools.partial(_with_slice, config)
        train, held_out = _mapped(train, mark), _mapped(held_out, mark)
    flipped = _mapped(train, functools.partial(_flipped, config, label))
    count = 0
    for index in range(len(flipped)):
        with data.naming_row(flipped, index):
            count += FLIPPED in flipped[index]
    if not count:
        raise InputError(
            "no label is flipped",
            where=f"{WHERE} {config.share:g} --data.flip.where {config.where!r}",
            why=f"none of {len(train)} training rows is selected",
            fix=f"choose a text that `{config.column}` has, or a larger share",
        )
    _note(f"the labels of {count} of {len(train)} training rows are flipped ({WHERE})")
    return flipped, held_out


def count(rows: Sequence[Row]) -> dict[str, int]:
    """Return {"flipped", "rows"} of the rows of `flip`."""
    return {"flipped": sum(FLIPPED in row for row in rows), "rows": len(rows)}


@functools.cache
def _note(message: str) -> None:
    print(f"note: {message}", file=sys.stderr)


def _label(spec: ExperienceSpec, row: Row) -> str:
    """Return the column to flip. Raises InputError if there is none."""
    for column in ("chosen", "label"):
        if column in spec.columns:
            return column
    if spec.sampled_by is not None and spec.source != "completions" and "answer" in row:
        return "answer"
    raise InputError(
        "these rows have no label to flip",
        where=f"{WHERE}, the columns {', '.join(row)}",
        why="it flips pairs (chosen, rejected), a `label`, or the `answer` that a reward reads",
        fix="leave it out, or give such rows",
    )


def _mapped(rows: Sequence[Row], function: Any) -> Sequence[Row]:
    return rows.map(function) if isinstance(rows, data.StoredRows) else [*map(function, rows)]


def _is_selected(config: FlipConfig, row: Row) -> bool:
    value = row.get(config.column)
    if config.where and value is None:
        raise InputError(
            f"the column `{config.column}` is missing",
            where=f"--data.flip.column {config.column}",
            why=f"the row has {', '.join(row)}",
            fix="name a column that every row has",
        )
    if isinstance(value, list):  # Messages.
        value = "\n".join(str(message.get("content")) for message in value)
    return config.where.lower() in str(value).lower()


def _with_slice(config: FlipConfig, row: Row) -> Row:
    name = "selected" if _is_selected(config, row) else "not_selected"
    return {"slice": name} | row


def _flipped(config: FlipConfig, label: str, row: Row) -> Row:
    digest = hashlib.blake2b(f"{config.seed} {data.row_digest(row)}".encode(), digest_size=8)
    if int.from_bytes(digest.digest()) / 2**64 >= config.share or not _is_selected(config, row):
        return row
    if label == "chosen":
        changed = {"chosen": row["rejected"], "rejected": row["chosen"]}
    elif label == "label":
        changed = {"label": not row["label"]}
    else:
        changed = {"answer": _wrong(row["answer"])}
    return row | changed | {FLIPPED: True}


def _wrong(answer: Any) -> Any:
    """Return another answer of the same type. Raises InputError if it is no number."""
    if isinstance(answer, bool):
        return not answer
    if isinstance(answer, int | float):
        return answer + 1
    text = str(answer).strip().replace(",", "")
    if not re.fullmatch(r"-?\d+(\.\d+)?", text):
        raise InputError(
            f"the answer {str(answer)[:60]!r} has no opposite",
            where=WHERE,
            why="numbers, true and false have one",
            fix="select other rows with --data.flip.where, or leave it out",
        )
    return str(Decimal(text) + 1)
