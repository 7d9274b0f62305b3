"""Compiled programs as text (XLA's HLO, `compiled.as_text()`) read into computations, instructions and trip counts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

WIDTHS = {"pred": 8, "token": 0, "opaque": 0}
"""Bits of the dtypes whose names do not say them."""


class Shape(NamedTuple):
    """One array, on one device."""

    dtype: str
    dims: tuple[int, ...]
    space: int
    """Memory space of its layout: 0 is the device's main memory; on a TPU 1 is VMEM, on the chip."""

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Without the padding of tiled layouts."""
        return math.ceil(self.elements * width(self.dtype) / 8)


class Instruction(NamedTuple):
    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    """The arrays of its result: one, or those of a tuple in order."""
    operands: tuple[str, ...]
    literal: str
    """What stands between its parentheses: a constant's value, a parameter's number."""
    attributes: str

    def attribute(self, name: str) -> str | None:
        """The value of `name=...`: a word, or what stands between the braces."""
        found = re.search(rf"[ ,]{name}=(?:\{{([^{{}}]*)\}}|%?([\w.\-<>]+))", self.attributes)
        return None if found is None else found[1] if found[1] is not None else found[2]

    @property
    def op_name(self) -> str:
        """The traced operation that it comes from, "jit(f)/while/body/dot_general"."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def calls(self) -> tuple[str, ...]:
        """Computations that run once when it does: a fusion's, a call's."""
        names = [self.attribute(key) for key in ("calls", "to_apply", "called_computation")]
        return tuple(name for name in names if name)

    @property
    def branches(self) -> tuple[str, ...]:
        """Computations of which a conditional runs one."""
        listed = self.attribute("branch_computations")
        names = re.findall(r"%?([\w.\-]+)", listed) if listed else []
        return tuple(names or filter(None, map(self.attribute, ("true_computation", "false_computation"))))


class Computation(NamedTuple):
    name: str
    instructions: dict[str, Instruction]
    root: Instruction

    def parameter(self, number: int) -> Instruction | None:
        literal = str(number)
        found = (one for one in self.instructions.values() if one.opcode == "parameter" and one.literal == literal)
        return next(found, None)

    def shapes_of(self, name: str) -> tuple[Shape, ...]:
        return self.instructions[name].shapes if name in self.instructions else ()


class Program(NamedTuple):
    computations: dict[str, Computation]
    entry: Computation


def width(dtype: str) -> int:
    """Bits of an element."""
    if dtype in WIDTHS:
        return WIDTHS[dtype]
    found = re.search(r"\d+", dtype)  # the first number: f8e4m3fn, bf16, s4; complex numbers count both halves
    return int(found[0]) if found else 0


# --- reading -----------------------------------------------------------------------------------------------------

