"""Cycles that the attention kernels are expected to take, for the planner.

The TPU's compiler estimates the cycles of its own operations, but not those of kernels. They come
from its schedule here: `bench/kernel_schedules.py` prints the entries of `CYCLES`.
"""

from __future__ import annotations

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


CYCLES: dict[str, dict[int, dict[str, Cycles]]] = {
    "v5e": {
        64: {
            "flash_attention_forward": Cycles(step=208, edge=381, masked=1020, full=932),
            "flash_attention_gradients": Cycles(step=325, edge=454, masked=2367, full=2242),
            "flash_attention_query_gradient": Cycles(step=223, edge=189, masked=1375, full=1295),
            "flash_attention_key_value_gradient": Cycles(
                step=234, edge=262, masked=2012, full=1926
            ),
        },
        128: {
            "flash_attention_forward": Cycles(step=208, edge=457, masked=1252, full=1143),
            "flash_attention_gradients": Cycles(step=382, edge=426, masked=2605, full=2555),
            "flash_attention_query_gradient": Cycles(step=226, edge=186, masked=1584, full=1533),
            "flash_attention_key_value_gradient": Cycles(
                step=284, edge=203, masked=2044, full=2044
            ),
        },
        256: {
            "flash_attention_forward": Cycles(step=208, edge=723, masked=2132, full=2088),
            "flash_attention_gradients": Cycles(step=382, edge=831, masked=5110, full=5110),
            "flash_attention_query_gradient": Cycles(step=226, edge=433, masked=3096, full=3066),
            "flash_attention_key_value_gradient": Cycles(
                step=283, edge=391, masked=4088, full=4088
            ),
        },
    },
    "v5p": {
        64: {
            "flash_attention_forward": Cycles(step=212, edge=374, masked=1023, full=929),
            "flash_attention_gradients": Cycles(step=361, edge=453, masked=2350, full=2253),
            "flash_attention_query_gradient": Cycles(step=232, edge=189, masked=1370, full=1312),
            "flash_attention_key_value_gradient": Cycles(
                step=275, edge=262, masked=1998, full=1923
            ),
        },
        128: {
            "flash_attention_forward": Cycles(step=244, edge=472, masked=1259, full=1146),
            "flash_attention_gradients": Cycles(step=424, edge=426, masked=2606, full=2559),
            "flash_attention_query_gradient": Cycles(step=279, edge=186, masked=1587, full=1535),
            "flash_attention_key_value_gradient": Cycles(
                step=322, edge=203, masked=2047, full=2047
            ),
        },
        256: {
            "flash_attention_forward": Cycles(step=246, edge=726, masked=2146, full=2117),
            "flash_attention_gradients": Cycles(step=423, edge=831, masked=5117, full=5117),
            "flash_attention_query_gradient": Cycles(step=276, edge=433, masked=3123, full=3070),
            "flash_attention_key_value_gradient": Cycles(
                step=329, edge=391, masked=4094, full=4094
            ),
        },
    },
    "v6e": {
        64: {
            "flash_attention_forward": Cycles(step=208, edge=233, masked=822, full=698),
            "flash_attention_gradients": Cycles(step=318, edge=363, masked=1333, full=1206),
            "flash_attention_query_gradient": Cycles(step=214, edge=205, masked=868, full=696),
            "flash_attention_key_value_gradient": Cycles(
                step=229, edge=146, masked=1264, full=1124
            ),
        },
        128: {
            "flash_attention_forward": Cycles(step=208, edge=310, masked=846, full=746),
            "flash_attention_gradients": Cycles(step=374, edge=413, masked=1361, full=1249),
            "flash_attention_query_gradient": Cycles(step=225, edge=272, masked=916, full=752),
            "flash_attention_key_value_gradient": Cycles(
                step=288, edge=129, masked=1260, full=1118
            ),
        },
        256: {
            "flash_attention_forward": Cycles(step=208, edge=483, masked=982, full=908),
            "flash_attention_gradients": Cycles(step=372, edge=698, masked=1580, full=1420),
            "flash_attention_query_gradient": Cycles(step=225, edge=469, masked=1069, full=909),
            "flash_attention_key_value_gradient": Cycles(
                step=289, edge=233, masked=1326, full=1164
            ),
        },
    },
}
"""Chip -> size of a head -> kernel -> cycles, in bfloat16 and without a cap of the scores. The
products of a block take at least as long as at the chip's peak. v4 has the matrix units of v5p."""

CYCLES["v4"] = CYCLES["v5p"]


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
