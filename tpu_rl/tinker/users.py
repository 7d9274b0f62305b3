"""Users of a shared server: their keys and limits, of a file, and the log of what they do.

    [ann]
    key = "tml-..."
    most_clients = 4      # training clients at once
    most_gigabytes = 20   # of saved states

Each user sees sessions and states of their own only.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tpu_rl import run_files
from tpu_rl.errors import refused
from tpu_rl.serving.protocol import ApiError

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
    most_clients: float = math.inf
    """Training clients at once."""
    most_gigabytes: float = math.inf
    """Of saved states."""


def read(path: Path) -> list[User]:
    """Read the users of a file. Raises InputError if it is no file of keys."""
    with refused(
        (ValueError, RecursionError),
        "the file of keys cannot be read",
        where=f"--api-keys {path}",
        fix='write a table for each user, as [ann] and below it key = "tml-..."',
    ):
        tables = tomllib.loads(run_files.read_text(path))
        users = [_user(name, table) for name, table in tables.items()]
        if not users or len({user.key for user in users}) < len(users):
            raise ValueError("two users have the same key" if users else "it has no user")
        return users


def _user(name: str, table: Any) -> User:
    if not NAME.fullmatch(name) or not isinstance(table, dict):
        raise ValueError(f"{name[:80]!r} is no name of a user with a table")
    key = table.get("key")
    if not isinstance(key, str) or not key.startswith(KEY_START) or len(key) < SHORTEST_KEY:
        raise ValueError(f"the key of {name} is no {KEY_START}... of {SHORTEST_KEY} or more")
    for setting, value in table.items():
        if setting not in ("key", *LIMITS):
            raise ValueError(f"{name} has {setting!r}; users have key, {', '.join(LIMITS)}")
        if setting != "key" and (type(value) not in (int, float) or not 0 < value < 1e9):
            raise ValueError(f"{setting} of {name} is no number above 0")
    return User(name, **table)


@contextlib.contextmanager
def audited(path: Path, user: str, action: str, about: dict[str, str]) -> Iterator[None]:
    """Append a line of JSON about a request, with its status, when it has been answered.

    A log that cannot be written stops no work.
    """
    status = 500
    try:
        yield
        status = 200
    except ApiError as error:
        status = error.status
        raise
    finally:
        line = {"time": time.time(), "user": user, "action": action, "status": status, **about}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            print(f"error: {path} cannot be written: {error.strerror}", file=sys.stderr)
