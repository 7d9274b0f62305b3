"""The built-in reward `choice`: letters of multiple choice."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from tpu_rl.environments import text_of
from tpu_rl.environments.answer_text import answer_text, without_thoughts
from tpu_rl.environments.answers import is_denied
from tpu_rl.rewards.verifier import AnswerReaders, Verifier
from tpu_rl.runtime.worker_child import shorten
from tpu_rl.verifiers import composed


def right_letter(
    prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[Any], **columns: Any
) -> list[float]:
    r"""Return 1 for each completion that chooses the right letter of multiple choice, else 0.

    The last capital letter in \boxed{D}, "answer is B", "Answer: C" or "<answer>B</answer>" counts.
    Without any, the last one in parentheses counts, "(A)", or else a bare letter at the end. None
    counts of several, as in "A or B", or where the text says "not B". Thoughts are left out.
    `answer` is a letter, "B" or "(B)". A column `choices` or `options` must stand in the prompt.
    """
    for prompt, texts in zip(
        prompts, columns.get("choices") or columns.get("options") or [], strict=False
    ):
        _require_shown(texts, text_of(prompt))
    truths = [composed.gold(value, _truth) for value in answer]
    letters = [read_letter(text_of(completion)) for completion in completions]
    return [float(letter == truth) for letter, truth in zip(letters, truths, strict=True)]


def read_letter(text: str) -> str | None:
    """Return the letter that a completion chooses, or None; see `right_letter`."""
    answer = answer_text(text)
    text = f"Answer: {answer}" if answer != without_thoughts(text) else answer
    for pattern in (_STATED, _IN_PARENTHESES, _AT_END):
        found = [
            m for m in pattern.finditer(text) if not is_denied(text[: m.start(m.lastindex or 0)])
        ]
        if found:
            start, end = found[-1].span(found[-1].lastindex or 0)
            is_one = not (_OTHER_BEFORE.search(text[:start]) or _OTHER_AFTER.match(text[end:]))
            return text[start:end] if is_one else None
    return None


def _require_shown(choices: Any, prompt: str) -> None:
    """Raise ValueError if a prompt has no text of its row's choices."""
    values = choices.values() if isinstance(choices, dict) else choices
    texts = [
        text.strip()
        for value in (values if isinstance(values, Iterable) else ())
        for text in ([value] if isinstance(value, str) else value or ())
        if isinstance(text, str) and len(text.strip()) > 1
    ]
    if texts and not any(text in prompt for text in texts):
        raise ValueError(f"the prompt shows none of the choices, as {shorten(texts[0])}: add them")


def _truth(text: str) -> str | None:
    match = _TRUTH.fullmatch(text)
    if match is None:
        raise ValueError(f"the ground truth {shorten(text)} is no letter: A is the first choice")
    return match[1].upper()


_TRUTH = re.compile(r"\(?([A-Za-z])\)?")
_STATED = re.compile(
    # "\boxed{\text{D}}", "\boxed{(D) 7}", but not "\boxed{A + B}".
    r"\\boxed\s*{\s*(?:\\\w+\s*{\s*)?\(?([A-Z])(?=\s*[}).:,])"
    # "answer is **B**", "**Answer:** option C", "<answer>B</answer>"; not "the answer is Berlin".
    r"|\b(?i:answer)[*_]*(?:\s+(?i:is)|\s*:)[\s:*_$\"'(]*"
    r"(?:(?i:option|choice)\s+)?(?:\\\w+\s*{\s*)?\(?([A-Z])(?![\w'’+^=/])"
)
_IN_PARENTHESES = re.compile(r"(?<!\w)\(([A-Z])\)")
"""No argument of a function, as in P(A)."""
_AT_END = re.compile(r"(?:^|\s)[*$\"']*([A-Z])[.*$\"']*\s*\Z")
_OTHER_BEFORE = re.compile(
    r"[A-Z][^\w\n]*\b(?:or|and)\b(?:[^\w\n]|boxed|text)*\Z|\b[A-Z]\)?\s?[/,&]\s?\(?\Z"
)
_OTHER_AFTER = re.compile(
    r"[^\w\n]*(?:\bor\b|\band\b|[/&])[^\w\n]*(?:option\s+)?\(?[A-Z]\b(?!['\u2019])"
    r"|\)?,\s*\(?[A-Z](?:[).,]|\s*$)"
)
"""Another letter beside the one that was read."""


VERIFIERS = {"choice": Verifier(right_letter, AnswerReaders(read_letter))}
