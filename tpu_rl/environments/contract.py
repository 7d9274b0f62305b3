"""Classes of environments: their two forms, and how their methods are called.

Tools, as TRL's `environment_factory` has them. A class written for TRL runs unchanged:

    class Store:
        def reset(self, **row) -> str | None: ...
        def search(self, query: str) -> str: ...
        def get_reward(self) -> float | None: ...

`reset` gets the columns of the data row, or those that it names. A text that it returns follows the
last message of the prompt. Every other public method that is a function of the class is a tool,
described to the model by its type hints and its Google docstring. What a tool returns, or the
message of what it raises, is the observation. It may have images (`environments.observations`), as
may that of a game, and what `reset` returns. A turn without a call ends the episode. `get_reward`
is optional; None means "not scored".

Text games. `step` gets what the model wrote, and no method is a tool:

    class Game:
        def reset(self, **row) -> str | None: ...
        def step(self, text: str) -> tuple[str, float | None, bool, dict]: ...

`step` returns (observation, reward, done, info), gymnasium's five values, or a mapping with
`observations`, `reward` and `done`; `reset` may return (observation, info). If `step` names
`ended`, it gets True if the model ended its turn, and False if a stop string did, which is no part
of the text. A class is a game if it has a `step`, unless that is a tool: one that is described as
tools are, and returns a text. The attribute `text_game = True` or `False` decides it outright.

All methods may be `async def`. If `reset` names one of these, it gets

    seed            a number that belongs to the episode. The episodes of one data row share it,
                    because their rewards are compared.
    max_turns       the turns that the model may take, at least 1
    is_evaluation   True in evaluations
    call_seconds    the time that a call may take (`--environment-limits.call-seconds`)

A column of the data with such a name goes first. What a model sees must be a function of the row,
these four and the model's actions: resume relies on it.

With `--rollout.partial` an episode goes on in the next step, and after a kill in another process.
The class then has pickle's two methods: `__getstate__` returns the episode's state, of values that
JSON writes, and `__setstate__` puts it into a new instance. `PlainState` has both, for classes all
of whose attributes are such values. State outside of the instance, such as files, is not a part.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from tpu_rl.environments import observations, tool_schemas
from tpu_rl.errors import InputError, TpuRlError
from tpu_rl.runtime import worker_child

Factory = Callable[[], Any]
"""A class, or anything that returns an instance."""
Factories = Mapping[str | None, Factory]
"""Value of the column `environment` -> factory. A single environment has the key None."""

MAX_OBSERVATION_CHARACTERS = 1_000_000
"""The longest text of one turn's observations. Limits in tokens are far lower."""
CUT = "...[cut]"
"""The end of an observation that was too long."""
MAX_STATE_CHARACTERS = 10_000
"""The longest JSON of an attribute that reward functions see."""


Observation = str | dict[str, Any]
"""A text, or what `observations.with_images` returns."""


class Fault(Exception):
    """A failure that no model caused, raised by a tool: the episode is not scored."""


EPISODE_PARAMETERS = ("seed", "max_turns", "is_evaluation", "call_seconds")
"""What `reset` may name besides columns of the data; see the module's docstring."""


class Description(NamedTuple):
    """What is known about a class before its first episode. JSON can write it."""

    name: str
    """The name of the class."""
    form: Literal["tools", "game"]
    tools: list[dict[str, Any]]
    """The schemas of its tools, by name."""
    is_scored: bool
    """True if it has `get_reward`."""
    columns: list[str]
    """The columns that `reset` cannot do without."""
    is_resumable: bool = False
    """True if it has `__getstate__` and `__setstate__`."""
    row_values: dict[str, dict[str, str]] = {}
    """Column -> the values that rows may have -> why it takes no episode with one; "" if it does.
    An environment that knows has it as an attribute."""


