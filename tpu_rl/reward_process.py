"""What runs in a reward worker: one function of a user's file, loaded and asked. Standard library only.

`main` reads requests and writes replies until the trainer closes the pipe or dies. Requests are frames of pickle,
replies frames of JSON: the trainer never builds an object from what this process says. See `reward_workers`.
"""

from __future__ import annotations

import ctypes
import difflib
import faulthandler
import importlib.util
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
from collections.abc import Callable, Iterable, Mapping, Sized
from itertools import islice
from pathlib import Path
from typing import Any

from tpu_rl.errors import InputError, TpuRlError

LARGEST_FLOAT32 = 3.4028234663852886e38
LONGEST_TEXT = 2000
"""Characters of an error's text or traceback that are passed on."""
MACHINERY = {__file__, threading.__file__}
"""Files whose frames tell a user nothing."""


class RewardFailure(Exception):
    """Why there is no reward, and, where Python knows, the frames of the user's code that led there."""

    def __init__(self, message: str, frames: str = ""):
        super().__init__(message)
        self.frames = frames


# --- the user's function ---------------------------------------------------------------------------------------------


def sees_whole_batch(function: Any) -> bool:
    """Whether a reward function must be asked about all completions at once: any callable may carry the attribute, few
    do."""
    return bool(getattr(function, "whole_batch", False))


def load_function(path: str) -> Callable[..., Any]:
    """The function that "file.py:function" names. Raises InputError where its file does not load or lacks it."""
    file_name, _, name = path.rpartition(":")
    file = Path(file_name).expanduser().absolute()
    spec = importlib.util.spec_from_file_location(f"reward_{file.stem}", file)
    if spec is None or spec.loader is None:
        fix = "as in --reward my_reward.py:score"
        raise InputError("a reward file is Python source and ends in .py", where=file_name, fix=fix)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    # It is the user's program: it may raise anything.
    except (Exception, SystemExit) as error:
        where, fix = _user_line(error, file), "mend it until `python FILE` runs through"
        raise InputError("the reward file does not load", where=where, why=describe(error), fix=fix) from None
    members = vars(module)
    if not callable(members.get(name)):
        functions = [key for key, value in members.items() if inspect.isfunction(value)]
        raise InputError(
            f"no function {name!r} in the reward file",
            where=f"{file_name} defines {', '.join(functions) or 'no function'}",
            fix=did_you_mean(name, functions),
        )
    return members[name]


def call(function: Callable[..., Any], arguments: Mapping[str, Any], size: int) -> list[Any] | RewardFailure:
    """The function's `size` values, or why there are none. A TpuRlError of its own it may raise."""
    try:
        values = function(**arguments)
        if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Mapping)):
            return RewardFailure(f"it returned {shorten(values)} and not a list of numbers")
        # An iterator may have no end.
        found = list(values) if isinstance(values, Sized) else list(islice(values, size + 1))
    except TpuRlError:
        raise
    # It is the user's program: it may raise anything, and the run must go on.
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in MACHINERY]
        where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
        text = "".join(traceback.format_list(frames[-6:])) + describe(error)
        return RewardFailure(f"{describe(error)}{where}"[:LONGEST_TEXT], text[-LONGEST_TEXT:])
    if len(found) != size:
        return RewardFailure(f"it returned {len(found)} values for {size} completions")
    return found


def as_number(value: Any) -> float | str:
    """The value as a finite float, or what is wrong with it."""
    if isinstance(value, Exception):
        return str(value)
    if isinstance(value, (str, bytes)):
        return f"it returned {shorten(value)} and not a number"
    try:
        number = float(value)
    # numpy arrays raise either, and an object of the user's has any __float__.
    except Exception:
        return f"it returned {shorten(value)} and not a number"
    if math.isnan(number):
        return "it returned NaN; for what cannot be scored return None"
    return number if abs(number) <= LARGEST_FLOAT32 else f"it returned {number}, beyond a float32"


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def shorten(value: Any) -> str:
    text = repr(value[:200] if isinstance(value, (str, bytes)) else value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def did_you_mean(name: str, candidates: list[str]) -> str:
    nearest = difflib.get_close_matches(name, candidates, n=1)
    return f"did you mean {nearest[0]}?" if nearest else ""


def _user_line(error: BaseException, file: Path) -> str:
    """The last line of the user's file in the error's traceback; a syntax error knows its own."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return f"{file}:{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f"{file}:{lines[-1]}" if lines else str(file)


# --- the process -----------------------------------------------------------------------------------------------------


def main(requests: int, replies: int, crash: int, trainer: int, memory_bytes: int, path: str) -> None:
    """Load the function of `path`, say so, then answer each request (arguments, size) from the pipe `requests`.

    A fatal signal writes the line that was running to the pipe `crash`.
    The first reply is {"parameters": [[name, kind, whether it has a default], ...], "whole_batch": bool} or
    {"input_error": [...]}, others are {"values": [...]} or {"failure": [message, frames]}.
    """
    faulthandler.enable(crash)
    _confine(trainer, memory_bytes)
    for descriptor in (requests, replies, crash):
        os.set_inheritable(descriptor, False)
    incoming: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests, incoming), daemon=True).start()
    try:
        function = load_function(path)
        _reply(replies, {"parameters": _parameters(function), "whole_batch": sees_whole_batch(function)})
    except InputError as error:
        texts = [error.what, error.where, error.why, error.fix]
        _reply(replies, {"input_error": [text[:LONGEST_TEXT] for text in texts]})
        return
    process = os.getpid()
    while True:
        arguments, size = pickle.loads(incoming.get())
        try:
            answer = call(function, arguments, size)
        except TpuRlError as error:
            answer = RewardFailure(str(error)[:LONGEST_TEXT])
        if os.getpid() != process:
            # The function forked and its child came back from it too: only one of them answers.
            os._exit(0)
        if isinstance(answer, RewardFailure):
            _reply(replies, {"failure": [str(answer), answer.frames]})
        else:
            _reply(replies, {"values": [_encode(value) for value in answer]})


def _confine(trainer: int, memory_bytes: int) -> None:
    """No more memory than is allowed, no core dump, and no life after the trainer's, also where the trainer was killed
    while this process was busy in C."""
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
    """Frames from the pipe; at its end the process ends, whatever the user's function is doing."""
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
    return {"fault": number[:LONGEST_TEXT]} if isinstance(number, str) else number


def _parameters(function: Callable[..., Any]) -> list[list[Any]] | None:
    """None for the rare callable, written in C, that does not tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return None
    return [[p.name, p.kind.name, p.default is not p.empty] for p in parameters]
