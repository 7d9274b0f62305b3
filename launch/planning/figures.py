"""How fast a step can be at best, what it communicates, and whether it fits: the lines of the plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from launch.planning.memory import Memory, memory
from launch.planning.steps import Planned, Step, full_layout
from tpu_rl import compiled
from tpu_rl.compiled import Chip, Estimate, Torus
from tpu_rl.models import DecoderConfig


class Target(NamedTuple):
    """What a plan is for."""

    name: str
    """v5e:4x4, or the kind of the devices that are there."""
    devices: Sequence[Any]
    chip: Chip | None
    """None: nothing is known of its speed."""
    memory: int | None
    """Bytes that a program may use of one device, where that is known."""


class Line(NamedTuple):
    """One step of the plan."""

    step: Step
    memory: Memory
    estimate: Estimate | None
    """None where the step was refused, or nothing is known of the device's speed."""
    flops: float
    """Matrix products of one device."""
    links: dict[str, float]
    """Bytes that leave a device by kind of collective and the mesh axes that it goes along."""
    seconds: float
    """At least; of a segment of decoding, for one token of each row."""
    mfu: float | None
    """Of the update: the most that its model flops, without rematerialisation, can be of the chips' peak."""

    def fits(self, target: Target) -> bool:
        within = target.memory is None or self.memory.total <= target.memory
        return self.step.compiled.program is not None and within

    @property
    def tokens_per_second(self) -> float:
        return self.step.tokens / self.step.loops / self.seconds if self.seconds else 0.0


def line_of(planned: Planned, step: Step, target: Target) -> Line:
    """What the compiled step costs."""
    program, mesh = step.compiled.program, step.mesh or planned.setup.mesh
    if program is None:
        return Line(step, memory(planned, step), None, 0.0, {}, 0.0, None)
    operations = compiled.operations(compiled.read(step.compiled.text))
    found = compiled.estimate(operations, torus(mesh, target.chip)) if target.chip else None
    seconds = found.seconds / step.loops if found else 0.0
    mfu = None
    if step.name == "update" and found and target.chip:
        ideal = model_flops(planned) / mesh.size / target.chip.peak
        mfu = ideal / seconds
    flops = sum(one.times * one.flops for one in operations)
    return Line(step, memory(planned, step), found, flops, sent(operations, mesh), seconds, mfu)


def torus(mesh: Mesh, chip: Chip) -> Torus:
    """Where the mesh's devices are; devices that do not say stand in a row."""
    places = [tuple(d.coords) if d.platform == "tpu" else (i,) for i, d in enumerate(mesh.devices.flat)]
    return Torus(places, chip)


def sent(operations: Sequence[compiled.Operation], mesh: Mesh) -> dict[str, float]:
    """{"all-gather fsdp": bytes that leave a device, ...}."""
    found: dict[str, float] = {}
    for one in operations:
        if one.link is not None:
            name = f"{one.link.kind} {'+'.join(mesh_axes(one.link.group, mesh))}".strip()
            found[name] = found.get(name, 0.0) + one.times * compiled.sent_bytes(one.link)
    return found


def mesh_axes(group: Sequence[int], mesh: Mesh) -> list[str]:
    """The mesh axes along which partitions of a group differ."""
    places = np.stack(np.unravel_index(np.array(group), mesh.devices.shape))
    return [name for name, along in zip(mesh.axis_names, places, strict=True) if len(set(along.tolist())) > 1]


# --- model flops -------------------------------------------------------------------------------------------------


def model_flops(planned: Planned) -> float:
    """Of one optimizer step over all chips: forward and backward through what trains, nothing computed twice.

    A weight costs a token 2 operations forwards and 4 backwards, 2 where it is frozen under adapters; a query that
    sees n keys costs 4 n times the heads' width forwards and twice that backwards.
    """
    setup, stage = planned.setup, planned.stage
    _, layout = full_layout(planned)
    real, positions = np.asarray(layout.source) >= 0, np.asarray(layout.positions)
    tokens, total = int(real.sum()), 0.0
    for name, spec in stage.algorithm.roles.items():
        if spec.trainable and spec.trunk_of is None:
            config = setup.models[name].config
            backward = 2.0 if config.adapters is not None else 4.0
            total += (2.0 + backward) * matmul_weights(config) * tokens
            total += 3.0 * attention_flops(config, positions[real])
    return total / setup.config.batch.minibatches


def matmul_weights(config: DecoderConfig) -> int:
    """Weights that each token meets in a matrix product: those of the layers and the unembedding, or the head;
    of a mixture's experts those that see it."""
    attention, width = config.attention, config.width
    layer = width * attention.head_dim * (2 * attention.heads + 2 * attention.kv_heads)
    mixture = config.experts
    if mixture is None:
        layer += 3 * width * config.mlp.width
    else:
        layer += width * mixture.count + 3 * width * mixture.width * mixture.chosen
    return len(config.kinds) * layer + width * (config.outputs or config.vocab.size)


def attention_flops(config: DecoderConfig, positions: np.ndarray) -> float:
    """Forwards, of queries at these positions: each sees what is before it in its sequence, and itself."""
    attention = config.attention
    seen = {"full": positions + 1.0}
    seen["sliding"] = np.minimum(seen["full"], attention.window or math.inf)
    per_key = 4.0 * attention.heads * attention.head_dim
    return per_key * sum(float(seen[kind].sum()) for kind in config.kinds)


def device_memory(device: Any) -> int | None:
    """Bytes that a program may use of a device that is there; None where it does not say."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return stats.get("bytes_limit") if stats else None
