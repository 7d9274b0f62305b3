"""Atomic checkpoints of a pytree and a JSON object, with a digest of every array.

A step holds the arrays of a pytree (parameters, optimizer state, algorithm state) and one JSON
object (`extra`: data position, counters, fingerprint of the configuration). Both are committed or
neither is, even under kill -9: by Orbax in a folder (`local`), by one last object in a bucket
(`object_store`). Neither detects flipped bits, so the digest of each array is saved beside it and
compared after reading.

A damaged step is set aside: it is renamed to `damaged`, never deleted and never used again. To
resume, take `latest`, restore it, and on DamagedDataError set it aside and repeat.

Arrays are saved as a flat dict from path ("params.policy.embedding") to array. The saved format
therefore does not depend on container types, and holes (None) and optax's named tuples come back
exactly as the abstract tree has them.
"""

from __future__ import annotations

import errno
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp

from tpu_rl import run_files
from tpu_rl.checkpoint import digests
from tpu_rl.checkpoint.local import StepFolders
from tpu_rl.checkpoint.object_store import StepObjects
from tpu_rl.errors import DamagedDataError, InputError, MachineError
from tpu_rl.runtime import processes
from tpu_rl.storage import gcs
from tpu_rl.train import sharding

T = TypeVar("T")
Tree = Any
"""Any pytree of jax.Array; `restore` takes one of jax.ShapeDtypeStruct."""

FORMAT = 2
"""The format of a step. A record without a number has format 1. In every format, `sha256` is the
hash of the rest of the record."""

CHECK_BYTES = 2**30
"""`Checkpoints.check` reads about this many bytes of arrays at a time."""


