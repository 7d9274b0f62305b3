"""Reward functions: the convention, scoring that never turns a fault into a silent zero, and the built-in verifiers.

Convention (TRL's): `fn(prompts, completions, **columns) -> list[float | None]`, one number a completion; `columns` are
the data's other columns, one value a completion. Completions are texts, or lists of messages whose last one counts.
None means "do not score this one by me", never zero.
"""

from __future__ import annotations

import atexit
import difflib
import functools
import importlib.util
import inspect
import json
import queue
import re
import select
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from tpu_rl import environments
from tpu_rl.errors import InputError, MachineError, TpuRlError

Reward = Callable[..., Sequence[Any]]
"""fn(prompts, completions, **columns) -> a float or None for each completion; an exception in a completion's place is
the fault of that one alone."""


@dataclass(frozen=True)
class RewardFault:
    """A completion that a reward function failed to score."""

    function: str
    row: int
    message: str


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
    max_fault_share: float = 0.5,
) -> Scores:
    """The rewards of N completions by each function and in total.

    A function that raises, returns the wrong number of values, or something that is not a finite number, is asked again
    row by row, so that one bad row does not void the others; what still fails is a fault, and its row has no total: the
    sum of the remaining parts would compare unlike with unlike. Raises InputError where more than `max_fault_share` of
    the rows have a fault, and where a function needs a column that the data lack.
    """
    for name, function in reward_functions.items():
        _require_columns(name, function, columns)
    if not completions:
        return Scores(np.zeros(0, np.float32), {name: np.zeros(0, np.float32) for name in reward_functions}, [])
    parts, faults = {}, []
    for name, function in reward_functions.items():
        parts[name], found = _score_one(name, function, prompts, completions, columns)
        faults += found
    stacked = np.stack(list(parts.values()))
    unscored = np.isnan(stacked)
    totals = np.where(unscored.all(axis=0), np.nan, np.where(unscored, 0, stacked).sum(axis=0)).astype(np.float32)
    faulty = sorted({fault.row for fault in faults})
    totals[faulty] = np.nan
    if len(faulty) > max_fault_share * len(completions):
        first = faults[0]
        raise InputError(
            f"reward functions fail on {len(faulty)} of {len(completions)} completions",
            where=f"{first.function}, first on row {first.row}: {_shorten(completions[first.row])}",
            why=first.message,
            fix="repair the function; return None for what should not be scored",
        )
    return Scores(totals, parts, faults)


