"""The rows and the reward of arithmetic."""

from pathlib import Path

import pytest

from recipes.arithmetic import make_rows, make_texts, reward
from tpu_rl import rewards, user_code

REWARDS = Path(make_rows.__file__).with_name("reward.py")


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


def score(function, completions):
    """Return the totals of a reward of the recipe, for answers that should be 82."""
    return rewards.score(
        {"reward": user_code.load_function(f"{REWARDS}:{function}", "reward")},
        ["..."] * len(completions),
        completions,
        {"answer": ["82"] * len(completions)},
    ).totals.tolist()


def test_reward_asks_for_the_number_alone():
    texts = ["82", " 82\n", "28", "It is 82.", "82.", ""]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    assert score("reward", completions) == [1, 1, 0, 0, 0, 0]


def test_the_last_line_is_the_number_alone():
    texts = ["4 + 8 = 12\n92", "92", "30 + 50 = 80\n 92 \n", "92\nor 93", "80 + 12 = 92", ""]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    values = reward.last_line([""] * len(texts), completions, ["92"] * len(texts))
    assert values == [1, 1, 1, 0, 0, 0]


def test_a_continued_line_is_the_number_alone():
    assert score("continued", [" 82\n", "82", " 82", " 28\n", " 82 +", ""]) == [1, 1, 1, 0, 0, 0]


def test_texts_are_right_and_their_pairs_are_apart():
    files = make_texts.rows(largest=12, worked=2)
    pairs = {}
    for name, part in files.items():
        asked, shown = set(), set()
        for row in part:
            *examples, last = row["prompt"].split("\n")
            assert len(examples) == 2
            assert last.endswith(" =")
            for line in (*examples, f"{last} {row['answer']}"):
                left, sign, right, _, answer = line.split()
                total = int(left) + (int(right) if sign == "+" else -int(right))
                assert int(answer) == total
                numbers = (left, right) if sign == "+" else (answer, right)
                (shown if line in examples else asked).add(frozenset(numbers))
        pairs[name] = asked
        pairs["examples"] = pairs.get("examples", set()) | shown
    assert pairs["differences_held_out"] == pairs["sums_held_out"]
    train, held_out, examples = pairs["sums_train"], pairs["sums_held_out"], pairs["examples"]
    assert not train & held_out
    assert not examples & (train | held_out)
    assert min(len(train), len(held_out), len(examples)) > 5
