"""A run on several processes begins together and ends together, with one message, whatever becomes of one of them.

A thread of each process tells the first that it is alive, and waits for word that the run has ended: from a process
that failed, which says why, or from the first, which misses one that fell silent. Then the first says so, once, and all
end at once with the same exit code, whatever their main threads wait for; what a run has saved survives that as it
survives kill -9. Where the first itself is gone, its service is, and each of the others says that.

Behind this stand jax's own heartbeats, which end a process that can no longer reach the first, with a page of stacks.
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

from launch.membership import Member
from launch.output import write_error
from launch.preemption import INTERRUPTED, Preempted
from tpu_rl import processes, reward_workers
from tpu_rl.errors import MachineError, TpuRlError
from tpu_rl.redaction import redact

BEAT = 1.0
"""Seconds between two signs of life."""
SILENCE = 25.0
"""Seconds without one after which a process counts as gone."""
HEARTBEAT = 45
"""Seconds after which jax ends a process that cannot reach the first one, and the others."""
PATIENCE = 300
"""Seconds that the first to be started waits for the last."""
INTERRUPTED_TEXT = "interrupted: the same command goes on from the last checkpoint, if there is one yet"
GO_ON = "The same command goes on from the last checkpoint"

FIRST_IS_GONE = f"error: the first process of this run is gone. {GO_ON}"

_STATUS = re.compile(r"(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION): ")
"""How errors of collectives begin; they come as several Python types."""

_ENDED, _ALIVE, _WHO = "tpu_rl/ended", "tpu_rl/alive/", "tpu_rl/who/"


@contextmanager
def joined(member: Member | None) -> Iterator[None]:
    """While this lasts the process is one of several, of which only the first speaks; for None it is the only one.

    Errors inside end all processes and do not return, but for `Preempted`, which all raise together.
    """
    if member is None:
        yield
        return
    with _aside() as console:
        try:
            _connect(member, console)
        except MachineError:
            console.give_back()
            raise
        if processes.index() == 0:
            console.give_back()
        watch = _Watch(console)
        watch.start()
        _joined.append(watch)
        try:
            yield
        except Preempted:
            watch.leave()
            raise
        except BaseException as error:
            watch.fail(error)
        finally:
            _joined.clear()
        watch.leave()


def end_all(text: str, code: int, after: float = 0.0) -> None:
    """From any thread, `after` seconds from now: end all processes of the run, this one too, with this text unless
    another has been said. Returns at once where this process is the only one."""
    for watch in _joined:
        time.sleep(after)
        watch.end_all(text, code)


_joined: list[_Watch] = []
"""What watches over the run that this process is in, if it is one of several."""


class _Console(NamedTuple):
    """What stdout and stderr were."""

    out: int
    err: int

    def say(self, text: str) -> None:
        write_error(f"{text}\n", self.err)

    def give_back(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(self.out, 1)
        os.dup2(self.err, 2)


@contextmanager
def _aside() -> Iterator[_Console]:
    """What is written to stdout and stderr goes into a temporary file from here on, unless they are given back."""
    console = _Console(os.dup(1), os.dup(2))
    handle, path = tempfile.mkstemp(prefix="tpu_rl_process_", suffix=".log")
    for descriptor in (1, 2):
        os.dup2(handle, descriptor)
    try:
        yield console
    finally:  # where the run failed, the process has ended before, and the file stays
        os.remove(path)


def _connect(member: Member, console: _Console) -> None:
    """Raises MachineError where not all processes find each other."""
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    if member.index == 0 and member.coordinator:
        _require_free(int(member.coordinator.rpartition(":")[2]))
    at_abort(lambda: _end_alone(console, f"error: {_not_found(member)}", MachineError.code))
    try:
        jax.distributed.initialize(
            coordinator_address=member.coordinator,
            num_processes=member.count,
            process_id=member.index,
            local_device_ids=member.devices,
            cluster_detection_method="deactivate" if member.coordinator else None,
            initialization_timeout=PATIENCE,
            heartbeat_timeout_seconds=HEARTBEAT,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise _not_found(member, str(error).partition("\n")[0][:300]) from error
    at_abort((lambda: _end_alone(console, FIRST_IS_GONE, Preempted.code)) if processes.index() else None)


def _not_found(member: Member, why: str = "") -> MachineError:
    here = f"process {member.index} of {member.count}, " if member.count else ""
    return MachineError(
        "the processes of this run did not find each other",
        where=f"{here}at {member.coordinator}" if member.coordinator else "",
        why=why,
        fix=f"start all of them within {PATIENCE} s; process 0 needs a port that the others can reach",
    )


def at_abort(end: Callable[[], None] | None) -> None:
    """What the process does when it is aborted. jax's client aborts it, with a page of stacks on stderr, in the moment
    in which it loses the first process, and where it does not find it."""
    _handlers.append(ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: end and end()))
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(signal.SIGABRT, ctypes.cast(_handlers[-1], ctypes.c_void_p) if end else None)


_handlers: list[Any] = []
"""They must live as long as they may be called."""


def _end_alone(console: _Console, text: str, code: int) -> NoReturn:
    try:
        console.say(text)
        reward_workers.kill_all()
    finally:
        os._exit(code)


def _require_free(port: int) -> None:
    """Raises MachineError where another program listens there: jax's service would crash."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            fix = "give all processes a --coordinator-address with another port"
            raise MachineError(f"port {port} is not free on this host", why=str(error), fix=fix) from error


