"""Where each tensor of a Hugging Face directory belongs in the params."""

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
from tpu_rl.models import families
from tpu_rl.models.architecture import EXPERT_MATRICES, OUTPUTS, WEIGHTS, DecoderConfig
from tpu_rl.models.decoder import param_shapes
from tpu_rl.models.safetensors_files import Stored
from tpu_rl.types import Model, Params


class Slot(NamedTuple):
    """One Hugging Face tensor's place in the params."""

    path: tuple[str, ...]
    """Keys of the leaf."""
    index: tuple[int, ...]
    """Of a stacked leaf: which layer of the stack, which expert."""
    shape: tuple[int, ...]
    """In the Hugging Face file."""


def weight_slots(model: Model) -> dict[str, Slot]:
    """Hugging Face name -> place in the params, in the order of the layers; without adapters."""
    config: DecoderConfig = model.config
    family = families.FAMILIES[json.loads(config.source)["model_type"]]
    shapes = param_shapes(replace(config, adapters=None))
    slots = {}
    for name in WEIGHTS:
        if name in shapes:
            slots[families.weight_name(family, name, None)] = Slot((name,), (), _hf_shape(config, name))
    for layer in range(len(config.kinds)):
        repetition, place = divmod(layer, config.period)
        stacked = repetition < config.repetitions
        path = ("layers" if stacked else "tail", f"layer_{place}")
        for name in shapes[path[0]][path[1]]:
            rows = (repetition,) if stacked else ()
            for expert in range(config.shape(name)[0] if name in EXPERT_MATRICES else 1):
                index = (*rows, expert) if name in EXPERT_MATRICES else rows
                slot = Slot((*path, name), index, _hf_shape(config, name))
                slots[families.weight_name(family, name, layer, expert)] = slot
    return slots


def split_shape(config: DecoderConfig, name: str) -> tuple[int, int]:
    """(inputs, outputs) of a matrix, flattened."""
    shape = config.shape(name)
    return math.prod(shape[: -OUTPUTS[name]]), math.prod(shape[-OUTPUTS[name] :])


def _hf_shape(config: DecoderConfig, name: str) -> tuple[int, ...]:
    if name in OUTPUTS:
        return split_shape(config, name)[::-1]
    if name in EXPERT_MATRICES:
        return config.shape(name)[:0:-1]
    return (math.prod(config.shape(name)),) if name.endswith(("_bias", "_norm")) else config.shape(name)


def tensor_of(params: Params, slot: Slot) -> Any:
    """A slot's part of its leaf, in our layout."""
    leaf = leaf_at(params, slot.path)
    for at in slot.index:
        leaf = jax.lax.dynamic_index_in_dim(leaf, at, keepdims=False)
    return leaf


def leaf_at(params: Params, path: tuple[str, ...]) -> Any:
    return functools.reduce(lambda tree, key: tree[key], path, params)


def require_fit(
    directory: Path, shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, Stored], config: str
) -> None:
    """Raises InputError naming tensors missing, left over or of another shape; `config` is the file that they obey."""
    faults = {
        "missing": [name for name in shapes if name not in stored],
        "not part of the model": [name for name in stored if name not in shapes],
        "of another shape": [
            f"{name} {stored[name].shape} instead of {shape}"
            for name, shape in shapes.items()
            if name in stored and stored[name].shape != shape
        ],
    }
    if any(faults.values()):
        raise InputError(
            f"the weights do not fit {config}",
            where=str(directory),
            why="; ".join(f"{len(names)} {fault}: {', '.join(names[:5])}" for fault, names in faults.items() if names),
            fix=f"{config} and weights must come from one model",
        )
