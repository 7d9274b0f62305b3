"""A thread that samples on devices of its own, while the main thread updates on the others.

The main thread copies the weights to the sampler's devices before the update donates them, and
starts the thread. It asks for the completions at the border of a step, so that what is sampled, by
which policy, never depends on which of the two was quicker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future

from tpu_rl.rollout import signals
from tpu_rl.rollout.engine import Engine, RolloutRequest
from tpu_rl.rollout.scoring import Sampled
from tpu_rl.runtime import task_threads
from tpu_rl.types import Params


class SamplerThread:
    """Samples one batch at a time."""

    def __init__(self, engine: Engine, place: Callable[[Params], Params]):
        """Sample with an engine.

        Args:
            engine: what samples.
            place: the whole params tree -> copies of the weights that the engine reads, on the
                sampler's devices.
        """
        self._engine = engine
        self._place = place
        self._future: Future[Sampled] | None = None
        self._cancelled = threading.Event()

    def start(self, params: Params, request: RolloutRequest) -> None:
        """Begin to sample. Return once the copies are under way: the params may be donated then."""
        placed = self._place(params)
        engine = self._engine
        cancelled = self._cancelled

        def sample() -> Sampled:
            with signals.in_background(cancelled):
                return engine.generate(placed, request)

        self._future = task_threads.submit("sampler", sample)

    def wait(self) -> Sampled | None:
        """Return the completions of `start`, once they are complete; None if nothing was begun.

        Raises whatever ended the sampling.
        """
        future = self._future
        self._future = None
        return None if future is None else future.result()

    def cancel(self) -> None:
        """Drop what was begun, and return once it has ended."""
        if self._future is None:
            return
        self._cancelled.set()
        futures.wait([self._future])
        self._cancelled.clear()
        future = self._future
        self._future = None
        if future.exception() is None:
            future.result().cancel_rewards()
