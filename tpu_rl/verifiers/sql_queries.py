"""Run queries on SQLite and compare their results. Only worker processes import this file.

A query may only read: an authorizer allows nothing but SELECT and functions without side effects,
and files are open for reading. A deadline and limits of length bound what a query computes; the
worker's memory limit and the parent's deadline bound the rest.
"""

from __future__ import annotations

import functools
import math
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

SECONDS = 5.0
"""Time of one query."""
GOLD_FAILS = "the gold query does not run this time"
MAX_ROWS = 20_000
MAX_LENGTH = 1_000_000
"""Bytes of a value, and of a query."""

_ALLOWED = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
_FORBIDDEN = {"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"}

Row = tuple[Any, ...]


def check(completions: Sequence[str], database: Sequence[str]) -> list[float]:
    """Return 1 for each query that runs on its database, 0 if its result has no rows.

    Raises:
        ValueError: if one does not run, or returns more than `MAX_ROWS` rows.
    """
    values = []
    for query, where in zip(completions, database, strict=True):
        try:
            rows = _rows(where, query)
        # Whatever SQLite says is the reason.
        except Exception as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None
        if rows is None:
            raise ValueError(f"it returns more than {MAX_ROWS} rows")
        tables = _rows(where, "SELECT name FROM sqlite_master WHERE type = 'table'") or []
        names = [str(name).replace('"', '""') for (name,) in tables]
        if not any(_rows(where, f'SELECT 1 FROM "{name}" LIMIT 1') for name in names):
            raise ValueError("the tables of its database have no rows, so that all results agree")
        values.append(float(bool(rows)))
    return values


def share(
    completions: Sequence[str], database: Sequence[str], answer: Sequence[str]
) -> list[float]:
    """Return the shares of equal cells; -1 for each query that does not run. See `share_of`."""
    return [_judge(*row, share_of) for row in zip(completions, database, answer, strict=True)]


def equal(
    completions: Sequence[str], database: Sequence[str], answer: Sequence[str]
) -> list[float]:
    """Return 1 for each query with the rows of `answer`, else 0; in order if that has ORDER BY."""
    return [
        max(_judge(query, where, gold, functools.partial(_is_equal, _is_ordered(gold))), 0.0)
        for query, where, gold in zip(completions, database, answer, strict=True)
    ]


def _judge(query: str, database: str, gold: str, compare: Any) -> float:
    try:
        rows = _rows(database, query)
    # A query of a model may fail in any way, also for want of memory.
    except Exception:
        return -1.0
    # With too many rows it runs and has nothing in common.
    return 0.0 if rows is None else float(compare(rows, _gold_rows(database, gold)))


def share_of(rows: Sequence[Row], gold: Sequence[Row]) -> float:
    """Return the cells that two results share, over the cells of the larger number of both.

    Columns are compared as multisets of values. Each column of `gold` takes the unused column with
    which it shares most. Two empty results are equal.
    """
    if not rows and not gold:
        return 1.0
    if not rows or not gold:
        return 0.0
    columns = [Counter(column) for column in zip(*rows, strict=True)]
    gold_columns = [Counter(column) for column in zip(*gold, strict=True)]
    cells = max(len(rows), len(gold)) * max(len(columns), len(gold_columns))
    shared = 0
    for gold_column in gold_columns:
        values = [(gold_column & column).total() for column in columns]
        if values:
            shared += max(values)
            del columns[values.index(max(values))]
    return shared / cells


def _is_equal(ordered: bool, rows: Sequence[Row], gold: Sequence[Row]) -> bool:
    return list(rows) == list(gold) if ordered else Counter(rows) == Counter(gold)


def _is_ordered(query: str) -> bool:
    """Return True if a query has an ORDER BY outside of parentheses."""
    plain = re.sub(r"--[^\n]*|/\*.*?\*/|'[^']*'|\"[^\"]*\"", "", query, flags=re.DOTALL)
    while (shorter := re.sub(r"\([^()]*\)", "", plain)) != plain:
        plain = shorter
    return re.search(r"\border\s+by\b", plain, re.IGNORECASE) is not None


@functools.lru_cache(64)
def _gold_rows(database: str, query: str) -> list[Row]:
    try:
        return _rows(database, query) or []
    except Exception as error:
        raise ValueError(f"{GOLD_FAILS}: {error}") from None


def _rows(database: str, query: str) -> list[Row] | None:
    """Return the rows of a query, numbers without rounding errors; None for too many.

    Raises:
        Exception: whatever SQLite raises.
    """
    connection = _open(database)
    deadline = time.monotonic() + SECONDS
    connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
    cursor = connection.execute(query)
    try:
        if cursor.description is None:
            raise sqlite3.OperationalError("it returns no table")
        rows = cursor.fetchmany(MAX_ROWS + 1)
    finally:
        cursor.close()
    return None if len(rows) > MAX_ROWS else [tuple(map(_plain, row)) for row in rows]


@functools.lru_cache(8)
def _open(database: str) -> sqlite3.Connection:
    """Open a file for reading, or run a script in memory."""
    if is_script(database):
        connection = sqlite3.connect(":memory:")
        connection.executescript(database)
    else:
        path = quote(str(Path(database).absolute()))
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    # Published databases have texts that are no UTF-8.
    connection.text_factory = lambda value: value.decode("utf-8", "replace")
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.execute("PRAGMA query_only = ON")
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_LENGTH)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.set_authorizer(_authorize)
    return connection


def is_script(database: str) -> bool:
    """Return True for statements that create a database, False for the path of a file."""
    return re.search(r"\bcreate\s+(?:temp\w*\s+)?table\b", database, re.IGNORECASE) is not None


def _authorize(action: int, _: Any, function: Any, *__: Any) -> int:
    if action not in _ALLOWED or (
        action == sqlite3.SQLITE_FUNCTION and str(function).lower() in _FORBIDDEN
    ):
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK


def _plain(value: Any) -> Any:
    if isinstance(value, float) and math.isfinite(value):
        value = float(f"{value:.9g}")
        return int(value) if value.is_integer() else value
    return value
