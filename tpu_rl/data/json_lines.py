"""Rows that are lines of JSON, or one array of it."""

from __future__ import annotations

import json
import math
import os
import re
import weakref
import zlib
from array import array
from collections.abc import Callable, Collection
from pathlib import Path
from typing import IO, Any

import numpy as np

from tpu_rl.data.stored_rows import (
    MAX_ROW_BYTES,
    Given,
    Numbered,
    Row,
    Source,
    half_a_character,
    not_text,
    require_dict,
    sampled_indices,
)
from tpu_rl.errors import InputError, refused

MANY_LINES = 10_000
"""To read and encode more rows takes seconds. They are checked when they are drawn."""
MAX_BLOCK = 2**24
"""Bytes that are read at once, more than a row may have."""
BOM = b"\xef\xbb\xbf"


class JsonLines(Source):
    """The lines of a file, each a JSON object. They are refused once they have changed there."""

    def __init__(self, file: IO[bytes], name: Path):
        """Own the open file. `name` is that for errors."""
        self._file = file.fileno()
        self._name = name
        self._check: Callable[[str, Row], None] | None = None
        """Checks a row that is asked for. None: `scan` has checked all."""
        self._end = 0
        """The bytes that were searched for lines, and the lines that were found, blank ones too."""
        self._count = 0
        # Of each line that is not blank: first byte, bytes, checksum, number from 1.
        self._starts = array("q")
        self._lengths = array("q")
        self._checksums = array("L")
        self._numbers = array("q")
        weakref.finalize(self, file.close)

    def _find_lines(self) -> bool:
        """Find the lines of the next block; False at the end. Raises InputError if one is too
        long."""
        block = os.pread(self._file, MAX_BLOCK, self._end)
        if not block:
            return False
        if not self._end and block.startswith(BOM):
            block = block[len(BOM) :]
            self._end = len(BOM)
        # Without a line end it is the last line, or a part of one that is too long.
        end = block.rfind(b"\n")
        for line in block[: end if end >= 0 else len(block)].split(b"\n"):
            self._count += 1
            if len(line) > MAX_ROW_BYTES:
                raise InputError(
                    f"a row has more than {MAX_ROW_BYTES:,} bytes",
                    where=f"{self._name}:{self._count}",
                    why="no model reads a longer text",
                    fix="are the line ends missing? write one row per line, and cut or drop longer "
                    "rows",
                )
            if line.strip():
                self._starts.append(self._end)
                self._lengths.append(len(line))
                self._checksums.append(zlib.crc32(line))
                self._numbers.append(self._count)
            self._end += len(line) + 1
        return True

    def scan(self) -> Numbered:
        index = 0
        while index < len(self) or self._find_lines():
            if index < len(self):
                yield self.where(index), self._parsed(index)
                index += 1

    def samples(self, check: Callable[[str, Row], None], columns: Collection[str]) -> bool:
        """Check a sample of the lines, and the others when they are asked for.

        `columns` are those of the rows that were checked, here too. Returns False if the file has
        to be scanned: it has at most `MANY_LINES` rows, or images. Raises InputError for a row that
        `check` refuses.
        """
        while self._find_lines():
            pass
        if len(self) <= MANY_LINES:
            return False
        for index in sampled_indices(len(self)).tolist():
            check(self.where(index), self._parsed(index))
        self._check = check if "images" not in columns else None
        return self._check is not None

    def checksums(self) -> np.ndarray | None:
        if self._check is None:
            return None
        return np.array(self._checksums, np.uint64) | np.array(self._lengths, np.uint64) << 32

    def where(self, index: int) -> str:
        return f"{self._name}:{self._numbers[index]}"

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Row:
        if self._check is None:
            return json.loads(self._content(index))
        row = self._parsed(index)
        self._check(self.where(index), row)
        return row

    def _parsed(self, index: int) -> Row:
        is_last = self._starts[index] + self._lengths[index] >= os.fstat(self._file).st_size
        return _row(self._content(index), self.where(index), is_last)

    def _content(self, index: int) -> bytes:
        """Return a line. Raises InputError if it is not what was there when it was found."""
        content = os.pread(self._file, self._lengths[index], self._starts[index])
        if zlib.crc32(content) != self._checksums[index]:
            raise InputError(
                "the data file changed since the run read it",
                where=self.where(index),
                why="its bytes are others",
                fix="start the command again, and leave the file alone while it runs",
            )
        return content


def _row(line: bytes, where: str, is_last: bool) -> Row:
    """Return the row of a line. Raises InputError if it is not a JSON object."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_text(error, f"{where}, byte {error.start + 1} of the line") from error
    try:
        row = _strict_decoder.decode(text)
        # Escapes such as \\ud800 are valid JSON, but half a character, which no tokenizer takes.
        if re.search(r"\\u[dD][89a-fA-F]", text):
            json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise half_a_character(error, where) from error
    except (ValueError, RecursionError) as error:
        is_cut = is_last and isinstance(error, json.JSONDecodeError)
        remedy = "write one JSON object per line (jq -c .), name a table .csv"
        remedy = "copy or download the file again" if is_cut else remedy
        raise InputError(
            "the last line is cut off" if is_cut else "not a row in JSON",
            where=where,
            why=str(error),
            fix=f"{remedy}, or leave the line out",
        ) from error
    return require_dict(row, where)


def array_rows(file: Path, content: bytes) -> Given:
    """Return the objects of one JSON array. Raises InputError if it is none, or damaged."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_text(error, f"{file}, byte {error.start + 1}") from error
    with refused(
        (ValueError, RecursionError),
        "not one array in JSON: it is damaged, cut off, or more text follows",
        where=str(file),
        fix="correct the file at this line and column, or download it again",
    ):
        rows = _strict_decoder.decode(text)
    return Given(rows, lambda number: f"{file}, item {number}")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object. Raises ValueError if a key comes twice."""
    row = dict(pairs)
    if len(row) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {repeated!r} comes twice")
    return row


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is beyond the largest float")
    return number


_strict_decoder = json.JSONDecoder(
    object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite
)
