"""Built-in rewards that run Python: programs that pass tests, their speed, and checks of texts."""

from __future__ import annotations

import ast
import functools
import re
import statistics
import textwrap
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tpu_rl import sandbox
from tpu_rl.environments import text_of
from tpu_rl.rewards import spans
from tpu_rl.rewards.scoring import Reward
from tpu_rl.rewards.verifier import Verifier
from tpu_rl.rewards.worker_process import ExplainedReward, RewardFailure
from tpu_rl.runtime.worker_child import shorten
from tpu_rl.sandbox import problems, unit_tests


def python_tests(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    tests: Sequence[Any],
    entry_point: Sequence[str | None] | None = None,
    confine: bool = True,
    **columns: Any,
) -> list[float | RewardFailure]:
    """Return 1 for each completion whose Python program passes all tests of its row, else 0.

    The program is the last fenced block behind the thoughts, or all of the text: see `program_of`.
    `tests` is a list of {"input": ..., "output": ...} and of texts with asserts, or {"inputs":
    [...], "outputs": [...]}, or either as JSON, or one text with asserts. See
    `tpu_rl.sandbox.unit_tests`. Imports and helpers that a prompt gives beside the function
    `entry_point` belong to the program and, as a copy of its own, to the test.

    Test and program run in a process each, and a column `solution`, `canonical_solution` or
    `reference_solution` says whether that can judge the row: tests that it passes in one process
    only are judged plainly, in one. `plain_judge` counts them; with plain=false their rows have no
    reward. A program that passes in one process only gets 0, with the reason in samples.jsonl.

    Raises:
        MachineError: if the kernel cannot confine programs.
    """
    _require_sandbox(confine)
    return _judge_programs(prompts, completions, tests, entry_point, confine, columns)


def python_speed(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    tests: Sequence[Any],
    baseline: Sequence[str],
    entry_point: Sequence[str | None] | None = None,
    confine: bool = True,
    **_: Any,
) -> list[float | RewardFailure]:
    """Return 0.5 for each program that passes its tests, up to 1 the faster it is, else 0.

    1 - 0.5 time / time of `baseline`, the median of three pairs of runs of all tests, if each of
    them saves more than a tenth; `baseline` is a program that passes (after the ladder of PerfRL,
    arXiv 2312.05657). Times are those of the clock, and have the start of the sandbox in them,
    about 0.1 s for each test: let tests run for a second. What else the machine does is noise.
    Programs and tests are those of `python_tests`.

    Raises:
        MachineError: if the kernel cannot confine programs.
    """
    _require_sandbox(confine)
    return _speeds(prompts, completions, tests, baseline, entry_point, confine)


def python_checks(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    checks: Sequence[Sequence[str]],
    confine: bool = True,
    **_: Any,
) -> list[float | RewardFailure]:
    """Return the share of the row's own checks that each completion passes, from 0 to 1.

    `checks` is a list of Python sources, each with a function check(text) -> bool, such as those
    that a language model proposes for a reference answer (the style of RLVRR; its content is the
    term `ordered_keys`). They run in the sandbox, 5 s each. A check that raises, or returns
    neither True nor False, is a fault of its row. Thoughts are left out.

    Raises:
        MachineError: if the kernel cannot confine programs.
    """
    _require_sandbox(confine)
    return [_share(*row, confine=confine) for row in zip(completions, checks, strict=True)]


def _require_sandbox(confine: bool) -> None:
    """Raise MachineError if programs are to be confined, and the kernel cannot do it."""
    if confine:
        sandbox.require()


def _judge_programs(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    tests: Sequence[Any],
    entry_points: Sequence[str | None] | None,
    confine: bool,
    columns: Mapping[str, Any] = MappingProxyType({}),
) -> list[float | RewardFailure]:
    programs, prepared_tests = _prepared(prompts, completions, tests, entry_points)
    solutions = _solutions(prompts, tests, entry_points, columns)
    verdicts = unit_tests.all_pass(programs, prepared_tests, confine, solutions)
    return [_reward_of(verdict) for verdict in verdicts]


