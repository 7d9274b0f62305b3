"""Rewards of parts of a completion, from the function to the token that they land on."""

import numpy as np
import pytest

from tests.fixtures.echo import TOKENIZER, score_prompts
from tpu_rl import rewards, wings
from tpu_rl.errors import InputError
from tpu_rl.experience import transforms
from tpu_rl.rewards.terms import parse_all
from tpu_rl.rollout import scoring
from tpu_rl.runtime import segments


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.5, None),
        ([], []),
        ([(0, 2, 1), [2, 4, -0.5]], [(0, 2, 1.0), (2, 4, -0.5)]),
        ([(np.int64(0), 4, np.float32(2))], [(0, 4, 2.0)]),
        ([(0, 5, 1.0)], "the segment (0, 5, 1.0) is not within 4 characters"),
        ([(3, 1, 1.0)], "the segment (3, 1, 1.0) is not within 4 characters"),
        ([(0, 1.5, 1.0)], "the segment (0, 1.5, 1.0) has no whole numbers as start and end"),
        ([(0, 1, "a")], "of the segment (0, 1, 'a'): it returned 'a' and not a number"),
        ([0.5], "it returned [0.5] and not a number or (start, end, value) segments"),
    ],
)
def test_what_a_function_returns_is_read_or_named(value, expected):
    assert segments.read(value, 4) == expected


def by_word(completions, **_):
    """Two segments of two characters each, with the rewards 1 and 2."""
    return [[(0, 2, 1.0), (2, 4, 2.0)] if text == "abcd" else 5.0 for text in completions]


def flag(completions, **_):
    return [float(text == "abcd") for text in completions]


def test_segments_have_the_weights_and_gates_of_their_terms():
    functions = {"by_word": by_word, "flag": flag, "low": lambda completions, **_: [0.0, 0.0]}
    total = parse_all(["0.5*by_word", "by_word?low>0", "-2*by_word?flag>0", "flag"])
    scores = rewards.score(functions, ["q"] * 2, ["abcd", "xy"], {}, terms=total)
    np.testing.assert_array_equal(scores.parts["by_word"], [3.0, 5.0])
    np.testing.assert_array_equal(scores.totals, [1.5 - 6.0 + 1.0, 2.5])
    assert scores.segments == {0: [(0, 2, 0.5), (2, 4, 1.0), (0, 2, -2.0), (2, 4, -4.0)]}


def test_a_wrong_segment_is_a_fault_of_its_row():
    functions = {"f": lambda completions, **_: [[(0, 9, 1.0)], [(0, 1, 1.0)]]}
    scores = rewards.score(functions, ["q"] * 2, ["ab", "cd"], {})
    np.testing.assert_array_equal(scores.totals, [np.nan, 1.0])
    assert scores.faults[0].message == "the segment (0, 9, 1.0) is not within 2 characters"


def placed(of_rows, decode=lambda prompt, ids: TOKENIZER.decode(ids), episodes=None):
    """Rewards of completions `123` with an end and `45` without, after a prompt of one token."""
    tokens = np.zeros((2, 6), np.int32)
    ids = [TOKENIZER.encode("1" + text) for text in ("123", "45")]
    tokens[0, :5] = [*ids[0], TOKENIZER.eos_ids[0]]
    tokens[1, :3] = ids[1]
    mask = np.arange(6)[None] < np.array([5, 3])[:, None]
    mask[:, 0] = False
    rollout = score_prompts(["12"], {}, group_size=2).rollout.replace(
        tokens=tokens, action_mask=mask
    )
    sampled = scoring.Sampled(
        rollout=rollout,
        rows=[{"prompt": "1"}],
        prompts=["1"] * 2,
        completions=["123", "45"],
        lengths=mask.sum(1),
        episodes=episodes,
    )
    return scoring.placed_segments(sampled, of_rows, decode)


def test_a_segment_lands_on_the_token_of_its_last_character():
    """Overlapping segments add up; one that ends with the text is on the last action."""
    actual = placed({0: [(0, 2, 1.0), (1, 2, 0.5), (2, 3, 4.0)], 1: [(0, 1, 2.0), (0, 0, 8.0)]})
    np.testing.assert_array_equal(actual, [[0, 0, 1.5, 0, 4, 0], [0, 10, 0, 0, 0, 0]])


def test_tokens_of_several_characters_and_of_none():
    """Token 1 writes `1a`, token 2 nothing, token 3 `23`."""
    texts = dict(zip(TOKENIZER.encode("123"), ["1a", "", "23"], strict=True))
    decode = lambda prompt, ids: "".join(texts.get(token, "") for token in ids)  # noqa: E731
    ids = TOKENIZER.encode("123")
    counts = [segments.count_tokens(ids, end, lambda some: decode("", some)) for end in range(5)]
    assert counts == [0, 1, 1, 3, 3]


def test_segments_of_a_conversation_are_refused():
    with pytest.raises(InputError, match="segments of a conversation"):
        placed({0: [(0, 1, 1.0)]}, decode=None)


def test_segments_add_up_to_the_reward_in_a_rollout():
    """From the reward function to the rollout: what no segment has is on the last action."""

    def score(completions, **_):
        return [[(0, 1, float(text))] for text in completions]

    scored = score_prompts(["12"], {"score": score, "one": lambda prompts, **_: [1.0] * 2}, 2)
    np.testing.assert_array_equal(scored.rewards, [2.0, 3.0])
    np.testing.assert_array_equal(scored.rollout.rewards.sum(1), [2.0, 3.0])


def test_scaled_sums_refuse_segments():
    scored = score_prompts(["12"], {}, group_size=2)
    rewards_of = np.zeros(scored.rollout.action_mask.shape, np.float32)
    rewards_of[0, scored.rollout.action_mask[0].argmax()] = 1.0
    scored = scoring.replace(scored, rollout=scored.rollout.replace(rewards=rewards_of))
    with pytest.raises(InputError, match="lose their places"):
        transforms.normalized_rewards(parse_all(["a", "b"]))(scored, 1, None)


def test_a_worker_sends_segments(tmp_path):
    """FILE.py:function gives segments through its process."""
    file = tmp_path / "mine.py"
    file.write_text(
        "def score(completions, **_):\n    return [[(0, 1, 0.5)], 2.0, [(0, 'a', 1.0)]]\n"
    )
    function = rewards.from_path(f"{file}:score")
    values, faults, of_rows = rewards.apply("mine", function, ["q"] * 3, ["a", "b", "c"], {})
    np.testing.assert_array_equal(values, [0.5, 2.0, np.nan])
    assert of_rows == {0: [(0, 1, 0.5)]}
    assert "no whole numbers" in faults[0].message


def test_dense_needs_a_reward_model_and_an_end_of_parts():
    with pytest.raises(InputError, match="use a reward model"):
        wings.VERIFIERS["dense"].make(of=flag)
    with pytest.raises(InputError, match="needs of="):
        rewards.registry.resolve("dense")
