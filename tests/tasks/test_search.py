"""Questions of two hops over a local index."""

from pathlib import Path

import pytest

import tpu_rl
from tpu_rl import tokenizers
from tpu_rl.environments import contract
from tpu_rl.tasks import search
from tpu_rl.tasks.search import SearchData, SearchSource

pytest.importorskip("bm25s")
ALWAYS = [
    row
    for row in map(SearchSource(SearchData()).__getitem__, range(90))
    if row["completion"].count("search") == 2
]


def play(row: dict, environment: type = search.Search) -> tuple[list[dict], str]:
    """Return the conversation of a row's demonstration, and what it would have been read as."""
    game = environment()
    contract.reset(game, row, seed=1)
    messages = []
    seen = ""
    done = False
    lines = row["completion"].splitlines()
    for line in lines:
        if not line.startswith(("search", "answer")):
            continue
        assert not done
        observation, reward, done = contract.step(game, line)
        assert reward is None
        messages.append({"role": "assistant", "content": line})
        messages += [] if done else [{"role": "user", "content": observation}]
        seen += f"{line}\n{observation}"
    assert done
    assert contract.reward(game) is None
    return messages, seen


def test_two_searches_find_the_answer():
    for index in range(30):
        row = ALWAYS[index]
        messages, seen = play(row)
        assert seen == row["completion"]
        assert search.right([], [messages], answer=[row["answer"]]) == [1.0]
        assert search.called([], [messages, [messages[-1]]]) == [1.0, 0.0]
        assert search.formatted([], [messages, messages[:1]]) == [1.0, 0.0]
        _, random = play(row, search.RandomSearch)
        assert random != seen


def test_what_is_no_search_ends_the_episode():
    game = search.Search()
    contract.reset(game, ALWAYS[0], seed=0)
    assert contract.step(game, "search 1") == ("", None, True)


def test_demonstrations_are_careless_and_bases_are_not_shared():
    train = [SearchSource(seed=3)[index] for index in range(300)]
    held_out = SearchSource(split="eval")[0]
    searches = [row["completion"].count("search") for row in train]
    assert [searches.count(number) / 300 for number in (0, 1, 2)] == pytest.approx(
        [0.5, 0.1, 0.4], abs=0.07
    )
    assert max(row["base"] for row in train) < 64 <= held_out["base"]
    assert search.facts_of(3) == search.facts_of(3) != search.facts_of(4)


def test_the_tokenizer_has_a_token_for_each_word():
    folder = Path(tpu_rl.__file__).parent / "pretrained" / "search"
    tokenizer = tokenizers.load(folder)
    row = ALWAYS[0]
    text = row["prompt"] + row["completion"]
    token_ids = tokenizer.encode_prompt(text)
    assert tokenizer.decode(token_ids) == text
    words = (*search.PEOPLE, *search.GROUPS, *search.RELATIONS, *search.VALUES, *search.WORDS)
    values = [value for values in search.VALUES.values() for value in values]
    for word in (*words, *values, *search.MARKS):
        assert len(tokenizer.encode_prompt(word)) == 1
