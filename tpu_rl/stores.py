"""Objects in a store, gs://BUCKET/NAME: read, written and deleted whole, and created only where there is none.

A store has no folders, nothing can be appended to an object or renamed, and what one process wrote all others see at
once. tensorstore speaks to it, with the credentials that Google's own programs use, and repeats for minutes what fails
for a moment.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from tpu_rl.errors import DamagedDataError, InputError, MachineError

SCHEME = "gs://"
MARK = "run_folder"
"""An object that every run folder in a store has: its name is in each list that is not refused."""

PATIENT = {"max_retries": 32, "initial_delay": "1s", "max_delay": "32s"}
"""About ten minutes, for a run that has begun."""
BRIEF = {"max_retries": 4, "initial_delay": "500ms", "max_delay": "4s"}
"""About ten seconds, for a run that has not: whether the store is there at all."""
AT_ONCE = 64
"""Objects that are read at the same time."""

_ANOTHER_DAY = ("UNAVAILABLE", "ABORTED", "DEADLINE_EXCEEDED", "PERMISSION_DENIED", "UNAUTHENTICATED", "INTERNAL")
_ANOTHER_DAY += ("RESOURCE_EXHAUSTED", "CANCELLED", "UNKNOWN")


class Seen(NamedTuple):
    """An object as it was at some moment."""

    content: bytes | None
    """None: there is none of that name."""
    generation: bytes


def is_address(text: str) -> bool:
    return text.startswith(SCHEME)


def split(address: str) -> tuple[str, str]:
    """(bucket, name in it) of an address. Raises InputError where one of them is missing or no such name can be."""
    found = re.fullmatch(r"gs://([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])/+([^/#?*\[\]\s][^#?*\[\]\r\n]*?)/*", address)
    if not found or "//" in found[2] or {".", ".."} & set(found[2].split("/")):
        why = "a bucket's name has small letters, digits, -, _ and ., and a folder in it needs a name"
        raise InputError(f"{address!r} is no folder in a store", where=address, why=why, fix="as in gs://bucket/name")
    return found[1], found[2]


def is_passing(error: Exception) -> bool:
    """Whether an error of tensorstore says nothing of the objects: the store was away, or it refused."""
    return any(re.search(rf"\b{status}\b", str(error)) for status in _ANOTHER_DAY)


class Store:
    """The objects whose names begin with an address. Every method raises MachineError where the store refuses."""

    def __init__(self, address: str, retries: dict[str, Any] | None = None):
        import tensorstore  # imported here: most runs do without

        bucket, name = split(address)
        self.address = f"{SCHEME}{bucket}/{name}"
        self._range = tensorstore.KvStore.KeyRange
        self.context = tensorstore.Context({"gcs_request_retries": retries or PATIENT})
        self._open = tensorstore.KvStore.open
        self._objects = self._open(self.spec(""), context=self.context).result()

    def spec(self, name: str) -> dict[str, str]:
        """tensorstore's description of what lies under a name."""
        bucket, prefix = split(self.address)
        return {"driver": "gcs", "bucket": bucket, "path": f"{prefix}/{name}"}

    def look(self, name: str) -> Seen:
        result = self._result(self._objects.read(name), f"read {name}")
        return Seen(bytes(result.value) if result.state == "value" else None, result.stamp.generation)

    def read(self, name: str) -> bytes | None:
        """An object's content, or None where there is none."""
        return self.look(name).content

    def read_all(self, names: Iterable[str]) -> dict[str, bytes]:
        """Name -> content, of those that there are."""
        found, names = {}, list(names)
        for first in range(0, len(names), AT_ONCE):
            some = names[first : first + AT_ONCE]
            futures = [self._objects.read(name) for name in some]
            for name, future in zip(some, futures, strict=True):
                result = self._result(future, f"read {name}")
                if result.state == "value":
                    found[name] = bytes(result.value)
        return found

    def write(self, name: str, content: bytes) -> None:
        """The whole object, whatever was there before; others see the old one or the new one."""
        self._result(self._objects.write(name, content), f"write {name}")

    def swap(self, name: str, content: bytes | None, seen: Seen) -> Seen | None:
        """Write (None: delete) unless the object has changed since it was `seen`; None if it had."""
        stamp = self._result(self._objects.write(name, content, if_equal=seen.generation), f"write {name}")
        return Seen(content, stamp.generation) if stamp.generation else None

    def create(self, name: str, content: bytes) -> None:
        """An object that is never changed. Raises DamagedDataError where there is another one of that name."""
        seen = self.look(name)
        if seen.content is None and self.swap(name, content, seen) is not None:
            return
        # An answer that got lost is asked for again: then what stands in the way is what was to be written.
        if self.read(name) != content:
            raise DamagedDataError(
                f"another job has written {name}",
                where=self.address,
                why="what a run has published it never changes, and there is something else",
                fix="end all jobs that work in this run folder but one, and run the same command again",
            )

    def names(self, prefix: str = "") -> list[str]:
        """The names that begin so, in order."""
        return self._names(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1)) if prefix else self._names("", "")

    def names_outside(self, folder: str) -> list[str]:
        """All names but those in a folder, which may be many, in order."""
        return self._names("", f"{folder}/") + self._names(f"{folder}0", "")

    def numbered(self, prefix: str) -> list[str]:
        """The names that begin so and go on with a digit, in order."""
        return self._names(f"{prefix}0", f"{prefix}:")

    def _names(self, first: str, end: str) -> list[str]:
        found = [self._objects.list(self._range(*ends)) for ends in ((MARK, f"{MARK}\0"), (first, end))]
        mark, names = (self._result(future, "list its objects") for future in found)
        # tensorstore takes a refusal to list for an empty list. A run would begin anew over what is there.
        if mark != [MARK.encode()]:
            raise self._refused("list its objects", "PERMISSION_DENIED: a list of them comes back empty")
        return sorted(name.decode() for name in names)

    def delete(self, name: str) -> None:
        """Also where there is none."""
        self._result(self._objects.write(name, None), f"delete {name}")

    def delete_folder(self, name: str) -> None:
        """All objects whose names begin with `name` and a slash."""
        self._result(self._objects.delete_range(self._range(f"{name}/", f"{name}0")), f"delete {name}/")

    def _result(self, future: Any, what: str) -> Any:
        try:
            return future.result()
        except (ValueError, OSError, RuntimeError) as error:  # tensorstore's errors are of several types
            raise self._refused(what, str(error)) from error

    def _refused(self, what: str, why: str) -> MachineError:
        bucket, _ = split(self.address)
        where, why = self.address, why.partition("\n")[0][:300]
        if "NOT_FOUND" in why:
            fix = f"make the bucket (gcloud storage buckets create {SCHEME}{bucket}), or correct its name"
            return MachineError(f"there is no bucket {bucket}", where=where, why=why, fix=fix)
        if "PERMISSION_DENIED" in why or "UNAUTHENTICATED" in why:
            fix = "give this machine's service account the role Storage Object User (roles/storage.objectUser) of the "
            fix += "bucket, or run: gcloud auth application-default login"
            return MachineError(f"the store does not let this machine {what}", where=where, why=why, fix=fix)
        fix = "see to the network; the same command goes on from the last checkpoint"
        return MachineError(f"the store does not answer: cannot {what}", where=where, why=why, fix=fix)
