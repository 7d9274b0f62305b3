"""Rows in an order that is a function of the seed and resumes exactly, and what identifies them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tpu_rl.data.files import Row
from tpu_rl.data.images import is_pil
from tpu_rl.data.stored_rows import checksums, part_numbers, take
from tpu_rl.errors import DamagedDataError, InputError

PICTURE_END = 4096
"""The bytes at the end of a picture's file that its row's digest is about. PNG has checksums of all
pixels there, and in the other formats few changes leave both the size and the end as they were."""


OF_BYTES = "bytes "
"""The beginning of a fingerprint that is about the bytes of rows, and not about their values."""


class Rows(Protocol):
    """Rows by number: a list, or a formula such as `environments.ArithmeticSource`.

    A formula is a frozen dataclass whose row i is a function of i and its fields. Its `repr`
    identifies it in checkpoints.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row: ...


def fingerprint(source: Rows) -> str:
    """Return the SHA-256 of all rows in their order, in hex. The order of columns does not matter.

    A dataclass is a formula with too many rows to read. Its `repr` and its first rows stand for it.
    """
    if not dataclasses.is_dataclass(source):
        rows: Any = source
        return digests(rows)[0]
    digest = hashlib.sha256(f"{source!r}\n".encode())
    for i in range(min(len(source), 16)):
        digest.update(_as_json(source[i]) + b"\n")
    return digest.hexdigest()


def digests(rows: Sequence[Row], folder: Path = Path()) -> tuple[str, np.ndarray]:
    """Return (`fingerprint`, [rows] uint64, a hash of each row), of rows that are no formula.

    The order of columns does not matter. Of a picture in a file count the name, the size and the
    last `PICTURE_END` bytes. `folder` is the one that names of pictures are relative to.

    Of rows that are checked when they are drawn, the checksums of their bytes count, which the
    fingerprint says (`OF_BYTES`).
    """
    sums = checksums(rows)
    if sums is not None:
        return OF_BYTES + hashlib.sha256(sums.tobytes()).hexdigest(), sums
    whole = hashlib.sha256()
    of_rows = bytearray()
    for row in rows:
        pictures = _picture_files(row, folder)
        text = _as_json(row | {"files of pictures": pictures} if pictures else row)
        whole.update(text + b"\n")
        of_rows += _short_hash(text).digest()
    return whole.hexdigest(), np.frombuffer(bytes(of_rows), "<u8")


def row_digest(row: Row) -> str:
    """Return a hash of a row, 16 hex digits. The order of columns does not matter."""
    return _short_hash(_as_json(row)).hexdigest()


def _picture_files(row: Row, folder: Path) -> list[tuple[int, str]]:
    """Return the size in bytes of each file in the column `images`, and a hash of its end."""
    names = [
        item.get("path") if isinstance(item, dict) else item for item in row.get("images") or ()
    ]
    files = [folder / name for name in names if isinstance(name, str)]
    return [_size_and_end(file) for file in files if os.path.isfile(file)]


def _size_and_end(path: Path) -> tuple[int, str]:
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - PICTURE_END, 0))
        return size, _short_hash(file.read()).hexdigest()


def _short_hash(text: bytes) -> Any:
    return hashlib.blake2b(text, digest_size=8)


def _of_content(value: Any) -> str:
    """Return a text that is the same for the same value in another process, also for PIL images."""
    if not is_pil(value):
        return repr(value)
    return f"{value.mode} {value.size} {_short_hash(value.tobytes()).hexdigest()}"


_encoder = json.JSONEncoder(sort_keys=True, default=_of_content)


def _as_json(row: Row) -> bytes:
    return _encoder.encode(row).encode()


