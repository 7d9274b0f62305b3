"""The built-in reward `gsm8k`: final numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpu_rl.environments import text_of
from tpu_rl.environments.answers import final_number, read_number
from tpu_rl.rewards.verifier import AnswerReaders, Verifier
from tpu_rl.runtime.worker_child import shorten


def gsm8k(
    prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[Any], **_: Any
) -> list[float]:
    """Return 1 for each completion whose final number equals the ground truth, else 0.

    The final number follows the last "####", or else is in the last \\boxed{}. `answer` is a
    number, or a GSM8K solution that ends with one.
    """
    del prompts
    truths = [
        final_number(str(text)) if "####" in str(text) else read_number(str(text))
        for text in answer
    ]
    if None in truths:
        raise ValueError(
            f"the ground truth {shorten(answer[truths.index(None)])} contains no number"
        )
    numbers = [final_number(text_of(completion)) for completion in completions]
    return [float(number == truth) for number, truth in zip(numbers, truths, strict=True)]


VERIFIERS = {
    "gsm8k": Verifier(gsm8k, AnswerReaders(final_number)),
}
