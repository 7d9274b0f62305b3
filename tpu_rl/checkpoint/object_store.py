"""Steps of checkpoints in a bucket (gs://), where there are no folders and nothing can be renamed.

    CHECKPOINTS/STEP.json             a step: its record and the folder of its arrays
    CHECKPOINTS/arrays/STEP-RANDOM/   one array each, in tensorstore's zarr3
    CHECKPOINTS/damaged/STEP.json     a step that was set aside

Each process writes the shards of its devices directly. When all have finished, the first process
creates STEP.json, which commits the step: a single object that exists completely or not at all. To
delete a step or to set it aside is to delete or move that one object, so no kill leaves half a
step. Arrays that no such object names are leftovers, which the next job deletes. Every save writes
to a new folder, so two jobs never write to the same place.

This is not Orbax's format: on gs:// Orbax requires gcsfs, google-cloud-storage and the permission
storage.buckets.get, which the object roles do not have, and it commits by several objects.
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

from tpu_rl.errors import MachineError, TpuRlError
from tpu_rl.runtime import processes
from tpu_rl.storage.gcs import Store, is_transient

ARRAYS_FOLDER = "arrays"
DAMAGED_FOLDER = "damaged"


class StepObjects:
    """The steps of one run, an object each.

    All processes call every method together, unless its docstring says otherwise.
    """

    def __init__(self, address: str, keep: int | None):
        """Open the steps and keep the `keep` newest; with None, write nothing ever."""
        run_address, _, name = address.rpartition("/")
        self._store = Store(run_address)
        self._name = name
        self._keep = keep
        self.where = f"{self._store.address}/{name}"

        self._committer = futures.ThreadPoolExecutor(1, "commit")
        self._commit_result: futures.Future[str] | None = None
        self._delete_leftovers()

    def place(self, step: int) -> str:
        """Return the address of a step, for messages."""
        return f"{self.where}/{step}.json"

    @staticmethod
    def exists(address: str) -> bool:
        """Return True if there is any object at an address."""
        run_address, _, name = address.rpartition("/")
        return bool(Store(run_address).names(f"{name}/"))

    def committed(self) -> list[int]:
        """Return the committed steps that are not set aside; wait for one that is being written."""
        if self._commit_result is not None:
            self._commit_result.result()
        return self._list_committed()

    def _list_committed(self) -> list[int]:
        return sorted(int(name) for name in self._record_names("") if name.isdecimal())

    def damaged(self) -> list[str]:
        """Return the names of the steps that were set aside."""
        return self._record_names(f"{DAMAGED_FOLDER}/")

    def _record_names(self, prefix: str) -> list[str]:
        """Return the names of the records at a prefix, without their extension."""
        start = f"{self._name}/{prefix}"
        names = self._store.numbered(start)  # This skips the arrays, which are many.
        return [
            name.removeprefix(start).removesuffix(".json")
            for name in names
            if name.endswith(".json")
        ]

    def _object_name(self, name: str) -> str:
        return f"{self._name}/{name}.json"

    def free_bytes(self) -> int | None:
        """Return None: a bucket has no limit."""
        return None

    # --- writing ---

    def write(self, step: int, arrays: dict[str, Any], record: dict[str, Any]) -> None:
        """Begin to write a step. `wait` returns when it is committed.

        The arrays may be donated as soon as this returns.
        """
        folder = processes.from_first(lambda: f"{ARRAYS_FOLDER}/{step}-{secrets.token_hex(4)}")
        pending_writes: list[Any] = []

        async def copy_to_host() -> None:
            copies = (
                tensorstore_impl.async_serialize(
                    array, self._spec(folder, path), pending_writes, self._store.context
                )
                for path, array in arrays.items()
            )
            await asyncio.gather(*copies)

        error = _error_of(lambda: asyncio.run(copy_to_host()))
        content = {"record": record, "folder": folder}
        # Commit also after an error on this process: the others wait for its answer.
        self._commit_result = self._committer.submit(
            self._commit, step, content, sorted(arrays), pending_writes, error
        )
        if error:
            raise OSError(error)

    def _commit(
        self,
        step: int,
        content: dict[str, Any],
        paths: list[str],
        pending_writes: list[Any],
        error: str,
    ) -> str:
        """Commit a step in the background, once all processes have written their part.

        Returns the first error of any process, or an empty string if the step is committed.
        """
        error = error or _error_of(lambda: [future.result() for future in pending_writes])
        try:
            error = _first_nonempty(processes.gather(error, "commit"))
            if not error and processes.index() == 0:
                self._create_record(step, content, paths)
        except (TpuRlError, RuntimeError) as failure:  # The latter comes from JAX's service.
            error = str(failure)
        try:
            error = _first_nonempty(processes.gather(error, "commit"))
        except RuntimeError as failure:
            error = str(failure)
        if not error and processes.index() == 0:
            self._delete_old_steps()
        return error

    def _create_record(self, step: int, content: dict[str, Any], paths: list[str]) -> None:
        folder = f"{self._name}/{content['folder']}"
        expected = {f"{folder}/{path}/zarr.json" for path in paths}
        missing = expected.difference(self._store.names(f"{folder}/"))
        # A job that ends may still be writing when the next one deletes leftovers.
        if missing:
            raise MachineError(
                f"another job has deleted {min(missing)}", where=f"{self.where}/{step}.json"
            )
        self._store.create(
            self._object_name(f"{step}"), json.dumps(content, sort_keys=True).encode()
        )

    def _delete_old_steps(self) -> None:
        if not self._keep:
            return
        try:
            for step in self._list_committed()[: -self._keep]:
                content = self._content(step)
                self._store.delete(self._object_name(f"{step}"))
                self._store.delete_folder(f"{self._name}/{content['folder']}")
        except (TpuRlError, ValueError, KeyError) as error:
            reason = str(error).partition("\n")[0]
            print(f"warning: an old checkpoint was not deleted: {reason}", file=sys.stderr)

    def wait(self) -> None:
        """Return when everything written is committed, or raise OSError."""
        commit_result = self._commit_result
        self._commit_result = None
        if commit_result is not None and (error := commit_result.result()):
            raise OSError(error)

    def settle(self) -> None:
        """Do nothing: after `wait` nothing is left to do."""

    def _delete_leftovers(self) -> None:
        """Delete the arrays that no record names. The first process does it."""
        if self._keep is None or processes.index():
            return
        start = f"{self._name}/{ARRAYS_FOLDER}/"
        names = self._store.names(start)
        folders = {name.removeprefix(start).partition("/")[0] for name in names}
        if not folders:
            return
        records = self._record_names("")
        records += [f"{DAMAGED_FOLDER}/{name}" for name in self.damaged()]
        contents = self._store.read_all(self._object_name(name) for name in records).values()
        for folder in folders:
            # Search the bytes: a damaged record may not parse, and its arrays are kept too.
            mark = f"{ARRAYS_FOLDER}/{folder}".encode()
            if not any(mark in content for content in contents):
                self._store.delete_folder(f"{start}{folder}")

    def discard_unfinished(self) -> None:
        """Clear away a write that failed."""
        if self._commit_result is not None:
            self._commit_result.result()
        self._commit_result = None
        processes.gather(None)
        self._delete_leftovers()

    def set_aside(self, step: int) -> str:
        """Move the record of a step to the damaged ones and return its new place.

        Only the first process calls this; then all call `reload`.
        """
        content = self._store.read(self._object_name(f"{step}")) or b""
        taken = self.damaged()
        names = itertools.chain([f"{step}"], (f"{step}.{n}" for n in range(1, 1000)))
        name = next(name for name in names if name not in taken)
        self._store.create(self._object_name(f"{DAMAGED_FOLDER}/{name}"), content)
        self._store.delete(self._object_name(f"{step}"))
        return f"{self.where}/{DAMAGED_FOLDER}/{name}.json"

    def reload(self) -> None:
        """Do nothing: every list comes from the store."""

    def close(self) -> None:
        """Stop the thread that commits."""
        self._committer.shutdown()

    # --- reading ---

    def read_record(self, step: int) -> dict[str, Any]:
        """Return the JSON record of a step."""
        return self._content(step)["record"]

    def read_arrays(self, step: int, target: dict[str, Any]) -> dict[str, Any]:
        """Return path -> array.

        Args:
          target: path -> jax.ShapeDtypeStruct with a sharding, none of size zero.
        """
        folder = self._content(step)["folder"]

        async def read() -> list[jax.Array]:
            arrays = (
                tensorstore_impl.async_deserialize(
                    leaf.sharding,
                    self._spec(folder, path),
                    leaf.shape,
                    leaf.dtype,
                    context=self._store.context,
                )
                for path, leaf in target.items()
            )
            return await asyncio.gather(*arrays)

        return dict(zip(target, asyncio.run(read()), strict=True))

    def is_damage(self, step: int, error: Exception) -> bool:
        """Return True if a failed read means that the step is not as it was written.

        That is, the store answered and granted access. A lack of memory or of file handles is no
        damage.
        """
        return isinstance(error, (ValueError, KeyError, IndexError)) and not is_transient(error)

    def was_restored(self, step: int) -> None:
        """Do nothing: a step without damage is complete."""

    def _content(self, step: int) -> dict[str, Any]:
        content = self._store.read(self._object_name(f"{step}"))
        if content is None:
            raise ValueError(f"{self.where}/{step}.json is gone")
        return json.loads(content)

    def _spec(self, folder: str, path: str) -> dict[str, Any]:
        kvstore = self._store.spec(f"{self._name}/{folder}/{path}/")
        # The default skips chunks that equal the fill value 0, and -0.0 equals it.
        return {"driver": "zarr3", "kvstore": kvstore, "store_data_equal_to_fill_value": True}


def _error_of(work: Callable[[], Any]) -> str:
    """Call `work` and return the text of its error, or an empty string."""
    try:
        work()
    except (ValueError, OSError, RuntimeError) as error:  # tensorstore raises these types.
        return str(error) or type(error).__name__
    return ""


def _first_nonempty(texts: list[str]) -> str:
    return next(filter(None, texts), "")
