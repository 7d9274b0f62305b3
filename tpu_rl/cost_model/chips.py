"""Peak rates of TPU chips and GPUs, and the least time that a program's operations take on them.

Figures are per chip, in decimal units, from Google's public pages (Cloud TPU documentation, "TPU
architecture": the pages of v4, v5e, v5p, v6e and TPU7x). The rate of a link is the chip's bandwidth
over its ports, one way; where a page gives the sum of both directions, half of it. The data-center
network of v5e is that of a pod over its chips; none is stated for v4, which counts like v5e. The
rate to the host is on none of these pages: it is the figure that "How to Scale Your Model" (Austin
et al., 2025, chapter 2) uses. That of TPU7x is an assumption.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tpu_rl.cost_model.costs import Link, Operation, total_flops

HOP_SECONDS = 1e-6
"""Latency of a message between neighboring chips: about a microsecond."""

NETWORK_SECONDS = 1e-5
"""Latency of a message over the data-center network. This is an assumption: tens of microseconds
are usual."""

Coordinates = Sequence[tuple[int, ...]]
"""The place in the torus of each partition's chip."""


class Chip(NamedTuple):
    """Peak rates of one chip."""

    kind: str
    """`device_kind` in jax."""
    memory: int
    """Bytes of HBM that a program may use: the compiler's own limit, a little less than the chip
    has."""
    memory_rate: float
    """Bytes per second to and from HBM."""
    peak: float
    """FLOPs per second of bfloat16 matrix products."""
    link_rate: float
    """Bytes per second to one neighbor, one way."""
    host_rate: float
    """Bytes per second between the memory of the chip and of its host, one way."""
    wraps: str
    """The dimensions of a slice that close to rings. "16": those of 16 chips; "cubes": all, if all
    are multiples of 4; "none": none."""
    network_rate: float
    """Bytes per second of one chip to other slices, over the data-center network."""
    clock: float = 0.0
    """Cycles per second, the unit of the compiler's own estimates. 0: unknown."""


CHIPS: Mapping[str, Chip] = {
    "v4": Chip("TPU v4", int(30.75 * 2**30), 1.2e12, 275e12, 50e9, 16e9, "cubes", 3.125e9, 1.05e9),
    "v5e": Chip(
        "TPU v5 lite", int(15.75 * 2**30), 0.819e12, 197e12, 50e9, 16e9, "16", 3.125e9, 1.5e9
    ),
    "v5p": Chip(
        "TPU v5", int(95.74 * 2**30), 2.765e12, 459e12, 100e9, 16e9, "cubes", 6.25e9, 1.75e9
    ),
    "v6e": Chip(
        "TPU v6 lite", int(31.25 * 2**30), 1.638e12, 918e12, 100e9, 32e9, "16", 12.5e9, 1.75e9
    ),
    # jax sees each of the two chiplets as a device: half of the chip's figures. Their link to each
    # other counts like one to a neighboring chip.
    "tpu7x": Chip("TPU7x", int(94.75 * 2**30), 3.69e12, 1153.5e12, 50e9, 16e9, "cubes", 6.25e9),
}
"""Name in a topology -> chip."""

GPUS: Mapping[str, Chip] = {
    name: Chip(name, 0, memory_rate, peak, link_rate, host_rate, "none", 50e9)
    for name, memory_rate, peak, link_rate, host_rate in (
        ("Tesla T4", 0.32e12, 8.1e12, 16e9, 16e9),
        ("NVIDIA GeForce RTX 4090", 1.008e12, 165.2e12, 32e9, 32e9),
        ("NVIDIA A100-SXM4-40GB", 1.555e12, 312e12, 300e9, 32e9),
        ("NVIDIA A100-SXM4-80GB", 2.039e12, 312e12, 300e9, 32e9),
        ("NVIDIA H100 80GB HBM3", 3.35e12, 989e12, 450e9, 64e9),
        ("NVIDIA H200", 4.8e12, 989e12, 450e9, 64e9),
        ("NVIDIA B200", 8e12, 2250e12, 900e9, 64e9),
    )
}
"""`device_kind` in jax -> GPU, from NVIDIA's data sheets: products without sparsity, NVLink one
way (PCI Express for T4 and 4090), and a switch between the GPUs of a host. A T4 has no bfloat16:
its peak is that of float32. The device says how much memory a program may use."""


class Torus(NamedTuple):
    """The chips on which the partitions of a program run."""

    coordinates: Coordinates
    chip: Chip

    @property
    def sizes(self) -> tuple[int, ...]:
        """Chips along each dimension."""
        return tuple(max(values) + 1 for values in zip(*self.coordinates, strict=True))

    def is_ring(self, dimension: int, size: int) -> bool:
        """Return True if `size` chips in a line along a dimension close to a ring."""
        if self.chip.wraps == "none":
            return False
        spans_dimension = size == self.sizes[dimension]
        if self.chip.wraps == "16":
            return spans_dimension and size == 16
        # A fourth dimension counts the devices of a chip.
        return spans_dimension and dimension < 3 and all(n % 4 == 0 for n in self.sizes[:3])


class Estimate(NamedTuple):
    """A program's time on one device: a lower bound, and what the compiler expects."""

    flops: float
    bytes: float
    """Read from and written to HBM."""
    link_bytes: float
    """Sent to other chips."""
    compute_seconds: float
    """All matrix products at the chip's peak."""
    memory_seconds: float
    """All bytes at the memory's rate."""
    link_seconds: float
    """All collectives, one after the other."""
    exposed_seconds: float
    """The part of the collectives that no computation hides."""
    seconds: float
    """The sum of exposed collectives and of all operations, each as long as its products or its
    bytes take, whichever is longer."""
    uncounted: tuple[str, ...]
    """Kernels that do not state their FLOPs."""
    expected_seconds: float | None = None
    """The cycles that the compiler estimates for each operation, and exposed collectives. None if
    the compiler or the chip's clock says nothing."""


