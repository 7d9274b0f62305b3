"""Worker processes that may crash, hang or print anything: their start, their pipes and their end.

What a worker does is its own module's business, for example `tpu_rl.rewards.worker_process`.
Requests and replies are frames: eight bytes of length, then the data. Workers answer in JSON, so
that this process never builds an object from what they send.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple

from tpu_rl import user_code
from tpu_rl.errors import InputError, MachineError
from tpu_rl.redaction import redact
from tpu_rl.runtime import child_processes, worker_child

MAX_OUTPUT_BYTES = 64 * 1024
"""Bytes that a worker may print. The rest is read and dropped."""
MAX_FIRST_BYTES = 16 * 2**20
"""Bytes of a worker's first reply."""


PROGRAM = """
import importlib.util, json, sys
program, sys.path[:], arguments = map(json.loads, sys.argv[1:])
spec = importlib.util.spec_from_file_location("worker_process", program)
worker_process = importlib.util.module_from_spec(spec)
sys.modules["worker_process"] = worker_process
spec.loader.exec_module(worker_process)
worker_process.main(*arguments)
"""
"""The program of a worker."""


class Process(NamedTuple):
    """A worker's process, and this side's ends of the pipes to it."""

    popen: subprocess.Popen[bytes]
    requests: int
    replies: int
    crash: int
    """The text that faulthandler writes about a fatal signal."""
    mark: str
    """See `child_processes.marks`."""


