"""The time of a step, and what it sends between chips: the lines of a plan.

`estimate_step` turns a compiled step into a line. It has a lower bound on the time, since nothing
on a chip runs at its peak, and what the TPU compiler expects. `model_flops` counts what the model
itself needs, the numerator of MFU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from tpu_rl import cost_model
from tpu_rl.cost_model import Chip, Estimate, Torus
from tpu_rl.models import DecoderConfig
from tpu_rl.models.config import EXPERT_MATRICES, OUTPUT_DIMS, RECURRENT
from tpu_rl.models.decoder import param_shapes
from tpu_rl.planner.memory import Memory, step_memory
from tpu_rl.planner.steps import Step
from tpu_rl.train import sharding


class Target(NamedTuple):
    """The devices that a plan is for."""

    name: str
    """A topology such as v5e:4x4, or the kind of the local devices."""
    devices: Sequence[Any]
    chip: Chip | None
    """None if nothing is known of the devices' speed."""
    memory: int | None
    """Bytes that a program may use on one device; None if unknown."""
    split: sharding.SplitDevices = sharding.split_devices
    """Cuts the devices in those that learn and those that only sample."""


class Line(NamedTuple):
    """One step of a plan."""

    step: Step
    memory: Memory
    estimate: Estimate | None
    """None if the compiler refused the step, or if the devices' speed is unknown."""
    flops: float
    """Matrix products of one device, in one call."""
    seconds: float
    """Lower bound for one call; for a decode segment, for one decode step."""
    mfu: float | None
    """For the update, an upper bound on model FLOPs utilization, rematerialization not counted."""
    expected_seconds: float | None = None
    """Expected time of what `seconds` bounds; see `decode_seconds`. None if the compiler states no
    cycles."""

    def fits(self, target: Target) -> bool:
        """Return True if the step compiled and fits the memory of a device."""
        within = target.memory is None or self.memory.total <= target.memory
        return self.step.compiled.program is not None and within

    @property
    def calls(self) -> float:
        """Calls, in one step of the run, of the program that `seconds` bounds."""
        return self.step.times * self.step.loops

    @property
    def tokens_per_second(self) -> float:
        """Tokens over all chips by the expected time, or an upper bound; 0 if both are unknown."""
        seconds = self.expected_seconds or self.seconds
        return self.step.tokens / self.step.loops / seconds if seconds else 0.0

    @property
    def expected_mfu(self) -> float | None:
        """Expected model FLOPs utilization of the update."""
        if self.mfu is None or not self.expected_seconds:
            return None
        return self.mfu * self.seconds / self.expected_seconds


class Plan(NamedTuple):
    """The steps of all stages of one configuration."""

    mesh: Mapping[str, int]
    """Mesh axis -> size."""
    micro_batch_rows: int
    """Packed rows of a micro-batch, rounded up to a multiple of the devices that share them."""
    lines: list[tuple[str, Line]]
    """(name of the stage, step), in the order in which the run calls them."""

    def fits(self, target: Target) -> bool:
        """Return True if every step fits."""
        return all(line.fits(target) for _, line in self.lines)

    @property
    def seconds(self) -> float:
        """Lower bound for one step of the run, in its last stage; 0 if the speed is unknown."""
        sides = ([line.calls * line.seconds for line in lines] for lines in self._sides())
        return max(map(sum, sides), default=0.0)

    @property
    def expected_seconds(self) -> float | None:
        """Expected time of one step of the run, in its last stage; None if it is unknown.

        What a step leaves unknown counts with its lower bound.
        """
        if not any(line.expected_seconds for line in self._last_stage()):
            return None
        return max(self.side_seconds())

    def side_seconds(self) -> list[float]:
        """Return the expected time, or else the lower bound, of what each set of devices does in a
        step.

        There are two sets if some devices only sample. They work at the same time.
        """
        return [
            sum(line.calls * (line.expected_seconds or line.seconds) for line in lines)
            for lines in self._sides()
        ]

    def _sides(self) -> list[list[Line]]:
        """Return the steps of the last stage by the devices that compute them."""
        sides: dict[frozenset[Any], list[Line]] = {}
        for line in self._last_stage():
            sides.setdefault(frozenset(line.step.mesh.devices.flat), []).append(line)
        return list(sides.values())

    def _last_stage(self) -> list[Line]:
        last_stage = self.lines[-1][0] if self.lines else None
        return [line for stage, line in self.lines if stage == last_stage]


