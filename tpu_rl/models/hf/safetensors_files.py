"""The safetensors format, read and written one tensor at a time.

A file has 8 bytes with the little-endian length of the header, the header (JSON: name -> dtype,
shape, data_offsets), and the data. The safetensors package is not used for two reasons: its writer
needs all tensors in memory at once, and headers of strangers' files are checked here before they
are parsed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tpu_rl.errors import InputError, refused
from tpu_rl.untrusted_files import wrong_format

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}
DTYPE_NAMES = {"float32": DTYPES["F32"], "float16": DTYPES["F16"], "bfloat16": DTYPES["BF16"]}

BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 1),
}
"""The format's dtypes of whole bytes -> bytes of a number."""
SMALL_DTYPES = ("F4", "F6_E2M3", "F6_E3M2")
"""The other ones."""

INDEX = "model.safetensors.index.json"
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")

MAX_HEADER_BYTES = 20_000_000
"""The format allows 100 MB, which take gigabytes when parsed. The largest headers of real models
have 1 or 2 MB."""

MAX_HEADER_VALUES = 1_000_000
"""Values in a header. Each tensor has about six."""


class StoredTensor(NamedTuple):
    """The place of a tensor in a file."""

    path: Path
    code: str
    """The format's name of the dtype."""
    shape: tuple[int, ...]
    offset: int
    """First byte in the file."""
    size: int
    """Number of bytes."""
    is_transposed: bool = False
    """True if the file has the last two axes of `shape` the other way round."""

    def read(self) -> np.ndarray:
        """Return the tensor, memory-mapped from the file.

        Raises:
            InputError: the dtype is not supported, or shape and size disagree.
        """
        if self.code not in DTYPES:
            raise InputError(
                f"tensors of type {self.code} are not supported",
                where=str(self.path),
                why="weights are floats of 16 or 32 bits; integers may be quantized weights",
                fix=f"use a checkpoint with tensors of type {', '.join(DTYPES)}",
            )
        dtype = DTYPES[self.code]
        if self.offset < 0 or self.size != math.prod(self.shape) * dtype.itemsize:
            raise InputError(
                "a tensor's shape and its size in the file disagree",
                where=str(self.path),
                why=f"shape {self.shape} of {self.code} has {self.size} bytes"[:200],
                fix="download the file again",
            )
        if self.is_transposed:
            *first, rows, columns = self.shape
            stored = np.memmap(self.path, dtype, "r", self.offset, (*first, columns, rows))
            return stored.swapaxes(-1, -2)
        return np.memmap(self.path, dtype, "r", self.offset, self.shape)

    def read_bytes(self) -> np.ndarray:
        """Return a tensor of bytes (U8), memory-mapped from the file.

        Quantized weights are stored so. `read_header` has checked shape and size.
        """
        assert self.code == "U8", self
        return np.memmap(self.path, np.uint8, "r", self.offset, self.shape)


def find_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return name -> tensor for all tensors of a model directory. Only headers are read.

    Raises:
        InputError: there is no safetensors file, or a file is damaged.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in _find_files(directory):
        file_tensors = read_header(path)
        twice = sorted(tensors.keys() & file_tensors.keys())
        if twice:
            raise InputError(
                f"the tensor {twice[0][:100]!r} is in two files",
                where=str(directory),
                why=f"{tensors[twice[0]].path.name} and {path.name} have it",
                fix="download the model again",
            )
        tensors |= file_tensors
    return tensors


