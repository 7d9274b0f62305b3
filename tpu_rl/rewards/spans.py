"""The part of a completion that states its answer, and values that stand in it."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_FENCED = re.compile(r"^```[^\n`]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_LONGEST_VALUE = 100_000


def without_thoughts(text: str) -> str:
    """Return the text after the last </think>; "" for thoughts that do not end."""
    before, end, after = text.rpartition("</think>")
    if end:
        return after
    return before if "<think>" in after else after


def answer_of(text: str) -> str:
    """Return the text of the last <answer>, or of the last fenced block, or all; no thoughts."""
    text = without_thoughts(text)
    answers = _ANSWER.findall(text)
    text = answers[-1].strip() if answers else text
    blocks = _FENCED.findall(text)
    return (blocks[-1] if blocks else text).strip()


def value_of(text: str) -> Any:
    """Return a value that a text writes as JSON or as a Python literal.

    Raises:
        ValueError: if it writes none, or a very long one.
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
