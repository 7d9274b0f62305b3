"""The arithmetic task: expressions to calculate, without end.

A prompt is an expression with an equals sign, "3+8-4+6=". Its written-out solution does one operation at a
time and ends with the answer after a hash: "3+8=11;11-4=7;7+6=13;#13"; the bare solution is "#13". Products come before
sums, both from left to right, so what is written is right mathematics. Training and evaluation never share an
expression: which split one belongs to is decided by the SHA-256 of its text (one in eight is kept for evaluation), and
each source draws again until it has one of its own split.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tpu_rl.errors import InputError

ALPHABET = "0123456789+-*=;#"
"""Every character of the arithmetic task's prompts and solutions."""

EVALUATION_SHARE = 8
"""One expression in so many belongs to evaluation."""

SOURCE_LENGTH = 2**31 - 1
"""Rows of an arithmetic source: practically endless, and few enough for grain's 32-bit shuffle."""


@dataclass(frozen=True)
class Arithmetic:
    """Which expressions there are."""

    min_terms: int = 2
    max_terms: int = 4
    max_value: int = 9
    """Terms are 1 .. max_value, none twice in an expression: so each has one place in it, and the term after one that
    was just used can be found by what it is."""
    operators: str = "+-"
    """Any of "+", "-" and "*"."""
    length_shares: tuple[float, ...] = ()
    """How often each number of terms comes, from min_terms to max_terms, in any unit; empty: all alike."""

    def __post_init__(self):
        lengths = self.max_terms - self.min_terms + 1
        if self.min_terms < 2 or lengths < 1:
            raise InputError(f"min_terms {self.min_terms} and max_terms {self.max_terms} must be 2 or more, in order")
        if self.max_value < self.max_terms:
            raise InputError(
                f"max_value is {self.max_value}, with expressions of up to {self.max_terms} terms",
                why="no term comes twice in an expression",
                fix="raise max_value, or lower max_terms",
            )
        if not self.operators or not set(self.operators) <= set("+-*"):
            raise InputError(f"operators are one or more of + - *, not {self.operators!r}")
        if self.length_shares and (len(self.length_shares) != lengths or not _is_distribution(self.length_shares)):
            raise InputError(
                f"length_shares {self.length_shares} must be {lengths} numbers, none negative and not all zero",
                why=f"expressions have {self.min_terms} to {self.max_terms} terms",
            )


@dataclass(frozen=True)
class ArithmeticSource:
    """Endless questions: row i is {"prompt", "answer", "solution"}, all texts, a function of (config, split, seed, i).

    Short expressions are few (72 pairs of terms up to 9), so rows repeat; rows of different splits never agree.
    """

    config: Arithmetic = Arithmetic()
    split: Literal["train", "eval"] = "train"
    seed: int = 0

    def __len__(self) -> int:
        return SOURCE_LENGTH

    def __getitem__(self, index: int) -> dict[str, str]:
        expression = _draw(self.config, self.split, _generator(self.seed, self.split, index))
        return {
            "prompt": f"{expression}=",
            "answer": str(evaluate(expression)),
            "solution": written(expression),
        }


@dataclass(frozen=True)
class ArithmeticDemonstrations:
    """Endless solved questions of the training split: row i is {"prompt", "completion", "answer"}, by (self, i).

    A share of them is written out and the rest are bare answers, as people's texts are of both kinds. What a model then
    lacks is not the calculation but the habit of writing it down, which reinforcement learning can teach.
    """

    config: Arithmetic = Arithmetic()
    seed: int = 0
    written_share: tuple[float, ...] = (0.35,)
    """Probability of a written-out solution; one for all, or one for each number of terms."""

    def __post_init__(self):
        shares = self._written_shares
        lengths = self.config.max_terms - self.config.min_terms + 1
        if len(shares) != lengths or not all(0 <= share <= 1 for share in shares):
            raise InputError(
                f"written_share {self.written_share} must be one probability, or {lengths}",
                why=f"expressions have {self.config.min_terms} to {self.config.max_terms} terms",
            )

    def __len__(self) -> int:
        return SOURCE_LENGTH

    def __getitem__(self, index: int) -> dict[str, str]:
        generator = _generator(self.seed, "demonstrations", index)
        expression = _draw(self.config, "train", generator)
        share = self._written_shares[_count_terms(expression) - self.config.min_terms]
        solve = written if generator.random() < share else bare
        return {"prompt": f"{expression}=", "completion": solve(expression), "answer": str(evaluate(expression))}

    @property
    def _written_shares(self) -> tuple[float, ...]:
        lengths = self.config.max_terms - self.config.min_terms + 1
        return self.written_share * lengths if len(self.written_share) == 1 else self.written_share


