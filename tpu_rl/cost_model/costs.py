"""FLOPs, bytes of main memory and bytes over links of every operation of a compiled program.

XLA's own `cost_analysis` counts the body of a loop once, kernels not at all, and links hardly. Here
a loop body counts as often as it runs, kernels count by their own estimates, and collectives by
their replica groups. Only matrix products count as FLOPs: the peak of a chip is stated for them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tpu_rl.cost_model import hlo
from tpu_rl.cost_model.hlo import Computation, Instruction, Program, Shape

FREE = frozenset(
    (
        "parameter",
        "constant",
        "get-tuple-element",
        "tuple",
        "bitcast",
        "after-all",
        "partition-id",
        "replica-id",
        "opt-barrier",
        "domain",
        "add-dependency",
    )
)
"""Opcodes that move nothing."""

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
)

SLICES = ("dynamic-slice", "slice", "gather")
"""Opcodes that read as many bytes of their first operand as they return."""

UPDATES = ("dynamic-update-slice", "scatter")
"""Opcodes that write into their first operand, in place."""

INDEXING = "ragged-dot-metadata"
"""Suffix of the names of kernels that compute only which rows other kernels multiply."""


FULL_ATTENTION = "decode_attention"
"""Name of the kernel that reads, of one layer of a cache, the rows' own tokens. The bytes that it
states are those of full caches."""

READS_PARTS = (FULL_ATTENTION, "decode_attention_window", "decode_experts")
"""Names of kernels that read parts of their operands only, and state their bytes."""


class Link(NamedTuple):
    """A collective, as one device sees it."""

    kind: str
    bytes: int
    """Size of its operands."""
    group: tuple[int, ...]
    """Partition numbers of one replica group. All groups are alike."""
    overlaps: bool
    """It may run during computation that does not wait for it."""
    slices: int = 1
    """Above 1, it goes over the data-center network, between as many slices of chips. Its group
    then counts slices."""


class Operation(NamedTuple):
    """An operation that a device executes `times` times."""

    times: int
    flops: float
    bytes: float
    """Read from and written to main memory."""
    link: Link | None
    scope: str
    """The computation that contains it. The operations of one scope run one after the other."""
    name: str
    """The traced operation that it comes from."""
    uncounted: bool = False
    """A kernel that does not state its FLOPs."""
    cycles: float | None = None
    """The compiler's own estimate; None without one. 0 for copies beside computation, which take
    nothing but their bytes."""


def operations(program: Program, unknown_trips: int = 1) -> list[Operation]:
    """Return all operations of the program on one device, those in loops with their trip counts.

    A loop whose trip count is not in the text runs `unknown_trips` times.
    """
    return list(_operations(program, program.entry, 1, unknown_trips))


def with_cache_fill(operations: Iterable[Operation], fill: float) -> list[Operation]:
    """Return the operations of decode steps whose caches are filled to this share.

    Only the decode kernel reads less of them then. A layer with a window reads as much as before.
    """

    def filled(operation: Operation) -> Operation:
        if FULL_ATTENTION not in operation.name.split("/"):
            return operation
        return operation._replace(flops=fill * operation.flops, bytes=fill * operation.bytes)

    return [filled(operation) for operation in operations]


def total_flops(operations: Iterable[Operation]) -> float:
    """Return the FLOPs of operations on one device."""
    return sum((operation.times * operation.flops for operation in operations), 0.0)


def _operations(
    program: Program, computation: Computation, times: int, unknown_trips: int
) -> Iterator[Operation]:
    def inside(name: str, times: int) -> Iterator[Operation]:
        return _operations(program, program.computations[name], times, unknown_trips)

    channels: set[str] = set()
    for instruction in computation.instructions.values():
        opcode = instruction.opcode
        if opcode == "while":
            trips = hlo.trip_count(program, computation, instruction)
            trips = unknown_trips if trips is None else trips
            yield from inside(instruction.attribute("body") or "", times * trips)
            # The condition may contain a collective: it asks whether any row is still live.
            yield from inside(instruction.attribute("condition") or "", times * (trips + 1))
        elif opcode == "conditional":
            branches = [list(inside(name, times)) for name in instruction.branches]
            yield from max(branches, key=_size, default=[])
        elif opcode in ("call", "async-start"):
            for name in instruction.calls:
                yield from inside(name, times)
        elif opcode not in FREE and not opcode.endswith(("-done", "-update")):
            name = instruction.op_name or instruction.name
            for link in _links(program, computation, instruction, channels):
                if len(link.group) > 1:
                    yield Operation(times, 0, 0, link, computation.name, name)
            flops = _flops(program, computation, instruction)
            moved = _moved_bytes(program, computation, instruction)
            uncounted = (
                opcode == "custom-call"
                and flops == 0
                and _is_kernel(instruction)
                and not name.endswith(INDEXING)
            )
            cycles = 0.0 if opcode.endswith("-start") else hlo.estimated_cycles(instruction)
            if flops or moved or uncounted or cycles:
                yield Operation(
                    times, flops, moved, None, computation.name, name, uncounted, cycles
                )


def _size(branch: Sequence[Operation]) -> float:
    """Return a rough cost, by which the most expensive branch of a conditional is chosen."""
    return sum(operation.times * (operation.flops + operation.bytes) for operation in branch)


# --- FLOPs ---


def _flops(program: Program, computation: Computation, instruction: Instruction) -> float:
    """Return the FLOPs of an instruction, with those of the computations that it fuses."""
    if instruction.opcode == "dot":
        contracted = _integers(instruction.attribute("lhs_contracting_dims"))
        return _dot_flops(computation, instruction, contracted)
    if instruction.opcode == "convolution":
        return _convolution_flops(computation, instruction)
    if instruction.opcode == "custom-call":
        return _custom_call_flops(computation, instruction)
    if instruction.opcode != "fusion":
        return 0
    fused = (program.computations[name] for name in instruction.calls)
    return sum(
        _flops(program, inner, inner_instruction)
        for inner in fused
        for inner_instruction in inner.instructions.values()
    )


def _integers(text: str | None) -> list[int]:
    return [int(number) for number in re.findall(r"-?\d+", text or "")]


def _dot_flops(
    computation: Computation, instruction: Instruction, contracted: Sequence[int]
) -> float:
    """Return the FLOPs of a matrix product over these dimensions of its left operand."""
    left = computation.shapes_of(instruction.operands[0])[0]
    return 2.0 * instruction.shapes[0].elements * math.prod(left.dims[i] for i in contracted)


def _custom_call_flops(computation: Computation, instruction: Instruction) -> float:
    """Return a kernel's own estimate (Pallas: `pl.CostEstimate`), or those of a library call."""
    stated = _stated_cost(instruction, "flops")
    if stated is not None:
        return stated
    config = hlo.backend_json(instruction)
    dimensions = config.get("gemm_backend_config", config).get("dot_dimension_numbers")
    if not dimensions:
        return 0.0
    contracted = [int(i) for i in dimensions.get("lhs_contracting_dimensions", ())]
    return _dot_flops(computation, instruction, contracted)


