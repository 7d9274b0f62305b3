"""Consistency of rewards under rewording, by hand."""

import numpy as np
import pytest

from tpu_rl import rewards
from tpu_rl.errors import InputError
from tpu_rl.rewards import registry, scoring
from tpu_rl.studies import verifier_bench
from tpu_rl.verifiers import others


def of_length(prompts, completions, bonus=None):
    """A reward that depends on the wording: the length of the prompt."""
    texts = [prompt if isinstance(prompt, str) else prompt[-1]["content"] for prompt in prompts]
    bonus = bonus or [0] * len(texts)
    return [None if "no" in text else len(text) + b for text, b in zip(texts, bonus, strict=True)]


def score(reward, prompts, **columns):
    values, _, _ = rewards.apply("r", reward, prompts, ["c"] * len(prompts), columns)
    return values.tolist()


def test_a_reward_pays_for_its_deviation_over_wordings():
    prompts = ["ab", [{"role": "system", "content": "s"}, {"role": "user", "content": "abcd"}], "a"]
    columns = {"rewordings": [["abcd"], [], ["no"]], "bonus": [1, 0, 0]}
    # Lengths 2 and 4, and the bonus of the row: mean 4, deviation 1.
    values = score(others.consistent(of_length, 2.0), prompts, **columns)
    assert values[:2] == [2, 4]
    assert np.isnan(values[2])
    names = [parameter.name for parameter in scoring.parameters(others.consistent(of_length))]
    assert {"rewordings", "bonus"} <= set(names)


def test_the_last_question_of_a_conversation_is_reworded():
    prompt = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    prompt += [{"role": "user", "content": "c"}]
    assert [m["content"] for m in others._with_text(prompt, "d", "user")] == ["a", "b", "d"]
    assert prompt[-1]["content"] == "c"


@pytest.mark.parametrize("rewordings", [None, "another", [3], [""]])
def test_rewordings_are_texts(rewordings):
    with pytest.raises(InputError, match="rewordings"):
        score(others.consistent(of_length), ["a"], rewordings=[rewordings])


def test_consistent_names_its_reward():
    with pytest.raises(InputError, match="it needs of="):
        registry.resolve("consistent")


def test_right_completions_are_compared_with_the_nearest_other_prompt():
    prompts = ["write a sad poem", "write a glad poem", "add two numbers", "add two numbers"]
    completions = ["sad", "glad", "3", "4"]

    def words(prompts, completions, **_):
        return [float(text in prompt) for prompt, text in zip(prompts, completions, strict=True)]

    labels = np.array([1.0, 1.0, 1.0, 0.0])
    # Two of the three right ones are told apart; "3" is in no prompt, which is a tie.
    value = verifier_bench.consistency(words, prompts, completions, {}, labels)
    assert value == pytest.approx((1 + 1 + 0.5) / 3)
    assert np.isnan(verifier_bench.consistency(words, ["p"] * 4, completions, {}, labels))
