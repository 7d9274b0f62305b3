"""Stop a run on SIGTERM, which preempted machines send, or on Ctrl-C.

The run saves its last complete step and ends. If it has not taken a step yet, as while its programs
compile, it ends at once.

Python runs its own signal handlers only between two bytecodes, so not while a program compiles or
runs on a device. The kernel's side of `signal.set_wakeup_fd` does not wait for that: a thread reads
there which signals came.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tpu_rl.errors import TpuRlError
from tpu_rl.runtime import processes
from tpu_rl.runtime.stdio import write_error

TERMINATED = 128 + signal.SIGTERM
"""Exit code after a second SIGTERM: what shells report for a process that the signal ended."""
ONE_REQUEST_SECONDS = 1.0
"""A SIGTERM so soon after the first one is the same request: `timeout` and some schedulers signal a
process and then its group."""
INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C."""


class Preempted(TpuRlError):
    """The run was told to end, and what it had done is saved."""

    code = 75
    """Exit code after a SIGTERM: EX_TEMPFAIL, which tells schedulers to try again."""

    def __init__(self, text: str, code: int = code):
        super().__init__(text)
        self.code = code


class StopRequested(Exception):
    """The run was told to end, before a step or while it samples experience.

    All processes of the run raise this together.
    """

    def __init__(self, code: int):
        """`code` is the exit code that the run shall end with."""
        super().__init__(code)
        self.code = code


class Signals:
    """The signals that this process has received."""

    def __init__(self):
        self.stop = threading.Event()
        """This process was told to end."""
        self.has_stepped = threading.Event()
        """This process has taken a step, so there is something to save before it ends."""
        self.code = Preempted.code
        """The exit code for the signal that told this process to end."""

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """Let `stop_if_requested` raise StopRequested within this context.

        The context itself calls it at its beginning.
        """
        _stoppable.append(self)
        try:
            stop_if_requested()
            yield
        finally:
            _stoppable.pop()

    def on_interrupt(self, number: int, frame: object) -> None:
        """Handle Ctrl-C, as a signal handler."""
        if not self.has_stepped.is_set() or self.stop.is_set():
            raise KeyboardInterrupt
        self.code = INTERRUPTED
        self.stop.set()
        # Not `print`: Python may be in the middle of one.
        write_error(
            "\nCtrl-C: the run ends, saved, after this step; a second one ends it at once\n"
        )

    def requested(self) -> bool:
        """Return True if any process of the run was told to end.

        All processes call this at the same place of the same step.
        """
        return processes.any_of(self.stop.is_set())


_stoppable: list[Signals] = []
"""The signals of the innermost `Signals.stoppable` context come last."""


def stop_if_requested() -> None:
    """Raise StopRequested if the run was told to end and loses nothing by ending here.

    Does nothing outside `Signals.stoppable`. A rollout calls it between two segments.
    """
    if _stoppable and _stoppable[-1].requested():
        raise StopRequested(max(processes.gather(_stoppable[-1].code)))


@contextmanager
def watch(leave: Callable[[], None] | None = None) -> Iterator[Signals]:
    """Record SIGTERM and Ctrl-C in the `Signals` that this yields, in place of ending the process.

    A SIGTERM more than `ONE_REQUEST_SECONDS` after the first ends the process at once; a second
    Ctrl-C is a KeyboardInterrupt. Ctrl-C is recorded only once `Signals.has_stepped` is set. Only
    the main thread can watch; in other threads this does nothing.

    Args:
      leave: ends the process; called in a thread if a SIGTERM comes before `Signals.has_stepped`.
    """
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    reader = threading.Thread(
        target=_read, args=(receiver, signals, leave), name="signals", daemon=True
    )
    reader.start()
    handler_before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    # A process in the background ignores SIGINT, and keeps ignoring it.
    handles_interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if handles_interrupts:
        signal.signal(signal.SIGINT, signals.on_interrupt)
    wakeup_before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    _watching_pids.append(os.getpid())
    try:
        yield signals
    finally:
        _watching_pids.pop()
        signal.set_wakeup_fd(wakeup_before)
        signal.signal(signal.SIGTERM, handler_before)
        if handles_interrupts:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        sender.close()
        reader.join()
        receiver.close()


def _read(receiver: socket.socket, signals: Signals, leave: Callable[[], None] | None) -> None:
    """Record each SIGTERM until the other end of the socket is closed."""
    first_at: float | None = None
    while received := receiver.recv(1):
        if received[0] != signal.SIGTERM:
            continue
        now = time.monotonic()
        if first_at is not None:
            if now - first_at < ONE_REQUEST_SECONDS:
                continue
            write_error("SIGTERM again: ended at once\n")
            os._exit(TERMINATED)
        first_at = now
        signals.stop.set()
        if leave is not None and not signals.has_stepped.is_set():
            threading.Thread(target=leave, name="leave", daemon=True).start()
        else:
            print(
                "SIGTERM: the run ends, saved, after this step; a second one ends it at once",
                file=sys.stderr,
            )


# --- forks ---

_watching_pids: list[int] = []
"""The id of this process if it watches, else empty."""

_at_fork = threading.local()


def _before_fork() -> None:
    """Block SIGTERM until each side has its own handlers; the child begins with the parent's."""
    _at_fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork_in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _at_fork.mask)


def _after_fork_in_child() -> None:
    """Restore the default handlers, so that the child's SIGTERM ends it and not the run.

    The child has the parent's socket and would otherwise write to it.
    """
    if _watching_pids:
        _watching_pids.clear()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, _at_fork.mask)


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