_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](\{[^{}]*\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*\(.*\)\s*->\s*.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT\s+)?%?([\w.\-]+)\s*=\s*(.*)$")
_COMMENT = re.compile(r"/\*[^*]*\*/")


def read(text: str) -> Program:
    """The text of one compiled module. Raises ValueError where it has no entry."""
    computations: dict[str, Computation] = {}
    entry: Computation | None = None
    name, is_entry, instructions, root = "", False, {}, None
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            name, is_entry, instructions, root = header[2], bool(header[1]), {}, None
        elif line.startswith("}") and instructions:
            last = root or next(reversed(instructions.values()))
            computations[name] = Computation(name, instructions, last)
            entry = computations[name] if is_entry else entry
            instructions = {}
        elif found := _INSTRUCTION.match(line):
            instruction = _instruction(found[2], _COMMENT.sub("", found[3]))
            instructions[instruction.name] = instruction
            root = instruction if found[1] else root
    if entry is None:
        raise ValueError("this is not the text of a compiled module: it has no ENTRY")
    return Program(computations, entry)


def _instruction(name: str, text: str) -> Instruction:
    """`SHAPE opcode(operands), attributes`."""
    end = _closing(text, 0) + 1 if text.startswith("(") else text.find(" ")
    opens = text.find("(", end)
    closes = _closing(text, opens)
    literal = text[opens + 1 : closes]
    operands = tuple(re.findall(r"%([\w.\-]+)", literal))
    return Instruction(name, text[end:opens].strip(), _shapes(text[:end]), operands, literal, text[closes + 1 :])


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for found in re.finditer(r"[()]", text[start:]):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return start + found.start()
    raise ValueError(f"parentheses do not match: {text[start : start + 80]}")


def _shapes(text: str) -> tuple[Shape, ...]:
    def one(found: re.Match[str]) -> Shape:
        space = _SPACE.search(found[3] or "")
        dims = tuple(int(size.lstrip("<=")) for size in found[2].split(",") if size)
        return Shape(found[1], dims, int(space[1]) if space else 0)

    return tuple(map(one, _ARRAY.finditer(text)))


def unfused(program: Program) -> list[Computation]:
    """Computations whose instructions each have a result in memory: all but the fused ones."""
    inside = {
        name
        for computation in program.computations.values()
        for one in computation.instructions.values()
        if one.opcode == "fusion"
        for name in one.calls
    }
    return [computation for name, computation in program.computations.items() if name not in inside]


# --- trip counts -------------------------------------------------------------------------------------------------


def trip_count(program: Program, computation: Computation, loop: Instruction) -> int | None:
    """How often the body of a `while` in `computation` runs; None where the text does not say.

    What the compiler noted, else how many strides the loop's counter takes to the bound that it is compared with.
    Where the loop may end earlier (a condition that is a conjunction) it is the most that it may run.
    """
    noted = re.search(r'known_trip_count"?:\s*\{"n":"(\d+)"', loop.attributes)
    if noted:
        return int(noted[1])
    condition = program.computations[loop.attribute("condition") or ""]
    counts = (_count(program, computation, loop, compare) for compare in _comparisons(program, condition))
    return min((count for count in counts if count is not None), default=None)


class Part(NamedTuple):
    """A part of a loop's state, plus a constant."""

    index: int
    plus: int = 0


Value = int | Part | None
"""What a scalar is known to be; None: nothing."""


class Comparison(NamedTuple):
    left: Value
    right: Value
    inclusive: bool


def _count(program: Program, computation: Computation, loop: Instruction, compare: Comparison) -> int | None:
    """The strides of the side that changes to the one that does not."""
    body = program.computations[loop.attribute("body") or ""]
    for counter, limit in ((compare.left, compare.right), (compare.right, compare.left)):
        if not isinstance(counter, Part):
            continue
        after = _value(program, body, body.root.operands[counter.index], {}) if body.root.opcode == "tuple" else None
        stride = after.plus if isinstance(after, Part) and after.index == counter.index else 0
        start, end = _initial(program, computation, loop, counter), _initial(program, computation, loop, limit)
        if stride and start is not None and end is not None:
            return max(math.ceil((end - start + math.copysign(compare.inclusive, stride)) / stride), 0)
    return None


def _comparisons(program: Program, condition: Computation) -> Iterator[Comparison]:
    """Those that a condition is, or of which it is the conjunction, through fusions."""

    def find(computation: Computation, name: str, arguments: dict[str, Value]) -> Iterator[Comparison]:
        one = computation.instructions[name]
        if one.opcode == "compare":
            left, right = (_value(program, computation, operand, arguments) for operand in one.operands)
            yield Comparison(left, right, one.attribute("direction") in ("LE", "GE"))
        elif one.opcode in ("and", "copy", "bitcast"):
            for operand in one.operands:
                yield from find(computation, operand, arguments)
        elif one.opcode in ("fusion", "call") and one.calls:
            inner = program.computations[one.calls[0]]
            yield from find(inner, inner.root.name, _bound(program, computation, one, inner, arguments))

    yield from find(condition, condition.root.name, {})


def _bound(
    program: Program, computation: Computation, call: Instruction, inner: Computation, arguments: dict[str, Value]
) -> dict[str, Value]:
    """What the parameters of a called computation are known to be."""
    passed = {inner.parameter(i): _value(program, computation, x, arguments) for i, x in enumerate(call.operands)}
    return {parameter.name: value for parameter, value in passed.items() if parameter is not None}


def _value(program: Program, computation: Computation, name: str, arguments: dict[str, Value]) -> Value:
    one = computation.instructions.get(name)
    if one is None or name in arguments:
        return arguments.get(name)
    if one.opcode == "constant":
        return int(one.literal) if re.fullmatch(r"-?\d+", one.literal) else None
    if one.opcode == "get-tuple-element":
        return Part(int(one.attribute("index") or 0))
    if one.opcode in ("copy", "bitcast", "convert", "reshape"):
        return _value(program, computation, one.operands[0], arguments)
    if one.opcode == "fusion":
        inner = program.computations[one.calls[0]]
        return _value(program, inner, inner.root.name, _bound(program, computation, one, inner, arguments))
    if one.opcode in ("add", "subtract"):
        left, right = (_value(program, computation, operand, arguments) for operand in one.operands)
        return _sum(left, right, -1 if one.opcode == "subtract" else 1)
    return None


def _sum(left: Value, right: Value, sign: int) -> Value:
    if isinstance(left, Part) and isinstance(right, int):
        return Part(left.index, left.plus + sign * right)
    if isinstance(right, Part) and isinstance(left, int) and sign > 0:
        return Part(right.index, right.plus + left)
    return left + sign * right if isinstance(left, int) and isinstance(right, int) else None


def _initial(program: Program, computation: Computation, loop: Instruction, value: Value) -> int | None:
    """What a value of the loop is before it begins, where that is a constant."""
    if not isinstance(value, Part):
        return value
    state = computation.instructions.get(loop.operands[0])
    while state is not None and state.opcode in ("copy", "bitcast", "opt-barrier"):
        state = computation.instructions.get(state.operands[0])
    if state is None or state.opcode != "tuple" or value.index >= len(state.operands):
        return None
    first = _value(program, computation, state.operands[value.index], {})
    return first + value.plus if isinstance(first, int) else None


def backend_json(instruction: Instruction) -> dict:
    """Its backend_config where that is JSON, else {}."""
    start = instruction.attributes.find("backend_config={")
    if start < 0:
        return {}
    try:
        return json.JSONDecoder().raw_decode(instruction.attributes[start + len("backend_config=") :])[0]
    except json.JSONDecodeError:
        return {}
