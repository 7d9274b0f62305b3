"""The reference's log-probs of given pairs: computed once, before the first step, and kept.

Only rows that the steps draw or that are held out have some. They are in the run folder, by the
digest of their row and whatever the packing. A run that is resumed reads them, and computes those
of rows that further steps draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tpu_rl import data
from tpu_rl.data import Row
from tpu_rl.errors import InputError
from tpu_rl.experience import array_files, text_log_probs
from tpu_rl.experience.sources.pairs import ToPairs
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
    """The run has taken steps, so that its reference must not change."""


LogProbsOfRows = dict[int, list[np.ndarray]]
"""Digest of a row -> for each of its completions, the log-prob of each learned token."""


def path_of(run_dir: Path, stage_index: int) -> Path:
    """Return the file of a stage."""
    return run_dir / f"reference_log_probs_{stage_index}.npz"


def with_log_probs(to_pairs: ToPairs, log_probs: LogProbsOfRows) -> ToPairs:
    """Return `to_pairs` with the reference's log-probs filled in.

    `log_probs` has an entry for each row that will be asked for.
    """

    def with_reference(some_rows: Sequence[Row]):
        pairs = to_pairs(some_rows)
        values = [value for key in keys_of(some_rows) for value in log_probs[key]]
        reference = np.zeros(pairs.action_mask.shape, np.float32)
        reference[pairs.action_mask] = np.concatenate(values)
        return replace(pairs, reference_log_probs=reference)

    return with_reference


def keys_of(rows: Sequence[Row]) -> list[int]:
    """Return the digests of rows, by which their log-probs are kept."""
    return [int.from_bytes(bytes.fromhex(data.row_digest(row)), "little") for row in rows]


def read_or_compute(
    cache: Cache, reference: Reference, rows: Sequence[Row], batch_size: int, to_pairs: ToPairs
) -> LogProbsOfRows:
    """Return the log-probs of the rows' completions, and keep them in the run folder.

    Of the batches of `batch_size` rows, those with a new row are computed, each as it stands: the
    last bits of a value depend on the rows beside it. Raises InputError if the reference changed
    since the run began, or is gone and a row is new.
    """
    kept: LogProbsOfRows = {}
    keys = keys_of(rows)
    if processes.from_first(cache.path.exists):
        model, kept = read(cache.path)
        is_known = all(key in kept for key in keys)
        if model != reference.digest and not (cache.trusts_model and is_known):
            if cache.has_begun:
                raise InputError(
                    f"the {'data' if cache.trusts_model else 'reference model'} changed since the "
                    "run began",
                    where=str(cache.path),
                    fix="restore it, or start a new run",
                )
            kept = {}
    missing = [
        index
        for first in range(0, len(keys), batch_size)
        for index in range(first, min(first + batch_size, len(keys)))
        if any(key not in kept for key in keys[first : first + batch_size])
    ]
    if missing:
        values = reference.log_probs(reference.params, [rows[i] for i in missing], to_pairs)
        kept = {keys[i]: value for i, value in zip(missing, values, strict=True)} | kept
        processes.from_first(lambda: write(cache.path, reference.digest, kept))
        # If the run folder is in an object store, each process has a local folder of its own.
        if not cache.path.exists() or read(cache.path)[1].keys() != kept.keys():
            write(cache.path, reference.digest, kept)
    return kept


def write(path: Path, model: str, log_probs: LogProbsOfRows) -> None:
    """Write the file completely or not at all. `model` is the digest of the reference."""
    completions = [values for of_row in log_probs.values() for values in of_row]
    arrays = {
        "model": np.array(model),
        "rows": np.array(list(log_probs), np.uint64),
        "log_probs": np.concatenate(completions),
        "lengths": np.array([len(values) for values in completions]),
        "completions": np.array([len(of_row) for of_row in log_probs.values()]),
    }
    array_files.write(path, arrays)


def read(path: Path) -> tuple[str, LogProbsOfRows]:
    """Return (digest of the reference, log-probs) as written.

    Raises DamagedDataError if the file cannot be read.
    """
    arrays = array_files.read(
        path,
        ("model", "rows", "log_probs", "lengths", "completions"),
        "the reference's log-probs are damaged",
        "delete it: it is computed again",
    )
    rows = arrays["rows"].tolist()
    completions = np.split(arrays["log_probs"], np.cumsum(arrays["lengths"])[:-1])
    ends = np.cumsum(arrays["completions"])
    of_rows = [list(completions[first:end]) for first, end in zip([0, *ends], ends, strict=False)]
    return str(arrays["model"]), dict(zip(rows, of_rows, strict=True))
