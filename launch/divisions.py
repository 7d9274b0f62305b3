"""What the devices of a mesh can share evenly, and what each of them would compute whole.

A dimension that a mesh does not divide is copied (see `sharding.spec`): never wrong, but as slow as on fewer devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from jax.sharding import AbstractMesh, Mesh

from launch import roles
from launch.acting import require_groups
from launch.config import ExperimentConfig
from tpu_rl import sharding
from tpu_rl.types import Model


def fitted(config: ExperimentConfig, mesh: Mesh | AbstractMesh) -> ExperimentConfig:
    """The configuration with as many rows in a micro-batch as the mesh's devices share evenly, no fewer than wanted: of
    4 rows each of 16 devices would compute all 4, and of 16 it computes one."""
    rows, devices = config.batch.micro_batch_rows, _row_devices(mesh)
    return replace(config, batch=replace(config.batch, micro_batch_rows=-(-rows // devices) * devices))


def doubts(config: ExperimentConfig, base: Model, mesh: Mesh | AbstractMesh) -> list[str]:
    """What the mesh does not divide, one line each, with what is done about it or would be better.

    Raises InputError where the devices cannot be cut as --sampling.tensor says.
    """
    require_groups(config, mesh)
    wanted, rows = config.batch.micro_batch_rows, fitted(config, mesh).batch.micro_batch_rows
    found = (
        []
        if rows == wanted
        else [f"micro-batches of {rows} rows, not {wanted}: {_row_devices(mesh)} devices share them"]
    )
    for model in roles.role_models(config, base).values():
        for flag, devices, what, size in _shared(config, model, mesh):
            if size % devices:
                divisors = [n for n in range(1, mesh.size + 1) if mesh.size % n == 0 and size % n == 0]
                nearest = sorted(sorted(divisors, key=lambda n: abs(n - devices))[:2])
                why = f"{flag} {devices} does not divide {size} {what}: each of these devices computes all of them"
                found.append(f"{why}; nearest that do: {', '.join(map(str, nearest))}")
    return list(dict.fromkeys(found))


def _row_devices(mesh: Mesh | AbstractMesh) -> int:
    return math.prod(mesh.shape[axis] for axis in sharding.RULES["rows"])


def _shared(config: ExperimentConfig, model: Model, mesh: Mesh | AbstractMesh) -> Iterator[tuple[str, int, str, int]]:
    """(flag, devices that share it, what, how many) of a model's parts.

    Heads of keys are not among them: where they are fewer than devices, several devices need the same one.
    """
    shape, experts = model.config, model.config.experts
    yield "--mesh.tensor", mesh.shape["tensor"], "heads", shape.attention.heads
    if config.sampling.tensor is not None:
        yield "--sampling.tensor", config.sampling.tensor, "heads", shape.attention.heads
    if experts is None:
        yield "--mesh.tensor", mesh.shape["tensor"], "columns of the MLP", shape.mlp.width
    else:
        yield "--mesh.tensor", mesh.shape["tensor"], "columns of an expert", experts.width
        yield "--mesh.expert", mesh.shape["expert"], "experts", experts.count
