"""The built-in reward `python_tests`: programs that pass tests, in the sandbox or without it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tpu_rl import sandbox
from tpu_rl.environments import text_of
from tpu_rl.rewards.worker_process import RewardFailure
from tpu_rl.sandbox import unit_tests


def python_tests(
    prompts: Sequence[Any], completions: Sequence[Any], *, tests: Sequence[Any], **_: Any
) -> list[float | RewardFailure]:
    """Return 1 for each completion whose Python program passes all tests of its row, else 0.

    The program is the last fenced block, or all of the text. `tests` is a list of {"input": ...,
    "output": ...} and of texts with asserts, or {"inputs": [...], "outputs": [...]}, or either as
    JSON. See `tpu_rl.sandbox.unit_tests`.

    Raises:
        MachineError: if the kernel cannot confine programs.
    """
    del prompts
    sandbox.require()
    return _judge_programs(completions, tests, confine=True)


def python_tests_unsandboxed(
    prompts: Sequence[Any], completions: Sequence[Any], *, tests: Sequence[Any], **_: Any
) -> list[float | RewardFailure]:
    """Return the same as `python_tests`, with programs that may do whatever this user may.

    The flag --allow-unsandboxed-code selects it.
    """
    del prompts
    return _judge_programs(completions, tests, confine=False)


def _judge_programs(
    completions: Sequence[Any], tests: Sequence[Any], confine: bool
) -> list[float | RewardFailure]:
    programs = [program_of(text_of(completion)) for completion in completions]
    verdicts = unit_tests.all_pass(programs, tests, confine)
    return [
        RewardFailure(str(verdict)) if isinstance(verdict, ValueError) else float(verdict)
        for verdict in verdicts
    ]


def program_of(text: str) -> str:
    """Return the last fenced block of a text, in any language, or the whole text if it has none."""
    blocks = _FENCED.findall(text)
    return blocks[-1] if blocks else text


_FENCED = re.compile(r"^```[^\n`]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
