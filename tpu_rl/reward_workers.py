"""The firewall: user reward code runs in a process of its own, which nothing that it does can take the run down with.

A worker has a deadline for every question. Past it, or when it dies, it is killed with all its children and started
again for the next question. What it says comes as JSON and is checked; what it prints goes to stderr, up to a limit.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import math
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tpu_rl import reward_process
from tpu_rl.errors import InputError
from tpu_rl.reward_process import RewardFailure

START_SECONDS = 120.0
"""For a reward file to load: it may import large packages."""
MOST_OUTPUT = 64 * 1024
"""Bytes that a worker may print; more are read and dropped."""
LONGEST_VALUE = 4 * reward_process.LONGEST_TEXT
"""Bytes of a reply for one completion."""
PROGRAM = """
import json, sys
*numbers, path, sys.path[:] = map(json.loads, sys.argv[1:])
from tpu_rl.reward_process import main
main(*numbers, path)
"""


@dataclass(frozen=True)
class RewardLimits:
    """What a FILE.py:function reward may take before it is stopped."""

    isolate: bool = True
    """Run it in a process of its own. Without, it shares the run's process, and none of the limits but fault_share
    holds."""
    batch_seconds: float = 300.0
    """For the rewards of one batch, asked at once; asked group by group as they end, up to twice as long. What has not
    answered for all that it is asked in half of the time, is asked row by row."""
    row_seconds: float = 10.0
    """For one completion, where it is asked row by row."""
    memory_gb: float = 8.0
    """Address space of the process; 0 for no limit."""
    fault_share: float = 0.5
    """The share of a batch's completions that rewards may fail on before the run stops."""

    def __post_init__(self):
        for name, value in (("batch-seconds", self.batch_seconds), ("row-seconds", self.row_seconds)):
            if not value > 0:
                raise InputError(f"a deadline of {value} s", where=f"--reward-limits.{name}", fix="use more than 0")
        if not 0 <= self.fault_share <= 1 or self.memory_gb < 0:
            where = "--reward-limits.fault-share, --reward-limits.memory-gb"
            raise InputError(
                "a limit that cannot be", where=where, fix="use a share from 0 to 1, and no less than 0 GB"
            )


_groups: set[int] = set()
"""The process groups of all workers: each worker leads one, with what the user's function starts in it."""


def kill_all() -> None:
    """For a process that is about to end without cleaning up: no worker, and none of its children, outlives it."""
    for group in list(_groups):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


class _Process(NamedTuple):
    """A worker's process and our ends of the pipes to it."""

    popen: subprocess.Popen[bytes]
    requests: int
    replies: int
    crash: int
    """What faulthandler says of a fatal signal; a pipe holds it."""


class Worker:
    """A process that holds one function of a file. Started when made, and again after it had to be killed.

    On Linux it also ends with the thread that started it, so that none outlives a trainer that was killed.
    """

    def __init__(self, path: str, memory_bytes: int = 0):
        """Raises InputError where the file does not load."""
        self.path = path
        self._memory_bytes = memory_bytes
        self._output = _Output()
        self._process, parameters = self._start(START_SECONDS)
        self.signature = _signature(parameters)

    def ask(
        self, arguments: dict[str, list[Any]], size: int, seconds: float, deadline: float = math.inf
    ) -> list[Any] | RewardFailure:
        """The function's `size` values (float, None, or RewardFailure for one alone) or why there are none.

        It has `seconds`, to which a process that must be started first does not count; all ends at `deadline`, of
        time.monotonic().
        """
        if self._process.popen.poll() is not None:
            self.stop()
            try:
                self._process, _ = self._start(min(START_SECONDS, deadline - time.monotonic()))
            except InputError as error:
                return RewardFailure(f"its process does not start again: {error.what}: {error.why}")
        began = time.monotonic()
        seconds = max(min(seconds, deadline - began), 0)
        deadline = began + seconds
        question = pickle.dumps((arguments, size))
        process, answer = self._process, None
        try:
            if _write(process, struct.pack("<Q", len(question)) + question, deadline):
                reply = _read_frame(process, deadline, LONGEST_VALUE * (size + 2))
                answer = _checked(reply, size) if reply is not None else None
        except BaseException:
            # Ctrl-C, in a notebook: the answer would come to the next question.
            self.stop()
            raise
        return self._end(seconds, deadline) if answer is None else answer

    def stop(self) -> None:
        """End the process and whatever it started in its group."""
        self._reaper()

    def _start(self, seconds: float) -> tuple[_Process, list[list[Any]] | None]:
        deadline = time.monotonic() + seconds
        process = _spawn(self.path, self._memory_bytes)
        self._output.follow(process.popen)
        self._reaper = weakref.finalize(self, _reap, process)
        self._process = process
        reply = _read_frame(process, deadline, 1 << 20)
        loaded = None if reply is None else _parsed(reply)
        match loaded:
            case {"parameters": list() | None as parameters, "whole_batch": bool() as whole_batch}:
                self.whole_batch = whole_batch
                return process, parameters
            case {"input_error": [what, where, why, fix]}:
                self.stop()
                raise InputError(what, where=where, why=why, fix=fix)
        failure = self._end(seconds, deadline)
        why, fix = f"{failure}\n{failure.frames}".strip(), "mend it until `python FILE` runs through"
        raise InputError("the reward file does not load", where=self.path, why=why, fix=fix)

    def _end(self, seconds: float, deadline: float) -> RewardFailure:
        """Kill the process that gave no answer; what is known of the reason."""
        popen = self._process.popen
        in_time = time.monotonic() < deadline
        if in_time:
            # The pipe of a dying process closes a moment before it can be waited for.
            _wait(popen, 1.0)
        code = popen.poll()
        if code is None:
            popen.send_signal(signal.SIGABRT)  # faulthandler answers with the line that is running, even in C
            _wait(popen, 0.5)
        frames = _crash_frames(self._process.crash)
        self.stop()
        own = [frame for frame in frames if self.path.rpartition(":")[0] in frame]
        where = f" ({_short_frame((own or frames)[0])})" if frames else ""
        if code is None:
            what = "its process broke the protocol" if in_time else f"no answer within {seconds:.3g} s"
        elif code < 0:
            what = f"its process was killed by {signal.Signals(-code).name}"
        else:
            what = f"its process ended with exit code {code}"
        return RewardFailure(what + where, "\n".join(frames[:6]))