def _stated_cost(instruction: Instruction, name: str) -> float | None:
    """Return the cost that a Pallas kernel states in its `pl.CostEstimate`, or None."""
    stated = re.search(
        rf'"cost_estimate"\s*:\s*\{{[^{{}}]*"{name}"\s*:\s*"?(\d+)', instruction.attributes
    )
    return float(stated[1]) if stated else None


def _is_kernel(instruction: Instruction) -> bool:
    return (
        'custom_call_target="tpu_custom_call"' in instruction.attributes
        or "__gpu$xla.gpu.triton" in instruction.attributes
    )


def _convolution_flops(computation: Computation, instruction: Instruction) -> float:
    """Return the FLOPs of a convolution, without products with padding.

    On a TPU, matrix products are convolutions, and batch dimensions are windows that are mostly
    padding. The count is that of XLA's HloCostAnalysis.
    """
    left, kernel = (computation.shapes_of(operand)[0] for operand in instruction.operands[:2])
    result = instruction.shapes[0]
    labels = instruction.attribute("dim_labels") or ""
    left_labels, kernel_labels, result_labels = re.split(r"_|->", labels)
    flops = (
        2.0
        * kernel.dims[kernel_labels.index("i")]
        * result.dims[result_labels.index("f")]
        * result.dims[result_labels.index("b")]
    )
    flops /= (_integers(instruction.attribute("batch_group_count")) or [1])[0]
    for i, window in enumerate(_window(instruction)):
        flops *= _valid_positions(
            left.dims[left_labels.index(str(i))],
            kernel.dims[kernel_labels.index(str(i))],
            result.dims[result_labels.index(str(i))],
            window,
        )
    return flops


