"""Numbers in texts, as people write them."""

from __future__ import annotations

import re
from fractions import Fraction


def final_number(text: str) -> Fraction | None:
    """Return the number after the last "####", or else in the last \\boxed{}; None without one."""
    _, marker, tail = text.rpartition("####")
    if marker:
        return read_number(tail)
    boxed = last_boxed(text)
    return None if boxed is None else read_number(boxed)


def last_boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{} of a text, or None without one."""
    _, marker, tail = text.rpartition("\\boxed{")
    return tail[: _closing_brace(tail)] if marker else None


def read_number(text: str) -> Fraction | None:
    """Return the first number of a text, or None.

    It may have a sign, thousands commas, decimals, or be a fraction, also in LaTeX. Currency and
    percent signs are dropped. So "$1,234.00", "1234" and "1234.0 dollars" are the same number, and
    "50%" is 50.
    """
    plain = _FRACTION.sub(
        r" \1/\2", _SPACES.sub("", text.replace("\u2212", "-").replace("{,}", ","))
    )
    match = _NUMBER.search(plain.replace("\\$", "").replace("$", ""))
    if not match:
        return None
    whole, denominator = (
        part and part.replace(",", "").replace(" ", "") for part in match.groups()
    )
    if denominator is not None and not Fraction(denominator):
        return None
    return Fraction(whole) / Fraction(denominator or 1)


_DIGITS = r"(?:[0-9][0-9,]{0,40}(?:\.[0-9]{1,40})?|\.[0-9]{1,40})"
_NUMBER = re.compile(rf"(-? ?{_DIGITS})(?:/({_DIGITS}))?")
_FRACTION = re.compile(rf"\\[dt]?frac *{{ *(-?{_DIGITS}) *}} *{{ *({_DIGITS}) *}}")
_SPACES = re.compile(r"\\[,!;:]")
"""Spaces of LaTeX between digits."""


def _closing_brace(text: str) -> int:
    """Return the index of the brace that closes the one before `text`, or the text's length."""
    depth = 1
    for position, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return position
    return len(text)
