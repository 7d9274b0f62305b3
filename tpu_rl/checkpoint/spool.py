"""A run folder in a bucket (gs://), behind a local spool.

A run in a bucket works in its spool, a new temporary folder, exactly as it works in any folder. At
each checkpoint it publishes everything that it needs to resume, before the checkpoint itself, so
that a kill at any moment leaves a bucket from which a resume is exact:

1. small files that have changed (configuration, digests of the data, examples), each written whole;
2. the rows since the checkpoint before, metrics-STEP.jsonl and samples-STEP.jsonl, and then
   rows-STEP.json with their sizes and hashes; these objects are created once and never changed;
3. the checkpoint of STEP, to which each process writes its part directly (see
   `tpu_rl.checkpoint.object_store`).

A run that resumes from STEP deletes the later parts, the newest first, and reads the others back
into its spool, on whatever machine it is. What was written after the last checkpoint is lost with
the machine, and those steps are taken again; no step is ever recorded twice. Models, report.html,
TensorBoard's files and, last of all, summary.json are published at the end.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from tpu_rl.checkpoint import gcs_lock
from tpu_rl.checkpoint.remote_run import (
    CHECKPOINTS,
    ROW_FILES,
    STATE_FOLDERS,
    RowPart,
    copy_to_spool,
    damage_error,
    describe,
    newest_first,
    part_name,
    part_names,
)
from tpu_rl.checkpoint.run_folder import RunFolder
from tpu_rl.errors import MachineError, TpuRlError
from tpu_rl.metrics import SUMMARY_FILE
from tpu_rl.runtime import processes
from tpu_rl.storage import gcs
from tpu_rl.storage.gcs import Store


@contextmanager
def open_spool(address: str, on_lost: Callable[[str], None]) -> Iterator[Spool]:
    """Create or find the run folder of a gs:// address, see `run_dir.open_run_folder`."""
    is_first = processes.index() == 0
    store = Store(address, gcs.SHORT_RETRIES)
    store.read(gcs.MARK)
    held_lock = gcs_lock.hold(store, on_lost) if is_first else nullcontext(lambda: None)
    with held_lock as confirm_lock:
        processes.gather(None)  # The first process has created the folder.
        spool = Spool(address, confirm_lock)
        try:
            yield spool
        except TpuRlError as error:
            if str(spool.path) not in str(error):
                raise
            raise error.with_text(str(spool.path), spool.address) from error
        finally:
            spool.leave()


class Spool(RunFolder):
    """A local folder in front of a bucket. Only the first process publishes."""

    def __init__(self, address: str, confirm_lock: Callable[[], None]):
        """Copy what the bucket has of the run to a new folder.

        Args:
          address: the run's gs:// address.
          confirm_lock: returns only if this job still holds the lock of the run folder.
        """
        self._store = Store(address)
        self.confirm_lock = confirm_lock
        self.address = self._store.address
        self.checkpoints = f"{self.address}/{CHECKPOINTS}"
        self.path, self._parts = copy_to_spool(self._store)
        self._published = {path: _stamp(path) for path in self._files()}
        self._has_resumed = False
        self._is_finished = False

    def require_shared(self) -> None:
        """Do nothing: all processes have read the same address."""

    def resume_from(self, step: int) -> None:
        earlier = [part for part in self._parts if part.last <= step]
        if step >= 0 and (not earlier or earlier[-1].last != step):
            raise damage_error(
                self._store,
                part_name("rows", step),
                f"there is a checkpoint of step {step}, and not its rows",
            )
        self._has_resumed = True
        if processes.index():
            return
        kept_names = {name for part in earlier for name in part.object_names()}
        # In this order, a kill in between leaves every remaining part whole.
        for name in sorted(part_names(self._store) - kept_names, key=newest_first):
            self._store.delete(name)
        self._parts = earlier

    def publish(self, step: int) -> None:
        if processes.index():
            return
        # A job that was stopped for a minute may have lost the folder to another one.
        self.confirm_lock()
        self.publish_files()
        after = self._parts[-1].last if self._parts else -1
        if step <= after:
            return
        files: dict[str, Any] = {}
        for row_file in ROW_FILES:
            stem = row_file.removesuffix(".jsonl")
            name = part_name(stem, step)
            content = self._unpublished_rows(row_file, stem)
            self._store.create(name, content)
            files[name] = describe(content)
        part = RowPart(after, step, files)
        self.confirm_lock()  # Without rows-STEP.json, the objects above do not count.
        self._store.create(part_name("rows", step), part.serialize())
        self._parts.append(part)

    def _unpublished_rows(self, row_file: str, stem: str) -> bytes:
        published = sum(part.files[part_name(stem, part.last)]["size"] for part in self._parts)
        with (self.path / row_file).open("rb") as file:
            file.seek(published)
            return file.read()

    def publish_files(self) -> None:
        if processes.index():
            return
        # In the order in which they were written: a file may refer to earlier ones.
        for path in sorted(self._files(), key=lambda path: path.stat().st_mtime_ns):
            name = path.relative_to(self.path).as_posix()
            is_state = path.parent == self.path or name.partition("/")[0] in STATE_FOLDERS
            if is_state and path.name not in (*ROW_FILES, SUMMARY_FILE):
                self._send(path)

    def finish(self) -> None:
        if processes.index():
            return
        self.confirm_lock()
        summary = self.path / SUMMARY_FILE
        products = [
            path for path in self._files() if path.name not in ROW_FILES and path != summary
        ]
        for path in products:
            self._send(path)
        self._delete_old_weights(products)
        self._send(summary)
        self._is_finished = True

    def leave(self) -> None:
        """Publish what is not published yet and can be, then delete the spool.

        Called at the end of the job, however it ended.
        """
        if self._has_resumed and not self._is_finished and processes.index() == 0:
            self._store = Store(self.address, gcs.SHORT_RETRIES)  # The end does not wait.
            try:
                self.publish_files()
                for path in self._files():
                    if path.relative_to(self.path).parts[0] in ("tensorboard", "profile"):
                        self._send(path)
            except MachineError as error:
                print(
                    f"warning: {error.what} any more ({error.why}): the rest is in {self.path}",
                    file=sys.stderr,
                )
                return
        shutil.rmtree(self.path.parent, ignore_errors=True)

    def _send(self, path: Path) -> None:
        """Write a file to the bucket unless it has not changed since the last time."""
        stamp = _stamp(path)
        if self._published.get(path) != stamp:
            self._store.write(path.relative_to(self.path).as_posix(), path.read_bytes())
            self._published[path] = stamp

    def _delete_old_weights(self, products: list[Path]) -> None:
        """Delete files of a model that an earlier job wrote in more files than this one."""
        names = {path.relative_to(self.path).as_posix() for path in products}
        folders = {name.rpartition("/")[0] for name in names if name.endswith(".safetensors")}
        for folder in folders:
            for name in self._store.names(f"{folder}/"):
                if name not in names:
                    self._store.delete(name)

    def _files(self) -> list[Path]:
        """Return the completely written files of the spool, without checkpoints."""
        return [
            path
            for path in sorted(self.path.rglob("*"))
            if path.is_file()
            and path.suffix != ".tmp"
            and path.relative_to(self.path).parts[0] != CHECKPOINTS
        ]


def _stamp(path: Path) -> tuple[int, int]:
    """Return a file's time of change and size."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size
