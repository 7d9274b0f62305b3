"""A watchdog that ends a run that stands still.

A rollout, a reward, a collective or a disk may never answer. The run reports its progress at every
phase of a step (`mark`), and a thread watches, also while the main thread waits outside Python.
After too long without progress, the watchdog writes down what every thread was doing and ends the
process with exit code 75, so that a scheduler starts the same command again.

The watching thread needs Python's interpreter lock. Code may hold that lock forever: for example, a
regular expression with exponential backtracking in a reward function that has no process of its
own. Then faulthandler's thread, which needs no lock, ends the process after twice the time, with
the stacks on stderr and exit code 1.
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

from tpu_rl import ranges
from tpu_rl.ranges import NotNegative
from tpu_rl.runtime import child_processes, process_group
from tpu_rl.runtime.stdio import write_error

STALLED = 75
"""Exit code: EX_TEMPFAIL, try again, as after a SIGTERM."""
STACKS = "stacks.txt"
"""The file in the run folder with the stacks of all threads."""
MAX_TICK_SECONDS = 5.0
"""The longest time between two looks at the progress."""
REPORT_SECONDS = 10.0
"""The time for writing the stacks to the run folder, whose disk may be what stands still."""


@dataclass(frozen=True)
class WatchdogConfig(ranges.Checked):
    """The options of the watchdog."""

    FLAG = "--watchdog"
    minutes: NotNegative = 30.0
    """End a run after so many minutes without progress, with exit code 75; 0 waits forever.

    The longest legitimate silences are the first compilation of a large model's step and a
    checkpoint to a slow disk, which take minutes each.
    """


@dataclass
class _Progress:
    """The present activity of the process."""

    phase: str = ""
    marks: int = 0


_progress = _Progress()
"""One for the process, since the watchdog ends the process."""


def mark(phase: str) -> None:
    """Report progress: the run begins the named phase."""
    _progress.phase = phase
    beat()


def beat() -> None:
    """Report progress within the same phase, such as a segment of a rollout."""
    _progress.marks += 1


@contextmanager
def watch(config: WatchdogConfig, run_dir: Path, command: str) -> Iterator[None]:
    """End the process after `config.minutes` without progress in this context.

    Args:
      command: the command that resumes the run, for the message.
    """
    mark("the start")
    if not config.minutes:
        yield
        return
    has_ended = threading.Event()
    watcher = threading.Thread(
        target=_watch_progress,
        args=(60 * config.minutes, run_dir, command, has_ended),
        name="watchdog",
        daemon=True,
    )
    watcher.start()
    try:
        yield
    finally:
        has_ended.set()
        watcher.join()


def _watch_progress(limit: float, run_dir: Path, command: str, has_ended: threading.Event) -> None:
    """Add up the seconds since the last mark.

    Time in which this thread did not run either does not count: a run that was stopped with Ctrl-Z
    goes on.
    """
    tick = _tick_seconds(limit)
    marks = _progress.marks
    silence = 0.0
    has_warned = False
    last_look = time.monotonic()
    _arm_faulthandler(limit)
    while not has_ended.wait(tick):
        now = time.monotonic()
        silence += min(now - last_look, 2 * tick)
        last_look = now
        _arm_faulthandler(limit)
        if _progress.marks != marks:
            marks = _progress.marks
            silence = 0.0
            has_warned = False
        elif silence >= limit:
            _end(silence, limit, run_dir, command)
        elif silence >= limit / 2 and not has_warned:
            has_warned = True
            print(
                f"warning: {_duration(silence)} without progress at {_progress.phase}; the run is "
                f"ended after {_duration(limit)} (--watchdog.minutes)",
                file=sys.stderr,
            )
    faulthandler.cancel_dump_traceback_later()


def _tick_seconds(limit: float) -> float:
    """Return the seconds between two looks at the progress."""
    return min(limit / 10, MAX_TICK_SECONDS)


def _arm_faulthandler(limit: float) -> None:
    """Let faulthandler end the process, unless this is called again in time."""
    faulthandler.dump_traceback_later(2 * limit + REPORT_SECONDS, file=2, exit=True)


def _end(silence: float, limit: float, run_dir: Path, command: str) -> NoReturn:
    """Report the stall and end all processes, whatever fails meanwhile."""
    try:
        _report(silence, limit, run_dir, command)
        child_processes.kill_all()
    finally:
        os._exit(STALLED)


def _report(silence: float, limit: float, run_dir: Path, command: str) -> None:
    """Write the stacks to the run folder and to stderr, with one message for the whole run.

    Of several processes the first one prints the message, and all end here.
    """
    path = run_dir / STACKS
    header = (
        f"{time.strftime('%Y-%m-%d %H:%M:%S %z')}, host {socket.gethostname()}, pid {os.getpid()}: "
        f"{_duration(silence)} without progress at {_progress.phase}\n"
    )

    def write_stacks() -> None:
        # Append: several processes and jobs write below each other.
        with path.open("a", encoding="utf-8") as file:
            file.write(header)
            file.flush()
            faulthandler.dump_traceback(file)
            file.write("\n")

    is_written = _run_within(REPORT_SECONDS, write_stacks)
    where = path if is_written else f"above: {path} could not be written"
    message = (
        f"error: stalled at {_progress.phase}: no progress for {_duration(silence)}\n"
        f"  where: what every thread was doing: {where}\n"
        f"  fix: if it was only slow, --watchdog.minutes {2 * limit / 60:g}; 0 waits forever\n"
        f"  to go on: {command}"
    )
    delay = 2 * _tick_seconds(limit)  # Other stalled processes write their stacks meanwhile.

    def end_run() -> None:
        faulthandler.dump_traceback(2)
        process_group.end_all(message, STALLED, after=delay)
        write_error(f"{message}\n")

    _run_within(REPORT_SECONDS + delay, end_run)


def _run_within(seconds: float, action: Callable[[], None]) -> bool:
    """Run an action in a thread; return whether it ended in time and without an OSError."""
    has_ended = threading.Event()
    errors: list[OSError] = []

    def run() -> None:
        try:
            action()
        except OSError as error:
            errors.append(error)
        has_ended.set()

    threading.Thread(target=run, daemon=True).start()
    return has_ended.wait(seconds) and not errors


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
