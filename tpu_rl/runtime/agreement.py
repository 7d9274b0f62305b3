"""Checks that the processes of one run agree before they start.

Processes that disagree wait for each other forever or train different models. Each check is
collective: all processes call it at the same place, and it raises the same error on all of them.
A run on one process pays nothing.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tpu_rl.errors import InputError
from tpu_rl.runtime import processes

SHARED_FOLDER_SECONDS = 30.0
"""Seconds to wait until every host sees a new file: NFS clients may cache a listing that long."""

MOST_DIFFERENCES = 5
"""The number of differences that an error message lists."""


def require_equal(settings: Mapping[str, str]) -> None:
    """Raise InputError on all processes if any process has other settings than the first.

    Args:
      settings: name -> value on this process. Short values read best in the error message.
    """
    if processes.count() == 1:
        return
    gathered = processes.gather({"host": socket.gethostname(), "settings": dict(settings)})
    for index, other in enumerate(gathered):
        lines = differences(gathered[0]["settings"], other["settings"])
        if not lines:
            continue
        shown = "; ".join(lines[:MOST_DIFFERENCES])
        hidden = len(lines) - MOST_DIFFERENCES
        raise InputError(
            "the processes of this run differ",
            where=f"process {index} on host {other['host']}",
            why=shown + (f"; and {hidden} more" if hidden > 0 else ""),
            fix="start every process with the same command, the same files, code and packages",
        )


def differences(first: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return one line for each setting of `other` that differs from `first`."""

    def shown(settings: Mapping[str, str], name: str) -> str:
        return settings[name][:60] if name in settings else "missing"

    return [
        f"{name} is {shown(other, name)} there and {shown(first, name)} on the first"
        for name in {**first, **other}
        if first.get(name) != other.get(name)
    ]


def require_shared_folder(run_dir: Path) -> None:
    """Raise InputError if any process does not see the run folder of the first process."""
    if processes.count() == 1:
        return
    name = processes.from_first(lambda: f".shared_{secrets.token_hex(8)}")
    probe = run_dir / name
    if processes.index() == 0:
        probe.touch()
    processes.gather(None)
    deadline = time.monotonic() + SHARED_FOLDER_SECONDS
    while not probe.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    gathered = processes.gather({"host": socket.gethostname(), "seen": probe.exists()})
    if processes.index() == 0:
        probe.unlink()
    hosts = [answer["host"] for answer in gathered if not answer["seen"]]
    if hosts:
        raise InputError(
            "the run folder is not the same folder on all hosts",
            where=str(run_dir.absolute()),
            why=f"not seen on {', '.join(hosts[:8])}: every process writes its part of the "
            "checkpoints into it",
            fix="give a --run-dir on storage that all hosts share "
            "(docs/how-to/several_processes.md)",
        )