class _Window(NamedTuple):
    """One dimension of a convolution's window."""

    stride: int = 1
    low_padding: int = 0
    base_dilation: int = 1
    window_dilation: int = 1


def _window(instruction: Instruction) -> list[_Window]:
    """Parse window={size=2x1 stride=2x1 pad=0_0x1_1 ...}, one entry per spatial dimension."""
    text = instruction.attribute("window")
    if text is None:
        return []
    fields = {key: value.split("x") for key, value in re.findall(r"(\w+)=([\d_x\-]+)", text)}
    dimensions = len(fields["size"])

    def values(key: str, default: int) -> list[int]:
        texts = fields.get(key, [str(default)] * dimensions)
        return [int(value.partition("_")[0]) for value in texts]

    columns = (
        values("stride", 1),
        values("pad", 0),
        values("lhs_dilate", 1),
        values("rhs_dilate", 1),
    )
    return [_Window(*row) for row in zip(*columns, strict=True)]


def _valid_positions(size: int, kernel: int, outputs: int, window: _Window) -> int:
    """Count the pairs of an output and a kernel element that read an input element.

    `size`, `kernel` and `outputs` are the lengths of input, kernel and result in one dimension.
    """
    is_plain = window.stride == 1 and window.low_padding == 0 and window.base_dilation == 1
    if kernel == 1 and is_plain:
        return outputs
    dilated = (size - 1) * window.base_dilation + 1 if size else 0
    count = 0
    for kernel_index in range(kernel):
        first = kernel_index * window.window_dilation - window.low_padding
        if window.base_dilation == 1:
            # Outputs o with 0 <= first + o * stride < size.
            begin = max(0, -(first // window.stride))
            end = min(outputs, -((first - dilated) // window.stride))
            count += max(end - begin, 0)
        else:
            places = (first + output * window.stride for output in range(outputs))
            count += sum(
                0 <= place < dilated and place % window.base_dilation == 0 for place in places
            )
    return count


# --- bytes of main memory ---


def _main_memory_bytes(shapes: Sequence[Shape]) -> int:
    return sum(shape.bytes for shape in shapes if shape.space == 0)


def _part_bytes(part: Sequence[Shape], whole: Sequence[Shape]) -> float:
    """Return the bytes of a part of an array, with its share of the array's padding.

    The padding of the part's own layout does not count: one row does not fill a tile of eight.
    """
    logical = sum(shape.logical_bytes for shape in whole)
    padding = sum(shape.bytes for shape in whole) / logical if logical else 1.0
    return padding * sum(shape.logical_bytes for shape in part)


def _moved_bytes(program: Program, computation: Computation, instruction: Instruction) -> float:
    """Return the bytes that an instruction reads from and writes to main memory."""
    opcode = instruction.opcode
    if opcode == "fusion":
        return _fusion_bytes(program, computation, instruction)
    if opcode.removesuffix("-start") in COLLECTIVES:
        return 0
    if opcode in ("send", "recv"):
        arrays = instruction.shapes[:1]  # Not the context handle.
        return _main_memory_bytes(arrays)
    operands = [computation.shapes_of(operand) for operand in instruction.operands]
    if opcode.endswith("-start"):
        return _asynchronous_bytes(instruction, operands)
    written = _main_memory_bytes(instruction.shapes)
    if opcode in SLICES:
        read = _part_bytes(instruction.shapes, operands[0])
        return written + (read if _main_memory_bytes(operands[0]) else 0)
    if opcode in UPDATES:
        update = computation.shapes_of(_update_operand(instruction))
        changed = _part_bytes(update, instruction.shapes)
        return _main_memory_bytes(update) + (changed if written else 0)
    if opcode == "custom-call" and _reads_parts(instruction):
        stated = _stated_cost(instruction, "bytes_accessed")
        assert stated is not None, "the kernel states its bytes"
        return stated
    return written + sum(map(_main_memory_bytes, operands))


def _reads_parts(instruction: Instruction) -> bool:
    """Return True for kernels of READS_PARTS. Before 0.9, jax writes files and no names."""
    names = instruction.op_name.split("/")
    is_unnamed = names[-1] == "pallas_call" and "/decode_kernel.py" in instruction.attributes
    return is_unnamed or bool(set(READS_PARTS) & set(names))


def _update_operand(instruction: Instruction) -> str:
    """Return the operand that an instruction of UPDATES writes into its first operand."""
    return instruction.operands[1 if instruction.opcode == "dynamic-update-slice" else -1]


def _asynchronous_bytes(instruction: Instruction, operands: Sequence[Sequence[Shape]]) -> int:
    """Return the bytes of a `copy-start` or `slice-start`: its result is read and written once.

    What leaves or enters another memory space is only read from or written to main memory.
    """
    arrays = [shape for shape in instruction.shapes if shape.bytes > 4]  # Not the context handle.
    size = min((shape.bytes for shape in arrays), default=0)
    if not operands:
        return 0
    spaces = {shape.space for shape in arrays if shape.bytes == size}
    spaces |= {shape.space for shape in operands[0]}
    if _main_memory_bytes(operands[0]) > 0:
        return size * (1 if len(spaces) > 1 else 2)
    return size if 0 in spaces else 0


def _fusion_bytes(program: Program, computation: Computation, fusion: Instruction) -> float:
    """Return the bytes that a fusion moves.

    Operands that it only slices count for their slices, and arrays that it updates in place for
    their updates.
    """
    inner = program.computations[fusion.calls[0]]
    total = 0.0
    for number, operand in enumerate(fusion.operands):
        size = _main_memory_bytes(computation.shapes_of(operand))
        parameter = inner.parameter(number)
        if parameter is not None and size:
            total += min(_read_bytes(program, inner, parameter.name), size)
    return total + _written_bytes(program, inner, inner.root, fusion.shapes)


def _read_bytes(program: Program, computation: Computation, name: str) -> float:
    """Return the bytes that a fused computation reads of the value `name`; inf for all of it."""
    total = 0.0
    for user in computation.instructions.values():
        for number, operand in enumerate(user.operands):
            if operand != name:
                continue
            if user.opcode in SLICES and number == 0:
                total += _part_bytes(user.shapes, computation.shapes_of(name))
            elif user.opcode == "bitcast":
                total += _read_bytes(program, computation, user.name)
            elif user.opcode == "fusion":
                inner = program.computations[user.calls[0]]
                parameter = inner.parameter(number)
                if parameter is None:
                    continue
                # With an alias, a copy only gives the memory another tiling, as of int8 weights.
                is_alias = "output_to_operand_aliasing" in user.attributes
                views = ("bitcast", "copy") if is_alias else ("bitcast",)
                if _viewed(inner, inner.root, views) is parameter:
                    # The nested fusion reads nothing. Who reads its result reads the parameter.
                    total += _read_bytes(program, computation, user.name)
                else:
                    total += _read_bytes(program, inner, parameter.name)
            elif user.opcode in UPDATES and number == 0:
                continue
            elif user.opcode not in ("tuple", "get-tuple-element"):
                return math.inf
    return total


def _viewed(
    computation: Computation, instruction: Instruction, views: Sequence[str]
) -> Instruction:
    """Return the instruction whose bytes this one returns, in whatever shape.

    `views` are opcodes that only give memory another shape.
    """
    while instruction.opcode in views and instruction.operands[0] in computation.instructions:
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


def _written_bytes(
    program: Program, computation: Computation, root: Instruction, shapes: Sequence[Shape]
) -> float:
    """Return the bytes that a fused computation writes for its root, a result of these shapes."""
    if root.opcode == "tuple" and len(root.operands) == len(shapes):
        return sum(
            _written_bytes(program, computation, computation.instructions[name], [shape])
            for name, shape in zip(root.operands, shapes, strict=True)
        )
    size = _main_memory_bytes(shapes)
    if not size:
        return 0
    while root.opcode in ("bitcast", "copy") and root.operands[0] in computation.instructions:
        root = computation.instructions[root.operands[0]]
    if root.opcode in UPDATES:
        update = computation.shapes_of(_update_operand(root))
        return min(_part_bytes(update, root.shapes), size)
    if root.opcode == "fusion":
        inner = program.computations[root.calls[0]]
        return min(_written_bytes(program, inner, inner.root, shapes), size)
    return size


# --- links ---


def _links(
    program: Program,
    computation: Computation,
    instruction: Instruction,
    channels: set[str],
    is_fused: bool = False,
) -> Iterator[Link]:
    """Return the collectives that an instruction is or fuses.

    In fusions a channel counts once, and joins `channels`: on a TPU one collective is cut into
    several fusions, which continue it beside their own computation. An instruction that is not
    fused counts in any case: jax gives one channel to all collectives that a `shard_map` names.
    """
    kind = instruction.opcode.removesuffix("-start")
    if kind in COLLECTIVES:
        channel = instruction.attribute("channel_id")
        if channel is not None:
            if is_fused and channel in channels:
                return
            channels.add(channel)
        size = sum(
            shape.logical_bytes
            for name in instruction.operands
            for shape in computation.shapes_of(name)
        )
        overlaps = (
            instruction.opcode.endswith("-start")
            or "async_collective_name" in instruction.attributes
            or "chain_id" in instruction.attributes
        )
        # XLA writes a reduce-scatter as an all-reduce in a computation that slices the result.
        is_scattered = kind == "all-reduce" and computation.root.opcode == "dynamic-slice"
        kind = "reduce-scatter" if is_scattered else kind
        yield Link(kind, size, group_of(instruction.attributes), overlaps)
    elif kind == "send" and (transfer := _TRANSFER.search(instruction.attributes)):
        # The compiler has done its part within the slices: what is sent is the share of a chip.
        slices = _count_of(transfer[1])
        size = computation.shapes_of(instruction.operands[0])[0].logical_bytes
        kind = transfer[2].lower().replace("_", "-").replace("one-to-one", "collective-permute")
        yield Link(kind, size, tuple(range(slices)), overlaps=True, slices=slices)
    elif instruction.opcode == "fusion":
        for name in instruction.calls:
            inner = program.computations[name]
            for inner_instruction in inner.instructions.values():
                yield from _links(program, inner, inner_instruction, channels, is_fused=True)


_TRANSFER = re.compile(
    r'_xla_megascale_target="\{([\d,:]+)\}[^"]*",_xla_megascale_transfer_type="(\w+)"'
)
"""The slices between which a host transfer sends, and the kind of its collective."""


def _count_of(numbers: str) -> int:
    """Count the numbers that "0,4" or "0:3" lists; the end of a range belongs to it."""
    ranges = [part.split(":") for part in numbers.split(",")]
    return sum(int(ends[-1]) - int(ends[0]) + 1 for ends in ranges)


def group_of(attributes: str) -> tuple[int, ...]:
    """Return the first of an instruction's replica groups, in any of the forms that XLA writes.

    For a permutation, return two partitions of which one sends to the other.
    """
    pair = re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", attributes)
    if pair:
        return int(pair[1]), int(pair[2])
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", attributes)
    if listed:
        return tuple(_integers(listed[1]))
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota:
        group_size = math.prod(_integers(iota[1])[1:])
        return tuple(_transposed_iota(_integers(iota[2]), _integers(iota[3]))[:group_size])
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\](?:[^{]*)\{([^}]*)\}", attributes)
    if mesh:
        axes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        group_axes = re.findall(r"'([^']+)'", mesh[2])
        ranges = [range(size) if name in group_axes else range(1) for name, size in axes.items()]
        strides = _strides(list(axes.values()))
        return tuple(_dot(place, strides) for place in itertools.product(*ranges))
    return ()


def _transposed_iota(sizes: Sequence[int], order: Sequence[int]) -> list[int]:
    """Return 0, 1, 2, ... in the shape `sizes`, transposed by `order`, flat."""
    strides = _strides(sizes)
    order = order or range(len(sizes))
    ranges = [range(sizes[axis]) for axis in order]
    transposed = [strides[axis] for axis in order]
    return [_dot(place, transposed) for place in itertools.product(*ranges)]


def _strides(sizes: Sequence[int]) -> list[int]:
    return [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]


def _dot(left: Sequence[int], right: Sequence[int]) -> int:
    return sum(a * b for a, b in zip(left, right, strict=True))
