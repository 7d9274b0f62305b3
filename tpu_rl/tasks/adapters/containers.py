"""Containers of docker or podman, in which tasks are done."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import shutil
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tpu_rl.errors import MachineError

ENGINES = ("docker", "podman")
START_SECONDS = 50.0
"""Time for a container to start, below that of a reset."""
GRACE_SECONDS = 2.0
"""Time beyond its own in which a command must end, below that of the pool's calls."""
FILE_SECONDS = 10.0
"""Time to make or read a small file, and for a container to end."""
MAX_OUTPUT_BYTES = 1 << 16


class Unsupported(Exception):
    """The reason why a task cannot be done here."""


class ContainerLost(Exception):
    """The container does not answer any more."""


class CommandResult(NamedTuple):
    """The end of a command."""

    code: int
    """The exit code; negative for a signal."""
    printed: str
    """Its stdout and stderr; the end of them, if they have more than 64 KiB."""
    is_late: bool = False
    """True if it was stopped because its time was over."""


def find_engine(where: str) -> str:
    """Return the first of ENGINES that answers. Raises MachineError if none does."""
    reasons = []
    for engine in ENGINES:
        if shutil.which(engine) is None:
            reasons.append(f"{engine} is not on PATH")
            continue
        reason = _failure([engine, "info"], 20.0)
        if not reason:
            return engine
        reasons.append(f"`{engine} info` fails: {reason}")
    raise MachineError(
        "there is no container runtime for these tasks",
        where=where,
        why="; ".join(reasons),
        fix="install docker or podman, and start it",
    )


def build_image(engine: str, context: Path, tag: str, seconds: float) -> None:
    """Build an image. Raises Unsupported if that fails."""
    reason = _failure([engine, "build", "-q", "-t", tag, str(context)], seconds)
    if reason:
        raise Unsupported(f"its image cannot be built: {reason}")


def has_image(engine: str, tag: str) -> bool:
    """Return True if there is an image with this tag."""
    return not _failure([engine, "image", "inspect", tag], START_SECONDS)


def _failure(words: Sequence[str], seconds: float) -> str:
    """Run a program, and return "" or the last line of its reason for failing."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"no end within {seconds:g} s"
    lines = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2][:200]
    return (lines or f"exit {done.returncode}") if done.returncode else ""


class Container:
    """A container, which ends with the process that started it: its first program reads a pipe."""

    def __init__(self, engine: str, image: str, options: Sequence[str], workdir: str = ""):
        """Start it. Raises ContainerLost if it does not start."""
        self._engine = engine
        self._name = f"tpu-rl-{uuid.uuid4().hex}"
        self._workdir = ["-w", workdir] if workdir else []
        words = [engine, "run", "-i", "--rm", "--name", self._name, "--pids-limit", "4096"]
        words += [*options, image, "sh", "-c", "echo ready; exec cat"]
        pipe = subprocess.PIPE
        self._main = subprocess.Popen(words, 0, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT)
        assert self._main.stdout is not None
        deadline = time.monotonic() + START_SECONDS
        line = b""
        lines: list[bytes] = []
        # The image's own entry point may print before it.
        while line != b"ready\n":
            left = max(deadline - time.monotonic(), 0)
            is_there = select.select([self._main.stdout], [], [], left)[0]
            line = self._main.stdout.readline() if is_there else b""
            if not line:
                self.close()
                why = _shown(b"".join(lines)) or shlex.join(words)
                raise ContainerLost(f"the container does not start: {why}")
            lines.append(line)

    def run(
        self, command: str, *, seconds: float, env: Mapping[str, str] | None = None, user: str = ""
    ) -> CommandResult:
        """Run a command of bash. Raises ContainerLost if the container has ended."""
        words = [self._engine, "exec", "-i", *self._workdir, *(["-u", user] if user else [])]
        words += [word for item in (env or {}).items() for word in ("-e", "=".join(item))]
        words += [self._name, "timeout", "-s", "KILL", f"{seconds:g}", "bash", "-c", command]
        begun = time.monotonic()
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        printed = _last_bytes(process, begun + seconds + GRACE_SECONDS)
        if self._main.poll() is not None:
            why = _shown(_last_bytes(self._main, begun)) or f"exit {self._main.returncode}"
            raise ContainerLost(f"the container has ended: {why}")
        is_late = time.monotonic() - begun >= seconds
        return CommandResult(process.returncode, printed.decode(errors="replace"), is_late)

    def put(self, folder: Path, target: str) -> None:
        """Copy what is in a folder of this machine. Raises ContainerLost if that fails."""
        self.run(f"mkdir -p {target}", seconds=FILE_SECONDS, user="root")
        words = [self._engine, "cp", f"{folder}/.", f"{self._name}:{target}"]
        reason = _failure(words, START_SECONDS)
        if reason:
            raise ContainerLost(f"no files can be copied: {reason}")

    def close(self) -> None:
        """End it, and all that runs in it."""
        assert self._main.stdin is not None
        assert self._main.stdout is not None
        self._main.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._main.wait(FILE_SECONDS)
        if self._main.poll() is None:
            _failure([self._engine, "rm", "-f", self._name], START_SECONDS)
            self._main.kill()
            self._main.wait()
        self._main.stdout.close()


def _shown(printed: bytes) -> str:
    """Return the last three lines of what was printed, as one of at most 300 characters."""
    lines = [line for line in printed.decode(errors="replace").splitlines() if line.strip()]
    return "; ".join(lines[-3:])[-300:]


def _last_bytes(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """Return the end of what a process prints until it ends. At the deadline it is killed."""
    assert process.stdout is not None
    printed = b""
    with process.stdout as stdout:
        while select.select([stdout], [], [], max(deadline - time.monotonic(), 0))[0]:
            data = os.read(stdout.fileno(), 1 << 16)
            if not data:
                break
            printed = (printed + data)[-MAX_OUTPUT_BYTES:]
        else:
            process.kill()
    process.wait()
    return printed
