"""Files of arrays in the run folder, as numpy writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tpu_rl.errors import DamagedDataError, refused
from tpu_rl.runtime import processes


def write(path: Path, arrays: dict[str, Any]) -> None:
    """Write a file completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{processes.index()}.tmp")
    with unfinished.open("wb") as file:
        np.savez_compressed(file, **arrays)
    unfinished.replace(path)


def read(path: Path, names: tuple[str, ...], what: str, fix: str) -> dict[str, np.ndarray]:
    """Return the arrays of a file. Raises DamagedDataError, with `what` and `fix`, if it cannot be
    read or lacks one of these names."""
    with (
        # zipfile, zlib and numpy each raise their own errors for damaged files.
        refused(Exception, what, where=str(path), fix=fix, kind=DamagedDataError),
        # numpy leaves a file open if it cannot read it.
        path.open("rb") as opened,
        np.load(opened, allow_pickle=False) as arrays,
    ):
        return {name: arrays[name] for name in names}