def split_of(expression: str) -> Literal["train", "eval"]:
    """The split that an expression (without its equals sign) belongs to, for ever and in every configuration."""
    digest = hashlib.sha256(expression.encode()).digest()
    return "eval" if digest[0] % EVALUATION_SHARE == 0 else "train"


def written(expression: str) -> str:
    """The solution step by step: "3+4*2" -> "4*2=8;3+8=11;#11"."""
    return "".join(f"{step};" for step in _steps(expression)) + bare(expression)


def bare(expression: str) -> str:
    """The answer alone: "3+4*2" -> "#11"."""
    return f"#{evaluate(expression)}"


def evaluate(expression: str) -> int:
    """The value of an expression such as "3+4*2"."""
    return int(_steps(expression)[-1].partition("=")[2])


def parse(completion: str) -> int | None:
    """The answer of a well-formed completion, one that ends with its only hash and an integer; None for others."""
    match = re.fullmatch(r"[^#]*#(-?[0-9]{1,18})", completion)
    return int(match[1]) if match else None


def labelled_steps(prompt: str, completion: str) -> list[tuple[str, bool]]:
    """A completion's steps, each up to its semicolon and the answer last, and whether each is right.

    Right is the step that the written solution has in that place, so what follows from an error is mostly wrong too.
    "3+4*2=", "4*2=8;3+8=12;#12" -> ("4*2=8;", True), ("3+8=12;", False), ("#12", False). A bare answer is one step,
    right if its number is. Together the steps are the completion.
    """
    expression = prompt.removesuffix("=")
    steps = re.findall(r"[^;]*;|[^;]+$", completion)
    if len(steps) == 1:
        return [(steps[0], steps[0] == bare(expression))]
    solution = re.findall(r"[^;]*;|[^;]+$", written(expression))
    return [(step, i < len(solution) and step == solution[i]) for i, step in enumerate(steps)]


def _steps(expression: str) -> list[str]:
    """The operations of an expression with their results, in the order in which they are done."""
    tokens = re.findall(r"[0-9]+|[-+*]", expression)
    if "".join(tokens) != expression or not re.fullmatch(r"[0-9]+([-+*][0-9]+)+", expression):
        raise ValueError(f"not an expression: {expression!r}")
    steps = []
    while len(tokens) > 1:
        at = tokens.index("*") if "*" in tokens else 1
        left, operator, right = int(tokens[at - 1]), tokens[at], int(tokens[at + 1])
        value = left * right if operator == "*" else left + right if operator == "+" else left - right
        steps.append(f"{left}{operator}{right}={value}")
        tokens[at - 1 : at + 2] = [str(value)]
    return steps


def _draw(config: Arithmetic, split: str, generator: np.random.Generator) -> str:
    """A random expression of the split; the number of terms is drawn once, so that the splits share its distribution.

    Raises InputError where the split holds no expression of that length (tiny configurations only).
    """
    lengths = range(config.min_terms, config.max_terms + 1)
    shares = np.cumsum(config.length_shares or np.ones(len(lengths)))
    terms = lengths[int(np.searchsorted(shares, generator.random() * shares[-1], side="right"))]
    for _ in range(1000):
        values = generator.permutation(config.max_value)[:terms] + 1
        operators = generator.integers(0, len(config.operators), size=terms - 1)
        expression = str(values[0])
        for operator, value in zip(operators, values[1:], strict=True):
            expression += f"{config.operators[operator]}{value}"
        if split_of(expression) == split:
            return expression
    raise InputError(
        f"found no {split} expression of {terms} terms", why=f"{config} has too few", fix="raise max_value"
    )


def _generator(seed: int, stream: str, index: int) -> np.random.Generator:
    """The random numbers of one row. Raises IndexError outside the source."""
    if not 0 <= index < SOURCE_LENGTH:
        raise IndexError(f"row {index} of {SOURCE_LENGTH}")
    number = {"train": 0, "eval": 1, "demonstrations": 2}[stream]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, number, int(index)))))


def _count_terms(expression: str) -> int:
    return 1 + sum(expression.count(operator) for operator in "+-*")


def _is_distribution(shares: tuple[float, ...]) -> bool:
    return all(share >= 0 for share in shares) and sum(shares) > 0