class RowStream:
    """Batches (row_ids, rows), in an order that is a function of the seed. `stream` makes it.

    `row_ids` [B] int64 are positions in the endless stream and never repeat: row 3 of the second
    epoch has another id than row 3 of the first. The state is the position.
    """

    def __init__(
        self,
        batches: Any,
        batch_size: int,
        identity: dict[str, Any],
        accepted: Collection[str] = (),
    ):
        self._batches = batches
        self._batch_size = batch_size
        self._identity = identity
        self._accepted = accepted

    def __iter__(self) -> RowStream:
        return self

    def __next__(self) -> tuple[np.ndarray, list[Row]]:
        first = self._batches.get_state()["next_index"] * self._batch_size
        rows = next(self._batches)
        return np.arange(first, first + len(rows), dtype=np.int64), rows

    def take(self, count: int) -> list[Row]:
        """Return the next `count` rows of a stream whose batches are single rows."""
        return [row for _ in range(count) for row in next(self)[1]]

    def get_state(self) -> dict[str, Any]:
        """Return the position after the last batch, and the stream's identity, as JSON values."""
        return {**self._identity, "next_batch": self._batches.get_state()["next_index"]}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go to a saved position.

        Raises:
            InputError: if it is a position in another stream, unless its rows are accepted.
            DamagedDataError: if it is not a position.
        """
        if isinstance(state, dict):
            state = {"weights": []} | state  # Older states have none.
        if not isinstance(state, dict) or state.keys() != self.get_state().keys():
            raise DamagedDataError(
                "this is no position in a data stream",
                where=repr(state)[:120],
                why=f"it must have the keys {', '.join(self.get_state())}",
                fix="resume from another checkpoint",
            )
        if state["fingerprint"] in self._accepted:
            state = state | {name: self._identity[name] for name in ("fingerprint", "rows")}
        for name, current in self._identity.items():
            if state[name] != current:
                raise InputError(
                    f"the data position was saved with another {name.replace('_', ' ')}",
                    why=f"it was {state[name]} and is now {current}, so other rows would follow",
                    fix="restore the data and settings of the run, or start a new run",
                )
        self._batches.set_state({"next_index": state["next_batch"]})


def stream(
    source: Rows,
    seed: int,
    batch_size: int,
    shuffle: bool = True,
    accepted: Collection[str] = (),
    source_fingerprint: str | None = None,
    weights: Sequence[float] = (),
) -> RowStream:
    """Return the rows of `source` in batches, endlessly.

    Batches continue from one epoch into the next. With weights, each part of the data has epochs
    of its own, and every stretch of the stream has rows of the parts in their shares.

    Args:
        shuffle: whether each epoch has a new order.
        accepted: fingerprints of other rows. Positions saved with those are positions in these.
        source_fingerprint: `fingerprint` of the source, if it is known.
        weights: one for each part of `part_numbers`, above 0; the share of a part in the stream.
            Empty: rows count alike.

    Raises:
        InputError: if there are no rows, or a part with a weight has none.
    """
    import grain

    if len(source) == 0:
        raise InputError(
            "the data have 0 rows",
            where="--data.path",
            why="there is nothing to train on",
            fix="give a file with rows",
        )

    def ordered(rows: Any, seed: int, endless: int) -> Any:
        dataset = grain.MapDataset.source(rows).seed(seed)
        if shuffle:
            dataset = dataset.shuffle()
        # Endless in practice: grain cannot count batches of 1 of a dataset without end.
        return dataset.repeat(max(endless // len(rows), 1))

    if weights:
        parts = rows_of_parts(source, len(weights))
        dataset = grain.MapDataset.mix(
            [ordered(part, seed + number, 2**50) for number, part in enumerate(parts)], weights
        )
    else:
        dataset = ordered(source, seed, 2**62)
    # Without threads and prefetching, the state is exactly that after the last batch.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    batches = iter(dataset.batch(batch_size, batch_fn=list).to_iter_dataset(options))
    identity = {
        "fingerprint": source_fingerprint or fingerprint(source),
        "rows": len(source),
        "seed": seed,
        "batch_size": batch_size,
        "shuffle": shuffle,
        "weights": list(weights),
    }
    return RowStream(batches, batch_size, identity, accepted)


def rows_of_parts(rows: Any, num_parts: int) -> list[Sequence[Row]]:
    """Return the rows of each part of the data.

    Raises InputError if there is another number of parts, or one has no rows.
    """
    numbers = part_numbers(rows)
    parts = [take(rows, np.flatnonzero(numbers == number)) for number in range(num_parts)]
    empty = [number + 1 for number, part in enumerate(parts) if not len(part)]
    if empty:
        raise InputError(
            f"part {empty[0]} of the data has a weight and no training row",
            where="--data.weights",
            why="its rows were dropped or held out, or these data are one part",
            fix="hold out a file of its own (--data.evaluation-path), or leave out the part",
        )
    return parts
