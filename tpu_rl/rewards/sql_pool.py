"""SQL by execution: rewards of queries that run on SQLite, in processes that can be killed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tpu_rl.environments import text_of
from tpu_rl.errors import InputError
from tpu_rl.rewards import spans, sql_queries
from tpu_rl.rewards.scoring import Reward
from tpu_rl.rewards.worker_pool import Pool
from tpu_rl.rewards.worker_process import RewardFailure
from tpu_rl.runtime.worker_child import shorten

MEMORY_BYTES = 2 * 2**30
SECONDS = sql_queries.SECONDS + 2
"""Time after which a worker is killed. A query ends itself before."""


def sql(folder: str = "") -> Reward:
    """Return 10 times the share of cells that each query has right; 0.5 if it runs, 0 if not.

    Cells are right as in PaVeRL-SQL: each column of the gold result takes the column that shares
    most of its values, as multisets, floats to nine digits. The share is of the larger table, so
    that SELECT * earns less. The query is the last fenced block or <answer>, or all of the text
    without thoughts. `answer` is the gold query. `database` is a SQLite file, a script that creates
    it, or a name D in `folder`, which has D/D.sqlite (Spider, BIRD). Queries can only read, within
    5 s and 2 GB.
    """

    def value(share: float) -> float:
        return 0.0 if share < 0 else 10 * share if share > 0 else 0.5

    return _reward("share", folder, value)


def sql_match(folder: str = "") -> Reward:
    """Return 1 for each query whose result has the rows of the gold query's, else 0.

    The order of rows counts if the gold query has ORDER BY: execution accuracy, as in Think2SQL
    (arXiv 2504.15077). For columns and limits see `sql`.
    """
    return _reward("equal", folder, float)


def _reward(function: str, folder: str, value: Any) -> Reward:
    def score(
        prompts: Sequence[Any],
        completions: Sequence[Any],
        *,
        answer: Sequence[Any],
        database: Sequence[Any],
        **_: Any,
    ) -> list[float | RewardFailure]:
        del prompts
        databases = [_find(str(name), folder, row) for row, name in enumerate(database)]
        golds = [str(query) for query in answer]
        for row, pair in enumerate(zip(golds, databases, strict=True)):
            if fault := _fault(*pair):
                raise InputError(
                    "a gold query does not run",
                    where=f"row {row} of those scored together: {shorten(pair[0])}",
                    why=fault,
                    fix="the column `answer` has queries for SQLite; `database` is where they run",
                )
        requests = [
            {"completions": [_query(text_of(completion))], "database": [where], "answer": [gold]}
            for completion, where, gold in zip(completions, databases, golds, strict=True)
        ]
        results = _pool(function).map(requests, [SECONDS] * len(requests))
        # A query that its worker did not survive does not run.
        return [
            value(result[0])
            if not isinstance(result, RewardFailure)
            else result
            if sql_queries.GOLD_FAILS in str(result)
            else 0.0
            for result in results
        ]

    return score


@functools.cache
def _pool(function: str, size: int = 4) -> Pool:
    path = Path(__file__).with_name("sql_queries.py")
    return Pool(f"{path}:{function}", MEMORY_BYTES, size)


@functools.lru_cache(1 << 16)
def _fault(query: str, database: str) -> str:
    """Return why a gold query does not run; "" if it does."""
    (result,) = _pool("check").map([{"completions": [query], "database": [database]}], [SECONDS])
    return str(result) if isinstance(result, RewardFailure) else ""


def _query(text: str) -> str:
    return spans.answer_of(text).strip().rstrip(";")


def _find(name: str, folder: str, row: int) -> str:
    """Return a script as it is, or the path of a database."""
    if sql_queries.is_script(name):
        return name
    base = Path(folder).expanduser()
    paths = [base / name, *(base / name / f"{name}.{end}" for end in ("sqlite", "db"))]
    found = next((path for path in paths if path.is_file()), None)
    if found is None:
        raise InputError(
            "no such database",
            where=f"row {row} of those scored together: {shorten(name)}",
            why=f"there is none of {', '.join(map(str, paths))}",
            fix="write a SQLite file, a script with CREATE TABLE, or sql(folder=DIRECTORY)",
        )
    return str(found)
