"""Where a run's files are: a folder on a disk, or in a store (gs://) with a spool on this machine in front of it.

A run in a store works in its spool, a new temporary folder, exactly as it works in any folder. Whatever it needs to go
on is published at each checkpoint, before the checkpoint, so that a kill at any moment leaves a store from which a
resume is exact:

1. small files that have changed (configuration, digests of the data, examples), each written whole;
2. the rows since the checkpoint before, metrics-STEP.jsonl and samples-STEP.jsonl, and then rows-STEP.json with their
   sizes and hashes: created where there is nothing, and never changed;
3. the checkpoint of STEP, to which each process writes its part directly (see `tpu_rl.step_objects`).

A run that resumes from STEP deletes the parts behind it, the newest first, and reads the others back into its spool,
whatever machine it is on. What was written after the last checkpoint is lost with the machine, and those steps are
taken again; no step is ever there twice. Models, report.html, TensorBoard's files and, last of all, summary.json come
at the end.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from launch import hosts
from launch.stored_runs import (
    CHECKPOINTS,
    ROWS,
    STATE,
    Part,
    copied,
    damaged,
    described,
    name_of,
    newest_first,
    part_names,
)
from tpu_rl import processes, run_lock, store_lock, stores
from tpu_rl.errors import MachineError, TpuRlError
from tpu_rl.metrics import SUMMARY_FILE
from tpu_rl.stores import Store


class RunFolder:
    """On a disk: what is written is where it belongs."""

    def __init__(self, path: Path):
        self.path, self.address = path, str(path)
        self.checkpoints = str(path / CHECKPOINTS)

    def require_shared(self) -> None:
        """Raises InputError where another process of the run has another folder."""
        hosts.require_shared(self.path)

    def begin(self, step: int) -> None:
        """The run goes on from the checkpoint of that step; -1: from none."""

    def publish(self, step: int) -> None:
        """What a run that goes on from that step needs is durable. To be called before its checkpoint is written."""

    def publish_files(self) -> None:
        """The files beside the rows are durable, so far as a resumed run reads them."""

    def finish(self) -> None:
        """Everything is durable: the run is finished."""


@contextmanager
def opened(address: str, lost: Callable[[str], None]) -> Iterator[RunFolder]:
    """A run folder, made or found, whose lock the first process holds for all. `lost`: see `store_lock.hold`.

    Raises InputError where another job works in it, MachineError where there is no writing, DamagedDataError where
    rows that were published are not there any more.
    """
    is_first = processes.index() == 0
    if not stores.is_address(address):
        with run_lock.hold(Path(address)) if is_first else nullcontext():
            yield RunFolder(Path(address))
        return
    brief = Store(address, stores.BRIEF)
    brief.read(stores.MARK)
    with store_lock.hold(brief, lost) if is_first else nullcontext(lambda: None) as confirm:
        processes.gather(None)  # the first has made it
        spool = Spool(address, confirm)
        try:
            yield spool
        except TpuRlError as error:
            if str(spool.path) not in str(error):
                raise
            texts = (error.what, error.where, error.why, error.fix)
            what, where, why, fix = (text.replace(str(spool.path), spool.address) for text in texts)
            raise type(error)(what, where=where, why=why, fix=fix) from error
        finally:
            spool.leave()


class Spool(RunFolder):
    """A folder on this machine, and what of it the store has. Only the first process publishes."""

    def __init__(self, address: str, confirm: Callable[[], None]):
        """confirm: returns only if this job still holds the run folder's lock."""
        self._store, self._confirm = Store(address), confirm
        self.address = self._store.address
        self.checkpoints = f"{self.address}/{CHECKPOINTS}"
        self.path, self._parts = copied(self._store)
        self._published = {path: _stamp(path) for path in self._files()}
        self._has_begun, self._is_whole = False, False

    def require_shared(self) -> None:
        """It is: all have read it from the same address."""

    def begin(self, step: int) -> None:
        kept = [part for part in self._parts if part.last <= step]
        if step >= 0 and (not kept or kept[-1].last != step):
            raise damaged(self._store, name_of("rows", step), f"there is a checkpoint of step {step}, and not its rows")
        self._has_begun = True
        if processes.index():
            return
        names = {name for part in kept for name in part.objects()}
        # The newest first, of each its index first: a kill in between leaves the others whole.
        for name in sorted(part_names(self._store) - names, key=newest_first):
            self._store.delete(name)
        self._parts = kept

    def publish(self, step: int) -> None:
        if processes.index():
            return
        # A job that stood still for a minute may have lost the folder, and would stand in the other one's way.
        self._confirm()
        self.publish_files()
        after = self._parts[-1].last if self._parts else -1
        if step <= after:
            return
        files: dict[str, Any] = {}
        for row_file in ROWS:
            stem = row_file.removesuffix(".jsonl")
            with (self.path / row_file).open("rb") as file:
                file.seek(sum(part.files[name_of(stem, part.last)]["size"] for part in self._parts))
                content = file.read()
            name = name_of(stem, step)
            self._store.create(name, content)
            files[name] = described(content)
        part = Part(after, step, files)
        self._confirm()  # the others are nobody's without this one
        self._store.create(name_of("rows", step), part.text())
        self._parts.append(part)

    def publish_files(self) -> None:
        if processes.index():
            return
        # In the order in which they were written: what a later one rests on is there before it.
        for path in sorted(self._files(), key=lambda path: path.stat().st_mtime_ns):
            name = path.relative_to(self.path).as_posix()
            is_state = path.parent == self.path or name.partition("/")[0] in STATE
            if is_state and path.name not in (*ROWS, SUMMARY_FILE):
                self._send(path)

    def finish(self) -> None:
        if processes.index():
            return
        self._confirm()
        summary = self.path / SUMMARY_FILE
        sent = [path for path in self._files() if path.name not in ROWS and path != summary]
        for path in sent:
            self._send(path)
        self._delete_old_products(sent)
        self._send(summary)
        self._is_whole = True

    def leave(self) -> None:
        """The end of this job, however it came about: what was not published yet and can be is, and the spool goes."""
        unsaved = self._has_begun and not self._is_whole and processes.index() == 0
        if unsaved:
            self._store = Store(self.address, stores.BRIEF)  # the end does not wait
            try:
                self.publish_files()
                for path in self._files():
                    if path.relative_to(self.path).parts[0] in ("tensorboard", "profile"):
                        self._send(path)
            except MachineError as error:
                print(f"warning: {error.what} any more ({error.why}): the rest is in {self.path}", file=sys.stderr)
                return
        shutil.rmtree(self.path.parent, ignore_errors=True)

    def _send(self, path: Path) -> None:
        stamp = _stamp(path)
        if self._published.get(path) != stamp:
            self._store.write(path.relative_to(self.path).as_posix(), path.read_bytes())
            self._published[path] = stamp

    def _delete_old_products(self, sent: list[Path]) -> None:
        """Of a model that an earlier job wrote in more files than this one."""
        names = {path.relative_to(self.path).as_posix() for path in sent}
        folders = {name.rpartition("/")[0] for name in names if name.endswith(".safetensors")}
        for folder in folders:
            for name in self._store.names(f"{folder}/"):
                if name not in names:
                    self._store.delete(name)

    def _files(self) -> list[Path]:
        whole = (path for path in sorted(self.path.rglob("*")) if path.is_file() and path.suffix != ".tmp")
        return [path for path in whole if path.relative_to(self.path).parts[0] != CHECKPOINTS]


def _stamp(path: Path) -> tuple[int, int]:
    about = path.stat()
    return about.st_mtime_ns, about.st_size
