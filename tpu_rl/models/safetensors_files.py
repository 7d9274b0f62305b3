"""The safetensors format, read and written one tensor at a time.

A file is 8 bytes of little-endian header length, the header (JSON: name -> dtype, shape, data_offsets), the data.
The safetensors package has no bfloat16 for NumPy, and its writer wants all tensors in memory at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tpu_rl.errors import InputError
from tpu_rl.model_files import impostor

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
CODES = {dtype: code for code, dtype in DTYPES.items()}

INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
HEADER_LIMIT = 20_000_000
"""Bytes. The format allows 100 MB, which parsed are gigabytes; the largest files of real models have 1 or 2 MB."""
HEADER_VALUES = 1_000_000
"""Values in a header, some six for each tensor."""


class Stored(NamedTuple):
    """A tensor in a file."""

    path: Path
    code: str
    """The format's name of the dtype."""
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the file."""
    size: int
    """Bytes."""

    def read(self) -> np.ndarray:
        """The tensor, mapped from the file: memory is used as it is touched.

        Raises InputError where it is not a float of 16 or 32 bits.
        """
        if self.code not in DTYPES:
            raise InputError(
                f"tensors of type {self.code} are not supported", where=str(self.path), fix=f"supported: {list(DTYPES)}"
            )
        dtype = DTYPES[self.code]
        if self.offset < 0 or self.size != math.prod(self.shape) * dtype.itemsize:
            raise InputError(
                "a tensor's shape and its place in the file disagree", where=str(self.path), fix="download it again"
            )
        return np.memmap(self.path, dtype, "r", self.offset, self.shape)


def find_tensors(directory: Path) -> dict[str, Stored]:
    """All tensors of a model directory, by name, from the headers alone.

    Raises InputError where there is no safetensors file or one of them is not what it should be.
    """
    return {name: tensor for path in _files(directory) for name, tensor in read_header(path).items()}


def _files(directory: Path) -> list[Path]:
    """The safetensors files that make up the model in `directory`."""
    single, index = directory / "model.safetensors", directory / INDEX
    if single.exists():  # as transformers does: an index beside it is of an older model
        return [single]
    if index.exists():
        return [directory / name for name in _indexed(index)]
    found = sorted(directory.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise InputError(
            f"{len(found)} safetensors files without an index",
            where=str(directory),
            fix=f"add {INDEX}, or keep one file",
        )
    pickles = sorted(path.name for pattern in PICKLES for path in directory.glob(pattern))
    raise InputError(
        "no safetensors file in the model directory",
        where=str(directory),
        why=f"it has only pickled weights ({pickles[0]}), which can run code when read" if pickles else "",
        fix="with transformers: AutoModelForCausalLM.from_pretrained(path).save_pretrained(new_path)"
        if pickles
        else "",
    )


def _indexed(index: Path) -> list[str]:
    """The file names in an index. Raises InputError where one is missing or leads out of the directory."""
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise InputError("not an index of safetensors files", where=str(index), why=repr(error)[:200]) from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise InputError(f"the index leads out of the model directory: {name!r}", where=str(index))
        if not (index.parent / name).exists():
            raise InputError(f"{name} is missing", where=str(index.parent), why=f"{index.name} names it")
    return names


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one file. Raises InputError where it is no safetensors file, or cut short."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(512)
        length = int.from_bytes(start[:8], "little")
        if len(start) < 8 or not 2 <= length <= min(HEADER_LIMIT, size - 8):
            why = impostor(start) or {"why": "its header's length is impossible", "fix": "download it again"}
            raise InputError(f"{path.name} is not a safetensors file", where=str(path.parent), **why)
        file.seek(8)
        text = file.read(length)
        if text.count(b",") > HEADER_VALUES:
            raise InputError(
                f"the header of {path.name} has more than {HEADER_VALUES:,} values",
                where=str(path.parent),
                why="no model has so many tensors in a file",
                fix="do not use this checkpoint: it may have been made to do harm",
            )
        try:
            header = json.loads(text)
            header.pop("__metadata__", None)
            tensors = {name: _stored(path, entry, 8 + length) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(
                f"{path.name} has no readable header",
                where=str(path.parent),
                why=repr(error)[:200],
                fix="download it again",
            ) from error
    end = max((tensor.offset + tensor.size for tensor in tensors.values()), default=0)
    if end > size:
        raise InputError(
            f"{path.name} is cut short", where=str(path.parent), why=f"{size} bytes of {end}", fix="download it again"
        )
    return tensors


def _stored(path: Path, entry: Mapping[str, Any], data: int) -> Stored:
    """A header's entry, with the data beginning at byte `data` of the file. Raises ValueError for impossible ones."""
    start, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if any(type(number) is not int or number < 0 for number in (start, end - start, *shape)):
        raise ValueError(f"shape {shape}, data_offsets {start} to {end}"[:200])
    return Stored(path, entry["dtype"], shape, data + start, end - start)


def write_file(
    path: Path, layout: Mapping[str, tuple[np.dtype, tuple[int, ...]]], tensors: Iterable[np.ndarray]
) -> None:
    """One file of the tensors that `layout` (name -> dtype, shape) describes, taken from `tensors` in that order."""
    header: dict[str, dict[str, Any]] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in layout.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            file.write(np.ascontiguousarray(tensor).view(np.uint8).data)
