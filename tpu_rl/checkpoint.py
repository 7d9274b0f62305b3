"""Checkpoints: everything that a run needs to go on, in one atomic step, with a digest of every array.

A step holds the arrays of a pytree (parameters, optimizer state, algorithm state) and one JSON object (`extra`: data
position, counters, fingerprint of the configuration). Both are committed or neither, also under kill -9: by orbax in a
folder (see `step_folders`), by one last object in a store (see `step_objects`). Neither sees flipped bits, so each
array's digest is saved beside it and compared after reading.

A step that proves damaged is set aside: named `damaged`, never deleted, never used again. So whoever resumes takes
`latest`, restores it, and on DamagedDataError sets it aside and asks again.

Arrays are saved as a flat dict from path ("params.policy.embedding") to array, so that what is saved does not depend
on container types, and holes (None) and optax's named tuples come back exactly as the abstract tree has them.
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

from tpu_rl import digests, processes, sharding, stores
from tpu_rl.errors import DamagedDataError, InputError, MachineError
from tpu_rl.step_folders import StepFolders
from tpu_rl.step_objects import StepObjects

T = TypeVar("T")
Tree = Any
"""Any pytree of jax.Array; `restore` takes one of jax.ShapeDtypeStruct."""

FORMAT = 1
"""Of what a step holds. A record without a number is of format 1; whatever its format, `sha256` is of all the rest."""


def abstract(state: Tree) -> Tree:
    """Shape, dtype and sharding of every leaf: what `Checkpoints.restore` needs to know of a state."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


def open_checkpoints(directory: str, keep: int = 2) -> Checkpoints:
    """Open (and create) a run's directory of checkpoints, local or gs://, of which the `keep` newest stay.

    Clears away what an interrupted save or deletion left: only the run itself may do so, others `read_checkpoints`.
    """
    return Checkpoints(directory, keep)


def read_checkpoints(directory: str) -> Checkpoints:
    """Open a directory of checkpoints without ever writing to it; the run may be going on meanwhile."""
    return Checkpoints(directory, None)