def _find_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a model directory."""
    single = directory / "model.safetensors"
    index = directory / INDEX
    # As in transformers, this file wins: an index beside it is of an older model.
    if single.exists():
        return [single]
    if index.exists():
        return [directory / name for name in _read_index(index)]
    files = sorted(directory.glob("*.safetensors"))
    if len(files) == 1:
        return files
    if files:
        raise InputError(
            f"{len(files)} safetensors files without an index",
            where=str(directory),
            why="it is not known which of them belong to the model",
            fix=f"add {INDEX}, or keep one file",
        )
    pickles = sorted(path.name for pattern in PICKLE_PATTERNS for path in directory.glob(pattern))
    why = ""
    fix = "download the model again, with its weights; or begin from random ones: "
    fix += "--model.random-init"
    if pickles:
        why = f"it has only pickled weights ({pickles[0]}), which can run code when read"
        fix = "convert them with transformers: "
        fix += "AutoModelForCausalLM.from_pretrained(path).save_pretrained(new_path)"
    elif any(directory.glob("*.gguf")):
        why = "it has GGUF files, whose weights are mostly quantized for llama.cpp"
        fix = "give the model that they were made of"
    what = "no safetensors file in the model directory"
    raise InputError(what, where=str(directory), why=why, fix=fix)


def _read_index(index: Path) -> list[str]:
    """Return the file names in an index.

    Raises:
        InputError: it is no index, or a file is missing or outside of the directory.
    """
    with refused(
        (ValueError, KeyError, AttributeError, TypeError, RecursionError),
        "not an index of safetensors files",
        where=str(index),
        fix="download it again",
    ):
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise InputError(
                f"the index leads out of the model directory: {str(name)[:200]!r}",
                where=str(index),
                fix="do not use this checkpoint: it may have been made to do harm",
            )
        if not (index.parent / name).exists():
            raise InputError(
                f"{name} is missing",
                where=str(index.parent),
                why=f"{index.name} lists it",
                fix="download the model again, with all its files",
            )
    return names


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return name -> tensor for the tensors of one file.

    Raises:
        InputError: it is no safetensors file, or it is cut short.
    """
    directory = str(path.parent)
    file_size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(512)
        length = int.from_bytes(start[:8], "little")
        if len(start) < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, file_size - 8):
            why, fix = wrong_format(start) or (
                "its header's length is impossible",
                "download it again",
            )
            raise InputError(
                f"{path.name} is not a safetensors file", where=directory, why=why, fix=fix
            )
        file.seek(8)
        text = file.read(length)
    if text.count(b",") > MAX_HEADER_VALUES:
        raise InputError(
            f"the header of {path.name} has more than {MAX_HEADER_VALUES:,} values",
            where=directory,
            why="no model has so many tensors in a file",
            fix="do not use this checkpoint: it may have been made to do harm",
        )
    with refused(
        (ValueError, KeyError, TypeError, AttributeError, RecursionError),
        f"{path.name} has no readable header",
        where=directory,
        fix="download it again",
    ):
        header = json.loads(text, object_pairs_hook=_without_duplicates)
        header.pop("__metadata__", None)
        tensors = {name: _parse_entry(path, entry, 8 + length) for name, entry in header.items()}
    end = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].size)):
        if tensor.offset != end:
            raise InputError(
                f"the tensors of {path.name} overlap, or there is a gap between them",
                where=directory,
                why=f"{name[:100]!r} begins at byte {tensor.offset} and not at {end}",
                fix="download it again",
            )
        end += tensor.size
    if end != file_size:
        raise InputError(
            f"{path.name} is cut short" if end > file_size else f"{path.name} is too long",
            where=directory,
            why=f"it has {file_size} bytes, and its header describes {end}",
            fix="download it again",
        )
    return tensors


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of a header. Raises ValueError if a name comes twice."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name comes twice")
    return entries


def _parse_entry(path: Path, entry: Mapping[str, Any], data_start: int) -> StoredTensor:
    """Return the tensor of a header's entry; `data_start` is the first byte of the data.

    Raises:
        ValueError: shape or offsets are impossible.
    """
    start, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if any(type(number) is not int or number < 0 for number in (start, end - start, *shape)):
        raise ValueError(f"shape {shape}, data_offsets {start} to {end}"[:200])
    code = entry["dtype"]
    if not isinstance(code, str) or code not in BYTES and code not in SMALL_DTYPES:
        raise ValueError(f"dtype {code!r}"[:200])
    if code in BYTES and end - start != math.prod(shape) * BYTES[code]:
        raise ValueError(f"shape {shape} of {code} in {end - start} bytes"[:200])
    return StoredTensor(path, entry["dtype"], shape, data_start + start, end - start)


def write_file(
    path: Path,
    layout: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    tensors: Iterable[np.ndarray],
) -> None:
    """Write a file of the tensors in `layout` (name -> dtype, shape).

    The data come from `tensors`, in the same order and one at a time.
    """
    header: dict[str, dict[str, Any]] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in layout.items():
        start = end
        end += math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": DTYPE_CODES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            file.write(np.ascontiguousarray(tensor).view(np.uint8).data)
