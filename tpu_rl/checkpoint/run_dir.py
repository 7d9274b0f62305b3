"""The folder of a run: on a disk, or in a bucket (gs://) behind a local spool, see `spool`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from tpu_rl import run_files
from tpu_rl.checkpoint import lock
from tpu_rl.checkpoint.run_folder import RunFolder
from tpu_rl.runtime import processes
from tpu_rl.storage import gcs


@contextmanager
def open_run_folder(address: str, on_lost: Callable[[str], None]) -> Iterator[RunFolder]:
    """Create or find a run folder; the first process holds its lock for all processes.

    Args:
      address: a local path or a gs:// address.
      on_lost: called if another job takes over the lock (see `gcs_lock.hold`).

    Raises:
      InputError: another job works in the folder.
      MachineError: the folder cannot be written.
      DamagedDataError: published rows are missing or have changed.
    """
    is_first = processes.index() == 0
    if not gcs.is_address(address):
        held = lock.hold(Path(address)) if is_first else nullcontext(lambda: None)
        with held as confirm_lock:
            if is_first:
                run_files.unlink_copies(Path(address))
            yield RunFolder(Path(address), confirm_lock)
        return
    # Loaded here because most runs have a folder on a disk.
    from tpu_rl.checkpoint.spool import open_spool

    with open_spool(address, on_lost) as spool:
        yield spool
