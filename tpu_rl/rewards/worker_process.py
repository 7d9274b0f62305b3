"""The program of a reward worker: load one function of a user's file, and call it on request.

It imports the standard library only. `main` reads requests and writes replies until the trainer
closes the pipe or dies. Requests are frames of pickle and replies are frames of JSON, so the
trainer never builds an object from what this process sends. See `worker_pool`.
"""

from __future__ import annotations

import inspect
import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sized
from itertools import islice
from typing import Any

from tpu_rl import user_code
from tpu_rl.errors import InputError, MachineError, TpuRlError
from tpu_rl.runtime import segments, verl_rewards, worker_child
from tpu_rl.runtime.worker_child import MAX_TEXT, as_number, shorten

worker_child.MACHINERY.add(__file__)


class RewardFailure(Exception):
    """The reason why there is no reward, with the frames of the user's code if they are known."""

    def __init__(self, message: str, frames: str = ""):
        super().__init__(message)
        self.frames = frames
        self.no_memory = False
        """True if the function ran out of memory."""
        self.is_wrong_count = False
        """True if the function returned more or fewer values than completions. It did not fail on a
        completion, and nobody knows which value belongs to which."""


class ExplainedReward(float):
    """A reward with its reason, which samples.jsonl shows."""

    reason: str

    def __new__(cls, value: float, reason: str):
        reward = super().__new__(cls, value)
        reward.reason = reason
        return reward


# --- the user's function ---


def sees_whole_batch(function: Any) -> bool:
    """Return True if a reward function must be called with all completions of a batch at once.

    Such a function has the attribute `whole_batch = True`.
    """
    return bool(getattr(function, "whole_batch", False))


def call(
    function: Callable[..., Any], arguments: Mapping[str, Any], size: int
) -> list[Any] | RewardFailure:
    """Call the function, and return its `size` values or the reason why there are none.

    Raises TpuRlError if the function raises one.
    """
    try:
        values = function(**arguments)
        if inspect.isawaitable(values):
            values = worker_child.wait_for(values)
        if not isinstance(values, Iterable) or isinstance(
            values, (str, bytes, set, frozenset, Mapping)
        ):
            return RewardFailure(f"it returned {shorten(values)} and not a list of numbers")
        # An iterator may be endless.
        is_lazy = not isinstance(values, Sized)
        values = list(islice(values, size + 1)) if is_lazy else list(values)
    except TpuRlError:
        raise
    # The user's program may raise anything, and the run must go on.
    except (Exception, SystemExit) as error:
        failure = RewardFailure(*worker_child.failure_of(error))
        failure.no_memory = isinstance(error, MemoryError)
        return failure
    if len(values) != size:
        count = f"more than {size}" if len(values) > size and is_lazy else f"{len(values)}"
        failure = RewardFailure(f"it returned {count} values for {size} completions")
        failure.is_wrong_count = True
        return failure
    return values


def require_right_count(name: str, failure: RewardFailure) -> None:
    """Raise InputError if a failure of the function `name` is a wrong number of values."""
    if failure.is_wrong_count:
        raise InputError(
            "the reward function returned a wrong number of values",
            where=name,
            why=str(failure),
            fix="return one number, or None, for each completion, in their order",
        )


# --- the process ---


def main(
    requests: int, replies: int, crash: int, trainer: int, memory_bytes: int, path: str
) -> None:
    """Load the function, then answer each request (number, arguments, size).

    The first reply is {"parameters": [[name, kind, has a default], ...], "whole_batch": bool} or
    {"error": [...]}. The others are {"values": [...]} or {"failure": [message, frames],
    "is_wrong_count": bool}, with the request's number, the bytes of the address space, and
    "no_memory".

    The arguments are those of `worker_child.begin`, and `path`, as "file.py:function".
    """
    incoming = worker_child.begin(requests, replies, crash, trainer, memory_bytes)
    try:
        function = verl_rewards.adapt(user_code.load_function(path, "reward"))
        loaded = {"parameters": _parameters(function), "whole_batch": sees_whole_batch(function)}
        worker_child.reply(replies, loaded)
    except (InputError, MachineError) as error:
        worker_child.reply(replies, worker_child.as_lists(error))
        return
    process = os.getpid()
    while True:
        number, arguments, size = pickle.loads(incoming.get())
        try:
            values = call(function, arguments, size)
        except TpuRlError as error:
            values = RewardFailure(str(error)[:MAX_TEXT])
        if os.getpid() != process:
            # The function forked, and its child returned from it too. Only one of them may reply.
            os._exit(0)
        if isinstance(values, RewardFailure):
            content: dict[str, Any] = {"failure": [str(values), values.frames]}
            content["no_memory"] = values.no_memory
            content["is_wrong_count"] = values.is_wrong_count
        else:
            content = {"values": [_encode(value) for value in values], "no_memory": False}
        content |= {"number": number, "bytes": worker_child.address_space()}
        worker_child.reply(replies, content)


def _encode(value: Any) -> Any:
    if value is None:
        return None
    parts = segments.read(value)
    if isinstance(parts, list):
        return parts
    number = as_number(value) if parts is None else parts
    if isinstance(number, str):
        return {"fault": number[:MAX_TEXT]}
    return number


def _parameters(function: Callable[..., Any]) -> list[list[Any]] | None:
    """Return the parameters, or None for a callable written in C that has no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return None
    return [
        [parameter.name, parameter.kind.name, parameter.default is not parameter.empty]
        for parameter in parameters
    ]
