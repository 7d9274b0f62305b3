"""The built-in reward `python_tests`: programs that pass tests, in the sandbox or without it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tpu_rl import sandbox
from tpu_rl.environments import text_of
from tpu_rl.rewards.worker_process import RewardFailure
from tpu_rl.sandbox import problems, unit_tests


def python_tests(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    tests: Sequence[Any],
    entry_point: Sequence[str | None] | None = None,
    **_: Any,
) -> list[float | RewardFailure]:
    """Return 1 for each completion whose Python program passes all tests of its row, else 0.

    The program is the last fenced block, or all of the text. `tests` is a list of {"input": ...,
    "output": ...} and of texts with asserts, or {"inputs": [...], "outputs": [...]}, or either as
    JSON. See `tpu_rl.sandbox.unit_tests`. Imports and helpers that a prompt gives beside the
    function `entry_point` belong to the program and, as a copy of its own, to the test.

    Raises:
        MachineError: if the kernel cannot confine programs.
    """
    sandbox.require()
    return _judge_programs(prompts, completions, tests, entry_point, confine=True)


def python_tests_unsandboxed(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    tests: Sequence[Any],
    entry_point: Sequence[str | None] | None = None,
    **_: Any,
) -> list[float | RewardFailure]:
    """Return the same as `python_tests`, with programs that may do whatever this user may.

    The flag --allow-unsandboxed-code selects it.
    """
    return _judge_programs(prompts, completions, tests, entry_point, confine=False)


def _judge_programs(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    tests: Sequence[Any],
    entry_points: Sequence[str | None] | None,
    confine: bool,
) -> list[float | RewardFailure]:
    programs = []
    columns = []
    for prompt, completion, column, name in zip(
        prompts, completions, tests, entry_points or [None] * len(prompts), strict=True
    ):
        given = problems.given_code(prompt, name or "")
        program = program_of(text_of(completion), prompt if isinstance(prompt, str) else "")
        programs.append(problems.with_given_code(program, given))
        columns.append(problems.with_helpers_in(column, given))
    verdicts = unit_tests.all_pass(programs, columns, confine)
    return [
        RewardFailure(str(verdict)) if isinstance(verdict, ValueError) else float(verdict)
        for verdict in verdicts
    ]


def program_of(text: str, prompt: str = "") -> str:
    """Return the last fenced block of a text, in any language, or the whole text if it has none.

    An indented text goes on with the prompt's function.
    """
    blocks = _FENCED.findall(text)
    if blocks:
        return blocks[-1]
    return prompt + text if re.match(r"(?:[ \t]*\n)*[ \t]+\S", text) else text


_FENCED = re.compile(r"^```[^\n`]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
