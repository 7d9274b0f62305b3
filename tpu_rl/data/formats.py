"""The file formats that hold rows besides JSON."""

from __future__ import annotations

import contextlib
import csv
import functools
import gzip
import io
import json
import os
import tempfile
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from tpu_rl.data.stored_rows import ArrowRows, Given, not_text
from tpu_rl.errors import InputError, MachineError, did_you_mean, refused

Row = dict[str, Any]
UNPACKED_AT_ONCE = 2**20
"""Bytes of a gzip file."""


def unpacked(file: Path) -> IO[bytes]:
    """Return a temporary file with the content of a gzip file, which is unpacked once.

    Raises InputError if it is damaged, and MachineError if the temporary file cannot be written.
    """
    status = file.stat()
    content = _unpacked(file, (status.st_size, status.st_mtime_ns, status.st_ino))
    os.lseek(content.descriptor, 0, os.SEEK_SET)
    return os.fdopen(os.dup(content.descriptor), "rb")


class _Descriptor:
    """A descriptor of a file, which is closed with this object."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)


@functools.lru_cache(maxsize=2)
def _unpacked(file: Path, stamp: tuple[int, ...]) -> _Descriptor:
    with contextlib.ExitStack() as stack, gzip.open(file, "rb") as opened:
        with _no_room():
            temporary = stack.enter_context(tempfile.TemporaryFile(buffering=0))
        while True:
            with refused(
                (OSError, EOFError, zlib.error),
                "the data file is gzip, but damaged",
                where=str(file),
                fix="copy or download it again",
            ):
                block = opened.read(UNPACKED_AT_ONCE)
            if not block:
                return _Descriptor(os.dup(temporary.fileno()))
            with _no_room():
                while block:
                    block = block[temporary.write(block) :]


def _no_room() -> contextlib.AbstractContextManager[None]:
    return refused(
        OSError,
        "the data file cannot be unpacked",
        where=tempfile.gettempdir(),
        fix="make room there, or let TMPDIR name another folder",
        kind=MachineError,
    )


def csv_rows(file: Path, content: bytes) -> Given:
    """Return the rows of a CSV file with a header: texts, but in `label` and `forget`."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise not_text(error, f"{file}:{line}") from error
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] = []
    rows: list[Row] = []
    lines: list[int] = []
    line = 1
    try:
        for cells in reader:
            where = f"{file}:{line}"
            if cells and not header:
                header = cells
                _check_header(header, where)
            elif cells and len(cells) != len(header):
                raise InputError(
                    f"a row has {len(cells)} cells, and the header has {len(header)}",
                    where=where,
                    fix='correct the row; cells with commas or line ends stand in quotes, "..."',
                )
            elif cells:
                row: Row = dict(zip(header, cells, strict=True))
                for flag in ("label", "forget"):
                    text = str(row.get(flag, "")).strip().lower()
                    if text in ("true", "false"):
                        row[flag] = text == "true"
                rows.append(row)
                lines.append(line)
            line = reader.line_num + 1
    except csv.Error as error:
        raise InputError(
            "not a row in CSV", where=f"{file}:{line}", why=str(error), fix="correct its quotes"
        ) from error
    return Given(rows, lambda number: f"{file}:{lines[number - 1]}")


def _check_header(header: list[str], where: str) -> None:
    """Raise InputError if a column has no name, or two have the same."""
    for name in header:
        if not name.strip() or header.count(name) > 1:
            problem = f"has the column `{name}` twice" if name.strip() else "has an empty name"
            raise InputError(
                f"the header {problem}", where=where, fix="give each column a name of its own"
            )


# --- tables ---


def _pyarrow(action: str, where: Path, extra: str) -> Any:
    """Return pyarrow with the modules that readers use. Raises MachineError without it."""
    with refused(
        ImportError,
        f"reading {action} needs pyarrow",
        where=str(where),
        fix=f'pip install "tpu_rl[{extra}]"',
        kind=MachineError,
    ):
        import pyarrow  # pyright: ignore[reportMissingImports]  (the extras)
        import pyarrow.ipc  # pyright: ignore[reportMissingImports]
        import pyarrow.parquet  # pyright: ignore[reportMissingImports]
    return pyarrow


