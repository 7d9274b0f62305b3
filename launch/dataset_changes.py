"""A run's rows stay those that it began with: others are refused, with the first one that differs, or accepted aloud.

A digest of each row lies in the run folder, data/NAME.npz, from the moment that a stage makes its stream; a run that
has no checkpoint yet begins anew, and so with whatever rows there are. What was accepted (--accept-dataset-change) is
recorded in dataset_changes.jsonl.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from launch import hosts
from launch.config import ExperimentConfig, FileData
from tpu_rl import data, processes
from tpu_rl.errors import DamagedDataError, InputError
from tpu_rl.needs import Needs

CHANGES_FILE = "dataset_changes.jsonl"


class Digests(NamedTuple):
    """Rows, in short."""

    fingerprint: str
    """`data.fingerprint` of them all."""
    of_rows: np.ndarray
    """[rows] uint64."""


def stream(config: ExperimentConfig, needs: Needs, rows: data.Source, batch: int) -> data.RowStream:
    """The rows for ever, so many at a time; a file's are held to be those of the run folder.

    Raises InputError if they are not, unless that is accepted.
    """
    accepted: tuple[str, ...] = ()
    if isinstance(rows, list):
        hosts.require_alike({"the training rows": data.fingerprint(rows)} if processes.count() > 1 else {})
        accepted = tuple(processes.from_first(lambda: bind(config, needs, rows)))
    return data.stream(rows, config.seed, batch, accepted=accepted)


def bind(config: ExperimentConfig, needs: Needs, rows: Sequence[data.Row]) -> tuple[str, ...]:
    """Compare with the rows that the run began with, or keep these; fingerprints of rows that were accepted before."""
    name = "_".join([needs.experience.__name__, *needs.columns, *["judged"] * needs.judged]).lower()
    run_dir = Path(config.run_dir)
    path = run_dir / "data" / f"{name}.npz"
    now = Digests(data.fingerprint(rows), data.row_digests(rows))
    checkpoint = newest_checkpoint(run_dir)
    then = read(path) if path.exists() and checkpoint >= 0 else None
    if then is not None and then.fingerprint != now.fingerprint:
        what, first = difference(then.of_rows, now.of_rows)
        if not config.accept_dataset_change:
            raise changed(config, what, first, rows)
        print(f"warning: the training data changed, which is accepted: {what}", file=sys.stderr)
        record(run_dir, name, then, now, {"what": what, "first_row": first + 1, "checkpoint": checkpoint})
    if then is None or then.fingerprint != now.fingerprint:
        write(path, now)
    return accepted_before(run_dir, name)


def difference(then: np.ndarray, now: np.ndarray) -> tuple[str, int]:
    """(what changed, index of the first row that differs or that only one of them has)."""
    shared = min(len(then), len(now))
    differs = np.flatnonzero(then[:shared] != now[:shared])
    first = int(differs[0]) if len(differs) else shared
    sizes = f"{len(now)} rows in place of {len(then)}"
    if not len(differs):
        return f"{sizes}, the first {shared} as they were", first
    if len(then) == len(now) and np.array_equal(np.sort(then), np.sort(now)):
        return f"the same rows in another order, from row {first + 1} on", first
    if len(then) == len(now):
        return f"{len(differs)} of {len(now)} rows, the first of them row {first + 1}", first
    return f"{sizes}, and row {first + 1} is the first that differs", first


def changed(config: ExperimentConfig, what: str, first: int, rows: Sequence[data.Row]) -> InputError:
    files = config.data
    path = files.path if isinstance(files, FileData) else ""
    row = json.dumps(rows[first], ensure_ascii=False, default=repr)[:160] if first < len(rows) else "not there any more"
    return InputError(
        f"the training data changed since the run began: {what}",
        where=f"{path}, training row {first + 1}",
        why=f"that row is now: {row}",
        fix="restore the file, or go on with the changed one: --accept-dataset-change",
    )


# --- the run folder ----------------------------------------------------------------------------------------------


def newest_checkpoint(run_dir: Path) -> int:
    """Its step; -1 where there is none. Of a run in a store, those at the start of this job: records in STEP.json."""
    names = (path.name.removesuffix(".json") for path in run_dir.glob("checkpoints/*"))
    return max((int(name) for name in names if name.isdecimal()), default=-1)


def read(path: Path) -> Digests:
    try:
        # numpy leaves a file open that it cannot read.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return Digests(str(arrays["fingerprint"]), arrays["of_rows"])
    except Exception as error:  # zipfile, zlib and numpy each have their own for damaged files
        raise DamagedDataError(
            "the digests of the training rows cannot be read",
            where=str(path),
            why=str(error),
            fix="delete the file: the rows are then checked as a whole only, when the run resumes",
        ) from error


def write(path: Path, digests: Digests) -> None:
    """Wholly or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("wb") as file:
        np.savez(file, fingerprint=digests.fingerprint, of_rows=digests.of_rows)
    unfinished.replace(path)


def record(run_dir: Path, name: str, then: Digests, now: Digests, about: dict[str, str | int]) -> None:
    """A line in dataset_changes.jsonl; `first_row` counts from 1, `checkpoint` is the step the run goes on from."""
    line = {"time": round(time.time(), 3), "data": name, "was": then.fingerprint, "is": now.fingerprint} | about
    with (run_dir / CHANGES_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def accepted_before(run_dir: Path, name: str) -> tuple[str, ...]:
    """Fingerprints of rows that the run learned from before a change was accepted: checkpoints may still have them."""
    path = run_dir / CHANGES_FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return tuple(row["was"] for row in map(json.loads, lines) if row["data"] == name)