def estimate_step(step: Step, state: Mapping[str, int], target: Target) -> Line:
    """Return the line of a compiled step, for a train state of `state` bytes by purpose."""
    memory = step_memory(step, state)
    if step.compiled.program is None:
        return Line(step, memory, None, 0.0, 0.0, None)
    operations = cost_model.operations(cost_model.read(step.compiled.text))
    operations = cost_model.with_cache_fill(operations, step.cache_fill)
    flops = cost_model.total_flops(operations)
    if target.chip is None:
        return Line(step, memory, None, flops, 0.0, None)
    estimate = cost_model.estimate(operations, torus(step.mesh, target.chip))
    seconds = estimate.seconds / step.loops
    mfu = None
    if step.model_flops is not None:
        ideal_seconds = step.model_flops / step.mesh.size / target.chip.peak
        mfu = ideal_seconds / seconds
    expected = estimate.expected_seconds
    expected = None if expected is None else expected / step.loops
    if expected is not None and step.decodes:
        expected = decode_seconds(seconds, expected)
    return Line(step, memory, estimate, flops, seconds, mfu, expected)


DECODE_SHARE = 0.5
"""Measured over estimated time of decode steps: Llama-3.1-70B with int8 weights and cache on
v5e:4x4, data 2 x tensor 8, 8 and 128 rows, takes 11.85 and 19.9 ms (published by
jax-llm-examples), and the compiler's cycles with exposed links are 25.7 and 37.6 ms."""


def decode_seconds(least: float, estimated: float) -> float:
    """Return the expected time of a decode step.

    It is `DECODE_SHARE` of the time that the compiler estimates, and no less than the bound.
    """
    return max(least, DECODE_SHARE * estimated)


def torus(mesh: Mesh, chip: Chip) -> Torus:
    """Return the places of a mesh's devices. Devices without coordinates stand in a row."""
    devices = list(mesh.devices.flat)
    # Where a chip has two devices, they are neighbors in one more dimension.
    is_tpu = devices[0].platform == "tpu"
    has_cores = is_tpu and len({device.core_on_chip for device in devices}) > 1
    coordinates = [
        (*device.coords, *([device.core_on_chip] if has_cores else [])) if is_tpu else (i,)
        for i, device in enumerate(devices)
    ]
    return Torus(coordinates, chip)


def device_memory(device: Any) -> int | None:
    """Return the bytes that a program may use on a local device, or None if it does not say."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return stats.get("bytes_limit") if stats else None


# --- model FLOPs ---


def model_flops(config: DecoderConfig, positions: np.ndarray) -> float:
    """Return the FLOPs of training on tokens at these positions, with nothing computed twice.

    A weight costs 2 FLOPs per token forward and 4 backward, or 2 backward if it is frozen under
    adapters. A query that sees n keys costs 4 n times the width of the heads forward, and a
    recurrent state 6 FLOPs per element; the backward pass costs twice that.
    """
    backward = 2.0 if config.adapters is not None else 4.0
    weights = (2.0 + backward) * matmul_weights(config) * len(positions)
    return weights + 3.0 * attention_flops(config, positions)


def matmul_weights(config: DecoderConfig) -> int:
    """Return the number of weights that each token meets in a matrix product.

    These are the weights of the layers and of the unembedding or head. Of a mixture of experts,
    only the experts that see the token count.
    """
    config = replace(config, adapters=None)
    mixture = config.moe
    total = config.hidden_size * (config.num_outputs or config.vocab.size)
    for path, leaf in jax.tree.leaves_with_path(param_shapes(config)):
        name = path[-1].key
        if name in OUTPUT_DIMS or name == "router":
            total += leaf.size
        elif mixture is not None and name in EXPERT_MATRICES:
            total += leaf.size * mixture.experts_per_token // mixture.num_experts
    return total


def attention_flops(config: DecoderConfig, positions: np.ndarray) -> float:
    """Return the forward FLOPs of attention for queries at these positions.

    A query sees itself and the tokens before it in its sequence, or in its window. In linear layers
    it reads the state twice and changes it once.
    """
    attention = config.attention
    keys = {"full": positions + 1.0, "unrotated": positions + 1.0}
    keys["sliding"] = np.minimum(keys["full"], attention.sliding_window or math.inf)
    flops = 0.0
    for kind in config.layer_types:
        if kind != RECURRENT:
            heads = config.of_layers(kind).attention
            flops_per_key = 2.0 * heads.num_heads * (heads.head_dim + heads.value_dim)
            flops += flops_per_key * float(keys[kind].sum())
    delta = config.delta
    if delta is None:
        return flops
    state_size = delta.value_heads * delta.key_dim * delta.value_dim
    return flops + 6.0 * state_size * len(positions) * config.layer_types.count(RECURRENT)
