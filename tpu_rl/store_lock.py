"""One job at a time in a run folder in a store: a second one is refused with who holds it.

The lock is an object that its holder rewrites every few seconds. Whoever finds one watches it: if it changes, its
holder lives, and the other is refused; if it stays the same for a minute, its holder is dead or cut off, and of all who
watch exactly one takes it over, as the store writes only over what was seen. No clock is compared with another. A
holder that ran on this machine and is no more needs no watching.

Who loses the lock, having been cut off or stopped for a minute, hears of it at the next sign of life: it has to end at
once, and can have done no harm by then, as neither published rows nor checkpoints are ever written over.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tpu_rl.errors import InputError, MachineError
from tpu_rl.stores import MARK, Seen, Store

LOCK = "run.lock"
BEAT = 5.0
"""Seconds between two signs of life."""
SILENCE = 60.0
"""Seconds without one after which a holder counts as gone."""


@contextmanager
def hold(store: Store, lost: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Make the run folder and hold its lock. `lost` is called, from a thread or by what this gives, if another job has
    taken it over.

    Gives a function that gives a sign of life now, and returns only if the lock is still held: to be called before
    something is published that another job may not meet.

    Raises InputError, within seconds, if another job holds it, and MachineError if there is no writing there.
    """
    if store.read(MARK) is None:
        store.write(MARK, b"tpu_rl\n")
    me = {"host": socket.gethostname(), "pid": os.getpid(), "machine": machine(), "token": secrets.token_hex(8)}
    me["started"] = time.strftime("%Y-%m-%d %H:%M:%S %z")
    beat = _Beat(store, me, _acquire(store, me), lost)
    _held.add(me["token"])
    beat.start()
    try:
        yield partial(beat.tell, Store(store.address))  # patient: what is published waits for a store that is away
    finally:
        _held.discard(me["token"])
        beat.leave()


_held: set[str] = set()
"""Tokens of the locks that this process holds."""


def machine() -> str:
    """What only processes that know each other's ids have in common: this start of this machine, and of its container.

    Empty where that cannot be told. Hosts of the same name are many.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _acquire(store: Store, me: dict[str, Any]) -> Seen:
    while True:
        seen = store.look(LOCK)
        if seen.content is not None and not _is_dead_here(_read(seen)):
            seen = _watch(store, seen)
        mine = store.swap(LOCK, _text(me), seen)
        if mine is not None:
            return mine


def _watch(store: Store, seen: Seen) -> Seen:
    """The lock of a holder that is gone, or that has let go. Raises InputError where it lives."""
    who = _who(_read(seen))
    print(f"{store.address}: locked by {who}; looking for up to {SILENCE:.0f} s whether it lives", file=sys.stderr)
    deadline = time.monotonic() + SILENCE
    while time.monotonic() < deadline:
        time.sleep(min(BEAT / 5, 1.0))
        now = store.look(LOCK)
        if now.content is None:
            return now
        if now.generation != seen.generation:
            raise InputError(
                "another job is working in this run folder",
                where=store.address,
                why=_who(_read(now)),
                fix="wait for it or end it, or use another --run-dir",
            )
    print(f"warning: {who} has given no sign of life for {SILENCE:.0f} s: its lock is taken over", file=sys.stderr)
    return seen


class _Beat(threading.Thread):
    """Rewrites the lock as long as it is held."""

    def __init__(self, store: Store, me: dict[str, Any], mine: Seen, lost: Callable[[str], None]):
        super().__init__(name="lock", daemon=True)
        self._store, self._me, self._mine, self._lost = store, me, mine, lost
        self._over, self._one_at_a_time = threading.Event(), threading.Lock()

    def run(self) -> None:
        while not self._over.wait(BEAT):
            try:
                self.tell(self._store)
            except InputError:
                return  # `lost` has been told
            except MachineError:
                continue  # the store is away; if another job has taken the lock meanwhile, a later beat finds it

    def tell(self, store: Store) -> None:
        """A sign of life. Raises MachineError where the store is away, and InputError where the lock is lost."""
        with self._one_at_a_time:
            new = store.swap(LOCK, _text(self._me), self._mine)
            if new is None:
                new = store.look(LOCK)
                # An answer that got lost is asked for again, which then finds what it has written itself.
                if _read(new).get("token") != self._me["token"]:
                    self._over.set()
                    why = f"another job has taken this run folder over: {_who(_read(new))}"
                    self._lost(why)
                    raise InputError(why, where=store.address, fix="end one of the two jobs")
            self._mine = new

    def leave(self) -> None:
        self._over.set()
        self.join()
        try:
            if self._store.swap(LOCK, None, self._mine) is None:
                seen = self._store.look(LOCK)  # the answer to the last sign of life may have been lost
                if _read(seen).get("token") == self._me["token"]:
                    self._store.swap(LOCK, None, seen)
        except MachineError as error:
            print(f"warning: the lock of {self._store.address} is left behind: {error.why}", file=sys.stderr)


def _text(me: dict[str, Any]) -> bytes:
    return (json.dumps(me | {"alive": time.strftime("%Y-%m-%d %H:%M:%S %z")}) + "\n").encode()


def _read(seen: Seen) -> dict[str, Any]:
    """What a lock says; empty where it says nothing that can be read."""
    try:
        found = json.loads(seen.content or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _who(holder: dict[str, Any]) -> str:
    known = holder.keys() >= {"host", "pid", "started"}
    return "host {host}, pid {pid}, since {started}".format(**holder) if known else "it does not say who it is"


def _is_dead_here(holder: dict[str, Any]) -> bool:
    """Whether the holder was a process of this machine that is no more."""
    if not machine() or holder.get("machine") != machine() or type(holder.get("pid")) is not int:
        return False
    if holder["pid"] == os.getpid():  # containers give their first process the same id each time
        return holder.get("token") not in _held
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's
        return False
    return False
