"""Memory of one chip while a step of the run executes, by purpose.

The train state is counted from its shapes. Temporaries, new outputs and code are the compiler's own
figures, read from the compiled program or, where it refused the program, from its error message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import jax

from tpu_rl import cost_model
from tpu_rl.cost_model.costs import FREE
from tpu_rl.planner.steps import Step, chip_bytes
from tpu_rl.train import update_step
from tpu_rl.types import TrainState

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

_ALIASES = FREE | {"while", "conditional", "call"}
"""Opcodes that allocate nothing: their result is part of another array."""


class Memory(NamedTuple):
    """Bytes that a step needs."""

    parts: dict[str, int]
    """Bytes of one chip by purpose."""
    largest: list[tuple[int, str]]
    """The largest temporaries: bytes, and shape with the traced operation."""
    on_host: int = 0
    """Bytes of optimizer state in host memory, per chip. The step moves them to the chip and back.
    """

    @property
    def total(self) -> int:
        """Bytes of one chip."""
        return sum(self.parts.values())


def step_memory(step: Step, state: Mapping[str, int]) -> Memory:
    """Return the memory of a step, for a train state of `state` bytes (see `state_bytes`).

    The state stays in memory during all steps. For a step that the compiler refused, temporaries
    are the bytes in its message minus the known ones.
    """
    parts = dict(state) | step.argument_bytes
    program = step.compiled.program
    if program is None:
        message = step.compiled.memory_error
        parts["temporaries"] = _bytes_beyond(message, sum(parts.values()))
        return Memory(parts, refused_arrays(message))
    stats = program.memory_analysis()
    assert stats is not None, "the compiler does not report the program's memory"
    new_outputs = max(stats.output_size_in_bytes - stats.alias_size_in_bytes, 0)
    parts["temporaries"] = stats.temp_size_in_bytes
    parts["outputs"] = max(new_outputs - sum(step.argument_bytes.values()), 0)
    parts["code"] = stats.generated_code_size_in_bytes
    parts["padding"] = padding_bytes(step.compiled.text)
    nonzero = {name: size for name, size in parts.items() if size}
    return Memory(nonzero, largest_arrays(step.compiled.text), step.offloaded_bytes)


def padding_bytes(text: str) -> int:
    """Return the bytes by which tiles make a program's arguments larger than their elements."""
    return sum(
        shape.bytes - shape.logical_bytes
        for instruction in cost_model.read(text).entry.instructions.values()
        if instruction.opcode == "parameter"
        for shape in instruction.shapes
        if shape.space == 0
    )


def state_bytes(state: TrainState, trainable: update_step.Trainable) -> dict[str, int]:
    """Return the bytes per chip of a train state of shapes, by purpose."""
    trained, frozen = update_step.partition(state.params, trainable)
    trees = {
        "parameters": trained,
        "frozen": frozen,
        "optimizer": state.opt_state,
        "other": state.algorithm_state,
    }
    return {name: chip_bytes(tree) for name, tree in trees.items() if jax.tree.leaves(tree)}


# --- the largest arrays ---


def largest_arrays(text: str, count: int = 3) -> list[tuple[int, str]]:
    """Return the largest arrays that a program allocates in main memory.

    Each is (bytes, shape with the traced operation). `text` is the program's optimized HLO.
    """
    sizes: dict[str, int] = {}
    for computation in cost_model.unfused(cost_model.read(text)):
        for instruction in computation.instructions.values():
            opcode = instruction.opcode
            if opcode in _ALIASES or opcode.endswith("-done") or not instruction.op_name:
                continue
            for shape in instruction.shapes:
                dims = ",".join(map(str, shape.dims))
                label = f"{shape.dtype}[{dims}] {short_name(instruction.op_name)}"
                sizes[label] = shape.bytes if shape.space == 0 else 0
    ranked = sorted(((size, label) for label, size in sizes.items() if size), reverse=True)
    return ranked[:count]


def short_name(op_name: str) -> str:
    """Return the last three parts of a traced operation's name."""
    return "/".join(op_name.split("/")[-3:])


def refused_arrays(message: str, count: int = 3) -> list[tuple[int, str]]:
    """Return the largest allocations that the compiler lists when it refuses a program."""
    arrays = []
    for entry in re.split(r"\n\s*\d+\. Size: ", message)[1:]:
        size = re.match(r"([\d.]+)([KMGT]?)", entry)
        shape = re.search(r"Shape: (\w+\[[\d,]*\])", entry)
        name = re.search(r'op_name="([^"]*)"', entry)
        if size and shape:
            label = f"{shape[1]} {short_name(name[1]) if name else ''}".strip()
            arrays.append((_parse_bytes(size[1], size[2]), label))
    return sorted(arrays, reverse=True)[:count]


def _bytes_beyond(message: str, known: int) -> int:
    """Return the bytes that a refused program needs beyond the `known` ones."""
    used = re.search(r"Used ([\d.]+)([KMGT]?) of", message)
    temporaries = re.search(r"temporaries \(([\d.]+)([KMGT]?)\)", message)
    match = used or temporaries
    return max(_parse_bytes(match[1], match[2]) - known, 0) if match else 0


def _parse_bytes(number: str, unit: str) -> int:
    return int(float(number) * UNITS[unit])
