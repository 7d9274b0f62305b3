"""Reward functions: their convention, scoring, and the built-in verifiers.

The convention is TRL's: `fn(prompts, completions, **columns) -> list[float | None]` returns one
number per completion. `columns` are the other columns of the data, with one value per completion.
Completions are texts, or lists of messages of which the last one counts. None means "this function
does not score this completion". It never counts as zero, and neither does an error.

Functions that run in other processes (FILE.py:function, math, python_tests) are called during
sampling, as soon as groups are complete: one call then gets some whole groups of the batch, prompt
by prompt. A function that must see the whole batch at once, to rank it or to normalize by its mean,
says so, and is called once, at the end:

    score.whole_batch = True

A function may be `async def`. It may also name these parameters, which only functions that name
them get, with one value per completion (a column of the data with such a name goes first):

    completion_ids   the sampled tokens, with the end
    token_counts     their number
    truncated        True if the completion has no end
    group            a number that the completions of one prompt share
    step             the step of the run; 0 in evaluations
    environments     as in TRL: an object with the public attributes of the episode's environment at
                     its end, those that JSON can write; None without an environment

If a prompt is a conversation, its completion is one too: [{"role": "assistant", "content": TEXT}].
With an environment it has all messages after the prompt, also those of the environment.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import queue
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tpu_rl import sandbox, user_code
from tpu_rl.environments import TASKS, calculator, search
from tpu_rl.environments import text_of as text_of
from tpu_rl.environments.answers import final_number as final_number
from tpu_rl.environments.answers import read_number as read_number
from tpu_rl.errors import InputError, MachineError
from tpu_rl.rewards import terms as reward_terms
from tpu_rl.rewards import worker_process
from tpu_rl.rewards.terms import PYTHON as PYTHON
from tpu_rl.rewards.terms import RewardTerm as RewardTerm
from tpu_rl.rewards.worker_pool import IsolatedReward, RewardLimits, Worker
from tpu_rl.rewards.worker_process import RewardFailure
from tpu_rl.runtime.worker_child import as_number, shorten
from tpu_rl.sandbox import unit_tests

DEFAULT_LIMITS = RewardLimits()

ROLLOUT_COLUMNS = (
    "completion_ids",
    "token_counts",
    "truncated",
    "group",
    "step",
    "environments",
)
"""Names of what a function may ask about a rollout; see the module's docstring."""

Reward = Callable[..., Sequence[Any]]
"""fn(prompts, completions, **columns) -> a float or None for each completion. An exception in place
of a value is an error on that completion alone."""


@dataclass(frozen=True)
class RewardFault:
    """A completion that a reward function failed to score."""

    function: str
    row: int
    message: str
    frames: str = ""
    """The traceback through the user's code, if there is one."""


FunctionScores = tuple[np.ndarray, list[RewardFault]]
"""The scores of N completions by one function: values [N] float32, NaN where it has none, and its
faults."""


@dataclass(frozen=True)
class Scores:
    """The scores of N completions by all functions. NaN means "not scored" everywhere."""

    totals: np.ndarray
    """[N] float32: the sum of each row's terms; NaN if no term counts or a function failed on it.
    """
    parts: dict[str, np.ndarray]
    """Function name -> [N] float32, without weights and gates."""
    faults: list[RewardFault]