def _reward_of(verdict: bool | unit_tests.Uncarried | ValueError) -> float | RewardFailure:
    match verdict:
        case ValueError():
            return RewardFailure(str(verdict))
        case unit_tests.Uncarried(why=why):
            return ExplainedReward(0.0, why)
    return float(verdict)


def _prepared(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    tests: Sequence[Any],
    entry_points: Sequence[str | None] | None,
) -> tuple[list[str], list[Any]]:
    """Return the programs and their tests, with what the prompts give beside the functions."""
    programs = []
    columns = []
    for prompt, completion, column, name in zip(
        prompts, completions, tests, entry_points or [None] * len(prompts), strict=True
    ):
        given = problems.given_code(prompt, name or "")
        begun = prompt if isinstance(prompt, str) else ""
        program = program_of(text_of(completion), begun, unit_tests.calls_program(column))
        programs.append(problems.with_given_code(program, given))
        columns.append(problems.with_helpers_in(column, given))
    return programs, columns


def _solutions(
    prompts: Sequence[Any],
    tests: Sequence[Any],
    entry_points: Sequence[str | None] | None,
    columns: Mapping[str, Any],
) -> list[str | None]:
    """Return the right program of each row, with the prompt's code; None where there is none."""
    name = next((name for name in problems.SOLUTIONS if name in columns), None)
    if name is None:
        return [None] * len(prompts)
    texts = [problems.first_text(value) for value in columns[name]]
    programs, _ = _prepared(prompts, texts, tests, entry_points)
    return [program if _names(program)[0] else None for program in programs]


def plain_judge(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    tests: Sequence[Any],
    entry_point: Sequence[str | None] | None = None,
    **columns: Any,
) -> list[float]:
    """Return 1 for each completion that `python_tests` judges in one process, else 0.

    A monitor: `--reward python_tests 0*plain_judge`. There a program could reach its test.
    """
    _, prepared_tests = _prepared(prompts, completions, tests, entry_point)
    solutions = _solutions(prompts, tests, entry_point, columns)
    confine = not sandbox.refusal()
    rows = zip(solutions, prepared_tests, strict=True)
    return [
        float(bool(unit_tests.plain_tests(solution, unit_tests.tests_of(column), confine)))
        for solution, column in rows
    ]


def _with_plain_rows(plain: bool = True) -> Reward:
    if plain:
        return python_tests
    sandbox.require()

    def score(
        prompts: Sequence[Any], completions: Sequence[Any], *, tests: Sequence[Any], **columns: Any
    ) -> list[Any]:
        values = python_tests(prompts, completions, tests=tests, **columns)
        plainly = plain_judge(prompts, completions, tests=tests, **columns)
        return [None if one else value for one, value in zip(plainly, values, strict=True)]

    return score


_with_plain_rows.__doc__ = python_tests.__doc__

REPEATS = 3
"""Times that a program and its baseline run, one after the other."""
MARGIN = 0.1
"""A program that saves less, in one of the repeats, is not faster: on a busy machine, the time of
one and the same program varies by as much."""


def _speeds(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    tests: Sequence[Any],
    baselines: Sequence[str],
    entry_points: Sequence[str | None] | None,
    confine: bool,
) -> list[float | RewardFailure]:
    """Return the values of `python_speed`. Programs run one by one, for the sake of the clock."""
    values = _judge_programs(prompts, completions, tests, entry_points, confine)
    prepared = _prepared(prompts, completions, tests, entry_points)
    for row, (program, column) in enumerate(zip(*prepared, strict=True)):
        if values[row] != 1.0:
            continue
        if not isinstance(baselines[row], str):
            values[row] = RewardFailure(f"`baseline` is no text, but {shorten(baselines[row])}")
            continue
        baseline = program_of(baselines[row], "", unit_tests.calls_program(column))
        # Neighbors in time share the load of the machine.
        pairs = [
            [_seconds(code, column, confine) for code in (program, baseline)]
            for _ in range(REPEATS)
        ]
        if any(not theirs for _, theirs in pairs):
            values[row] = RewardFailure("the program `baseline` does not pass the tests")
            continue
        # A program that fails now and then is no faster.
        ratios = [mine / theirs if mine and theirs else 1.0 for mine, theirs in pairs]
        is_faster = max(ratios) < 1 - MARGIN
        values[row] = 1 - 0.5 * statistics.median(ratios) if is_faster else 0.5
    return values


