"""Ends a run that stands still: a rollout, a reward, a collective or a disk that never answers.

The run says where it is at every border of a step (`mark`); a thread of its own looks on, also while the main thread
waits outside Python. After too long a silence it writes down what every thread was doing and ends the process with exit
code 75, as a scheduler that starts the same command again expects.

A thread of Python's needs the interpreter's lock. Where code holds it for ever (a regular expression that explodes in a
reward function without a process of its own), faulthandler's thread, which needs none, ends the process after twice the
time with the stacks on stderr and exit code 1.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from launch import peers
from launch.output import write_error
from tpu_rl import reward_workers
from tpu_rl.errors import InputError

STALLED = 75
"""Exit code: try again (EX_TEMPFAIL), as after a SIGTERM."""
STACKS = "stacks.txt"
TICK = 5.0
"""Seconds between two looks, at most."""
LAST_WORDS = 10.0
"""Seconds for writing the stacks to the run folder, whose disk may be what stands still."""


@dataclass(frozen=True)
class WatchdogConfig:
    minutes: float = 30.0
    """A run without any progress for so long is ended with exit code 75; 0 lets it wait for ever.

    The longest honest silences are the first compilation of a large model's step and a checkpoint's way to a slow disk:
    minutes each. An idle machine costs no more than this half hour.
    """

    def __post_init__(self):
        if not self.minutes >= 0:
            fix = "use 0 for no watchdog, or more"
            raise InputError(f"a limit of {self.minutes} minutes", where="--watchdog.minutes", fix=fix)


@dataclass
class _Progress:
    """Where the process is. One for the process, as the watchdog's bite is."""

    what: str = ""
    marks: int = 0


_progress = _Progress()


def mark(what: str) -> None:
    """Progress: from here on the run is at `what`."""
    _progress.what = what
    beat()


def beat() -> None:
    """Progress, at the same thing: a segment of a rollout, a batch of many."""
    _progress.marks += 1


@contextmanager
def watch(config: WatchdogConfig, run_dir: Path, command: str) -> Iterator[None]:
    """While this lasts, `config.minutes` without a mark end the process. `command` goes on with the run."""
    mark("the start")
    if not config.minutes:
        yield
        return
    is_over = threading.Event()
    watcher = threading.Thread(
        target=_look_on, args=(60 * config.minutes, run_dir, command, is_over), name="watchdog", daemon=True
    )
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()


def _look_on(limit: float, run_dir: Path, command: str, is_over: threading.Event) -> None:
    """Adds up the silence since the last mark.

    Time in which this thread did not run either is not silence: a run that was stopped (Ctrl-Z) goes on.
    """
    tick = _tick(limit)
    marks, silence, looked, warned = _progress.marks, 0.0, time.monotonic(), False
    _bite_without_the_interpreter(limit)
    while not is_over.wait(tick):
        now = time.monotonic()
        passed, looked = now - looked, now
        silence += min(passed, 2 * tick)
        _bite_without_the_interpreter(limit)
        if _progress.marks != marks:
            marks, silence, warned = _progress.marks, 0.0, False
        elif silence >= limit:
            _end(silence, limit, run_dir, command)
        elif silence >= limit / 2 and not warned:
            warned = True
            left = f"the run is ended after {_minutes(limit)} (--watchdog.minutes)"
            print(f"warning: {_minutes(silence)} without progress at {_progress.what}; {left}", file=sys.stderr)
    faulthandler.cancel_dump_traceback_later()


def _tick(limit: float) -> float:
    """Seconds between two looks."""
    return min(limit / 10, TICK)


def _bite_without_the_interpreter(limit: float) -> None:
    """From now on, unless this is said again in time."""
    faulthandler.dump_traceback_later(2 * limit + LAST_WORDS, file=2, exit=True)


def _end(silence: float, limit: float, run_dir: Path, command: str) -> NoReturn:
    """The stacks of all threads, one message, and the end of all processes, whatever comes in between."""
    try:
        _report(silence, limit, run_dir, command)
        reward_workers.kill_all()
    finally:
        os._exit(STALLED)


def _report(silence: float, limit: float, run_dir: Path, command: str) -> None:
    """To stderr, the stacks also to the run folder. Of several processes the first says it, and all end here."""
    path = run_dir / STACKS
    head = f"{time.strftime('%Y-%m-%d %H:%M:%S %z')}, host {socket.gethostname()}, pid {os.getpid()}: "
    head += f"{_minutes(silence)} without progress at {_progress.what}\n"

    def keep() -> None:
        with path.open("a", encoding="utf-8") as file:  # of several processes and jobs, each below the others
            file.write(head)
            file.flush()
            faulthandler.dump_traceback(file)
            file.write("\n")

    where = path if _within(LAST_WORDS, keep) else f"above: {path} could not be written"
    message = (
        f"error: stalled at {_progress.what}: no progress for {_minutes(silence)}\n"
        f"  where: what every thread was doing: {where}\n"
        f"  fix: if it was only slow, --watchdog.minutes {2 * limit / 60:g}; 0 waits for ever\n"
        f"  to go on: {command}"
    )
    others = 2 * _tick(limit)  # until those that stand still too have kept their stacks

    def tell() -> None:
        faulthandler.dump_traceback(2)
        peers.end_all(message, STALLED, after=others)
        write_error(f"{message}\n")

    _within(LAST_WORDS + others, tell)


def _within(seconds: float, action: Callable[[], None]) -> bool:
    """Whether the action was done in time and without an error of the system's."""
    is_over, faults = threading.Event(), []

    def act() -> None:
        try:
            action()
        except OSError as error:
            faults.append(error)
        is_over.set()

    threading.Thread(target=act, daemon=True).start()
    return is_over.wait(seconds) and not faults


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
