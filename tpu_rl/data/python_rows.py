"""Rows that a Python program passes, under names that stand where --data.path names a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any

from tpu_rl.data.stored_rows import Given
from tpu_rl.errors import InputError
from tpu_rl.user_code import PYTHON, Passed

ROWS = Passed("argument", "pass it to tpu_rl.train again, or name a file that has the rows")


@contextmanager
def registered_for_run(rows: Mapping[str, Any]) -> Iterator[None]:
    """Let `read` find rows, argument -> rows, in this context.

    Raises InputError if something is not a sequence.
    """
    for argument, given in rows.items():
        if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sized):
            raise InputError(
                f"`{argument}` is not a list of rows",
                where=f"{argument}=",
                why=f"it is {type(given).__name__}",
                fix="pass a list of dicts, or a dataset with a length",
            )
    with ROWS.for_run(rows):
        yield


def is_name(path: str) -> bool:
    """Return True if a path is the name of rows, and not of a file."""
    return path.startswith(PYTHON)


def source(path: str) -> Given:
    """Return the rows under a name.

    Raises InputError if there are no such rows in this process. A scan raises it if one is not a
    dict of values that a JSON file could hold as well.
    """
    argument = path.removeprefix(PYTHON)
    rows = ROWS.find(path)
    numbered = rows if hasattr(rows, "__getitem__") else list(rows)
    return Given(numbered, lambda number: f"row {number} of {argument}")
