"""Read the text of a compiled program (XLA's HLO, `compiled.as_text()`).

`read` splits it into computations and instructions. `trip_count` finds how often a loop runs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

WIDTHS = {"pred": 8, "token": 0, "opaque": 0}
"""Bits of the dtypes whose names do not state them."""


class Shape(NamedTuple):
    """One array, on one device."""

    dtype: str
    dims: tuple[int, ...]
    space: int
    """Memory space of its layout. 0 is the device's main memory; on a TPU, 1 is VMEM."""
    padded: tuple[int, ...] = ()
    """`dims` rounded up to whole tiles; empty if the layout has no tiles."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def logical_bytes(self) -> int:
        """Size without the padding of tiled layouts."""
        return math.ceil(self.elements * width(self.dtype) / 8)

    @property
    def bytes(self) -> int:
        """Size in memory, with the padding of tiled layouts."""
        return math.ceil(math.prod(self.padded or self.dims) * width(self.dtype) / 8)


class Instruction(NamedTuple):
    """One instruction: `%name = SHAPES opcode(operands), attributes`."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    """The arrays of its result: one, or those of a tuple in order."""
    operands: tuple[str, ...]
    literal: str
    """The text in its parentheses: a constant's value, a parameter's number."""
    attributes: str

    def attribute(self, name: str) -> str | None:
        """Return the value of `name=...`: a word, or the text in its braces."""
        match = re.search(rf"[ ,]{name}=(?:\{{([^{{}}]*)\}}|%?([\w.\-<>]+))", self.attributes)
        if match is None:
            return None
        return match[2] if match[1] is None else match[1]

    @property
    def op_name(self) -> str:
        """The traced operation that it comes from, such as "jit(f)/while/body/dot_general"."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""

    @property
    def calls(self) -> tuple[str, ...]:
        """Computations that run once when it does: those of a fusion or a call."""
        names = [self.attribute(key) for key in ("calls", "to_apply", "called_computation")]
        return tuple(name for name in names if name)

    @property
    def branches(self) -> tuple[str, ...]:
        """Computations of which a conditional runs one."""
        listed = self.attribute("branch_computations")
        if listed:
            return tuple(re.findall(r"%?([\w.\-]+)", listed))
        names = [self.attribute(key) for key in ("true_computation", "false_computation")]
        return tuple(name for name in names if name)


class Computation(NamedTuple):
    """A function of the program: its instructions by name, in order."""

    name: str
    instructions: dict[str, Instruction]
    root: Instruction

    def parameter(self, number: int) -> Instruction | None:
        """Return the instruction of a parameter, or None."""
        literal = str(number)
        for instruction in self.instructions.values():
            if instruction.opcode == "parameter" and instruction.literal == literal:
                return instruction
        return None

    def shapes_of(self, name: str) -> tuple[Shape, ...]:
        """Return the arrays of an instruction's result; none for an unknown name."""
        return self.instructions[name].shapes if name in self.instructions else ()


class Program(NamedTuple):
    """A compiled module."""

    computations: dict[str, Computation]
    entry: Computation


def width(dtype: str) -> int:
    """Return the bits of an element."""
    if dtype in WIDTHS:
        return WIDTHS[dtype]
    # The first number, as in f8e4m3fn, bf16 and s4. That of a complex type counts both halves.
    match = re.search(r"\d+", dtype)
    return int(match[0]) if match else 0


# --- reading ---