def describe(instance: Any, where: str) -> Description:
    """Return the description of an environment.

    Raises InputError if it has no `reset`, or a method is no tool; `where` says where it is from.
    """
    environment = type(instance)
    functions = dict(inspect.getmembers(environment, inspect.isfunction))
    if "reset" not in functions:
        raise InputError(
            f"the environment {environment.__name__} has no method `reset`",
            where=where,
            why="each episode begins with it",
            fix="def reset(self, **row) -> str | None: ...",
        )
    is_scored = "get_reward" in functions
    columns = _required(functions["reset"])
    is_resumable = {"__getstate__", "__setstate__"} <= functions.keys()
    name = environment.__name__
    row_values = getattr(instance, "row_values", {})
    if _is_game(environment, functions):
        return Description(name, "game", [], is_scored, columns, is_resumable, row_values)
    declared = getattr(environment, "tool_schemas", None)
    if declared is not None:
        return Description(name, "tools", declared, is_scored, columns, is_resumable, row_values)
    tools = []
    for method, function in functions.items():
        if method.startswith("_") or method in ("reset", "get_reward"):
            continue
        try:
            tools.append(tool_schemas.schema_of(function, _is_bound(environment, method)))
        except tool_schemas.SchemaError as error:
            raise InputError(
                f"the method `{method}` of {name} is no tool: {error}",
                where=where,
                why="every public method is a tool, which the model knows by its type hints and "
                "its Google docstring with the section Args",
                fix=f"add them, or rename the method to _{method}",
            ) from None
    return Description(name, "tools", tools, is_scored, columns, is_resumable, row_values)


def _is_game(environment: type, functions: Mapping[str, Callable[..., Any]]) -> bool:
    """Return True for a text game."""
    declared = getattr(environment, "text_game", None)
    if declared is not None:
        return bool(declared)
    if "step" not in functions:
        return False
    try:
        schema = tool_schemas.schema_of(functions["step"], _is_bound(environment, "step"))
    except tool_schemas.SchemaError:
        return True
    return schema["function"].get("return", {}).get("type") != "string"


def _is_bound(environment: type, name: str) -> bool:
    """Return True if the first parameter of a method is the instance."""
    return not isinstance(inspect.getattr_static(environment, name), staticmethod)


def _required(reset: Callable[..., Any]) -> list[str]:
    """Return the parameters of `reset` that must be given."""
    parameters = list(inspect.signature(reset).parameters.values())[1:]
    return [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and parameter.name not in EPISODE_PARAMETERS
    ]


# --- calls ---


def reset(
    instance: Any,
    row: Mapping[str, Any],
    seed: int,
    max_turns: int = 1,
    is_evaluation: bool = False,
    call_seconds: float = math.inf,
) -> Observation | None:
    """Begin an episode, and return its first observation."""
    parameters = inspect.signature(instance.reset).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments = {name: value for name, value in row.items() if takes_all or name in parameters}
    values = (seed, max_turns, is_evaluation, call_seconds)
    for name, value in zip(EPISODE_PARAMETERS, values, strict=True):
        if name in parameters:
            arguments.setdefault(name, value)
    value = _finished(instance.reset(**arguments))
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value = value[0]  # gymnasium's (observation, info)
    return None if value is None else _observation(value)


def call(
    instance: Any, tools: Sequence[str], calls: Sequence[tuple[str, Mapping[str, Any]]]
) -> list[tuple[str, Observation, bool]]:
    """Call tools one after the other, and return (name, observation, is an error) of each.

    Observations that are far too long lose their ends.
    """
    results = []
    for name, arguments in calls:
        try:
            if name not in tools:
                raise ValueError(f"Tool {worker_child.shorten(name)[1:-1]} not found.")
            value = _finished(getattr(instance, name)(**arguments))
            results.append((name, _observation(value), False))
        except (MemoryError, Fault):
            raise
        # The model reads what went wrong, and may try again.
        except Exception as error:
            results.append((name, as_text({"error": _message(error)}), True))
    most = MAX_OBSERVATION_CHARACTERS // max(len(results), 1)
    return [
        (name, _cut(content, most) if isinstance(content, str) else content, is_error)
        for name, content, is_error in results
    ]


def _message(error: Exception) -> str:
    """Return the message of an exception, which may not have one that can be written."""
    try:
        return str(error)
    except Exception:  # A user's __str__ may raise anything.
        return type(error).__name__


def step(instance: Any, text: str, ended: bool = True) -> tuple[Observation, float | None, bool]:
    """Give a game the model's text, and return (observation, reward, done).

    Raises ValueError if it returns something else.
    """
    asks = "ended" in inspect.signature(instance.step).parameters
    value = _finished(instance.step(text, ended=ended) if asks else instance.step(text))
    if isinstance(value, Mapping):
        try:
            observation = value["observations" if "observations" in value else "observation"]
            reward, done = value["reward"], value["done"]
        except KeyError as error:
            raise ValueError(f"`step` returned a mapping without {error}") from None
    elif isinstance(value, tuple) and len(value) == 4:
        observation, reward, done, _ = value
    elif isinstance(value, tuple) and len(value) == 5:
        observation, reward, terminated, truncated, _ = value
        done = terminated or truncated
    else:
        raise ValueError(
            f"`step` returned {worker_child.shorten(value)} and not (observation, reward, done, "
            "info)"
        )
    is_empty = observation is None or (isinstance(observation, list) and not observation)
    return "" if is_empty else _observation(observation), number(reward), bool(done)


