"""The processes of one run start together and end together, with one message.

A thread of each process sends heartbeats to the first process and waits for word that the run has
ended. The word comes from a process that failed, with its error, or from the first process, which
notices that another one has fallen silent. Then the first process prints the message, once, and all
end at once with the same exit code, whatever their main threads wait for. What a run has saved
survives this as it survives kill -9. If the first process is gone, so is its service, and each of
the others reports that.

JAX's own heartbeats are the last resort: they abort a process that can no longer reach the first
one, with a page of stacks.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, NoReturn

import jax

from tpu_rl.errors import MachineError, TpuRlError, refused
from tpu_rl.redaction import redact
from tpu_rl.runtime import child_processes, processes
from tpu_rl.runtime.cluster import Member
from tpu_rl.runtime.preemption import INTERRUPTED, Preempted
from tpu_rl.runtime.stdio import write_error

HEARTBEAT_SECONDS = 1.0
"""Seconds between two heartbeats."""
TIMEOUT_SECONDS = 25.0
"""A process without a heartbeat for so many seconds counts as gone."""
JAX_TIMEOUT_SECONDS = 45
"""JAX aborts a process that cannot reach the first one for so many seconds, and the others."""
START_SECONDS = 300
"""Seconds that the first process to start waits for the last."""
INTERRUPTED_TEXT = (
    "interrupted: the same command goes on from the last checkpoint, if there is one yet"
)
RESUME_HINT = "The same command goes on from the last checkpoint"
FIRST_IS_GONE = f"error: the first process of this run is gone. {RESUME_HINT}"

_COLLECTIVE_ERROR = re.compile(
    r"(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION): "
)
"""The beginning of the errors of collectives, which have several Python types."""

# Keys of JAX's key-value service.
_END_KEY = "tpu_rl/ended"
_ALIVE_KEY = "tpu_rl/alive/"
_NAME_KEY = "tpu_rl/who/"


@contextmanager
def join(member: Member | None) -> Iterator[None]:
    """Make this process part of a run on several processes, of which only the first prints.

    An error in this context ends all processes, and this does not return. Only `Preempted`, which
    all processes raise together, passes through. With None, this process is the only one of its
    run, and nothing is done.

    Raises MachineError if the processes do not find each other.
    """
    if member is None:
        yield
        return
    with _captured_output() as console:
        try:
            _connect(member, console)
        except MachineError:
            console.restore()
            raise
        if processes.index() == 0:
            console.restore()
        watch = _Watch(console)
        watch.start()
        _watches.append(watch)
        try:
            yield
        except Preempted:
            watch.leave()
            raise
        except BaseException as error:
            watch.fail(error)
        finally:
            _watches.clear()
        watch.leave()


def end_all(text: str, code: int, after: float = 0.0) -> None:
    """End all processes of the run, this one too, after a delay; any thread may call this.

    Returns at once if this process is the only one.

    Args:
      text: the message to print, unless another process has ended the run first.
      after: the delay in seconds.
    """
    for watch in _watches:
        time.sleep(after)
        watch.end_all(text, code)


def end_now(text: str, code: int) -> NoReturn:
    """End this process at once with a message, and the others of the run, whatever fails."""
    try:
        end_all(text, code)
        print(text, file=sys.stderr, flush=True)
        child_processes.kill_all()
    finally:
        os._exit(code)


_watches: list[_Watch] = []
"""The watch over the run of this process, if it is one of several; else empty."""


# --- output ---


class _Console(NamedTuple):
    """File descriptors of the original stdout and stderr."""

    out: int
    err: int

    def print_error(self, text: str) -> None:
        write_error(f"{text}\n", self.err)

    def restore(self) -> None:
        """Send stdout and stderr to their original places again."""
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(self.out, 1)
        os.dup2(self.err, 2)


@contextmanager
def _captured_output() -> Iterator[_Console]:
    """Send stdout and stderr to a temporary file, unless they are restored.

    If the run fails, the process ends inside this context, and the file remains.
    """
    console = _Console(os.dup(1), os.dup(2))
    handle, path = tempfile.mkstemp(prefix="tpu_rl_process_", suffix=".log")
    for descriptor in (1, 2):
        os.dup2(handle, descriptor)
    try:
        yield console
    finally:
        os.remove(path)


# --- start ---


class ProcessesMissingError(MachineError):
    """Not all processes of a run met: one was not started, or was lost before (exit code 75).

    In a restart loop, the same command may succeed as soon as the missing host is back.
    """

    code = Preempted.code


def _connect(member: Member, console: _Console) -> None:
    """Start JAX's service.

    Raises:
        MachineError: the port of the first process is taken.
        ProcessesMissingError: not all processes find each other.
    """
    jax.config.update("jax_enable_preemption_service", False)  # It would take SIGTERM for itself.
    if member.index == 0 and member.coordinator:
        _require_free(int(member.coordinator.rpartition(":")[2]))
    _on_abort(lambda: _end_alone(console, f"error: {_start_error(member)}", Preempted.code))
    try:
        jax.distributed.initialize(
            coordinator_address=member.coordinator,
            num_processes=member.count,
            process_id=member.index,
            local_device_ids=member.devices,
            cluster_detection_method="deactivate" if member.coordinator else None,
            initialization_timeout=START_SECONDS,
            heartbeat_timeout_seconds=JAX_TIMEOUT_SECONDS,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise _start_error(member, str(error).partition("\n")[0][:300]) from error
    if processes.index():
        _on_abort(lambda: _end_alone(console, FIRST_IS_GONE, Preempted.code))
    else:
        _on_abort(None)


def _start_error(member: Member, why: str = "") -> ProcessesMissingError:
    process = f"process {member.index} of {member.count}, " if member.count else ""
    return ProcessesMissingError(
        "the processes of this run did not find each other",
        where=f"{process}at {member.coordinator}" if member.coordinator else "",
        why=why,
        fix=f"start all of them within {START_SECONDS} s; process 0 needs a port that the others "
        "can reach",
    )


def _on_abort(end: Callable[[], None] | None) -> None:
    """Call `end` when the process is aborted; None restores the default.

    JAX's client aborts the process, with a page of stacks on stderr, as soon as it loses the first
    process, and also if it does not find it.
    """

    def handle(number: int) -> None:
        if end is not None:
            end()

    _abort_handlers.append(ctypes.CFUNCTYPE(None, ctypes.c_int)(handle))
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    address = ctypes.cast(_abort_handlers[-1], ctypes.c_void_p) if end is not None else None
    libc.signal(signal.SIGABRT, address)


_abort_handlers: list[Any] = []
"""References that keep the handlers alive as long as they may be called."""


def _end_alone(console: _Console, text: str, code: int) -> NoReturn:
    """End this process at once with a message."""
    try:
        console.print_error(text)
        child_processes.kill_all()
    finally:
        os._exit(code)


def _require_free(port: int) -> None:
    """Raise MachineError if another program listens on a port: JAX's service would crash."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with refused(
            OSError,
            f"port {port} is not free on this host",
            fix="give all processes a --coordinator-address with another port",
            kind=MachineError,
        ):
            probe.bind(("", port))


