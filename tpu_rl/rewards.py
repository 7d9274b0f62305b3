"""Reward functions: the convention, scoring that never turns a fault into a silent zero, and the built-in verifiers.

Convention (TRL's): `fn(prompts, completions, **columns) -> list[float | None]`, one number a completion; `columns` are
the data's other columns, one value a completion. Completions are texts, or lists of messages whose last one counts.
None means "do not score this one by me", never zero.

Functions that work in other processes (FILE.py:function, math, python_tests) are asked about groups as they end, while
other rows are still being decoded: one call then holds some whole groups of the batch, prompt by prompt. Whoever must
see the whole batch at once, to rank it or to normalise by its mean, says so and is asked once, at its end:

    score.whole_batch = True
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import queue
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from tpu_rl import environments, program_tests, reward_process, sandbox
from tpu_rl.errors import InputError, MachineError
from tpu_rl.reward_process import RewardFailure, as_number, did_you_mean, load_function, shorten
from tpu_rl.reward_workers import IsolatedReward, RewardLimits, Worker

DEFAULT_LIMITS = RewardLimits()

Reward = Callable[..., Sequence[Any]]
"""fn(prompts, completions, **columns) -> a float or None for each completion; an exception in a completion's place is
the fault of that one alone."""


@dataclass(frozen=True)
class RewardFault:
    """A completion that a reward function failed to score."""

    function: str
    row: int
    message: str
    frames: str = ""
    """The traceback through the user's code, where there is one."""


Answer = tuple[np.ndarray, list[RewardFault]]
"""What one function says of N completions: values [N] float32, NaN where it has none, and its faults."""


@dataclass(frozen=True)
class Scores:
    """What reward functions say of N completions. NaN is "not scored" everywhere."""

    totals: np.ndarray
    """[N] float32: the sum of a row's parts; NaN where no function scored it or one failed on it."""
    parts: dict[str, np.ndarray]
    """Function name -> [N] float32."""
    faults: list[RewardFault]


def score(
    reward_functions: Mapping[str, Reward],
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: Mapping[str, Sequence[Any]],
    max_fault_share: float = DEFAULT_LIMITS.fault_share,
    known: Mapping[str, Answer] | None = None,
) -> Scores:
    """The rewards of N completions by each function and in total; functions whose answer is known are not asked.

    A function that raises, returns the wrong number of values, or something that is not a finite number, is asked again
    row by row, so that one bad row does not void the others; what still fails is a fault, and its row has no total: the
    sum of the remaining parts would compare unlike with unlike. Raises InputError where more than `max_fault_share` of
    the rows have a fault, and where a function needs a column that the data lack.
    """
    for name, function in reward_functions.items():
        require_columns(name, function, columns)
    if not completions:
        return Scores(np.zeros(0, np.float32), {name: np.zeros(0, np.float32) for name in reward_functions}, [])
    parts, faults = {}, []
    for name, function in reward_functions.items():
        answer = (known or {}).get(name)
        parts[name], found = answer or ask(name, function, prompts, completions, columns)
        faults += found
    stacked = np.stack(list(parts.values()))
    unscored = np.isnan(stacked)
    totals = np.where(unscored.all(axis=0), np.nan, np.where(unscored, 0, stacked).sum(axis=0)).astype(np.float32)
    faulty = sorted({fault.row for fault in faults})
    totals[faulty] = np.nan
    scores = Scores(totals, parts, faults)
    require_few_faults(scores, completions, max_fault_share)
    return scores


def require_few_faults(scores: Scores, completions: Sequence[Any], max_fault_share: float) -> None:
    """Raises InputError where more than that share of the completions have a fault."""
    faulty = {fault.row for fault in scores.faults}
    if len(faulty) > max_fault_share * len(completions):
        first = scores.faults[0]
        raise InputError(
            f"reward functions fail on {len(faulty)} of {len(completions)} completions",
            where=f"{first.function}, first on row {first.row}: {shorten(completions[first.row])}",
            why=f"{first.message}\n{textwrap.indent(first.frames.rstrip(), '    ')}".rstrip(),
            fix="repair the function; return None for what should not be scored; limits: --reward-limits",
        )


