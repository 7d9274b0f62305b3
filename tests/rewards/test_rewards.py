"""Rewards: errors never become zeros, and user code is named."""

import itertools
import math
import sys

import numpy as np
import pytest

from tpu_rl import rewards
from tpu_rl.errors import InputError
from tpu_rl.rewards import scoring

PROMPTS = ["a", "b", "c", "d"]
COMPLETIONS = ["1", "2", "3", "4"]


def float32(values):
    return np.array(values, np.float32)


def numbers(prompts, completions, **columns):
    return [float(text) for text in completions]


def score(function, **columns):
    return rewards.score({"f": function}, PROMPTS, COMPLETIONS, columns)


# --- scoring ---


def test_totals_are_sums_of_parts():
    scores = rewards.score(
        {"numbers": numbers, "half": lambda completions, **_: [0.5] * len(completions)},
        PROMPTS,
        COMPLETIONS,
        {},
    )
    np.testing.assert_array_equal(scores.totals, float32([1.5, 2.5, 3.5, 4.5]))
    np.testing.assert_array_equal(scores.parts["half"], float32([0.5] * 4))
    assert scores.totals.dtype == scores.parts["numbers"].dtype == np.float32
    assert scores.faults == []


def test_none_means_not_scored_and_never_zero():
    first = rewards.score(
        {
            "some": lambda completions, **_: [1.0, None, None, 4.0],
            "other": lambda completions, **_: [None, 2.0, None, 0.5],
        },
        PROMPTS,
        COMPLETIONS,
        {},
    )
    np.testing.assert_array_equal(first.totals, float32([1, 2, np.nan, 4.5]))
    assert first.faults == []


def test_columns_reach_the_function_and_only_those_it_takes():
    def wants_answer(completions, answer):
        return [float(text == right) for text, right in zip(completions, answer, strict=True)]

    scores = score(wants_answer, answer=["1", "0", "3", "0"], other=[0] * 4, prompts=["x"] * 4)
    np.testing.assert_array_equal(scores.totals, float32([1, 0, 1, 0]))
    seen = {}
    score(lambda **columns: seen.update(columns) or [0.0] * 4, answer=[1, 2, 3, 4])
    assert seen == {"prompts": PROMPTS, "completions": COMPLETIONS, "answer": [1, 2, 3, 4]}


def test_a_missing_column_is_an_input_error():
    with pytest.raises(InputError, match="needs a column 'answer'") as error:
        score(lambda completions, answer: [0.0], anwser=[1] * 4, level=[1] * 4)
    assert error.value.where == "columns present: anwser, level"
    assert error.value.fix == "did you mean anwser?"
    with pytest.raises(InputError) as error:
        score(lambda completions, answer: [0.0], ground_truth=["3"] * 4)
    assert error.value.fix.endswith("--data.columns answer=ground_truth")
    with pytest.raises(InputError) as error:
        score(lambda completions, gold: [0.0], solution=["2 + 1"] * 4, answer=["3"] * 4)
    assert error.value.fix.endswith("--data.columns gold=answer")


@pytest.mark.parametrize(
    ("function", "remedy"),
    [
        (lambda queries, prompts, labels: [], "score(prompts, completions, labels"),
        (lambda data_sources, solution_strs, ground_truths: [], "of one completion"),
        (lambda completions, trainer_state: [], "name `step`"),
        (lambda completions, log_metric, **columns: [], "the default None"),
        (lambda env, message_log_batch, metadata: [], "NeMo RL"),
        (lambda completions, environments, **columns: [], "--environment"),
        (lambda completions, tests, **columns: [], "code_grpo"),
    ],
)
def test_the_forms_of_other_libraries_have_a_remedy(function, remedy):
    with pytest.raises(InputError, match="needs a column") as error:
        score(function, data_source=[1] * 4)
    assert remedy in error.value.fix


def test_a_function_that_makes_a_reward_is_none():
    def get_reward(scale: float = 1.0):  # open-r1's form
        return lambda completions: [scale] * len(completions)

    with pytest.raises(InputError, match="reads nothing") as error:
        score(get_reward, answer=[1] * 4)
    assert "name what it returned" in error.value.fix


def test_one_bad_row_does_not_spoil_the_others():
    def fails_on_three(prompts, completions, **columns):
        return [1 / (int(text) - 3) for text in completions]

    scores = score(fails_on_three)
    np.testing.assert_array_equal(scores.totals, float32([-0.5, -1, np.nan, 1]))
    (fault,) = scores.faults
    assert (fault.function, fault.row) == ("f", 2)
    assert fault.message.startswith("ZeroDivisionError: ")
    assert "test_rewards.py:" in fault.message


