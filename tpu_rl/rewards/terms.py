"""The terms of a total reward, as `--reward` writes them: [WEIGHT*]NAME[?OTHER>NUMBER].

    gsm8k                      the reward gsm8k
    0.2*my.py:format           a fifth of what the function returns
    "RM_DIR?gsm8k>0.5"         the score of a reward model, where gsm8k is above 0.5
    linear(1,0,100)*my.py:hint a weight that goes from 1 at step 1 to 0 at step 100 and later;
                               cosine(1,0,100) goes smoothly, jump(1,0,100) at step 100
    python:decay*gsm8k         a weight that a registered function step -> weight gives

The total of a completion is the sum of weight * value over its terms. A gate of two rewards, which
may also be written with <, decides where a term counts: where it does not hold, the term is 0.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tpu_rl.errors import InputError
from tpu_rl.user_code import PYTHON

EXAMPLE = 'write [WEIGHT*]NAME[?OTHER>NUMBER], as in "0.2*my.py:format?gsm8k>0.5"'
_COMPARISON = re.compile(r"(.*)([<>])([^<>]*)", re.DOTALL)


@dataclass(frozen=True)
class Gate:
    """A condition on another reward: it is above a number, or below."""

    name: str
    """The name of the other reward."""
    above: bool
    """True for >, False for <."""
    threshold: float

    def holds(self, values: np.ndarray) -> np.ndarray:
        """Return [N] bool: True where the other reward's values [N] satisfy the condition."""
        return values > self.threshold if self.above else values < self.threshold