def score(
    reward_functions: Mapping[str, Reward],
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: Mapping[str, Sequence[Any]],
    max_fault_share: float = DEFAULT_LIMITS.fault_share,
    precomputed: Mapping[str, FunctionScores] | None = None,
    terms: Sequence[RewardTerm] = (),
    rollout_columns: Mapping[str, Sequence[Any]] | None = None,
) -> Scores:
    """Return the rewards of N completions, by each function and in total.

    The total is the sum of weight * value over the terms whose gates hold. A term counts 0 where
    its gate does not hold. It does not count where its value, or the value that its gate asks for,
    is missing.

    A function that raises, returns the wrong number of values, or returns something that is not a
    finite number, is called again row by row, so that one bad row does not spoil the others. A row
    on which it still fails is a fault. That row has no total, because the sum of its remaining
    parts would not compare with the totals of other rows.

    Args:
        reward_functions: name -> function.
        prompts: [N] texts or lists of messages.
        completions: [N] texts or lists of messages.
        columns: the data's other columns; each has N values.
        max_fault_share: the largest share of rows that may have a fault.
        precomputed: scores by function name. These functions are not called.
        terms: the terms of the total, whose names are those of functions. By default each function
            is a term with the weight 1.
        rollout_columns: values [N] by names of `ROLLOUT_COLUMNS`.

    Raises:
        InputError: if too many rows have a fault, or a function needs a column that the data lack.
    """
    rollout_columns = rollout_columns or {}
    for name, function in reward_functions.items():
        require_columns(name, function, columns, rollout_columns)
    if not completions:
        empty = {name: np.zeros(0, np.float32) for name in reward_functions}
        return Scores(np.zeros(0, np.float32), empty, [])
    parts: dict[str, np.ndarray] = {}
    faults: list[RewardFault] = []
    for name, function in reward_functions.items():
        function_scores = (precomputed or {}).get(name)
        if function_scores is None:
            function_scores = apply(name, function, prompts, completions, columns, rollout_columns)
        parts[name] = function_scores[0]
        faults += function_scores[1]
    totals = reward_terms.totals(terms or [RewardTerm(name) for name in parts], parts)
    faulty_rows = sorted({fault.row for fault in faults})
    totals[faulty_rows] = np.nan
    scores = Scores(totals, parts, faults)
    require_few_faults(scores, completions, max_fault_share)
    return scores


def require_few_faults(scores: Scores, completions: Sequence[Any], max_fault_share: float) -> None:
    """Raise InputError if more than that share of the completions have a fault."""
    faulty_rows = {fault.row for fault in scores.faults}
    if len(faulty_rows) > max_fault_share * len(completions):
        first = scores.faults[0]
        frames = textwrap.indent(first.frames.rstrip(), "    ")
        raise InputError(
            f"reward functions fail on {len(faulty_rows)} of {len(completions)} completions",
            where=f"{first.function}, first on row {first.row}: {shorten(completions[first.row])}",
            why=f"{first.message}\n{frames}".rstrip(),
            fix="repair the function; return None for what should not be scored; "
            "limits: --reward-limits",
        )


def from_path(path: str, limits: RewardLimits = DEFAULT_LIMITS) -> Reward:
    """Return the function that "file.py:function" names.

    It runs in a process of its own unless `limits.isolate` is False.

    Raises:
        InputError: if there is no such function, or its file does not load.
    """
    file_name, _, name = path.rpartition(":")
    file = Path(file_name).expanduser().absolute()
    if not file_name or not name.isidentifier():
        raise InputError(
            f"{path!r} does not name a reward function",
            fix=f"write file.py:function, or one of {', '.join(BUILTIN)}",
        )
    user_code.require_file(file, "reward", file_name)
    return (
        IsolatedReward(path, limits) if limits.isolate else user_code.load_function(path, "reward")
    )


# --- functions of this process ---

_REGISTERED: dict[str, Callable[..., Any]] = {}


def register(name: str, function: Callable[..., Any]) -> str:
    """Make a Python function a reward of this process, and return the name that it has there.

    The name, "python:NAME", goes wherever `--reward` names a reward. The function is called in this
    process, without limits on time and memory. If it raises, or returns what is not a number, its
    rows have no reward. A later call with the same name replaces the function.

    Args:
        name: an identifier, such as the function's own name.
        function: a function by the convention of this module; it may be async.

    Raises:
        InputError: if the name is no identifier, or there is nothing to call.
    """
    if not name.isidentifier():
        raise InputError(
            f"{name!r} is not a name for a reward function",
            why="names have letters, digits and underscores, and begin with no digit",
            fix="as in register('score', score)",
        )
    if not callable(function):
        raise InputError(
            f"the reward {name} is no function",
            where=f"register({name!r}, ...)",
            why=f"it is {shorten(function)}",
            fix="pass a function(prompts, completions, **columns)",
        )
    _REGISTERED[name] = function
    return f"{PYTHON}{name}"


