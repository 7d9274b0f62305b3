"""SQL by execution: rewards of queries that run on SQLite, in processes that can be killed."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tpu_rl.environments import text_of
from tpu_rl.errors import InputError
from tpu_rl.rewards import spans
from tpu_rl.rewards.scoring import Reward
from tpu_rl.rewards.verifier import with_settings
from tpu_rl.rewards.worker_pool import Pool
from tpu_rl.rewards.worker_process import RewardFailure
from tpu_rl.runtime.worker_child import shorten
from tpu_rl.verifiers import composed, sql_queries

MEMORY_BYTES = 2 * 2**30
SECONDS = sql_queries.SECONDS + 2
"""Time after which a worker is killed. A query ends itself before."""


def sql(folder: str = "", empty: bool = True) -> Reward:
    """Return 10 times the share of cells that each query has right; 0.5 if it runs, 0 if not.

    Cells are right as in PaVeRL-SQL: each column of the gold result takes the column that shares
    most of its values, as multisets, floats to nine digits. The share is of the larger table, so
    that SELECT * earns less. The query is the last fenced block or <answer>, or all of the text
    without thoughts. `answer` is the gold query. `database` is a SQLite file, a script that creates
    it, or a name D in `folder`, which has D/D.sqlite (Spider, BIRD). Queries can only read, within
    5 s and 2 GB. Where the gold result has no rows, every query without rows is right, as in
    published figures; with empty=false those rows of the data have no reward.
    """

    def value(share: float) -> float:
        return 0.0 if share < 0 else 10 * share if share > 0 else 0.5

    return _reward("share", folder, value, empty)


def sql_match(folder: str = "", empty: bool = True) -> Reward:
    """Return 1 for each query whose result has the rows of the gold query's, else 0.

    The order of rows counts if the gold query has ORDER BY: execution accuracy, as in Think2SQL
    (arXiv 2504.15077). For columns, limits and gold results without rows see `sql`.
    """
    return _reward("equal", folder, float, empty)


def _reward(function: str, folder: str, value: Any, scores_empty: bool) -> Reward:
    def score(
        prompts: Sequence[Any],
        completions: Sequence[Any],
        *,
        answer: Sequence[Any],
        database: Sequence[Any],
        **_: Any,
    ) -> list[float | RewardFailure | None]:
        expected = "a SQLite file, a script with CREATE TABLE, or sql(folder=DIRECTORY)"
        find = functools.partial(_find, folder)
        databases = composed.references("database", map(str, database), find, expected)
        golds = [str(query) for query in answer]
        checks = [_check(*pair) for pair in zip(golds, databases, strict=True)]
        for row, (gold, fault) in enumerate(zip(golds, checks, strict=True)):
            if isinstance(fault, str):
                raise InputError(
                    "a gold query does not run",
                    where=f"row {row} of those scored together: {shorten(gold)}",
                    why=fault,
                    fix="the column `answer` has queries for SQLite; `database` is where they run",
                )
        if scores_empty and 0.0 in checks:
            _say_empty()
        requests = [
            {
                "completions": [spans.answer_of(text_of(completion)).strip().rstrip(";")],
                "database": [where],
                "answer": [gold],
            }
            for completion, where, gold in zip(completions, databases, golds, strict=True)
        ]
        results = _pool(function).map(requests, [SECONDS] * len(requests))
        # A query that its worker did not survive does not run.
        return [
            None
            if has_rows == 0.0 and not scores_empty
            else value(result[0])
            if not isinstance(result, RewardFailure)
            else result
            if sql_queries.GOLD_FAILS in str(result)
            else 0.0
            for result, has_rows in zip(results, checks, strict=True)
        ]

    return score


@functools.cache
def _pool(function: str, size: int = 4) -> Pool:
    path = Path(__file__).with_name("sql_queries.py")
    return Pool(f"{path}:{function}", MEMORY_BYTES, size)


@functools.lru_cache(1 << 16)
def _check(query: str, database: str) -> float | str:
    """Return 1 for a gold query whose result has rows, 0 without rows; or why it does not run."""
    (result,) = _pool("check").map([{"completions": [query], "database": [database]}], [SECONDS])
    return str(result) if isinstance(result, RewardFailure) else result[0]


@functools.cache
def _say_empty() -> None:
    print(
        "note: a gold query returns no rows, so any query without rows is right; the settings "
        "sql(empty=false) and sql_match(empty=false) leave such rows of the data without a reward",
        file=sys.stderr,
    )


def _find(folder: str, name: str) -> str:
    """Return a script as it is, or the path of a database."""
    if sql_queries.is_script(name):
        return name
    base = Path(folder).expanduser()
    paths = [base / name, *(base / name / f"{name}.{end}" for end in ("sqlite", "db"))]
    found = next((path for path in paths if path.is_file()), None)
    if found is None:
        raise ValueError(f"no such database: there is none of {', '.join(map(str, paths))}")
    return str(found)


VERIFIERS = {"sql": with_settings(sql), "sql_match": with_settings(sql_match)}
