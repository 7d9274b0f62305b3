"""Rewards of programs: their speed beside a baseline, checks of texts, and static checks of tests.

The clock is one of the test's own, but for one run in the sandbox.
"""

from typing import Any

import pytest

from tests.fixtures.reward_scores import score
from tpu_rl import sandbox
from tpu_rl.rewards.worker_process import RewardFailure
from tpu_rl.verifiers import programs
from tpu_rl.verifiers.unit_test_quality import quality

GOOD = '''
def test_add_small_numbers():
    """Adds."""
    assert add(1, 2) == 3
    assert add(2, 2) == 4
'''


@pytest.mark.parametrize(
    ("code", "share"),
    [
        (GOOD, 1.0),
        (GOOD.replace('    """Adds."""\n', ""), 5 / 6),
        (GOOD.replace("2, 2) == 4", "1, 2) == 3"), 5 / 6),
        (GOOD + "    print(add(1, 1))\n", 5 / 6),
        (GOOD + "    assert 1 == 1\n", 5 / 6),
        (GOOD + "    for n in range(3):\n        assert add(n, 0) == n\n", 5 / 6),
        (GOOD.replace("test_add_small_numbers", "test_1"), 5 / 6),
        (
            "class T(TestCase):\n    def test_add_two(self):\n        self.assertIs(add(1, 1), 2)",
            5 / 6,
        ),
        # Two errors of one type are two asserts.
        (
            GOOD + "    with pytest.raises(TypeError):\n        add(1)\n"
            "    with pytest.raises(TypeError):\n        add()\n",
            1.0,
        ),
        (GOOD + 2 * "    with pytest.raises(TypeError):\n        add(1)\n", 5 / 6),
        # None is a test of add.
        (GOOD.replace("add(", "subtract("), 0.0),
        ("add(1, 2)", 0.0),
        ("def test_add_one(:", 0.0),
        ("(" * 9000, 0.0),
        ("", 0.0),
    ],
)
def test_static_checks_of_a_unit_test(code, share):
    assert quality(code, "add") == pytest.approx(share)


def test_the_last_block_is_the_test():
    text = f"I think of `x`.\n```python\n{GOOD}```"
    assert score("unit_test_quality", [text, text], entry_point=["add", "other"]) == [1, 0]
    assert score("unit_test_quality", [text]) == [1]


@pytest.mark.parametrize(
    ("mine", "theirs", "value"),
    [
        ([1.0, 1.0, 1.2], [4.0, 4.0, 4.0], 1 - 0.5 / 4),
        # As fast, or faster in two of three.
        ([4.0, 4.0, 4.0], [4.0, 4.0, 4.0], 0.5),
        ([1.0, 1.0, 3.9], [4.0, 4.0, 4.0], 0.5),
        ([8.0, 8.0, 8.0], [4.0, 4.0, 4.0], 0.5),
        ([1.0, None, 1.0], [4.0, 4.0, 4.0], 0.5),
    ],
)
def test_speed_is_beside_a_baseline(monkeypatch, mine, theirs, value):
    times = iter([time for pair in zip(mine, theirs, strict=True) for time in pair])
    monkeypatch.setattr(programs, "_seconds", lambda *_: next(times))
    monkeypatch.setattr(programs, "_judge_programs", lambda *_: [1.0, 0.0])
    values = programs.python_speed(
        ["p", "p"], ["a", "b"], tests=["", ""], baseline=["c", "c"], confine=False
    )
    assert values == [pytest.approx(value), 0.0]


def test_a_baseline_that_fails_is_a_fault(monkeypatch):
    monkeypatch.setattr(
        programs, "_seconds", lambda program, *_: 1.0 if program in ("a", "x = 1\n") else None
    )
    monkeypatch.setattr(programs, "_judge_programs", lambda texts, *_: [1.0] * len(texts))
    [value] = programs.python_speed(["p"], ["a"], tests=[""], baseline=["c"], confine=False)
    assert isinstance(value, RewardFailure)
    assert "baseline" in str(value)
    fenced = "It runs:\n```python\nx = 1\n```"
    baselines: list[Any] = [fenced, None]
    [slow, none] = programs.python_speed(
        ["p"] * 2, ["a"] * 2, tests=["", ""], baseline=baselines, confine=False
    )
    assert slow == 0.5
    assert "`baseline` is no text, but None" in str(none)


@pytest.mark.skipif(bool(sandbox.refusal()), reason="the kernel has no sandbox")
def test_checks_of_a_row_run_in_the_sandbox():
    short = "def check(text):\n    return len(text) < 5"
    polite = "import re\ndef check(text):\n    return re.search('please', text) is not None"
    [share] = programs.python_checks(["p"], ["<think>please</think>hi"], checks=[[short, polite]])
    assert share == 0.5
    ends = "def check(text):\n    return text == 'a\\r\\nb é'"
    assert programs.python_checks(["p"], ["a\r\nb é"], checks=[[ends]]) == [1.0]
    faults = programs.python_checks(
        ["p"] * 3, ["hi"] * 3, checks=[["def check(text): return 'yes'"], [], "short"]
    )
    assert [type(fault) for fault in faults] == [RewardFailure] * 3
    assert "it returns 'yes'" in str(faults[0])
