"""A confined computer for shell commands, whose files last as long as it does.

It has the programs of this machine's /usr, read-only, and a root directory in memory that is empty
otherwise: no network but its own loopback, no files of this machine, none of its processes. All
commands run as the user nobody (`child.py`).
"""

from __future__ import annotations

import json
import marshal
import os
import select
import struct
import time
import weakref
from collections.abc import Mapping
from typing import NamedTuple

from tpu_rl.sandbox.processes import Running, SandboxLimits, code_of

GRACE_SECONDS = 10.0
"""Time beyond that of a command in which the process must answer."""
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
}
MAX_OUTPUT_BYTES = 1 << 16


class CommandResult(NamedTuple):
    """The end of a command."""

    code: int
    """The exit code; negative for a signal."""
    printed: str
    """Its stdout and stderr; the end of them, if they have more than 64 KiB."""
    is_late: bool = False
    """True if it was stopped because its time was over."""


class MachineLost(Exception):
    """The machine does not answer any more."""


class Machine:
    """The computer. It ends with `close`, or when nothing refers to it."""

    def __init__(self, memory_mb: int = 1024, disk_mb: int = 256):
        """Start it.

        Args:
            memory_mb: the address space of each process.
            disk_mb: all its files, which are in this machine's memory.

        Raises:
            Refused: if the kernel does not allow the confinement.
        """
        limits = SandboxLimits(memory_mb=memory_mb, disk_mb=disk_mb)
        requests, to_machine = os.pipe()
        answers, replies = os.pipe()
        self._to = os.fdopen(to_machine, "wb", buffering=0)
        self._answers = os.fdopen(answers, "rb", buffering=0)
        arguments = (requests, replies, memory_mb << 20, disk_mb << 20)
        request = {"stdin": "", "role": "machine", "arguments": arguments}
        request |= {"modules": code_of("machine_end")}
        self._running = Running(request, (requests, replies), limits, confine=True)
        self._reaper = weakref.finalize(self, self._running.__exit__)
        try:
            self._running.begin()
        except BaseException:
            self.close()
            raise

    def run(
        self,
        command: str,
        stdin: bytes = b"",
        cwd: str = "/",
        env: Mapping[str, str] | None = None,
        seconds: float = 20.0,
    ) -> CommandResult:
        """Run a command of bash, as a new process.

        Args:
            command: as behind `bash -c`.
            cwd: the directory in which it begins.
            env: variables besides PATH, HOME and LANG.
            seconds: wall time; processor time of each process has the same limit.

        Raises:
            MachineLost: if the machine has ended.
        """
        request = {"command": command, "stdin": stdin, "cwd": cwd, "seconds": float(seconds)}
        request |= {"env": {**ENVIRONMENT, **(env or {})}, "max_bytes": MAX_OUTPUT_BYTES}
        data = marshal.dumps(request)
        deadline = time.monotonic() + seconds + GRACE_SECONDS
        reply = b""
        try:
            view = memoryview(struct.pack("<I", len(data)) + data)
            while view:
                view = view[self._to.write(view) :]
            while not reply.endswith(b"\n"):
                left = max(deadline - time.monotonic(), 0)
                is_there = select.select([self._answers], [], [], left)[0]
                part = self._answers.read(1 << 16) if is_there else b""
                if not part:
                    raise OSError("no answer")
                reply += part
        except (OSError, ValueError) as error:
            self.close()
            raise MachineLost(f"the confined machine has ended: {error}") from None
        return CommandResult(**json.loads(reply))

    def close(self) -> None:
        """End all its processes."""
        self._to.close()
        self._reaper()
        self._answers.close()
