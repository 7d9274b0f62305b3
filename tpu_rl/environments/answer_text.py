"""The part of a completion that states its answer."""

from __future__ import annotations

import re


def answer_text(text: str) -> str:
    """Return the part of a completion that states its answer.

    It is behind the thoughts and, if there is one, in the last <answer>. Thoughts that do not end
    have no answer behind them. An <answer> may end with the text, where a stop string ends it.
    """
    text = without_thoughts(text)
    closed = _ANSWER.findall(text)
    return closed[-1].strip() if closed else text.rpartition("<answer>")[2]


def without_thoughts(text: str) -> str:
    """Return the text behind the last end of thoughts, up to thoughts that do not end."""
    ends = [match.end() for match in _END_OF_THOUGHTS.finditer(text)]
    text = text[ends[-1] :] if ends else text
    opened = _THOUGHTS.search(text)
    return text[: opened.start()] if opened else text


_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_TAG = "(?:think|thinking|thoughts?|reasoning)"
_THOUGHTS = re.compile(
    rf"<{_TAG}>|\[THINK\]|◁think▷|<\|begin_of_thought\|>|<\|channel\|>analysis<\|message\|>"
)
_END_OF_THOUGHTS = re.compile(
    rf"</{_TAG}>|\[/THINK\]|◁/think▷|<\|end_of_thought\|>|<\|channel\|>final<\|message\|>"
)