def parquet_rows(file: Path, content: bytes | None) -> ArrowRows:
    """Return the rows of a Parquet file, or of its content. They are in memory, as Arrow."""
    pyarrow = _pyarrow("Parquet", file, "parquet")
    with refused(
        (pyarrow.ArrowException, OSError),
        "a damaged Parquet file",
        where=str(file),
        fix="copy or download it again",
    ):
        opened = str(file) if content is None else pyarrow.BufferReader(content)
        # A mapped file is not also held as it lies on the disk.
        # Files have checksums if they were written with write_page_checksum.
        table = pyarrow.parquet.ParquetFile(
            opened, memory_map=content is None, page_checksum_verification=True
        ).read()
    names = table.column_names
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise InputError(
            f"the table has the column `{repeated}` twice",
            where=str(file),
            fix="give each column a name of its own",
        )
    return ArrowRows(table.to_batches(), lambda number: f"{file}, row {number}")


# --- datasets ---


def is_saved_dataset(folder: Path) -> bool:
    """Return True if `datasets.save_to_disk` wrote the folder."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def choose_split(names: Sequence[str], split: str | None, where: str) -> str:
    """Return the split to read: the one asked for, else `train`, else the only one."""
    if split is None and ("train" in names or len(names) == 1):
        return "train" if "train" in names else names[0]
    if split is not None and split in names:
        return split
    raise InputError(
        f"the data have no split {split!r}" if split else "the data have several splits",
        where=f"{where}, --data.split",
        why=f"splits are {', '.join(names) or 'none'}",
        fix=did_you_mean(split or "", names, "give --data.split"),
    )


def saved_rows(folder: Path, split: str | None) -> ArrowRows:
    """Return the rows of a folder that `datasets.save_to_disk` wrote, mapped into memory."""
    pyarrow = _pyarrow("a saved dataset", folder, "datasets")
    with refused(
        (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError),
        "a damaged dataset folder",
        where=str(folder),
        fix="write it again with save_to_disk",
    ):
        directory = folder
        if (folder / "dataset_dict.json").is_file():
            names = json.loads((folder / "dataset_dict.json").read_text("utf-8"))["splits"]
            split = choose_split(names, split, str(folder))
            directory = folder / split
        state = json.loads((directory / "state.json").read_text("utf-8"))
        if directory == folder and split is not None:
            choose_split([name for name in [state.get("_split")] if name], split, str(folder))
        split = split or state.get("_split") or "train"
        batches = [
            batch
            for entry in state["_data_files"]
            for batch in pyarrow.ipc.open_stream(
                pyarrow.memory_map(str(directory / entry["filename"]))
            )
        ]
    return ArrowRows(batches, lambda number: f"{folder}, row {number} of split {split}")


def hub_rows(name: str, config: str | None, split: str | None) -> Given:
    """Return the rows of a dataset of the Hugging Face hub, which `datasets` caches."""
    with refused(
        ImportError,
        f"no file or folder is named {name}, and reading it from the hub needs `datasets`",
        where="--data.path",
        fix='correct the path, or pip install "tpu_rl[datasets]"',
        kind=MachineError,
    ):
        import datasets  # pyright: ignore[reportMissingImports]  (the extra [datasets])
    # `datasets` and its storage libraries raise many kinds of errors.
    with refused(
        Exception,
        f"cannot read the dataset {name} from the cache or the hub",
        where="--data.path, --data.config",
        fix="correct the name; without a network, download it beforehand or give a file",
    ):
        splits = datasets.load_dataset(name, config)
    split = choose_split([str(each) for each in splits], split, name)
    rows: Any = splits[split]
    return Given(rows, lambda number: f"{name}, row {number} of split {split}")
