"""Verifiers of final answers: arithmetic, GSM8K and math-verify know equal answers."""

import functools
from fractions import Fraction

import numpy as np
import pytest

from tpu_rl import rewards, wings
from tpu_rl.errors import InputError, MachineError
from tpu_rl.verifiers import gsm8k_answers, math_verify_pool


def float32(values):
    return np.array(values, np.float32)


def test_arithmetic():
    completions = ["3+4=7;#7", "#7", "7", "#8", "#7#7", [{"role": "assistant", "content": "#7"}]]
    answer = ["7"] * 6
    scores = wings.VERIFIERS["arithmetic"].score(completions, completions, answer=answer)
    assert scores == [
        1,
        1,
        0,
        0,
        0,
        1,
    ]
    well_formed = wings.VERIFIERS["arithmetic_well_formed"].score
    assert well_formed(completions, completions, answer=answer) == [
        1,
        1,
        0,
        1,
        0,
        1,
    ]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("72", 72),
        ("$1,234.00 in all", 1234),
        ("-$5", -5),
        ("\u22125", -5),
        ("50%", 50),
        (".5", Fraction(1, 2)),
        ("1/2", Fraction(1, 2)),
        ("3/0", None),
        ("1,234,567.80", Fraction("1234567.8")),
        ("12.", 12),
        ("72 + 0", 72),
        ("3, 4", 3),
        ("1{,}234", 1234),
        ("10\\,000", 10000),
        ("1\\!,234", 1234),
        ("\\frac{1}{2}", Fraction(1, 2)),
        ("-\\dfrac{3}{4}", Fraction(-3, 4)),
        ("1\\frac{1}{2}", 1),
        ("none", None),
        ("", None),
    ],
)
def test_numbers_are_read(text, number):
    assert rewards.read_number(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so #### 72", 72),
        ("#### 1\n#### 2", 2),
        ("#### 0", 0),
        ("\\boxed{72}", 72),
        ("\\boxed{7} and then \\boxed{\\$1,000}", 1000),
        ("\\boxed{\\text{about } {72}} and 5", 72),
        ("\\boxed{72", 72),
        ("\\boxed{} 5", None),
        ("#### none", None),
        ("72", 72),
    ],
)
def test_the_final_number_is_marked(text, number):
    assert rewards.final_number(text) == number


def test_gsm8k():
    completions = ["#### 72", "\\boxed{72.0}", "72", "#### 71", "", "#### $72"]
    assert gsm8k_answers.gsm8k(completions, completions, answer=["72"] * 6) == [1, 1, 1, 0, 0, 1]
    assert gsm8k_answers.gsm8k(
        [], ["#### 0", "#### 5"], answer=["1 apple, then none\n#### 0", 5]
    ) == [
        1,
        1,
    ]
    scores = rewards.score(
        {"gsm8k": gsm8k_answers.gsm8k}, ["q", "q"], ["#### 1", "#### 2"], {"answer": ["?", "2"]}
    )
    np.testing.assert_array_equal(scores.totals, float32([np.nan, 1]))
    assert "the ground truth '?' contains no answer" in scores.faults[0].message
    with pytest.raises(InputError, match="needs a column 'answer'"):
        rewards.score({"gsm8k": gsm8k_answers.gsm8k}, ["q"], ["#### 1"], {})


# --- math-verify ---

STAND_IN = """
import os
def parse(text):
    return [text.strip("$")] if text.strip("$") else []
def verify(gold, answer):
    if answer == ["hang"]:
        while True:
            pass
    if answer == ["die"]:
        os._exit(1)
    print("noise that must not reach the replies")
    return gold == answer
"""


@pytest.fixture
def fresh_verifiers(monkeypatch):
    """Stop the processes that a test starts."""
    pools = []
    start = math_verify_pool._start.__wrapped__

    @functools.cache
    def start_and_note(*function):
        pools.append(start(*function))
        return pools[-1]

    monkeypatch.setattr(math_verify_pool, "_start", start_and_note)
    yield
    for pool in pools:
        pool.stop()


@pytest.mark.slow
def test_a_hanging_or_dying_verifier_costs_its_own_row_only(tmp_path, monkeypatch, fresh_verifiers):
    (tmp_path / "math_verify.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(math_verify_pool, "VERDICT_SECONDS", 2.0)
    monkeypatch.setattr(math_verify_pool, "NUM_PROCESSES", 2)
    completions = ["1", "hang", "2", "die", "1", "1", "1"]
    scores = rewards.score(
        {"math": math_verify_pool.math_equivalent},
        ["q"] * 7,
        completions,
        {"answer": [*"111111", ""]},
    )
    np.testing.assert_array_equal(scores.totals, float32([1, np.nan, 0, np.nan, 1, 1, np.nan]))
    assert [fault.row for fault in scores.faults] == [1, 3, 6]
    assert "no answer within 2 s (math_equivalence.py:" in scores.faults[0].message
    assert "exit code 1" in scores.faults[1].message
    assert "is no answer" in scores.faults[2].message


def test_math_verify_compares_answers(fresh_verifiers):
    pytest.importorskip("math_verify")
    truths = ["\\frac{1}{2}", "$x+1$", "7", "7"]
    completions = ["so \\boxed{0.5}", "$1+x$", "\\boxed{8}", "I do not know"]
    assert math_verify_pool.math_equivalent(completions, completions, answer=truths) == [1, 1, 0, 0]
    bare = [r"2\sqrt{3}", r"5\pi", "2^{10}", "6 - 5i", "1,234", "50%", "(3, 4)", r"\$18"]
    right = [rf"\boxed{{{truth}}}" for truth in bare]
    assert math_verify_pool.math_equivalent(right, right, answer=bare) == [1] * len(bare)
    wrong = [rf"\boxed{{{number}}}" for number in (2, 5, 2, 5, 1, 5, 4, 8)]
    assert math_verify_pool.math_equivalent(wrong, wrong, answer=bare) == [0] * len(bare)


def test_answers_of_a_problem_are_compared_with_each_other(fresh_verifiers):
    pytest.importorskip("math_verify")
    groups = [
        [r"so \boxed{\frac{1}{2}}", r"\boxed{0.5}", "no idea", "$2/4$", r"\boxed{2}"],
        [r"\boxed{x+1}", r"\boxed{1+x}", r"\boxed{\$18}"],
        ["I do not know"],
    ]
    assert math_verify_pool.math_answers(groups) == [[0, 0, None, 0, 1], [0, 0, 1], [None]]


def test_a_hanging_comparison_costs_its_own_problem_only(tmp_path, monkeypatch, fresh_verifiers):
    (tmp_path / "math_verify.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(math_verify_pool, "VERDICT_SECONDS", -1.0)
    monkeypatch.setattr(math_verify_pool, "NUM_PROCESSES", 2)
    groups = [["1", "2", "", "1"], ["1", "hang"], ["3", "4", "3"]]
    first, second, third = math_verify_pool.math_answers(groups)
    assert (first, third) == ([0, 1, None, 0], [0, 1, 0])
    assert "no answer within 1 s (math_equivalence.py:" in str(second)


def test_missing_math_verify_is_a_machine_error(monkeypatch, fresh_verifiers):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MachineError, match="not installed") as error:
        rewards.score({"math": math_verify_pool.math_equivalent}, ["q"], ["1"], {"answer": ["1"]})
    assert error.value.fix == 'pip install "tpu_rl[math]"'
