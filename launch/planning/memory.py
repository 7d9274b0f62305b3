"""Bytes of one chip while a step runs, by what they are for."""

from __future__ import annotations

import re
from typing import NamedTuple

import jax

from launch import build
from launch.planning.steps import Planned, Step, chip_bytes
from tpu_rl import compiled, training

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Memory(NamedTuple):
    parts: dict[str, int]
    """Bytes of one chip by what they are for."""
    largest: list[tuple[int, str]]
    """Of the temporaries: bytes, and shape with what it was traced from."""
    on_host: int = 0
    """Bytes of the optimizer's state that lie in the host's memory, for one chip. A step that uses them moves them to
    the chip and back."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def memory(planned: Planned, step: Step) -> Memory:
    """The train state stays all the time; temporaries and new outputs are the compiler's figures.

    Of a step that the compiler refused, the temporaries are what its message says beyond what is known.
    """
    parts = state_bytes(planned) | step.own
    program = step.compiled.program
    if program is None:
        refused = step.compiled.refused
        return Memory(parts | {"temporaries": _beyond(refused, sum(parts.values()))}, refused_arrays(refused))
    stats = program.memory_analysis()
    assert stats is not None, "the compiler does not say what memory the program takes"
    made = max(stats.output_size_in_bytes - stats.alias_size_in_bytes, 0)
    parts["temporaries"] = stats.temp_size_in_bytes
    parts["outputs"] = max(made - sum(step.own.values()), 0)
    parts["code"] = stats.generated_code_size_in_bytes
    fetched = chip_bytes(planned.state.opt_state, on_host=True) if step.name == "update" else 0
    return Memory({name: size for name, size in parts.items() if size}, largest_arrays(step.compiled.text), fetched)


def state_bytes(planned: Planned) -> dict[str, int]:
    """The train state by what it is for."""
    state, how = planned.state, build.learning(planned.setup.config, planned.stage)
    chosen, frozen = training.partition(state.params, how.trainable)
    trees = {"parameters": chosen, "frozen": frozen, "optimizer": state.opt_state, "other": state.algorithm_state}
    return {name: chip_bytes(tree) for name, tree in trees.items() if jax.tree.leaves(tree)}


# --- what is large -----------------------------------------------------------------------------------------------

_PASSED_ON = ("parameter", "tuple", "get-tuple-element", "while", "bitcast", "constant", "conditional", "call")


def largest_arrays(text: str, most: int = 3) -> list[tuple[int, str]]:
    """The largest arrays in main memory that a program makes: bytes, and shape with what it was traced from."""
    program = compiled.read(text)
    found: dict[str, int] = {}
    for computation in compiled.unfused(program):
        for one in computation.instructions.values():
            if one.opcode not in _PASSED_ON and not one.opcode.endswith("-done") and one.op_name:
                for shape in one.shapes:
                    dims = ",".join(map(str, shape.dims))
                    label = f"{shape.dtype}[{dims}] {short_name(one.op_name)}"
                    found[label] = shape.bytes if shape.space == 0 else 0
    ranked = sorted(((size, label) for label, size in found.items() if size), reverse=True)
    return ranked[:most]


def short_name(op_name: str) -> str:
    """The last parts of a traced operation's name."""
    return "/".join(op_name.split("/")[-3:])


def _beyond(message: str, known: int) -> int:
    """Bytes that a refused program wants beyond the known ones."""
    found = re.search(r"Used ([\d.]+)([KMGT]?) of", message) or re.search(r"temporaries \(([\d.]+)([KMGT]?)\)", message)
    return max(int(float(found[1]) * UNITS[found[2]]) - known, 0) if found else 0


def refused_arrays(message: str, most: int = 3) -> list[tuple[int, str]]:
    """The largest allocations that the compiler lists when it refuses a program."""
    found = []
    for entry in re.split(r"\n\s*\d+\. Size: ", message)[1:]:
        size = re.match(r"([\d.]+)([KMGT]?)", entry)
        shape, name = re.search(r"Shape: (\w+\[[\d,]*\])", entry), re.search(r'op_name="([^"]*)"', entry)
        if size and shape:
            label = f"{shape[1]} {short_name(name[1]) if name else ''}".strip()
            found.append((int(float(size[1]) * UNITS[size[2]]), label))
    return sorted(found, reverse=True)[:most]
