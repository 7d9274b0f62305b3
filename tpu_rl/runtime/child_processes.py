"""Process groups that this process has started, to kill before it ends abruptly.

A daemon leaves its group. Workers therefore have a mark in their environment, which daemons
inherit. If this process is killed by SIGKILL, it cannot clean up: a keeper, a small process of its
own, then kills what has a mark of it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

groups: set[int] = set()
"""Ids of the process groups. A group contains a child and whatever the child starts."""

marks: set[str] = set()
"""Values of MARK in the environments of the workers that are running."""

MARK = "TPU_RL_WORKER"
_FAMILY = secrets.token_hex(8)
"""The beginning of all marks of this process."""
_keeper: subprocess.Popen[bytes] | None = None

_KEEPER = """
import importlib.util, sys
file, family = sys.argv[1:]
spec = importlib.util.spec_from_file_location("child_processes", file)
child_processes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(child_processes)
while sys.stdin.buffer.read(1):
    pass
child_processes.kill_marked([family])
"""
"""The program of the keeper. Its input ends when the last holder of the pipe does."""


def add_mark() -> str:
    """Return a new mark, which is in `marks`. The first call starts the keeper."""
    global _keeper
    if _keeper is None and sys.platform == "linux":
        _keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _KEEPER, __file__, _FAMILY],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Ctrl-C and the end of the terminal are for the others.
            start_new_session=True,
            close_fds=True,
        )
    mark = _FAMILY + secrets.token_hex(8)
    marks.add(mark)
    return mark


def kill_all() -> None:
    """Kill all groups. Call this before the process ends without cleaning up."""
    for group in list(groups):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    kill_marked(marks)


def kill_marked(beginnings: Collection[str]) -> None:
    """Kill all processes of this machine whose mark begins with one of these, on Linux."""
    assignments = tuple(f"{MARK}={beginning}".encode() for beginning in beginnings)
    # A daemon may start another while this looks for them, but not for long.
    for _ in range(20):
        has_killed = False
        has_starting = False
        for folder in Path("/proc").glob("[0-9]*"):
            # Processes end, and most are of other users.
            with contextlib.suppress(OSError):
                environment = (folder / "environ").read_bytes().split(b"\0")
                has_starting |= environment == [b""] and _is_starting(folder)
                if int(folder.name) != os.getpid() and any(
                    entry.startswith(assignments) for entry in environment
                ):
                    os.kill(int(folder.name), signal.SIGKILL)
                    has_killed = True
        if not (has_killed or has_starting):
            return
        if has_starting:
            time.sleep(0.01)


def _is_starting(folder: Path) -> bool:
    """Return True while a process loads a program.

    It then has neither arguments nor an environment. Kernel threads and processes that have ended
    have none either, but no program: reading its link raises OSError.
    """
    return not (folder / "cmdline").read_bytes() and bool((folder / "exe").readlink())