def spawn(program: str, memory_bytes: int, arguments: Sequence[Any]) -> Process:
    """Start a worker, which ends with the thread that calls this.

    Args:
        program: file of a module with `main(*numbers, *arguments)`. The numbers are the parameters
            of `worker_child.begin`. The file is loaded by itself: importing its package may take
            several times as long.
        memory_bytes: limit of the address space; 0 for no limit.
        arguments: values that JSON can write.
    """
    worker_requests, our_requests = os.pipe()
    our_replies, worker_replies = os.pipe()
    our_crash, worker_crash = os.pipe()
    worker_ends = (worker_requests, worker_replies, worker_crash)
    numbers = [*worker_ends, os.getpid(), memory_bytes]
    values = (program, sys.path, [*numbers, *arguments])
    mark = child_processes.add_mark()
    popen = subprocess.Popen(
        [sys.executable, "-u", "-c", PROGRAM, *(json.dumps(value) for value in values)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=worker_ends,
        start_new_session=True,
        # If the user's code uses JAX, it must not claim the accelerators. Sets of texts have one
        # order in all workers, and after a resume. One arena: a thread's own would reserve 128 MB
        # of address space for a moment, and a limit close above that would be hit by chance.
        env={"PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1"}
        | os.environ
        | {"JAX_PLATFORMS": "cpu", child_processes.MARK: mark},
    )
    for descriptor in worker_ends:
        os.close(descriptor)
    os.set_blocking(our_requests, False)
    os.set_blocking(our_crash, False)
    child_processes.groups.add(popen.pid)
    return Process(popen, our_requests, our_replies, our_crash, mark)


def loaded(
    process: Process, path: str, kind: str, seconds: float, types: Mapping[str, type | UnionType]
) -> dict[str, Any]:
    """Return a worker's first reply: its program has loaded.

    Args:
        path: FILE.py:NAME, or the name of something else that the worker loads.
        kind: the name of that, for messages: "reward file".
        seconds: the time for it.
        types: the keys of the reply, and the types of their values.

    Raises:
        InputError, MachineError: if the worker replied so, or not at all.
    """
    deadline = time.monotonic() + seconds
    frame = read_frame(process, deadline, MAX_FIRST_BYTES)
    match None if frame is None else parsed(frame):
        case {"error": ["MachineError", what, where, why, fix]}:
            raise MachineError(what, where=where, why=why, fix=fix)
        case {"error": ["InputError", what, where, why, fix]}:
            raise InputError(what, where=where, why=why, fix=fix)
        case dict(reply) if all(isinstance(reply.get(key), of) for key, of in types.items()):
            return reply
    reason, frames = reason_of_end(process, path, seconds, time.monotonic() < deadline)
    raise InputError(
        f"the {kind} does not load",
        where=path,
        why="\n".join([reason, *frames[:6]]),
        fix=user_code.FIX_FILE,
    )


def reap(process: Process) -> None:
    """End a worker and all that it started, daemons too, and close its pipes."""
    child_processes.groups.discard(process.popen.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.popen.pid, signal.SIGKILL)
    process.popen.wait()
    child_processes.kill_marked([process.mark])
    child_processes.marks.discard(process.mark)
    for descriptor in (process.requests, process.replies, process.crash):
        os.close(descriptor)


def reason_of_end(
    process: Process, path: str, seconds: float, in_time: bool
) -> tuple[str, list[str]]:
    """Return why a worker did not reply, and the frames that it was in, innermost first.

    A worker that still lives is aborted.

    Args:
        path: FILE.py:NAME. A line of this file is named, if one of the frames is in it.
        seconds: the limit of the call.
        in_time: whether the limit was not yet reached.
    """
    popen = process.popen
    if in_time:
        # The pipe of a dying process closes a moment before it can be waited for.
        _wait(popen, 1.0)
    code = popen.poll()
    if code is None:
        # faulthandler then writes the line that is running, even in C.
        popen.send_signal(signal.SIGABRT)
        _wait(popen, 2.0)
    frames = _crash_frames(process.crash)
    file = path.rpartition(":")[0]
    user_frames = [frame for frame in frames if file.endswith(".py") and file in frame]
    where = f" ({_short_frame((user_frames or frames)[0])})" if frames else ""
    if code is None and in_time:
        reason = "its process broke the protocol"
    elif code is None:
        reason = f"no answer within {seconds:.3g} s"
    elif code < 0:
        reason = f"its process was killed by {signal.Signals(-code).name}"
    else:
        reason = f"its process ended with exit code {code}"
    return reason + where, frames


def _wait(popen: subprocess.Popen[bytes], seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        popen.wait(seconds)


class Output:
    """Copies to stderr what a worker's processes print, up to one limit for all of them."""

    def __init__(self, kind: str):
        """`kind` says what prints, for the note about the limit: "a reward function"."""
        self._kind = kind
        self._bytes_left = MAX_OUTPUT_BYTES

    def follow(self, popen: subprocess.Popen[bytes]) -> None:
        """Copy what this process prints, in a thread of its own."""
        threading.Thread(target=self._drain, args=(popen.stdout,), daemon=True).start()

    def _drain(self, pipe: Any) -> None:
        with pipe:
            while data := os.read(pipe.fileno(), 1 << 16):
                if self._bytes_left > 0:
                    sys.stderr.write(redact(data[: self._bytes_left].decode(errors="replace")))
                    self._bytes_left -= len(data)
                    if self._bytes_left <= 0:
                        sys.stderr.write(
                            f"\nnote: {self._kind} prints too much; the rest is dropped\n"
                        )


def _crash_frames(crash: int) -> list[str]:
    """Return the traceback that a fatal signal left: lines 'File "...", line N in f', innermost
    first."""
    try:
        text = os.read(crash, 1 << 16).decode(errors="replace")
    except BlockingIOError:
        return []
    lines = (line.strip() for line in text.splitlines())
    hidden = (*worker_child.MACHINERY, "<string>")
    return [
        line
        for line in lines
        if line.startswith("File ") and not any(f'"{name}"' in line for name in hidden)
    ]


def _short_frame(frame: str) -> str:
    """Return the place of a frame: 'File "/a/mine.py", line 3 in f' -> 'mine.py:3'."""
    name, _, rest = frame.removeprefix('File "').partition('", line ')
    return f"{Path(name).name}:{rest.partition(' ')[0]}"


def write(process: Process, data: bytes, deadline: float) -> bool:
    """Write data to the worker. Return True if it took everything in time."""
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


def read_frame(process: Process, deadline: float, max_bytes: int) -> bytes | None:
    """Return one reply, or None if it came too late or is too long, or if the process ended."""
    header = _read(process, 8, deadline)
    size = struct.unpack("<Q", header)[0] if header else max_bytes + 1
    return _read(process, size, deadline) if size <= max_bytes else None


def _read(process: Process, size: int, deadline: float) -> bytes | None:
    data = b""
    while len(data) < size:
        # A child that the function left behind may keep the pipe open after the worker ended, so
        # check the process as well.
        seconds_left = deadline - time.monotonic()
        is_over = seconds_left <= 0 or process.popen.poll() is not None
        timeout = 0 if is_over else min(seconds_left, 0.2)
        ready, _, _ = select.select([process.replies], [], [], timeout)
        part = os.read(process.replies, size - len(data)) if ready else b""
        if not part and (ready or is_over):
            return None
        data += part
    return data


def parsed(reply: bytes) -> Any:
    """Parse a reply, or return None if it is not JSON."""
    try:
        return json.loads(reply)
    except (ValueError, RecursionError):
        return None
