"""What the processes of one run decide together.

Which program runs next must be the same on all of them, or they wait for each other for ever: so whatever decides it
and may differ (a signal, a clock, a file, a reward) goes through here first. Every process calls these at the same
place, in its main thread. One process alone pays nothing.

Values travel through the service that `jax.distributed` runs on the first process, not through the devices: so they do
before any device is claimed, and whatever the devices are busy with.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any, TypeVar

# The service's client has no public name; orbax takes it from the same place.
from jax._src import distributed

T = TypeVar("T")

FOREVER_MS = 7 * 24 * 3600 * 1000
"""Of waiting for the others, who may be compiling or scoring: that one of them is gone is found out by other means."""

_meetings = itertools.count()


def count() -> int:
    """How many processes the run has. Touches no device."""
    return distributed.global_state.num_processes if distributed.global_state.client is not None else 1


def index() -> int:
    """Which of them this one is, from 0, the first, which writes for all. Touches no device."""
    return distributed.global_state.process_id if distributed.global_state.client is not None else 0


def service() -> Any:
    """jax's client of the service that the first process runs: keys with values, and barriers."""
    return distributed.global_state.client


def gather(value: Any) -> list[Any]:
    """A JSON value of each process -> all of them, by index, on every process.

    Returns on none before all have called it, so that it is a barrier too.
    """
    if count() == 1:
        return [value]
    client, number = service(), next(_meetings)
    client.key_value_set(_place(number, index()), json.dumps(value))
    client.wait_at_barrier(f"tpu_rl/meeting/{number}", FOREVER_MS)
    found = dict(client.key_value_dir_get(f"tpu_rl/meeting/{number}/"))
    if number:  # all have read what was there before: they are here
        client.key_value_delete(_place(number - 1, index()))
    return [json.loads(found[_place(number, process)]) for process in range(count())]


def _place(number: int, process: int) -> str:
    return f"tpu_rl/meeting/{number}/{process}"


def any_of(here: bool) -> bool:
    """Whether it is so on any process."""
    return any(gather(bool(here)))


def from_first(make: Callable[[], T]) -> T:
    """What `make` returns on the first process, the only one that calls it: a JSON value."""
    return gather(make() if index() == 0 else None)[0]


def share(items: int) -> slice:
    """Of so many items, those that this process has to do; each belongs to exactly one process."""
    ends = [items * process // count() for process in (index(), index() + 1)]
    return slice(*ends)
