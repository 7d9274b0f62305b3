"""The built-in reward `gsm8k`: final numbers."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from tpu_rl.environments import text_of
from tpu_rl.environments.answers import final_number, only_number
from tpu_rl.rewards.verifier import AnswerReaders, Verifier
from tpu_rl.verifiers import composed


def gsm8k(
    prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[Any], **_: Any
) -> list[float]:
    """Return 1 for each completion whose final number equals the ground truth, else 0.

    The final number follows the last "####", or else is in the last \\boxed{}, or else is the last
    one of the last line; in <answer> and behind thoughts, if there are some. Of several numbers,
    as in "42 or 41", none counts. `answer` is a number, or a GSM8K solution that ends with one.
    """
    truths = [composed.gold(value, _number) for value in answer]
    numbers = [final_number(text_of(completion)) for completion in completions]
    return [float(number == truth) for number, truth in zip(numbers, truths, strict=True)]


def _number(text: str) -> Fraction | None:
    return final_number(text) if "####" in text else only_number(text)


VERIFIERS = {"gsm8k": Verifier(gsm8k, AnswerReaders(final_number))}
