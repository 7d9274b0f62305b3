"""Low-rank adapters (LoRA): a model with adapters, its params with and without them, and merging.

A model with adapters is the same decoder. Its params hold two more leaves beside each adapted
matrix: `query_lora_a` and `query_lora_b` beside `query`. `split` cuts such a tree into the weights,
which are frozen, and the adapters, which are trained; `join` puts adapters over weights. Several
sets of adapters can share one set of weights, and the weights alone are the model with its adapters
off.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tpu_rl.errors import InputError, unknown_name
from tpu_rl.models.config import (
    ALL_LINEAR,
    EXPERT_MATRICES,
    LORA_A,
    LORA_B,
    OUTPUT_DIMS,
    WEIGHT_AXES,
    DecoderConfig,
    LoraConfig,
    has_outputs_first,
    inputs_and_outputs,
)
from tpu_rl.models.decoder import decoder, param_shapes, random_params
from tpu_rl.models.hf import families
from tpu_rl.models.hf.families import LAYER_NAMES
from tpu_rl.models.hf.weight_map import leaf_at
from tpu_rl.train import sharding
from tpu_rl.types import Array, Model, Params

OF_LAYERS = tuple(name for name in OUTPUT_DIMS if name in LAYER_NAMES)
"""Matrices of layers, except those of experts."""

ADAPTABLE = (*OF_LAYERS, *EXPERT_MATRICES, "unembedding")
"""Weights that can have an adapter."""

EXPERT_NAMES: dict[str, str] = dict(zip(("gate", "up", "down"), EXPERT_MATRICES, strict=True))
"""Matrix of an MLP -> the matrices of experts that replace it in a mixture."""

PEFT_NAMES = {name: LAYER_NAMES[name].split(".")[-2] for name in OF_LAYERS} | {
    "unembedding": "lm_head"
}
"""Weight -> name of its module in PEFT. Experts' matrices have the names of an MLP's."""


def with_lora(model: Model, lora: LoraConfig) -> Model:
    """Return the model with adapters beside the matrices that `lora.targets` names.

    Raises:
        InputError: a target is no matrix of the model, or the rank is larger than the smaller side
            of an adapted matrix.
    """
    config: DecoderConfig = model.config
    targets = _targets(config, lora)
    narrowest = min(targets, key=lambda name: _max_rank(config, name))
    max_rank = _max_rank(config, narrowest)
    if not 0 < lora.rank <= max_rank:
        raise InputError(
            f"LoRA of rank {lora.rank} does not fit the model",
            where="--model.lora.rank",
            why=f"{peft_name(narrowest)} has {max_rank} inputs or outputs, so its rank is at most "
            f"{max_rank}",
            fix=f"use 1 to {max_rank}; 8 to 64 are usual",
        )
    return decoder(replace(config, adapters=replace(lora, targets=targets)))


def _targets(config: DecoderConfig, lora: LoraConfig) -> tuple[str, ...]:
    """Return the weights of a model that `lora.targets` names, in the order of `ADAPTABLE`.

    A model with a head has no unembedding to adapt.
    """
    weight_names = _weights_by_name(config)
    known = [ALL_LINEAR, *weight_names]
    unknown = [target for target in lora.targets if target not in known]
    if unknown:
        raise unknown_name("matrix", unknown[0], known, "--model.lora.targets")
    named = (weight_names[target] for target in lora.targets if target != ALL_LINEAR)
    chosen = set().union(*named)
    if ALL_LINEAR in lora.targets:
        chosen |= _weights(config) & {*OF_LAYERS}
    if chosen & {*EXPERT_MATRICES} and families.has_stacked_experts(families.family_of(config)):
        raise InputError(
            "the experts of this family cannot have adapters",
            where="--model.lora.targets",
            why="files of PEFT have no place for them: the experts of a layer are one tensor",
            fix=f"use {ALL_LINEAR}, which leaves out experts",
        )
    if "unembedding" in chosen and config.vocab.tied:
        raise InputError(
            "lm_head is the embedding of this model, which LoRA does not adapt",
            where="--model.lora.targets",
            why="config.json ties the two (tie_word_embeddings)",
            fix=f"leave lm_head out; {ALL_LINEAR} means every matrix of the layers",
        )
    if config.num_outputs:
        chosen.discard("unembedding")
    targets = tuple(name for name in ADAPTABLE if name in chosen)
    if not targets:
        raise InputError(
            "LoRA has nothing to adapt in a model with a head",
            where="--model.lora.targets",
            why="the only target is lm_head, which the head replaces",
            fix=f"use {ALL_LINEAR}, or name matrices of the layers",
        )
    return targets


def _weights(config: DecoderConfig) -> set[str]:
    """Return the names of all weights of a model."""
    shapes = param_shapes(replace(config, adapters=None))
    return {path[-1].key for path, _ in jax.tree.leaves_with_path(shapes)}


def _weights_by_name(config: DecoderConfig) -> dict[str, set[str]]:
    """Return each name that a target may have -> the weights that it means in a model.

    The names are those of PEFT, in this family and in others, and those of this library.
    """
    present = _weights(config)
    family = families.family_of(config)
    # Where experts cannot have adapters, the names of an MLP beside them mean the MLP.
    expert_names = (
        {} if families.has_stacked_experts(family) and "gate" in present else EXPERT_NAMES
    )
    weights: dict[str, set[str]] = {}
    for name, module in PEFT_NAMES.items():
        meant = {name, expert_names.get(name, name)} & present
        if name == "unembedding":
            meant = {name}
        own_module = family.names.get(name, module).removesuffix(".weight").split(".")[-1]
        for alias in (module, own_module, name) if meant else ():
            weights.setdefault(alias, set()).update(meant)
    return weights


def peft_name(name: str) -> str:
    """Return the name of a weight's module in PEFT."""
    mlp_names = {expert: mlp for mlp, expert in EXPERT_NAMES.items()}
    return PEFT_NAMES[mlp_names.get(name, name)]