@dataclass(frozen=True)
class RewardTerm:
    """A reward in the total: its name, its weight, and the condition under which it counts."""

    name: str
    """A built-in reward, FILE.py:function, the directory of a reward model, or python:NAME."""
    weight: float = 1.0
    """With 0 the reward is measured and not counted."""
    gate: Gate | None = None
    schedule: str | None = None
    """Schedule of the weight over steps: python:NAME of a registered function, or one of
    `SCHEDULES` with its numbers (`at_step`)."""

    @staticmethod
    def parse(text: str) -> RewardTerm:
        """Return the term that a text describes. A plain name has the weight 1 and no gate.

        Raises InputError if the text describes no term.
        """
        if not isinstance(text, str):
            raise InputError(
                "a reward of a configuration is a text",
                where="reward",
                why=f"this is {text!r}",
                fix="pass functions to tpu_rl.train(..., rewards=[...])",
            )
        outside = _outside(text)
        end = outside.find("?") if "?" in outside else len(text)
        body, has_gate, condition = text[:end], text[end : end + 1], text[end + 1 :]
        start = outside.rfind("*", 0, end) + 1
        weight, has_weight, name = body[: max(start - 1, 0)].strip(), bool(start), body[start:]
        is_scheduled = weight.startswith(PYTHON) or schedule_of(weight) is not None
        term = RewardTerm(
            name.strip() if has_weight or has_gate else text,
            _number(weight, "the weight", text) if has_weight and not is_scheduled else 1.0,
            _gate(condition, text) if has_gate else None,
            weight if is_scheduled else None,
        )
        if not term.name.strip():
            raise _error("it names no reward", text)
        return term

    def renamed(self, rename: Callable[[str], str]) -> RewardTerm:
        """Return the term with other names for its reward and its gate's."""
        gate = self.gate and dataclasses.replace(self.gate, name=rename(self.gate.name))
        return dataclasses.replace(self, name=rename(self.name), gate=gate)

    def values(self, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the contribution of the term to each total, [N] float32.

        NaN where it does not count: where its reward or the gate's has no value, or if its weight
        is always 0.

        Args:
            parts: reward name -> values [N] float32, NaN where it has none.
        """
        values = parts[self.name]
        if not self.weight and self.schedule is None:
            return np.full_like(values, np.nan)
        weighted = (self.weight * values.astype(np.float64)).astype(np.float32)
        if self.gate is None:
            return weighted
        others = parts[self.gate.name]
        counted = np.where(self.gate.holds(others), weighted, np.float32(0))
        return np.where(np.isnan(values) | np.isnan(others), np.float32(np.nan), counted)


SCHEDULES: dict[str, Callable[[float], float]] = {
    "linear": lambda share: share,
    "cosine": lambda share: (1 - math.cos(math.pi * share)) / 2,
    "jump": float.__floor__,
}
"""Name -> how far a weight has gone from its first to its last value, by the share of the steps."""


def schedule_of(text: str) -> Callable[[int], float] | None:
    """Return the function step -> weight that NAME(FIRST,LAST,STEPS) describes; None for others.

    The weight is FIRST at step 1, and LAST from the step STEPS on.
    """
    match = re.fullmatch(r"(\w+)\(([^(),]*),([^(),]*),\s*([0-9]+)\s*\)", text)
    if match is None or match[1] not in SCHEDULES or int(match[4]) < 2:
        return None
    try:
        first, last = float(match[2]), float(match[3])
    except ValueError:
        return None

    def weight(step: int) -> float:
        share = min(max((step - 1) / (int(match[4]) - 1), 0.0), 1.0)
        return first + (last - first) * SCHEDULES[match[1]](share)

    return weight


def parse_all(texts: Iterable[str], is_whole: bool = True) -> tuple[RewardTerm, ...]:
    """Return the terms of a total, each once.

    Args:
        is_whole: nothing else gives rewards, so one of the terms must count.

    Raises:
        InputError: if a text describes no term, or all weights of the whole total are 0.
    """
    terms = tuple(dict.fromkeys(RewardTerm.parse(text) for text in texts))
    if is_whole and terms and not any(term.weight for term in terms):
        raise InputError(
            "every reward has the weight 0",
            where="--reward",
            why="all totals would be missing",
            fix="give one of them another weight",
        )
    return terms


def names_of(terms: Sequence[RewardTerm]) -> list[str]:
    """Return the names of all rewards of terms, and then of gates, each once."""
    gates = [term.gate.name for term in terms if term.gate is not None]
    return list(dict.fromkeys([*(term.name for term in terms), *gates]))


def totals(terms: Sequence[RewardTerm], parts: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the sum of the terms for each completion, [N] float32; NaN where none of them counts.

    Args:
        terms: at least one.
        parts: reward name -> values [N] float32, NaN where it has none.
    """
    stacked = np.stack([term.values(parts) for term in terms])
    unscored = np.isnan(stacked)
    sums = np.where(unscored, 0, stacked).sum(axis=0)
    return np.where(unscored.all(axis=0), np.nan, sums).astype(np.float32)


def _outside(text: str) -> str:
    """Return a text of the same length with _ in place of parentheses and what is inside them."""
    while (masked := re.sub(r"\([^()]*\)", lambda group: "_" * len(group[0]), text)) != text:
        text = masked
    return text


def _gate(condition: str, text: str) -> Gate:
    match = _COMPARISON.fullmatch(condition)
    if match is None:
        raise _error(f"the gate {condition!r} compares nothing", text)
    name, comparison, number = match.groups()
    if not name.strip():
        raise _error("the gate names no reward", text)
    if re.search(r"[*?<>]", name):
        raise _error(f"the gate {condition!r} is not one reward compared with one number", text)
    return Gate(name.strip(), comparison == ">", _number(number, "the gate's number", text))


def _number(digits: str, role: str, text: str) -> float:
    try:
        number = float(digits)
    except ValueError:
        raise _error(f"{role} is {digits.strip()!r}", text) from None
    if not math.isfinite(number):
        raise _error(f"{role} is {number}", text)
    return number


def _error(why: str, text: str) -> InputError:
    return InputError("not a reward term", where=f"--reward {text!r}", why=why, fix=EXAMPLE)
