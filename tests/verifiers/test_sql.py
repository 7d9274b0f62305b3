"""SQL by execution: partial credit, published forms, and queries that must do no harm."""

import sqlite3
import time

import numpy as np
import pytest

from tests.fixtures.reward_scores import score
from tpu_rl.errors import InputError
from tpu_rl.verifiers import sql_pool, sql_queries

SCRIPT = """
CREATE TABLE singer (id INTEGER, name TEXT, age REAL);
INSERT INTO singer VALUES (1, 'Ann', 30.0), (2, 'Bob', 40.5), (3, 'Cy', 50.0);
"""
GOLD = "SELECT name, age FROM singer WHERE age > 35 ORDER BY age"


@pytest.fixture(scope="module", autouse=True)
def two_workers():
    """Run the queries of this module in few processes, and end them."""
    pools = {}
    start = sql_pool._pool.__wrapped__

    def pool(function):
        if function not in pools:
            pools[function] = start(function, 1)
        return pools[function]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sql_pool, "_pool", pool)
        yield
    for each in pools.values():
        each.stop()


def values(name, queries, gold=GOLD, database=SCRIPT):
    return score(name, queries, answer=[gold] * len(queries), database=[database] * len(queries))


def test_partial_credit_of_results():
    queries = {
        GOLD: 10,
        f"<think>SELECT 1</think>So:\n```sql\n{GOLD};\n```": 10,
        f"<answer>{GOLD}</answer>": 10,
        "SELECT age, name FROM singer WHERE age > 35": 10,
        # One of two columns.
        "SELECT name, id FROM singer WHERE age > 35": 5,
        # 4 of 2 x 3 cells, and of 3 x 3.
        "SELECT name, age FROM singer": 10 * 4 / 6,
        "SELECT * FROM singer": 10 * 4 / 9,
        "SELECT 'x', 'y'": 0.5,
        "SELECT name, age FROM singer WHERE age > 99": 0.5,
        "SELECT nothing FROM singer": 0,
        "SELECT 1; SELECT 2": 0,
        "I do not know": 0,
        "": 0,
    }
    assert values("sql", list(queries)) == [pytest.approx(value) for value in queries.values()]


def test_exact_results():
    queries = [
        GOLD,
        "SELECT name, age FROM singer WHERE age > 35 ORDER BY age DESC",
        "SELECT age, name FROM singer WHERE age > 35 ORDER BY age",
        "no",
    ]
    assert values("sql_match", queries) == [1, 0, 0, 0]
    unordered = "SELECT name FROM (SELECT * FROM singer ORDER BY age)"
    assert values("sql_match", ["SELECT name FROM singer ORDER BY id DESC"], unordered) == [1]


def test_values_are_compared_without_rounding_errors():
    assert values("sql_match", ["SELECT 0.1 + 0.2"], "SELECT 0.3") == [1]
    assert values("sql_match", ["SELECT 2.0"], "SELECT 2") == [1]
    assert values("sql_match", ["SELECT 123456789012"], "SELECT 123456789013") == [0]


def test_gold_results_without_rows_are_named_and_can_be_left_out(capsys):
    sql_pool._say_empty.cache_clear()
    queries = ["SELECT 1 WHERE 0", "SELECT 1"]
    gold = "SELECT 2 WHERE 0"
    assert values("sql", queries, gold) == [10, 0.5]
    assert values("sql_match", queries, gold) == [1, 0]
    assert capsys.readouterr().err.count("any query without rows is right") == 1
    assert np.isnan(values("sql(empty=false)", queries, gold)).all()
    assert values("sql_match(empty=false)", queries, "SELECT 1") == [0, 1]


def test_shares_of_empty_results():
    assert sql_queries.share_of([], []) == 1
    assert sql_queries.share_of([(1,)], []) == sql_queries.share_of([], [(1,)]) == 0


HARM = {
    "deletes": "DELETE FROM singer",
    "drops": "DROP TABLE singer",
    "creates": "CREATE TABLE t AS SELECT 1",
    "attaches a file": "ATTACH DATABASE '{folder}/new.db' AS new",
    "writes a copy": "VACUUM INTO '{folder}/new.db'",
    "writes by a function": "SELECT writefile('{folder}/new.db', 'x')",
    "loads code": "SELECT load_extension('{folder}/x.so')",
    "unlocks itself": "PRAGMA query_only = OFF",
    "changes the schema": "PRAGMA writable_schema = ON",
    "fills the memory": "SELECT length(zeroblob(2000000000)), length(randomblob(2000000000))",
    "begins": "BEGIN EXCLUSIVE",
}


@pytest.mark.parametrize("query", HARM.values(), ids=HARM)
def test_queries_that_do_more_than_read_do_not_run(query, tmp_path):
    file = tmp_path / "db.sqlite"
    connection = sqlite3.connect(file)
    connection.executescript(SCRIPT)
    connection.close()
    before = file.read_bytes()
    query = query.format(folder=tmp_path)
    try:
        assert sql_queries.share([query, GOLD], [str(file)] * 2, [GOLD] * 2) == [-1, 1]
    finally:
        sql_queries._open.cache_clear()
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["db.sqlite"]


def test_queries_without_end_are_stopped(monkeypatch):
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
    monkeypatch.setattr(sql_queries, "SECONDS", 0.2)
    began = time.monotonic()
    results = sql_queries.share(
        [f"{endless}SELECT count(*) FROM n", GOLD], [SCRIPT] * 2, [GOLD] * 2
    )
    assert results == [-1, 1]
    # Each of its rows is a result: there are too many.
    assert sql_queries.share([f"{endless}SELECT i FROM n"], [SCRIPT], [GOLD]) == [0]
    assert time.monotonic() - began < 5


@pytest.mark.slow
def test_a_query_that_sqlite_cannot_interrupt_costs_its_own_row_only(monkeypatch):
    monkeypatch.setattr(sql_pool, "SECONDS", 2.0)
    hang = "SELECT length(printf('%.*c', 2000000000, 'x'))"
    assert values("sql", [hang, GOLD]) == [0, 10]


@pytest.mark.slow
def test_queries_that_fill_the_memory_cost_their_own_rows_only():
    many = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 5000) "
    hungry = f"{many}SELECT zeroblob(999999) FROM n ORDER BY random()"
    assert values("sql", [hungry, GOLD]) == [0, 10]


def test_databases_are_found_as_spider_and_bird_publish_them(tmp_path):
    folder = tmp_path / "concert"
    folder.mkdir()
    connection = sqlite3.connect(folder / "concert.sqlite")
    connection.executescript(SCRIPT)
    connection.close()
    assert values(f"sql(folder={tmp_path})", [GOLD], database="concert") == [10]
    with pytest.raises(InputError, match="no such database"):
        values("sql", [GOLD], database="concert")


def test_a_gold_query_that_does_not_run_is_an_input_error():
    with pytest.raises(InputError, match="gold query does not run") as error:
        score("sql", [GOLD] * 2, answer=[GOLD, "SELECT x FROM y"], database=[SCRIPT] * 2)
    assert error.value.where.startswith("row 1 ")
    assert "no such table: y" in error.value.why
