"""A lock on a run folder in a bucket: one job at a time, and a second one learns who holds it.

The lock is an object that its holder rewrites every few seconds. A job that finds one watches it.
If it changes, its holder is alive and the job is refused. If it stays the same for a minute, its
holder is dead or cut off, and exactly one of the watching jobs takes it over, because the server
replaces an object only if it is still the version that was read. No clocks of two machines are
compared. A holder that ran on this machine and has ended is recognized at once.

A holder that loses the lock, having been cut off or stopped for a minute, learns so at its next
heartbeat and must end at once. It has done no harm by then, because neither published rows nor
checkpoints are ever overwritten.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tpu_rl.checkpoint import lock
from tpu_rl.errors import InputError, MachineError
from tpu_rl.storage.gcs import MARK, ObjectVersion, Store

LOCK = "run.lock"
HEARTBEAT_SECONDS = 5.0
"""Seconds between two heartbeats."""
TIMEOUT_SECONDS = 60.0
"""A holder without a heartbeat for so many seconds counts as dead."""

_held_tokens: set[str] = set()
"""The tokens of the locks that this process holds."""


@contextmanager
def hold(store: Store, on_lost: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Create the run folder if needed and hold its lock.

    Args:
      on_lost: called with a message if another job has taken the lock over, either by the
        heartbeat thread or by the function that this yields.

    Yields:
      A function that sends a heartbeat now and returns only if the lock is still held. Call it
      before publishing something that another job may not meet.

    Raises:
      InputError: another job holds the lock; known within seconds.
      MachineError: the folder cannot be written.
    """
    if store.read(MARK) is None:
        store.write(MARK, b"tpu_rl\n")
    holder = lock.this_process() | {"machine": machine_id(), "token": secrets.token_hex(8)}
    heartbeat = _Heartbeat(store, holder, _acquire(store, holder), on_lost)
    _held_tokens.add(holder["token"])
    heartbeat.start()
    try:
        # A store with long retries: publishing waits for a server that is away.
        yield partial(heartbeat.send, Store(store.address))
    finally:
        _held_tokens.discard(holder["token"])
        heartbeat.release()


def machine_id() -> str:
    """Return an id shared by exactly the processes that can see each other's process ids.

    It names this boot of this machine and the process namespace of this container; host names are
    not unique. Empty if the system does not tell.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _acquire(store: Store, holder: dict[str, Any]) -> ObjectVersion:
    """Write the lock and return its version, or raise InputError if another job holds it."""
    while True:
        seen = store.read_version(LOCK)
        if seen.content is not None and not _is_dead_local_process(_parse(seen)):
            seen = _watch(store, seen)
        acquired = store.write_if_unchanged(LOCK, _serialize(holder), seen)
        if acquired is not None:
            return acquired


def _watch(store: Store, seen: ObjectVersion) -> ObjectVersion:
    """Return the lock once it is released or its holder counts as dead.

    Raises InputError if the holder is alive.
    """
    owner = lock.description(_parse(seen))
    print(
        f"{store.address}: locked by {owner}; watching for up to {TIMEOUT_SECONDS:.0f} s whether "
        "it is alive",
        file=sys.stderr,
    )
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        time.sleep(min(HEARTBEAT_SECONDS / 5, 1.0))
        latest = store.read_version(LOCK)
        if latest.content is None:
            return latest
        if latest.generation != seen.generation:
            raise lock.another_job(store.address, _parse(latest))
    print(
        f"warning: {owner} has given no sign of life for {TIMEOUT_SECONDS:.0f} s: its lock is "
        "taken over",
        file=sys.stderr,
    )
    return seen


class _Heartbeat(threading.Thread):
    """A thread that rewrites the lock as long as it is held."""

    def __init__(
        self,
        store: Store,
        holder: dict[str, Any],
        acquired: ObjectVersion,
        on_lost: Callable[[str], None],
    ):
        super().__init__(name="lock", daemon=True)
        self._store = store
        self._holder = holder
        self._version = acquired
        self._on_lost = on_lost
        self._has_ended = threading.Event()
        self._mutex = threading.Lock()

    def run(self) -> None:
        while not self._has_ended.wait(HEARTBEAT_SECONDS):
            try:
                self.send(self._store)
            except InputError:
                return  # `on_lost` was called.
            except MachineError:
                # The server is away. If another job takes the lock meanwhile, a later heartbeat
                # notices.
                continue

    def send(self, store: Store) -> None:
        """Rewrite the lock.

        Raises InputError if the lock is lost, MachineError if the server is away.
        """
        with self._mutex:
            new = store.write_if_unchanged(LOCK, _serialize(self._holder), self._version)
            if new is None:
                new = store.read_version(LOCK)
                # If the answer to a write got lost, tensorstore repeats the request. It then fails
                # because of the object that this thread has written itself.
                if _parse(new).get("token") != self._holder["token"]:
                    self._has_ended.set()
                    owner = lock.description(_parse(new))
                    message = f"another job has taken this run folder over: {owner}"
                    self._on_lost(message)
                    raise InputError(message, where=store.address, fix="end one of the two jobs")
            self._version = new

    def release(self) -> None:
        """Stop the thread and delete the lock if it is still held."""
        self._has_ended.set()
        self.join()
        try:
            if self._store.write_if_unchanged(LOCK, None, self._version) is not None:
                return
            # The answer to the last heartbeat may have been lost.
            seen = self._store.read_version(LOCK)
            if _parse(seen).get("token") == self._holder["token"]:
                self._store.write_if_unchanged(LOCK, None, seen)
        except MachineError as error:
            print(
                f"warning: the lock of {self._store.address} is left behind: {error.why}",
                file=sys.stderr,
            )


def _serialize(holder: dict[str, Any]) -> bytes:
    return (json.dumps(holder | {"alive": time.strftime("%Y-%m-%d %H:%M:%S %z")}) + "\n").encode()


def _parse(seen: ObjectVersion) -> dict[str, Any]:
    """Return the holder that a lock names, or an empty dict if the lock cannot be read."""
    try:
        holder = json.loads(seen.content or b"{}")
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _is_dead_local_process(holder: dict[str, Any]) -> bool:
    """Return True if the holder was a process of this machine that has ended."""
    this_machine = machine_id()
    pid = holder.get("pid")
    if not this_machine or holder.get("machine") != this_machine or type(pid) is not int:
        return False
    if pid == os.getpid():  # Containers give their first process the same id each time.
        return holder.get("token") not in _held_tokens
    return not lock.is_alive(pid)
