"""A resumed run must have the training rows that it began with.

The run folder contains a digest of each row, in `data/NAME.npz`, from the moment a stage makes its
stream. Rows that differ are refused, with the first one that does, unless the user accepts the
change (`--accept-dataset-change`), which `dataset_changes.jsonl` then records. A run without a
checkpoint begins anew, with whatever rows there are.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tpu_rl import data, run_files
from tpu_rl.algorithm_spec import ExperienceSpec
from tpu_rl.data import Row
from tpu_rl.errors import InputError
from tpu_rl.experience import array_files
from tpu_rl.runtime import agreement, processes

CHANGES_FILE = "dataset_changes.jsonl"


class Digests(NamedTuple):
    """A short form of rows."""

    fingerprint: str
    """`data.fingerprint` of all rows."""
    of_rows: np.ndarray
    """[rows] uint64."""


def make_stream(
    rows: Sequence[Row],
    spec: ExperienceSpec,
    *,
    batch_size: int,
    seed: int,
    run_dir: Path,
    data_path: str | None = None,
    accept_change: bool = False,
    weights: Sequence[float] = (),
) -> data.RowStream:
    """Return the rows of a file, endlessly, in batches, after comparing them with the run's.

    Args:
        spec: what the algorithm learns from. Stages that read other columns have other digests.
        run_dir: the run folder, with the digests of the rows that the run began with.
        weights: of the parts of the data; see `data.stream`.

    Raises:
        InputError: if the rows differ and that is not accepted, or differ between processes.
        DamagedDataError: if the digests cannot be read.
    """
    current = Digests(*data.digests(rows, Path(data_path or ".").parent))
    if processes.count() > 1:
        agreement.require_equal({"the training rows": current.fingerprint})
    earlier_fingerprints = processes.from_first(
        lambda: compare_or_write(rows, current, spec, run_dir, data_path, accept_change)
    )
    return data.stream(
        rows,
        seed,
        batch_size,
        accepted=tuple(earlier_fingerprints),
        source_fingerprint=current.fingerprint,
        weights=weights,
    )


def compare_or_write(
    rows: Sequence[Row],
    current: Digests,
    spec: ExperienceSpec,
    run_dir: Path,
    data_path: str | None,
    accept_change: bool,
) -> tuple[str, ...]:
    """Compare the rows with those of the run folder, or write their digests if it has none.

    `current` has the digests of the rows. Returns the fingerprints of the rows that the run had
    before accepted changes.
    """
    path = digests_file(run_dir, spec)
    name = path.stem
    checkpoint = newest_checkpoint(run_dir)
    previous = read(path) if path.exists() and checkpoint >= 0 else None
    is_same = previous is not None and previous.fingerprint == current.fingerprint
    if previous is not None and not is_same:
        change, first_row = describe_change(previous.of_rows, current.of_rows)
        if not accept_change:
            raise _changed_error(change, first_row, rows, data_path)
        print(f"warning: the training data changed, which is accepted: {change}", file=sys.stderr)
        details = {"what": change, "first_row": first_row + 1, "checkpoint": checkpoint}
        record_change(run_dir, name, previous, current, details)
    if not is_same:
        array_files.write(path, current._asdict())
    return earlier_fingerprints(run_dir, name)


def digests_file(run_dir: Path, spec: ExperienceSpec) -> Path:
    """Return the file with the digests of the rows that a stage learns from."""
    name = "_".join([spec.kind.__name__, *spec.columns, *["judged"] * spec.graded]).lower()
    return run_dir / "data" / f"{name}.npz"


def describe_change(previous: np.ndarray, current: np.ndarray) -> tuple[str, int]:
    """Return (what changed, index of the first row that differs or that only one side has)."""
    num_shared = min(len(previous), len(current))
    differing = np.flatnonzero(previous[:num_shared] != current[:num_shared])
    first_row = int(differing[0]) if len(differing) else num_shared
    sizes = f"{len(current)} rows in place of {len(previous)}"
    if not len(differing):
        return f"{sizes}, the first {num_shared} as they were", first_row
    if len(previous) != len(current):
        return f"{sizes}, and row {first_row + 1} is the first that differs", first_row
    if np.array_equal(np.sort(previous), np.sort(current)):
        return f"the same rows in another order, from row {first_row + 1} on", first_row
    change = f"{len(differing)} of {len(current)} rows, the first of them row {first_row + 1}"
    return change, first_row


def _changed_error(
    change: str, first_row: int, rows: Sequence[Row], data_path: str | None
) -> InputError:
    row = "not there any more"
    if first_row < len(rows):
        row = json.dumps(rows[first_row], ensure_ascii=False, default=repr)[:160]
    return InputError(
        f"the training data changed since the run began: {change}",
        where=f"{data_path}, training row {first_row + 1}",
        why=f"that row is now: {row}",
        fix="restore the rows, or go on with the changed ones: --accept-dataset-change",
    )


# --- the run folder ---


def newest_checkpoint(run_dir: Path) -> int:
    """Return the step of the newest checkpoint, or -1 if there is none.

    For a run in an object store, these are the checkpoints at the start of this job: the folder
    contains records named STEP.json.
    """
    names = (path.name.removesuffix(".json") for path in run_dir.glob("checkpoints/*"))
    return max((int(name) for name in names if name.isdecimal()), default=-1)


def read(path: Path) -> Digests:
    """Return the digests of a file. Raises DamagedDataError if it cannot be read."""
    arrays = array_files.read(
        path,
        Digests._fields,
        "the digests of the training rows cannot be read",
        "delete the file: the rows are then only checked as a whole, when the run resumes",
    )
    return Digests(str(arrays["fingerprint"]), arrays["of_rows"])


def record_change(
    run_dir: Path, name: str, previous: Digests, current: Digests, details: dict[str, str | int]
) -> None:
    """Append a line to `dataset_changes.jsonl`.

    In `details`, `first_row` counts from 1, and `checkpoint` is the step the run resumes from.
    """
    line = {
        "time": round(time.time(), 3),
        "data": name,
        "was": previous.fingerprint,
        "is": current.fingerprint,
    } | details
    with (run_dir / CHANGES_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def earlier_fingerprints(run_dir: Path, name: str) -> tuple[str, ...]:
    """Return fingerprints of the rows before each accepted change.

    Checkpoints may still contain them.
    """
    path = run_dir / CHANGES_FILE
    records = run_files.read_rows(path, keys=())
    return tuple(str(record.get("was")) for record in records if record.get("data") == name)