def estimate(operations: Sequence[Operation], torus: Torus) -> Estimate:
    """Return the least time of a program's operations, at peak rates, and the expected time.

    Operations without an estimate of the compiler (kernels, scatters) are expected to take the
    least time. No scope is expected to take less than its bytes need.
    """
    chip = torus.chip
    busy: dict[str, float] = {}  # Scope -> seconds of computation in it.
    expected: dict[str, float] = {}
    moving: dict[str, float] = {}  # Scope -> seconds of its bytes alone.
    overlapping: dict[str, dict[tuple[int, ...], float]] = {}  # Scope -> group -> seconds.
    waiting_seconds = 0.0
    all_link_seconds = 0.0
    link_bytes = 0.0
    memory_bytes = 0.0
    for operation in operations:
        link = operation.link
        if link is not None:
            seconds = operation.times * link_seconds(link, torus)
            all_link_seconds += seconds
            link_bytes += operation.times * sent_bytes(link)
            if link.overlaps:
                # Permutations go both ways around a ring at once. Other collectives use all links
                # of their group.
                group = link.group if link.kind == "collective-permute" else ()
                by_group = overlapping.setdefault(operation.scope, {})
                by_group[group] = by_group.get(group, 0.0) + seconds
            else:
                waiting_seconds += seconds
        memory_bytes += operation.times * operation.bytes
        memory_seconds = operation.bytes / chip.memory_rate
        least = max(operation.flops / chip.peak, memory_seconds)
        likely = least
        if operation.cycles is not None and chip.clock:
            likely = operation.cycles / chip.clock
        for sums, seconds in ((busy, least), (expected, likely), (moving, memory_seconds)):
            sums[operation.scope] = sums.get(operation.scope, 0.0) + operation.times * seconds
    expected = {scope: max(seconds, moving[scope]) for scope, seconds in expected.items()}
    exposed_seconds = waiting_seconds + _exposed(overlapping, busy)
    expected_seconds = None
    if chip.clock and any(operation.cycles for operation in operations):
        exposed = waiting_seconds + _exposed(overlapping, expected)
        expected_seconds = sum(expected.values()) + exposed
    flops = total_flops(operations)
    return Estimate(
        flops=flops,
        bytes=memory_bytes,
        link_bytes=link_bytes,
        compute_seconds=flops / chip.peak,
        memory_seconds=memory_bytes / chip.memory_rate,
        link_seconds=all_link_seconds,
        exposed_seconds=exposed_seconds,
        seconds=sum(busy.values()) + exposed_seconds,
        uncounted=tuple(sorted({op.name for op in operations if op.uncounted})),
        expected_seconds=expected_seconds,
    )


def _exposed(
    overlapping: Mapping[str, Mapping[tuple[int, ...], float]], busy: Mapping[str, float]
) -> float:
    """Return the seconds of overlapping collectives that the computation of a scope cannot hide."""
    total = 0.0
    for scope, by_group in overlapping.items():
        # Permutations in different directions run at the same time.
        permuting = max((by_group[group] for group in by_group if group), default=0.0)
        total += max(by_group.get((), 0.0) + permuting - busy.get(scope, 0.0), 0.0)
    return total


def sent_bytes(link: Link) -> float:
    """Return the bytes that a device must at least send, or receive."""
    others = len(link.group) - 1
    share = others / len(link.group)
    factors = {"all-gather": others, "all-reduce": 2 * share, "collective-permute": 1.0}
    return link.bytes * factors.get(link.kind, share)


def link_seconds(link: Link, torus: Torus) -> float:
    """Return the time of a collective: bytes over the links of a chip in its group, plus latency.

    A group that fills a box of the torus uses one link per dimension, or two where the dimension is
    a ring. Any other group uses one link, and so does a permutation. Between slices, every chip
    has its share of the data-center network. The bytes of an all-to-all travel over the links of
    all chips between, except where there is a switch.
    """
    if link.slices > 1:
        return sent_bytes(link) / torus.chip.network_rate + NETWORK_SECONDS
    rate = torus.chip.link_rate
    chips = [torus.coordinates[partition] for partition in link.group]
    sizes = [len(set(values)) for values in zip(*chips, strict=True)]
    spanned = [
        (size, torus.is_ring(dimension, size)) for dimension, size in enumerate(sizes) if size > 1
    ]
    if link.kind == "collective-permute" or math.prod(sizes) != len(chips):
        hops = 1 if link.kind == "collective-permute" else len(chips) - 1
        return sent_bytes(link) / rate + hops * HOP_SECONDS
    hops = sum(size // 2 if ring else size - 1 for size, ring in spanned)
    if link.kind in ("all-to-all", "ragged-all-to-all"):
        if torus.chip.wraps == "none":
            return sent_bytes(link) / rate + HOP_SECONDS
        # Half of the bytes of half of the chips cross the middle of the longest dimension.
        longest = max(size / (2 if ring else 1) for size, ring in spanned)
        return link.bytes * longest / (4 * rate) + hops * HOP_SECONDS
    passes = 2 if link.kind == "all-reduce" else 1
    links = sum(2 if ring else 1 for _, ring in spanned)
    return sent_bytes(link) / (links * rate) + passes * hops * HOP_SECONDS