@contextmanager
def lend(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Register functions, name -> function, in this context only."""
    before = dict(_REGISTERED)
    try:
        for name, function in functions.items():
            register(name, function)
        yield
    finally:
        _REGISTERED.clear()
        _REGISTERED.update(before)


def at_step(terms: Sequence[RewardTerm], step: int) -> tuple[RewardTerm, ...]:
    """Return the terms with the weights that their schedules give them at a step, from 1.

    Raises:
        InputError: if a schedule is not registered, fails, or returns no finite number.
    """
    return tuple(
        dataclasses.replace(term, weight=_scheduled_weight(term, step)) if term.schedule else term
        for term in terms
    )


def _scheduled_weight(term: RewardTerm, step: int) -> float:
    try:
        weight = registered(term.schedule or "")(step)
        number = as_number(weight)
    except InputError:
        raise
    # The user's function may raise anything.
    except Exception as error:
        number = f"{type(error).__name__}: {error}"
    if isinstance(number, str):
        raise InputError(
            f"the schedule of the reward {term.name} gives no weight",
            where=f"step {step}",
            why=number,
            fix="return a finite number for every step from 1 to --steps",
        )
    return number


def registered(path: str) -> Callable[..., Any]:
    """Return the function that "python:NAME" names.

    Raises:
        InputError: if nobody registered it in this process.
    """
    name = path.removeprefix(PYTHON)
    if name not in _REGISTERED:
        raise InputError(
            f"the reward {name} was a Python function; pass it again",
            where=path,
            why="functions are not kept in the run folder, and this process has none of that name",
            fix=f"tpu_rl.rewards.register({name!r}, function), or name FILE.py:function",
        )
    return _REGISTERED[name]


# --- built-in verifiers ---


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


def math_equivalent(
    prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[Any], **_: Any
) -> list[Any | RewardFailure]:
    """Return 1 for each completion whose answer math-verify accepts, else 0.

    It accepts what equals the ground truth as mathematics. Both may be LaTeX or plain. math-verify
    runs in processes of its own. One that is busy past its deadline is killed, which is a fault of
    that row.

    Raises:
        MachineError: if math-verify is not installed.
    """
    del prompts
    threads, verifiers = _verifiers()

    def verdict(truth: Any, completion: Any) -> Any:
        verifier = verifiers.get()
        try:
            arguments = {"completions": [text_of(completion)], "answer": [str(truth)]}
            values = verifier.call(arguments, 1, VERDICT_SECONDS)
        finally:
            verifiers.put(verifier)
        return values if isinstance(values, RewardFailure) else values[0]

    return list(threads.map(verdict, answer, completions))


def math_answers(groups: Sequence[Sequence[str]]) -> list[list[Any] | RewardFailure]:
    """Return, for each group of completions, a number per completion that stands for its answer.

    Within a group, numbers are equal where math-verify finds the answers equal. None stands for no
    answer. A group that takes too long is a RewardFailure.

    Raises:
        MachineError: if math-verify is not installed.
    """
    threads, verifiers = _verifiers("answer_classes")

    def classes(group: Sequence[str]) -> list[Any] | RewardFailure:
        verifier = verifiers.get()
        try:
            # Each further completion is compared with those before it.
            seconds = VERDICT_SECONDS + len(group)
            return verifier.call({"completions": list(group)}, len(group), seconds)
        finally:
            verifiers.put(verifier)

    return list(threads.map(classes, groups))


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


BUILTIN: dict[str, Reward] = {
    "gsm8k": gsm8k,
    "gsm8k_marks": calculator.right_marks,
    "math": math_equivalent,
    "python_tests": python_tests,
    **search.REWARDS,
} | {name: reward for task in TASKS.values() for name, reward in task.rewards.items()}
"""Reward functions by the names that presets and `--reward` use."""


# --- texts ---


def program_of(text: str) -> str:
    """Return the last fenced block of a text, in any language, or the whole text if it has none."""
    blocks = _FENCED.findall(text)
    return blocks[-1] if blocks else text


_FENCED = re.compile(r"^```[^\n`]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


# --- calls of one function ---


def apply(
    name: str,
    function: Reward,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: Mapping[str, Sequence[Any]],
    rollout_columns: Mapping[str, Sequence[Any]] | None = None,
) -> FunctionScores:
    """Return the scores of N completions by one function; see `score`."""
    # The data's own columns go first.
    asked = {
        key: column
        for key, column in (rollout_columns or {}).items()
        if key in asked_of_rollout(function) and key not in columns
    }
    values = _call(function, prompts, completions, columns, asked)
    if isinstance(values, RewardFailure) and worker_process.sees_whole_batch(function):
        values = [values] * len(completions)
    elif isinstance(values, RewardFailure):
        values = []
        for i in range(len(completions)):
            row_columns = {key: [column[i]] for key, column in columns.items()}
            row_asked = {key: [column[i]] for key, column in asked.items()}
            row_values = _call(function, [prompts[i]], [completions[i]], row_columns, row_asked)
            values.append(row_values if isinstance(row_values, RewardFailure) else row_values[0])
    numbers = np.full(len(completions), np.nan, np.float32)
    faults = []
    for i, value in enumerate(values):
        if value is None:
            continue
        number = as_number(value)
        if isinstance(number, str):
            frames = value.frames if isinstance(value, RewardFailure) else ""
            faults.append(RewardFault(name, i, number, frames))
        else:
            numbers[i] = number
    return numbers, faults


def _call(
    function: Reward,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: Mapping[str, Sequence[Any]],
    asked: Mapping[str, Sequence[Any]],
) -> list[Any] | RewardFailure:
    """Return the function's values, or the reason why there are none.

    `asked` has the columns that the function names among its parameters.
    """
    arguments = {**columns, "prompts": list(prompts), "completions": list(completions)}
    accepted = _parameters(function)
    if accepted is not None and not any(p.kind is p.VAR_KEYWORD for p in accepted):
        arguments = {p.name: arguments[p.name] for p in accepted if p.name in arguments}
    return worker_process.call(function, {**arguments, **asked}, len(completions))


def asked_of_rollout(function: Reward) -> set[str]:
    """Return which of `ROLLOUT_COLUMNS` the function names among its parameters."""
    return {parameter.name for parameter in _parameters(function) or ()} & set(ROLLOUT_COLUMNS)


def as_answers(prompts: Sequence[Any], texts: Sequence[str]) -> list[Any]:
    """Return completions as reward functions see them, as in TRL.

    The answer to a text is a text, and the answer to a conversation is a list with one message.
    """
    return [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]


def runs_during_sampling(function: Reward) -> bool:
    """Return True if the function can score some groups while others are decoded.

    Such a function runs in other processes and does not need the whole batch.
    """
    if isinstance(function, IsolatedReward):
        return not function.whole_batch
    return function in (math_equivalent, python_tests, python_tests_unsandboxed)


def limited_to_share(function: Reward, share: float, seconds_spent: float) -> Reward:
    """Return the function with the time limit of a share of a batch.

    Args:
        function: only `IsolatedReward` has limits; others are returned unchanged.
        share: from 0 to 1.
        seconds_spent: what the function has already spent on this batch.
    """
    if isinstance(function, IsolatedReward):
        return function.limited_to_share(share, seconds_spent)
    return function


def require_columns(
    name: str,
    function: Reward,
    columns: Mapping[str, Sequence[Any]],
    rollout_columns: Iterable[str] = (),
) -> None:
    """Raise InputError if a function needs a column that the data, and the rollout, lack."""
    present = {"prompts", "completions", *columns, *rollout_columns}
    for parameter in _parameters(function) or ():
        required = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if required and parameter.name not in present:
            raise InputError(
                f"the reward function {name} needs a column {parameter.name!r} that the data lack",
                where=f"columns present: {', '.join(columns) or 'none'}",
                fix=user_code.did_you_mean(parameter.name, list(columns)),
            )


def _parameters(function: Reward) -> list[inspect.Parameter] | None:
    """Return the parameters, or None for a callable written in C that has no signature."""
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:
        return None


# --- math-verify in processes that can be killed ---

VERIFIERS = 4
VERDICT_SECONDS = 10.0


@functools.cache
def _verifiers(
    function: str = "equivalent",
) -> tuple[ThreadPoolExecutor, queue.SimpleQueue[Worker]]:
    """Return the threads that call math-verify, and the queue of idle worker processes.

    `function` is what the processes run of math_equivalence.py.

    The whole program shares them. They are processes because math-verify can hang inside big
    integers, where neither its own time-out nor a Python signal handler can stop it.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise MachineError("math-verify is not installed", fix='pip install "tpu_rl[math]"')
    # A worker ends with the thread that starts it. These threads live as long as the program.
    threads = ThreadPoolExecutor(VERIFIERS)
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    path = f"{Path(__file__).with_name('math_equivalence.py')}:{function}"
    try:
        for worker in threads.map(lambda _: Worker(path), range(VERIFIERS)):
            idle.put(worker)
    except InputError as error:
        fix = 'reinstall it: pip install "tpu_rl[math]"'
        raise MachineError("math-verify does not start", why=error.why, fix=fix) from None
    return threads, idle