def abstract(state: Tree) -> Tree:
    """Return the shape, dtype and sharding of every leaf, as `Checkpoints.restore` needs them."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )


def open_checkpoints(directory: str, keep: int = 2) -> Checkpoints:
    """Open or create the checkpoints of a run for writing and keep the `keep` newest steps.

    Clears away what an interrupted save or deletion left. Only the run itself may call this; other
    programs call `read_checkpoints`.

    Args:
      directory: a local folder or a gs:// address.
      keep: the number of newest steps that are not deleted.
    """
    return Checkpoints(directory, keep)


def read_checkpoints(directory: str) -> Checkpoints:
    """Open the checkpoints of a run without ever writing to them; the run may still be going on."""
    return Checkpoints(directory, None)


def committed_steps(directory: str) -> list[int]:
    """Return the steps of a run's checkpoints, in ascending order; none if there is no such place.

    One process may call it alone.
    """
    if not gcs.is_address(directory):
        return StepFolders.listed(directory)
    return StepObjects(directory, None).committed() if StepObjects.exists(directory) else []


class Checkpoints:
    """The checkpoints of one run. All processes of the run call every method together."""

    def __init__(self, directory: str, keep: int | None):
        backend = StepObjects if gcs.is_address(directory) else StepFolders
        self._writes = keep is not None
        if not self._writes and not backend.exists(directory):
            fix = "give the folder of a run that has reached its first one"
            raise InputError("there are no checkpoints", where=directory, fix=fix)
        self._saving = -1
        self._steps = backend(directory, keep)

    # --- saving ---

    def save(self, step: int, state: Tree, extra: dict[str, Any], wait: bool = False) -> None:
        """Save a step. `state` may be donated as soon as this returns.

        The write goes on in the background unless `wait` is True, and the step exists only once it
        is committed. A write that fails at once is tried a second time. If a write fails in the
        background, its arrays are gone; the next call reports it and waits for its own write.

        Raises:
          MachineError: the disk is full, or the second try failed.
          InputError: a parameter is not finite.
          ValueError: the step exists, a leaf is weakly typed, or the checkpoints are read-only.
        """
        if not self._writes:
            raise ValueError("these checkpoints are open for reading")
        wait |= self._finish_background_write()
        if step in self._steps.committed():
            raise ValueError(f"step {step} is saved already")
        # Orbax does not copy arrays in host memory, and the next step writes over these buffers.
        arrays = digests.flatten(sharding.in_device_memory(state))
        weak = [path for path, array in arrays.items() if array.weak_type]
        if weak:
            raise ValueError(
                f"give {weak} a dtype: weak types are not saved, so a resumed run would promote "
                "types differently"
            )
        self._require_finite_params(step, arrays)
        self._require_disk_space(step, arrays)
        record = {
            "format": FORMAT,
            "step": step,
            "leaves": digests.describe(arrays),
            "extra": extra,
        }
        record["sha256"] = run_files.checksum(record)
        error = _first_error(lambda: self._write(step, arrays, record, wait))
        if error is None:
            return
        self._discard_unfinished(f"checkpoint {step} was not written; trying once more", error)
        error = _first_error(lambda: self._write(step, arrays, record, wait=True))
        if error is not None:
            raise self._write_error(step, error) from error

    def _write(self, step: int, arrays: dict[str, Any], record: dict[str, Any], wait: bool) -> None:
        self._saving = step
        self._steps.write(step, _without_empty(arrays), record)
        if wait:
            self._steps.wait()

    def _finish_background_write(self) -> bool:
        """Wait for the previous save and return whether it failed.

        A failed one cannot be repeated: the run has gone on and its arrays are gone.
        """
        try:
            self.wait()
        except MachineError as error:
            message = f"checkpoint {self._saving} is lost, the run goes on"
            self._discard_unfinished(message, error)
            return True
        return False

    def _discard_unfinished(self, message: str, error: Exception) -> None:
        """Warn about a failed write and clear it away."""
        if processes.index() == 0:
            reason = str(error).partition("\n")[0][:200]
            print(f"warning: {message}: {reason}", file=sys.stderr)
        self._steps.discard_unfinished()

    def _require_finite_params(self, step: int, arrays: dict[str, jax.Array]) -> None:
        params = {path: array for path, array in arrays.items() if path.startswith("params.")}
        is_finite = jax.device_get(digests.all_finite(params))
        bad = [path for path, finite in is_finite.items() if not finite]
        if bad:
            more = f" and {len(bad) - 3} more arrays" if len(bad) > 3 else ""
            raise InputError(
                f"the parameters are not finite any more at step {step}: it is not saved",
                where=", ".join(bad[:3]) + more,
                why="the training diverged",
                fix="lower --optimizer.learning-rate in a new --run-dir; the checkpoints of "
                "earlier steps are whole",
            )

    def _require_disk_space(self, step: int, arrays: dict[str, jax.Array]) -> None:
        """Raise MachineError unless the uncompressed arrays fit on the disk."""
        needed = sum(array.nbytes for array in arrays.values())
        free = self._steps.free_bytes()
        if free is None:
            return
        if processes.any_of(needed > free):
            raise MachineError(
                f"checkpoint {step} needs {needed / 1e6:,.1f} MB and the disk has "
                f"{free / 1e6:,.1f} MB free",
                where=self._steps.where,
                fix="free some space and run the same command again: it goes on from the "
                "checkpoint before",
            )

    def _write_error(self, step: int, error: OSError | ValueError) -> MachineError:
        text = str(error)
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        is_full |= "RESOURCE_EXHAUSTED" in text or "No space left" in text
        reason = ": the disk is full" if is_full else ""
        remedy = "Free some space" if is_full else "Repair the cause above"
        return MachineError(
            f"Checkpoint {step} was not saved{reason}. Earlier ones are whole.",
            where=self._steps.where,
            why=text.partition("\n")[0][:200],
            fix=f"{remedy} and run the same command again.",
        )

    def wait(self) -> None:
        """Return once every save is durable and old steps are deleted, or raise MachineError."""
        error = _first_error(self._steps.wait)
        if error is not None:
            raise self._write_error(self._saving, error) from error
        self._steps.settle()

    def close(self) -> None:
        """Wait for everything and stop the background threads."""
        self.wait()
        self._steps.close()

    # --- the steps ---

    def latest(self) -> int | None:
        """Return the newest committed step that is not set aside, or None if none was ever saved.

        Raises DamagedDataError if all saved steps are set aside.
        """
        self._finish_background_write()
        newest, damaged = processes.from_first(
            lambda: (max(self._steps.committed(), default=None), self._steps.damaged())
        )
        if newest is None and damaged:
            raise DamagedDataError(
                "No checkpoint of this run is whole.",
                where=self._steps.where,
                why=f"damaged and set aside: {', '.join(damaged)}",
                fix="Put a good copy of one back, or begin anew in another --run-dir (or without "
                "those).",
            )
        return newest

    def steps(self) -> list[int]:
        """Return the committed steps that are not set aside, in ascending order."""
        return self._steps.committed()

    def damaged_steps(self) -> list[str]:
        """Return the names of the steps that were set aside."""
        return self._steps.damaged()

    def set_aside(self, step: int) -> str:
        """Rename a damaged step, so that `latest` is the one before, and return its new place."""
        processes.gather(None)  # All processes have listed the steps before this changes them.
        new_place = processes.from_first(lambda: self._steps.set_aside(step))
        self._steps.reload()
        return new_place

    # --- reading ---

    def restore(
        self, step: int, abstract_state: Tree, part: str = ""
    ) -> tuple[Tree, dict[str, Any]]:
        """Read a step back as (state, extra); only arrays whose path begins with `part`.

        Each array gets the dtype and sharding of `abstract_state` (see `abstract`). A leaf without
        a sharding goes to the first local device.

        Raises:
          InputError: the step has another format, or its arrays are not those of `abstract_state`.
          DamagedDataError: the arrays are not what was saved.
          MachineError: the files are intact but cannot be read on this machine.
        """
        expected = digests.flatten(abstract_state)
        record = self._read_record(step)
        saved = {path: leaf for path, leaf in record["leaves"].items() if path.startswith(part)}
        self._require_structure(step, saved, expected)
        arrays = self._restore_arrays(step, record, expected)
        self._steps.was_restored(step)
        structure = jax.tree.structure(abstract_state)
        state = jax.tree.unflatten(structure, [arrays[path] for path in expected])
        return state, record["extra"]

    def check(self, step: int) -> None:
        """Raise DamagedDataError if a step is not what was saved.

        Holds about `CHECK_BYTES` of it in memory at a time.
        """
        record = self._read_record(step)
        leaves: dict[str, jax.ShapeDtypeStruct] = {}
        size = 0
        for path, saved in record["leaves"].items():
            leaf = jax.ShapeDtypeStruct(saved["shape"], saved["dtype"])
            leaves[path] = leaf
            size += leaf.size * leaf.dtype.itemsize
            if size > CHECK_BYTES:
                self._restore_arrays(step, record, leaves)
                leaves = {}
                size = 0
        self._restore_arrays(step, record, leaves)

    def _restore_arrays(
        self, step: int, record: dict[str, Any], expected: dict[str, Any]
    ) -> dict[str, jax.Array]:
        """Return path -> array of the expected leaves. Raises as `restore` does."""
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        target = {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or device)
            for path, leaf in expected.items()
        }
        arrays = {
            path: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
            for path, leaf in target.items()
            if not leaf.size
        }
        stored = _without_empty(target)
        arrays |= self._read(step, lambda step: self._steps.read_arrays(step, stored))
        restored = digests.describe(sharding.in_device_memory(arrays))
        for path in expected:
            if restored[path] != record["leaves"][path]:
                raise self._damaged(
                    step, f"array {path} is not the one that was saved", why="Its digest differs."
                )
        return arrays

    def _read(self, step: int, read: Callable[[int], T]) -> T:
        """Return read(step), or raise on all processes if it fails on any."""
        if step not in self._steps.committed():
            raise InputError(
                f"There is no checkpoint of step {step}.",
                where=self._steps.where,
                fix=f"Choose one of {self._steps.committed()}.",
            )
        result = None
        failure = None
        reason = ""
        with _quiet_pending_reads():
            try:
                result = read(step)
            except Exception as error:  # tensorstore's errors arrive as bare Exception
                failure = error
                reason = str(error).partition("\n")[0][:200] or type(error).__name__
                gc.collect()
        if not processes.any_of(failure is not None):
            return cast(T, result)
        reason = reason or "another process cannot read it"
        is_damaged = failure is not None and self._steps.is_damage(step, failure)
        if processes.any_of(is_damaged):
            raise self._damaged(step, "it cannot be read", reason)
        raise MachineError(
            f"Checkpoint {step} is whole, but cannot be read here.",
            where=self._steps.place(step),
            why=reason,
            fix="repair the cause above; the checkpoint stays as it is",
        )

    def _read_record(self, step: int) -> dict[str, Any]:
        record = self._read(step, self._steps.read_record)
        saved_hash = record.pop("sha256", None)
        if processes.any_of(saved_hash != run_files.checksum(record)):
            raise self._damaged(step, "its record is not the one that was saved")
        self._require_format(step, record.get("format", 1))
        if processes.any_of(record["step"] != step):
            raise self._damaged(step, f"it is a copy of checkpoint {record['step']}")
        return record

    def _require_format(self, step: int, number: int) -> None:
        if number == FORMAT:
            return
        article, age = ("a", "newer") if number > FORMAT else ("an", "older")
        raise InputError(
            f"Checkpoint {step} has format {number}; this program reads format {FORMAT}.",
            where=self._steps.place(step),
            why=f"{article} {age} tpu_rl wrote it",
            fix=f"Go on with the {age} tpu_rl, or begin in another --run-dir.",
        )

    def _require_structure(
        self, step: int, saved: dict[str, Any], expected: dict[str, Any]
    ) -> None:
        """Raise InputError unless the saved arrays have the expected paths, shapes and dtypes."""
        differences = []
        for path in expected.keys() - saved.keys():
            differences.append(f"{path} is missing in the checkpoint")
        for path in saved.keys() - expected.keys():
            differences.append(f"{path} is only in the checkpoint")
        for path in saved.keys() & expected.keys():
            old = saved[path]
            new = digests.shape_and_dtype(expected[path])
            if {**old, **new} != old:
                differences.append(
                    f"{path} is {old['dtype']}{old['shape']} in the checkpoint, "
                    f"not {new['dtype']}{new['shape']}"
                )
        if not differences:
            return
        more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise InputError(
            f"Checkpoint {step} is not of this model, optimizer and algorithm.",
            where=self._steps.place(step),
            why="; ".join(sorted(differences)[:5]) + more,
            fix="Use the configuration that the run was started with, or another --run-dir.",
        )

    def _damaged(self, step: int, what: str, why: str = "") -> DamagedDataError | InputError:
        """Return the error for a step that is not what was saved.

        A reader may find a step half deleted by the run itself: that is no damage.
        """
        if not self._writes:
            self._steps.reload()
            if step not in self._steps.committed():
                return InputError(
                    f"Checkpoint {step} was deleted while it was being read.",
                    where=self._steps.place(step),
                    why="The run goes on, and keeps its newest ones only.",
                    fix="Run the same command again.",
                )
        return DamagedDataError(
            f"Checkpoint {step} is damaged: {what}.",
            where=self._steps.place(step),
            why=why,
            fix="Run the run's own command: it sets this step aside and goes on from the one "
            "before.",
        )


def _first_error(work: Callable[[], Any]) -> OSError | ValueError | None:
    """Call `work` on every process; return None if it succeeded on all of them.

    Otherwise return the error of this process, or an OSError if only another process failed.
    """
    failure = None
    try:
        work()
    except (OSError, ValueError) as error:
        failure = error
    if processes.any_of(failure is not None):
        return failure or OSError("another process failed")
    return None


@contextmanager
def _quiet_pending_reads() -> Iterator[None]:
    """Silence the reads that Orbax leaves pending after one of them fails.

    Each of them otherwise prints a page when it ends or is collected.
    """
    hook_before = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: None
    try:
        yield
    finally:
        sys.unraisablehook = hook_before


def _without_empty(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays without those of size zero, which Orbax refuses."""
    return {path: array for path, array in arrays.items() if array.size}
