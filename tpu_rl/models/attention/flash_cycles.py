"""Cycles that the attention kernels are expected to take, for the planner.

The TPU's compiler estimates the cycles of its own operations, but not those of kernels. They come
from its schedule here: `bench/kernel_schedules.py` prints the lines of `flash_cycles.tsv`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from tpu_rl import jax_versions

SCORES = 512 * 512
"""Scores that the cycles of a block are stated for."""


class Visits(NamedTuple):
    """Steps of a kernel's grid."""

    steps: int
    visible: int
    """Steps whose block of scores is computed."""
    full: int
    """Of the visible ones, those without a mask."""
    edges: int
    """Blocks of the side whose results the kernel computes."""


class Cycles(NamedTuple):
    """Cycles of a core."""

    step: int
    """Of every step, skipped or not."""
    edge: int
    """Of the first and the last step of each block of results."""
    masked: int
    """Of `SCORES` scores with a mask."""
    full: int
    """Of as many without."""

    def total(self, visits: Visits, block_scores: int) -> int:
        """Return the cycles of these steps, with blocks of `block_scores` scores."""
        masked = (visits.visible - visits.full) * self.masked
        of_blocks = (masked + visits.full * self.full) * block_scores / SCORES
        return round(visits.steps * self.step + visits.edges * self.edge + of_blocks)


def _read_cycles() -> dict[str, dict[int, dict[str, Cycles]]]:
    cycles: dict[str, dict[int, dict[str, Cycles]]] = {}
    _, *lines = Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8").splitlines()
    for line in lines:
        chip, size, kernel, *numbers = line.split("\t")
        of_kernels = cycles.setdefault(chip, {}).setdefault(int(size), {})
        of_kernels[kernel] = Cycles(*map(int, numbers))
    return cycles | {"v4": cycles["v5p"]}


CYCLES = _read_cycles()
"""Chip -> size of a head -> kernel -> cycles, in bfloat16 and without a cap of the scores. The
products of a block take at least as long as at the chip's peak. v4 has the matrix units of v5p."""


def expected(kernel: str, head_dim: int, dtype: Any, visits: Visits, block_scores: int) -> int:
    """Return the cycles of a kernel on the chip that it is traced for; 0 if unknown.

    A head between two sizes of `CYCLES` counts as the larger one, as it fills the same tiles. One
    above all of them takes as much longer as it is wider.
    """
    info = jax_versions.tpu_info()
    if info is None:
        return 0
    sizes = CYCLES.get(str(info.chip_version))
    if sizes is None or dtype != jnp.bfloat16:
        return 0
    size = min((size for size in sizes if size >= head_dim), default=max(sizes))
    block_scores = block_scores * max(head_dim, size) // size
    return sizes[size][kernel].total(visits, block_scores) // info.num_cores