class IsolatedReward:
    """A reward function in a worker: asked for the whole batch, or a share of it, and row by row where that fails."""

    def __init__(self, path: str, limits: RewardLimits):
        """Raises InputError where the file does not load."""
        self._limits, self._seconds = limits, limits.batch_seconds
        self._worker = Worker(path, int(limits.memory_gb * 2**30))
        self.whole_batch = self._worker.whole_batch
        """It must see all completions of a batch in one call."""
        if self._worker.signature is not None:
            self.__signature__ = self._worker.signature

    def of_share(self, share: float, spent: float = 0.0) -> IsolatedReward:
        """The same function in the same worker, for so large a share of a batch that has taken so many seconds so far.

        It has its share of the batch's time, which nobody else can take, and yet, as long as the batch has taken less
        than its whole time, three times what one completion may take: half of it for all at once, so that a completion
        that takes as long as it may is not stopped. All shares together take at most twice a batch's time.
        """
        limits, shared = self._limits, copy.copy(self)
        own = share * limits.batch_seconds
        shared._seconds = max(own, min(3 * limits.row_seconds, limits.batch_seconds - spent))
        return shared

    def __call__(self, *positional: list[Any], **columns: list[Any]) -> list[Any]:
        """The values of as many completions as each list has, a RewardFailure where there is none."""
        arguments = dict(zip(("prompts", "completions"), positional, strict=False)) | columns
        size = len(next(iter(arguments.values()), []))
        deadline = time.monotonic() + self._seconds
        answer = self._worker.ask(arguments, size, self._seconds if self.whole_batch else self._seconds / 2)
        if not isinstance(answer, RewardFailure):
            return answer
        if self.whole_batch:  # of a part of it, it would say something else
            return [answer] * size
        whole, values = answer, []
        for row in range(size):
            if time.monotonic() >= deadline:
                late = f"no time left of {self._seconds:.3g} s for {size} completions; first: {whole}"
                values += [RewardFailure(late, whole.frames)] * (size - row)
                break
            one_row = {name: [column[row]] for name, column in arguments.items()}
            one = self._worker.ask(one_row, 1, self._limits.row_seconds, deadline)
            values += [one] if isinstance(one, RewardFailure) else one
        return values

    def stop(self) -> None:
        self._worker.stop()


# --- processes and pipes ---------------------------------------------------------------------------------------------


def _spawn(path: str, memory_bytes: int) -> _Process:
    requests, ours = os.pipe()
    answers, replies = os.pipe()
    told, crash = os.pipe()
    numbers = [requests, replies, crash, os.getpid(), memory_bytes]
    command = [sys.executable, "-u", "-c", PROGRAM, *(json.dumps(value) for value in (*numbers, path, sys.path))]
    popen = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(requests, replies, crash),
        start_new_session=True,
        # Should it use JAX, the accelerators are not for it.
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    for descriptor in (requests, replies, crash):
        os.close(descriptor)
    os.set_blocking(ours, False)
    os.set_blocking(told, False)
    _groups.add(popen.pid)
    return _Process(popen, ours, answers, told)


