"""Floating-point operations, bytes of main memory and bytes over links of every operation of a compiled program.

XLA's own `cost_analysis` counts the body of a loop once, kernels not at all and links hardly. Here a body counts as
often as it runs, kernels by their own estimate, and collectives by their replica groups. Only matrix products count
as floating-point operations: they are what a chip's peak is stated for.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tpu_rl.compiled import hlo
from tpu_rl.compiled.hlo import Computation, Instruction, Program, Shape

FREE = frozenset(
    ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id")
    + ("opt-barrier", "domain", "add-dependency")
)
"""Opcodes that move nothing."""

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")

SLICES = ("dynamic-slice", "slice", "gather")
"""Opcodes that read as much of their first operand as they give."""

UPDATES = ("dynamic-update-slice", "scatter")
"""Opcodes that write into their first operand, in place."""


INDEXING = "ragged-dot-metadata"
"""How the names of kernels end that only say which rows others multiply."""


class Link(NamedTuple):
    """A collective, on one device."""

    kind: str
    bytes: int
    """Of its operands."""
    group: tuple[int, ...]
    """One of the groups of devices that talk, as numbers of partitions: all groups are alike."""
    overlaps: bool
    """It may run beside the computation that it does not wait for."""


class Operation(NamedTuple):
    """Something that a device does `times` times."""

    times: int
    flops: float
    bytes: float
    """Read from and written to the main memory."""
    link: Link | None
    scope: str
    """The computation that it stands in: one at a time runs in each."""
    name: str
    """What it was traced from."""
    uncounted: bool = False
    """A kernel that says nothing of its floating-point operations."""


def operations(program: Program, unknown_trips: int = 1) -> list[Operation]:
    """All that the program does on one device, loop bodies times their trip counts.

    A loop whose trip count the text does not say runs `unknown_trips` times.
    """
    return list(_operations(program, program.entry, 1, unknown_trips))


def _operations(program: Program, computation: Computation, times: int, unknown: int) -> Iterator[Operation]:
    channels: set[str] = set()
    for one in computation.instructions.values():
        if one.opcode == "while":
            trips = hlo.trip_count(program, computation, one)
            body = program.computations[one.attribute("body") or ""]
            yield from _operations(program, body, times * (unknown if trips is None else trips), unknown)
        elif one.opcode == "conditional":
            ways = [list(_operations(program, program.computations[b], times, unknown)) for b in one.branches]
            yield from max(ways, key=lambda way: sum(op.times * (op.flops + op.bytes) for op in way), default=[])
        elif one.opcode in ("call", "async-start"):
            for name in one.calls:
                yield from _operations(program, program.computations[name], times, unknown)
        elif one.opcode not in FREE and not one.opcode.endswith(("-done", "-update")):
            name = one.op_name or one.name
            for link in _links(program, computation, one, channels):
                if len(link.group) > 1:
                    yield Operation(times, 0, 0, link, computation.name, name)
            flops, moved = _flops(program, computation, one), _moved(program, computation, one)
            silent = one.opcode == "custom-call" and flops == 0 and _is_kernel(one)
            uncounted = silent and not name.endswith(INDEXING)
            if flops or moved or uncounted:
                yield Operation(times, flops, moved, None, computation.name, name, uncounted)


# --- floating-point operations -----------------------------------------------------------------------------------


def _flops(program: Program, computation: Computation, one: Instruction) -> float:
    """Of one instruction, those of the computations that it fuses included."""
    if one.opcode == "dot":
        return _dot_flops(computation, one)
    if one.opcode == "convolution":
        return _convolution_flops(computation, one)
    if one.opcode == "custom-call":
        return _custom_flops(computation, one)
    if one.opcode != "fusion":
        return 0
    fused = (program.computations[name] for name in one.calls)
    return sum(_flops(program, inner, each) for inner in fused for each in inner.instructions.values())


def _numbers(text: str | None) -> list[int]:
    return [int(number) for number in re.findall(r"-?\d+", text or "")]


def _dot_flops(computation: Computation, one: Instruction) -> float:
    left = computation.shapes_of(one.operands[0])[0]
    contracted = _numbers(one.attribute("lhs_contracting_dims"))
    return 2.0 * one.shapes[0].elements * _product(left.dims[i] for i in contracted)


def _custom_flops(computation: Computation, one: Instruction) -> float:
    """A kernel's own estimate (Pallas: `pl.CostEstimate`), or a library's matrix product."""
    config = hlo.backend_json(one)
    noted = re.search(r'"cost_estimate"\s*:\s*\{[^{}]*"flops"\s*:\s*"?(\d+)', one.attributes)
    if noted:
        return float(noted[1])
    dimensions = config.get("gemm_backend_config", config).get("dot_dimension_numbers")
    if not dimensions:
        return 0.0
    left = computation.shapes_of(one.operands[0])[0]
    contracted = (int(i) for i in dimensions.get("lhs_contracting_dimensions", ()))
    return 2.0 * one.shapes[0].elements * _product(left.dims[i] for i in contracted)


def _is_kernel(one: Instruction) -> bool:
    return 'custom_call_target="tpu_custom_call"' in one.attributes or "__gpu$xla.gpu.triton" in one.attributes


def _product(sizes) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _convolution_flops(computation: Computation, one: Instruction) -> float:
    """Matrix products are convolutions on a TPU; dimensions of a batch are windows that are mostly padding.

    Only products with an element of the input count, as in XLA's HloCostAnalysis.
    """
    left, kernel = (computation.shapes_of(operand)[0] for operand in one.operands[:2])
    labels = one.attribute("dim_labels") or ""
    inputs, kernels, outputs = re.split(r"_|->", labels)
    result = one.shapes[0]
    total = 2.0 * kernel.dims[kernels.index("i")] * result.dims[outputs.index("f")] * result.dims[outputs.index("b")]
    total /= (_numbers(one.attribute("batch_group_count")) or [1])[0]
    for i, window in enumerate(_window(one)):
        sizes = ((left, inputs), (kernel, kernels), (result, outputs))
        size, place, output = (shape.dims[names.index(str(i))] for shape, names in sizes)
        total *= _valid_positions(size, place, output, window)
    return total


class _Window(NamedTuple):
    stride: int = 1
    low: int = 0
    base_dilation: int = 1
    window_dilation: int = 1
    reversed: bool = False


def _window(one: Instruction) -> list[_Window]:
    text = one.attribute("window")
    if text is None:
        return []
    fields = {key: value.split("x") for key, value in re.findall(r"(\w+)=([\d_x\-]+)", text)}
    count = len(fields["size"])

    def of(key: str, default: int) -> list[int]:
        return [int(value.partition("_")[0]) for value in fields.get(key, [str(default)] * count)]

    keys = (("stride", 1), ("pad", 0), ("lhs_dilate", 1), ("rhs_dilate", 1), ("rhs_reversal", 0))
    columns = [of(key, default) for key, default in keys]
    return [_Window(s, low, base, dilation, bool(r)) for s, low, base, dilation, r in zip(*columns, strict=True)]


def _valid_positions(size: int, kernel: int, outputs: int, window: _Window) -> int:
    """How many pairs of an output and a place of the kernel meet an element of the input in one dimension."""
    if kernel == 1 and window.stride == 1 and window.low == 0 and window.base_dilation == 1:
        return outputs
    dilated = (size - 1) * window.base_dilation + 1 if size else 0
    count = 0
    for place in range(kernel):
        first = place * window.window_dilation - window.low
        if window.base_dilation == 1:
            # Outputs o with 0 <= first + o * stride < size.
            begin = max(0, -(first // window.stride))
            end = min(outputs, -((first - dilated) // window.stride))
            count += max(end - begin, 0)
        else:
            met = (first + o * window.stride for o in range(outputs))
            count += sum(0 <= at < dilated and at % window.base_dilation == 0 for at in met)
    return count


# --- bytes of main memory ----------------------------------------------------------------------------------------


def _in_memory(shapes: Sequence[Shape]) -> int:
    return sum(shape.bytes for shape in shapes if shape.space == 0)


def _moved(program: Program, computation: Computation, one: Instruction) -> float:
    """Bytes that an instruction reads from and writes to the main memory."""
    if one.opcode == "fusion":
        return _moved_by_fusion(program, computation, one)
    operands = [computation.shapes_of(operand) for operand in one.operands]
    if one.opcode.endswith("-start"):
        return 0 if one.opcode.removesuffix("-start") in COLLECTIVES else _moved_asynchronously(one, operands)
    if one.opcode in COLLECTIVES:
        return 0
    written = _in_memory(one.shapes)
    if one.opcode in SLICES:
        return written + (sum(shape.bytes for shape in one.shapes) if _in_memory(operands[0]) else 0)
    if one.opcode in UPDATES:
        update = operands[1] if one.opcode == "dynamic-update-slice" else operands[-1]
        return _in_memory(update) + (sum(shape.bytes for shape in update) if written else 0)
    return written + sum(_in_memory(shapes) for shapes in operands)


def _moved_asynchronously(one: Instruction, operands: Sequence[Sequence[Shape]]) -> int:
    """`copy-start`, `slice-start`: what comes out is read once and written once."""
    arrays = [shape for shape in one.shapes if shape.bytes > 4]
    size = min((shape.bytes for shape in arrays), default=0)
    into = [shape for shape in arrays if shape.bytes == size]
    reads = bool(operands) and _in_memory(operands[0]) > 0
    spaces = {shape.space for shape in into} | {shape.space for shape in operands[0]} if operands else set()
    return size * (1 if reads and len(spaces) > 1 else 2 if reads else int(0 in spaces))


def _moved_by_fusion(program: Program, computation: Computation, one: Instruction) -> float:
    """Operands that are only sliced count for their slices, and what is updated in place for its update."""
    inner = program.computations[one.calls[0]]
    total = 0
    for number, operand in enumerate(one.operands):
        shapes = computation.shapes_of(operand)
        parameter = inner.parameter(number)
        if parameter is None or not _in_memory(shapes):
            continue
        total += min(_read(program, inner, parameter.name), _in_memory(shapes))
    return total + _written(program, inner, inner.root, one.shapes)


def _read(program: Program, computation: Computation, name: str) -> float:
    """Bytes of the value `name` that a fused computation reads; inf where it reads the whole of it."""
    total = 0.0
    for user in computation.instructions.values():
        for place, operand in enumerate(user.operands):
            if operand != name:
                continue
            if user.opcode in SLICES and place == 0:
                total += sum(shape.bytes for shape in user.shapes)
            elif user.opcode == "bitcast":
                total += _read(program, computation, user.name)
            elif user.opcode == "fusion":
                inner = program.computations[user.calls[0]]
                parameter = inner.parameter(place)
                total += _read(program, inner, parameter.name) if parameter else 0
            elif not (user.opcode in UPDATES and place == 0) and user.opcode not in ("tuple", "get-tuple-element"):
                return float("inf")
    return total


def _written(program: Program, computation: Computation, root: Instruction, shapes: Sequence[Shape]) -> float:
    """Bytes that a fused computation writes for its root, whose arrays lie as `shapes` say."""
    if root.opcode == "tuple" and len(root.operands) == len(shapes):
        parts = zip(root.operands, shapes, strict=True)
        roots = ((computation.instructions[name], shape) for name, shape in parts)
        return sum(_written(program, computation, part, [shape]) for part, shape in roots)
    whole = _in_memory(shapes)
    if not whole:
        return 0
    while root.opcode in ("bitcast", "copy") and root.operands[0] in computation.instructions:
        root = computation.instructions[root.operands[0]]
    if root.opcode in UPDATES:
        update = root.operands[1] if root.opcode == "dynamic-update-slice" else root.operands[-1]
        return min(sum(shape.bytes for shape in computation.shapes_of(update)), whole)
    if root.opcode == "fusion":
        inner = program.computations[root.calls[0]]
        return min(_written(program, inner, inner.root, shapes), whole)
    return whole


# --- links -------------------------------------------------------------------------------------------------------


def _links(program: Program, computation: Computation, one: Instruction, channels: set[str]) -> Iterator[Link]:
    """The collectives that an instruction is or fuses. A channel counts once: a TPU cuts one collective into several
    fusions, which go on with it beside their own computation."""
    kind = one.opcode.removesuffix("-start")
    if kind in COLLECTIVES:
        channel = one.attribute("channel_id")
        if channel is not None and channel in channels:
            return
        channels |= {channel} if channel is not None else set()
        size = sum(shape.bytes for name in one.operands for shape in computation.shapes_of(name))
        overlaps = (
            one.opcode.endswith("-start") or "async_collective_name" in one.attributes or "chain_id" in one.attributes
        )
        scattered = kind == "all-reduce" and computation.root.opcode == "dynamic-slice"
        yield Link("reduce-scatter" if scattered else kind, size, group_of(one.attributes), overlaps)
    elif one.opcode == "fusion":
        for name in one.calls:
            inner = program.computations[name]
            for each in inner.instructions.values():
                yield from _links(program, inner, each, channels)


def group_of(attributes: str) -> tuple[int, ...]:
    """The first of an instruction's replica groups, in any of the forms that XLA writes; of a permutation, two that
    are each other's neighbours."""
    pair = re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", attributes)
    if pair:
        return int(pair[1]), int(pair[2])
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", attributes)
    if listed:
        return tuple(_numbers(listed[1]))
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota:
        groups, sizes = _numbers(iota[1]), _numbers(iota[2])
        return tuple(_iota(sizes, _numbers(iota[3]))[: _product(groups[1:])])
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\](?:[^{]*)\{([^}]*)\}", attributes)
    if mesh:
        axes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        talking = re.findall(r"'([^']+)'", mesh[2])
        ranges = [range(size) if name in talking else range(1) for name, size in axes.items()]
        strides = [_product(list(axes.values())[i + 1 :]) for i in range(len(axes))]
        return tuple(sum(a * b for a, b in zip(place, strides, strict=True)) for place in itertools.product(*ranges))
    return ()


def _iota(sizes: Sequence[int], order: Sequence[int]) -> list[int]:
    """0, 1, 2, ... in the shape `sizes`, transposed by `order`, flat."""
    strides = [_product(sizes[i + 1 :]) for i in range(len(sizes))]
    order = list(order) or list(range(len(sizes)))
    places = itertools.product(*(range(sizes[axis]) for axis in order))
    return [sum(at * strides[axis] for at, axis in zip(place, order, strict=True)) for place in places]
