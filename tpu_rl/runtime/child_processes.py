"""Process groups that this process has started, to kill before it ends abruptly."""

from __future__ import annotations

import contextlib
import os
import signal

groups: set[int] = set()
"""Ids of the process groups. A group contains a child and whatever the child starts."""


def kill_all() -> None:
    """Kill all groups. Call this before the process ends without cleaning up."""
    for group in list(groups):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
