"""The time of a decode step by formula, for runs that choose a mesh before anything is compiled.

A step reads the weights of a chip and what its rows see of the cache, at the bandwidth of main
memory, and adds up two sums of every layer over the chips that share its heads. That is a lower
bound. docs/benchmarks/scaling.md compares it with compiled programs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tpu_rl import cost_model
from tpu_rl.cost_model import CHIPS, GPUS
from tpu_rl.cost_model.costs import Link
from tpu_rl.models import DecoderConfig
from tpu_rl.planner import estimates
from tpu_rl.planner.steps import chip_bytes
from tpu_rl.train import sharding

SUMS_PER_LAYER = 2
"""Sums over the chips that share heads: behind attention and behind the MLP."""


def step_seconds(
    configs: Sequence[DecoderConfig],
    params: Sequence[Any],
    mesh: Mesh,
    rows: int,
    cache_bytes: float,
) -> float | None:
    """Return the least time of one token of all rows, or None if the devices' speed is unknown.

    Args:
        configs: the models that the step runs.
        params: shapes of their weights, placed on `mesh`.
        mesh: the mesh for sampling.
        rows: rows decoded at once, over all devices.
        cache_bytes: what a chip reads of the cache.
    """
    kind = mesh.devices.flat[0].device_kind
    chip = next((chip for chip in (*CHIPS.values(), *GPUS.values()) if chip.kind == kind), None)
    if chip is None:
        return None
    seconds = (sum(map(_weight_bytes, params)) + cache_bytes) / chip.memory_rate
    tensor = mesh.shape["tensor"]
    if tensor == 1:
        return seconds
    shards = math.prod(mesh.shape[axis] for axis in sharding.rules(mesh)["slots"])
    chip_rows = math.ceil(rows / shards)
    torus = estimates.torus(mesh, chip)
    for config in configs:
        size = chip_rows * config.hidden_size * jnp.dtype(config.dtype).itemsize
        link = Link("all-reduce", size, _tensor_group(mesh), overlaps=False)
        sums = SUMS_PER_LAYER * len(config.layer_types)
        seconds += sums * cost_model.link_seconds(link, torus)
    return seconds


def _weight_bytes(params: Any) -> int:
    """Return the bytes of weights that a step reads on one chip.

    Of the embedding of layers, and of an embedding beside an unembedding, it reads few rows.
    """
    if not isinstance(params, Mapping):
        return chip_bytes(params)
    return sum(
        _weight_bytes(part)
        for name, part in params.items()
        if not (name == "layer_embedding" or (name == "embedding" and "unembedding" in params))
    )


def _tensor_group(mesh: Mesh) -> tuple[int, ...]:
    """Return the numbers of the first devices along the axis "tensor"."""
    numbers = np.arange(mesh.size).reshape(mesh.devices.shape)
    groups = np.moveaxis(numbers, mesh.axis_names.index("tensor"), -1)
    return tuple(groups.reshape(-1, mesh.shape["tensor"])[0].tolist())
