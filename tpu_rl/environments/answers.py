"""Numbers in texts, as people write them, and answers that a text denies."""

from __future__ import annotations

import re
from fractions import Fraction

from tpu_rl.environments.answer_text import answer_text


def is_denied(before: str) -> bool:
    """Return True if the text before an answer denies it, as "it is not" does."""
    return _DENIAL.search(before[-80:]) is not None


_DENIAL = re.compile(
    r"(?:\b(?:not|never|neither|nor)\b|n['\u2019]t\b|≠|¬|!=|\\(?:neg?|neq|not|lnot)(?![A-Za-z]))"
    r"(?:\W|\b(?:equal|to|be|the|answer|option|choice|boxed|text|mathbf)\b)*\Z",
    re.IGNORECASE,
)

# --- numbers ---


def final_number(text: str) -> Fraction | None:
    """Return the number that a completion gives as its answer; None without one, or with several.

    It follows the last "####", or else is in the last \\boxed{}, or else is the last one of the
    last line. "42 or 41", "4,2", "not 42" and "42_8" are no numbers, nor is a part of a term.
    """
    text = answer_text(text)
    before, marker, tail = text.rpartition("####")
    if marker:
        return only_number(tail)
    boxed = last_boxed(text)
    if boxed is not None:
        before = text.rpartition("\\boxed{")[0]
        is_one = not (is_denied(before) or _ALTERNATIVE.search(before[-40:]))
        return only_number(boxed) if is_one else None
    return only_number(text.strip().rpartition("\n")[2], last=True)


def only_number(text: str, last: bool = False) -> Fraction | None:
    """Return the first number of a text, or the last one; None if it is one of several, or denied.

    Behind equals signs it is the result.
    """
    line, _, rest = text.strip().partition("\n")
    plain = _plain(line if last else line.rpartition("=")[2])
    matches = [*_NUMBER.finditer(plain)]
    if not matches:
        return None
    match = matches[-1 if last else 0]
    before, after = plain[: match.start()], f"{plain[match.end() :]}\n{rest}"
    if _TERM_BEFORE.search(before) or _ALTERNATIVE.search(before) or is_denied(before):
        return None
    return None if _TERM_AFTER.match(after) else _value(match)


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
    match = _NUMBER.search(_plain(text))
    return None if match is None else _value(match)


def _plain(text: str) -> str:
    text = _SPACES.sub("", text.replace("\u2212", "-").replace("{,}", ","))
    return _FRACTION.sub(r" \1/\2", text).replace("\\$", "").replace("$", "")


def _value(match: re.Match[str]) -> Fraction | None:
    whole, denominator = (
        part and part.replace(",", "").replace(" ", "") for part in match.groups()
    )
    if denominator is not None and not Fraction(denominator):
        return None
    return Fraction(whole) / Fraction(denominator or 1)


_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{2,3}){0,12},[0-9]{3}(?![0-9])|[0-9]{1,40})"
"""With commas between thousands, or lakhs; "4,2" is two numbers."""
_DIGITS = rf"(?:{_WHOLE}(?:\.[0-9]{{1,40}})?|\.[0-9]{{1,40}})"
_NUMBER = re.compile(rf"(-? ?{_DIGITS})(?:/({_DIGITS}))?")
_FRACTION = re.compile(rf"\\[dt]?frac *{{ *(-?{_DIGITS}) *}} *{{ *({_DIGITS}) *}}")
_SPACES = re.compile(r"\\[,!;:]")
"""Spaces of LaTeX between digits."""
_ALTERNATIVE = re.compile(rf"(?:{_DIGITS}|\}})[\s*$%}}]*(?:,|;|/|\||\bor\b|\band\b)[\s*$]*-?\Z")
"""A number, or the end of a box, and a word for another one."""
_TERM_BEFORE = re.compile(
    r"(?:\\(?:sqrt|log|ln|sin|cos|tan)|[√^_])[\s{(]*\Z|[0-9]\s*[*+×·:^]\s*\Z|[0-9][ .]\Z"
)
_TERM_AFTER = re.compile(
    r"[\s*$%}]*(?:,|;|/|\||\bor\b|\band\b)[\s*$]*-?[0-9]|\s*[_^]|\s*[*+×·:-]\s*[0-9(\\]"
    r"|\s*(?:\\(?:pi|sqrt|frac|cdot|times)|[π√])|[ .ex]-?[0-9]"
)
"""Text behind a number that is one of several, or a part of a term."""


def _closing_brace(text: str) -> int:
    """Return the index of the brace that closes the one before `text`, or the text's length."""
    depth = 1
    for position, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return position
    return len(text)
