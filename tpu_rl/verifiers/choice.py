"""The built-in reward `choice`: letters of multiple choice."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tpu_rl.environments import text_of
from tpu_rl.rewards.verifier import AnswerReaders, Verifier
from tpu_rl.runtime.worker_child import shorten


def right_letter(
    prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[Any], **_: Any
) -> list[float]:
    r"""Return 1 for each completion that chooses the right letter of multiple choice, else 0.

    The last capital letter in \boxed{D}, "answer is B", "Answer: C" or "<answer>B</answer>" counts.
    Without any, the last one in parentheses counts, "(A)", or else a bare letter at the end.
    `answer` is a letter, "B" or "(B)".
    """
    del prompts
    truths = [_TRUTH.fullmatch(str(text).strip()) for text in answer]
    if None in truths:
        raise ValueError(
            f"the ground truth {shorten(answer[truths.index(None)])} is no letter: "
            "write A for the first choice"
        )
    letters = [read_letter(text_of(completion)) for completion in completions]
    return [
        float(truth is not None and letter == truth[1].upper())
        for letter, truth in zip(letters, truths, strict=True)
    ]


def read_letter(text: str) -> str | None:
    """Return the letter that a completion chooses, or None; see `right_letter`."""
    stated = [boxed or said for boxed, said in _STATED.findall(text)]
    letters = stated or _IN_PARENTHESES.findall(text) or _AT_END.findall(text)
    return letters[-1] if letters else None


_TRUTH = re.compile(r"\(?([A-Za-z])\)?")
_STATED = re.compile(
    # "\boxed{\text{D}}", "\boxed{(D) 7}", but not "\boxed{A + B}".
    r"\\boxed\s*{\s*(?:\\\w+\s*{\s*)?\(?([A-Z])(?=\s*[}).:,])"
    # "answer is **B**", "**Answer:** option C", "<answer>B</answer>"; not "the answer is Berlin".
    r"|(?:<(?i:answer)>|\b(?i:answer)[*_]*(?:\s+(?i:is)|\s*:))[\s:*_$\"'(]*"
    r"(?:(?i:option|choice)\s+)?(?:\\\w+\s*{\s*)?\(?([A-Z])(?![\w'’+^=/])"
)
_IN_PARENTHESES = re.compile(r"(?<!\w)\(([A-Z])\)")
"""No argument of a function, as in P(A)."""
_AT_END = re.compile(r"(?:^|\s)[*$\"']*([A-Z])[.*$\"']*\s*\Z")


VERIFIERS = {
    "choice": Verifier(right_letter, AnswerReaders(read_letter)),
}
