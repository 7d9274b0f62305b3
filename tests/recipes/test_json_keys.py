"""The rows and the reward of facts as JSON."""

import json
from pathlib import Path

import pytest

from recipes.json_keys import make_rows
from tpu_rl import rewards, user_code

FOLDER = Path(make_rows.__file__).parent
FACTS = {"name": "Anna", "age": 34, "city": "Rome", "job": "nurse"}


def test_the_files_are_those_that_the_script_writes_and_share_no_name():
    parts = make_rows.rows()
    names = []
    for file, rows in zip(("train", "held_out"), parts, strict=True):
        lines = (FOLDER / f"{file}.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line) for line in lines] == rows
        names.append({json.loads(row["answer"])["name"] for row in rows})
    assert names[0].isdisjoint(names[1])
    pairs = [json.loads(line) for line in (FOLDER / "pairs.jsonl").read_text().splitlines()]
    assert pairs == [make_rows.pair(row) for row in parts[0]]


def test_the_reward_agrees_with_the_pairs():
    row = make_rows.rows()[0][0]
    pair = make_rows.pair(row)
    assert [score(pair[name], row["answer"]) for name in ("chosen", "rejected")] == [1.0, 0.0]


def score(text, answer, function="reward"):
    loaded = user_code.load_function(f"{FOLDER / 'reward.py'}:{function}", "reward")
    completions = [[{"role": "assistant", "content": text}]]
    scores = rewards.score({"reward": loaded}, ["..."], completions, {"answer": [answer]})
    return pytest.approx(scores.totals.item())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (json.dumps(FACTS), 1.0),
        (f"\n{json.dumps(FACTS, indent=2)}\n", 1.0),
        (json.dumps(FACTS | {"age": "34"}), 0.8),
        ('{"name": "Anna"}', 0.4),
        (json.dumps(FACTS | {"country": "Italy"}), 0.8),
        ("{}", 0.2),
        ("[1]", 0.0),
        (f"```json\n{json.dumps(FACTS)}\n```", 0.0),
        ("Anna is 34.", 0.0),
    ],
)
def test_facts_are_counted_if_the_answer_is_json_alone(text, value):
    assert score(text, json.dumps(FACTS)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (json.dumps(FACTS), 1.0),
        (f"Here it is:\n```json\n{json.dumps(FACTS, indent=2)}\n```\n", 1.0),
        (f"```{json.dumps(FACTS | {'job': 'baker'})}``` {json.dumps(FACTS)}", 0.8),
        ('{"person": {"name": "Anna"}}', 0.4),
        ("{name: Anna}", 0.0),
        ("Anna is 34.", 0.0),
    ],
)
def test_facts_in_any_form_are_those_of_the_first_object(text, value):
    assert score(text, json.dumps(FACTS), "any_form") == value
