"""Rewards that read the form of a text, and the control that reads nothing."""

import numpy as np
import pytest

from tpu_rl.errors import InputError
from tpu_rl.rewards.registry import resolve
from tpu_rl.verifiers.others import coin
from tpu_rl.verifiers.text_form import diversity, pattern, phrases

TEXTS = ["Wait, no. wait: awaiting.", "Let me check. Let me  check", ""]


def test_phrases_are_counted_as_whole_words():
    score = phrases(any_of="wait|let me check")
    assert score([""] * 3, TEXTS) == [2.0, 1.0, 0.0]
    assert phrases(any_of="wait", most=1)([""] * 3, TEXTS) == [1.0, 0.0, 0.0]
    messages = [
        {"role": "assistant", "content": "Hmm? a.b"},
        {"role": "tool", "content": "hmm"},
    ]
    assert phrases(any_of="hmm?|a.b")([""], [messages]) == [2.0]
    with pytest.raises(InputError, match="any_of"):
        phrases(any_of="wait|")


def test_completions_of_a_prompt_differ_by_their_shared_pairs_of_tokens():
    ids = [[1, 2, 3], [7], [1, 2, 4], [1, 2, 3], [9, 9], []]
    score = diversity()([""] * 6, [""] * 6, completion_ids=ids, group=[0, 1, 0, 0, 2, 2])
    # {12, 23} and {12, 24} share one of three pairs.
    assert score == [pytest.approx(1 / 3), None, pytest.approx(2 / 3), pytest.approx(1 / 3), 1, 1]
    with pytest.raises(InputError, match="size=0"):
        diversity(size=0)


def test_a_coin_tosses_by_prompt_and_completion():
    prompts = [f"prompt {number}" for number in range(4_000)]
    texts = ["same"] * len(prompts)
    tosses = coin(p=0.3)(prompts, texts)
    assert set(tosses) == {0.0, 1.0}
    # Four standard deviations of a mean of 4,000 tosses.
    np.testing.assert_allclose(np.mean(tosses), 0.3, atol=4 * (0.3 * 0.7 / 4_000) ** 0.5)
    assert coin(p=0.3)(prompts[::-1], texts) == tosses[::-1]
    assert sum(coin(p=0.0)(prompts, texts)) == 0
    assert sum(coin(p=1.0)(prompts, texts)) == len(prompts)
    with pytest.raises(InputError, match="p=1.5"):
        coin(p=1.5)


def test_a_regular_expression_is_a_metric_of_the_form():
    texts = ["a\n#### 12", "so \\boxed{12}", "x #### 3"]
    assert pattern(regex="^#### ")([""] * 3, texts) == [1.0, 0.0, 0.0]
    assert pattern(regex=r"\\boxed")([""] * 3, texts) == [0.0, 1.0, 0.0]
    assert pattern(regex=r"x? #+ \d", whole=True)([""] * 3, texts) == [0.0, 0.0, 1.0]
    named = resolve("pattern(regex=(a|so)*.*[}])")
    assert named([""] * 3, texts) == [0.0, 1.0, 0.0]
    with pytest.raises(InputError, match="unterminated"):
        pattern(regex="[a")
    with pytest.raises(InputError, match="needs regex="):
        resolve("pattern")