# --- the watch ---


class _Watch:
    """The thread that sends heartbeats and waits for the end of the run."""

    def __init__(self, console: _Console):
        self._client = processes.service()
        self._count = processes.count()
        self._index = processes.index()
        self._console = console
        self._has_left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)
        name = f"process {self._index} on host {socket.gethostname()}"
        self._client.key_value_set(f"{_NAME_KEY}{self._index}", name)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def leave(self) -> None:
        """Leave the group without an error; all processes call this at the same place."""
        processes.gather(None)
        self._has_left.set()
        self._thread.join()
        jax.distributed.shutdown()

    def fail(self, error: BaseException) -> NoReturn:
        """End all processes with the error of this one, unless it is only a consequence.

        The thread ends this process meanwhile if another process has ended the run.
        """
        if _COLLECTIVE_ERROR.match(str(error)):
            # A collective fails at once if a process is gone; that is noticed only later.
            self._thread.join(TIMEOUT_SECONDS + 5 * HEARTBEAT_SECONDS)
        elif self._index:
            # If all processes have the same error, the first one reports it.
            self._thread.join(2 * HEARTBEAT_SECONDS)
        match error:
            case TpuRlError():
                text = f"error: {error}"
                code = error.code
            case KeyboardInterrupt():
                text = INTERRUPTED_TEXT
                code = INTERRUPTED
            case SystemExit():  # Refused flags; their message is printed already.
                text = ""
                code = error.code if isinstance(error.code, int) else 1
            case _:
                text = redact("".join(traceback.format_exception(error)).rstrip())
                code = 1
        self.end_all(text, code)
        raise AssertionError("the thread ends the process")

    def end_all(self, text: str, code: int) -> None:
        """Tell all processes to end, and wait for the thread to end this one."""
        self._announce_end(text, code, self._index)
        self._thread.join()

    def _announce_end(self, text: str, code: int, index: int) -> None:
        end = {"text": text, "code": code, "process": index}
        with suppress(jax.errors.JaxRuntimeError):  # The first announcement counts.
            self._client.key_value_set(_END_KEY, json.dumps(end))

    def _run(self) -> None:
        """Send heartbeats until the group ends; the first process checks those of the others."""
        last_beats: dict[str, str] = {}
        silence = [0.0] * self._count
        last_look = time.monotonic()
        beat = 0
        while True:
            try:
                self._client.key_value_set(
                    f"{_ALIVE_KEY}{self._index}", str(beat), allow_overwrite=True
                )
                beats: dict[str, str] = {}
                if self._index == 0:
                    beats = dict(self._client.key_value_dir_get(_ALIVE_KEY))
                end = self._wait_for_end()
            except jax.errors.JaxRuntimeError:
                if self._has_left.is_set():
                    return
                _end_alone(self._console, FIRST_IS_GONE, Preempted.code)
            if end:
                self._end(end)
            if self._has_left.is_set():
                return
            now = time.monotonic()
            # Time in which this thread did not run either is not the silence of other processes.
            passed = min(now - last_look, 3 * HEARTBEAT_SECONDS)
            last_look = now
            if self._index == 0:
                self._check_heartbeats(beats, last_beats, silence, passed)
            last_beats = beats
            beat += 1

    def _check_heartbeats(
        self, beats: dict[str, str], last_beats: dict[str, str], silence: list[float], passed: float
    ) -> None:
        """Update the seconds of silence of each process; end the run if one is gone."""
        for process in range(self._count):
            key = f"{_ALIVE_KEY}{process}"
            if beats.get(key) != last_beats.get(key):
                silence[process] = 0.0
                continue
            silence[process] += passed
            if silence[process] > TIMEOUT_SECONDS:
                text = f"error: {self._name(process)} is gone: it gave no sign of life for "
                text += f"{TIMEOUT_SECONDS:.0f} s. {RESUME_HINT}"
                self._announce_end(text, Preempted.code, 0)

    def _wait_for_end(self) -> dict[str, Any] | None:
        """Return the announced end of the run, or None if there is none within a heartbeat."""
        try:
            return json.loads(
                self._client.blocking_key_value_get(_END_KEY, int(1000 * HEARTBEAT_SECONDS))
            )
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None

    def _name(self, process: int) -> str:
        try:
            return self._client.blocking_key_value_get(f"{_NAME_KEY}{process}", 1000)
        except jax.errors.JaxRuntimeError:
            return f"process {process}"

    def _end(self, end: dict[str, Any]) -> NoReturn:
        """End this process as announced.

        The first process lives a little longer, because the others learn of the end through its
        service.
        """
        try:
            process = end["process"]
            if self._index == 0 and end["text"]:
                source = f"{self._name(process)}: " if process else ""
                self._console.print_error(f"{source}{end['text']}")
            sys.stdout.flush()
            sys.stderr.flush()
            child_processes.kill_all()
            if self._index == 0:
                time.sleep(2 * HEARTBEAT_SECONDS)
        finally:
            os._exit(end["code"])
