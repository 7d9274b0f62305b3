"""Process groups that this process has started, to kill before it ends abruptly.

A daemon leaves its group. Workers therefore have a mark in their environment, which daemons
inherit.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection
from pathlib import Path

groups: set[int] = set()
"""Ids of the process groups. A group contains a child and whatever the child starts."""

marks: set[str] = set()
"""Values of MARK in the environments of the workers that are running."""

MARK = "TPU_RL_WORKER"


def kill_all() -> None:
    """Kill all groups. Call this before the process ends without cleaning up."""
    for group in list(groups):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    kill_marked(marks)


def kill_marked(values: Collection[str]) -> None:
    """Kill all processes of this machine that have one of these marks, on Linux."""
    assignments = [f"{MARK}={value}".encode() for value in values]
    # A daemon may start another while this looks for them, but not for long.
    for _ in range(20):
        has_killed = False
        for folder in Path("/proc").glob("[0-9]*"):
            # Processes end, and most are of other users.
            with contextlib.suppress(OSError):
                environment = (folder / "environ").read_bytes().split(b"\0")
                if int(folder.name) != os.getpid() and any(
                    assignment in environment for assignment in assignments
                ):
                    os.kill(int(folder.name), signal.SIGKILL)
                    has_killed = True
        if not has_killed:
            return
