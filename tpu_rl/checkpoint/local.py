"""Steps of checkpoints in a folder that all processes share, written and committed by Orbax.

Orbax commits a step completely or not at all, also under kill -9. But it deletes old steps file by
file, so a kill in between would leave a step that looks complete: therefore old steps are renamed
away first and deleted afterwards. Once a step is committed, a manifest of its files (see
`manifests`) is written into it. A step that a kill left without a manifest gets one after it has
been restored successfully.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

from tpu_rl import run_files
from tpu_rl.checkpoint import manifests
from tpu_rl.runtime import processes

DAMAGED_FOLDER = "damaged"
_TRASH_FOLDER = "deleted"
_SHORTAGES = (
    "RESOURCE_EXHAUSTED",
    "PERMISSION_DENIED",
    *map(os.strerror, (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM)),
)
"""Texts of errors that mean a lack of memory, file handles or rights. The errors of tensorstore and
XLA have neither a type nor a number for it."""
_ORBAX_TEMPORARY = ".orbax-checkpoint-tmp"


class StepFolders:
    """The steps of one run, a folder each.

    All processes call every method together, unless its docstring says otherwise.
    """

    def __init__(self, directory: str, keep: int | None):
        """Open the folder and keep the `keep` newest steps; with None, write nothing ever."""
        import orbax.checkpoint as ocp  # Imported here because it takes seconds.

        logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every file it touches.
        self._ocp = ocp
        self._directory = Path(directory).resolve()
        self._writes = keep is not None
        self._manifest_thread: threading.Thread | None = None
        self._empty_trash()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(keep),
            cleanup_tmp_directories=self._writes,
            todelete_subdir=_TRASH_FOLDER if self._writes else None,
            read_only=not self._writes,
        )
        self._manager = ocp.CheckpointManager(
            self._directory,
            options=options,
            item_handlers={
                "arrays": ocp.StandardCheckpointHandler(),
                "record": ocp.JsonCheckpointHandler(),
            },
        )

    @property
    def where(self) -> str:
        """The folder of all steps, for messages."""
        return str(self._directory)

    def place(self, step: int) -> str:
        """Return the folder of a step, for messages."""
        return str(self._folder(step))

    def _folder(self, step: int) -> Path:
        return self._directory / str(step)

    @staticmethod
    def exists(directory: str) -> bool:
        """Return True if there is such a folder."""
        return Path(directory).exists()

    @staticmethod
    def listed(directory: str) -> list[int]:
        """Return the committed steps in ascending order, without Orbax. One process may call it.

        Orbax asks for JAX's devices, for which one process waits until all others ask, too. A step
        gets its name when it is committed.
        """
        names = (path.name for path in Path(directory).glob("*") if path.is_dir())
        return sorted(int(name) for name in names if name.isdecimal())

    def committed(self) -> list[int]:
        """Return the committed steps that are not set aside, in ascending order."""
        return sorted(self._manager.all_steps())

    def damaged(self) -> list[str]:
        """Return the names of the steps that were set aside. The first process alone may call."""
        folder = self._directory / DAMAGED_FOLDER
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []

    def free_bytes(self) -> int | None:
        """Return the free bytes of the disk, or None if there is no limit."""
        run_files.require_there(self._directory)
        return shutil.disk_usage(self._directory).free

    # --- writing ---

    def write(self, step: int, arrays: dict[str, Any], record: dict[str, Any]) -> None:
        """Begin to write a step. `wait` returns when it is committed.

        The arrays may be donated as soon as this returns.
        """
        args = self._ocp.args
        # Without `force`, Orbax silently skips a step that is not newer than all others.
        self._manager.save(
            step,
            args=args.Composite(arrays=args.StandardSave(arrays), record=args.JsonSave(record)),
            force=True,
        )
        self._write_manifest_once_committed(step)

    def wait(self) -> None:
        """Return when everything written is committed, or raise OSError or ValueError."""
        self._manager.wait_until_finished()

    def settle(self) -> None:
        """Finish the manifest and delete old steps, after a `wait` that succeeded everywhere."""
        if self._manifest_thread is not None:
            self._manifest_thread.join()
        self._empty_trash()

    def _empty_trash(self) -> None:
        """Delete the steps that Orbax renamed away; process 0 does the writing in this folder."""
        trash = self._directory / _TRASH_FOLDER
        if self._writes and processes.index() == 0 and trash.exists():
            shutil.rmtree(trash)

    def discard_unfinished(self) -> None:
        """Clear away a write that failed, also from the steps that Orbax lists."""
        if processes.index() == 0:
            for path in self._directory.iterdir():
                if _ORBAX_TEMPORARY in path.name:
                    shutil.rmtree(path)
        processes.gather(None)
        self._manager.reload()

    def set_aside(self, step: int) -> str:
        """Move a step into the folder of damaged steps and return its new place.

        Only the first process calls this; then all call `reload`.
        """
        target = self._directory / DAMAGED_FOLDER / str(step)
        for attempt in range(1, 1000):
            if not target.exists():
                break
            target = self._directory / DAMAGED_FOLDER / f"{step}.{attempt}"
        target.parent.mkdir(exist_ok=True)
        self._folder(step).rename(target)
        return str(target)

    def reload(self) -> None:
        """List the steps again."""
        self._manager.reload()

    def close(self) -> None:
        """Stop the background threads."""
        self._manager.close()

    def _write_manifest_once_committed(self, step: int) -> None:
        """Write the manifest of a step in the background, on process 0."""

        def write() -> None:
            try:
                self._manager.wait_until_finished()
            except (OSError, ValueError):
                return  # `wait` raises it too.
            try:
                manifests.write(self._folder(step))
            except OSError as error:
                print(
                    f"warning: checkpoint {step} is whole, but has no manifest: {error}",
                    file=sys.stderr,
                )

        if self._writes and processes.index() == 0:
            self._manifest_thread = threading.Thread(target=write, name="manifest")
            self._manifest_thread.start()

    # --- reading ---

    def read_record(self, step: int) -> dict[str, Any]:
        """Return the JSON record of a step.

        Raises ValueError, on all processes, if the files are not those of its manifest, which the
        first process compares. Reading arrays from damaged files would leave threads that print
        pages.
        """

        def damaged() -> list[str]:
            try:
                differences = manifests.compare(self._folder(step))
            except OSError as error:  # The other processes wait for an answer.
                return [str(error)]
            return [] if differences is None else [*differences.changed, *differences.missing]

        # orbax's restore waits for all processes, so they must agree before it.
        names = processes.from_first(damaged)
        if names:
            raise ValueError(f"changed or missing: {', '.join(names[:3])}")
        args = self._ocp.args
        return self._manager.restore(step, args=args.Composite(record=args.JsonRestore()))["record"]

    def read_arrays(self, step: int, target: dict[str, Any]) -> dict[str, Any]:
        """Return path -> array.

        Args:
          target: path -> jax.ShapeDtypeStruct with a sharding, none of size zero; all arrays, or
            some of them.
        """
        ocp = self._ocp
        handler = ocp.PyTreeCheckpointHandler()
        restore_args = ocp.checkpoint_utils.construct_restore_args(target)
        args = ocp.args.PyTreeRestore(target, restore_args=restore_args, partial_restore=True)
        try:
            return handler.restore(self._manager.directory / str(step) / "arrays", args=args)
        finally:
            handler.close()

    def is_damage(self, step: int, error: Exception) -> bool:
        """Return True if a failed read means that the step is not as it was written.

        A lack of memory or of rights is no damage: no step may be set aside for it.
        """
        differences = manifests.compare(self._folder(step))
        if differences is not None:
            return any(differences)
        # A kill left the step without a manifest; only the error tells.
        is_shortage = any(text in str(error) for text in _SHORTAGES)
        return not (isinstance(error, MemoryError) or is_shortage)

    def was_restored(self, step: int) -> None:
        """Give a step that proved whole the manifest that a kill may have left it without."""
        if not (self._folder(step) / manifests.MANIFEST).exists():
            self._write_manifest_once_committed(step)