class _Watch:
    """The thread that tells and waits, and what its main thread does at the end."""

    def __init__(self, console: _Console):
        self._client, self._count, self._index = processes.service(), processes.count(), processes.index()
        self._console = console
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="peers", daemon=True)
        self._client.key_value_set(f"{_WHO}{self._index}", f"process {self._index} on host {socket.gethostname()}")

    def start(self) -> None:
        self._thread.start()

    def leave(self) -> None:
        """Part from the others, all at the same place."""
        processes.gather(None)
        self._over.set()
        self._thread.join()
        jax.distributed.shutdown()

    def fail(self, error: BaseException) -> NoReturn:
        """End all processes, this one too, with what happened here: unless it was the consequence of what did there."""
        if _STATUS.match(str(error)):
            self._thread.join(SILENCE + 5 * BEAT)  # a collective fails at once where a process is gone
        elif self._index:
            self._thread.join(2 * BEAT)  # what is wrong on all of them is the first's to say
        match error:
            case TpuRlError():
                text, code = f"error: {error}", error.code
            case KeyboardInterrupt():
                text, code = INTERRUPTED_TEXT, INTERRUPTED
            case SystemExit():  # flags that were refused, with a text of their own
                text, code = "", error.code if isinstance(error.code, int) else 1
            case _:
                text, code = redact("".join(traceback.format_exception(error)).rstrip()), 1
        self.end_all(text, code)
        raise AssertionError("the thread ends the process")

    def end_all(self, text: str, code: int) -> None:
        self._say_ended(text, code, self._index)
        self._thread.join()

    def _say_ended(self, text: str, code: int, index: int) -> None:
        with suppress(jax.errors.JaxRuntimeError):  # who says it first is right
            self._client.key_value_set(_ENDED, json.dumps({"text": text, "code": code, "process": index}))

    def _look_on(self) -> None:
        beats, silence, looked = {}, {process: 0.0 for process in range(self._count)}, time.monotonic()
        for beat in range(10**12):
            try:
                self._client.key_value_set(f"{_ALIVE}{self._index}", str(beat), allow_overwrite=True)
                found = self._client.key_value_dir_get(_ALIVE) if self._index == 0 else []
                ended = self._wait_for_end()
            except jax.errors.JaxRuntimeError:
                if self._over.is_set():
                    return
                _end_alone(self._console, FIRST_IS_GONE, Preempted.code)
            if ended:
                self._end(ended)
            if self._over.is_set():
                return
            now = time.monotonic()
            # Time in which this thread did not run either is not the others' silence.
            passed, looked = min(now - looked, 3 * BEAT), now
            for process in silence if self._index == 0 else ():
                moved = dict(found).get(f"{_ALIVE}{process}") != beats.get(process)
                silence[process] = 0.0 if moved else silence[process] + passed
                if silence[process] > SILENCE:
                    text = f"error: {self._who(process)} is gone: it gave no sign of life for {SILENCE:.0f} s"
                    self._say_ended(f"{text}. {GO_ON}", Preempted.code, 0)
            beats = {process: dict(found).get(f"{_ALIVE}{process}") for process in silence}

    def _wait_for_end(self) -> dict[str, Any] | None:
        """What some process said of the end, within a beat."""
        try:
            return json.loads(self._client.blocking_key_value_get(_ENDED, int(1000 * BEAT)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None

    def _who(self, process: int) -> str:
        try:
            return self._client.blocking_key_value_get(f"{_WHO}{process}", 1000)
        except jax.errors.JaxRuntimeError:
            return f"process {process}"

    def _end(self, ended: dict[str, Any]) -> NoReturn:
        """The first lives a little longer than the others, who hear of the end through its service."""
        try:
            whose = ended["process"]
            if self._index == 0 and ended["text"]:
                self._console.say(f"{self._who(whose)}: {ended['text']}" if whose else ended["text"])
            sys.stdout.flush()
            sys.stderr.flush()
            reward_workers.kill_all()
            if self._index == 0:
                time.sleep(2 * BEAT)
        finally:
            os._exit(ended["code"])
