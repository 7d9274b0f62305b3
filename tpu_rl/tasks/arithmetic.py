"""The arithmetic task: integer expressions to calculate, without end.

A prompt is an expression with an equals sign, "3+8-4+6=". Its worked solution does one operation at
a time and ends with the answer after a hash: "3+8=11;11-4=7;7+6=13;#13". The bare answer is "#13".
Products come before sums, and both go from left to right, so a worked solution is correct
mathematics.

Training and evaluation never share an expression. The SHA-256 of its text decides which split an
expression belongs to (one in eight is kept for evaluation), and each source samples again until it
has an expression of its own split.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from tpu_rl.environments.task import Task, text_of
from tpu_rl.errors import InputError
from tpu_rl.rewards.verifier import AnswerReaders, Verifier
from tpu_rl.tasks.made_rows import MadeRows, split_of

if TYPE_CHECKING:
    from tpu_rl.data import Row

ALPHABET = "0123456789+-*=;#"
"""Every character of the task's prompts and solutions."""


# --- settings ---


@dataclass(frozen=True)
class Arithmetic:
    """The expressions that can occur."""

    min_terms: int = 2
    max_terms: int = 4
    max_value: int = 9
    """Terms are 1 to max_value. No term comes twice in an expression, so a term's value tells its
    place: what follows a term that was just used can be found by content."""
    operators: str = "+-"
    """Any of "+", "-" and "*"."""
    length_shares: tuple[float, ...] = ()
    """Relative frequency of each number of terms, from min_terms to max_terms, in any unit. Empty:
    all are equally frequent."""

    def __post_init__(self):
        num_lengths = self.max_terms - self.min_terms + 1
        lengths = f"{self.min_terms} to {self.max_terms} terms"
        shares = self.length_shares
        for is_wrong, what, where, fix in (
            (
                self.min_terms < 2 or num_lengths < 1,
                f"expressions of {lengths} are impossible",
                "min_terms, max_terms",
                "use 2 <= min_terms <= max_terms",
            ),
            (
                self.max_value < self.max_terms,
                f"max_value is {self.max_value}, and no term comes twice in expressions of "
                f"{lengths}",
                "max_value, max_terms",
                "raise max_value, or lower max_terms",
            ),
            (
                not self.operators or not set(self.operators) <= set("+-*"),
                f"the operators {self.operators!r} are not known",
                "operators",
                "give one or more of + - *",
            ),
            (
                bool(shares) and (len(shares) != num_lengths or not _is_distribution(shares)),
                f"length_shares {shares} must be {num_lengths} numbers, none negative and not all "
                "zero",
                "length_shares",
                f"give one number for each of {lengths}",
            ),
        ):
            if is_wrong:
                raise InputError(what, where=where, fix=fix)


@dataclass(frozen=True)
class ArithmeticData:
    """Integer expressions, made as needed; training and evaluation never share one."""

    train: Arithmetic = Arithmetic()
    evaluation: Arithmetic = Arithmetic()
    written_share: tuple[float, ...] = (0.33,)
    """Demonstrations only: the share of worked solutions. The others are bare answers. One share,
    or one for each number of terms."""


# --- rows ---


@dataclass(frozen=True)
class ArithmeticSource(MadeRows):
    """Endless problems with the columns `prompt`, `answer` and `solution`, all texts.

    There are few short expressions (72 pairs of
    terms up to 9), so rows repeat. Rows of different splits never agree.
    """

    config: Arithmetic = Arithmetic()
    split: Literal["train", "eval"] = "train"
    seed: int = 0

    def row(self, index: int) -> dict[str, str]:
        expression = sample_expression(self.config, self.split, self.generator(index))
        return {
            "prompt": f"{expression}=",
            "answer": str(evaluate(expression)),
            "solution": worked_solution(expression),
        }


@dataclass(frozen=True)
class ArithmeticDemonstrations(MadeRows):
    """Endless solved problems of the training split: `prompt`, `completion` and `answer`.

    A share of the completions are worked solutions and the
    others are bare answers, because texts that people write are of both kinds. What a model then
    lacks is not the calculation but the habit of writing it down, which reinforcement learning can
    teach.
    """

    config: Arithmetic = Arithmetic()
    seed: int = 0
    written_share: tuple[float, ...] = (0.35,)
    """Probability of a worked solution: one for all, or one for each number of terms."""
    SPLITS = ("train", "eval", "demonstrations")
    split: ClassVar[str] = "demonstrations"

    def __post_init__(self):
        shares = self._written_shares
        num_lengths = self.config.max_terms - self.config.min_terms + 1
        if len(shares) != num_lengths or not all(0 <= share <= 1 for share in shares):
            raise InputError(
                f"written_share {self.written_share} must be one probability, or {num_lengths}",
                where="written_share",
                why=f"expressions have {self.config.min_terms} to {self.config.max_terms} terms",
                fix="give one number from 0 to 1, or one for each number of terms",
            )

    def row(self, index: int) -> dict[str, str]:
        generator = self.generator(index)
        expression = sample_expression(self.config, "train", generator)
        share = self._written_shares[count_terms(expression) - self.config.min_terms]
        solve = worked_solution if generator.random() < share else bare_answer
        return {
            "prompt": f"{expression}=",
            "completion": solve(expression),
            "answer": str(evaluate(expression)),
        }

    @property
    def _written_shares(self) -> tuple[float, ...]:
        num_lengths = self.config.max_terms - self.config.min_terms + 1
        if len(self.written_share) == 1:
            return self.written_share * num_lengths
        return self.written_share


# --- solutions ---


def worked_solution(expression: str) -> str:
    """Return the solution step by step: "3+4*2" -> "4*2=8;3+8=11;#11"."""
    return "".join(f"{step};" for step in _steps(expression)) + bare_answer(expression)


