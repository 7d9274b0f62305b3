"""A lock on a local run folder: one job at a time, and a second one learns who holds it.

The lock is a POSIX record lock of the kernel (fcntl). Of any number of simultaneous starters it
lets in exactly one, and it ends with its holder, however the holder died. Stale locks therefore do
not exist, and a child process that outlives the holder does not keep the lock. The content of the
file is only for people. If the file is deleted, its holder makes a new one at its next step, or
learns that another job has. Over NFS the lock holds between hosts. On file systems whose locks do
not reach other hosts (gcsfuse), it protects against a second job on the same host only.

This module imports neither JAX nor anything else that takes time.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from tpu_rl.errors import InputError, MachineError

LOCK_FILE = "run.lock"
_HOLDER_SECONDS = 1.0
"""Seconds to wait for a new holder to write its name into the file."""


@contextmanager
def hold(run_dir: Path) -> Iterator[Callable[[], None]]:
    """Create the folder if needed and hold its lock.

    Yields a function that returns only if this process still holds the lock. If someone has deleted
    the file, it locks a new one.

    Raises InputError, within about a second, if another process holds it, and MachineError if the
    folder cannot be written.
    """
    path = run_dir / LOCK_FILE
    with ExitStack() as opened:
        # All stay open: a lock ends when its process closes any handle of the file.
        files = [opened.enter_context(_locked(path))]

        def confirm() -> None:
            if not _is_at(files[-1], path):
                files.append(opened.enter_context(_locked(path)))
                print(f"warning: {path} was deleted: it is locked again", file=sys.stderr)

        try:
            yield confirm
        finally:
            # The file stays: if it were deleted, two jobs that opened it before and after could
            # both hold a lock.
            _write(files[-1], "")


def _locked(path: Path) -> TextIO:
    """Return the lock file, locked and with this process's name."""
    while True:
        file = _open(path)
        try:
            _acquire(path, file)
        except InputError:
            is_of_original = _is_linked(file) and _folder_of(file) not in (None, _folder(path))
            file.close()
            if not is_of_original:
                raise
            # A copy with hard links: the job works in the other folder.
            path.unlink(missing_ok=True)
            continue
        if _is_at(file, path) and not _is_linked(file):
            break
        if _is_at(file, path):
            path.unlink(missing_ok=True)
        file.close()  # It was deleted before it was locked.
    holder = this_process() | {"folder": _folder(path)}
    _write(file, json.dumps(holder) + "\n")
    return file


def require_writable(run_dir: Path) -> None:
    """Raise MachineError if the run folder cannot be made or written. It leaves no trace."""
    folder = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryDirectory(dir=folder):
            pass
    except OSError as error:
        raise _not_writable(run_dir, error) from error


def _not_writable(run_dir: Path, error: OSError) -> MachineError:
    return MachineError(
        "the run folder cannot be written",
        where=str(run_dir),
        why=error.strerror or str(error),
        fix="use another --run-dir",
    )


def _open(path: Path) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A link could make this truncate any file of the user.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        if path.is_symlink():
            raise InputError(
                "the lock of the run folder is a link",
                where=str(path),
                why="two folders would share a lock, or a file that is no lock would be emptied",
                fix="delete the link, or use another --run-dir",
            ) from error
        raise _not_writable(path.parent, error) from error
    return os.fdopen(descriptor, "r+", encoding="utf-8")


def _is_linked(file: TextIO) -> bool:
    """Return True if the lock file has another name, in a copy of the folder with hard links."""
    return os.fstat(file.fileno()).st_nlink > 1


def _folder(path: Path) -> str:
    return str(path.parent.resolve())


def _folder_of(file: TextIO) -> str | None:
    """Return the folder in which the holder of a lock works, if it says so."""
    return (_read(file) or {}).get("folder")


def _is_at(file: TextIO, path: Path) -> bool:
    """Return True if an open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except FileNotFoundError:
        return False


def _acquire(path: Path, file: TextIO) -> None:
    """Lock the file, or raise InputError that names the holder."""
    import fcntl

    deadline = time.monotonic() + _HOLDER_SECONDS
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                print(
                    f"warning: {path} cannot be locked ({error.strerror}): start no second job "
                    "here",
                    file=sys.stderr,
                )
                return
        holder = _read(file)
        if holder is not None or time.monotonic() > deadline:
            raise another_job(str(path.parent), holder or {})
        time.sleep(0.02)


def _read(file: TextIO) -> dict[str, Any] | None:
    """Return the holder that the file names.

    None if the holder has not written its name yet: the file is empty, half written, or names a
    dead process.
    """
    file.seek(0)
    try:
        holder = json.loads(file.read())
        is_here = holder["host"] == socket.gethostname()
        if is_here and not is_alive(int(holder["pid"])):
            return None
    except (ValueError, KeyError, TypeError):
        return None
    return holder


def this_process() -> dict[str, Any]:
    """Return the facts that a lock states about this process as its holder."""
    started = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": started}


def description(holder: dict[str, Any]) -> str:
    """Return who holds a lock, for messages; {}: nobody knows."""
    if holder.keys() >= {"host", "pid", "started"}:
        return "host {host}, pid {pid}, since {started}".format(**holder)
    return "it does not say who it is"


def another_job(where: str, holder: dict[str, Any]) -> InputError:
    """Return the error of a run folder whose lock is held."""
    return InputError(
        "another job is working in this run folder",
        where=where,
        why=description(holder),
        fix="wait for it or end it, or use another --run-dir",
    )


def is_alive(pid: int) -> bool:
    """Return True if there is a process of this machine with the id."""
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
