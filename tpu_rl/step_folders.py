"""Steps of checkpoints in a folder that all processes share: orbax writes and commits them.

Orbax commits a step wholly or not at all, also under kill -9. But it deletes old steps file by file, so that a kill in
between leaves a step that looks whole: old steps are renamed away first and deleted afterwards. As soon as a step is
committed, a manifest of its files (see `manifests`) is written into it; a step that a kill left without one gets it
once it has been restored.
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

from tpu_rl import manifests, processes

SET_ASIDE = "damaged"
_TRASH = "deleted"
_LACKS = (
    "RESOURCE_EXHAUSTED",
    "PERMISSION_DENIED",
    *map(os.strerror, (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM)),
)
"""What errors of tensorstore and XLA, which have neither type nor number, say where something is lacking."""
_TEMPORARY = ".orbax-checkpoint-tmp"


class StepFolders:
    """The steps of one run; all processes call every method together, unless it says otherwise."""

    def __init__(self, directory: str, keep: int | None):
        """Of which the `keep` newest stay; None: nothing is ever written."""
        import orbax.checkpoint as ocp  # imported here: it takes seconds

        logging.getLogger("absl").setLevel(logging.ERROR)  # orbax reports every file it touches
        self._ocp = ocp
        self._directory = Path(directory).resolve()
        self._writes = keep is not None
        self._manifest: threading.Thread | None = None
        self.purge()
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

    @property
    def where(self) -> str:
        return str(self._directory)

    def place(self, step: int) -> str:
        return str(self._directory / str(step))

    @staticmethod
    def exists(directory: str) -> bool:
        return Path(directory).exists()

    def all(self) -> list[int]:
        """Those that are committed and not set aside."""
        return sorted(self._manager.all_steps())

    def aside(self) -> list[str]:
        """The names of those that are set aside. Only on the first process."""
        place = self._directory / SET_ASIDE
        return sorted(path.name for path in place.iterdir()) if place.exists() else []

    def free_bytes(self) -> int | None:
        """Of the disk; None where there is no end."""
        return shutil.disk_usage(self._directory).free

    def write(self, step: int, arrays: dict[str, Any], record: dict[str, Any]) -> None:
        """Begin to write a step; the arrays may be donated when this returns. `wait` says whether it is committed."""
        args = self._ocp.args
        # force: orbax otherwise skips, without a word, a step that is not newer than all others.
        self._manager.save(
            step, args=args.Composite(arrays=args.StandardSave(arrays), record=args.JsonSave(record)), force=True
        )
        self._write_manifest_once_committed(step)

    def wait(self) -> None:
        """Return when what was written is committed. Raises OSError or ValueError where it is not."""
        self._manager.wait_until_finished()

    def settle(self) -> None:
        """After a `wait` that went well everywhere: nothing of it is left to do."""
        if self._manifest is not None:
            self._manifest.join()
        self.purge()

    def purge(self) -> None:
        """Delete what orbax renamed away; process 0 does the writing in this directory."""
        trash = self._directory / _TRASH
        if self._writes and processes.index() == 0 and trash.exists():
            shutil.rmtree(trash)

    def forget_unfinished(self) -> None:
        """Clear away a write that failed, also from orbax's list of steps, where it may stand."""
        if processes.index() == 0:
            for path in self._directory.iterdir():
                if _TEMPORARY in path.name:
                    shutil.rmtree(path)
        processes.gather(None)
        self._manager.reload()

    def read_record(self, step: int) -> dict[str, Any]:
        return self._manager.restore(step, args=self._ocp.args.Composite(record=self._ocp.args.JsonRestore()))["record"]

    def read_arrays(self, step: int, target: dict[str, Any]) -> dict[str, Any]:
        """Path -> array, as `target` has them: jax.ShapeDtypeStruct with a sharding, none of size zero."""
        arrays = self._ocp.args.StandardRestore(target)
        return self._manager.restore(step, args=self._ocp.args.Composite(arrays=arrays))["arrays"]

    def is_at_fault(self, step: int, error: Exception) -> bool:
        """Whether a step that could not be read is not as it was written. A lack of memory or of rights is no damage:
        nothing may be set aside for it."""
        found = manifests.compare(self._directory / str(step))
        if found is None:  # a kill left it without; only the error tells
            return not (isinstance(error, MemoryError) or any(lack in str(error) for lack in _LACKS))
        return found != manifests.Differences([], [], [])

    def was_restored(self, step: int) -> None:
        """It is whole: give it the manifest that a kill may have left it without."""
        if not (self._directory / str(step) / manifests.MANIFEST).exists():
            self._write_manifest_once_committed(step)

    def set_aside(self, step: int) -> str:
        """Rename a step into the folder of damaged ones; its new place. Only on the first process, then `reload`."""
        place = self._directory / SET_ASIDE / str(step)
        for again in range(1, 1000):
            if not place.exists():
                break
            place = self._directory / SET_ASIDE / f"{step}.{again}"
        place.parent.mkdir(exist_ok=True)
        (self._directory / str(step)).rename(place)
        return str(place)

    def reload(self) -> None:
        """Look again which steps there are."""
        self._manager.reload()

    def close(self) -> None:
        self._manager.close()

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