def _reap(process: _Process) -> None:
    _groups.discard(process.popen.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.popen.pid, signal.SIGKILL)
    process.popen.wait()
    for descriptor in (process.requests, process.replies, process.crash):
        os.close(descriptor)


def _wait(popen: subprocess.Popen[bytes], seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        popen.wait(seconds)


class _Output:
    """Passes on to stderr what a worker's processes print, up to a limit for all of them; the rest is dropped."""

    def __init__(self):
        self._left = MOST_OUTPUT

    def follow(self, popen: subprocess.Popen[bytes]) -> None:
        threading.Thread(target=self._drain, args=(popen.stdout,), daemon=True).start()

    def _drain(self, pipe: Any) -> None:
        with pipe:
            while data := os.read(pipe.fileno(), 1 << 16):
                if self._left > 0:
                    sys.stderr.write(data[: self._left].decode(errors="replace"))
                    self._left -= len(data)
                    if self._left <= 0:
                        sys.stderr.write("\nnote: a reward function prints much: the rest is dropped\n")


def _crash_frames(crash: int) -> list[str]:
    """Lines 'File "...", line N in f' of the traceback that a fatal signal left, innermost first."""
    try:
        text = os.read(crash, 1 << 16).decode(errors="replace")
    except BlockingIOError:
        return []
    lines = (line.strip() for line in text.splitlines())
    hidden = (*reward_process.MACHINERY, "<string>")
    return [line for line in lines if line.startswith("File ") and not any(f'"{name}"' in line for name in hidden)]


def _short_frame(frame: str) -> str:
    """'File "/a/mine.py", line 3 in f' -> 'mine.py:3'."""
    name, _, rest = frame.removeprefix('File "').partition('", line ')
    return f"{Path(name).name}:{rest.partition(' ')[0]}"


def _write(process: _Process, data: bytes, deadline: float) -> bool:
    """Whether the worker took it all in time."""
    rest = memoryview(data)
    while rest:
        _, ready, _ = select.select([], [process.requests], [], max(deadline - time.monotonic(), 0))
        if not ready:
            return False
        try:
            rest = rest[os.write(process.requests, rest) :]
        except BrokenPipeError:
            return False
    return True


def _read_frame(process: _Process, deadline: float, most: int) -> bytes | None:
    """One reply; None where none came in time, it is too long, or the process ended."""
    header = _read(process, 8, deadline)
    size = struct.unpack("<Q", header)[0] if header else most + 1
    return _read(process, size, deadline) if size <= most else None


def _read(process: _Process, size: int, deadline: float) -> bytes | None:
    data = b""
    while len(data) < size:
        # A child that the function left behind may hold the pipe open after the worker's end: look for that, too.
        left = deadline - time.monotonic()
        over = left <= 0 or process.popen.poll() is not None
        ready, _, _ = select.select([process.replies], [], [], 0 if over else min(left, 0.2))
        part = os.read(process.replies, size - len(data)) if ready else b""
        if not part and (ready or over):
            return None
        data += part
    return data


def _parsed(reply: bytes) -> Any:
    try:
        return json.loads(reply)
    except (ValueError, RecursionError):
        return None


def _checked(reply: bytes, size: int) -> list[Any] | RewardFailure | None:
    """A reply's content; None where it is not one."""
    match _parsed(reply):
        case {"failure": [str() as message, str() as frames]}:
            return RewardFailure(message, frames)
        case {"values": list() as values} if len(values) == size:
            return [RewardFailure(str(value["fault"])) if isinstance(value, dict) else value for value in values]
    return None


def _signature(parameters: list[list[Any]] | None) -> inspect.Signature | None:
    """The function's own signature, for whoever checks which columns it needs; the values of defaults are not known."""
    if parameters is None:
        return None
    one, empty = inspect.Parameter, inspect.Parameter.empty
    kinds = {
        kind.name: kind
        for kind in (
            one.POSITIONAL_ONLY,
            one.POSITIONAL_OR_KEYWORD,
            one.VAR_POSITIONAL,
            one.KEYWORD_ONLY,
            one.VAR_KEYWORD,
        )
    }
    return inspect.Signature([one(n, kinds[kind], default=None if opt else empty) for n, kind, opt in parameters])
