"""Rows and dimensions of a run that devices share evenly, and the choices of the planner.

A dimension that a mesh axis does not divide is replicated (see `sharding.spec`). That is never
wrong, but as slow as on fewer devices. `fit_micro_batch` and `notes` look for such dimensions.
On anything but one CPU, the planner's wing chooses rows, products and the sampling mesh."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh

from tpu_rl import wings
from tpu_rl.commands import roles
from tpu_rl.commands.compose import Devices
from tpu_rl.commands.config import ExperimentConfig
from tpu_rl.models.config import DecoderConfig
from tpu_rl.rollout.weights import require_tensor_parallel
from tpu_rl.sampler.config import TensorParallel
from tpu_rl.train import sharding
from tpu_rl.types import Model


def fit_micro_batch(config: ExperimentConfig, mesh: Mesh | AbstractMesh) -> ExperimentConfig:
    """Return the configuration with micro-batches that the mesh's devices share evenly.

    Rows are only added: 16 devices with 4 rows would each compute all 4, and with 16 rows each
    computes one.
    """
    devices = row_devices(mesh)
    rows = math.ceil(config.batch.rows_at_once / devices) * devices
    return with_micro_batch(config, rows)


def with_micro_batch(config: ExperimentConfig, rows: int) -> ExperimentConfig:
    """Return the configuration with micro-batches of so many rows."""
    return replace(config, batch=replace(config.batch, micro_batch_rows=rows))


def notes(
    config: ExperimentConfig, base: Model, mesh: Mesh | AbstractMesh, sampler_devices: int = 0
) -> list[str]:
    """Return one line for each thing that the mesh does not divide, with a remedy.

    Raises InputError if --sampling.tensor-parallel does not divide the number of sampling devices.
    """
    require_tensor_parallel(config.sampling.tensor_parallel, sampler_devices or mesh.size)
    lines = []
    wanted_rows = config.batch.micro_batch_rows
    rows = fit_micro_batch(config, mesh).batch.micro_batch_rows
    if wanted_rows and rows != wanted_rows:
        devices = row_devices(mesh)
        lines.append(
            f"micro-batches of {rows} rows, not {wanted_rows}: {devices} devices share them"
        )
    for model in roles.role_models(config, base).values():
        for part in _shared_parts(model.config, mesh, config.sampling.tensor_parallel):
            if part.size % part.devices:
                lines.append(_describe(part, mesh.size))
    return list(dict.fromkeys(lines))


class _Part(NamedTuple):
    """A dimension of a model that devices share."""

    flag: str
    devices: int
    name: str
    size: int


def _shared_parts(
    config: DecoderConfig, mesh: Mesh | AbstractMesh, tensor_parallel: TensorParallel | None
) -> Iterator[_Part]:
    """Yield the dimensions of a model that devices share.

    Heads of keys are not among them: if there are fewer of them than devices, several devices need
    the same one.
    """
    tensor = mesh.shape["tensor"]
    yield _Part("--mesh.tensor", tensor, "heads", config.attention.num_heads)
    if isinstance(tensor_parallel, int):
        yield _Part(
            "--sampling.tensor-parallel", tensor_parallel, "heads", config.attention.num_heads
        )
    if config.moe is None:
        yield _Part("--mesh.tensor", tensor, "columns of the MLP", config.mlp.intermediate_size)
    else:
        width = config.moe.intermediate_size
        yield _Part("--mesh.tensor", tensor, "columns of an expert", width)
        yield _Part("--mesh.expert", mesh.shape["expert"], "experts", config.moe.num_experts)


def _describe(part: _Part, mesh_size: int) -> str:
    divisors = [n for n in range(1, mesh_size + 1) if mesh_size % n == 0 and part.size % n == 0]
    nearest = sorted(sorted(divisors, key=lambda n: abs(n - part.devices))[:2])
    return (
        f"{part.flag} {part.devices} does not divide {part.size} {part.name}: each of these "
        f"devices computes all of them; nearest that do: {', '.join(map(str, nearest))}"
    )


def row_devices(mesh: Mesh | AbstractMesh) -> int:
    """Return the number of devices that share the rows of a micro-batch."""
    return math.prod(mesh.shape[axis] for axis in sharding.RULES["rows"])


def _planner(devices: Devices) -> Any | None:
    """Return the module that chooses for these devices by estimates; None for one CPU."""
    mesh = devices.mesh
    is_one_cpu = mesh.size == 1 and mesh.devices.flat[0].platform == "cpu"
    return None if is_one_cpu and not devices.sampler else wings.MODULES["meshes"]


def choose_rows(
    config: ExperimentConfig, model: Model, devices: Devices
) -> tuple[ExperimentConfig, str]:
    """Return the configuration with a value for --batch.micro-batch-rows, and a line about it."""
    planner = _planner(devices)
    if planner is None:
        return with_micro_batch(config, config.batch.rows_at_once), ""
    return planner.choose_rows(config, model, devices.mesh, planner.device_memory(devices.mesh))


def choose_programs(
    config: ExperimentConfig, model: Model, devices: Devices
) -> tuple[ExperimentConfig, list[str]]:
    """Return the configuration with values for --batch.whole-logits, --batch.whole-products and
    --sampling flags of meshes and slots, in types that the devices compute in, and lines about
    those that are not the plain ones."""
    planner = _planner(devices)
    if planner is None:
        return config, []
    memory = planner.device_memory(devices.mesh)
    config, _, lines = planner.choose(config, model, devices.mesh, memory, devices.sampler)
    return config, lines
