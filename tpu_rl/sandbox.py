"""Model-written programs, run where they can do no harm.

A program runs in a process that has confined itself (`sandbox_child`); what it prints, and the values of expressions in
its scope, come back over pipes. `program_tests` judges them.
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

CHILD = Path(__file__).with_name("sandbox_child.py")
START_SECONDS = 20.0
"""For the process to confine itself."""


@dataclass(frozen=True)
class SandboxLimits:
    """What one run of a program may take."""

    seconds: float = 5.0
    """By the clock; as much of a processor's time, rounded up."""
    memory_mb: int = 512
    disk_mb: int = 16
    output_kb: int = 1024
    """Of what it prints, and of the values that it gives."""


class Outcome(NamedTuple):
    """What a program did."""

    ended: str
    """ "" where it ran to its end; else "time" or "output" for the limit that stopped it, or "exit CODE"."""
    printed: str
    errors: str
    """The end of what it wrote to stderr."""
    values: list[str]
    """The source of the value of each expression that was reached, as the program gives it (`sandbox_child.source`): to
    be parsed, never to be run as it is."""


class Refused(Exception):
    """The kernel does not let a process confine itself."""


def run(
    program: str,
    stdin: str = "",
    steps: Sequence[tuple[str, str]] = (),
    limits: SandboxLimits | None = None,
    confine: bool = True,
) -> Outcome:
    """Run a program, then steps in its scope: ("do", statements) or ("value", expression).

    Raises Refused, before the program begins, where it cannot be confined; with `confine` False it has the rights of
    this process, and limits only.
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
            return _attend(process, report, marshal.dumps(request), limits)
        finally:
            # Its namespace ends with it, and all that the program has started in there.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(report)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None and not pipe.closed:
                    pipe.close()


def require() -> None:
    """Raises MachineError where programs cannot be confined here."""
    reason = refusal()
    if reason:
        raise MachineError(
            "this machine cannot sandbox model-written programs",
            why=reason,
            fix="allow user namespaces, or --allow-unsandboxed-code to run them with this user's rights",
        )


@cache
def refusal() -> str:
    """Why programs cannot be confined here; "" where they can."""
    try:
        outcome = run("import fractions\nprint(1)")  # which nothing has loaded yet: the library must be readable
    except Refused as error:
        return str(error)
    return "" if outcome.printed == "1\n" else f"a program that prints 1 ended with {outcome}"


# --- the process -----------------------------------------------------------------------------------------------------


def _spawn(protocol: int, folder: str) -> subprocess.Popen[bytes]:
    """The child, at the start of its program; it has nothing of this process but its pipes."""
    try:
        return subprocess.Popen(
            # Isolated, and without the packages of this environment.
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


def _attend(process: subprocess.Popen[bytes], report: int, request: bytes, limits: SandboxLimits) -> Outcome:
    """Feed a process and read its pipes until it ends or has to."""
    assert process.stdout is not None
    assert process.stderr is not None
    _give(process, request)
    places = {report: bytearray(), process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    confined = _first_line(process, report, places[report])
    if confined != b"confined":
        process.kill()
        raise Refused(confined.decode(errors="replace") or process.stderr.read(2000).decode(errors="replace"))
    deadline, most, ended = time.monotonic() + limits.seconds, limits.output_kb << 10, ""
    with selectors.DefaultSelector() as selector:
        for descriptor in places:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map() and not ended:
            left = deadline - time.monotonic()
            ready = selector.select(max(left, 0))
            if left <= 0 and not ready:
                ended = "time"
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                places[key.fd] += data
                if not data:
                    selector.unregister(key.fd)
                if len(places[key.fd]) > most:
                    ended = "output"
            if left <= 0:
                ended = ended or "time"
    if not ended:  # a program may close its pipes and go on
        try:
            code = process.wait(max(deadline - time.monotonic(), 0))
            ended = f"exit {code}" if code else ""
        except subprocess.TimeoutExpired:
            ended = "time"
    values, printed, errors = (bytes(text).decode(errors="replace") for text in places.values())
    return Outcome(ended, printed, errors[-2000:], values.splitlines())


def _give(process: subprocess.Popen[bytes], request: bytes) -> None:
    """Our own code reads it before anything else runs: it cannot be kept waiting."""
    assert process.stdin
    with contextlib.suppress(BrokenPipeError):  # it ended at once: what it says tells why
        process.stdin.write(request)
        process.stdin.close()


def _first_line(process: subprocess.Popen[bytes], report: int, found: bytearray) -> bytes:
    """The first line of the report, taken out of what was `found`."""
    with selectors.DefaultSelector() as selector:
        selector.register(report, selectors.EVENT_READ)
        deadline = time.monotonic() + START_SECONDS
        while b"\n" not in found:
            if not selector.select(max(deadline - time.monotonic(), 0)):
                return b"it does not start in time"
            data = os.read(report, 1 << 16)
            if not data:
                return bytes(found)
            found += data
    line, _, rest = bytes(found).partition(b"\n")
    found[:] = rest
    return line
