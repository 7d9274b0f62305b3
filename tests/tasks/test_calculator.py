"""The calculator that finishes marks of GSM8K's solutions."""

import pytest

from tpu_rl.environments import contract
from tpu_rl.tasks import gsm8k_rows
from tpu_rl.tasks.calculator import Calculator, calculate, result_after, right_marks

SOLUTION = "He has 16-3 = <<16-3=13>>13 eggs.\nThat is 13/2 = $<<13/2=6.5>>6.5.\n#### 6.5"


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("so <<16-3", "13>>"),
        ("<<(1,000+2)*.5", "501>>"),
        ("<<1/3", "0.3333>>"),
        ("<<-2*-3", "6>>"),
        ("16-3 ", ""),
        ("<<16-3=13>>13 and 4 ", ""),
        ("<<1/0", ""),
        ("<<2**99", ""),
        ("<<2+", ""),
        ("<<" + "(" * 79, ""),
        ("<<x*2", ""),
    ],
)
def test_the_result_of_an_open_mark_is_written(text, written):
    assert result_after(text) == written


def test_a_solution_is_written_with_the_calculator():
    """Turns end at each equals sign, also outside of marks, and the last one by itself."""
    game = Calculator()
    contract.reset(game, {"prompt": "?", "answer": "6.5"}, seed=0)
    turns = ["He has 16-3 ", " <<16-3", "13 eggs.\nThat is 13/2 ", " $<<13/2", "6.5.\n#### 6.5"]
    steps = [contract.step(game, turn, ended=turn == turns[-1]) for turn in turns]
    assert [observation for observation, _, _ in steps] == ["", "13>>", "", "6.5>>", ""]
    assert [done for _, _, done in steps] == [False] * 4 + [True]
    assert contract.reward(game) == 1.0
    messages = [
        message
        for turn, (observation, _, done) in zip(turns, steps, strict=True)
        for message in [
            {"role": "assistant", "content": turn},
            *([] if done else [{"role": "user", "content": observation}]),
        ]
    ]
    assert right_marks([], [messages]) == [1.0]


def test_wrong_marks_are_counted():
    wrong = SOLUTION.replace("=6.5>>", "=7>>")
    assert right_marks([], [SOLUTION, wrong, "#### 6.5", "<<1/3=0.33>>"]) == [1.0, 0.5, None, 1.0]
    assert calculate("12/60") == calculate(".2")


def test_solutions_are_demonstrations():
    row = gsm8k_rows.gsm8k({"question": "?", "answer": SOLUTION})
    assert gsm8k_rows.gsm8k_demonstration(row)["completion"] == SOLUTION
