"""Signals between a rollout and the run: the watchdog is told, and requests to stop are heard."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tpu_rl.runtime import preemption, watchdog
from tpu_rl.types import Purpose

_cancelled: ContextVar[threading.Event | None] = ContextVar("cancelled", default=None)
"""The event that cancels the rollouts of this thread. None if a request to stop the run ends
them."""


class Cancelled(Exception):
    """Nobody wants the completions of a rollout in the background any more."""


@contextmanager
def in_background(cancelled: threading.Event) -> Iterator[None]:
    """Let rollouts of this thread end early only if `cancelled` is set.

    The run saves what they sample, so a request to stop waits for it.
    """
    token = _cancelled.set(cancelled)
    try:
        yield
    finally:
        _cancelled.reset(token)


def between_segments() -> None:
    """Tell the watchdog that decoding goes on, and end the rollout if nobody wants it."""
    watchdog.beat()
    cancelled = _cancelled.get()
    if cancelled is None:
        preemption.stop_if_requested()
    elif cancelled.is_set():
        raise Cancelled


def mark(purpose: Purpose, activity: str, step: int) -> None:
    """Tell the watchdog what the run does now.

    Evaluations are marked by whoever starts them; what the run does in the background is not.
    """
    if purpose is not Purpose.EVALUATION and _cancelled.get() is None:
        watchdog.mark(f"the {activity} of step {step}")