def test_a_row_with_a_fault_has_no_total_though_other_functions_scored_it():
    scores = rewards.score(
        {"numbers": numbers, "faulty": lambda completions, **_: [0.0, math.nan, 0.0, 0.0]},
        PROMPTS,
        COMPLETIONS,
        {},
    )
    np.testing.assert_array_equal(scores.totals, float32([1, np.nan, 3, 4]))
    np.testing.assert_array_equal(scores.parts["numbers"], float32([1, 2, 3, 4]))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "it returned NaN; for what cannot be scored return None"),
        (-math.inf, "it returned -inf"),
        (1e39, "it returned 1e+39"),
        ("1.0", "it returned '1.0' and not a number"),
        ([1.0], "it returned [1.0] and not a number"),
        (TimeoutError("too late"), "too late"),
    ],
)
def test_values_that_are_not_finite_numbers_are_faults(value, message):
    scores = score(lambda completions, **_: [1.0, 1.0, value, 1.0])
    np.testing.assert_array_equal(scores.totals, float32([1, 1, np.nan, 1]))
    assert scores.faults[0].message.startswith(message)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1e9, 1e9 + 60], "refused"),
        ([1e8, 1e8 + 1], "refused"),
        ([0.3, 0.1 + 0.2], ""),
        ([0.99, 1.0], ""),
        ([5.0, 5.0], ""),
        ([1e-30, 2e-30], ""),
        ([None, 1.0, 1.0 + 1e-7], "note"),
        ([None, None], ""),
    ],
)
def test_differences_that_float32_blurs_are_said(values, said, capsys):
    scoring._say.cache_clear()

    def reward(completions, **_):
        return (values * 4)[: len(completions)]

    if said == "refused":
        with pytest.raises(InputError, match="less than a float32 can tell") as error:
            score(reward)
        assert "subtract a constant" in error.value.fix
    else:
        score(reward)
        assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize("value", [1, True, np.float64(1), np.bool_(True), np.float32(1)])
def test_numbers_of_all_types_are_accepted(value):
    np.testing.assert_array_equal(
        score(lambda completions, **_: [value] * 4).totals, np.ones(4, np.float32)
    )
    np.testing.assert_array_equal(
        score(lambda completions, **_: np.ones(4)).totals, np.ones(4, np.float32)
    )


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda completions, **_: 1.0, "it returned 1.0 and not a list"),
        (lambda completions, **_: None, "it returned None and not a list"),
        (lambda completions, **_: "abcd", "it returned 'abcd' and not a list"),
        (lambda completions, **_: sys.exit("bye"), "SystemExit: bye"),
        (lambda completions, **_: [completions[0].nonsense], "AttributeError"),
    ],
)
def test_a_function_that_fails_everywhere_stops_the_run(function, why):
    with pytest.raises(InputError, match="fail on 4 of 4 completions") as error:
        score(function)
    assert why in error.value.why
    assert error.value.where == "f, first on row 0: '1'"


def test_the_threshold_counts_rows():
    def faulty(completions, **_):
        return [1.0, math.nan, 1.0, math.nan]

    assert len(score(faulty).faults) == 2
    with pytest.raises(InputError, match="fail on 2 of 4"):
        rewards.score({"f": faulty}, PROMPTS, COMPLETIONS, {}, max_fault_share=0.49)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda completions: [1.0, 2.0], "it returned 2 values for 4 completions"),
        (lambda completions: [], "it returned 0 values for 4 completions"),
        (lambda completions: [1.0] * 8, "it returned 8 values for 4 completions"),
        (lambda completions: itertools.repeat(1.0), "it returned more than 4 values for 4"),
    ],
)
def test_a_wrong_number_of_values_is_an_error_and_costs_one_call(function, why):
    """Nobody knows which value belongs to which completion, and a judge may cost money."""
    calls = []

    def counting(completions, **_):
        calls.append(len(completions))
        return function(completions)

    with pytest.raises(InputError, match="a wrong number of values") as error:
        score(counting)
    assert why in error.value.why
    assert error.value.where == "f"
    assert calls == [4]


def test_no_completions_are_no_fault():
    assert rewards.score({"f": numbers}, [], [], {}).totals.shape == (0,)


# --- user files ---


def test_functions_come_from_files(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def score(prompts, completions, **columns):\n    return [1.0 for _ in completions]\n"
    )
    assert rewards.from_path(f"{file}:score")(PROMPTS, COMPLETIONS) == [1.0] * 4


@pytest.mark.parametrize(
    ("source", "path", "what", "where", "fix"),
    [
        ("def score(): pass", "mine.py", "does not name a reward function", "", "FILE.py:function"),
        ("def score(): pass", "mine.py:", "does not name a reward function", "", "arithmetic"),
        ("def score(): pass", "mien.py:score", "no such reward file", "mien.py", "mine.py?"),
        ("def scores(): pass", "mine.py:score", "no function 'score'", "defines scores", "scores?"),
        ("score = 3", "mine.py:score", "no function 'score'", "defines no function", ""),
        ("import os\n\ndef f(:\n", "mine.py:f", "does not load", "mine.py:3", ""),
        ("import nonexistent_package", "mine.py:f", "does not load", "mine.py:1", ""),
        ("def g():\n    return 1 / 0\n\ng()\n", "mine.py:f", "does not load", "mine.py:2", ""),
    ],
)
def test_faults_of_user_files_are_named(tmp_path, source, path, what, where, fix):
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(InputError, match=what) as error:
        rewards.from_path(str(tmp_path / path))
    assert where in error.value.where
    assert fix in error.value.fix
    assert error.value.__cause__ is None


def test_whole_batch_functions_are_not_called_with_a_part():
    def score(completions, **_):
        return [1 / len(text) - len(completions) for text in completions]

    score.whole_batch = True
    numbers, faults, _ = rewards.apply("length", score, ["q"] * 3, ["a", "", "b"], {})
    assert np.isnan(numbers).all()
    assert [fault.row for fault in faults] == [0, 1, 2]
    assert "division by zero" in faults[0].message
