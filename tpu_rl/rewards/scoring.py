"""The convention of reward functions, and the scores that they give.

The convention is TRL's: `fn(prompts, completions, **columns) -> list[float | None]` returns one
number per completion. `columns` are the other columns of the data, with one value per completion.
Completions are texts, or lists of messages of which the last one counts. None means "this function
does not score this completion". It never counts as zero, and neither does an error.

Functions that run in other processes (FILE.py:function, math, python_tests) are called during
sampling, as soon as groups are complete: one call then gets some whole groups of the batch, prompt
by prompt. A function that must see the whole batch at once, to rank it or to normalize by its mean,
says so, and is called once, at the end:

    score.whole_batch = True

In place of a number, a function may return segments of the completion with a reward each: see
`tpu_rl.runtime.segments`.

A function may be `async def`. It may also name these parameters, which only functions that name
them get, with one value per completion (a column of the data with such a name goes first):

    completion_ids   the sampled tokens, with the end
    token_counts     their number
    truncated        True if the completion has no end
    group            a number that the completions of one prompt share
    step             the step of the run; 0 in evaluations
    environments     as in TRL: an object with the public attributes of the episode's environment at
                     its end, those that JSON can write; None without an environment
    environment_rewards  the sum of the rewards of the episode's environment

If a prompt is a conversation, its completion is one too: [{"role": "assistant", "content": TEXT}].
With an environment it has all messages after the prompt, also those of the environment.
"""

from __future__ import annotations

import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from tpu_rl.environments import text_of
from tpu_rl.errors import InputError
from tpu_rl.rewards import terms as reward_terms
from tpu_rl.rewards import worker_process
from tpu_rl.rewards.terms import RewardTerm
from tpu_rl.rewards.worker_pool import IsolatedReward, RewardLimits
from tpu_rl.rewards.worker_process import RewardFailure
from tpu_rl.runtime import segments
from tpu_rl.runtime.segments import Segment
from tpu_rl.runtime.worker_child import as_number, shorten
from tpu_rl.wings import VERIFIERS

DEFAULT_LIMITS = RewardLimits()

ROLLOUT_COLUMNS = (
    "completion_ids",
    "token_counts",
    "truncated",
    "group",
    "step",
    "environments",
    "environment_rewards",
)
"""Names of what a function may ask about a rollout; see the module's docstring."""

Reward = Callable[..., Sequence[Any]]
"""fn(prompts, completions, **columns) -> a float or None for each completion. An exception in place
of a value is an error on that completion alone."""


@dataclass(frozen=True, eq=False)
class DeclaredReward:
    """A built-in reward that says what its function's parameters do not."""

    score: Reward
    parameters: list[inspect.Parameter] | None = None
    """The parameters that stand for columns it needs; None: those of the function."""
    whole_batch: bool = False
    """True if it must see all completions of a batch in one call."""
    judges: Callable[[Mapping[str, Any]], bool] = lambda row: True
    """False for data rows that it does not judge."""
    dense: Callable[[str, bool], Reward] | None = None
    """(separator, changes) -> the reward whose values are the parts of a reward model's score."""

    def __call__(self, *arguments: Any, **columns: Any) -> Sequence[Any]:
        return self.score(*arguments, **columns)


@dataclass(frozen=True)
class RewardFault:
    """A completion that a reward function failed to score, or says why it gave its value."""

    function: str
    row: int
    message: str
    frames: str = ""
    """The traceback through the user's code, if there is one."""
    fix: str = ""
    """The remedy, where a function wants what nothing passes."""
    is_scored: bool = False
    """True if the completion has its value all the same, with `message` as the reason."""


class FunctionScores(NamedTuple):
    """The scores of N completions by one function."""

    values: np.ndarray
    """[N] float32; NaN where it has none."""
    faults: list[RewardFault]
    segments: Mapping[int, list[Segment]] = MappingProxyType({})
    """Row -> its segments, whose sum is its value; rows with one number have none."""


