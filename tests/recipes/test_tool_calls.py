"""The rows and the reward of function calls."""

import json
import zipfile
from pathlib import Path

import pytest

from recipes.tool_calls import make_rows
from tpu_rl import rewards, user_code

REWARD = Path(make_rows.__file__).with_name("reward.py")
RIGHT = {
    "name": "trip.plan",
    "arguments": {
        "days": [3],
        "budget": [100.0, ""],
        "cities": [["New York", "Rome"], ["Rome", "New York"]],
        "place": [[33.5, -112.0]],
        "is_slow": [True, ""],
        "hotel": [{"stars": [4], "name": ["Ritz", ""]}, ""],
    },
}
NEEDED = {"days": 3, "cities": ["New York", "Rome"], "place": [33.5, -112]}


def score(text, right=RIGHT, function="reward"):
    loaded = user_code.load_function(f"{REWARD}:{function}", "reward")
    completions = [[{"role": "assistant", "content": text}]]
    scores = rewards.score(
        {"reward": loaded}, ["..."], completions, {"answer": [json.dumps(right)]}
    )
    return pytest.approx(scores.totals.item())


def call(arguments, name="trip.plan"):
    return json.dumps({"name": name, "arguments": arguments})


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({}, 1),
        ({"budget": 100.0, "is_slow": True}, 1),
        ({"budget": 100}, 1),  # A whole number for a float.
        ({"days": 3.0}, 2 / 3),  # A float for a whole number.
        ({"days": True}, 2 / 3),
        ({"days": "3"}, 2 / 3),
        ({"is_slow": 1}, 3 / 4),
        ({"budget": ""}, 3 / 4),  # Left out means not there.
        ({"color": "red"}, 3 / 4),
        ({"cities": ["rome", "new-york"]}, 1),
        ({"cities": ["Rome"]}, 2 / 3),
        ({"cities": "Rome"}, 2 / 3),
        ({"place": [33.5, 112]}, 2 / 3),
        ({"hotel": {"stars": 4}}, 1),
        ({"hotel": {"stars": 4, "name": "ritz"}}, 1),
        ({"hotel": {"name": "Ritz"}}, 3 / 4),
        ({"hotel": {"stars": 4, "pool": True}}, 3 / 4),
    ],
)
def test_the_share_of_right_arguments(changes, share):
    text = call(NEEDED | changes)
    assert score(text) == 0.4 + 0.6 * share
    assert score(text, function="exact") == float(share == 1)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (call({}), 0.4),
        (call(NEEDED, "trip_plan"), 0.2),
        (json.dumps({"name": ["trip.plan"], "arguments": NEEDED}), 0.2),
        (json.dumps({"name": "trip.plan", "arguments": None}), 0),
        (json.dumps({"name": "trip.plan", "parameters": NEEDED}), 0),
        (json.dumps([call(NEEDED)]), 0),
        (f"```json\n{call(NEEDED)}\n```", 0),
        ("trip.plan(days=3)", 0),
        ("[" * 100_000, 0),
        ("", 0),
    ],
)
def test_a_call_is_json_alone(text, value):
    assert score(text) == value


def test_a_function_without_arguments():
    right = {"name": "now", "arguments": {}}
    assert score(call({}, "now"), right) == 1
    assert score(call({"zone": "CET"}, "now"), right) == 0.4


def entry(name, length=1):
    parameters = {
        "days": {"type": "integer", "description": "Days."},
        "rates": {"type": "array", "items": {"type": "float"}, "description": "Rates."},
        "pace": {"type": "string", "enum": ["slow", "fast"], "description": "Pace."},
        "loud": {"type": "boolean", "description": "Loud."},
    }
    schema = {"type": "dict", "properties": parameters, "required": ["days", "rates", "loud"]}
    function = {"name": name, "description": "Plan it.", "parameters": schema}
    question = [[{"role": "user", "content": "Three days" + "!" * length}]]
    return {"id": f"{name} {length}", "question": question, "function": [function]}


CALLS = {"days": [3], "rates": [[1, 0.5]], "pace": ["", "slow"], "loud": ["", True]}


def write_wheel(path, entries):
    answers = [
        {"id": e["id"], "ground_truth": [{e["function"][0]["name"]: CALLS}]} for e in entries
    ]
    with zipfile.ZipFile(path, "w") as archive:
        for name, part in ((make_rows.QUESTIONS, entries), (make_rows.ANSWERS, answers)):
            archive.writestr(name, "\n".join(json.dumps(values) for values in part))


def test_a_row_shows_the_function_and_has_a_right_call():
    row = make_rows.row(entry("plan"), {"plan": CALLS})
    assert row["prompt"][1]["content"] == (
        "plan: Plan it.\n- days (integer): Days.\n- rates (array of float): Rates.\n"
        "- pace (string, optional, one of slow, fast): Pace.\n- loud (boolean): Loud.\n\n"
        "Three days!"
    )
    assert json.loads(row["completion"])["arguments"] == {
        "days": 3,
        "rates": [1.0, 0.5],
        "loud": True,
    }
    assert score(row["completion"], json.loads(row["answer"])) == 1
    without_loud = call({"days": 3, "rates": [1, 0.5]}, "plan")
    assert score(without_loud, json.loads(row["answer"])) == 0.4 + 0.6 * 2 / 3


def test_no_function_is_in_both_files_and_long_questions_in_none(tmp_path, capsys):
    wheel = tmp_path / "bfcl.whl"
    count = make_rows.HELD_OUT + 20
    entries = [entry(f"plan_{i // 2}", 1 + i % 2) for i in range(2 * count)]
    write_wheel(wheel, [*entries, entry("long", make_rows.MAX_CHARACTERS)])
    assert make_rows.main(["--wheel", str(wheel), "--to", str(tmp_path)]) == 0
    names = []
    for file, expected in (("train", 20), ("held_out", make_rows.HELD_OUT)):
        lines = (tmp_path / f"calls_{file}.jsonl").read_text(encoding="utf-8").splitlines()
        names.append([json.loads(json.loads(line)["answer"])["name"] for line in lines])
        assert len(lines) == 2 * expected
        assert len(set(names[-1])) == expected
    assert set(names[0]).isdisjoint(names[1])
    assert "long" not in names[0] + names[1]


def test_another_file_is_refused(tmp_path, capsys):
    wheel = tmp_path / "other.whl"
    wheel.write_bytes(b"no archive")
    assert make_rows.main(["--wheel", str(wheel), "--to", str(tmp_path)]) == 2
    assert "is not the wheel of bfcl-eval" in capsys.readouterr().err