class Checkpoints:
    """The checkpoints of one run, newest last. All processes of the run call every method together."""

    def __init__(self, directory: str, keep: int | None):
        kind = StepObjects if stores.is_address(directory) else StepFolders
        self._writes = keep is not None
        if not self._writes and not kind.exists(directory):
            raise InputError("There are no checkpoints.", where=directory, fix="Give the folder of a run.")
        self._saving = -1
        self._steps = kind(directory, keep)

    def save(self, step: int, state: Tree, extra: dict[str, Any], wait: bool = False) -> None:
        """Save a step. `state` may be donated right after; the step counts only once it is committed, in the background
        unless told to `wait`.

        A write that fails is tried once more. One that fails in the background, where there is nothing left to write
        again, is said when the next step is saved, which then waits. Raises MachineError if the disk is full or the
        second try fails, and InputError if a parameter is not finite.
        """
        if not self._writes:
            raise ValueError("these checkpoints are open for reading")
        wait |= self._settle()
        if step in self._steps.all():
            raise ValueError(f"step {step} is saved already")
        # Those in the host's memory orbax would not copy, and the next step is given them to write over.
        arrays = digests.flatten(sharding.in_device_memory(state))
        weak = [path for path, array in arrays.items() if array.weak_type]
        if weak:
            raise ValueError(
                f"give {weak} a dtype: weak types are not saved, and a resumed run would promote otherwise"
            )
        self._refuse_non_finite(step, arrays)
        self._ask_for_space(step, arrays)
        record = {"format": FORMAT, "leaves": digests.describe(arrays), "extra": extra}
        record["sha256"] = digests.sha256(record)
        error = _on_any(lambda: self._write(step, arrays, record, wait))
        if error is not None:
            self._forget_unfinished(f"checkpoint {step} was not written; trying once more", error)
            error = _on_any(lambda: self._write(step, arrays, record, wait=True))
            if error is not None:
                raise self._explain_write(step, error) from error

    def _write(self, step: int, arrays: dict[str, Any], record: dict[str, Any], wait: bool) -> None:
        self._saving = step
        self._steps.write(step, _storable(arrays), record)
        if wait:
            self._steps.wait()

    def _settle(self) -> bool:
        """Wait for the save before; whether it failed. Nothing can be written again by then: the run has gone on."""
        try:
            self.wait()
        except MachineError as error:
            self._forget_unfinished(f"checkpoint {self._saving} is lost, the run goes on", error)
            return True
        return False

    def _forget_unfinished(self, what: str, error: Exception) -> None:
        """Say what failed and clear it away."""
        if processes.index() == 0:
            print(f"warning: {what}: {str(error).partition(chr(10))[0][:200]}", file=sys.stderr)
        self._steps.forget_unfinished()

    def _refuse_non_finite(self, step: int, arrays: dict[str, jax.Array]) -> None:
        params = {path: array for path, array in arrays.items() if path.startswith("params.")}
        bad = [path for path, finite in jax.device_get(digests.all_finite(params)).items() if not finite]
        if bad:
            raise InputError(
                f"the parameters are not finite any more at step {step}: it is not saved",
                where=", ".join(bad[:3]) + (f" and {len(bad) - 3} more arrays" if len(bad) > 3 else ""),
                why="the training diverged",
                fix="lower --optimizer.learning-rate in a new --run-dir; the checkpoints of earlier steps are whole",
            )

    def _ask_for_space(self, step: int, arrays: dict[str, jax.Array]) -> None:
        """Raise MachineError unless the arrays fit on the disk as they are (they are stored compressed)."""
        need, have = sum(array.nbytes for array in arrays.values()), self._steps.free_bytes()
        if have is None:
            return
        if processes.any_of(need > have):
            raise MachineError(
                f"checkpoint {step} needs {need / 1e6:,.1f} MB and the disk has {have / 1e6:,.1f} MB free",
                where=self._steps.where,
                fix="free some space and run the same command again: it goes on from the checkpoint before",
            )

    def wait(self) -> None:
        """Return when every save so far is durable and old steps are gone from the disk, or raise MachineError."""
        error = _on_any(self._steps.wait)
        if error is not None:
            raise self._explain_write(self._saving, error) from error
        self._steps.settle()

    def latest(self) -> int | None:
        """The newest step that is committed and not set aside, or None where none was ever saved.

        Raises DamagedDataError if all that were saved are set aside.
        """
        self._settle()
        newest, aside = processes.from_first(lambda: (max(self._steps.all(), default=None), self._steps.aside()))
        if newest is None and aside:
            raise DamagedDataError(
                "No checkpoint of this run is whole.",
                where=self._steps.where,
                why=f"damaged and set aside: {', '.join(aside)}",
                fix="Put a good copy of one back, or begin anew in another --run-dir (or without those).",
            )
        return newest

    def set_aside(self, step: int) -> str:
        """Name a step damaged, so that `latest` is the one before; its new place."""
        processes.gather(None)  # all have read what is there before it changes
        moved = processes.from_first(lambda: self._steps.set_aside(step))
        self._steps.reload()
        return moved

    def restore(self, step: int, abstract_state: Tree) -> tuple[Tree, dict[str, Any]]:
        """Read a step back as (state, extra), each array with the dtype and sharding of `abstract_state` (`abstract`).

        A leaf without a sharding goes to the first local device. Raises InputError if the step is of another format or
        its arrays are not those of `abstract_state`, DamagedDataError if they are not what was saved, and MachineError
        if its files are and yet cannot be read.
        """
        expected = digests.flatten(abstract_state)
        record = self._read_record(step)
        self._compare_structure(step, record["leaves"], expected)
        arrays = self._restore_arrays(step, record, expected)
        self._steps.was_restored(step)
        state = jax.tree.unflatten(jax.tree.structure(abstract_state), [arrays[path] for path in expected])
        return state, record["extra"]

    def _restore_arrays(self, step: int, record: dict[str, Any], expected: dict[str, Any]) -> dict[str, jax.Array]:
        """Path -> array. Raises as `restore`."""
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
        arrays |= self._read(step, lambda step: self._steps.read_arrays(step, _storable(target)))
        found = digests.describe(sharding.in_device_memory(arrays))
        for path in expected:
            if found[path] != record["leaves"][path]:
                raise self._damaged(step, f"array {path} is not the one that was saved", why="Its digest differs.")
        return arrays

    def check(self, step: int) -> None:
        """Raises DamagedDataError where a step is not what was saved. About a gigabyte of it is in memory at a time."""
        record = self._read_record(step)
        leaves: dict[str, jax.ShapeDtypeStruct] = {}
        for path, leaf in record["leaves"].items():
            leaves[path] = jax.ShapeDtypeStruct(leaf["shape"], leaf["dtype"])
            size = sum(one.size * one.dtype.itemsize for one in leaves.values())
            if size > 2**30:
                self._restore_arrays(step, record, leaves)
                leaves = {}
        self._restore_arrays(step, record, leaves)

    def steps(self) -> list[int]:
        """Those that are committed and not set aside, in order."""
        return self._steps.all()

    def aside(self) -> list[str]:
        """The names of those that are set aside."""
        return self._steps.aside()

    def close(self) -> None:
        """Wait for everything and stop the background threads."""
        self.wait()
        self._steps.close()

    def _read(self, step: int, read: Callable[[int], T]) -> T:
        if step not in self._steps.all():
            raise InputError(
                f"There is no checkpoint of step {step}.",
                where=self._steps.where,
                fix=f"Choose one of {self._steps.all()}.",
            )
        found, failed, why = None, None, ""
        with _without_pages_of_errors():
            try:
                found = read(step)
            except Exception as error:  # tensorstore's errors arrive as bare Exception, with neither step nor remedy
                failed, why = error, str(error).partition("\n")[0][:200] or type(error).__name__
        if not processes.any_of(failed is not None):
            return cast(T, found)
        at_fault = failed is not None and self._steps.is_at_fault(step, failed)
        why = why or "another process cannot read it"
        if processes.any_of(at_fault):
            raise self._damaged(step, "it cannot be read", why)
        raise MachineError(
            f"Checkpoint {step} is whole, but cannot be read here.",
            where=self._steps.place(step),
            why=why,
            fix="see to what is said; the checkpoint stays as it is",
        )

    def _read_record(self, step: int) -> dict[str, Any]:
        record = self._read(step, self._steps.read_record)
        if processes.any_of(record.pop("sha256", None) != digests.sha256(record)):
            raise self._damaged(step, "its record is not the one that was saved")
        self._compare_format(step, record.get("format", 1))
        return record

    def _compare_format(self, step: int, number: int) -> None:
        if number != FORMAT:
            newer = number > FORMAT
            raise InputError(
                f"Checkpoint {step} has format {number}; this program reads format {FORMAT}.",
                where=self._steps.place(step),
                why=f"a{' newer' if newer else 'n older'} tpu_rl wrote it",
                fix=f"Go on with the {'newer' if newer else 'older'} tpu_rl, or begin in another --run-dir.",
            )

    def _compare_structure(self, step: int, saved: dict[str, Any], expected: dict[str, Any]) -> None:
        """Raise InputError unless the saved arrays have the expected paths, shapes and dtypes."""
        differences = [f"{path} is missing in the checkpoint" for path in expected if path not in saved]
        differences += [f"{path} is only in the checkpoint" for path in saved if path not in expected]
        for path in saved.keys() & expected.keys():
            was, now = saved[path], digests.shape_and_dtype(expected[path])
            if {**was, **now} != was:
                differences.append(
                    f"{path} is {was['dtype']}{was['shape']} in the checkpoint, not {now['dtype']}{now['shape']}"
                )
        if differences:
            shown = "; ".join(sorted(differences)[:5])
            more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
            raise InputError(
                f"Checkpoint {step} is not of this model, optimizer and algorithm.",
                where=self._steps.place(step),
                why=shown + more,
                fix="Use the configuration that the run was started with, or another --run-dir.",
            )

    def _damaged(self, step: int, what: str, why: str = "") -> DamagedDataError | InputError:
        if not self._writes:
            self._steps.reload()
            if step not in self._steps.all():
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
            fix="Run the run's own command: it sets this step aside and goes on from the one before.",
        )

    def _explain_write(self, step: int, error: OSError | ValueError) -> MachineError:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        full |= "RESOURCE_EXHAUSTED" in str(error) or "No space left" in str(error)
        return MachineError(
            f"Checkpoint {step} was not saved{': the disk is full' if full else ''}. Earlier ones are whole.",
            where=self._steps.where,
            why=str(error).partition("\n")[0][:200],
            fix=f"{'Free some space' if full else 'See to what is said'} and run the same command again.",
        )


def _on_any(work: Callable[[], Any]) -> OSError | ValueError | None:
    """Do it on every process; what went wrong here, or that something did elsewhere, or None where all went well."""
    error = None
    try:
        work()
    except (OSError, ValueError) as found:
        error = found
    return (error or OSError("another process failed")) if processes.any_of(error is not None) else None


@contextmanager
def _without_pages_of_errors() -> Iterator[None]:
    """Where one read fails, orbax leaves the others pending, and each prints a page when it ends or is collected."""
    hook_before = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: None
    try:
        yield
        gc.collect()
    finally:
        sys.unraisablehook = hook_before


# --- trees -----------------------------------------------------------------------------------------------------------


def _storable(arrays: dict[str, Any]) -> dict[str, Any]:
    """Without arrays of size zero, which orbax refuses."""
    return {path: array for path, array in arrays.items() if array.size}
