"""The reference's log-probs of given pairs: computed once, before the first step, and kept.

They are in the run folder, whatever the packing, and a run that is resumed reads them.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tpu_rl import data
from tpu_rl.data import Row
from tpu_rl.errors import DamagedDataError, InputError
from tpu_rl.experience import text_log_probs
from tpu_rl.experience.sources.pairs import ToPairs
from tpu_rl.experience.text_log_probs import LogProbs
from tpu_rl.runtime import processes
from tpu_rl.types import Params


class Reference(NamedTuple):
    """The model whose log-probs are kept, and what it takes to compute them."""

    log_probs: text_log_probs.TextLogProbs
    params: Params
    """The whole params tree at the beginning of the stage."""
    digest: str
    """Of the role's own params."""


class Cache(NamedTuple):
    """The file in the run folder, and the rules for reading it."""

    path: Path
    trusts_model: bool
    """Accept the file's model unseen. In a run that is resumed in a later stage, the params that
    the stage began with are gone."""
    has_begun: bool
    """The run has taken steps, so that its log-probs must not change."""
    accept_dataset_change: bool


def path_of(run_dir: Path, stage_index: int) -> Path:
    """Return the file of a stage."""
    return run_dir / f"reference_log_probs_{stage_index}.npz"


def with_log_probs(to_pairs: ToPairs, rows: Sequence[Row], log_probs: LogProbs) -> ToPairs:
    """Return `to_pairs` with the reference's log-probs filled in.

    `log_probs` has one entry for each of `rows`, which are all that will be asked for.
    """
    index_of = {row["row"]: index for index, row in enumerate(rows)}

    def with_reference(some_rows: Sequence[Row]):
        pairs = to_pairs(some_rows)
        values = [value for row in some_rows for value in log_probs[index_of[row["row"]]]]
        reference = np.zeros(pairs.action_mask.shape, np.float32)
        reference[pairs.action_mask] = np.concatenate(values)
        return replace(pairs, reference_log_probs=reference)

    return with_reference


def read_or_compute(
    cache: Cache, reference: Reference, rows: Sequence[Row], to_pairs: ToPairs
) -> LogProbs:
    """Return the log-probs of the rows' completions, and keep them in the run folder.

    Raises:
        InputError: if the data or the reference changed since the run began.
    """
    identity = {"data": data.fingerprint(rows), "model": reference.digest}
    if processes.from_first(cache.path.exists):
        kept, log_probs = read(cache.path)
        same_model = kept["model"] == identity["model"]
        if kept["data"] == identity["data"] and (same_model or cache.trusts_model):
            return log_probs
        if cache.has_begun and not (same_model and cache.accept_dataset_change):
            changed = "data" if kept["data"] != identity["data"] else "reference model"
            fix = "restore it, or start a new run"
            if same_model:
                fix += ", or go on with the changed data: --accept-dataset-change"
            raise InputError(
                f"the {changed} changed since the run began", where=str(cache.path), fix=fix
            )
    log_probs = reference.log_probs(reference.params, rows, to_pairs)
    processes.from_first(lambda: write(cache.path, identity, log_probs))
    # If the run folder is in an object store, each process has a local folder of its own.
    if not cache.path.exists() or read(cache.path)[0] != identity:
        write(cache.path, identity, log_probs)
    return log_probs


def write(path: Path, identity: dict[str, str], log_probs: LogProbs) -> None:
    """Write the file completely or not at all."""
    completions = [values for of_row in log_probs for values in of_row]
    unfinished = path.with_suffix(f".{processes.index()}.tmp")
    with unfinished.open("wb") as file:
        np.savez(
            file,
            identity=np.array(json.dumps(identity)),
            log_probs=np.concatenate(completions),
            lengths=np.array([len(values) for values in completions]),
            completions=np.array([len(of_row) for of_row in log_probs]),
        )
    unfinished.replace(path)


def read(path: Path) -> tuple[dict[str, str], LogProbs]:
    """Return (identity, log-probs) as written.

    Raises:
        DamagedDataError: if the file cannot be read.
    """
    try:
        with path.open("rb") as opened, np.load(opened) as arrays:
            identity = json.loads(str(arrays["identity"]))
            completions = np.split(arrays["log_probs"], np.cumsum(arrays["lengths"])[:-1])
            counts = arrays["completions"]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise DamagedDataError(
            "the reference's log-probs are damaged",
            where=str(path),
            why=str(error),
            fix="delete it: it is computed again",
        ) from error
    ends = np.cumsum(counts)
    return identity, [
        completions[end - count : end] for end, count in zip(ends, counts, strict=True)
    ]
