"""recipes/judge_rows.py: the rows hold the messages of the reward `judge`."""

import json
import sys

import pytest

from recipes import judge_rows
from tpu_rl.verifiers import judge


def write_rows(tmp_path, monkeypatch, rows, *flags):
    path = tmp_path / "labeled.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [str(path), "--to", str(tmp_path / "rows.jsonl"), *flags]
    monkeypatch.setattr(sys, "argv", ["judge_rows.py", *arguments])
    judge_rows.main()
    return [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]


def test_a_row_is_what_the_judge_is_asked(tmp_path, monkeypatch):
    requests: list[str] = []
    monkeypatch.setattr(judge, "load", lambda *_: lambda texts: requests.extend(texts) or [1.0])
    labeled = {"prompt": "2+2=", "completion": "4", "answer": 4, "label": True}
    judge.judge(model="DIR")(["2+2="], ["4"], answer=[4])
    (row,) = write_rows(tmp_path, monkeypatch, [labeled])
    assert row["prompt"] == [{"role": "user", "content": requests[0]}]
    assert row["answer"] == row["completion"] == "Yes"


def test_right_and_wrong_rows_are_balanced(tmp_path, monkeypatch):
    labels = [1, 1, 1, 0]
    labeled = [{"prompt": "x", "completion": str(i), "label": n} for i, n in enumerate(labels)]
    rows = write_rows(tmp_path, monkeypatch, labeled, "--balance", "--reasons")
    assert sorted(row["answer"] for row in rows) == ["No", "Yes"]
    assert all("completion" not in row and "Think" in row["prompt"][0]["content"] for row in rows)
    with pytest.raises(SystemExit, match="row 1"):
        write_rows(tmp_path, monkeypatch, [{"prompt": "x", "completion": "y", "label": "good"}])


def test_spoiled_answers_are_invalid_or_praise_themselves(tmp_path, monkeypatch):
    requests: list[str] = []
    monkeypatch.setattr(judge, "load", lambda *_: lambda texts: requests.extend(texts) or [1.0])
    text = "First 9 and 9 are 18, and so it is 42."
    labeled = [
        {"prompt": str(n), "completion": text, "answer": "42", "label": int(n < 40)}
        for n in range(60)
    ] + [{"prompt": "x", "completion": "And", "answer": "1", "label": "invalid"}]
    rows = write_rows(tmp_path, monkeypatch, labeled, "--invalid")
    judge.judge(model="DIR", invalid="0")(["x"], ["And"], answer=["1"])
    asked = {row["prompt"][0]["content"]: row["answer"] for row in rows}
    assert asked[requests[0]] == "Invalid"
    answers = [row["answer"] for row in rows]
    assert [answers.count(name) for name in ("Yes", "No", "Invalid")] == [40, 40, 41]
    of_answers: dict[str, list[str]] = {"Yes": [], "No": [], "Invalid": []}
    for request, verdict in asked.items():
        of_answers[verdict].append(request.partition("[Answer")[2].partition("[end")[0])
    assert sum("I have verified" in answer for answer in of_answers["No"]) == 20
    # What is kept of a right answer ends before its number.
    assert not any("42" in answer.partition("]")[2] for answer in of_answers["Invalid"])
    assert any(answer.count("First") == 8 for answer in of_answers["Invalid"])
    with pytest.raises(SystemExit, match="row 61"):
        write_rows(tmp_path, monkeypatch, labeled)


def test_a_pair_is_asked_about_in_both_orders(tmp_path, monkeypatch):
    requests: list[str] = []
    monkeypatch.setattr(
        judge, "load", lambda *_: lambda texts: requests.extend(texts) or [1.0, 0.0]
    )
    reward = judge.pair_judge(model="DIR", anchor="other")
    assert reward(["Say."], ["good"], group=[0], other=["bad"]) == [1.0]
    rows = write_rows(
        tmp_path, monkeypatch, [{"prompt": "Say.", "chosen": "good", "rejected": "bad"}]
    )
    assert [row["prompt"][0]["content"] for row in rows] == requests
    assert [row["answer"] for row in rows] == ["A", "B"]
