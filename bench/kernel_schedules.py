"""Cycles of the flash attention kernels, by the schedule that the TPU's compiler writes out.

    export JAX_PLATFORMS=cpu
    python bench/kernel_schedules.py v5e:2x2 128 2048

The numbers are the size of a head and the tokens of a row.

Compiles each kernel for the chip (`pip install -e ".[plan]"`; no TPU runs it), reads libtpu's final
bundles, and counts those of a grid step by the kind of its block of scores: skipped, masked, or
full, where every query sees every key. A bundle is issued in one cycle, so bundles are cycles
without stalls. A block counts at least as many cycles as its products take at the chip's peak: the
compiler lets some matrix units take in rows faster than they can multiply them. The cycles times
the visits of three row layouts are the time of a layer and row. The lines with tabs are those of
`flash_cycles.tsv`, from which the planner expects times.

Left out: stalls, in which a bundle waits for a result or for a copy from main memory; conflicts in
vector memory; the start of a kernel. Copies overlap with the bundles; their bytes over the
bandwidth are printed beside, as if every block had a mask. The products of a visited block count
as a whole, also scores that the mask hides.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tpu_rl.commands.plan.plan import ENVIRONMENT, find_target
from tpu_rl.cost_model import CHIPS, topologies
from tpu_rl.models.attention import flash_kernels
from tpu_rl.models.attention.flash_cycles import SCORES, Cycles, Visits
from tpu_rl.models.attention.flash_kernels import FlashConfig
from tpu_rl.models.layers import TokenIndex
from tpu_rl.train import sharding

CORES = {"v4": 2, "v5p": 2}
"""TensorCores of a chip that run one program together. 1 if not listed."""

UNITS = ("MXU", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "VSTORE")
"""Kinds of slots of a bundle, in the compiler's file of utilization."""

DELAY = 4
"""Bundles after a branch that run whether it is taken or not."""


class Section(NamedTuple):
    """Bundles that a grid step runs or skips as a whole, [start, stop)."""

    start: int
    stop: int
    matmuls: int
    """Instructions that multiply in the matrix units."""
    compares: int
    """Instructions that compare vectors of integers: a mask has them."""

    @property
    def bundles(self) -> int:
        return self.stop - self.start


class Schedule(NamedTuple):
    """A kernel's grid step."""

    step: int
    """Bundles of every step, skipped or not: addresses, tests, starts of copies."""
    edges: int
    """Bundles that only the first or the last step of a row of blocks has."""
    masked: Section
    full: Section | None
    """The fast path of blocks without a mask. None: the kernel has none."""
    use: dict[str, dict[str, float]]
    """Kind of block -> unit -> share of its slots that are taken."""


def read_schedule(text: str, utilization: str) -> Schedule:
    """Read the final bundles of a kernel whose only loop is that over its grid.

    Raises:
        ValueError: if there is another loop, or no section multiplies.
    """
    bundles: dict[int, str] = {}
    address = 0
    for line in text.splitlines():
        start = re.match(r"\s*(0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:[\s>]*\{?", line)
        if start:
            address = int(start[1], 16)
            bundles[address] = line
        elif bundles:
            bundles[address] += line  # Comments may go on in the next line.
    regions: dict[str, int] = {}
    for address, line in bundles.items():
        for name in re.findall(r"Start(?:/End empty)? region (\d+)", line):
            regions[name] = address
    branches = [
        (address, regions[name])
        for address, line in bundles.items()
        for name in re.findall(r"sbr\.rel .*?target = \$region(\d+)", line)
    ]
    loops = [(target, address) for address, target in branches if target <= address]
    if len(loops) != 1:
        raise ValueError(f"the kernel has {len(loops)} loops, and not only that over its grid")
    (loop_start, loop_stop), *_ = loops
    sections = []
    for address, target in branches:
        if not loop_start <= address < target <= loop_stop:
            continue
        start = address + 1 + DELAY
        body = [line for place, line in bundles.items() if start <= place < target]
        matmuls = sum(len(re.findall(r"= vmatmul|\bvmatmul[\w.]*mxu", line)) for line in body)
        compares = sum(len(re.findall(r"vcmp\.\w+\.[su]32", line)) for line in body)
        sections.append(Section(start, target, matmuls, compares))
    inner = [
        section
        for section in sections
        if not any(
            other is not section and section.start <= other.start and other.stop <= section.stop
            for other in sections
        )
    ]
    products = sorted((s for s in inner if s.matmuls), key=lambda section: -section.compares)
    if not 1 <= len(products) <= 2:
        raise ValueError(f"{len(products)} sections of the kernel multiply")
    edges = sum(section.bundles for section in inner if not section.matmuls)
    total = loop_stop + 1 + DELAY - loop_start
    masked, full = products[0], products[1] if products[1:] else None
    kinds = {"masked": masked} | ({"full": full} if full else {})
    return Schedule(
        step=total - sum(section.bundles for section in inner),
        edges=edges,
        masked=masked,
        full=full,
        use={kind: _use(section, utilization) for kind, section in kinds.items()},
    )


