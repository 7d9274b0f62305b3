"""Worker processes for reward functions of the user, which may crash, hang or print anything.

Every call has a deadline. If a worker misses it, or dies, it is killed with all that it started,
and started again for the next call. One that has filled its memory over several calls is replaced,
and the call is repeated. It answers in JSON, which is checked. What it prints goes to
stderr, up to a limit. Nothing that it does can end the run.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import pickle
import queue
import struct
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tpu_rl import ranges
from tpu_rl.errors import InputError, MachineError
from tpu_rl.ranges import NotNegative, Positive, Share
from tpu_rl.rewards import worker_process
from tpu_rl.rewards.worker_process import RewardFailure
from tpu_rl.runtime import workers

START_SECONDS = 120.0
"""Time for a reward file to load, because it may import large packages."""
MAX_VALUE_BYTES = 1 << 16
"""Bytes of a reply, per completion: an error with its frames, or some thousand segments."""


@dataclass(frozen=True)
class RewardLimits(ranges.Checked):
    """Limits of FILE.py:function rewards."""

    FLAG = "--reward-limits"

    isolate: bool = True
    """Run the function in a process of its own. Without it, the function shares the run's process,
    and only fault_share applies."""
    batch_seconds: Positive = 300.0
    """Time for the rewards of one batch; up to twice as long if groups are scored as they end. A
    call that has not returned after half of its time is stopped and repeated row by row."""
    row_seconds: Positive = 10.0
    """Time for one completion, if the function is called row by row."""
    memory_gb: NotNegative = 8.0
    """Address space of the process; 0 for no limit."""
    fault_share: Share = 0.5
    """Stop the run if rewards fail on more than this share of a batch's completions."""


class Worker:
    """A process that runs one function of a file.

    It starts with the object, and again after it was killed. On Linux it also ends with the thread
    that started it, so that none outlives a trainer that was killed.
    """

    def __init__(self, path: str, memory_bytes: int = 0):
        """Start the process.

        Args:
            path: "file.py:function".

        Raises:
            InputError: if the file does not load.
        """
        self.path = path
        self._memory_bytes = memory_bytes
        self._output = workers.Output("a reward function")
        self._numbers = itertools.count()
        self._process, parameters = self._start(START_SECONDS)
        self.parameters = _parameters(parameters)

    def call(
        self, arguments: dict[str, list[Any]], size: int, seconds: float, deadline: float = math.inf
    ) -> list[Any] | RewardFailure:
        """Call the function and return its values, or the reason why there are none.

        Args:
            arguments: keyword arguments; each list has one entry per completion.
            seconds: time for the call. The start of a process does not count.
            deadline: absolute limit for everything, of time.monotonic().

        Returns:
            `size` values, each a float, None, or a RewardFailure of that completion alone; or a
            RewardFailure of the whole call.
        """
        was_used = self._size_after_first > 0
        values = self._ask(arguments, size, seconds, deadline)
        # A function that leaks has filled its process, and not these completions.
        is_full = self._no_memory or (was_used and self._process.popen.poll() not in (None, 0))
        if isinstance(values, RewardFailure) and was_used and is_full:
            self.stop()
            values = self._ask(arguments, size, seconds, deadline)
        if self._is_nearly_full():
            self.stop()
        return values

    def _ask(
        self, arguments: dict[str, list[Any]], size: int, seconds: float, deadline: float
    ) -> list[Any] | RewardFailure:
        """Call the function once, in a new process if the last one has ended."""
        if self._process.popen.poll() is not None:
            self.stop()
            try:
                self._process, _ = self._start(min(START_SECONDS, deadline - time.monotonic()))
            except (InputError, MachineError) as error:
                return RewardFailure(f"its process does not start again: {error.what}: {error.why}")
        began = time.monotonic()
        seconds = max(min(seconds, deadline - began), 0)
        deadline = began + seconds
        number = next(self._numbers)
        request = pickle.dumps((number, arguments, size))
        process = self._process
        values = None
        try:
            if workers.write(process, struct.pack("<Q", len(request)) + request, deadline):
                reply = self._reply(number, deadline, MAX_VALUE_BYTES * (size + 2))
                values = _checked(reply, size) if reply is not None else None
        except BaseException:
            # After Ctrl-C in a notebook, the reply would be read by the next call.
            self.stop()
            raise
        return self._end(seconds, deadline) if values is None else values

    def _reply(self, number: int, deadline: float, max_bytes: int) -> dict[str, Any] | None:
        """Return the reply with this number, None if there is none. Other frames are dropped.

        Those are not of this call: the function may write to any descriptor.
        """
        while frame := workers.read_frame(self._process, deadline, max_bytes):
            match workers.parsed(frame):
                case {"number": int() as found, "bytes": int() as size} as reply:
                    if found == number:
                        self._no_memory = reply.get("no_memory") is True
                        self._size = size
                        self._size_after_first = self._size_after_first or size
                        return reply
                case None:
                    return None
        return None

    def _is_nearly_full(self) -> bool:
        """Return True if the process has grown over half of the memory that it had left at first.

        The next call might hit the limit in the middle.
        """
        first = self._size_after_first
        return 0 < self._memory_bytes < 2 * self._size - first if first else False

    def stop(self) -> None:
        """End the process, and all that it started."""
        self._reaper()

    def _start(self, seconds: float) -> tuple[workers.Process, list[list[Any]] | None]:
        self._no_memory = False
        self._size = 0
        self._size_after_first = 0
        process = workers.spawn(worker_process.__file__, self._memory_bytes, [self.path])
        self._output.follow(process.popen)
        self._reaper = weakref.finalize(self, workers.reap, process)
        self._process = process
        types = {"parameters": list | None, "whole_batch": bool}
        try:
            reply = workers.loaded(process, self.path, "reward file", seconds, types)
        except BaseException:
            self.stop()
            raise
        self.whole_batch = reply["whole_batch"]
        return process, reply["parameters"]

    def _end(self, seconds: float, deadline: float) -> RewardFailure:
        """Kill a process that did not reply, and return what is known about the reason."""
        in_time = time.monotonic() < deadline
        reason, frames = workers.reason_of_end(self._process, self.path, seconds, in_time)
        self.stop()
        return RewardFailure(reason, "\n".join(frames[:6]))