def from_path(path: str) -> Reward:
    """The function that "file.py:function" names. Raises InputError where there is none or its file fails to load."""
    file_name, _, name = path.rpartition(":")
    file = Path(file_name).expanduser().absolute()
    if not file_name or not name.isidentifier():
        raise InputError(
            f"{path!r} does not name a reward function", fix=f"write file.py:function, or one of {', '.join(BUILTIN)}"
        )
    if not file.is_file():
        nearby = [str(other) for other in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise InputError("no such reward file", where=file_name, fix=_did_you_mean(str(file), nearby))
    spec = importlib.util.spec_from_file_location(f"reward_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise InputError("a reward file is Python source and ends in .py", where=file_name)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    # It is the user's program: it may raise anything.
    except Exception as error:
        raise InputError("the reward file does not load", where=_user_line(error, file), why=_describe(error)) from None
    members = vars(module)
    if not callable(members.get(name)):
        functions = [key for key, value in members.items() if inspect.isfunction(value)]
        raise InputError(
            f"no function {name!r} in the reward file",
            where=f"{file_name} defines {', '.join(functions) or 'no function'}",
            fix=_did_you_mean(name, functions),
        )
    return members[name]


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
        raise ValueError(f"the ground truth {_shorten(answer[truths.index(None)])} holds no number")
    found = [final_number(text_of(completion)) for completion in completions]
    return [float(number == truth) for number, truth in zip(found, truths, strict=True)]


def math_equivalent(
    prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[Any], **_: Any
) -> list[float | Exception]:
    """1 where math-verify finds the completion's answer equal to the ground truth (LaTeX or plain), else 0.

    Runs in processes of its own that are killed when an answer keeps one busy past the deadline: a fault of that row.
    Raises MachineError where math-verify is not installed.
    """
    del prompts
    verifiers = _verifiers()

    def verdict(truth: Any, completion: Any) -> float | Exception:
        verifier = verifiers.get()
        try:
            return verifier.ask(str(truth), text_of(completion))
        finally:
            verifiers.put(verifier)

    with ThreadPoolExecutor(VERIFIERS) as threads:
        return list(threads.map(verdict, answer, completions))


BUILTIN: dict[str, Reward] = {
    "arithmetic": arithmetic,
    "arithmetic_well_formed": arithmetic_well_formed,
    "gsm8k": gsm8k,
    "math": math_equivalent,
    "star_graph": star_graph,
}
"""Reward functions by the names that presets and `--reward` use."""


# --- texts and numbers -------------------------------------------------------------------------------------------


def text_of(completion: Any) -> str:
    """The text of a completion: itself, or the content of the last of its messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def final_number(text: str) -> Fraction | None:
    """The number after the last "####", or else in the last \\boxed{}; None where there is none."""
    _, marker, tail = text.rpartition("####")
    if marker:
        return read_number(tail)
    _, marker, tail = text.rpartition("\\boxed{")
    return read_number(tail[: _closing_brace(tail)]) if marker else None


def read_number(text: str) -> Fraction | None:
    """The first number of a text: signs, thousands commas, decimals, fractions; currency and percent signs are dropped.

    So "$1,234.00", "1234" and "1234.0 dollars" are the same number, and "50%" is 50.
    """
    match = _NUMBER.search(text.replace("\u2212", "-").replace("\\$", "").replace("$", ""))
    if not match:
        return None
    whole, denominator = (part and part.replace(",", "").replace(" ", "") for part in match.groups())
    if denominator is not None and not Fraction(denominator):
        return None
    return Fraction(whole) / Fraction(denominator or 1)


_DIGITS = r"(?:[0-9][0-9,]{0,40}(?:\.[0-9]{1,40})?|\.[0-9]{1,40})"
_NUMBER = re.compile(rf"(-? ?{_DIGITS})(?:/({_DIGITS}))?")


def _closing_brace(text: str) -> int:
    """Where the brace closes that was opened before `text`; its end where it never does."""
    depth = 1
    for position, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return position
    return len(text)


# --- scoring -----------------------------------------------------------------------------------------------------


def _score_one(
    name: str,
    function: Reward,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: Mapping[str, Sequence[Any]],
) -> tuple[np.ndarray, list[RewardFault]]:
    """One function's values [N] float32, NaN where unscored, and its faults."""
    values = _call(function, prompts, completions, columns)
    if isinstance(values, str):
        values = []
        for i in range(len(completions)):
            row = {key: [column[i]] for key, column in columns.items()}
            answer = _call(function, [prompts[i]], [completions[i]], row)
            values.append(RuntimeError(answer) if isinstance(answer, str) else answer[0])
    numbers = np.full(len(completions), np.nan, np.float32)
    faults = []
    for i, value in enumerate(values):
        if value is None:
            continue
        number = _number(value)
        if isinstance(number, str):
            faults.append(RewardFault(name, i, number))
        else:
            numbers[i] = number
    return numbers, faults


def _call(
    function: Reward, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]
) -> list[Any] | str:
    """The function's list, or what is wrong with it."""
    arguments = {**columns, "prompts": list(prompts), "completions": list(completions)}
    accepted = _parameters(function)
    if accepted is not None and not any(p.kind is p.VAR_KEYWORD for p in accepted):
        arguments = {p.name: arguments[p.name] for p in accepted if p.name in arguments}
    try:
        values = function(**arguments)
    except TpuRlError:
        raise
    # It is the user's program: it may raise anything, and the run must go on.
    except (Exception, SystemExit) as error:
        return f"{_describe(error)} ({_last_line(error)})"
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Mapping)):
        return f"it returned {_shorten(values)} and not a list of numbers"
    values = list(values)
    if len(values) != len(completions):
        return f"it returned {len(values)} values for {len(completions)} completions"
    return values


