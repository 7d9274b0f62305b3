"""One job at a time in a run folder: a second one is refused with who holds it.

The lock is the kernel's (POSIX record locks, fcntl): of any number of simultaneous starters it lets in exactly one, and
it is gone the moment its holder is, however that died, so that nothing stale has to be recognised, and a child that
outlives the holder does not keep it. What the file says is only for people. Over NFS it holds between hosts; where a
file system's locks do not reach other hosts (gcsfuse), it protects from a second job on the same host only.

This module imports neither jax nor anything else that takes time.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from tpu_rl.errors import InputError, MachineError

LOCK_FILE = "run.lock"
_PATIENCE = 1.0
"""Seconds in which a holder that has just got the lock writes who it is."""


@contextmanager
def hold(run_dir: Path) -> Iterator[None]:
    """Make the folder and hold its lock. Raises InputError, within about a second, if another process does, and
    MachineError where there is no writing."""
    path = run_dir / LOCK_FILE
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        why, fix = error.strerror or str(error), "use another --run-dir"
        raise MachineError("the run folder cannot be written", where=str(run_dir), why=why, fix=fix) from error
    with os.fdopen(descriptor, "r+", encoding="utf-8") as file:
        _acquire(path, file)
        started = time.strftime("%Y-%m-%d %H:%M:%S %z")
        _write(file, json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": started}) + "\n")
        try:
            yield
        finally:
            _write(file, "")  # the file stays: to delete it would let two in who opened it before and after


def _acquire(path: Path, file: TextIO) -> None:
    """Lock the file, or raise InputError with its holder, whom it waits for to say who it is."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                print(f"warning: {path} cannot be locked ({error.strerror}): start no second job here", file=sys.stderr)
                return
        holder = _read(file)
        if holder is not None or time.monotonic() > deadline:
            who = "host {host}, pid {pid}, since {started}".format(**holder) if holder else "it has not said who it is"
            raise InputError(
                "another job is working in this run folder",
                where=str(path.parent),
                why=who,
                fix="wait for it or end it, or use another --run-dir",
            )
        time.sleep(0.02)


def _read(file: TextIO) -> dict[str, Any] | None:
    """Who holds the lock, or None where that does not stand there yet: nothing, half of it, or a dead one before."""
    file.seek(0)
    try:
        holder = json.loads(file.read())
        return holder if holder["host"] != socket.gethostname() or _is_alive(int(holder["pid"])) else None
    except (ValueError, KeyError, TypeError):
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _write(file: TextIO, text: str) -> None:
    file.seek(0)
    file.truncate()
    file.write(text)
    file.flush()