def bare_answer(expression: str) -> str:
    """Return the answer alone: "3+4*2" -> "#11"."""
    return f"#{evaluate(expression)}"


def evaluate(expression: str) -> int:
    """Return the value of an expression such as "3+4*2".

    Raises:
        ValueError: if the text is not an expression.
    """
    return int(_steps(expression)[-1].partition("=")[2])


def count_terms(expression: str) -> int:
    """Return the number of terms of an expression, with or without its equals sign."""
    return 1 + sum(expression.count(operator) for operator in "+-*")


def parse_answer(completion: str) -> int | None:
    """Return the answer of a well-formed completion, or None for others.

    A well-formed completion ends with its only hash and an integer.
    """
    match = re.fullmatch(r"[^#]*#(-?[0-9]{1,18})", completion)
    return int(match[1]) if match else None


def label_steps(prompt: str, completion: str) -> list[tuple[str, bool]]:
    """Return the steps of a completion, each with True if it is right.

    Steps end with a semicolon, and the answer is the last one. Joined, they are the completion. A
    step is right if the worked solution has it in the same place, so what follows an error is
    mostly wrong too: "3+4*2=" with "4*2=8;3+8=12;#12" gives ("4*2=8;", True), ("3+8=12;", False),
    ("#12", False). A bare answer is one step, right if its number is.
    """
    expression = prompt.removesuffix("=")
    steps = re.findall(r"[^;]*;|[^;]+$", completion)
    if len(steps) == 1:
        return [(steps[0], steps[0] == bare_answer(expression))]
    solution = re.findall(r"[^;]*;|[^;]+$", worked_solution(expression))
    return [(step, i < len(solution) and step == solution[i]) for i, step in enumerate(steps)]


# --- rewards ---


def correct(
    prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[str], **_: Any
) -> list[float]:
    """Return 1 for each well-formed completion with the right answer, else 0."""
    answers = [parse_answer(text_of(completion)) for completion in completions]
    return [float(value == int(right)) for value, right in zip(answers, answer, strict=True)]


def well_formed(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
    """Return 1 for each well-formed completion, right or wrong, else 0."""
    return [float(parse_answer(text_of(completion)) is not None) for completion in completions]


def variants(row: Row) -> list[Row]:
    """Return the problems of at least two neighboring terms of a problem, but not of all.

    They are solved by themselves, from the shortest on. None comes twice.
    """
    tokens = re.findall(r"[0-9]+|[-+*]", row["prompt"])
    parts = [
        "".join(tokens[first : first + 2 * terms - 1])
        for terms in range(2, len(tokens) // 2 + 1)
        for first in range(0, len(tokens) - 2 * terms + 2, 2)
    ]
    return [
        {"prompt": f"{part}=", "answer": str(evaluate(part)), "solution": worked_solution(part)}
        for part in dict.fromkeys(parts)
    ]


def terms_slice(row: Row) -> tuple[str, ...]:
    """Return the slice of a problem: its number of terms."""
    return (f"{count_terms(row['prompt'])}_terms",)


# --- the task ---


TASK = Task(
    settings=ArithmeticData,
    train_rows=lambda data, seed: ArithmeticSource(data.train, "train", seed=seed),
    demonstrations=lambda data, seed: ArithmeticDemonstrations(
        data.train, seed, data.written_share
    ),
    evaluation_rows=lambda data, count: ArithmeticSource(data.evaluation, "eval", seed=0),
    label_steps=label_steps,
    variants=variants,
    slices_of=terms_slice,
)

VERIFIERS = {
    "arithmetic": Verifier(correct, AnswerReaders(parse_answer)),
    "arithmetic_well_formed": Verifier(well_formed),
}


# --- helpers ---


def _steps(expression: str) -> list[str]:
    """Return the operations of an expression with their results, in the order of calculation."""
    tokens = re.findall(r"[0-9]+|[-+*]", expression)
    if "".join(tokens) != expression or not re.fullmatch(r"[0-9]+([-+*][0-9]+)+", expression):
        raise ValueError(f"not an expression: {expression!r}")
    steps = []
    while len(tokens) > 1:
        position = tokens.index("*") if "*" in tokens else 1
        left = int(tokens[position - 1])
        operator = tokens[position]
        right = int(tokens[position + 1])
        if operator == "*":
            value = left * right
        elif operator == "+":
            value = left + right
        else:
            value = left - right
        steps.append(f"{left}{operator}{right}={value}")
        tokens[position - 1 : position + 2] = [str(value)]
    return steps


def sample_expression(config: Arithmetic, split: str, generator: np.random.Generator) -> str:
    """Return a random expression of the split.

    The number of terms is sampled once, so both splits have the same distribution of lengths.

    Raises:
        InputError: if the split has no expression of that length (tiny configurations only).
    """
    lengths = range(config.min_terms, config.max_terms + 1)
    cumulative = np.cumsum(config.length_shares or np.ones(len(lengths)))
    threshold = generator.random() * cumulative[-1]
    num_terms = lengths[int(np.searchsorted(cumulative, threshold, side="right"))]
    for _ in range(1000):
        values = generator.permutation(config.max_value)[:num_terms] + 1
        operators = generator.integers(0, len(config.operators), size=num_terms - 1)
        expression = str(values[0])
        for operator, value in zip(operators, values[1:], strict=True):
            expression += f"{config.operators[operator]}{value}"
        if split_of(expression) == split:
            return expression
    raise InputError(
        f"found no {split} expression of {num_terms} terms",
        where="max_value",
        why=f"{config} has too few expressions",
        fix="raise max_value",
    )


def _is_distribution(shares: tuple[float, ...]) -> bool:
    return all(share >= 0 for share in shares) and sum(shares) > 0
