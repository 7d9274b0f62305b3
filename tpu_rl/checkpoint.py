"""Checkpoints: everything that a run needs to go on, in one atomic step, with a digest of every array.

A step holds the arrays of a pytree (parameters, optimizer state, algorithm state) and one JSON object (`extra`: data
position, counters, fingerprint of the configuration). Orbax commits both or neither, also under kill -9. What Orbax
lacks is added here: it restores flipped bits silently, so each array's digest is saved beside it and compared after
reading; and it deletes old steps file by file, so a kill in between leaves a step that looks whole: old steps are
renamed away first and deleted afterwards. As soon as a step is committed, a manifest of its files (see `manifests`) is
written into it; a step that a kill left without one gets it once it has been restored.

A step that proves damaged is set aside: renamed into the folder `damaged`, never deleted, never used again. So whoever
resumes takes `latest`, restores it, and on DamagedDataError sets it aside and asks again.

Arrays are saved as a flat dict from path ("params.policy.embedding") to array, so that what is saved does not depend
on container types, and holes (None) and optax's named tuples come back exactly as the abstract tree has them.
"""

from __future__ import annotations

import errno
import gc
import logging
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from tpu_rl import digests, manifests, processes, sharding
from tpu_rl.errors import DamagedDataError, InputError, MachineError

Tree = Any
"""Any pytree of jax.Array; `restore` takes one of jax.ShapeDtypeStruct."""

FORMAT = 1
"""Of what a step holds. A record without a number is of format 1; whatever its format, `sha256` is of all the rest."""

