"""Objects in a bucket of Google Cloud Storage, gs://BUCKET/NAME.

Objects are read, written and deleted whole. A bucket has no folders, and nothing can be appended to
an object or renamed; all processes see a write at once. Requests go through tensorstore, which uses
Google's application default credentials and retries transient failures for minutes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tpu_rl.errors import DamagedDataError, InputError, MachineError

SCHEME = "gs://"
MARK = "run_folder"
"""An object that every run folder in a bucket has. A list without it was refused by the server."""

LONG_RETRIES = {"max_retries": 32, "initial_delay": "1s", "max_delay": "32s"}
"""Retry for about ten minutes: for a run that has started."""
SHORT_RETRIES = {"max_retries": 4, "initial_delay": "500ms", "max_delay": "4s"}
"""Retry for about ten seconds: to find out whether the bucket can be reached at all."""
CONCURRENT_READS = 64
"""The number of objects that are read at the same time."""

_TRANSIENT = (
    "UNAVAILABLE",
    "ABORTED",
    "DEADLINE_EXCEEDED",
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
    "INTERNAL",
    "RESOURCE_EXHAUSTED",
    "CANCELLED",
    "UNKNOWN",
)

_ADDRESS = re.compile(
    r"gs://([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])/+([^/#?*\[\]\s][^#?*\[\]\r\n]*?)/*"
)


class ObjectVersion(NamedTuple):
    """An object as it was at some moment."""

    content: bytes | None
    """None: there was no object of that name."""
    generation: bytes
    """Changes with every write."""


def is_address(text: str) -> bool:
    """Return True if a path is a gs:// address and not a local path."""
    return text.startswith(SCHEME)


def split(address: str) -> tuple[str, str]:
    """Return (bucket, name in the bucket) of an address.

    Raises InputError if one of them is missing or not a valid name.
    """
    match = _ADDRESS.fullmatch(address)
    if not match or "//" in match[2] or {".", ".."} & set(match[2].split("/")):
        raise InputError(
            f"{address!r} is no folder in a store",
            where=address,
            why="a bucket's name has small letters, digits, -, _ and ., and a folder in it needs "
            "a name",
            fix="as in gs://bucket/name",
        )
    return match[1], match[2]


def is_transient(error: Exception) -> bool:
    """Return True if an error of tensorstore says nothing about the objects.

    The server was away, or it refused the request.
    """
    return any(re.search(rf"\b{status}\b", str(error)) for status in _TRANSIENT)


