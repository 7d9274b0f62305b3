"""The rows and the reward of arithmetic."""

from pathlib import Path

import pytest

from recipes.arithmetic import make_rows
from tpu_rl import rewards, user_code

REWARD = f"{Path(make_rows.__file__).with_name('reward.py')}:reward"


@pytest.mark.parametrize("operation", make_rows.OPERATIONS)
def test_answers_are_right_and_no_held_out_pair_is_trained_on(operation):
    train, held_out = make_rows.rows(operation)
    assert (len(train), len(held_out)) == (make_rows.TRAIN, make_rows.HELD_OUT)
    pairs = []
    for row in train + held_out:
        question = row["prompt"][0]["content"]
        answer = row["completion"]
        _, _, left, sign, right = question.partition("?")[0].split()
        assert answer == row["answer"]
        assert int(answer) == (int(left) + int(right) if sign == "+" else int(left) * int(right))
        pairs.append(frozenset((left, right)))
    assert len(set(pairs)) == len(pairs)


def test_reward_asks_for_the_number_alone():
    texts = ["82", " 82\n", "28", "It is 82.", "82.", ""]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    values = rewards.score(
        {"reward": user_code.load_function(REWARD, "reward")},
        ["..."] * len(texts),
        completions,
        {"answer": ["82"] * len(texts)},
    ).totals
    assert values.tolist() == [1, 1, 0, 0, 0, 0]