def reward(instance: Any) -> float | None:
    """Return the reward of the episode; None if it is not scored here.

    Raises ValueError if it is not a finite number.
    """
    if not inspect.isfunction(getattr(type(instance), "get_reward", None)):
        return None
    return number(_finished(instance.get_reward()))


def number(value: Any) -> float | None:
    """Return a reward as a number, or None. Raises ValueError for anything else, also for NaN."""
    if value is None:
        return None
    checked = worker_child.as_number(value)
    if isinstance(checked, str):
        raise ValueError(checked)
    return checked


def state_of(instance: Any) -> dict[str, Any]:
    """Return the public attributes that JSON can write, for TRL's `environments` of rewards."""
    state = {}
    for name, value in getattr(instance, "__dict__", {}).items():
        if name.startswith("_"):
            continue
        try:
            text = json.dumps(value, allow_nan=False, ensure_ascii=False)
            text.encode("utf-8")
        except (TypeError, ValueError, RecursionError):
            continue
        if len(text) <= MAX_STATE_CHARACTERS:
            state[name] = json.loads(text)
    return state


class PlainState:
    """Base of environments whose attributes are values that JSON writes exactly: None, booleans,
    numbers, texts, lists, and dicts with texts as keys."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def saved_state(instance: Any) -> Any:
    """Return a copy of the state with which the episode goes on in another process.

    Raises ValueError if JSON does not write it exactly.
    """
    state = instance.__getstate__()
    try:
        copy = json.loads(json.dumps(state, allow_nan=False))
        is_same = state is not None and bool(copy == state)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"`__getstate__` returned what JSON cannot write: {error}") from None
    if not is_same:
        raise ValueError("`__getstate__` returned None, or what JSON writes as another value")
    return copy


def _observation(value: Any) -> Observation:
    """Return an observation as JSON can write it.

    Raises:
        Fault: if it has images that cannot be read.
    """
    try:
        if not observations.has_images(value):
            return as_text(value)
        made = observations.with_images(value)
    except (ValueError, OSError, TypeError, SyntaxError) as error:
        raise Fault(f"an observation has an image that cannot be read: {error}") from None
    return made | {"text": without_surrogates(_cut(made["text"], MAX_OBSERVATION_CHARACTERS))}


def as_text(value: Any) -> str:
    """Return an observation as text. Messages and blocks of content give their texts.

    Halves of surrogate pairs, which UTF-8 cannot write, become U+FFFD. A text that is far too long
    loses its end.
    """
    if isinstance(value, (list, tuple)) and value and all(map(observations.is_text_block, value)):
        value = "\n".join(str(block.get("content", block.get("text"))) for block in value)
    return without_surrogates(_cut(str(value), MAX_OBSERVATION_CHARACTERS))


def without_surrogates(text: str) -> str:
    """Return a text with U+FFFD in place of halves of surrogate pairs."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def _cut(text: str, characters: int) -> str:
    """Return a text, whose end says so if some of it was left out."""
    return text if len(text) <= characters else text[:characters] + CUT


def _finished(value: Any) -> Any:
    """Return the value, or the result of an async function."""
    return worker_child.wait_for(value) if inspect.isawaitable(value) else value


# --- loading ---


def as_factories(value: Any, where: str) -> Factories:
    """Return the factories that a user gave: a class, or a dict of classes by name.

    Raises InputError if it is neither.
    """
    factories = dict(value) if isinstance(value, Mapping) else {None: value}
    if not factories or not all(callable(factory) for factory in factories.values()):
        raise InputError(
            f"an environment is a class, not {worker_child.shorten(value)}",
            where=where,
            fix="name a class, or a dict of classes by the values of the column `environment`",
        )
    return typing.cast(Factories, factories)


def make(factory: Factory, where: str) -> Any:
    """Return an instance. Raises InputError if the user's code fails."""
    try:
        return factory()
    except TpuRlError:
        raise
    # The user's program may raise anything.
    except (Exception, SystemExit) as error:
        message, frames = worker_child.failure_of(error)
        raise InputError(
            "the environment cannot be made",
            where=where,
            why=f"{message}\n{frames}",
            fix="its class takes no arguments; repair it until it can be called",
        ) from None
