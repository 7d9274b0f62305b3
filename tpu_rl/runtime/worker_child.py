"""The part of a worker process that all kinds of workers share.

This imports the standard library only, because every worker starts with it. See `workers`.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import inspect
import json
import math
import mmap
import os
import queue
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu_rl.errors import TpuRlError

if TYPE_CHECKING:
    import asyncio  # Functions import it: most workers never need it, and each start counts.

LARGEST_NUMBER = 1e18
"""The largest reward. Variances of larger ones would be beyond a float32."""
MAX_TEXT = 2000
"""Characters of an error's message or traceback that are reported."""
MACHINERY = {__file__, threading.__file__}
"""Files whose frames do not help a user."""
LIBRARIES = tuple(str(Path(inspect.__file__).with_name(name)) for name in ("asyncio", "concurrent"))
"""Folders of the standard library of which the same is true."""


# --- the process ---


def begin(
    requests: int, replies: int, crash: int, trainer: int, memory_bytes: int
) -> queue.SimpleQueue[bytes]:
    """Confine this process, and return a queue that gets each request.

    Args:
        requests: descriptor of the pipe with requests.
        replies: descriptor of the pipe for replies.
        crash: descriptor of the pipe to which a fatal signal writes the line that was running.
        trainer: process id of the trainer.
        memory_bytes: limit of the address space; 0 for no limit.
    """
    faulthandler.enable(crash)
    _confine(trainer, memory_bytes)
    for descriptor in (requests, replies, crash):
        os.set_inheritable(descriptor, False)
    incoming: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests, incoming), daemon=True).start()
    return incoming


def _confine(trainer: int, memory_bytes: int) -> None:
    """Limit memory, forbid core dumps, and end with the trainer.

    The process also ends if the trainer is killed while it is busy in C.
    """
    import resource

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
    """Read frames from the pipe. At its end the process ends, whatever it is doing."""
    with open(requests, "rb", closefd=False) as pipe:
        while len(header := pipe.read(8)) == 8:
            incoming.put(pipe.read(struct.unpack("<Q", header)[0]))
    os._exit(0)


def reply(replies: int, value: Any) -> None:
    """Write one frame of JSON."""
    text = json.dumps(value).encode()
    data = memoryview(struct.pack("<Q", len(text)) + text)
    while data:
        data = data[os.write(replies, data) :]


def address_space() -> int:
    """Return the bytes of this process's address space, 0 if the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    except OSError:
        return 0


# --- async functions ---


def wait_for(awaitable: Awaitable[Any]) -> Any:
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


_event_loop_lock = threading.Lock()


def _event_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop that runs in a thread of its own for as long as the process lives.

    All threads get the same loop, also if several ask for it first.
    """
    with _event_loop_lock:
        return _make_event_loop()


@functools.cache
def _make_event_loop() -> asyncio.AbstractEventLoop:
    import asyncio

    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:
            # A task that the function started may end the loop by sys.exit().
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.run_forever()

    threading.Thread(target=run, name="async functions", daemon=True).start()
    return loop


def is_machinery(filename: str) -> bool:
    """Return True for files whose frames do not help a user."""
    return filename in MACHINERY or filename.startswith(LIBRARIES)


# --- values ---


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
    if abs(number) <= LARGEST_NUMBER:
        return number
    return f"it returned {number}; the squares of rewards beyond {LARGEST_NUMBER:g} have no float32"


def describe(error: BaseException) -> str:
    """Return the error's type and message."""
    return f"{type(error).__name__}: {error}"


def failure_of(error: BaseException) -> tuple[str, str]:
    """Return (message with the user's line, frames of the user's code) of an exception."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not is_machinery(frame.filename)
    ]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = "".join(traceback.format_list(frames[-6:])) + describe(error)
    return f"{describe(error)}{where}"[:MAX_TEXT], text[-MAX_TEXT:]


def as_lists(error: TpuRlError) -> dict[str, list[str]]:
    """Return an error as the first reply of a worker that could not begin."""
    texts = [type(error).__name__, error.what, error.where, error.why, error.fix]
    return {"error": [text[:MAX_TEXT] for text in texts]}


def shorten(value: Any) -> str:
    """Return the value's repr, in at most 120 characters."""
    text = repr(value[:200] if isinstance(value, (str, bytes)) else value)
    return text if len(text) <= 120 else f"{text[:117]}..."
