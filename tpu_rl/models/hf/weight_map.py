"""The place of each tensor of a Hugging Face directory in the params."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from tpu_rl.errors import InputError
from tpu_rl.models.config import (
    EXPERT_MATRICES,
    OUTPUT_DIMS,
    WEIGHT_AXES,
    DecoderConfig,
    has_outputs_first,
    inputs_and_outputs,
)
from tpu_rl.models.decoder import param_shapes
from tpu_rl.models.hf import families, moe_families
from tpu_rl.models.hf.mxfp4 import Mxfp4Tensor
from tpu_rl.models.hf.safetensors_files import StoredTensor
from tpu_rl.models.vision import towers
from tpu_rl.models.vision.config import BOUNDS, NO_BOUND
from tpu_rl.train import sharding
from tpu_rl.types import Model, Params


class WeightLocation(NamedTuple):
    """The place in the params of a Hugging Face tensor, or of a part of one."""

    path: tuple[str, ...]
    """Keys of the leaf."""
    index: tuple[int, ...]
    """Index into a stacked leaf: the layer in the stack and the expert, if the leaf has these
    axes."""
    shape: tuple[int, ...]
    """Shape in the Hugging Face file, of this part."""
    is_transposed: bool
    """True if the last axes of the file are [outputs, inputs], and the params have inputs first."""
    part: tuple[Any, ...] = ()
    """Index of the part in the tensor; () is all of it."""

    def to_file(self, tensor: np.ndarray) -> np.ndarray:
        """Return a tensor of the params in the layout of the file."""
        if self.path[-1].endswith(BOUNDS):
            bound = tensor.astype(np.float32)
            infinite = np.copysign(np.float32(np.inf), bound)
            tensor = np.where(np.abs(bound) >= NO_BOUND, infinite, bound).astype(tensor.dtype)
        if self.is_transposed:
            *experts, outputs, inputs = self.shape
            return tensor.reshape(*experts, inputs, outputs).swapaxes(-1, -2)
        return tensor.reshape(self.shape)


class FileTensor(NamedTuple):
    """A tensor of a Hugging Face file."""

    shape: tuple[int, ...]
    locations: tuple[WeightLocation, ...]
    """Places of its parts in the params. Most tensors have one part."""


def weight_locations(model: Model) -> dict[str, FileTensor]:
    """Return Hugging Face name -> tensor with its place in the params, in the order of the layers.

    Adapters are not included.
    """
    config: DecoderConfig = model.config
    family = families.family_of(config)
    shapes = param_shapes(replace(config, adapters=None, weight_dtype=None))
    parts: dict[str, list[WeightLocation]] = {}
    stacked_experts = EXPERT_MATRICES if families.has_stacked_experts(family) else ()

    def add(name: str, path: tuple[str, ...], index: tuple[int, ...], layer: int | None) -> None:
        file_name = families.weight_name(family, name, layer, index[-1] if index else 0)
        shape = config.shape(name)
        if layer is not None:
            reuses_keys = layer >= config.first_reusing
            shape = config.of_layers(config.layer_types[layer], reuses_keys).shape(name)
        if name in stacked_experts and family.experts_are_transposed:
            experts, inputs, outputs = shape
            layout = (experts, outputs, inputs), True
        else:
            layout = _file_layout(shape, name, is_stacked_expert=name in stacked_experts)
        location = WeightLocation((*path, name), index, *layout)
        parts.setdefault(file_name, []).append(location)

    for name in WEIGHT_AXES:
        if name in shapes:
            add(name, (), (), None)
    for layer in range(len(config.layer_types)):
        path, stack_index = _place(config, layer)
        names = shapes[path[0]][path[1]]
        # In the order of the table, in which the parts of a fused tensor follow one another.
        for name in filter(names.__contains__, WEIGHT_AXES):
            if name in EXPERT_MATRICES and name not in stacked_experts:
                for expert in range(config.shape(name)[0]):
                    add(name, path, (*stack_index, expert), layer)
            else:
                add(name, path, stack_index, layer)

    def fused(name: str, locations: list[WeightLocation]) -> FileTensor:
        if name.endswith(moe_families.GROUPED_BY_HEAD):
            assert config.delta is not None
            return _group(locations, config.delta.key_heads)
        fuse = _interleave if family.is_interleaved else _concatenate
        return fuse(locations)

    tensors = {name: fused(name, locations) for name, locations in parts.items()}
    if config.vision is None:
        return tensors
    of_vision: dict[str, list[WeightLocation]] = {}
    for weight in towers.stored_weights(config):
        location = WeightLocation(weight.path, weight.index, weight.shape, weight.is_transposed)
        of_vision.setdefault(weight.file_name, []).append(location)
    return tensors | {name: _concatenate(locations) for name, locations in of_vision.items()}


def _place(config: DecoderConfig, layer: int) -> tuple[tuple[str, str], tuple[int, ...]]:
    """Return the path of a layer's weights, and their index in the stack if they are stacked."""
    if layer < config.dense_layers:
        return ("first", f"layer_{layer}"), ()
    if layer >= config.first_reusing:
        repetition, layer = divmod(layer - config.first_reusing, config.reusing_period)
        return ("reusing", f"layer_{layer}"), (repetition,)
    repetition, layer_in_pattern = divmod(layer - config.dense_layers, config.period)
    is_stacked = repetition < config.repetitions
    path = ("layers" if is_stacked else "tail", f"layer_{layer_in_pattern}")
    return path, (repetition,) if is_stacked else ()


