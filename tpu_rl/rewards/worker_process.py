"""The program of a reward worker: load one function of a user's file, and call it on request.

It imports the standard library only. `main` reads requests and writes replies until the trainer
closes the pipe or dies. Requests are frames of pickle and replies are frames of JSON, so the
trainer never builds an object from what this process sends. See `worker_pool`.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import inspect
import json
import math
import os
import pickle
import queue
import resource
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sized
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu_rl import user_code
from tpu_rl.errors import InputError, TpuRlError

if TYPE_CHECKING:
    import asyncio  # Functions import it: most workers never need it, and each start counts.

LARGEST_FLOAT32 = 3.4028234663852886e38
MAX_TEXT = 2000
"""Characters of an error's message or traceback that are reported."""
MACHINERY = {__file__, threading.__file__}
"""Files whose frames do not help a user."""
ASYNC_LIBRARIES = tuple(
    str(Path(inspect.__file__).with_name(name)) for name in ("asyncio", "concurrent")
)
"""Folders of the standard library of which the same is true."""


class RewardFailure(Exception):
    """The reason why there is no reward, with the frames of the user's code if they are known."""

    def __init__(self, message: str, frames: str = ""):
        super().__init__(message)
        self.frames = frames


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

    Raises:
        TpuRlError: if the function raises one.
    """
    try:
        values = function(**arguments)
        if inspect.isawaitable(values):
            values = _wait_for(values)
        if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Mapping)):
            return RewardFailure(f"it returned {shorten(values)} and not a list of numbers")
        # An iterator may be endless.
        values = list(values) if isinstance(values, Sized) else list(islice(values, size + 1))
    except TpuRlError:
        raise
    # The user's program may raise anything, and the run must go on.
    except (Exception, SystemExit) as error:
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if not _is_machinery(frame.filename)
        ]
        where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
        text = "".join(traceback.format_list(frames[-6:])) + describe(error)
        return RewardFailure(f"{describe(error)}{where}"[:MAX_TEXT], text[-MAX_TEXT:])
    if len(values) != size:
        return RewardFailure(f"it returned {len(values)} values for {size} completions")
    return values


def _wait_for(awaitable: Awaitable[Any]) -> Any:
    """Return the result of what an async function returned.

    All calls of a process share one event loop, because clients of web services keep connections
    that belong to the loop of their first call. It has a thread of its own, because a notebook's
    thread runs a loop already.
    """
    import asyncio

    async def result() -> Any:
        try:
            return await awaitable
        # These two would end the event loop.
        except (SystemExit, KeyboardInterrupt) as error:
            raise RuntimeError(describe(error)).with_traceback(error.__traceback__) from None

    future = asyncio.run_coroutine_threadsafe(result(), _event_loop())
    try:
        return future.result()
    finally:
        future.cancel()  # After Ctrl-C; otherwise it has ended.


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop that runs in a thread of its own for as long as the process lives."""
    import asyncio

    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:
            # A task that the function started may end the loop by sys.exit().
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.run_forever()

    threading.Thread(target=run, name="async rewards", daemon=True).start()
    return loop


def _is_machinery(filename: str) -> bool:
    """Return True for files whose frames do not help a user."""
    return filename in MACHINERY or filename.startswith(ASYNC_LIBRARIES)


def as_number(value: Any) -> float | str:
    """Return the value as a finite float, or a message that says what is wrong with it."""
    if isinstance(value, Exception):
        return str(value)
    if isinstance(value, (str, bytes)):
        return f"it returned {shorten(value)} and not a number"
    try:
        number = float(value)
    # numpy arrays raise TypeError or ValueError, and a user's __float__ may raise anything.
    except Exception:
        return f"it returned {shorten(value)} and not a number"
    if math.isnan(number):
        return "it returned NaN; for what cannot be scored return None"
    return number if abs(number) <= LARGEST_FLOAT32 else f"it returned {number}, beyond a float32"


def describe(error: BaseException) -> str:
    """Return the error's type and message."""
    return f"{type(error).__name__}: {error}"


def shorten(value: Any) -> str:
    """Return the value's repr, in at most 120 characters."""
    text = repr(value[:200] if isinstance(value, (str, bytes)) else value)
    return text if len(text) <= 120 else f"{text[:117]}..."


# --- the process ---


def main(
    requests: int, replies: int, crash: int, trainer: int, memory_bytes: int, path: str
) -> None:
    """Load the function, then answer each request (arguments, size).

    The first reply is {"parameters": [[name, kind, has a default], ...], "whole_batch": bool} or
    {"input_error": [...]}. The others are {"values": [...]} or {"failure": [message, frames]}.

    Args:
        requests: descriptor of the pipe with requests.
        replies: descriptor of the pipe for replies.
        crash: descriptor of the pipe to which a fatal signal writes the line that was running.
        trainer: process id of the trainer.
        memory_bytes: limit of the address space; 0 for no limit.
        path: "file.py:function".
    """
    faulthandler.enable(crash)
    _confine(trainer, memory_bytes)
    for descriptor in (requests, replies, crash):
        os.set_inheritable(descriptor, False)
    incoming: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests, incoming), daemon=True).start()
    try:
        function = user_code.load_function(path, "reward")
        _reply(
            replies,
            {"parameters": _parameters(function), "whole_batch": sees_whole_batch(function)},
        )
    except InputError as error:
        texts = [error.what, error.where, error.why, error.fix]
        _reply(replies, {"input_error": [text[:MAX_TEXT] for text in texts]})
        return
    process = os.getpid()
    while True:
        arguments, size = pickle.loads(incoming.get())
        try:
            values = call(function, arguments, size)
        except TpuRlError as error:
            values = RewardFailure(str(error)[:MAX_TEXT])
        if os.getpid() != process:
            # The function forked, and its child returned from it too. Only one of them may reply.
            os._exit(0)
        if isinstance(values, RewardFailure):
            _reply(replies, {"failure": [str(values), values.frames]})
        else:
            _reply(replies, {"values": [_encode(value) for value in values]})


def _confine(trainer: int, memory_bytes: int) -> None:
    """Limit memory, forbid core dumps, and end with the trainer.

    The process also ends if the trainer is killed while it is busy in C.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != trainer:
        os._exit(0)


def _read_requests(requests: int, incoming: queue.SimpleQueue[bytes]) -> None:
    """Read frames from the pipe. At its end the process ends, whatever the function is doing."""
    with open(requests, "rb", closefd=False) as pipe:
        while len(header := pipe.read(8)) == 8:
            incoming.put(pipe.read(struct.unpack("<Q", header)[0]))
    os._exit(0)


def _reply(replies: int, value: Any) -> None:
    text = json.dumps(value).encode()
    data = memoryview(struct.pack("<Q", len(text)) + text)
    while data:
        data = data[os.write(replies, data) :]


def _encode(value: Any) -> Any:
    if value is None:
        return None
    number = as_number(value)
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
