"""Reverse a string: small enough to read, as a model for other tasks.

A prompt is a random string with an equals sign, "4827=", and the answer is the same string
backwards after a hash, "#7284". One string in eight is kept for evaluation.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tpu_rl.environments.task import text_of
from tpu_rl.errors import InputError
from tpu_rl.rewards.verifier import AnswerReaders, Verifier
from tpu_rl.tasks.made_rows import MadeRows, split_of, task

if TYPE_CHECKING:
    from tpu_rl.data import Row


@dataclass(frozen=True)
class ReverseData:
    """Strings to reverse, made as needed; training and evaluation never share one."""

    alphabet: str = string.digits + string.ascii_lowercase
    """Characters of the strings. The tokenizer must know them, and "=" and "#"."""
    min_length: int = 2
    max_length: int = 8

    def __post_init__(self):
        is_alphabet = len(set(self.alphabet)) == len(self.alphabet) and self.alphabet.isalnum()
        if len(self.alphabet) < 2 or not is_alphabet:
            raise InputError(
                f"the alphabet {self.alphabet!r} cannot make strings",
                where="--data.alphabet",
                why="it must have at least 2 different letters or digits, none twice",
                fix="give different letters or digits, as in 0123456789",
            )
        if not 2 <= self.min_length <= self.max_length:
            raise InputError(
                f"lengths from {self.min_length} to {self.max_length} are impossible",
                where="--data.min-length, --data.max-length",
                why="a string must have 2 characters to change when reversed",
                fix="use 2 <= min-length <= max-length",
            )


@dataclass(frozen=True)
class ReverseSource(MadeRows):
    """Endless problems with the columns `prompt`, `completion` and `answer`."""

    config: ReverseData = ReverseData()
    split: Literal["train", "eval"] = "train"
    seed: int = 0

    STREAM = (11,)

    def row(self, index: int) -> dict[str, str]:
        text = _sample(self.config, self.split, self.generator(index))
        return {"prompt": f"{text}=", "completion": f"#{text[::-1]}", "answer": text[::-1]}


def reverse(
    prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[str], **_: Any
) -> list[float]:
    """Return 1 for each completion that is the reversed string after a hash, else 0."""
    return [
        float(text_of(completion) == f"#{right}")
        for completion, right in zip(completions, answer, strict=True)
    ]


def reverse_characters(
    prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[str], **_: Any
) -> list[float]:
    """Return the share of each answer's characters that are right and in their place.

    Characters beyond the answer's length count as wrong ones. A completion without a hash at its
    start gets 0.
    """
    rewards = []
    for completion, right in zip(completions, answer, strict=True):
        text = text_of(completion)
        matches = sum(a == b for a, b in zip(text[1:], right, strict=False))
        longest = max(len(text) - 1, len(right))
        rewards.append(matches / longest if text.startswith("#") else 0.0)
    return rewards


def read_answer(completion: str) -> str | None:
    """Return the answer of a completion: what follows a hash at its start. None without one."""
    return completion[1:] if completion.startswith("#") else None


def _sample(config: ReverseData, split: str, generator: np.random.Generator) -> str:
    """Return a random string of the split."""
    length = int(generator.integers(config.min_length, config.max_length + 1))
    for _ in range(1000):
        characters = generator.integers(0, len(config.alphabet), size=length)
        text = "".join(config.alphabet[character] for character in characters)
        if split_of(text) == split:
            return text
    raise InputError(
        f"no {split} string of length {length} exists",
        where="--data.alphabet, --data.min-length",
        why=f"the alphabet {config.alphabet!r} makes only {len(config.alphabet) ** length} strings",
        fix="give more characters, or raise --data.min-length",
    )


def length_slice(row: Row) -> tuple[str, ...]:
    """Return the slice of a problem: the length of its string."""
    return (f"length_{len(row['answer'])}",)


TASK = task(ReverseData, ReverseSource, slices_of=length_slice)

VERIFIERS = {
    "reverse": Verifier(reverse, AnswerReaders(read_answer)),
    "reverse_characters": Verifier(reverse_characters),
}