_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](\{[^{}]*\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_TILE = re.compile(r"\{([\d,]*):T\(([\d,]+)\)")
"""The order of the dimensions, fastest first, and the outermost tile. Tiles within it fill it."""
_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*\(.*\)\s*->\s*.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT\s+)?%?([\w.\-]+)\s*=\s*(.*)$")
_COMMENT = re.compile(r"/\*[^*]*\*/")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"|kernel_metadata=\{[^{}]*"cycles":"(\d+)"')
_KERNEL_METADATA = re.compile(r"kernel_metadata=\{[^{}]*\}")
"""The `metadata` of a Pallas kernel, which is JSON with line breaks."""


def read(text: str) -> Program:
    """Parse the text of one compiled module. Raises ValueError if it has no entry computation."""
    computations: dict[str, Computation] = {}
    entry: Computation | None = None
    name = ""
    is_entry = False
    instructions: dict[str, Instruction] = {}
    root: Instruction | None = None
    text = _KERNEL_METADATA.sub(lambda match: match[0].replace("\n", ""), text)
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            name = header[2]
            is_entry = bool(header[1])
            instructions = {}
            root = None
        elif line.startswith("}") and instructions:
            last = root or next(reversed(instructions.values()))
            computations[name] = Computation(name, instructions, last)
            entry = computations[name] if is_entry else entry
            instructions = {}
        elif match := _INSTRUCTION.match(line):
            instruction = _instruction(match[2], _COMMENT.sub("", match[3]))
            instructions[instruction.name] = instruction
            root = instruction if match[1] else root
    if entry is None:
        raise ValueError("this is not the text of a compiled module: it has no ENTRY")
    return Program(computations, entry)


def _instruction(name: str, text: str) -> Instruction:
    """Parse `SHAPE opcode(operands), attributes`."""
    shape_end = _closing(text, 0) + 1 if text.startswith("(") else text.find(" ")
    opens = text.find("(", shape_end)
    closes = _closing(text, opens)
    literal = text[opens + 1 : closes]
    return Instruction(
        name=name,
        opcode=text[shape_end:opens].strip(),
        shapes=_shapes(text[:shape_end]),
        operands=tuple(re.findall(r"%([\w.\-]+)", literal)),
        literal=literal,
        attributes=text[closes + 1 :],
    )


def _closing(text: str, start: int) -> int:
    """Return the index of the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.finditer(r"[()]", text[start:]):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return start + match.start()
    raise ValueError(f"parentheses do not match: {text[start : start + 80]}")


def _shapes(text: str) -> tuple[Shape, ...]:
    def parse(match: re.Match[str]) -> Shape:
        space = _SPACE.search(match[3] or "")
        dims = tuple(int(size.lstrip("<=")) for size in match[2].split(",") if size)
        return Shape(match[1], dims, int(space[1]) if space else 0, _padded(dims, match[3] or ""))

    return tuple(map(parse, _ARRAY.finditer(text)))


def _padded(dims: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """Return `dims` rounded up to whole tiles of a layout such as {0,1:T(8,128)(2,1)}."""
    tiled = _TILE.search(layout)
    if tiled is None:
        return ()
    order = [int(axis) for axis in tiled[1].split(",") if axis]
    tile = [int(size) for size in tiled[2].split(",")]
    padded = list(dims)
    for axis, size in zip(order, reversed(tile), strict=False):
        padded[axis] = -(-dims[axis] // size) * size
    return tuple(padded)


def unfused(program: Program) -> list[Computation]:
    """Return the computations whose instructions have results in memory: all but the fused ones."""
    fused = {
        name
        for computation in program.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode == "fusion"
        for name in instruction.calls
    }
    return [computation for name, computation in program.computations.items() if name not in fused]


def backend_json(instruction: Instruction) -> dict:
    """Return the backend_config of an instruction, or {} if it is not JSON."""
    start = instruction.attributes.find("backend_config={")
    if start < 0:
        return {}
    text = instruction.attributes[start + len("backend_config=") :]
    try:
        return json.JSONDecoder().raw_decode(text)[0]
    except json.JSONDecodeError:
        return {}


def estimated_cycles(instruction: Instruction) -> float | None:
    """Return the cycles that the TPU compiler expects an instruction to take, or None.

    Of a Pallas kernel, they are those that it states in its `metadata`.
    """
    stated = _CYCLES.search(instruction.attributes)
    return float(stated[1] or stated[2]) if stated else None


# --- trip counts ---


def trip_count(program: Program, computation: Computation, loop: Instruction) -> int | None:
    """Return the number of times that the body of a `while` in `computation` runs; None if the text
    does not say.

    The compiler may have noted it. Otherwise it is the number of strides from the start of the
    loop's counter to the bound in the condition. If the condition is a conjunction, the loop may
    end earlier; the result is the maximum then.
    """
    noted = re.search(r'known_trip_count"?:\s*\{"n":"(\d+)"', loop.attributes)
    if noted:
        return int(noted[1])
    condition = program.computations[loop.attribute("condition") or ""]
    counts = [
        _trips(program, computation, loop, comparison)
        for comparison in _comparisons(program, condition)
    ]
    return min((count for count in counts if count is not None), default=None)


class Part(NamedTuple):
    """An element of the loop's state, plus a constant."""

    index: int
    plus: int = 0


Value = int | Part | None
"""The known value of a scalar; None: unknown."""


class Comparison(NamedTuple):
    """A comparison in the condition of a loop."""

    left: Value
    right: Value
    inclusive: bool


def _trips(
    program: Program, computation: Computation, loop: Instruction, comparison: Comparison
) -> int | None:
    """Return the strides from the side that changes to the side that does not."""
    body = program.computations[loop.attribute("body") or ""]
    if body.root.opcode != "tuple":
        return None
    left, right = comparison.left, comparison.right
    for counter, limit in ((left, right), (right, left)):
        if not isinstance(counter, Part):
            continue
        after = _value(program, body, body.root.operands[counter.index], {})
        stride = after.plus if isinstance(after, Part) and after.index == counter.index else 0
        start = _initial(program, computation, loop, counter)
        end = _initial(program, computation, loop, limit)
        if stride and start is not None and end is not None:
            distance = end - start + math.copysign(comparison.inclusive, stride)
            return max(math.ceil(distance / stride), 0)
    return None


def _comparisons(program: Program, condition: Computation) -> Iterator[Comparison]:
    """Return the comparisons whose conjunction the condition is, also those inside fusions."""

    def find(
        computation: Computation, name: str, arguments: dict[str, Value]
    ) -> Iterator[Comparison]:
        instruction = computation.instructions[name]
        if instruction.opcode == "compare":
            left, right = (
                _value(program, computation, operand, arguments) for operand in instruction.operands
            )
            yield Comparison(left, right, instruction.attribute("direction") in ("LE", "GE"))
        elif instruction.opcode in ("and", "copy", "bitcast"):
            for operand in instruction.operands:
                yield from find(computation, operand, arguments)
        elif instruction.opcode in ("fusion", "call") and instruction.calls:
            inner = program.computations[instruction.calls[0]]
            values = _argument_values(program, computation, instruction, inner, arguments)
            yield from find(inner, inner.root.name, values)

    yield from find(condition, condition.root.name, {})


def _argument_values(
    program: Program,
    computation: Computation,
    call: Instruction,
    inner: Computation,
    arguments: dict[str, Value],
) -> dict[str, Value]:
    """Return the known values of the parameters of a called computation."""
    values: dict[str, Value] = {}
    for number, operand in enumerate(call.operands):
        parameter = inner.parameter(number)
        if parameter is not None:
            values[parameter.name] = _value(program, computation, operand, arguments)
    return values


def _value(
    program: Program, computation: Computation, name: str, arguments: dict[str, Value]
) -> Value:
    """Return the known value of an instruction, given those of the computation's parameters."""
    instruction = computation.instructions.get(name)
    if instruction is None or name in arguments:
        return arguments.get(name)
    opcode = instruction.opcode
    operands = instruction.operands
    if opcode == "constant":
        return int(instruction.literal) if re.fullmatch(r"-?\d+", instruction.literal) else None
    if opcode == "get-tuple-element":
        return Part(int(instruction.attribute("index") or 0))
    if opcode in ("copy", "bitcast", "convert", "reshape"):
        return _value(program, computation, operands[0], arguments)
    if opcode == "fusion":
        inner = program.computations[instruction.calls[0]]
        values = _argument_values(program, computation, instruction, inner, arguments)
        return _value(program, inner, inner.root.name, values)
    if opcode in ("add", "subtract"):
        left, right = (_value(program, computation, operand, arguments) for operand in operands)
        return _sum(left, right, -1 if opcode == "subtract" else 1)
    return None


def _sum(left: Value, right: Value, sign: int) -> Value:
    """Return left + sign * right."""
    if isinstance(left, Part) and isinstance(right, int):
        return Part(left.index, left.plus + sign * right)
    if isinstance(right, Part) and isinstance(left, int) and sign > 0:
        return Part(right.index, right.plus + left)
    if isinstance(left, int) and isinstance(right, int):
        return left + sign * right
    return None


def _initial(
    program: Program, computation: Computation, loop: Instruction, value: Value
) -> int | None:
    """Return a value of the loop before its first iteration, if that is a constant."""
    if not isinstance(value, Part):
        return value
    state = computation.instructions.get(loop.operands[0])
    while state is not None and state.opcode in ("copy", "bitcast", "opt-barrier"):
        state = computation.instructions.get(state.operands[0])
    if state is None or state.opcode != "tuple" or value.index >= len(state.operands):
        return None
    first = _value(program, computation, state.operands[value.index], {})
    return first + value.plus if isinstance(first, int) else None