def _number(value: Any) -> float | str:
    """The value as a finite float, or what is wrong with it."""
    if isinstance(value, Exception):
        return str(value)
    if isinstance(value, (str, bytes)):
        return f"it returned {_shorten(value)} and not a number"
    try:
        number = float(value)
    except (TypeError, ValueError):
        return f"it returned {_shorten(value)} and not a number"
    return number if abs(number) <= float(np.finfo(np.float32).max) else f"it returned {number}, beyond a float32"


def _require_columns(name: str, function: Reward, columns: Mapping[str, Sequence[Any]]) -> None:
    for parameter in _parameters(function) or ():
        required = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if required and parameter.name not in {"prompts", "completions", *columns}:
            raise InputError(
                f"the reward function {name} needs a column {parameter.name!r} that the data lack",
                where=f"columns present: {', '.join(columns) or 'none'}",
                fix=_did_you_mean(parameter.name, list(columns)),
            )


def _parameters(function: Reward) -> list[inspect.Parameter] | None:
    """None for the rare callable, written in C, that does not tell."""
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:
        return None


def _user_line(error: BaseException, file: Path) -> str:
    """The last line of the user's file in the error's traceback; a syntax error knows its own."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return f"{file}:{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f"{file}:{lines[-1]}" if lines else str(file)


def _last_line(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _did_you_mean(name: str, candidates: list[str]) -> str:
    nearest = difflib.get_close_matches(name, candidates, n=1)
    return f"did you mean {nearest[0]}?" if nearest else ""


# --- math-verify in processes that can be killed -----------------------------------------------------------------

VERIFIERS = 4
VERDICT_SECONDS = 10.0

# Reads [truth, answer] and writes true, false or a complaint, one JSON value a line. math-verify can hang inside big
# integers, where neither its own time-out nor a Python signal handler gets a turn: a profiling timer without a handler
# ends the process from outside Python, so that none outlives a parent that was killed.
_VERIFIER_PROGRAM = """
import json, os, signal, sys
seconds = float(sys.argv[1])
replies = os.fdopen(os.dup(1), "w")
sys.stdout = sys.stderr
from math_verify import parse, verify
print("ready", file=replies, flush=True)
for line in sys.stdin:
    truth, answer = json.loads(line)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    gold = parse(truth) or parse(f"${truth}$")
    reply = verify(gold, parse(answer)) if gold else f"the ground truth {truth!r} holds no answer"
    signal.setitimer(signal.ITIMER_PROF, 0)
    print(json.dumps(reply), file=replies, flush=True)
"""


class _Verifier:
    """One math-verify process, started when first asked and again after it had to be killed."""

    def __init__(self):
        self.process: subprocess.Popen[str] | None = None

    def ask(self, truth: str, answer: str) -> float | Exception:
        """1 or 0, or the exception that stands for no verdict."""
        if self.process is None or self.process.poll() is not None:
            self.process = _start_verifier()
        print(json.dumps([truth, answer]), file=self.process.stdin, flush=True)
        reply = _read_line(self.process, 2 * VERDICT_SECONDS)
        if not reply:
            self.stop()
            return TimeoutError(f"math-verify gave no verdict within {VERDICT_SECONDS:g} s")
        verdict = json.loads(reply)
        return ValueError(verdict) if isinstance(verdict, str) else float(verdict)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def _start_verifier() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _VERIFIER_PROGRAM, str(VERDICT_SECONDS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    if _read_line(process, 120) != "ready\n":
        process.kill()
        raise MachineError("math-verify does not start", fix='reinstall it: pip install "tpu_rl[math]"')
    return process


def _read_line(process: subprocess.Popen[str], seconds: float) -> str:
    """One line, or "" where none came in time or the process ended."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    return process.stdout.readline() if ready else ""


@functools.cache
def _verifiers() -> queue.SimpleQueue[_Verifier]:
    """The idle verifiers, shared by the whole program and ended with it."""
    if importlib.util.find_spec("math_verify") is None:
        raise MachineError("math-verify is not installed", fix='pip install "tpu_rl[math]"')
    idle: queue.SimpleQueue[_Verifier] = queue.SimpleQueue()
    for _ in range(VERIFIERS):
        verifier = _Verifier()
        atexit.register(verifier.stop)
        idle.put(verifier)
    return idle