def _use(section: Section, utilization: str) -> dict[str, float]:
    """Return the share of each unit's slots that a section's bundles take."""
    lines = utilization.splitlines()
    names = [name.strip() for name in lines[1].split(",")]
    capacity = dict(zip(names, map(int, lines[2].split()), strict=True))
    rows = np.array([line.split() for line in lines[4:] if line.strip()], int)
    taken = dict(zip(names, rows[section.start : section.stop].sum(0), strict=True))
    return {name: taken[name] / capacity[name] / section.bundles for name in UNITS}


# Layouts of rows.


def plain_row(tokens: int) -> list[np.ndarray]:
    """One text."""
    return _row(tokens, [(0, tokens, tokens, 0, 1)])


def packed_row(tokens: int) -> list[np.ndarray]:
    """Texts of 1/2, 1/4, 1/8 and 1/8 of the row."""
    ends = [0, tokens // 2, tokens * 3 // 4, tokens * 7 // 8, tokens]
    texts = zip(ends, ends[1:], strict=False)
    return _row(tokens, [(start, end, end, 0, i + 1) for i, (start, end) in enumerate(texts)])


def shared_row(tokens: int) -> list[np.ndarray]:
    """A prompt of a quarter of the row, and its 8 completions."""
    prompt, length = tokens // 4, tokens * 3 // 32
    starts = [prompt + branch * length for branch in range(8)]
    completions = [(start, start + length, start + length, prompt, 1) for start in starts]
    return _row(tokens, [(0, prompt, tokens, 0, 1), *completions])


def _row(tokens: int, nodes: Sequence[tuple[int, int, int, int, int]]) -> list[np.ndarray]:
    """Return the fields of `TokenIndex`, [1, tokens].

    Nodes are (start, stop, end of the subtree, first position, segment).
    """
    index = np.arange(tokens)
    positions, segments, until = (np.zeros(tokens, int) for _ in range(3))
    for start, stop, end, position, segment in nodes:
        positions[start:stop] = position + index[start:stop] - start
        segments[start:stop] = segment
        until[start:stop] = end
    fields = {"index": index, "positions": positions, "segment_ids": segments}
    fields["visible_until"] = until
    return [fields[name][None] for name in TokenIndex._fields]


LAYOUTS = {
    "one text": plain_row,
    "4 texts": packed_row,
    "a prompt, 8 completions": shared_row,
}


# Kernels.


class Kernel(NamedTuple):
    """A kernel of `flash_kernels`."""

    name: str
    """Its name in the compiler's files."""
    products: int
    """Matrix products per block of scores: two in the forward pass."""
    call: Any
    """(config, *operands), where the forward pass has the first three and the indices."""
    grid: Any
    """(query, key) -> its blocks."""
    over_queries: bool
    """Whether a block of keys steps over blocks of queries."""


KERNELS = (
    Kernel(
        "flash_attention_forward", 2, flash_kernels.attention, flash_kernels.forward_grid, False
    ),
    Kernel(
        "flash_attention_query_gradient",
        3,
        flash_kernels.query_gradient,
        flash_kernels.backward_grid,
        False,
    ),
    Kernel(
        "flash_attention_key_value_gradient",
        4,
        flash_kernels.key_value_gradients,
        flash_kernels.backward_grid,
        True,
    ),
    Kernel(
        "flash_attention_gradients",
        5,
        flash_kernels.fused_gradients,
        flash_kernels.backward_grid,
        True,
    ),
)

PASSES = {
    "forward": ("flash_attention_forward",),
    "backward": ("flash_attention_gradients",),
    "backward in two kernels": (
        "flash_attention_query_gradient",
        "flash_attention_key_value_gradient",
    ),
}


def compile_kernel(
    kernel: Kernel, config: FlashConfig, operands: Sequence[Any], dump: Path
) -> Schedule:
    """Compile a kernel for the devices of jax's mesh and read its schedule."""
    query, key, index = operands
    arrays = [query, key, key]
    if kernel.products > 2:
        row = jax.ShapeDtypeStruct((*query.shape[:2], 1, query.shape[2]), jnp.float32)
        arrays += [query, row, row]
    jax.jit(functools.partial(kernel.call, config)).lower(*arrays, index, index).compile()
    (final,) = dump.glob(f"*{kernel.name}*[0-9]-final_bundles.txt")
    (utilization,) = dump.glob(f"*{kernel.name}*final_hlo-static-per-bundle-utilization.txt")
    schedule = read_schedule(final.read_text(), utilization.read_text())
    for path in dump.iterdir():
        path.unlink()
    return schedule


def count_visits(
    kernel: Kernel, config: FlashConfig, grid: flash_kernels.Grid, row: Sequence[np.ndarray]
) -> Visits:
    """Count a row's steps as the kernel decides them."""
    index = TokenIndex(*(jnp.asarray(field, jnp.int32) for field in row))
    grid = grid._replace(rows=1)
    kinds = flash_kernels.block_kinds(config, grid, index, index)
    visible, full = (np.asarray(kind) for kind in kinds)
    heads = grid.num_heads
    edges = heads * grid.num_query_blocks
    if kernel.name == "flash_attention_gradients":
        # Its first and last steps for queries, which are more than those for keys.
        edges = max(edges, grid.num_kv_heads * grid.num_key_blocks)
    elif kernel.over_queries:
        edges = grid.num_kv_heads * grid.num_key_blocks
    return Visits(heads * visible.size, int(heads * visible.sum()), int(heads * full.sum()), edges)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topology", help="of one or more chips, such as v5e:2x2")
    parser.add_argument("head_dim", type=int, help="size of a head")
    parser.add_argument("tokens", type=int, help="tokens of a row")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--sliding-window", type=int)
    parser.add_argument("--softcap", type=float)
    flags = parser.parse_args()

    with dump_folder() as folder:
        jax.config.update("jax_enable_compilation_cache", False)
        os.environ.update(ENVIRONMENT)
        target = find_target(flags.topology)
        report(flags, target.devices, Path(folder))


def dump_folder() -> Any:
    """Return a context with a folder for the compiler's files. libtpu reads its name once."""
    folder = tempfile.TemporaryDirectory()
    options = os.environ.get("LIBTPU_INIT_ARGS", "")
    options += f" --xla_jf_dump_to={folder.name} --xla_jf_dump_llo_text=true"
    os.environ["LIBTPU_INIT_ARGS"] = options.strip()
    return folder


def report(flags: argparse.Namespace, devices: Sequence[Any], dump: Path) -> None:
    """Compile the kernels for one of the devices and print their schedules."""
    name = topologies.parse(flags.topology).chip
    chip, cores = CHIPS[name], CORES.get(name, 1)
    rate = chip.peak / 2 / chip.clock / cores  # Multiplications of a core in a cycle.
    head_dim = flags.head_dim
    config = FlashConfig(head_dim**-0.5, flags.sliding_window, flags.softcap)
    # More rows, so that the compiler has no room for whole operands in vector memory.
    rows = max(2, 2**16 // flags.tokens)
    shape = (rows, flags.heads, flags.tokens, head_dim)
    query = jax.ShapeDtypeStruct(shape, flags.dtype)
    key = jax.ShapeDtypeStruct((rows, flags.kv_heads, *shape[2:]), flags.dtype)
    index = TokenIndex(*[jax.ShapeDtypeStruct((rows, flags.tokens), jnp.int32)] * 4)
    print(
        f"{name}, heads of {head_dim}, {flags.dtype}, {flags.tokens} tokens, {flags.heads} heads "
        f"on {flags.kv_heads}; cycles of a core per block of scores"
    )
    measured = {}
    for kernel in KERNELS:
        with jax.set_mesh(sharding.make_mesh(devices=devices[:1])):
            grid = kernel.grid(query, key)
            schedule = compile_kernel(kernel, config, (query, key, index), dump)
        block_scores = grid.query_block * grid.key_block
        needed = kernel.products * block_scores * head_dim / rate
        cycles = block_cycles(schedule, needed, block_scores)
        measured[kernel] = (grid, cycles, needed)
        print(name, head_dim, kernel.name, *cycles, sep="\t")
        for kind, section in (("masked", schedule.masked), ("full", schedule.full)):
            if section is None:
                continue
            total = schedule.step + max(section.bundles, needed)
            use = ", ".join(
                f"{unit} {100 * share:.0f}" for unit, share in schedule.use[kind].items()
            )
            print(
                f"  {kernel.name.removeprefix('flash_attention_'):<19} "
                f"{grid.query_block} x {grid.key_block} {kind}: {total:.0f}, of them every step "
                f"{schedule.step}, the block {section.bundles} bundles, its products {needed:.0f} "
                f"({100 * needed / total:.0f} %); first and last steps {schedule.edges}; "
                f"slots in %: {use}"
            )
    for layout, make_row in LAYOUTS.items():
        row = make_row(flags.tokens)
        for title, names in PASSES.items():
            total, peak, moved = 0.0, 0.0, 0.0
            blocks = []
            for kernel, (grid, cycles, needed) in measured.items():
                if kernel.name not in names:
                    continue
                visits = count_visits(kernel, config, grid, row)
                total += cycles.total(visits, grid.query_block * grid.key_block)
                peak += visits.visible * needed
                moved += row_bytes(kernel, grid, visits, jnp.dtype(flags.dtype).itemsize)
                visible, full, steps = (
                    count // grid.num_heads for count in (visits.visible, visits.full, visits.steps)
                )
                blocks.append(f"{visible} of {steps} visible, {full} full")
            print(
                f"  {layout}, {title}: {total / 1e6:.3f} million cycles a row "
                f"({1e3 * total / chip.clock / cores:.3f} ms of a chip), "
                f"{100 * peak / total:.0f} % of the peak; blocks: {'; '.join(blocks)}; "
                f"copies {moved / 1e9:.3f} GB ({1e3 * moved / chip.memory_rate:.3f} ms)"
            )


def block_cycles(schedule: Schedule, needed: float, block_scores: int) -> Cycles:
    """Return the cycles of a grid step. `needed` are those of a block's products at the peak."""
    sections = (schedule.masked, schedule.full or schedule.masked)
    blocks = [max(section.bundles, needed) * SCORES / block_scores for section in sections]
    return Cycles(schedule.step, schedule.edges, *map(round, blocks))


def row_bytes(kernel: Kernel, grid: flash_kernels.Grid, visits: Visits, itemsize: int) -> float:
    """Return the bytes that the steps of a row copy from and to main memory.

    Arrays are padded to tiles of 8 x 128 numbers of four bytes: the four fields of a key's index
    become 128.
    """
    lanes = -(-grid.head_dim // 128) * 128
    query = grid.query_block * lanes * itemsize
    key = grid.key_block * lanes * itemsize
    # The index, and the log-sum-exp; with the second array of a block of queries or keys.
    queries = query + 4 * grid.query_block * (8 + 1)
    keys = 2 * key + 4 * grid.key_block * 128
    if kernel.products > 2:
        queries += query + 4 * grid.query_block
    if kernel.over_queries:
        return visits.visible * queries + visits.edges * (keys + 2 * key)
    return visits.visible * keys + visits.edges * (queries + query)


if __name__ == "__main__":
    main()
