"""Signals between a rollout and the run: the watchdog is told, and requests to stop are heard."""

from __future__ import annotations

from tpu_rl.runtime import preemption, watchdog
from tpu_rl.types import Purpose


def between_segments() -> None:
    """Tell the watchdog that decoding goes on, and end the rollout if the run was told to stop."""
    watchdog.beat()
    preemption.stop_if_requested()


def mark(purpose: Purpose, activity: str, step: int) -> None:
    """Tell the watchdog what the run does now. Evaluations are marked by whoever starts them."""
    if purpose is not Purpose.EVALUATION:
        watchdog.mark(f"the {activity} of step {step}")
