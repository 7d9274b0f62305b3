"""Run model-written programs where they can do no harm.

A program runs in a process that has confined itself (`child.py`). What it prints comes back over
pipes. `judge` runs a test in a second such process, which asks the program over a channel of plain
values (`channel.py`). `tpu_rl.sandbox.unit_tests` prepares the tests.
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
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple, Self

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
    """Limit of each stream: stdout and stderr."""


class Outcome(NamedTuple):
    """The result of a run."""

    ended: str
    """Empty if the program ran to its end. Else "time" or "output" for the limit that stopped it,
    or "exit CODE"."""
    printed: str
    errors: str
    """The end of what it wrote to stderr."""
    verdict: str = ""
    """Of a test: see `judge_end.judge`."""


class Refused(Exception):
    """The kernel does not allow a process to confine itself."""


def run(
    program: str, stdin: str = "", limits: SandboxLimits | None = None, confine: bool = True
) -> Outcome:
    """Run a program.

    Args:
        confine: if False, the program has limits, but otherwise the rights of this process.

    Raises:
        Refused: before the program begins, if it cannot be confined.
    """
    request = {"program": program, "stdin": stdin, "role": ""}
    with Running(request, (), limits or SandboxLimits(), confine) as running:
        return running.outcome()


def judge(
    program: str,
    test: CodeType,
    program_names: Iterable[str],
    num_asserts: int,
    limits: SandboxLimits | None = None,
    confine: bool = True,
) -> str:
    """Run a test of a program in a process of its own, and return the verdict.

    It is "passed" or a reason (see `judge_end.judge`), "ended: ..." beyond a limit. All together
    has the time of one program.

    Args:
        program: Python source.
        test: see `unit_tests.prepare`, as for the next two.
        program_names: names that the program defines.
        num_asserts: asserts that must be reached.
        limits: what each of the two processes may use.
        confine: see `run`.

    Raises:
        Refused: before the program begins, if a process cannot be confined.
    """
    limits = limits or SandboxLimits()
    requests, to_program = os.pipe()
    answers, to_judge = os.pipe()
    arguments = (program, requests, to_judge)
    serve = {"stdin": "", "role": "serve", "arguments": arguments}
    serve |= {"modules": code_of("channel", "program_end")}
    arguments = (test, set(program_names), num_asserts, answers, to_program)
    ask = serve | {"role": "judge", "arguments": arguments}
    ask |= {"modules": code_of("channel", "judge_end")}
    with (
        Running(ask, (answers, to_program), limits, confine) as judging,
        Running(serve, (requests, to_judge), limits, confine) as running,
        ThreadPoolExecutor(1) as thread,
    ):
        # What the program prints must be read, or it waits forever.
        program_outcome = thread.submit(running.outcome)
        try:
            outcome = judging.outcome()
        finally:
            running.kill()
        try:
            program_outcome.result()
        except Refused as error:
            # Without a reason it was this function that ended it, before it began.
            if str(error):
                raise
    return outcome.verdict or f"ended: the test ended with {outcome.ended or 'no verdict'}"


def require(where: str = "", or_flag: str = "--allow-unsandboxed-code") -> None:
    """Raise MachineError if programs cannot be confined on this machine.

    Args:
        where: the flag that asks for it.
        or_flag: the flag that runs programs with the rights of this user; "" if there is none.
    """
    reason = refusal()
    if reason:
        otherwise = f", or {or_flag} to run them with this user's rights" if or_flag else ""
        raise MachineError(
            "this machine cannot sandbox model-written programs",
            where=where,
            why=reason,
            fix=f"allow user namespaces{otherwise}",
        )


def refusal() -> str:
    """Return the reason why programs cannot be confined on this machine, or ""."""
    # Only a good answer is kept: on a busy machine one start may be too slow.
    if not _confined:
        try:
            # The import tests that the program can read the standard library.
            outcome = run("import fractions\nprint(1)")
        except Refused as error:
            return str(error)
        if outcome.printed != "1\n":
            return f"a program that prints 1 ended with {outcome}"
        _confined.append(True)
    return ""


_confined: list[bool] = []
"""Not empty if programs were confined on this machine."""


# --- the process ---


@cache
def code_of(*names: str) -> list[tuple[str, CodeType]]:
    """Return modules of this package, by name, as the child process loads them."""
    sources = ((f"{__package__}.{name}", CHILD.with_name(f"{name}.py")) for name in names)
    return [
        (name, compile(path.read_text(encoding="utf-8"), path.name, "exec"))
        for name, path in sources
    ]


class Running:
    """A child process with a request. It ends with the context."""

    def __init__(
        self, request: dict[str, Any], channel: Sequence[int], limits: SandboxLimits, confine: bool
    ):
        """Start the process; it takes over the descriptors of `channel`."""
        request = request | {
            "confine": confine,
            "memory_bytes": limits.memory_mb << 20,
            "disk_bytes": limits.disk_mb << 20,
            "cpu_seconds": int(limits.seconds) + 1,
        }
        self._limits = limits
        self._request = marshal.dumps(request)
        self._folder = tempfile.TemporaryDirectory(prefix="tpu_rl_program_")
        self._report, protocol = os.pipe()
        self._process = _spawn(protocol, channel, self._folder.name)

    def outcome(self) -> Outcome:
        """Wait for the end. Raises Refused if the process cannot be confined."""
        return _communicate(self._process, self._report, self.begin(), self._limits)

    def begin(self) -> bytearray:
        """Send the request, and return what the process reported after it was confined.

        Raises Refused if it cannot be.
        """
        assert self._process.stdin is not None
        assert self._process.stderr is not None
        # This cannot block: our own code in the child reads it first. If the child ended at once,
        # its report or its stderr says why.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(self._request)
            self._process.stdin.close()
        reported = bytearray()
        first_line = _read_first_line(self._report, reported)
        if first_line != b"confined":
            self._process.kill()
            reason = first_line or self._process.stderr.read(2000)
            raise Refused(reason.decode(errors="replace"))
        return reported

    def kill(self) -> None:
        """Kill the process, and everything that it started in its namespace."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.wait()
        os.close(self._report)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None and not pipe.closed:
                pipe.close()
        self._folder.cleanup()


def _spawn(protocol: int, channel: Sequence[int], folder: str) -> subprocess.Popen[bytes]:
    """Start the child process. It has nothing of this process but its pipes."""
    try:
        return subprocess.Popen(
            # -I and -S: isolated, and without the packages of this environment.
            [sys.executable, "-I", "-S", str(CHILD), str(protocol)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(protocol, *channel),
            start_new_session=True,
            cwd=folder,
            env={"LANG": "C.UTF-8"},
        )
    finally:
        for descriptor in (protocol, *channel):
            os.close(descriptor)


def _communicate(
    process: subprocess.Popen[bytes], report: int, reported: bytearray, limits: SandboxLimits
) -> Outcome:
    """Read the process's pipes until it ends or exceeds a limit."""
    assert process.stdout is not None
    assert process.stderr is not None
    streams = {
        report: reported,
        process.stdout.fileno(): bytearray(),
        process.stderr.fileno(): bytearray(),
    }
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
    verdict, printed, errors = (bytes(text).decode(errors="replace") for text in streams.values())
    return Outcome(ended, printed, errors[-2000:], verdict.strip())


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
