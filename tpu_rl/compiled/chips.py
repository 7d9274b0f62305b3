"""What chips can do, and so how long a program's operations take at least.

Figures are those of Google's public pages (Cloud TPU documentation, "TPU architecture": the pages of v4, v5e, v5p and
v6e), per chip, decimal units. A link's rate is the chip's bandwidth over its ports, one way: where a page gives the sum
of both ways, half of it. Only the rate to the host is on none of them: it is what "How to Scale Your Model" (Austin et
al., 2025, chapter 2) calculates with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tpu_rl.compiled.costs import Link, Operation

HOP_SECONDS = 1e-6
"""Of a message from a chip to its neighbour: about a microsecond."""

Coordinates = Sequence[tuple[int, ...]]
"""Of each partition's chip in the torus."""


class Chip(NamedTuple):
    kind: str
    """`device_kind` as jax names it."""
    memory: int
    """Bytes of HBM that a program may use: the compiler's own limit, a little less than the chip has."""
    memory_rate: float
    """Bytes a second, of HBM."""
    peak: float
    """Floating-point operations a second, matrix products of bfloat16."""
    link_rate: float
    """Bytes a second, one way over one link to a neighbour."""
    host_rate: float
    """Bytes a second, one way, between the chip's memory and its host's."""
    wraps: str
    """Which dimensions of a slice close to rings: "16" those of 16 chips, "cubes" all, where all are multiples of 4."""


CHIPS: Mapping[str, Chip] = {
    "v4": Chip("TPU v4", int(30.75 * 2**30), 1.2e12, 275e12, 50e9, 16e9, "cubes"),
    "v5e": Chip("TPU v5 lite", int(15.75 * 2**30), 0.819e12, 197e12, 50e9, 16e9, "16"),
    "v5p": Chip("TPU v5", int(95.74 * 2**30), 2.765e12, 459e12, 100e9, 16e9, "cubes"),
    "v6e": Chip("TPU v6 lite", int(31.25 * 2**30), 1.638e12, 918e12, 100e9, 32e9, "16"),
}


class Torus(NamedTuple):
    """Where the partitions of a program run."""

    coordinates: Coordinates
    chip: Chip

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(max(values) + 1 for values in zip(*self.coordinates, strict=True))

    def closed(self, dimension: int, size: int) -> bool:
        """Whether `size` chips in a line along a dimension are a ring."""
        whole = size == self.sizes[dimension]
        if self.chip.wraps == "16":
            return whole and size == 16
        return whole and all(n % 4 == 0 for n in self.sizes)


class Estimate(NamedTuple):
    """A program's least time on one device."""

    flops: float
    bytes: float
    link_bytes: float
    """That leave the chip."""
    compute_seconds: float
    """All matrix products at the chip's peak."""
    memory_seconds: float
    """All bytes at the memory's rate."""
    link_seconds: float
    """All collectives, one after the other."""
    exposed_seconds: float
    """Of those, what nothing in their part of the program hides."""
    seconds: float
    """Each operation as long as its products or its bytes take, one after the other, and the exposed collectives."""
    uncounted: tuple[str, ...]
    """Kernels that say nothing of their floating-point operations."""


def estimate(operations: Sequence[Operation], torus: Torus) -> Estimate:
    """What the operations of a program take at least: a bound, as nothing on a chip runs at its peak."""
    chip = torus.chip
    busy: dict[str, float] = {}
    hidden: dict[str, dict[tuple[int, ...], float]] = {}
    exposed = links = flops = moved = link_bytes = 0.0
    for one in operations:
        if one.link is not None:
            seconds = one.times * link_seconds(one.link, torus)
            links += seconds
            link_bytes += one.times * sent_bytes(one.link)
            if one.link.overlaps:
                # Permutations go both ways round a ring at once; other collectives take all links of their group.
                way = one.link.group if one.link.kind == "collective-permute" else ()
                ways = hidden.setdefault(one.scope, {})
                ways[way] = ways.get(way, 0.0) + seconds
            else:
                exposed += seconds
        flops += one.times * one.flops
        moved += one.times * one.bytes
        seconds = one.times * max(one.flops / chip.peak, one.bytes / chip.memory_rate)
        busy[one.scope] = busy.get(one.scope, 0.0) + seconds
    for scope, ways in hidden.items():
        whole = ways.pop((), 0.0) + max(ways.values(), default=0.0)
        exposed += max(whole - busy.get(scope, 0.0), 0.0)
    uncounted = tuple(sorted({one.name for one in operations if one.uncounted}))
    seconds = sum(busy.values()) + exposed
    rates = (flops / chip.peak, moved / chip.memory_rate)
    return Estimate(flops, moved, link_bytes, *rates, links, exposed, seconds, uncounted)


def sent_bytes(link: Link) -> float:
    """Bytes that a device must send, or receive, at least."""
    others = len(link.group) - 1
    share = others / len(link.group)
    return link.bytes * {"all-gather": others, "all-reduce": 2 * share, "collective-permute": 1.0}.get(link.kind, share)


def link_seconds(link: Link, torus: Torus) -> float:
    """Time of a collective: its bytes over the links that a chip has in its group, and a message's way through it.

    A group that fills a box of the torus uses a link a dimension, two where the dimension is a ring. One that does
    not uses one link, as does a permutation.
    """
    rate = torus.chip.link_rate
    chips = [torus.coordinates[partition] for partition in link.group]
    sizes = [len(set(values)) for values in zip(*chips, strict=True)]
    spanned = [(size, torus.closed(d, size)) for d, size in enumerate(sizes) if size > 1]
    if link.kind == "collective-permute" or math.prod(sizes) != len(chips):
        hops = 1 if link.kind == "collective-permute" else len(chips) - 1
        return sent_bytes(link) / rate + hops * HOP_SECONDS
    hops = sum(size // 2 if ring else size - 1 for size, ring in spanned)
    if link.kind in ("all-to-all", "ragged-all-to-all"):
        longest, ring = max(spanned)
        return link.bytes * longest / (4 * (2 if ring else 1) * rate) + hops * HOP_SECONDS
    passes = 2 if link.kind == "all-reduce" else 1
    links = sum(2 if ring else 1 for _, ring in spanned)
    return sent_bytes(link) / (links * rate) + passes * hops * HOP_SECONDS