@dataclass(frozen=True)
class Scores:
    """The scores of N completions by all functions. NaN means "not scored" everywhere."""

    totals: np.ndarray
    """[N] float32: the sum of each row's terms; NaN if no term counts or a function failed on it.
    """
    parts: dict[str, np.ndarray]
    """Function name -> [N] float32, without weights and gates."""
    faults: list[RewardFault]
    segments: Mapping[int, list[Segment]] = field(default_factory=dict)
    """Row -> the segments of its total, with weights and gates. The rest of the total belongs to
    the whole completion."""


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

    A function that raises, or does not return a list, is called again row by row, so that one bad
    row does not spoil the others. A row on which it still fails, or whose value is not a finite
    number, is a fault. That row has no total, because the sum of its remaining
    parts would not compare with the totals of other rows.

    Args:
        prompts: [N] texts or lists of messages.
        completions: [N] texts or lists of messages.
        columns: the data's other columns; each has N values.
        max_fault_share: the largest share of rows that may have a fault.
        precomputed: scores by function name. These functions are not called.
        terms: the terms of the total, whose names are those of functions. By default each function
            is a term with the weight 1.
        rollout_columns: values [N] by names of `ROLLOUT_COLUMNS`.

    Raises:
        InputError: if too many rows have a fault, a function needs a column that the data lack, or
            it returns a wrong number of values.
    """
    rollout_columns = rollout_columns or {}
    for name, function in reward_functions.items():
        require_columns(name, function, columns, rollout_columns)
    if not completions:
        empty = {name: np.zeros(0, np.float32) for name in reward_functions}
        return Scores(np.zeros(0, np.float32), empty, [])
    parts: dict[str, np.ndarray] = {}
    faults: list[RewardFault] = []
    of_functions: dict[str, Mapping[int, list[Segment]]] = {}
    for name, function in reward_functions.items():
        function_scores = (precomputed or {}).get(name)
        if function_scores is None:
            function_scores = apply(name, function, prompts, completions, columns, rollout_columns)
        parts[name] = function_scores.values
        faults += function_scores.faults
        of_functions[name] = function_scores.segments
    terms = terms or [RewardTerm(name) for name in parts]
    totals = reward_terms.totals(terms, parts)
    faulty_rows = sorted({fault.row for fault in faults if not fault.is_scored})
    totals[faulty_rows] = np.nan
    scores = Scores(totals, parts, faults, _segments_of_totals(terms, parts, of_functions))
    require_few_faults(scores, completions, max_fault_share)
    return scores


def _segments_of_totals(
    terms: Sequence[RewardTerm],
    parts: Mapping[str, np.ndarray],
    of_functions: Mapping[str, Mapping[int, list[Segment]]],
) -> dict[int, list[Segment]]:
    """Return row -> the segments of all terms, times the weights of those whose gates hold."""
    result: dict[int, list[Segment]] = {}
    for term in terms:
        if not of_functions[term.name]:
            continue
        counts = np.ones(len(parts[term.name]), bool)
        if term.gate is not None:
            counts = term.gate.holds(parts[term.gate.name])
        for row, of_row in of_functions[term.name].items():
            if counts[row]:
                result.setdefault(row, []).extend(segments.scaled(of_row, term.weight))
    return result


def require_few_faults(scores: Scores, completions: Sequence[Any], max_fault_share: float) -> None:
    """Raise InputError if more than that share of the completions have a fault."""
    faults = [fault for fault in scores.faults if not fault.is_scored]
    count = len({fault.row for fault in faults})
    if count > max_fault_share * len(completions):
        first = faults[0]
        frames = textwrap.indent(first.frames.rstrip(), "    ")
        remedy = "repair the function; return None for what should not be scored"
        if first.function.partition("(")[0] in VERIFIERS:
            remedy = "repair such rows, or leave them out"
        remedy = first.fix or remedy
        raise InputError(
            f"reward functions fail on {count} of {len(completions)} completions",
            where=f"{first.function}, first on row {first.row}: {shorten(completions[first.row])}",
            why=f"{first.message}\n{frames}".rstrip(),
            fix=f"{remedy}; limits: --reward-limits",
        )


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
    of_rollout = {
        key: column
        for key, column in (rollout_columns or {}).items()
        if key in requested_columns(function) and key not in columns
    }
    values = _call(function, prompts, completions, columns, of_rollout)
    if isinstance(values, RewardFailure):
        worker_process.require_right_count(name, values)
    if isinstance(values, RewardFailure) and worker_process.sees_whole_batch(function):
        values = [values] * len(completions)
    elif isinstance(values, RewardFailure):
        values = []
        for i in range(len(completions)):
            row_columns = {key: [column[i]] for key, column in columns.items()}
            row_of_rollout = {key: [column[i]] for key, column in of_rollout.items()}
            row_values = _call(
                function, [prompts[i]], [completions[i]], row_columns, row_of_rollout
            )
            if isinstance(row_values, RewardFailure):
                worker_process.require_right_count(name, row_values)
                row_values = [row_values]
            values += row_values
    numbers = np.full(len(completions), np.nan)
    faults = []
    of_rows: dict[int, list[Segment]] = {}
    for i, value in enumerate(values):
        if value is None:
            continue
        parts = segments.read(value, len(text_of(completions[i])))
        if isinstance(parts, list):
            of_rows[i] = parts
            value = segments.total(parts)
        elif parts is not None:
            value = RewardFailure(parts)
        if isinstance(value, worker_process.ExplainedReward):
            faults.append(RewardFault(name, i, value.reason, is_scored=True))
        number = as_number(value)
        if isinstance(number, str):
            frames = value.frames if isinstance(value, RewardFailure) else ""
            faults.append(RewardFault(name, i, number, frames))
        else:
            numbers[i] = number
    if faults:
        from tpu_rl.rewards import remedies  # Only errors need it.

        # A default of None stands for what other trainers pass.
        names = [p.name for p in parameters(function) or () if p.name not in columns]
        faults = [replace(fault, fix=remedies.of_absent(names)) for fault in faults]
    _require_float32(name, numbers)
    return FunctionScores(numbers.astype(np.float32), faults, of_rows)


def _require_float32(name: str, rewards: np.ndarray) -> None:
    """Raise InputError if float32 cannot tell rewards [N] float64 apart that differ on purpose.

    Of differences below 1e-3 it is only said; those of some bits of a float64 are rounding.
    """
    finite = rewards[np.isfinite(rewards)]
    spread = float(np.ptp(finite)) if len(finite) else 0.0
    largest = float(np.abs(finite).max(initial=0.0))
    if not 1e-12 * largest < spread < 2.0**-19 * largest:
        return
    what = f"rewards of {name} differ by less than a float32 can tell (2e-6 of their size)"
    if spread >= 1e-3:
        numbers = f"they are {finite.min():.12g} to {finite.max():.12g}"
        raise InputError(what, where=name, why=numbers, fix="subtract a constant in the function")
    _say(f"note: {what}, so advantages are coarse: subtract a constant in the function")


@functools.cache
def _say(note: str) -> None:
    print(note, file=sys.stderr)


def _call(
    function: Reward,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: Mapping[str, Sequence[Any]],
    of_rollout: Mapping[str, Sequence[Any]],
) -> list[Any] | RewardFailure:
    """Return the function's values, or the reason why there are none.

    `of_rollout` has the columns that the function names among its parameters.
    """
    arguments = {**columns, "prompts": list(prompts), "completions": list(completions)}
    accepted = parameters(function)
    if accepted is not None and not any(p.kind is p.VAR_KEYWORD for p in accepted):
        arguments = {p.name: arguments[p.name] for p in accepted if p.name in arguments}
    return worker_process.call(function, {**arguments, **of_rollout}, len(completions))


def requested_columns(function: Reward) -> set[str]:
    """Return the names of `ROLLOUT_COLUMNS` that are parameters of the function."""
    return {parameter.name for parameter in parameters(function) or ()} & set(ROLLOUT_COLUMNS)


def as_answers(prompts: Sequence[Any], texts: Sequence[str], converses: bool = False) -> list[Any]:
    """Return completions as reward functions see them, as in TRL.

    The answer to a text is a text. The answer to a conversation is a list with one message, and so
    is each answer where an environment or an agent talks to the policy (`converses`).
    """
    return [
        text
        if isinstance(prompt, str) and not converses
        else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]


def of_rows(
    functions: Mapping[str, Reward], rows: Sequence[Mapping[str, Any]]
) -> dict[str, Reward]:
    """Return the functions, by name, that judge at least one of the data rows."""
    return {
        name: function
        for name, function in functions.items()
        if any(not isinstance(function, DeclaredReward) or function.judges(row) for row in rows)
    }


def require_columns(
    name: str,
    function: Reward,
    columns: Mapping[str, Sequence[Any]],
    rollout_columns: Iterable[str] = (),
) -> None:
    """Raise InputError if a function needs a column that the data, and the rollout, lack."""
    present = {"prompts", "completions", *columns, *rollout_columns}
    accepted = parameters(function) or ()
    names = [p.name for p in accepted]
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    required = [p.name for p in accepted if p.default is p.empty and p.kind in kinds]
    absent = next((parameter for parameter in required if parameter not in present), None)
    reads_rest = any(p.kind is p.VAR_KEYWORD for p in accepted)
    reads_one = "completion" in names and not {"completions", "completion_ids"} & {*names}
    reads_nothing = bool(names) and not (reads_rest or present & {*names})
    if reads_one or reads_nothing or absent:
        from tpu_rl.rewards import remedies  # Only errors need it.

        raise remedies.error_of(name, names, None if reads_one else absent, list(columns))


def parameters(function: Reward) -> list[inspect.Parameter] | None:
    """Return the parameters, or None for a callable written in C that has no signature."""
    if isinstance(function, IsolatedReward):
        return function.parameters
    if isinstance(function, DeclaredReward):
        return function.parameters or parameters(function.score)
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:
        return None
