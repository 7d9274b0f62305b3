"""The part of a completion that states its answer, and values that stand in it."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from tpu_rl.environments.answer_text import answer_text, without_thoughts
from tpu_rl.environments.answers import is_denied

FENCED = re.compile(r"^[ \t]*(```+|~~~+)([^\n`]*)\n((?:(?!^[ \t]*\1).*\n)*)^[ \t]*\1", re.MULTILINE)
"""The fence, the language and the text of a fenced block."""
_LONGEST_VALUE = 100_000


def answer_of(text: str) -> str:
    """Return the text of the last <answer>, or of the last fenced block, or all; no thoughts."""
    text = answer_text(text)
    blocks = FENCED.findall(text)
    return (blocks[-1][2] if blocks else text).strip()


def value_of(text: str) -> Any:
    """Return a value that a text writes as JSON or as a Python literal.

    Raises ValueError if it writes none, or a very long one.
    """
    if len(text) > _LONGEST_VALUE:
        raise ValueError(f"it has more than {_LONGEST_VALUE} characters")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        value = ast.literal_eval(text.strip())
        str(value)  # Python reads long hexadecimal integers, and refuses to write them.
        return value
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError("it is neither JSON nor a Python literal") from error


# --- coordinates ---

_NUMBER = r"\s*(-?[0-9]{1,9}(?:\.[0-9]{1,30})?)\s*"
POINT = re.compile(rf"[(\[]{_NUMBER},{_NUMBER}[)\]]")
BOX = re.compile(rf"[(\[]{','.join([_NUMBER] * 4)}[)\]]")


def coordinates(value: Any, forms: Sequence[re.Pattern[str]] = (POINT, BOX)) -> list[float]:
    """Read the last point [x, y] or box [left, top, right, bottom] of a text, or of a value of
    JSON; [] if it has none, or denies it."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = answer_of(text)
    for form, plain in _PUBLISHED:
        text = form.sub(plain, text)
    matches = [match for form in forms for match in form.finditer(text)]
    last = max(matches, key=lambda match: match.start(), default=None)
    if last is None or is_denied(text[: last.start()]) or _HEDGE.search(text[: last.start()]):
        return []
    return list(numbers(last.groups()))


_PUBLISHED = (
    # Qwen2-VL and InternVL; Molmo; agents that click.
    (re.compile(r"((?:<\|box_start\|>|<box>)\s*\([^()]{1,80})\),\s?\("), r"\1,"),
    (re.compile(rf"\bx=[\"']?{_NUMBER}[\"']?,?\s*y=[\"']?{_NUMBER}[\"']?"), r"(\1,\2)"),
)
_HEDGE = re.compile(r"[)\]]\W*\bor\W*\Z")


def numbers(texts: Sequence[Any]) -> Any:
    """Read each text as a number."""
    return tuple(float(number) for number in texts)


# --- confidence ---

_STATED = re.compile(
    r"\bconfidence\b[\s*_>\"'`]*+(?:(?:is|level|score)\b[\s*_\"']*+)?[:=>]?[\s*_\"'`]*+"
    r"(-?(?:[0-9]{1,6}(?:\.[0-9]{1,9})?|\.[0-9]{1,9}))\s*(\\?%|(?:/|out of)\s*[0-9]{1,4})?",
    re.IGNORECASE,
)


def read_confidence(text: str) -> float | None:
    """Read the confidence, from 0 to 1, that a completion states last; None without one.

    "Confidence: 8" and "Confidence: 8/10" are 0.8, as "80%" and "<confidence>0.8</confidence>".
    A number without a unit is of 10. It is a probability if it is at most 1 and has a decimal point
    or stands in <confidence>, as RLCR's do. Numbers outside of their range state nothing.
    """
    matches = list(_STATED.finditer(without_thoughts(text)))
    if not matches:
        return None
    digits, unit = matches[-1].groups(default="")
    is_tagged = matches[-1][0][len("confidence") :].startswith(">")
    if unit.endswith("%"):
        whole = 100.0
    elif unit:
        whole = float(unit.lower().removeprefix("out of").removeprefix("/"))
    else:
        whole = 1.0 if float(digits) <= 1 and ("." in digits or is_tagged) else 10.0
    number = float(digits)
    return number / whole if 0 <= number <= whole and whole else None
