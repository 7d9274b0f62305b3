"""Paths of a completion that do not see each other, and a summary that reads all of them."""

import asyncio
import math

import pytest

from recipes.parallel_paths import agent


def test_a_path_sees_no_other_and_the_summary_sees_all(monkeypatch):
    asked = []
    answers = {"2+3=": ("I try", True), "path": iter("45"), "rest": ("so</Summary> 5", False)}

    def ask(base_url, api_key, prompt, stop):
        asked.append((prompt, stop))
        if stop == agent.END:
            return next(answers["path"]), True
        return answers["2+3="] if prompt == "2+3=" else answers["rest"]

    monkeypatch.setattr(agent, "ask", ask)
    result = asyncio.run(agent.run({"prompt": "2+3=", "answer": "5"}, "", ""))
    path = "2+3=I try<Parallel><Path>"
    assert sorted(asked[1:3]) == [(path, "</Path>")] * 2
    block = sorted(("<Path>4</Path>", "<Path>5</Path>"))
    summary, stop = asked[3]
    assert stop == "<Parallel>"
    assert summary in (
        f"2+3=I try<Parallel>{first}{second}</Parallel><Summary>"
        for first, second in (block, block[::-1])
    )
    assert len(asked) == 4
    assert result == pytest.approx(1 + 0.6 * math.log(2))


def test_blocks_end_and_wrong_answers_cost(monkeypatch):
    """Every text ends with another block, until there are four; then the number is a wrong one."""
    monkeypatch.setattr(agent, "ask", lambda url, key, prompt, stop: ("7", stop is not None))
    result = asyncio.run(agent.run({"prompt": "2+3=", "answer": "5"}, "", ""))
    assert result == pytest.approx(-1 - 0.1 * math.log(5))
    assert agent.reward("no number", "5", 0) == -1
    assert agent.reward("it is 5.0", "5", 0) == 1
