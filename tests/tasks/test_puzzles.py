"""Puzzles: each solution is right by the verifier, and near misses are not."""

import pytest

from tpu_rl.errors import InputError
from tpu_rl.tasks import puzzles
from tpu_rl.tasks.puzzles import KINDS, PuzzlesData, PuzzlesSource, puzzle, read_answer


def score(row, completion):
    (value,) = puzzle([row["prompt"]], [completion], answer=[row["answer"]])
    return value


@pytest.mark.parametrize("kind", KINDS)
def test_solutions_are_right_and_other_answers_are_not(kind):
    source = PuzzlesSource(PuzzlesData((kind,), backtracks=1))
    rows = [source[i] for i in range(12)]
    assert rows == [source[i] for i in range(12)]
    for row, other in zip(rows, rows[1:], strict=False):
        assert score(row, row["completion"]) == 1
        assert score(row, row["solution"].replace("#", "")) == 0
        if row["answer"] != other["answer"] and kind != "ordered_steps":
            assert score(row, f"#{other['answer']}") == 0
    held_out = PuzzlesSource(PuzzlesData((kind,), chat=False), "eval")
    assert not {held_out[i]["prompt"] for i in range(12)} & {
        row["prompt"][0]["content"] for row in rows
    }


def test_countdown_turns_back_as_often_as_it_should():
    row = PuzzlesSource(PuzzlesData(backtracks=3, chat=False))[5]
    assert row["completion"].count("back\n") == 3
    plain = PuzzlesSource(PuzzlesData(backtracks=3, chat=False, corrupt=True))[5]
    assert plain["completion"].count("back\n") == 3
    assert score(plain, plain["completion"]) == 1
    asked = {"prompt": "Make 11 of 2, 3, 5. Use each number once", "answer": ""}
    right = ["#2*3+5", "#(2 * 3) + 5", "a\n#5+3*2\nmore"]
    wrong = ["#2*3", "#2+3+5", "#2**3+5", "#2*3+5+0", "#11", f"#{'(' * 300}", "#__import__('os')"]
    assert [score(asked, text) for text in right + wrong] == [1] * 3 + [0] * 7


def test_a_trace_says_what_each_line_left():
    lines = ["a = 1", "for i in range(2):", "    a = a + 2", "b = a"]
    visits = puzzles.trace(lines)
    assert [line for line, _ in visits] == [1, 2, 3, 2, 3, 2, 4]
    assert [state.get("a") for _, state in visits] == [1, 1, 3, 3, 5, 5, 5]
    assert visits[-1][1]["b"] == 5


def test_steps_of_a_path_have_exact_labels():
    prompt = "Edges 10-11 11-12 12-13 10-14 14-13 13-15. A shortest path from 10 to 15:\n"
    right = "10-14;14-13;13-15;#10 14 13 15"
    assert puzzles.label_steps(prompt, right) == [
        (step, True) for step in ("10-14;", "14-13;", "13-15;", "#10 14 13 15")
    ]
    longer = puzzles.label_steps(prompt, "10-11;11-12;12-13;13-15;#10 11 12 13 15")
    assert [label for _, label in longer] == [False] * 5
    jump = puzzles.label_steps(prompt, "10-14;14-15;#10 14 15")
    assert [label for _, label in jump] == [True, False, False]
    with pytest.raises(InputError, match="only steps of graph_path"):
        puzzles.label_steps("Make 3", "#1")


def test_shuffled_steps_are_graded_and_answers_vote():
    row = {"prompt": "Put the steps in order", "answer": "1+1=2; 2+1=3; 3+1=4; 4+1=5"}
    assert score(row, "#1+1=2;2+1=3;4+1=5;3+1=4") == 0.5
    assert score(row, "#1+1=2") == 0
    assert read_answer("x #1 + 1\nmore") == "1+1"
    assert read_answer("none") is None
    assert score({"prompt": "What?", "answer": "1"}, "#1") is None
    with pytest.raises(InputError, match="no puzzle is called"):
        PuzzlesData(("chess",))
