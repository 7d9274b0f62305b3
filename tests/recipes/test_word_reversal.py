"""The rows and the rewards of word reversal."""

import json
from pathlib import Path

import pytest

from recipes.word_reversal import make_rows
from tpu_rl import rewards, user_code

FOLDER = Path(make_rows.__file__).parent


def rows_of(name: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]


def text_of(row: dict) -> str:
    return row["prompt"][0]["content"]


def values(function: str, texts: list[str], answer: str) -> list[float]:
    """Return the rewards of texts as answers in a conversation."""
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    prompts = [[{"role": "user", "content": "..."}]] * len(texts)
    loaded = user_code.load_function(f"{FOLDER / 'reward.py'}:{function}", "reward")
    columns = {"answer": [answer] * len(texts)}
    return rewards.score({function: loaded}, prompts, completions, columns).totals.tolist()


def test_the_files_are_those_that_the_script_writes():
    assert make_rows.word_rows() == (rows_of("train.jsonl"), rows_of("held_out.jsonl"))


@pytest.mark.parametrize("make", [make_rows.word_rows, make_rows.letter_rows])
def test_no_held_out_word_is_trained_on(make):
    train, held_out = ({word for row in part for word in row["answer"].split()} for part in make())
    assert len(held_out) > 40
    assert train & held_out == set()


def test_answers_are_the_words_in_reverse_order():
    for row in rows_of("train.jsonl") + rows_of("held_out.jsonl"):
        words = row["answer"].split()
        assert len(set(words)) == make_rows.WORDS_PER_ROW
        assert text_of(row).endswith(f": {' '.join(reversed(words))}")


def test_answers_are_the_letters_in_reverse_order():
    train, held_out = make_rows.letter_rows()
    assert len(held_out) == make_rows.HELD_OUT_WORDS
    for row in train + held_out:
        word = row["answer"][::-1]
        assert f"'{word}'" in text_of(row)
        assert word != row["answer"]


def test_reward_is_one_only_for_the_right_answer():
    texts = ["peels", " peels\n", "peel", "The reverse of sleep is peels.", ""]
    results = values("reward", texts, "peels")
    assert results[:2] == [1, 1]
    # Similarity 2M / T: 4 equal letters in order, of 5 + 4.
    assert results[2] == pytest.approx(8 / 9)
    assert results[3] < 0.5
    assert results[4] == 0


def test_exact_counts_right_answers_alone():
    assert values("exact", ["wind tree", "wind  tree", "tree wind", ""], "wind tree") == [
        1,
        0,
        0,
        0,
    ]