class Pool:
    """Threads with a worker each, which all run one function of a file of this library."""

    def __init__(self, path: str, memory_bytes: int = 0, size: int = 4):
        """Start the workers; see `Worker`."""
        # A worker ends with the thread that starts it. These threads live as long as the pool.
        self._threads = ThreadPoolExecutor(size)
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._threads.map(lambda _: Worker(path, memory_bytes), range(size)):
            self._idle.put(worker)

    def map(
        self, requests: Sequence[dict[str, list[Any]]], seconds: Sequence[float]
    ) -> list[list[Any] | RewardFailure]:
        """Return the values of each request, each with its own time."""

        def answer(request: dict[str, list[Any]], request_seconds: float) -> Any:
            worker = self._idle.get()
            try:
                return worker.call(request, len(request["completions"]), request_seconds)
            finally:
                self._idle.put(worker)

        return list(self._threads.map(answer, requests, seconds))

    def stop(self) -> None:
        """End the workers that are idle."""
        while not self._idle.empty():
            self._idle.get().stop()


class IsolatedReward:
    """A reward function in a worker process.

    It is called for a whole batch, or a share of it, and row by row if that fails.
    """

    def __init__(self, path: str, limits: RewardLimits):
        """Start the worker. Raises InputError if the file does not load."""
        self._limits = limits
        self._seconds = limits.batch_seconds
        self._worker = Worker(path, int(limits.memory_gb * 2**30))
        self.whole_batch = self._worker.whole_batch
        """True if it must see all completions of a batch in one call."""
        self.parameters = self._worker.parameters
        """The function's parameters, by which callers check the columns that it needs."""

    def limited_to_share(self, share: float, seconds_spent: float = 0.0) -> IsolatedReward:
        """Return the same function in the same worker, with the time limit of a share of a batch.

        The limit is this share of the batch's time, which no other share can use up. As long as the
        batch has spent less than its time, the limit is at least three times that of one
        completion. Half of it is for the call with all completions, so that a slow but allowed
        completion is not stopped. All shares together take at most twice a batch's time.

        Args:
            share: from 0 to 1.
            seconds_spent: what the other shares of the batch have spent so far.
        """
        limits = self._limits
        limited = copy.copy(self)
        unspent = limits.batch_seconds - seconds_spent
        limited._seconds = max(share * limits.batch_seconds, min(3 * limits.row_seconds, unspent))
        return limited

    def __call__(self, *positional: list[Any], **columns: list[Any]) -> list[Any]:
        """Return one value per completion, a RewardFailure where there is none.

        Raises InputError if the function returns a wrong number of values.
        """
        arguments = dict(zip(("prompts", "completions"), positional, strict=False)) | columns
        size = len(next(iter(arguments.values()), []))
        deadline = time.monotonic() + self._seconds
        seconds = self._seconds if self.whole_batch else self._seconds / 2
        values = self._worker.call(arguments, size, seconds)
        if not isinstance(values, RewardFailure):
            return values
        whole_failure = values
        worker_process.require_right_count(self._worker.path, whole_failure)
        if self.whole_batch:
            # Called for some rows only, it would return other values.
            return [whole_failure] * size
        values = []
        for row in range(size):
            if time.monotonic() >= deadline:
                message = (
                    f"no time left of {self._seconds:.3g} s for {size} completions; "
                    f"first: {whole_failure}"
                )
                values += [RewardFailure(message, whole_failure.frames)] * (size - row)
                break
            row_arguments = {name: [column[row]] for name, column in arguments.items()}
            row_values = self._worker.call(row_arguments, 1, self._limits.row_seconds, deadline)
            if isinstance(row_values, RewardFailure):
                worker_process.require_right_count(self._worker.path, row_values)
                row_values = [row_values]
            values += row_values
        return values

    def stop(self) -> None:
        """End the worker."""
        self._worker.stop()


# --- replies ---


def _checked(reply: dict[str, Any], size: int) -> list[Any] | RewardFailure | None:
    """Return the content of a reply, or None if it is not a valid reply."""
    match reply:
        case {"failure": [str() as message, str() as frames]}:
            failure = RewardFailure(message, frames)
            failure.is_wrong_count = reply.get("is_wrong_count") is True
            return failure
        case {"values": list() as values} if len(values) == size:
            return [
                RewardFailure(str(value["fault"])) if isinstance(value, dict) else value
                for value in values
            ]
    return None


def _parameters(parameters: list[list[Any]] | None) -> list[inspect.Parameter] | None:
    """Return a function's parameters, with None for defaults, whose values are not known."""
    if parameters is None:
        return None
    empty = inspect.Parameter.empty
    kinds = {kind.name: kind for kind in type(inspect.Parameter.KEYWORD_ONLY)}
    return [
        inspect.Parameter(name, kinds[kind], default=None if has_default else empty)
        for name, kind, has_default in parameters
    ]