def _interleave(parts: list[WeightLocation]) -> FileTensor:
    """Return the tensor whose columns are those of its parts in turn."""
    if len(parts) == 1:
        return FileTensor(parts[0].shape, tuple(parts))
    count = len(parts)
    locations = tuple(
        part._replace(part=(..., slice(first, None, count))) for first, part in enumerate(parts)
    )
    *rows, columns = parts[0].shape
    return FileTensor((*rows, count * columns), locations)


def _group(parts: list[WeightLocation], groups: int) -> FileTensor:
    """Return the tensor in which each group has rows of every part, one part after the other."""
    sizes = [part.shape[0] // groups for part in parts]
    starts = [0, *itertools.accumulate(sizes)]
    first_rows = starts[-1] * np.arange(groups)[:, None]
    locations = tuple(
        part._replace(part=((first_rows + start + np.arange(size)).ravel(),))
        for part, start, size in zip(parts, starts, sizes, strict=False)  # the last is the total
    )
    return FileTensor((groups * starts[-1], *parts[0].shape[1:]), locations)


def _concatenate(parts: list[WeightLocation]) -> FileTensor:
    """Return the tensor that has the outputs of its parts, one part after the other."""
    if len(parts) == 1:
        return FileTensor(parts[0].shape, tuple(parts))
    axis = 0
    if parts[0].path[-1] in EXPERT_MATRICES:
        # The outputs of all experts are on the last axis, or transposed on that before.
        axis = 1 if parts[0].is_transposed else 2
    ends = [*itertools.accumulate(part.shape[axis] for part in parts)]
    starts = [0, *ends[:-1]]
    locations = tuple(
        part._replace(part=(*[slice(None)] * axis, slice(start, end)))
        for part, start, end in zip(parts, starts, ends, strict=True)
    )
    shape = [*parts[0].shape]
    shape[axis] = ends[-1]
    return FileTensor(tuple(shape), locations)


def _file_layout(
    shape: tuple[int, ...], name: str, is_stacked_expert: bool
) -> tuple[tuple[int, ...], bool]:
    """Return the shape of a weight in Hugging Face files, and True if it is transposed there."""
    if is_stacked_expert or name.startswith(EXPERT_MATRICES) and name.endswith("_bias"):
        return shape, False
    if name in OUTPUT_DIMS:
        inputs, outputs = map(math.prod, inputs_and_outputs(name, shape))
        return (outputs, inputs), not has_outputs_first(name)
    if name in EXPERT_MATRICES:
        _, inputs, outputs = shape
        return (outputs, inputs), True
    if name.endswith(("_bias", "_norm")):
        return (math.prod(shape),), False
    if name.endswith("_taps"):
        # A convolution of each channel by itself.
        return (math.prod(shape[:-1]), 1, shape[-1]), False
    return shape, False


def tensor_at(params: Params, location: WeightLocation) -> Any:
    """Return the tensor at a location of the params, in our layout."""
    leaf = leaf_at(params, location.path)
    for index in location.index:
        leaf = jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False)
    return leaf


def gathered(tensor: FileTensor, read: Callable[[WeightLocation], Any]) -> np.ndarray:
    """Return a tensor in the layout of the file, on the host.

    A collective operation: all processes must call it together.

    Args:
        read: location -> its part in our layout, which may lie on the devices of all processes.
    """

    def to_host(location: WeightLocation) -> np.ndarray:
        return location.to_file(sharding.to_host(read(location)))

    first, *others = tensor.locations
    part = to_host(first)
    if part.shape == tensor.shape:
        return part
    whole = np.zeros(tensor.shape, part.dtype)
    whole[first.part] = part
    for location in others:
        whole[location.part] = to_host(location)
    return whole


def leaf_at(params: Params, path: tuple[str, ...]) -> Any:
    """Return the leaf or subtree at a path of nested dicts."""
    return functools.reduce(lambda tree, key: tree[key], path, params)


def require_fit(
    directory: Path,
    shapes: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, StoredTensor | Mxfp4Tensor],
    config_file: str,
    remedy: str = "",
) -> None:
    """Check that the stored tensors are those of `shapes`, which follow from `config_file`.

    `remedy` is what else an error advises.

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
            fix=f"use {config_file} and weights of the same model{remedy}",
        )
