"""Names of groups of TPU chips: "v5e:4x4", "v5p-512", "2*v6e:16x16".

A topology names the chips along each dimension. The names of Google Cloud count instead: those of
v5e ("v5litepod-16") and v6e count chips, those of v4 and v5p count TensorCores, two in each chip.
The cloud then chooses the shape that is nearest to a cube, as `parse` does.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from tpu_rl.errors import InputError

ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "v7x": "tpu7x", "v7": "tpu7x", "ironwood": "tpu7x"}
FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
"""Chips of a slice of v5e or v6e -> its shape."""
SMALL_CUBES = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4"}
"""Chips of a slice of v4 or v5p below a cube of 64 -> its shape."""
HELP = (
    "NAME:AxB or NAME:AxBxC with NAME one of v4, v5e, v5p, v6e, tpu7x, or a name of Google Cloud"
    " such as v5litepod-16, v6e-8 or v5p-512; N* before it stands for N slices"
)


class Topology(NamedTuple):
    """Slices of TPU chips, connected by the data-center network."""

    chip: str
    """A key of `CHIPS`."""
    shape: str
    """Chips along each dimension of a slice, such as "4x4"."""
    slices: int = 1

    @property
    def name(self) -> str:
        """The name of one slice, as the TPU compiler reads it."""
        return f"{self.chip}:{self.shape}"

    def __str__(self) -> str:
        return f"{self.slices}*{self.name}" if self.slices > 1 else self.name


def parse(text: str, slices: int | None = None) -> Topology:
    """Read the name of a topology. `slices` is the number of slices, unless the name has it.

    Raises InputError if it is no such name, or no slice has so many chips.
    """
    named = re.fullmatch(r"(?:(\d+)\*)?([a-z]\w*)(?::(\d+(?:x\d+)+)|-(\d+))", text.strip().lower())
    chip = ALIASES.get(named[2], named[2]) if named else ""
    if named is None or chip not in ("v4", "v5e", "v5p", "v6e", "tpu7x"):
        raise InputError(f"no such topology: {text!r}", where="--topology", fix=HELP)
    if named[1] and slices and int(named[1]) != slices:
        raise InputError(
            f"{text!r} and {slices} slices contradict each other",
            where="--slices",
            fix="leave one of them out",
        )
    count = int(named[1] or slices or 1)
    if count < 1:
        raise InputError(f"{count} slices", where="--slices", fix="give 1 or more")
    return Topology(chip, named[3] or _shape(text, chip, int(named[4])), count)


def _shape(text: str, chip: str, size: int) -> str:
    """Return the shape of a slice that the cloud names by its size."""
    if chip == "tpu7x":
        raise InputError(
            f"the number in {text!r} is not known to count chips",
            where="--topology",
            fix="give the shape, such as tpu7x:2x2x1",
        )
    if chip in ("v5e", "v6e"):
        if size in FLAT:
            return FLAT[size]
        fix = f"one of {', '.join(map(str, FLAT))} chips"
        raise InputError(f"no slice of {chip} has {size} chips", where="--topology", fix=fix)
    chips, rest = divmod(size, 2)
    if not rest and chips in SMALL_CUBES:
        return SMALL_CUBES[chips]
    cubes = [] if size % 128 else _cubes(size // 128)
    if not cubes:
        raise InputError(
            f"no slice of {chip} has {size} TensorCores",
            where="--topology",
            why="a chip has two, and larger slices consist of cubes of 4x4x4 chips",
            fix="8, 16, 32, 64 or a multiple of 128 TensorCores, or a shape such as v5p:4x4x8",
        )
    return "x".join(str(4 * side) for side in min(cubes, key=lambda sides: sides[2] - sides[0]))


def _cubes(count: int) -> list[tuple[int, int, int]]:
    """Return the boxes (a, b, c) of `count` cubes with a <= b <= c."""
    return [
        (a, b, count // a // b)
        for a in range(1, round(count ** (1 / 3)) + 1)
        if count % a == 0
        for b in range(a, math.isqrt(count // a) + 1)
        if count // a % b == 0
    ]
