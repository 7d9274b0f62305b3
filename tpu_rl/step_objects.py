"""Steps of checkpoints in a store (gs://), where there are no folders and nothing can be renamed.

    CHECKPOINTS/STEP.json             a step: its record and the folder of its arrays
    CHECKPOINTS/arrays/STEP-RANDOM/   an array each, in tensorstore's zarr3
    CHECKPOINTS/damaged/STEP.json     a step that was set aside

Each process writes the shards of its devices, straight from them; when all have, the first creates STEP.json, which is
what commits the step: one object, whole or not there. To delete a step or to set it aside is to delete or to move that
one object, so that no kill leaves half of one; arrays that no such object names are litter, which the next job clears
away. Every save has a folder of its own, so that nobody writes where another one has.

This is not orbax's format: on gs:// orbax needs gcsfs, google-cloud-storage and the right to look at the bucket itself
(storage.buckets.get), which the roles for objects do not have, and commits by several objects.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import sys
from collections.abc import Callable
from concurrent import futures
from typing import Any

import jax
from jax.experimental.array_serialization import tensorstore_impl

from tpu_rl import processes
from tpu_rl.errors import MachineError, TpuRlError
from tpu_rl.stores import Store, is_passing

ARRAYS, SET_ASIDE = "arrays", "damaged"

_meetings = itertools.count()


class StepObjects:
    """The steps of one run; all processes call every method together, unless it says otherwise."""

    def __init__(self, address: str, keep: int | None):
        """Of which the `keep` newest stay; None: nothing is ever written."""
        run, _, name = address.rpartition("/")
        self._store, self._name, self._keep = Store(run), name, keep
        self.where = f"{self._store.address}/{name}"
        self._commits = futures.ThreadPoolExecutor(1, "commit")
        self._committing: futures.Future[str] | None = None
        self.purge()

    def place(self, step: int) -> str:
        return f"{self.where}/{step}.json"

    @staticmethod
    def exists(address: str) -> bool:
        run, _, name = address.rpartition("/")
        return bool(Store(run).names(f"{name}/"))

    def all(self) -> list[int]:
        """Those that are committed and not set aside; one that is being written is waited for."""
        if self._committing is not None:
            self._committing.result()
        return self._committed()

    def _committed(self) -> list[int]:
        return sorted(int(name) for name in self._records("") if name.isdecimal())

    def aside(self) -> list[str]:
        """The names of those that are set aside."""
        return self._records(f"{SET_ASIDE}/")

    def _records(self, prefix: str) -> list[str]:
        """The names of the records that lie there, without their ending."""
        start = f"{self._name}/{prefix}"
        names = self._store.numbered(start)  # of the arrays, which are many, none is listed
        return [name.removeprefix(start).removesuffix(".json") for name in names if name.endswith(".json")]

    def free_bytes(self) -> int | None:
        """Of the store; None: there is no end."""
        return None

    # --- writing -----------------------------------------------------------------------------------------------------

    def write(self, step: int, arrays: dict[str, Any], record: dict[str, Any]) -> None:
        """Begin to write a step; the arrays may be donated when this returns. `wait` says whether it is committed."""
        folder = processes.from_first(lambda: f"{ARRAYS}/{step}-{secrets.token_hex(4)}")
        written: list[Any] = []

        async def copy() -> None:
            some = (
                tensorstore_impl.async_serialize(array, self._spec(folder, path), written, self._store.context)
                for path, array in arrays.items()
            )
            await asyncio.gather(*some)

        error = _error_of(lambda: asyncio.run(copy()))
        content = {"record": record, "folder": folder, "arrays": sorted(arrays)}
        # Also after an error here: the others wait to hear of it.
        self._committing = self._commits.submit(self._commit, step, content, written, error)
        if error:
            raise OSError(error)

    def _commit(self, step: int, content: dict[str, Any], written: list[Any], error: str) -> str:
        """In the background: when all processes have written their part, the first creates the record. What went wrong,
        on any of them; empty where the step is committed."""
        error = error or _error_of(lambda: [future.result() for future in written])
        try:
            error = _first(_gather(error))
            if not error and processes.index() == 0:
                folder = f"{self._name}/{content['folder']}"
                wanted = {f"{folder}/{path}/zarr.json" for path in content.pop("arrays")}
                gone = wanted.difference(self._store.names(f"{folder}/"))
                if gone:  # a job that ends may still be writing when the next one clears away
                    raise MachineError(f"another job has deleted {min(gone)}", where=f"{self.where}/{step}.json")
                self._store.create(f"{self._name}/{step}.json", json.dumps(content, sort_keys=True).encode())
        except (TpuRlError, RuntimeError) as found:  # jax's service raises the latter
            error = str(found)
        try:
            error = _first(_gather(error))
        except RuntimeError as found:
            error = str(found)
        if not error and processes.index() == 0:
            self._delete_old()
        return error

    def _delete_old(self) -> None:
        try:
            for step in self._committed()[: -self._keep] if self._keep else ():
                content = self._content(f"{step}")
                self._store.delete(f"{self._name}/{step}.json")
                self._store.delete_folder(f"{self._name}/{content['folder']}")
        except (TpuRlError, ValueError, KeyError) as error:
            print(f"warning: an old checkpoint was not deleted: {str(error).partition(chr(10))[0]}", file=sys.stderr)

    def wait(self) -> None:
        """Return when what was written is committed. Raises OSError where it is not."""
        committing, self._committing = self._committing, None
        if committing is not None and (error := committing.result()):
            raise OSError(error)

    def settle(self) -> None:
        """After a `wait` that went well everywhere: nothing of it is left to do."""

    def purge(self) -> None:
        """Delete the arrays that no record names; by the first process."""
        if self._keep is None or processes.index():
            return
        start = f"{self._name}/{ARRAYS}/"
        found = {name.removeprefix(start).partition("/")[0] for name in self._store.names(start)}
        named = self._records("") + [f"{SET_ASIDE}/{name}" for name in self.aside()] if found else []
        contents = self._store.read_all(f"{self._name}/{name}.json" for name in named)
        for folder in found:
            # Also where a record is damaged, and cannot be read as one.
            if not any(f"{ARRAYS}/{folder}".encode() in content for content in contents.values()):
                self._store.delete_folder(f"{start}{folder}")

    def forget_unfinished(self) -> None:
        """Clear away a write that failed."""
        if self._committing is not None:
            self._committing.result()
        self._committing = None
        processes.gather(None)
        self.purge()

    def set_aside(self, step: int) -> str:
        """Move the record of a step to those of damaged ones; its new place. Only on the first process."""
        content = self._store.read(f"{self._name}/{step}.json") or b""
        taken = self.aside()
        name = next(name for n in range(1000) if (name := f"{step}.{n}" if n else f"{step}") not in taken)
        self._store.create(f"{self._name}/{SET_ASIDE}/{name}.json", content)
        self._store.delete(f"{self._name}/{step}.json")
        return f"{self.where}/{SET_ASIDE}/{name}.json"

    def reload(self) -> None:
        """Look again which steps there are: a store is asked each time."""

    def close(self) -> None:
        """The thread that commits ends."""
        self._commits.shutdown()

    # --- reading -----------------------------------------------------------------------------------------------------

    def read_record(self, step: int) -> dict[str, Any]:
        return self._content(f"{step}")["record"]

    def read_arrays(self, step: int, target: dict[str, Any]) -> dict[str, Any]:
        """Path -> array, as `target` has them: jax.ShapeDtypeStruct with a sharding."""
        folder = self._content(f"{step}")["folder"]

        async def read() -> list[jax.Array]:
            some = (
                tensorstore_impl.async_deserialize(
                    leaf.sharding, self._spec(folder, path), leaf.shape, leaf.dtype, context=self._store.context
                )
                for path, leaf in target.items()
            )
            return await asyncio.gather(*some)

        return dict(zip(target, asyncio.run(read()), strict=True))

    def is_at_fault(self, step: int, error: Exception) -> bool:
        """Whether a step that could not be read is not as it was written: the store was there, and let us read. A lack
        of memory or of file handles is no damage."""
        del step
        return isinstance(error, (ValueError, KeyError, IndexError)) and not is_passing(error)

    def was_restored(self, step: int) -> None:
        """It is whole: nothing is to be added."""

    def _content(self, name: str) -> dict[str, Any]:
        content = self._store.read(f"{self._name}/{name}.json")
        if content is None:
            raise ValueError(f"{self.where}/{name}.json is gone")
        return json.loads(content)

    def _spec(self, folder: str, path: str) -> dict[str, Any]:
        kvstore = self._store.spec(f"{self._name}/{folder}/{path}/")
        # Otherwise what equals zero would not be written, and -0.0 does.
        return {"driver": "zarr3", "kvstore": kvstore, "store_data_equal_to_fill_value": True}


def _error_of(work: Callable[[], Any]) -> str:
    """What goes wrong with it; empty where nothing does."""
    try:
        work()
    except (ValueError, OSError, RuntimeError) as error:  # tensorstore's are of these types
        return str(error) or type(error).__name__
    return ""


def _first(errors: list[str]) -> str:
    return next(filter(None, errors), "")


def _gather(value: str) -> list[str]:
    """The text of each process, on all of them: as `processes.gather`, for a thread beside the main one."""
    if processes.count() == 1:
        return [value]
    client, number = processes.service(), next(_meetings)
    client.key_value_set(_place(number, processes.index()), value or " ")
    places = [_place(number, one) for one in range(processes.count())]
    found = [client.blocking_key_value_get(place, processes.FOREVER_MS) for place in places]
    if number:  # all have read what was there before: they are here
        client.key_value_delete(_place(number - 1, processes.index()))
    return [text.strip() for text in found]


def _place(number: int, process: int) -> str:
    return f"tpu_rl/commit/{number}/{process}"
