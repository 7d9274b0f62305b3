"""Rows that stay in files and in tables of Arrow, and are decoded when asked for.

A source is read once from its beginning to its end, by `scan`, which says where each row is and may
refuse it. From then on the source gives any row by number. It holds no row as a Python object.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, overload

import numpy as np

from tpu_rl.data.messages import without_nulls
from tpu_rl.errors import InputError

Row = dict[str, Any]
Numbered = Iterator[tuple[str, Row]]
"""("where the row is", row) of each row."""

CHUNK = 1024
"""Rows that are decoded at once where rows are read one after the other."""


class Source:
    """Rows by number, once `scan` has come to its end."""

    def scan(self) -> Numbered:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int, /) -> Row:
        raise NotImplementedError

    def where(self, index: int) -> str:
        """Return the file and the line, or the like, of a row."""
        return f"row {index + 1}"

    def part_numbers(self) -> np.ndarray:
        """Return [rows] int; see the function of this name."""
        return np.zeros(len(self), int)

    def checksums(self) -> np.ndarray | None:
        """Return [rows] uint64 or None; see the function of this name."""
        return None


# --- sources ---


class Given(Source):
    """Rows of a sequence of a program or a library, or of a file that was read whole."""

    def __init__(self, rows: Sequence[Any], where: Callable[[int], str]):
        """Name the rows by what `where` returns for their number, from 1."""
        self._rows = rows
        self._where = where

    def scan(self) -> Numbered:
        for number, row in enumerate(self._rows, start=1):
            where = self._where(number)
            require_plain(require_dict(row, where), where)
            yield where, self._read(row)

    def where(self, index: int) -> str:
        return self._where(index + 1)

    def _read(self, row: Any) -> Row:
        # `datasets` keeps rows as Arrow.
        return _without_added_nulls(dict(row)) if hasattr(self._rows, "features") else dict(row)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._read(self._rows[index])


def require_dict(row: Any, where: str) -> Any:
    """Return a row. Raises InputError unless it is a dict with names of columns."""
    if not isinstance(row, Mapping) or not all(isinstance(column, str) for column in row):
        raise InputError(
            "a row is a JSON object, {...}, or a dict: column -> value",
            where=where,
            why=f"this is {repr(row)[:60]}",
            fix='as in {"prompt": "..."}; of a pandas table, pass table.to_dict("records")',
        )
    return row


MAX_ROW_BYTES = 10_000_000
"""Bytes of a row. No model reads a longer text, so a longer row is a mistake."""


def require_plain(row: Mapping[str, Any], where: str) -> None:
    """Check that a row holds no more than a line of JSON could.

    Raises InputError if a number is not finite, at any depth; if a text holds half a character; or
    if the row is too long.
    """
    for column, value in row.items():
        number = _not_finite(value)
        if number is not None:
            raise InputError(
                f"`{column}` {'is' if number is value else 'holds'} {number}",
                where=where,
                why="it is not a finite number",
                fix="give a number, or drop the row",
            )
    try:
        # The bytes of pictures are no text; `tokenizers.images` limits them.
        text = json.dumps(
            dict(row),
            ensure_ascii=False,
            default=lambda value: "" if isinstance(value, bytes) else repr(value),
        )
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise half_a_character(error, where) from error
    if size > MAX_ROW_BYTES:
        raise InputError(
            f"a row has {size:,} bytes",
            where=where,
            why=f"the limit is {MAX_ROW_BYTES:,}, because no model reads a longer text",
            fix="cut or drop longer rows",
        )


def _not_finite(value: Any) -> float | None:
    """Return a number in a value that is not finite, or None."""
    if isinstance(value, float):
        return None if math.isfinite(value) else value
    items = value.values() if isinstance(value, Mapping) else value
    if isinstance(items, str | bytes) or not isinstance(value, Mapping | list | tuple):
        return None
    return next((number for item in items if (number := _not_finite(item)) is not None), None)


def half_a_character(error: UnicodeEncodeError, where: str) -> InputError:
    """Return the error of a text that no tokenizer takes."""
    return InputError(
        "a text holds half of a surrogate pair",
        where=where,
        why=str(error),
        fix="correct the text: it was cut inside a character",
    )


def not_text(error: UnicodeDecodeError, where: str) -> InputError:
    """Return the error of bytes that are no text."""
    return InputError(
        f"byte 0x{error.object[error.start]:02x} is not UTF-8",
        where=where,
        why=error.reason,
        fix="convert the file to UTF-8 (iconv)",
    )


class ArrowRows(Source):
    """Rows of batches of Arrow, in memory or mapped into it."""

    def __init__(self, batches: Sequence[Any], where: Callable[[int], str]):
        """Name the rows by what `where` returns for their number, from 1."""
        self._batches = [batch for batch in batches if batch.num_rows]
        self._ends = list(accumulate(batch.num_rows for batch in self._batches))
        self._where = where
        self._chunk: tuple[int, list[Row]] = (0, [])

    def scan(self) -> Numbered:
        for index in range(len(self)):
            where = self.where(index)
            try:
                row = self[index]
            except UnicodeDecodeError as error:
                raise not_text(error, where) from error
            require_plain(row, where)
            yield where, row

    def where(self, index: int) -> str:
        return self._where(index + 1)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Row:
        first, rows = self._chunk
        if first <= index < first + len(rows):
            return dict(rows[index - first])
        # Rows that are read one after the other are decoded together.
        count = CHUNK if index in (0, first + len(rows)) else 1
        number = bisect_right(self._ends, index)
        batch = self._batches[number]
        offset = index - (self._ends[number] - batch.num_rows)
        rows = [_without_added_nulls(row) for row in batch.slice(offset, count).to_pylist()]
        self._chunk = (index, rows)
        return dict(rows[0])


CHAT_COLUMNS = (
    *("messages", "conversations", "conversation", "prompt", "completion", "chosen", "rejected"),
    *("tools", "answers"),
)
"""Columns whose structs are messages, calls and descriptions of tools."""


def _without_added_nulls(row: Row) -> Row:
    """Return a row of Arrow whose messages and tools have no keys that are null."""
    changed = {
        column: without_nulls(row[column])
        for column in CHAT_COLUMNS
        if isinstance(row.get(column), list | dict)
    }
    return row | changed if changed else row


class Joined(Source):
    """The rows of several sequences, one after the other."""

    def __init__(self, parts: Sequence[Any], numbers: Sequence[int] | None = None):
        """Join the parts. `numbers` say of which part of a path each is; see `part_numbers`."""
        self._parts = parts
        self._numbers = numbers
        self._ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Row:
        number = bisect_right(self._ends, index)
        part = self._parts[number]
        return part[index - self._ends[number] + len(part)]

    def where(self, index: int) -> str:
        number = bisect_right(self._ends, index)
        part = self._parts[number]
        return where_of(part, index - self._ends[number] + len(part))

    def checksums(self) -> np.ndarray | None:
        parts = [part for part in map(checksums, self._parts) if part is not None]
        return np.concatenate(parts) if len(parts) == len(self._parts) else None

    def part_numbers(self) -> np.ndarray:
        if self._numbers is None:
            return np.concatenate([part_numbers(part) for part in self._parts])
        return np.repeat(self._numbers, [len(part) for part in self._parts])


class FirstFitting(Joined):
    """Rows in which the next one that fits takes the place of each that does not."""

    def __init__(self, rows: Sequence[Row], fits: Callable[[Row, int], bool]):
        """Ask `fits(row, index)` of rows when they are drawn. Some row has to fit."""
        super().__init__([rows])
        self._fits = fits

    def __getitem__(self, index: int) -> Row:
        while not self._fits(row := super().__getitem__(index), index):
            index = (index + 1) % len(self)
        return row


class WithNumber(Joined):
    """Rows with a further column: their number, from 0."""

    def __init__(self, rows: Sequence[Row], column: str):
        super().__init__([rows])
        self._column = column

    def __getitem__(self, index: int) -> Row:
        return super().__getitem__(index) | {self._column: int(index)}


# --- what others see ---


class StoredRows(Sequence[Row], Source):
    """Rows of a source, or some of them, each changed by functions when it is asked for."""

    def __init__(
        self,
        source: Any,
        indices: range | np.ndarray | None = None,
        functions: tuple[Callable[[Row], Row], ...] = (),
        columns: tuple[str, ...] = (),
    ):
        self._source = source
        self._indices = range(len(source)) if indices is None else indices
        self._functions = functions
        self.columns = columns
        """The columns that any row has, as they were read."""

    def __iter__(self) -> Iterator[Row]:
        # That of `Sequence` takes an IndexError of a function for the end.
        return map(self.__getitem__, range(len(self)))

    def map(self, function: Callable[[Row], Row]) -> StoredRows:
        """Return the rows as the function changes them, each time that they are asked for."""
        functions = (*self._functions, function)
        return StoredRows(self._source, self._indices, functions, self.columns)

    def take(self, indices: np.ndarray) -> StoredRows:
        """Return the rows with these numbers, from 0."""
        chosen = np.asarray(self._indices)[indices]
        return StoredRows(self._source, chosen, self._functions, self.columns)

    def where(self, index: int) -> str:
        return where_of(self._source, int(self._indices[index]))

    def part_numbers(self) -> np.ndarray:
        return part_numbers(self._source)[np.asarray(self._indices, np.int64)]

    def checksums(self) -> np.ndarray | None:
        of_source = checksums(self._source)
        return None if of_source is None else of_source[np.asarray(self._indices, np.int64)]

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> StoredRows: ...

    def __getitem__(self, index: int | slice) -> Row | StoredRows:
        if isinstance(index, slice):
            return StoredRows(self._source, self._indices[index], self._functions, self.columns)
        row = self._source[int(self._indices[index])]
        for function in self._functions:
            row = function(row)
        return row

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(self) != len(other):
            return False
        return all(row == other_row for row, other_row in zip(self, other, strict=True))

    __hash__ = None  # pyright: ignore[reportAssignmentType]  (equality is that of the rows)


def checksums(rows: Any) -> np.ndarray | None:
    """Return [rows] uint64, of the bytes of each row, of rows that are checked when they are drawn.

    None: all rows were read and checked before.
    """
    return rows.checksums() if isinstance(rows, Source) else None


FIRST_ROWS = 500
SAMPLED_ROWS = 500


def sampled_indices(count: int) -> np.ndarray:
    """Return the numbers of the first rows of `count`, of the last one, and of some between."""
    spread = np.linspace(0, count - 1, SAMPLED_ROWS).astype(int)
    return np.unique(np.concatenate([np.arange(min(FIRST_ROWS, count)), spread]))


def sample(rows: Sequence[Row]) -> Sequence[Row]:
    """Return the rows, or some of them if they are checked when they are drawn."""
    is_read = not len(rows) or checksums(rows) is None
    return rows if is_read else take(rows, sampled_indices(len(rows)))


def where_of(rows: Any, index: int) -> str:
    """Return where a row was read, or its number if it was made."""
    return rows.where(index) if isinstance(rows, Source) else f"row {index + 1}"


def part_numbers(rows: Any) -> np.ndarray:
    """Return [rows] int: of which part of a path, with commas between parts, each row is."""
    return rows.part_numbers() if isinstance(rows, Source) else np.zeros(len(rows), int)


@contextmanager
def naming_row(rows: Any, index: int) -> Iterator[None]:
    """Let an InputError of this context say in which row it is."""
    try:
        yield
    except InputError as error:
        raise error.within(where_of(rows, index)) from error


def take(rows: Sequence[Row], indices: np.ndarray) -> Sequence[Row]:
    """Return the rows with these numbers, from 0."""
    if isinstance(rows, StoredRows):
        return rows.take(indices)
    return [rows[index] for index in indices]


def join(*parts: Sequence[Row]) -> StoredRows:
    """Return the rows of all parts, one after the other."""
    return StoredRows(Joined(parts))


def with_number(rows: Sequence[Row], column: str) -> StoredRows:
    """Return the rows with a further column, the number of the row from 0."""
    return StoredRows(WithNumber(rows, column))