def from_path(path: str, limits: RewardLimits = DEFAULT_LIMITS) -> Reward:
    """The function that "file.py:function" names, in a process of its own unless `limits` say otherwise.

    Raises InputError where there is none or its file fails to load.
    """
    file_name, _, name = path.rpartition(":")
    file = Path(file_name).expanduser().absolute()
    if not file_name or not name.isidentifier():
        raise InputError(
            f"{path!r} does not name a reward function", fix=f"write file.py:function, or one of {', '.join(BUILTIN)}"
        )
    if not file.is_file():
        nearby = [str(other) for other in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise InputError("no such reward file", where=file_name, fix=did_you_mean(str(file), nearby))
    return IsolatedReward(path, limits) if limits.isolate else load_function(path)


# --- built-in verifiers ------------------------------------------------------------------------------------------


def arithmetic(prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[str], **_: Any) -> list[float]:
    """1 for a well-formed completion with the right answer of the arithmetic task, else 0."""
    del prompts
    parsed = [environments.parse(text_of(completion)) for completion in completions]
    return [float(value == int(right)) for value, right in zip(parsed, answer, strict=True)]


def arithmetic_well_formed(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
    """1 for a completion that ends with its only hash and an integer, right or wrong, else 0."""
    del prompts
    return [float(environments.parse(text_of(completion)) is not None) for completion in completions]


def star_graph(prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[str], **_: Any) -> list[float]:
    """1 for the whole path from the centre to the goal and nothing else, else 0."""
    del prompts
    found = [environments.parse_path(text_of(completion)) for completion in completions]
    return [float(path == environments.parse_path(right)) for path, right in zip(found, answer, strict=True)]


def gsm8k(prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[Any], **_: Any) -> list[float]:
    """1 where the completion's final number equals the ground truth's, else 0, also where it has none.

    The final number follows the last "####", or else stands in the last \\boxed{}. `answer` is a number, or a GSM8K
    solution that ends with one.
    """
    del prompts
    truths = [final_number(str(text)) if "####" in str(text) else read_number(str(text)) for text in answer]
    if None in truths:
        raise ValueError(f"the ground truth {shorten(answer[truths.index(None)])} holds no number")
    found = [final_number(text_of(completion)) for completion in completions]
    return [float(number == truth) for number, truth in zip(found, truths, strict=True)]


def math_equivalent(
    prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[Any], **_: Any
) -> list[Any | RewardFailure]:
    """1 where math-verify finds the completion's answer equal to the ground truth (LaTeX or plain), else 0.

    Runs in processes of its own that are killed when an answer keeps one busy past the deadline: a fault of that row.
    Raises MachineError where math-verify is not installed.
    """
    del prompts
    threads, verifiers = _verifiers()

    def verdict(truth: Any, completion: Any) -> Any:
        verifier = verifiers.get()
        try:
            arguments = {"completions": [text_of(completion)], "answer": [str(truth)]}
            found = verifier.ask(arguments, 1, VERDICT_SECONDS)
        finally:
            verifiers.put(verifier)
        return found if isinstance(found, RewardFailure) else found[0]

    return list(threads.map(verdict, answer, completions))


def python_tests(
    prompts: Sequence[Any], completions: Sequence[Any], *, tests: Sequence[Any], **_: Any
) -> list[float | RewardFailure]:
    """1 where the completion's Python program passes all of its row's tests, else 0; see `program_tests` for both.

    The program is the last fenced block, or all of the text. `tests` are {"input": ..., "output": ...} and texts with
    asserts in a list, {"inputs": [...], "outputs": [...]}, or either as JSON. Raises MachineError where the kernel does
    not let programs be confined.
    """
    del prompts
    sandbox.require()
    return _judge_programs(completions, tests, confine=True)


def python_tests_unsandboxed(
    prompts: Sequence[Any], completions: Sequence[Any], *, tests: Sequence[Any], **_: Any
) -> list[float | RewardFailure]:
    """The same with programs that may do whatever this user may: --allow-unsandboxed-code."""
    del prompts
    return _judge_programs(completions, tests, confine=False)


def _judge_programs(completions: Sequence[Any], tests: Sequence[Any], confine: bool) -> list[float | RewardFailure]:
    programs = [program_of(text_of(completion)) for completion in completions]
    verdicts = program_tests.all_pass(programs, tests, confine)
    return [RewardFailure(str(found)) if isinstance(found, ValueError) else float(found) for found in verdicts]


BUILTIN: dict[str, Reward] = {
    "arithmetic": arithmetic,
    "arithmetic_well_formed": arithmetic_well_formed,
    "gsm8k": gsm8k,
    "math": math_equivalent,
    "python_tests": python_tests,
    "star_graph": star_graph,
}
"""Reward functions by the names that presets and `--reward` use."""


# --- texts and numbers -------------------------------------------------------------------------------------------


def text_of(completion: Any) -> str:
    """The text of a completion: itself, or the content of the last of its messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def program_of(text: str) -> str:
    """The last fenced block of a text, whatever language it names; the whole text where there is none."""
    blocks = _FENCED.findall(text)
    return blocks[-1] if blocks else text


_FENCED = re.compile(r"^```[^\n`]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


def final_number(text: str) -> Fraction | None:
    """The number after the last "####", or else in the last \\boxed{}; None where there is none."""
    _, marker, tail = text.rpartition("####")
    if marker:
        return read_number(tail)
    _, marker, tail = text.rpartition("\\boxed{")
    return read_number(tail[: _closing_brace(tail)]) if marker else None


def read_number(text: str) -> Fraction | None:
    """The first number of a text: signs, thousands commas, decimals, fractions, LaTeX's too; currency and percent signs
    are dropped.

    So "$1,234.00", "1234" and "1234.0 dollars" are the same number, and "50%" is 50.
    """
    plain = _FRACTION.sub(r" \1/\2", _SPACES.sub("", text.replace("\u2212", "-").replace("{,}", ",")))
    match = _NUMBER.search(plain.replace("\\$", "").replace("$", ""))
    if not match:
        return None
    whole, denominator = (part and part.replace(",", "").replace(" ", "") for part in match.groups())
    if denominator is not None and not Fraction(denominator):
        return None
    return Fraction(whole) / Fraction(denominator or 1)


_DIGITS = r"(?:[0-9][0-9,]{0,40}(?:\.[0-9]{1,40})?|\.[0-9]{1,40})"
_NUMBER = re.compile(rf"(-? ?{_DIGITS})(?:/({_DIGITS}))?")
_FRACTION = re.compile(rf"\\[dt]?frac *{{ *(-?{_DIGITS}) *}} *{{ *({_DIGITS}) *}}")
_SPACES = re.compile(r"\\[,!;:]")
"""Of LaTeX, between digits."""


def _closing_brace(text: str) -> int:
    """Where the brace closes that was opened before `text`; its end where it never does."""
    depth = 1
    for position, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return position
    return len(text)


# --- scoring -----------------------------------------------------------------------------------------------------


def ask(
    name: str,
    function: Reward,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: Mapping[str, Sequence[Any]],
) -> Answer:
    """One function's answer about N completions."""
    values = _call(function, prompts, completions, columns)
    if isinstance(values, RewardFailure) and reward_process.sees_whole_batch(function):
        values = [values] * len(completions)
    elif isinstance(values, RewardFailure):
        values = []
        for i in range(len(completions)):
            row = {key: [column[i]] for key, column in columns.items()}
            answer = _call(function, [prompts[i]], [completions[i]], row)
            values.append(answer if isinstance(answer, RewardFailure) else answer[0])
    numbers = np.full(len(completions), np.nan, np.float32)
    faults = []
    for i, value in enumerate(values):
        if value is None:
            continue
        number = as_number(value)
        if isinstance(number, str):
            faults.append(RewardFault(name, i, number, value.frames if isinstance(value, RewardFailure) else ""))
        else:
            numbers[i] = number
    return numbers, faults


def _call(
    function: Reward, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]
) -> list[Any] | RewardFailure:
    """The function's list, or what is wrong with it."""
    arguments = {**columns, "prompts": list(prompts), "completions": list(completions)}
    accepted = _parameters(function)
    if accepted is not None and not any(p.kind is p.VAR_KEYWORD for p in accepted):
        arguments = {p.name: arguments[p.name] for p in accepted if p.name in arguments}
    return reward_process.call(function, arguments, len(completions))


def works_elsewhere(function: Reward) -> bool:
    """Whether it can be asked about some groups while others are decoded: it works in other processes and by groups."""
    if isinstance(function, IsolatedReward):
        return not function.whole_batch
    return function in (math_equivalent, python_tests, python_tests_unsandboxed)


def of_share(function: Reward, share: float, spent: float) -> Reward:
    """The function with the time that its limits give so large a share of a batch, of which some seconds are spent."""
    return function.of_share(share, spent) if isinstance(function, IsolatedReward) else function


def require_columns(name: str, function: Reward, columns: Mapping[str, Sequence[Any]]) -> None:
    """Raises InputError where a function needs a column that the data lack."""
    for parameter in _parameters(function) or ():
        required = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if required and parameter.name not in {"prompts", "completions", *columns}:
            raise InputError(
                f"the reward function {name} needs a column {parameter.name!r} that the data lack",
                where=f"columns present: {', '.join(columns) or 'none'}",
                fix=did_you_mean(parameter.name, list(columns)),
            )


def _parameters(function: Reward) -> list[inspect.Parameter] | None:
    """None for the rare callable, written in C, that does not tell."""
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:
        return None


# --- math-verify in processes that can be killed -----------------------------------------------------------------

VERIFIERS = 4
VERDICT_SECONDS = 10.0


@functools.cache
def _verifiers() -> tuple[ThreadPoolExecutor, queue.SimpleQueue[Worker]]:
    """The idle verifiers and the threads that ask them, shared by the whole program and ended with it: math-verify can
    hang inside big integers, where neither its own time-out nor a Python signal handler gets a turn."""
    if importlib.util.find_spec("math_verify") is None:
        raise MachineError("math-verify is not installed", fix='pip install "tpu_rl[math]"')
    # A worker lives no longer than the thread that starts it: these live as long as the program.
    threads = ThreadPoolExecutor(VERIFIERS)
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    path = f"{Path(__file__).with_name('math_verdicts.py')}:equivalent"
    try:
        for worker in threads.map(lambda _: Worker(path), range(VERIFIERS)):
            idle.put(worker)
    except InputError as error:
        fix = 'reinstall it: pip install "tpu_rl[math]"'
        raise MachineError("math-verify does not start", why=error.why, fix=fix) from None
    return threads, idle
