"""Questions that need two searches in a local index (R1-Searcher, arXiv 2503.05592).

    city of club of anna        the question
    search club anna            the policy's turns, one line each
    club of anna is acme        the fact that BM25 ranks first
    search city acme
    city of acme is oslo
    answer oslo                 ends the episode

Each base of facts assigns other clubs to the people and other cities to the clubs, and a question
does not say which base it is about. So a model that does not search can only guess one of 8 words.
Evaluations use bases of their own.

Rewards, by names for `--reward`: search_called is 1 for an episode with a search, search_format for
one that ends with an answer, and search_answer for the right answer. R1-Searcher's first stage
rewards calls and format, its second one the answer and the format.

Demonstrations are those of a careless user: one half are guesses without a search, and one in ten
is a guess after the first search. So a model that imitates them knows how to search, and often does
not.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np

from tpu_rl import ranges
from tpu_rl.environments.contract import PlainState
from tpu_rl.ranges import In
from tpu_rl.rewards.verifier import Verifier
from tpu_rl.tasks.adapters import require
from tpu_rl.tasks.made_rows import MadeRows, task

PEOPLE = (
    *("anna", "bert", "cleo", "dora", "emil", "finn", "gina", "hugo"),
    *("iris", "jack", "kate", "luis", "mona", "nina", "otto", "paul"),
)
GROUPS = ("acme", "bolt", "cargo", "delta", "echo", "forum", "globe", "haven")
VALUES = {
    "city": ("bern", "cairo", "dakar", "lima", "oslo", "paris", "rome", "tokyo"),
    "color": ("blue", "brown", "gold", "gray", "green", "pink", "red", "white"),
    "animal": ("bear", "crow", "deer", "frog", "goat", "lion", "owl", "wolf"),
}
"""What is known of a group -> its possible values."""
RELATIONS = ("club", "firm", "school")
"""What a person has: one group for each."""
WORDS = ("search", "answer", "of", "is")
MARKS = ("\n", " ")
"""The tokenizer of `builtin:search` has a token for each word above, and for these marks."""

MAX_SEARCHES = 3
EVALUATION_BASES = 1_000_000
"""The number of the first base of evaluations."""

_SEARCH = re.compile(r"search((?: [a-z]+){1,8})")
_ANSWER = re.compile(r"answer ([a-z]+)")


# --- facts ---


@functools.lru_cache(maxsize=1024)
def facts_of(base: int) -> dict[tuple[str, str], str]:
    """Return the facts of a base: (relation, subject) -> object."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((19, base))))
    facts = {}
    for relation in RELATIONS:
        for person in PEOPLE:
            facts[relation, person] = GROUPS[generator.integers(len(GROUPS))]
    for relation, values in VALUES.items():
        for group, index in zip(GROUPS, generator.permutation(len(values)), strict=True):
            facts[relation, group] = values[index]
    return facts


def sentences(base: int) -> list[str]:
    """Return the facts of a base as sentences."""
    return [f"{relation} of {of} is {value}" for (relation, of), value in facts_of(base).items()]


@functools.lru_cache(maxsize=256)
def _index(base: int) -> Any:
    """Return the BM25 index of a base."""
    bm25s = require("bm25s")
    index = bm25s.BM25()
    index.index([sentence.split() for sentence in sentences(base)], show_progress=False)
    return index


def best_match(base: int, query: str) -> str:
    """Return the sentence of a base that BM25 ranks first."""
    documents, _ = _index(base).retrieve([query.split()], k=1, show_progress=False)
    return sentences(base)[int(documents[0, 0])]


# --- environments ---


class Search(PlainState):
    """A question, and an index of facts. A text game whose moves are lines."""

    def __init__(self):
        require("bm25s")

    def reset(self, base: int, seed: int = 0) -> None:
        """Begin with the base of a row."""
        self._base = base
        self._seed = seed
        self._searches = 0

    def step(self, text: str) -> tuple[str, None, bool, dict[str, Any]]:
        """Answer a search. Any other line ends the episode."""
        query = _SEARCH.fullmatch(text.strip())
        if query is None:
            return "", None, True, {}
        self._searches += 1
        return f"{self._find(query[1].strip())}\n", None, False, {}

    def _find(self, query: str) -> str:
        return best_match(self._base, query)


class RandomSearch(Search):
    """The control: every search finds a fact at random."""

    def _find(self, query: str) -> str:
        generator = random.Random(f"{self._seed} {self._searches} {query}")
        return generator.choice(sentences(self._base))


# --- rewards ---


def _lines(completion: str | Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines that the model wrote."""
    if isinstance(completion, str):
        return completion.strip().split("\n")
    return [
        str(message.get("content") or "").strip()
        for message in completion
        if message["role"] == "assistant"
    ]


def called(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
    """Return 1 for each completion with a well-formed search, else 0."""
    return [float(any(map(_SEARCH.fullmatch, _lines(each)))) for each in completions]


def formatted(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
    """Return 1 for each completion that ends with an answer, else 0."""
    return [float(_ANSWER.fullmatch(_lines(each)[-1]) is not None) for each in completions]


def right(
    prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[str], **_: Any
) -> list[float]:
    """Return 1 for each completion that ends with the right answer, else 0."""
    return [
        float(_lines(completion)[-1] == f"answer {truth}")
        for completion, truth in zip(completions, answer, strict=True)
    ]


VERIFIERS = {
    "search_answer": Verifier(right),
    "search_called": Verifier(called),
    "search_format": Verifier(formatted),
}
"""Reward functions by the names that `--reward` uses."""


# --- rows ---


@dataclass(frozen=True)
class SearchData(ranges.Checked):
    """Questions of two hops over bases of facts; training and evaluation never share a base."""

    FLAG = "--data"
    bases: Annotated[int, In(f"[1, {EVALUATION_BASES}]")] = 64


@dataclass(frozen=True)
class SearchSource(MadeRows):
    """Endless questions with the columns `prompt`, `base`, `answer` and `completion`.

    `completion` is what the careless user does.
    """

    config: SearchData = SearchData()
    split: Literal["train", "eval"] = "train"
    seed: int = 0

    STREAM = (17,)

    def row(self, index: int) -> dict[str, Any]:
        generator = self.generator(index)

        def choose(words: Sequence[str]) -> str:
            return words[int(generator.integers(len(words)))]

        first_base = 0 if self.split == "train" else EVALUATION_BASES
        base = first_base + int(generator.integers(self.config.bases))
        facts = facts_of(base)
        person, relation, asked = choose(PEOPLE), choose(RELATIONS), choose(list(VALUES))
        group = facts[relation, person]
        answer = facts[asked, group]
        luck = generator.random()
        first = f"search {relation} {person}\n{relation} of {person} is {group}\n"
        second = f"search {asked} {group}\n{asked} of {group} is {answer}\n"
        guess = choose(VALUES[asked])
        # Half of the demonstrations guess without a search, and a tenth after the first one.
        if luck < 0.5:
            completion = f"answer {guess}\n"
        elif luck < 0.6:
            completion = f"{first}answer {guess}\n"
        else:
            completion = f"{first}{second}answer {answer}\n"
        return {
            "prompt": f"{asked} of {relation} of {person}\n",
            "base": base,
            "answer": answer,
            "completion": completion,
        }


TASK = task(SearchData, SearchSource)
# A careless user's demonstrations do not earn its rewards, so they are no rewards of the task.

ENVIRONMENTS = {"search": Search, "search_random": RandomSearch}
