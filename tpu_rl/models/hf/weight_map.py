"""The place of each tensor of a Hugging Face directory in the params."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from tpu_rl.errors import InputError
from tpu_rl.models.config import EXPERT_MATRICES, OUTPUT_DIMS, WEIGHT_AXES, DecoderConfig
from tpu_rl.models.decoder import param_shapes
from tpu_rl.models.hf import families
from tpu_rl.models.hf.safetensors_files import StoredTensor
from tpu_rl.types import Model, Params


class WeightLocation(NamedTuple):
    """The place of one Hugging Face tensor in the params."""

    path: tuple[str, ...]
    """Keys of the leaf."""
    index: tuple[int, ...]
    """Index into a stacked leaf: the layer in the stack and the expert, if the leaf has these
    axes."""
    shape: tuple[int, ...]
    """Shape in the Hugging Face file."""


def weight_locations(model: Model) -> dict[str, WeightLocation]:
    """Return Hugging Face name -> place in the params, in the order of the layers.

    Adapters are not included.
    """
    config: DecoderConfig = model.config
    family = families.FAMILIES[json.loads(config.source)["model_type"]]
    shapes = param_shapes(replace(config, adapters=None))
    locations = {}
    for name in WEIGHT_AXES:
        if name in shapes:
            location = WeightLocation((name,), (), _hf_shape(config, name))
            locations[families.weight_name(family, name, None)] = location
    for layer in range(len(config.layer_types)):
        repetition, layer_in_pattern = divmod(layer, config.period)
        is_stacked = repetition < config.repetitions
        path = ("layers" if is_stacked else "tail", f"layer_{layer_in_pattern}")
        stack_index = (repetition,) if is_stacked else ()
        for name in shapes[path[0]][path[1]]:
            is_expert = name in EXPERT_MATRICES
            for expert in range(config.shape(name)[0] if is_expert else 1):
                index = (*stack_index, expert) if is_expert else stack_index
                location = WeightLocation((*path, name), index, _hf_shape(config, name))
                locations[families.weight_name(family, name, layer, expert)] = location
    return locations


def _hf_shape(config: DecoderConfig, name: str) -> tuple[int, ...]:
    """Return the shape of a weight in Hugging Face files: matrices are [outputs, inputs]."""
    shape = config.shape(name)
    if name in OUTPUT_DIMS:
        output_dims = OUTPUT_DIMS[name]
        return math.prod(shape[-output_dims:]), math.prod(shape[:-output_dims])
    if name in EXPERT_MATRICES:
        _, inputs, outputs = shape
        return outputs, inputs
    if name.endswith(("_bias", "_norm")):
        return (math.prod(shape),)
    return shape


def tensor_at(params: Params, location: WeightLocation) -> Any:
    """Return the tensor at a location of the params, in our layout."""
    leaf = leaf_at(params, location.path)
    for index in location.index:
        leaf = jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False)
    return leaf


def leaf_at(params: Params, path: tuple[str, ...]) -> Any:
    """Return the leaf or subtree at a path of nested dicts."""
    return functools.reduce(lambda tree, key: tree[key], path, params)


def require_fit(
    directory: Path,
    shapes: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, StoredTensor],
    config_file: str,
) -> None:
    """Check that the stored tensors are those of `shapes`, which follow from `config_file`.

    Raises:
        InputError: tensors are missing, are left over, or have another shape; it names them.
    """
    faults = {
        "missing": [name for name in shapes if name not in stored],
        "not part of the model": [name for name in stored if name not in shapes],
        "of another shape": [
            f"{name} {stored[name].shape} instead of {shape}"
            for name, shape in shapes.items()
            if name in stored and stored[name].shape != shape
        ],
    }
    reasons = [
        f"{len(names)} {fault}: {', '.join(names[:5])}" for fault, names in faults.items() if names
    ]
    if reasons:
        raise InputError(
            f"the weights do not fit {config_file}",
            where=str(directory),
            why="; ".join(reasons),
            fix=f"use {config_file} and weights of the same model",
        )
