"""Letters of multiple choice: the forms in which models write them."""

import pytest

from tpu_rl import rewards, wings
from tpu_rl.rewards import registry
from tpu_rl.verifiers import choice


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("b", None),
        ("Paris is in France, so B.", "B"),
        ("It is **D**", "D"),
        ("(A)", "A"),
        ("Not (A), but (C) for this reason", "C"),
        ("P(A) = 1/2", None),
        ("The answer is B", "B"),
        ("The correct answer is (B), because (C) is too small.", "B"),
        ("The answer is **B** because it floats", "B"),
        ("the answer is option D", "D"),
        ("The answer is Berlin", None),
        ("Answer: C", "C"),
        ("<think>A or B?</think><answer> (C) Rome </answer>", "C"),
        ("<answer>Berlin</answer>", None),
        ("ANSWER: C", "C"),
        ("**Answer:** C) Paris", "C"),
        ("Answer:\n\n$\\text{C}$", "C"),
        ("Answer: A+B", None),
        ("\\boxed{D}", "D"),
        ("so $\\boxed{\\text{D}}$.", "D"),
        ("\\boxed{\\textbf{(D) } 12}", "D"),
        ("\\boxed{A + B}", None),
        ("Answer: A. No: the final answer is \\boxed{B}", "B"),
        ("\\boxed{A} is wrong. The answer is C", "C"),
        ("I cannot say", None),
        ("", None),
    ],
)
def test_letters_are_read(text, letter):
    assert choice.read_letter(text) == letter


def test_a_completion_that_chooses_the_letter_of_its_row_earns_one():
    verifier = wings.VERIFIERS["choice"]
    completions = ["(A)", "Answer: B", [{"role": "assistant", "content": "C"}], "none", "D"]
    assert verifier.score([], completions, answer=["A", "(B)", "D", "A", "d"]) == [1, 1, 0, 0, 1]


def test_a_ground_truth_without_a_letter_is_a_fault_of_its_row_only():
    scores = rewards.score(
        {"choice": wings.VERIFIERS["choice"].score}, ["q"] * 2, ["A", "A"], {"answer": ["2", "A"]}
    )
    assert scores.totals[1] == 1
    (fault,) = scores.faults
    assert fault.row == 0
    assert "the ground truth '2' is no letter" in fault.message


@pytest.mark.parametrize(
    ("choices", "is_shown"),
    [
        (["Rome", "Paris"], True),
        ({"text": ["Rome", "Paris"], "label": ["A", "B"]}, True),
        ({"A": "Rome", "B": "Paris"}, True),
        (["Oslo", "Bern"], False),
        ({"text": ["Oslo", "Bern"], "label": ["A", "B"]}, False),
        (["1", "2"], True),
        (None, True),
        ([], True),
    ],
)
def test_choices_of_a_column_stand_in_the_prompt(choices, is_shown):
    found = rewards.apply(
        "choice",
        registry.resolve("choice"),
        ["Which city? (A) Rome (B) Paris"],
        ["B"],
        {"answer": ["B"], "choices": [choices]},
    )
    assert (found.values.tolist() == [1.0]) == is_shown
    assert is_shown or "none of the choices" in found.faults[0].message
