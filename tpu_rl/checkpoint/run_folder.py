"""A run folder on a disk; its methods are those that a run calls on any run folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tpu_rl.checkpoint.remote_run import CHECKPOINTS
from tpu_rl.runtime import agreement


class RunFolder:
    """A run folder on a disk: every file is written to its final place."""

    def __init__(self, path: Path, confirm_lock: Callable[[], None] = lambda: None):
        self.confirm_lock = confirm_lock
        """Returns only if this job still holds the lock of the run folder."""
        self.path = path
        self.address = str(path)
        self.checkpoints = str(path / CHECKPOINTS)

    def require_shared(self) -> None:
        """Raise InputError if another process of the run has another folder."""
        agreement.require_shared_folder(self.path)

    def resume_from(self, step: int) -> None:
        """Continue from the checkpoint of a step; -1 begins without a checkpoint."""

    def publish(self, step: int) -> None:
        """Make durable what a run that resumes from `step` needs.

        Call this before the checkpoint of that step is written.
        """

    def publish_files(self) -> None:
        """Make the files beside the rows durable that a resumed run reads."""

    def finish(self) -> None:
        """Make everything durable: the run is finished."""