def _seconds(program: str, column: Any, confine: bool) -> float | None:
    """Return the seconds that all tests take; None if one fails."""
    began = time.perf_counter()
    tests = unit_tests.tests_of(column)
    passes = all(unit_tests.passes(program, test, confine=confine) for test in tests)
    return time.perf_counter() - began if passes else None


def _share(completion: Any, checks: Sequence[str], confine: bool) -> float | RewardFailure:
    """Return the share of checks that hold of a completion."""
    if not isinstance(checks, list | tuple) or not all(isinstance(c, str) for c in checks):
        return RewardFailure("`checks` is no list of texts")
    if not checks:
        return RewardFailure("`checks` is empty")
    text = spans.without_thoughts(text_of(completion))
    held = 0
    for check in checks:
        # Bytes, because a text stream makes one line end of all kinds.
        program = f"{check}\nimport sys\nprint(repr(check(sys.stdin.buffer.read().decode())))\n"
        outcome = sandbox.run(program, text, confine=confine)
        last = outcome.printed.strip().rpartition("\n")[2]
        if outcome.ended or last not in ("True", "False"):
            error = outcome.errors.strip().rpartition("\n")[2]
            why = error or outcome.ended or f"it returns {last}"
            return RewardFailure(f"a check gives no verdict: {shorten(check)}: {why}")
        held += last == "True"
    return held / len(checks)


def program_of(text: str, prompt: str = "", is_called: bool = False) -> str:
    """Return the program of a completion: the last fenced block, or the whole text if it has none.

    It is behind the thoughts, and in <answer> if there is one. Blocks that define what the last one
    uses come before it. Blocks of other languages, as of output, are left out beside others. With
    `is_called` tests call what the program defines: a block behind it that only uses this is an
    example. An indented text goes on with the prompt's function.
    """
    text = spans.answer_text(text)
    blocks = [
        (language.strip().lower(), textwrap.dedent(code))
        for _, language, code in spans.FENCED.findall(text)
    ]
    sources = [code for language, code in blocks if language not in _NO_PROGRAMS]
    sources = sources or [code for _, code in blocks]
    if not sources:
        return prompt + text if re.match(r"(?:[ \t]*\n)*[ \t]+\S", text) else text
    names = [_names(source) for source in sources]
    chosen = len(sources) - 1
    while is_called and chosen and not names[chosen][0] and any(n[0] for n in names[:chosen]):
        chosen -= 1
    program = sources[chosen]
    defined, used = names[chosen]
    for index in reversed(range(chosen)):
        if names[index][0] & (used - defined):
            program = f"{sources[index]}\n{program}"
            defined |= names[index][0]
            used |= names[index][1]
    return program


_NO_PROGRAMS = {"text", "txt", "output", "plaintext", "console", "bash", "sh", "shell", "json"}


def _names(source: str) -> tuple[set[str], set[str]]:
    """Return the functions and classes that a program defines, and the names that it reads."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set(), set()
    defined: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
    lambdas = [
        n for n in tree.body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Lambda)
    ]
    defined |= {t.id for n in lambdas for t in n.targets if isinstance(t, ast.Name)}
    return defined, {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


_runs_programs = functools.partial(Verifier, require_sandbox=sandbox.require)


VERIFIERS = {
    "python_tests": _runs_programs(python_tests, in_workers=True, make=_with_plain_rows),
    "python_checks": _runs_programs(python_checks, in_workers=True),
    "plain_judge": Verifier(plain_judge),
    # Not during sampling, which would disturb its clock.
    "python_speed": _runs_programs(python_speed),
}
