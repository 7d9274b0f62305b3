"""Collective decisions of the processes of one run.

All processes must start the same programs in the same order, or they wait for each other forever.
Therefore every value that decides what runs next and may differ between processes (a signal, a
clock, a file, a reward) goes through this module first. All processes call these functions at the
same place, in their main threads or, with a channel, in one other. A run on one process pays
nothing.

Values travel through the key-value service that `jax.distributed` runs on the first process, not
through the devices. So they can be exchanged before any device is claimed and while devices are
busy.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

# The client of the service has no public name; Orbax takes it from the same place.
from jax._src import distributed

T = TypeVar("T")

FOREVER_MS = 7 * 24 * 3600 * 1000
"""Milliseconds to wait for the other processes, which may be compiling or scoring. That a process
is gone is detected by `process_group`."""

_exchanges: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
"""Channel -> numbers of the calls of `gather` there; the processes of a run number them alike."""


def count() -> int:
    """Return the number of processes of the run. Touches no device."""
    state = distributed.global_state
    return state.num_processes if state.client is not None else 1


def index() -> int:
    """Return the index of this process; 0 is the first, which writes for all. Touches no device."""
    state = distributed.global_state
    return state.process_id if state.client is not None else 0


def service() -> Any:
    """Return JAX's client of the service on the first process: keys with values, and barriers."""
    return distributed.global_state.client


def gather(value: Any, channel: str = "meeting") -> list[Any]:
    """Return the JSON values of all processes, by index, on every process.

    This is also a barrier: it returns on no process before all have called it.

    Args:
        channel: the name of the thread that calls, if it is not the main one: each thread has
            exchanges of its own.
    """
    if count() == 1:
        return [value]
    client = service()
    folder = f"tpu_rl/{channel}"
    number = next(_exchanges[channel])
    client.key_value_set(f"{folder}/{number}/{index()}", json.dumps(value))
    client.wait_at_barrier(f"{folder}/{number}", FOREVER_MS)
    values = dict(client.key_value_dir_get(f"{folder}/{number}/"))
    if number:  # Every process has read the previous exchange, since it takes part in this one.
        client.key_value_delete(f"{folder}/{number - 1}/{index()}")
    return [json.loads(values[f"{folder}/{number}/{process}"]) for process in range(count())]


def any_of(value: bool) -> bool:
    """Return True if the value is true on any process."""
    return any(gather(bool(value)))


def from_first(make: Callable[[], T]) -> T:
    """Call `make` on the first process only, and return its result on all.

    The result must be a JSON value.
    """
    return gather(make() if index() == 0 else None)[0]


def share(items: int) -> slice:
    """Return the slice of `items` items that belongs to this process.

    Each item belongs to exactly one process.
    """
    start = items * index() // count()
    stop = items * (index() + 1) // count()
    return slice(start, stop)
