"""Threads that sample while the main thread updates.

The main thread copies the weights before the update donates them, and starts a thread. It asks for
the completions at the border of a step, so that what is sampled, by which policy, never depends on
which of the two was quicker.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future

from tpu_rl.rollout import signals
from tpu_rl.rollout.engine import Engine, RolloutRequest
from tpu_rl.rollout.scoring import Sampled
from tpu_rl.runtime import task_threads
from tpu_rl.types import Params


class SamplerThreads:
    """Sample several batches at once."""

    def __init__(self, engine: Engine, place: Callable[[Params], Params], most_at_once: int = 1):
        """Sample with an engine.

        Args:
            engine: what samples. It reads the copies as they are.
            place: the whole params tree -> copies of the weights that the engine reads.
            most_at_once: threads, each with one batch at a time.
        """
        self._engine = engine
        self._place = place
        self._latest: deque[Future[Sampled]] = deque(maxlen=most_at_once)
        self._names = itertools.cycle(f"sampler {number}" for number in range(most_at_once))
        self._cancelled = threading.Event()

    def start(self, params: Params, request: RolloutRequest) -> Future[Sampled]:
        """Begin to sample, as soon as a thread is free.

        Return once the copies are under way: the params may be donated then. The future has the
        completions, or raises whatever ended the sampling.
        """
        if len(self._latest) == self._latest.maxlen:
            futures.wait([self._latest[0]])
        placed = self._place(params)
        engine = self._engine
        cancelled = self._cancelled

        def sample() -> Sampled:
            with signals.in_background(cancelled):
                return engine.generate(placed, request)

        self._latest.append(task_threads.submit(next(self._names), sample))
        return self._latest[-1]

    def cancel(self) -> None:
        """End what is under way early, and return once it has ended."""
        self._cancelled.set()
        futures.wait(self._latest)
        self._latest.clear()
        self._cancelled.clear()
