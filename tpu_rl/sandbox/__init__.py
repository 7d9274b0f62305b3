"""Run model-written programs where they can do no harm.

A program runs in a process that has confined itself (`child.py`). What it prints, and the values of
expressions in its scope, come back over pipes. `tpu_rl.sandbox.unit_tests` judges programs by them.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tpu_rl.errors import MachineError

CHILD = Path(__file__).with_name("child.py")
START_SECONDS = 20.0
"""Time for the process to start and confine itself."""


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one run of a program."""

    seconds: float = 5.0
    """Wall time. Processor time has the same limit, rounded up."""
    memory_mb: int = 512
    disk_mb: int = 16
    output_kb: int = 1024
    """Limit of each stream: stdout, stderr, and the values of expressions."""


class Outcome(NamedTuple):
    """The result of a run."""

    ended: str
    """Empty if the program ran to its end. Else "time" or "output" for the limit that stopped it,
    or "exit CODE"."""
    printed: str
    errors: str
    """The end of what it wrote to stderr."""
    values: list[str]
    """The source of the value of each expression that was reached, as the program reports it
    (`child.source`). Parse it; never run it as it is."""


class Refused(Exception):
    """The kernel does not allow a process to confine itself."""


def run(
    program: str,
    stdin: str = "",
    steps: Sequence[tuple[str, str]] = (),
    limits: SandboxLimits | None = None,
    confine: bool = True,
) -> Outcome:
    """Run a program, then steps in its scope.

    Args:
        program: Python source.
        stdin: its standard input.
        steps: ("do", statements) or ("value", expression). Values are reported.
        limits: what the run may use.
        confine: if False, the program has limits, but otherwise the rights of this process.

    Raises:
        Refused: before the program begins, if it cannot be confined.
    """
    limits = limits or SandboxLimits()
    request = {
        "program": program,
        "stdin": stdin,
        "steps": list(steps),
        "confine": confine,
        "memory_bytes": limits.memory_mb << 20,
        "disk_bytes": limits.disk_mb << 20,
        "cpu_seconds": int(limits.seconds) + 1,
    }
    with tempfile.TemporaryDirectory(prefix="tpu_rl_program_") as folder:
        report, protocol = os.pipe()
        process = _spawn(protocol, folder)
        try:
            return _communicate(process, report, marshal.dumps(request), limits)
        finally:
            # Its namespace ends with it, and so does everything that the program started there.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(report)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None and not pipe.closed:
                    pipe.close()


def require() -> None:
    """Raise MachineError if programs cannot be confined on this machine."""
    reason = refusal()
    if reason:
        raise MachineError(
            "this machine cannot sandbox model-written programs",
            why=reason,
            fix="allow user namespaces, or --allow-unsandboxed-code to run them "
            "with this user's rights",
        )


@cache
def refusal() -> str:
    """Return the reason why programs cannot be confined on this machine, or ""."""
    try:
        # The import tests that the program can read the standard library.
        outcome = run("import fractions\nprint(1)")
    except Refused as error:
        return str(error)
    return "" if outcome.printed == "1\n" else f"a program that prints 1 ended with {outcome}"


# --- the process ---


def _spawn(protocol: int, folder: str) -> subprocess.Popen[bytes]:
    """Start the child process. It has nothing of this process but its pipes."""
    try:
        return subprocess.Popen(
            # -I and -S: isolated, and without the packages of this environment.
            [sys.executable, "-I", "-S", str(CHILD), str(protocol)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(protocol,),
            start_new_session=True,
            cwd=folder,
            env={"LANG": "C.UTF-8"},
        )
    finally:
        os.close(protocol)


def _communicate(
    process: subprocess.Popen[bytes], report: int, request: bytes, limits: SandboxLimits
) -> Outcome:
    """Send the request, and read the process's pipes until it ends or exceeds a limit."""
    assert process.stdout is not None
    assert process.stderr is not None
    _send(process, request)
    streams = {
        report: bytearray(),
        process.stdout.fileno(): bytearray(),
        process.stderr.fileno(): bytearray(),
    }
    first_line = _read_first_line(report, streams[report])
    if first_line != b"confined":
        process.kill()
        reason = first_line or process.stderr.read(2000)
        raise Refused(reason.decode(errors="replace"))
    deadline = time.monotonic() + limits.seconds
    max_bytes = limits.output_kb << 10
    ended = ""
    with selectors.DefaultSelector() as selector:
        for descriptor in streams:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map() and not ended:
            seconds_left = deadline - time.monotonic()
            ready = selector.select(max(seconds_left, 0))
            if seconds_left <= 0 and not ready:
                ended = "time"
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                streams[key.fd] += data
                if not data:
                    selector.unregister(key.fd)
                if len(streams[key.fd]) > max_bytes:
                    ended = "output"
            if seconds_left <= 0:
                ended = ended or "time"
    if not ended:
        # A program may close its pipes and go on.
        try:
            code = process.wait(max(deadline - time.monotonic(), 0))
            ended = f"exit {code}" if code else ""
        except subprocess.TimeoutExpired:
            ended = "time"
    values, printed, errors = (bytes(text).decode(errors="replace") for text in streams.values())
    return Outcome(ended, printed, errors[-2000:], values.splitlines())


def _send(process: subprocess.Popen[bytes], request: bytes) -> None:
    """Write the request. This cannot block: our own code in the child reads it first."""
    assert process.stdin
    # If the child ended at once, its report or its stderr says why.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(request)
        process.stdin.close()


def _read_first_line(report: int, buffer: bytearray) -> bytes:
    """Return the first line of the report; `buffer` gets what was read after it."""
    with selectors.DefaultSelector() as selector:
        selector.register(report, selectors.EVENT_READ)
        deadline = time.monotonic() + START_SECONDS
        while b"\n" not in buffer:
            if not selector.select(max(deadline - time.monotonic(), 0)):
                return b"it does not start in time"
            data = os.read(report, 1 << 16)
            if not data:
                return bytes(buffer)
            buffer += data
    line, _, rest = bytes(buffer).partition(b"\n")
    buffer[:] = rest
    return line
