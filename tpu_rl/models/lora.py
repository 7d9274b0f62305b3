"""Low-rank adapters: which matrices have one, adapters apart from the weights under them, and both made one again.

A model with adapters is the same decoder, whose params hold two more leaves beside each adapted matrix: `query_lora_a`
beside `query`. So one tree may be cut in two, the weights that stay and the adapters that train; several adapters may
be joined, one at a time, to the same weights, and the weights alone are the model with its adapters off.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tpu_rl import sharding
from tpu_rl.errors import InputError
from tpu_rl.models.architecture import (
    ALL_LINEAR,
    EXPERT_MATRICES,
    LORA_A,
    LORA_B,
    OUTPUTS,
    WEIGHTS,
    DecoderConfig,
    LoraConfig,
)
from tpu_rl.models.decoder import decoder, param_shapes, random_params
from tpu_rl.models.families import LAYER_NAMES
from tpu_rl.models.slots import leaf_at
from tpu_rl.types import Array, Model, Params

MATRICES = (*OUTPUTS, *EXPERT_MATRICES, "unembedding")
"""What can be adapted, by our names."""

OF_EXPERTS: dict[str, str] = dict(zip(("gate", "up", "down"), EXPERT_MATRICES, strict=True))
"""What a mixture has in each expert in place of a layer's MLP."""

PEFT_NAMES = {name: LAYER_NAMES[name].split(".")[-2] for name in OUTPUTS} | {"unembedding": "lm_head"}
"""Our names -> the modules' in PEFT, those of experts as those of an MLP."""


def with_lora(model: Model, lora: LoraConfig) -> Model:
    """The model with adapters beside its matrices.

    Raises InputError where a target is no matrix of the model, or the rank is so large that an adapter would have no
    fewer directions than its matrix.
    """
    config: DecoderConfig = model.config
    targets = _targets(config, lora)
    narrowest = min(targets, key=lambda name: _narrow_side(config, name))
    if not 0 < lora.rank <= _narrow_side(config, narrowest):
        raise InputError(
            f"LoRA of rank {lora.rank}",
            where="--model.lora.rank",
            why=f"{shown(narrowest)} has {_narrow_side(config, narrowest)} inputs or outputs and no higher rank",
            fix=f"use 1 to {_narrow_side(config, narrowest)}; 8 to 64 are usual",
        )
    return decoder(replace(config, adapters=replace(lora, targets=targets)))


def _targets(config: DecoderConfig, lora: LoraConfig) -> tuple[str, ...]:
    """Our names of what is adapted, in their own order. A head has no vocabulary whose matrix could be."""
    ours = {theirs: name for name, theirs in PEFT_NAMES.items()} | {name: name for name in PEFT_NAMES}
    unknown = [target for target in lora.targets if target not in (ALL_LINEAR, *ours)]
    if unknown:
        near = difflib.get_close_matches(unknown[0], [ALL_LINEAR, *ours], n=2, cutoff=0.0)
        raise InputError(
            f"no matrix {unknown[0]!r} that LoRA could adapt",
            where="--model.lora.targets",
            fix=f"did you mean {' or '.join(near)}? All: {', '.join([ALL_LINEAR, *ours])}",
        )
    chosen = {ours[target] for target in lora.targets if target != ALL_LINEAR}
    if config.experts:
        chosen = {OF_EXPERTS.get(name, name) for name in chosen}
    if ALL_LINEAR in lora.targets:
        chosen |= set(OUTPUTS) - (set(OF_EXPERTS) if config.experts else set())
    if "unembedding" in chosen and config.vocab.tied:
        raise InputError(
            "lm_head is the embedding of this model, which is not adapted",
            where="--model.lora.targets",
            fix=f"leave it out; {ALL_LINEAR} is every matrix of the layers",
        )
    targets = tuple(name for name in MATRICES if name in chosen and not (name == "unembedding" and config.outputs))
    if not targets:
        raise InputError("nothing to adapt: a head takes the place of lm_head", where="--model.lora.targets")
    return targets


def shown(name: str) -> str:
    """A matrix as PEFT calls its module."""
    return PEFT_NAMES[{theirs: ours for ours, theirs in OF_EXPERTS.items()}.get(name, name)]


def _narrow_side(config: DecoderConfig, name: str) -> int:
    shape = config.shape(name)
    if name in EXPERT_MATRICES:
        return min(shape[1:])
    return min(prod(shape[: -OUTPUTS.get(name, 1)]), prod(shape[-OUTPUTS.get(name, 1) :]))


# --- trees -------------------------------------------------------------------------------------------------------


def split(tree: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(weights, adapters) of params, or of any tree like them; `join` is the inverse."""
    base, adapters = {}, {}
    for name, value in tree.items():
        if isinstance(value, dict):
            base[name], inner = split(value)
            adapters |= {name: inner} if inner else {}
        else:
            (adapters if name.endswith((LORA_A, LORA_B)) else base)[name] = value
    return base, adapters


def join(base: Any, over: Any) -> dict[str, Any]:
    """Both trees' leaves in one, without copying any; where they share a path, that of `over`."""
    return {
        **base,
        **{
            name: join(base[name], value) if isinstance(value, dict) and name in base else value
            for name, value in over.items()
        },
    }


def random_adapters(model: Model, key: Array, mesh: Mesh) -> Params:
    """The adapters of a model before the first step, on the mesh: A is normal and B zero, so that they add nothing."""
    shapes = split(param_shapes(model.config))[1]
    places = sharding.shardings(split(model.axes)[1], mesh, shapes)
    return jax.jit(lambda key: random_params(model.config, key, shapes), out_shardings=places)(key)


# --- merging -----------------------------------------------------------------------------------------------------


def merge(model: Model, params: Params, donate: bool = False) -> tuple[Model, Params]:
    """The plain model, and its weights with what the adapters add, in the weights' dtype.

    With `donate`, adapted weights are used up: memory then holds one matrix of all layers beside the model.
    """
    config: DecoderConfig = model.config
    if config.adapters is None:
        return model, params
    base, adapters = split(params)
    for path, name in _adapted(adapters):
        own, over = (leaf_at(tree, path) for tree in (base, adapters))
        add = jax.jit(partial(merged_weight, config, name), donate_argnums=(0,) if donate else ())
        own[name] = add(own[name], over[name + LORA_A], over[name + LORA_B])
    return decoder(replace(config, adapters=None)), base


def _adapted(adapters: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """(path of the dict, name) of each weight that has an adapter."""
    for name, value in adapters.items():
        if isinstance(value, dict):
            yield from _adapted(value, (*path, name))
        elif name.endswith(LORA_A):
            yield path, name.removesuffix(LORA_A)


def merged_weight(config: DecoderConfig, name: str, weight: Array, a: Array, b: Array) -> Array:
    """weight + scale A B, added in float32; of one layer, or expert, or stacked over them as all three of them are."""
    scale = config.adapter_scale(name)
    assert scale is not None
    stacked = weight.shape[: weight.ndim - (2 if name in EXPERT_MATRICES else len(WEIGHTS[name]))]
    flat_a, flat_b = a.reshape(*stacked, -1, a.shape[-1]), b.reshape(*stacked, a.shape[-1], -1)
    added = scale * jnp.matmul(flat_a, flat_b, precision=jax.lax.Precision.HIGHEST)
    if name == "unembedding":  # kept with its outputs first
        added = added.swapaxes(-1, -2)
    return (weight.astype(added.dtype) + added.reshape(weight.shape)).astype(weight.dtype)
