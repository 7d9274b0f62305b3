"""SIGTERM, which machines that are about to be taken away send, and Ctrl-C: the run saves its last whole step and ends;
at once where it has taken none, as while its programs are compiled.

Python runs handlers of its own between two bytecodes only, and so not while a program compiles or runs on the device.
The kernel's side of `signal.set_wakeup_fd` does not wait for that: a thread reads there what came.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from launch.output import write_error
from tpu_rl import processes
from tpu_rl.errors import TpuRlError

AT_ONCE = 128 + signal.SIGTERM
"""Exit code after a second SIGTERM: what shells call a process that it ended."""
INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C."""


class Preempted(TpuRlError):
    """The run was told to end; what it had done is saved."""

    code = 75
    """After a SIGTERM: it tells schedulers to try again (EX_TEMPFAIL)."""

    def __init__(self, text: str, code: int = code):
        super().__init__(text)
        self.code = code


class Asked(Exception):
    """The run was told to end before a step, or in the midst of drawing its experience: on all its processes."""

    def __init__(self, code: int):
        """The exit code that it shall end with."""
        super().__init__(code)
        self.code = code


class Signals:
    """What came in so far."""

    def __init__(self):
        self.terminate = threading.Event()
        self.has_begun = threading.Event()
        """This process has taken a step: there is something to save, which a border must be waited for."""
        self.code = Preempted.code
        """Of what has told this process to end."""

    @contextmanager
    def at_borders(self) -> Iterator[None]:
        """Raises `Asked` if the run was told to end, at the beginning and, while this lasts, at each `border`."""
        _asking.append(self)
        try:
            border()
            yield
        finally:
            _asking.pop()

    def on_interrupt(self, number: int, frame: object) -> None:
        """What Ctrl-C calls."""
        if not self.has_begun.is_set() or self.terminate.is_set():
            raise KeyboardInterrupt
        self.code = INTERRUPTED
        self.terminate.set()
        # Python may be in the midst of a print.
        write_error("\nCtrl-C: the run ends, saved, after this step; a second one ends it at once\n")

    def requested(self) -> bool:
        """Whether any process of the run was told to end. All of them ask at the border of the same step."""
        return processes.any_of(self.terminate.is_set())


def border() -> None:
    """Between two segments of a rollout: raises `Asked` where the run was told to end and nothing is lost by it."""
    if _asking and _asking[-1].requested():
        raise Asked(max(processes.gather(_asking[-1].code)))


_asking: list[Signals] = []


@contextmanager
def watch(leave: Callable[[], None] | None = None) -> Iterator[Signals]:
    """From here on a SIGTERM is only noted; a second one ends the process at once. Only the main thread can watch.

    One that comes before `Signals.has_begun` calls `leave`, if given, in a thread: it ends the process. Ctrl-C is noted
    after that only, and a second one is a KeyboardInterrupt as ever.
    """
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    reader = threading.Thread(target=_read, args=(reading, signals, leave), name="signals", daemon=True)
    reader.start()
    handler_before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # in the background it is ignored
    if interrupts:
        signal.signal(signal.SIGINT, signals.on_interrupt)
    wakeup_before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    _watched.append(os.getpid())
    try:
        yield signals
    finally:
        _watched.pop()
        signal.set_wakeup_fd(wakeup_before)
        signal.signal(signal.SIGTERM, handler_before)
        if interrupts:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        writing.close()
        reader.join()
        reading.close()


def _read(reading: socket.socket, signals: Signals, leave: Callable[[], None] | None) -> None:
    """Note each SIGTERM until the other end is closed."""
    is_second = False
    while received := reading.recv(1):
        if received[0] != signal.SIGTERM:
            continue
        if is_second:
            write_error("SIGTERM again: ended at once\n")
            os._exit(AT_ONCE)
        is_second = True
        signals.terminate.set()
        if leave is not None and not signals.has_begun.is_set():
            threading.Thread(target=leave, name="leave", daemon=True).start()
            continue
        print("SIGTERM: the run ends, saved, after this step; a second one ends it at once", file=sys.stderr)


_watched: list[int] = []
"""Process ids that watch: this one, or none."""


_at_fork = threading.local()


def _hold_back() -> None:
    """From before a fork until each side has its own handlers: the child has the parent's for a moment."""
    _at_fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _let_come() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _at_fork.mask)


def _let_go_in_child() -> None:
    """A forked child has the parent's socket and handler: its own SIGTERM ends it, and is not taken for theirs."""
    if _watched:
        _watched.clear()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(signal.SIGINT, signal.default_int_handler)
    _let_come()


os.register_at_fork(before=_hold_back, after_in_parent=_let_come, after_in_child=_let_go_in_child)