def _max_rank(config: DecoderConfig, name: str) -> int:
    """Return the largest rank that a matrix can have: the smaller of its inputs and outputs."""

    def max_rank(shape: tuple[int, ...]) -> int:
        if name in OUTPUT_DIMS:
            return min(map(prod, inputs_and_outputs(name, shape)))
        return min(shape[-2:])

    layer_types = set(config.layer_types)
    return min(max_rank(config.of_layers(kind).shape(name)) for kind in layer_types)


# Trees with and without adapters.


def split(tree: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split params, or a tree of the same structure, into (weights, adapters).

    `join` is the inverse.
    """
    base, adapters = {}, {}
    for name, value in tree.items():
        if isinstance(value, dict):
            base[name], inner = split(value)
            if inner:
                adapters[name] = inner
        else:
            (adapters if name.endswith((LORA_A, LORA_B)) else base)[name] = value
    return base, adapters


def join(base: Any, over: Any) -> dict[str, Any]:
    """Return one tree with the leaves of both, not copied.

    If both have a leaf at the same path, that of `over` wins.
    """
    joined = dict(base)
    for name, value in over.items():
        is_subtree = isinstance(value, dict) and name in base
        joined[name] = join(base[name], value) if is_subtree else value
    return joined


def random_adapters(model: Model, key: Array, mesh: Mesh) -> Params:
    """Return the initial adapters of a model, on the mesh: A is normal and B is zero.

    The product A B is zero, so the adapters do not change the model.
    """
    shapes = split(param_shapes(model.config))[1]
    shardings = sharding.shardings(split(model.axes)[1], mesh, shapes)
    init = jax.jit(lambda key: random_params(model.config, key, shapes), out_shardings=shardings)
    return init(key)


# Merging.


def merge(model: Model, params: Params, donate: bool = False) -> tuple[Model, Params]:
    """Return the model without adapters, and its weights with the adapters added to them.

    Weights keep their dtype. With `donate` the adapted weights of `params` are deleted; memory then
    holds no more than the model and one matrix of all layers.
    """
    config: DecoderConfig = model.config
    if config.adapters is None:
        return model, params
    base, adapters = split(params)
    for path, name in _adapted_weights(adapters):
        weights = leaf_at(base, path)
        matrices = leaf_at(adapters, path)
        add = jax.jit(partial(merged_weight, config, name), donate_argnums=(0,) if donate else ())
        weights[name] = add(weights[name], matrices[name + LORA_A], matrices[name + LORA_B])
    return decoder(replace(config, adapters=None)), base


def _adapted_weights(
    adapters: Any, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (path of the dict, name) of each weight that has an adapter."""
    for name, value in adapters.items():
        if isinstance(value, dict):
            yield from _adapted_weights(value, (*path, name))
        elif name.endswith(LORA_A):
            yield path, name.removesuffix(LORA_A)


def merged_weight(config: DecoderConfig, name: str, weight: Array, a: Array, b: Array) -> Array:
    """Return weight + scale A B in the dtype of the weight; the sum is float32.

    All three may be stacked over layers, over experts, or over both.
    """
    scale = config.adapter_scale(name)
    assert scale is not None
    matrix_dims = 2 if name in EXPERT_MATRICES else len(WEIGHT_AXES[name])
    stacked = weight.shape[: weight.ndim - matrix_dims]
    flat_a = a.reshape(*stacked, -1, a.shape[-1])
    flat_b = b.reshape(*stacked, a.shape[-1], -1)
    update = scale * jnp.matmul(flat_a, flat_b, precision=jax.lax.Precision.HIGHEST)
    if name == "unembedding" or has_outputs_first(name):
        update = update.swapaxes(-1, -2)
    return (weight.astype(update.dtype) + update.reshape(weight.shape)).astype(weight.dtype)
