"""Users of a shared server: their keys and limits, of a file, and the log of what they do.

    [ann]
    key = "tml-..."
    most_clients = 4      # training clients at once
    most_gigabytes = 20   # of saved states

Each user sees sessions and states of their own only.
"""

from __future__ import annotations

import hmac
import json
import re
import sys
import time
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from tpu_rl import run_files
from tpu_rl.errors import InputError

KEY_START = "tml-"
"""The beginning of every key: the client asks for it."""
SHORTEST_KEY = 16
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-]{0,63}")
LIMITS = ("most_clients", "most_gigabytes")


class User(NamedTuple):
    """Who has sessions and states."""

    name: str = ""
    """Empty: the only user of a server without a file of keys."""
    key: str = ""
    most_runs: int | None = None
    """Training clients at once."""
    most_bytes: int | None = None
    """Of saved states."""


def read(path: Path) -> list[User]:
    """Read the users of a file. Raises InputError if it is no file of keys."""
    try:
        tables = tomllib.loads(run_files.read_text(path))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise _wrong(path, str(error)) from None
    users = [_user(path, name, table) for name, table in tables.items()]
    if not users or len({user.key for user in users}) < len(users):
        raise _wrong(path, "two users have the same key" if users else "it has no user")
    return users


def _user(path: Path, name: str, table: Any) -> User:
    if not NAME.fullmatch(name) or not isinstance(table, dict):
        raise _wrong(path, f"{name[:80]!r} is no name of a user with a table")
    key = table.get("key")
    if not isinstance(key, str) or not key.startswith(KEY_START) or len(key) < SHORTEST_KEY:
        raise _wrong(path, f"the key of {name} is no {KEY_START}... of {SHORTEST_KEY} or more")
    unknown = table.keys() - {"key", *LIMITS}
    if unknown:
        raise _wrong(path, f"{name} has {min(unknown)!r}; users have key, {', '.join(LIMITS)}")
    for limit in LIMITS:
        value = table.get(limit, 1)
        if type(value) not in (int, float) or not 0 < value < 1e9:
            raise _wrong(path, f"{limit} of {name} is no number above 0")
    clients, gigabytes = (table.get(limit) for limit in LIMITS)
    most_bytes = None if gigabytes is None else int(gigabytes * 1e9)
    return User(name, key, None if clients is None else int(clients), most_bytes)


def _wrong(path: Path, why: str) -> InputError:
    return InputError(
        "the file of keys cannot be read",
        where=f"--api-keys {path}",
        why=why,
        fix='write a table for each user, as [ann] and below it key = "tml-..."',
    )


def user_of(users: list[User], key: str | None) -> User | None:
    """Return the user of a key. The time does not tell how much of it is right."""
    encoded = (key or "").encode()
    owners = [user for user in users if hmac.compare_digest(encoded, user.key.encode())]
    return owners[0] if owners else None


class AuditLog:
    """A line of JSON for each request that makes, saves, loads or deletes something."""

    def __init__(self, path: Path):
        self._path = path

    def write(self, user: str, action: str, status: int, **about: Any) -> None:
        """Append a line. A log that cannot be written stops no work."""
        line = {"time": time.time(), "user": user, "action": action, "status": status, **about}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            print(f"error: {self._path} cannot be written: {error.strerror}", file=sys.stderr)
