"""Checkpoints: everything that a run needs to go on, in one atomic step, with a digest of every array.

A step holds the arrays of a pytree (parameters, optimizer state, algorithm state) and one JSON object (`extra`: data
position, counters, fingerprint of the configuration). Orbax commits both or neither, also under kill -9. What Orbax
lacks is added here: it restores flipped bits silently, so each array's digest is saved beside it and compared after
reading; and it deletes old steps file by file, so a kill in between leaves a step that looks whole: old steps are
renamed away first and deleted afterwards.

Arrays are saved as a flat dict from path ("params.policy.embedding") to array, so that what is saved does not depend
on container types, and holes (None) and optax's named tuples come back exactly as the abstract tree has them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_rl.errors import DamagedDataError, InputError, MachineError

Tree = Any
"""Any pytree of jax.Array; `restore` takes one of jax.ShapeDtypeStruct."""

_TRASH = "deleted"


def abstract(state: Tree) -> Tree:
    """Shape, dtype and sharding of every leaf: what `Checkpoints.restore` needs to know of a state."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


def digest(tree: Tree) -> str:
    """Hex digest of paths, dtypes, shapes and bits of a tree's arrays; the same however they are sharded.

    It tells accidents apart, not forgeries: each array enters with 64 bits of a position-mixed sum.
    """
    return _sha256(_describe(_flatten(tree)))


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

    def save(self, step: int, state: Tree, extra: dict[str, Any]) -> None:
        """Save a step. `state` may be donated right after; the step counts only once `wait` has returned.

        Raises MachineError if the disk is full (also for an earlier save that failed in the background).
        """
        if not self._writes:
            raise ValueError("these checkpoints are open for reading")
        self.wait()
        if step in self._manager.all_steps():
            raise ValueError(f"step {step} is saved already")
        arrays = _flatten(state)
        weak = [path for path, array in arrays.items() if array.weak_type]
        if weak:
            raise ValueError(
                f"give {weak} a dtype: weak types are not saved, and a resumed run would promote otherwise"
            )
        record = {"leaves": _describe(arrays), "extra": extra}
        record["sha256"] = _sha256(record)
        args = self._ocp.args
        try:
            # force: orbax otherwise skips, without a word, a step that is not newer than all others.
            self._manager.save(
                step,
                args=args.Composite(arrays=args.StandardSave(_storable(arrays)), record=args.JsonSave(record)),
                force=True,
            )
        except (OSError, ValueError) as error:
            raise self._explain_write(error) from error

    def wait(self) -> None:
        """Return when every save so far is durable and old steps are gone from the disk."""
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError) as error:
            raise self._explain_write(error) from error
        self._purge()

    def latest(self) -> int | None:
        """The newest step that is whole, or None."""
        self.wait()
        return self._manager.latest_step()

    def restore(self, step: int, abstract_state: Tree) -> tuple[Tree, dict[str, Any]]:
        """Read a step back as (state, extra), each array with the dtype and sharding of `abstract_state` (`abstract`).

        A leaf without a sharding goes to the first local device. Raises InputError if the step's arrays are not those
        of `abstract_state`, and DamagedDataError if they are not what was saved.
        """
        expected = _flatten(abstract_state)
        record = self._read(step, record=self._ocp.args.JsonRestore())["record"]
        if record.pop("sha256", None) != _sha256(record):
            raise self._damaged(step, "its record is not the one that was saved")
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
        found = _describe(arrays)
        for path, leaf in record["leaves"].items():
            if found[path] != leaf:
                raise self._damaged(step, f"array {path} is not the one that was saved", why="Its digest differs.")
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
        try:
            return self._manager.restore(step, args=self._ocp.args.Composite(**items))
        except Exception as error:  # tensorstore's errors arrive as bare Exception, with neither step nor remedy
            raise self._damaged(step, "it cannot be read", why=str(error).partition("\n")[0][:200]) from error

    def _compare_structure(self, step: int, saved: dict[str, Any], expected: dict[str, Any]) -> None:
        """Raise InputError unless the saved arrays have the expected paths, shapes and dtypes."""
        differences = [f"{path} is missing in the checkpoint" for path in expected if path not in saved]
        differences += [f"{path} is only in the checkpoint" for path in saved if path not in expected]
        for path in saved.keys() & expected.keys():
            was, now = saved[path], _shape_and_dtype(expected[path])
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
            fix=f"Delete {where}; the same command then resumes from the step before it. Check the disk.",
        )

    def _explain_write(self, error: OSError | ValueError) -> Exception:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or "RESOURCE_EXHAUSTED" in str(error) or "No space left" in str(error):
            return MachineError(
                "The disk is full: the checkpoint was not saved. Earlier ones are whole.",
                where=str(self._directory),
                fix="Free some space and run the same command again.",
            )
        return error

    def _purge(self) -> None:
        """Delete what orbax renamed away; process 0 does the writing in this directory."""
        trash = self._directory / _TRASH
        if self._writes and jax.process_index() == 0 and trash.exists():
            trash.rmtree()


# --- digests -----------------------------------------------------------------------------------------------------


def _flatten(tree: Tree) -> dict[str, Any]:
    """Path -> leaf, in the tree's order; holes (None) have no leaf."""
    leaves = jax.tree.leaves_with_path(tree)
    flat = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if len(flat) != len(leaves):
        raise ValueError("two leaves have the same path: a key contains a dot")
    return flat


def _storable(arrays: dict[str, Any]) -> dict[str, Any]:
    """Without arrays of size zero, which orbax refuses."""
    return {path: array for path, array in arrays.items() if array.size}


def _shape_and_dtype(leaf: Any) -> dict[str, Any]:
    return {"dtype": str(leaf.dtype), "shape": list(leaf.shape)}


def _describe(arrays: dict[str, jax.Array]) -> dict[str, dict[str, Any]]:
    """Path -> dtype, shape and digest (16 hex digits) of each array."""
    seeds = np.array([0x243F6A88, 0x85A308D3], np.uint32)
    sums = {path: [_position_mixed_sum(array, seed) for seed in seeds] for path, array in arrays.items()}
    return {
        path: {**_shape_and_dtype(arrays[path]), "digest": "".join(f"{half:08x}" for half in halves)}
        for path, halves in jax.device_get(sums).items()
    }


@jax.jit
def _position_mixed_sum(array: jax.Array, seed: np.uint32) -> jax.Array:
    """The sum modulo 2**32, [] uint32, over hashes of every element's bits and its position.

    Integer sums do not depend on the order of adding, hence not on sharding; each flipped bit, swapped or shifted
    element changes this one but for a chance of 2**-32. One sum a program: two would keep the hashes in memory.
    """
    bits = _bits(array)
    position = jnp.zeros(bits.shape, jnp.uint32)
    for axis in range(bits.ndim):
        stride = math.prod(bits.shape[axis + 1 :]) % 2**32
        position += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * np.uint32(stride)
    return jnp.sum(_avalanche((bits ^ (position * np.uint32(0x9E3779B1))) + seed), dtype=jnp.uint32)


def _bits(array: jax.Array) -> jax.Array:
    """The bit patterns of any real or boolean array as uint32; 64-bit elements give a new last axis of two."""
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    width = min(array.dtype.itemsize * 8, 32)
    return jax.lax.bitcast_convert_type(array, f"uint{width}").astype(jnp.uint32)


def _avalanche(x: jax.Array) -> jax.Array:
    """Each input bit flips each output bit with probability about one half: the finaliser of MurmurHash3 (Appleby)."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