SET_ASIDE = "damaged"
_TRASH = "deleted"
_TEMPORARY = ".orbax-checkpoint-tmp"


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
        import orbax.checkpoint as ocp  # imported here: it takes seconds
        from etils import epath

        logging.getLogger("absl").setLevel(logging.ERROR)  # orbax reports every file it touches
        self._ocp = ocp
        self._directory = epath.Path(directory).resolve()
        self._writes = keep is not None
        if not self._writes and not self._directory.exists():
            raise InputError("There are no checkpoints.", where=str(self._directory), fix="Give the folder of a run.")
        self._purge()
        self._saving = -1
        self._manifest: threading.Thread | None = None
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(keep),
            cleanup_tmp_directories=self._writes,
            todelete_subdir=_TRASH if self._writes else None,
            read_only=not self._writes,
        )
        self._manager = ocp.CheckpointManager(
            self._directory,
            options=options,
            item_handlers={"arrays": ocp.StandardCheckpointHandler(), "record": ocp.JsonCheckpointHandler()},
        )

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
        if step in self._manager.all_steps():
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
        args = self._ocp.args
        self._saving = step
        # force: orbax otherwise skips, without a word, a step that is not newer than all others.
        self._manager.save(
            step,
            args=args.Composite(arrays=args.StandardSave(_storable(arrays)), record=args.JsonSave(record)),
            force=True,
        )
        self._write_manifest_once_committed(step)
        if wait:
            self._manager.wait_until_finished()

    def _write_manifest_once_committed(self, step: int) -> None:
        """In the background, on process 0."""

        def write() -> None:
            try:
                self._manager.wait_until_finished()
            except (OSError, ValueError):
                return  # `wait` raises it too
            try:
                manifests.write(self._directory / str(step))
            except OSError as error:
                print(f"warning: checkpoint {step} is whole, but has no manifest: {error}", file=sys.stderr)

        if self._writes and processes.index() == 0:
            self._manifest = threading.Thread(target=write, name="manifest")
            self._manifest.start()

    def _settle(self) -> bool:
        """Wait for the save before; whether it failed. Nothing can be written again by then: the run has gone on."""
        try:
            self.wait()
        except MachineError as error:
            self._forget_unfinished(f"checkpoint {self._saving} is lost, the run goes on", error)
            return True
        return False

    def _forget_unfinished(self, what: str, error: Exception) -> None:
        """Say what failed and clear it away, also from orbax's list of steps, where a failed save may stand."""

        def forget() -> None:
            print(f"warning: {what}: {str(error).partition(chr(10))[0][:200]}", file=sys.stderr)
            for path in self._directory.iterdir():
                if _TEMPORARY in path.name:
                    path.rmtree()

        processes.from_first(forget)
        self._manager.reload()

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
        if str(self._directory).startswith("gs://"):
            return
        need, have = sum(array.nbytes for array in arrays.values()), shutil.disk_usage(self._directory).free
        if processes.any_of(need > have):
            raise MachineError(
                f"checkpoint {step} needs {need / 1e6:,.1f} MB and the disk has {have / 1e6:,.1f} MB free",
                where=str(self._directory),
                fix="free some space and run the same command again: it goes on from the checkpoint before",
            )

    def wait(self) -> None:
        """Return when every save so far is durable and old steps are gone from the disk, or raise MachineError."""
        error = _on_any(self._manager.wait_until_finished)
        if error is not None:
            raise self._explain_write(self._saving, error) from error
        if self._manifest is not None:
            self._manifest.join()
        self._purge()

    def latest(self) -> int | None:
        """The newest step that is committed and not set aside, or None where none was ever saved.

        Raises DamagedDataError if all that were saved are set aside.
        """
        self.wait()
        place = self._directory / SET_ASIDE

        def look() -> tuple[int | None, list[str]]:
            return self._manager.latest_step(), sorted(path.name for path in place.iterdir()) if place.exists() else []

        newest, aside = processes.from_first(look)
        if newest is None and aside:
            raise DamagedDataError(
                "No checkpoint of this run is whole.",
                where=str(self._directory),
                why=f"damaged and set aside: {', '.join(aside)}",
                fix=f"Put a good copy of one back, or begin anew in another --run-dir (or without {place}).",
            )
        return newest

    def set_aside(self, step: int) -> str:
        """Rename a damaged step into the folder of damaged ones, so that `latest` is the one before; its new place."""

        def move() -> str:
            place = self._directory / SET_ASIDE / str(step)
            for again in range(1, 1000):
                if not place.exists():
                    break
                place = self._directory / SET_ASIDE / f"{step}.{again}"
            place.parent.mkdir(exist_ok=True)
            (self._directory / str(step)).rename(place)
            return str(place)

        processes.gather(None)  # all have read what is there before it changes
        moved = processes.from_first(move)
        self._manager.reload()
        return moved

    def restore(self, step: int, abstract_state: Tree) -> tuple[Tree, dict[str, Any]]:
        """Read a step back as (state, extra), each array with the dtype and sharding of `abstract_state` (`abstract`).

        A leaf without a sharding goes to the first local device. Raises InputError if the step is of another format or
        its arrays are not those of `abstract_state`, DamagedDataError if they are not what was saved, and MachineError
        if its files are and yet cannot be read.
        """
        expected = digests.flatten(abstract_state)
        record = self._read(step, record=self._ocp.args.JsonRestore())["record"]
        if processes.any_of(record.pop("sha256", None) != digests.sha256(record)):
            raise self._damaged(step, "its record is not the one that was saved")
        self._compare_format(step, record.get("format", 1))
        self._compare_structure(step, record["leaves"], expected)
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
        arrays |= self._read(step, arrays=self._ocp.args.StandardRestore(_storable(target)))["arrays"]
        found = digests.describe(sharding.in_device_memory(arrays))
        for path, leaf in record["leaves"].items():
            if found[path] != leaf:
                raise self._damaged(step, f"array {path} is not the one that was saved", why="Its digest differs.")
        if not (self._directory / str(step) / manifests.MANIFEST).exists():
            self._write_manifest_once_committed(step)
        state = jax.tree.unflatten(jax.tree.structure(abstract_state), [arrays[path] for path in expected])
        return state, record["extra"]

    def close(self) -> None:
        """Wait for everything and stop the background threads."""
        self.wait()
        self._manager.close()

    def _read(self, step: int, **items: Any) -> Any:
        if step not in self._manager.all_steps():
            raise InputError(
                f"There is no checkpoint of step {step}.",
                where=str(self._directory),
                fix=f"Choose one of {sorted(self._manager.all_steps())}.",
            )
        found, why = None, ""
        with _without_pages_of_errors():
            try:
                found = self._manager.restore(step, args=self._ocp.args.Composite(**items))
            except Exception as error:  # tensorstore's errors arrive as bare Exception, with neither step nor remedy
                why = str(error).partition("\n")[0][:200] or type(error).__name__
        if not processes.any_of(bool(why)):
            return found
        why = why or "another process cannot read it"
        # A lack of memory or of rights is no damage: nothing may be set aside for it.
        as_written = manifests.compare(self._directory / str(step)) == manifests.Differences([], [], [])
        if processes.any_of(not as_written):
            raise self._damaged(step, "it cannot be read", why)
        raise MachineError(
            f"Checkpoint {step} is whole, but cannot be read here.", where=str(self._directory / str(step)), why=why
        )

    def _compare_format(self, step: int, number: int) -> None:
        if number != FORMAT:
            newer = number > FORMAT
            raise InputError(
                f"Checkpoint {step} has format {number}; this program reads format {FORMAT}.",
                where=str(self._directory / str(step)),
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
                where=str(self._directory / str(step)),
                why=shown + more,
                fix="Use the configuration that the run was started with, or another --run-dir.",
            )

    def _damaged(self, step: int, what: str, why: str = "") -> DamagedDataError:
        where = self._directory / str(step)
        return DamagedDataError(
            f"Checkpoint {step} is damaged: {what}.",
            where=str(where),
            why=why,
            fix="Run the run's own command: it sets this step aside and goes on from the one before. Check the disk.",
        )

    def _explain_write(self, step: int, error: OSError | ValueError) -> MachineError:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        full |= "RESOURCE_EXHAUSTED" in str(error) or "No space left" in str(error)
        return MachineError(
            f"Checkpoint {step} was not saved{': the disk is full' if full else ''}. Earlier ones are whole.",
            where=str(self._directory),
            why=str(error).partition("\n")[0][:200],
            fix=f"{'Free some space' if full else 'See to the disk'} and run the same command again.",
        )

    def _purge(self) -> None:
        """Delete what orbax renamed away; process 0 does the writing in this directory."""
        trash = self._directory / _TRASH
        if self._writes and processes.index() == 0 and trash.exists():
            trash.rmtree()


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