class Store:
    """The objects whose names begin with an address.

    Every method raises MachineError if the server refuses or does not answer.
    """

    def __init__(self, address: str, retries: dict[str, Any] | None = None):
        import tensorstore  # Imported here because most runs do without.

        bucket, name = split(address)
        self.address = f"{SCHEME}{bucket}/{name}"
        self._range = tensorstore.KvStore.KeyRange
        self.context = tensorstore.Context({"gcs_request_retries": retries or LONG_RETRIES})
        self._open = tensorstore.KvStore.open
        self._objects = self._open(self.spec(""), context=self.context).result()

    def spec(self, name: str) -> dict[str, str]:
        """Return tensorstore's description of the objects below a name."""
        bucket, prefix = split(self.address)
        return {"driver": "gcs", "bucket": bucket, "path": f"{prefix}/{name}"}

    # --- one object ---

    def read_version(self, name: str) -> ObjectVersion:
        """Return an object's content and its generation."""
        result = self._result(self._objects.read(name), f"read {name}")
        content = bytes(result.value) if result.state == "value" else None
        return ObjectVersion(content, result.stamp.generation)

    def read(self, name: str) -> bytes | None:
        """Return an object's content, or None if there is no such object."""
        return self.read_version(name).content

    def write(self, name: str, content: bytes) -> None:
        """Write the whole object; readers see either the old content or the new."""
        self._result(self._objects.write(name, content), f"write {name}")

    def write_if_unchanged(
        self, name: str, content: bytes | None, seen: ObjectVersion
    ) -> ObjectVersion | None:
        """Write an object unless it has changed since it was `seen`.

        Args:
          content: the new content; None deletes the object.
          seen: the version that this write may replace.

        Returns:
          The new version, or None if the object had changed and nothing was written.
        """
        request = self._objects.write(name, content, if_equal=seen.generation)
        stamp = self._result(request, f"write {name}")
        return ObjectVersion(content, stamp.generation) if stamp.generation else None

    def create(self, name: str, content: bytes) -> None:
        """Write an object that is never changed.

        Raises DamagedDataError if there is an object of that name with other content.
        """
        seen = self.read_version(name)
        if seen.content is None and self.write_if_unchanged(name, content, seen) is not None:
            return
        # If the answer to a write gets lost, tensorstore repeats the request. It then fails because
        # of the object that it has written itself.
        if self.read(name) != content:
            raise DamagedDataError(
                f"another job has written {name}",
                where=self.address,
                why="what a run has published it never changes, and there is something else",
                fix="end all jobs that work in this run folder but one, and run the same command "
                "again",
            )

    def delete(self, name: str) -> None:
        """Delete an object, if there is one."""
        self._result(self._objects.write(name, None), f"delete {name}")

    # --- many objects ---

    def read_changed(
        self, names: Sequence[str], known: Mapping[str, bytes]
    ) -> dict[str, ObjectVersion]:
        """Return name -> object of those objects that are not of their known generation.

        All of them are in memory at the same time.
        """
        requests = [self._objects.read(name, if_not_equal=known.get(name)) for name in names]
        changed: dict[str, ObjectVersion] = {}
        for name, request in zip(names, requests, strict=True):
            result = self._result(request, f"read {name}")
            if result.state != "unspecified":
                content = bytes(result.value) if result.state == "value" else None
                changed[name] = ObjectVersion(content, result.stamp.generation)
        return changed

    def read_all(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return name -> content of the objects that exist."""
        contents: dict[str, bytes] = {}
        remaining = list(names)
        for first in range(0, len(remaining), CONCURRENT_READS):
            batch = remaining[first : first + CONCURRENT_READS]
            for name, version in self.read_changed(batch, {}).items():
                if version.content is not None:
                    contents[name] = version.content
        return contents

    def names(self, prefix: str = "") -> list[str]:
        """Return the names that begin with a prefix, sorted."""
        if not prefix:
            return self._names("", "")
        return self._names(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1))

    def names_of_any_folder(self) -> list[str]:
        """Return all names of a folder that need not be a run's, sorted.

        tensorstore takes a refusal to list for an empty list, so an empty list proves nothing.
        """
        request = self._objects.list(self._range("", ""))
        return sorted(name.decode() for name in self._result(request, "list its objects"))

    def names_outside(self, folder: str) -> list[str]:
        """Return all names but those in a folder, which may be many, sorted."""
        return self._names("", f"{folder}/") + self._names(f"{folder}0", "")

    def numbered(self, prefix: str) -> list[str]:
        """Return the names that begin with a prefix and a digit, sorted."""
        return self._names(f"{prefix}0", f"{prefix}:")

    def _names(self, first: str, end: str) -> list[str]:
        """Return the names from `first` up to and without `end`."""
        ranges = (self._range(MARK, f"{MARK}\0"), self._range(first, end))
        requests = [self._objects.list(key_range) for key_range in ranges]
        mark, names = (self._result(request, "list its objects") for request in requests)
        # tensorstore takes a refusal to list for an empty list. A run that believed it would begin
        # anew over what is there.
        if mark != [MARK.encode()]:
            raise self._refused(
                "list its objects", "PERMISSION_DENIED: a list of them comes back empty"
            )
        return sorted(name.decode() for name in names)

    def delete_folder(self, name: str) -> None:
        """Delete all objects whose names begin with `name` and a slash."""
        request = self._objects.delete_range(self._range(f"{name}/", f"{name}0"))
        self._result(request, f"delete {name}/")

    # --- errors ---

    def _result(self, request: Any, action: str) -> Any:
        """Return the result of a request; `action` completes "cannot ..." in the error."""
        try:
            return request.result()
        except (ValueError, OSError, RuntimeError) as error:  # tensorstore raises these types.
            raise self._refused(action, str(error)) from error

    def _refused(self, action: str, why: str) -> MachineError:
        bucket, _ = split(self.address)
        why = why.partition("\n")[0][:300]
        if "NOT_FOUND" in why:
            what = f"there is no bucket {bucket}"
            fix = f"make the bucket (gcloud storage buckets create {SCHEME}{bucket}), or correct "
            fix += "its name"
        elif "PERMISSION_DENIED" in why or "UNAUTHENTICATED" in why:
            what = f"the store does not let this machine {action}"
            fix = "give this machine's service account the role Storage Object User "
            fix += "(roles/storage.objectUser) of the bucket, or run: gcloud auth "
            fix += "application-default login"
        else:
            what = f"the store does not answer: cannot {action}"
            fix = "check the network; the same command goes on from the last checkpoint"
        return MachineError(what, where=self.address, why=why, fix=fix)
