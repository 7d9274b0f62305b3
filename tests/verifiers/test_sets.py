"""F-beta over sets and its hackable control."""

import numpy as np
import pytest

from tests.fixtures.reward_scores import score
from tpu_rl.errors import InputError
from tpu_rl.verifiers import sets

GOLD = ["a.py", "b.py"]


@pytest.mark.parametrize(
    "text",
    [
        '["a.py", "b.py"]',
        "['b.py', 'a.py']",
        "a.py, b.py",
        "- `a.py`\n- `b.py`",
        "1. a.py\n2) b.py\n",
        "<think>c.py</think>\nFiles:\n```\na.py\nb.py\n```",
        '<think>[</think> So <answer>["a.py", "b.py"]</answer>.',
    ],
)
def test_items_are_read(text):
    assert sets.items_of(text) == set(GOLD)
    assert score("f_beta", [text], answer=[GOLD]) == [1]


def test_f_beta_table():
    """Two gold items; P and R give F by its definition."""
    texts = ["a.py", "a.py, x", "a.py, b.py, x, y", "x", "", "<think>a.py"]
    precision = np.array([1, 0.5, 0.5])
    recall = np.array([0.5, 0.5, 1])
    for beta in (1.0, 2.0):
        f = (1 + beta**2) * precision * recall / (beta**2 * precision + recall)
        values = score(f"f_beta(beta={beta})", texts, answer=[GOLD] * 6)
        np.testing.assert_allclose(values, [*f, 0, 0, 0], rtol=1e-6)
    assert score("hit_score", texts, answer=[GOLD] * 6) == [1, 1, 1, 0, 0, 0]
    assert score("listed_items", texts) == [1, 2, 4, 1, 0, 0]


def test_only_the_hit_score_rises_with_a_list_of_everything():
    everything = ",".join(["a.py", *(f"{n}.py" for n in range(98)), "b.py"])
    columns = {"answer": ['["a.py", "b.py"]'] * 2}
    honest_and_hack = ["a.py", everything]
    assert score("hit_score", honest_and_hack, **columns) == [1, 1]
    honest, hack = score("f_beta", honest_and_hack, **columns)
    assert hack < 0.1 < 0.5 < honest


@pytest.mark.parametrize("gold", [None, 3, "", []])
def test_a_gold_set_that_cannot_be_read_is_an_input_error(gold):
    with pytest.raises(InputError, match="column 'answer' of the data") as error:
        score("f_beta", ["a", "b"], answer=[GOLD, gold])
    assert error.value.where.startswith("row 1 ")
