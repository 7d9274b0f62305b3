"""A calculator for solutions of GSM8K, which mark each calculation as "<<16-3=13>>".

The model writes up to the equals sign of a mark, and the calculator writes the rest, "13>>"
(K. Cobbe et al., arXiv 2110.14168, appendix C). So the stop string is "=": outside of a mark, and
where the text is no expression, nothing is written and the model goes on. The reward is 1 if the
number after "####" is the row's `answer`, else 0.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from tpu_rl.environments import answers
from tpu_rl.environments.contract import PlainState
from tpu_rl.rewards.verifier import Verifier

DECIMALS = 4
"""Digits after the point that the calculator writes, at most."""
TOLERANCE = Fraction(1, 100)
"""How far a rounded result may be from the exact one."""
_EXPRESSION = re.compile(r"[0-9+\-*/(). ]+")
_OPEN_MARK = re.compile(r"<<([^<>=]*)$")
_MARK = re.compile(r"<<([^<>=]*)=([^<>=]*)>>")


class Calculator(PlainState):
    """A problem whose calculations are done for the model. A text game."""

    text_game = True

    def reset(self, answer: str, **row: Any) -> None:
        """Begin a problem."""
        self._answer = answer
        self._text = ""

    def step(self, text: str, ended: bool) -> tuple[str, None, bool, dict[str, Any]]:
        """Write the result of the mark that a turn leaves open."""
        self._text += text
        if ended:
            return "", None, True, {}
        written = result_after(self._text)
        self._text += f"={written}"
        return written, None, False, {}

    def get_reward(self) -> float:
        """Return 1 for the right answer."""
        right = answers.read_number(self._answer)
        return float(answers.final_number(self._text) == right)


def result_after(text: str) -> str:
    """Return the rest of the mark that a text, up to an equals sign, leaves open; "" without it."""
    mark = _OPEN_MARK.search(text)
    value = None if mark is None else calculate(mark[1])
    return "" if value is None else f"{_decimal(value)}>>"


def calculate(expression: str, longest: int = 80) -> Fraction | None:
    """Return the value of an expression of + - * / and parentheses; None if it has none, or more
    characters than `longest`."""
    plain = expression.replace(",", "").strip()
    if len(plain) > longest or not _EXPRESSION.fullmatch(plain):
        return None
    try:
        return _value(ast.parse(plain, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _value(left) - _value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left) * _value(right)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _value(left) / _value(right)
    raise ValueError("no expression")


def _decimal(value: Fraction) -> str:
    """Return a number as GSM8K writes it: "13", "0.25"."""
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.{DECIMALS}f}".rstrip("0").rstrip(".")


def right_marks(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float | None]:
    """Return the share of each completion's marks "<<16-3=13>>" that are right; None without any.

    Results may be rounded to a hundredth.
    """
    return [_share_of_right(_joined(completion)) for completion in completions]


def _share_of_right(text: str) -> float | None:
    marks = _MARK.findall(text)
    if not marks:
        return None
    return sum(_is_right(expression, result) for expression, result in marks) / len(marks)


def _is_right(expression: str, result: str) -> bool:
    value = calculate(expression)
    number = answers.only_number(result)
    return value is not None and number is not None and abs(value - number) <= TOLERANCE


def _joined(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """Return a completion as one text, with the equals signs at which turns were stopped."""
    if isinstance(completion, str):
        return completion
    return "".join(
        ("=" if message["role"] == "user" else "") + str(message.get("content") or "")
        for message in completion
    )


ENVIRONMENTS = {"calculator": Calculator}

VERIFIERS = {"gsm8k_marks": Verifier(right_marks)}
