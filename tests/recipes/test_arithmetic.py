"""The rows and the reward of arithmetic."""

from pathlib import Path

import pytest

from recipes.arithmetic import make_rows, reward
from tpu_rl import rewards, user_code

REWARD = f"{Path(make_rows.__file__).with_name('reward.py')}:reward"


@pytest.mark.parametrize("kind", make_rows.KINDS)
def test_answers_are_right_and_no_held_out_pair_is_trained_on(kind):
    train, held_out = make_rows.rows(kind)
    assert (len(train), len(held_out)) == (make_rows.TRAIN, make_rows.HELD_OUT)
    pairs = []
    for row in train + held_out:
        question = row["prompt"][0]["content"]
        answer = row["completion"]
        for step in answer.splitlines()[:-1]:
            addends, _, total = step.partition(" = ")
            assert sum(map(int, addends.split(" + "))) == int(total)
        _, _, left, sign, right = question.partition("?")[0].split()
        assert answer.rpartition("\n")[2] == row["answer"]
        assert int(row["answer"]) == (
            int(left) + int(right) if sign == "+" else int(left) * int(right)
        )
        pairs.append(frozenset((left, right)))
    assert len(set(pairs)) == len(pairs)


def test_worked_sums_have_the_pairs_of_sums():
    questions = [
        make_rows.rows(kind)[1][0]["prompt"][0]["content"] for kind in ("sums", "worked_sums")
    ]
    assert questions[0].partition("?")[0] == questions[1].partition("?")[0]
    assert make_rows.worked_sum(34, 58) == "4 + 8 = 12\n30 + 50 = 80\n80 + 12 = 92\n92"


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


def test_the_last_line_is_the_number_alone():
    texts = ["4 + 8 = 12\n92", "92", "30 + 50 = 80\n 92 \n", "92\nor 93", "80 + 12 = 92", ""]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    values = reward.last_line([""] * len(texts), completions, ["92"] * len(texts))
    assert values == [1, 1, 1, 0, 0, 0]
