"""Models made of others: with a head of numbers in place of the vocabulary, or of the first layers only.

A model and its params are made by a function each, so that shapes are known before any weight is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import jax

from tpu_rl.errors import InputError
from tpu_rl.models.architecture import DecoderConfig
from tpu_rl.models.decoder import decoder, score
from tpu_rl.types import Array, Model, Params, Role


def head_role(trunk: Role, select: Callable[[Params], Params]) -> Role:
    """A head of its own, `select(params)["score"]` [K, D], on the hidden states of another role."""

    def outputs(params: Params, hidden: Array) -> Array:
        return score(select(params), hidden)

    return Role(trunk.hidden, outputs)


def with_head(model: Model, outputs: int) -> Model:
    """The model with a head of `outputs` numbers in place of the vocabulary: `logits` and `extend` give those."""
    return decoder(replace(model.config, outputs=outputs))


def head_params(model: Model, params: Params, outputs: int, key: Array) -> Params:
    """A language model's params -> those of `with_head(model, outputs)`; the head is random and small."""
    random = random_head(model, outputs, key)
    return {name: leaf for name, leaf in params.items() if name != "unembedding"} | random


def random_head(model: Model, outputs: int, key: Array) -> Params:
    """{"score": [outputs, D]}, whose outputs are of size 0.1."""
    config: DecoderConfig = model.config
    noise = 0.1 * config.width**-0.5 * jax.random.normal(key, (outputs, config.width))
    return {"score": noise.astype(config.param_dtype)}


def first_layers(model: Model, layers: int) -> Model:
    """The model that ends after so many layers. Raises InputError unless they are whole patterns of layer kinds."""
    config: DecoderConfig = model.config
    if not 0 < layers <= config.repetitions * config.period or layers % config.period:
        raise InputError(
            f"cannot take the first {layers} layers of {len(config.kinds)}",
            why=f"layers come in patterns of {config.period}",
            fix=f"use a multiple of {config.period}, at most {config.repetitions * config.period}",
        )
    source = json.loads(config.source) | {"num_hidden_layers": layers}
    if source.get("layer_types"):
        source["layer_types"] = source["layer_types"][:layers]
    return decoder(replace(config, kinds=config.kinds[:layers], source=json.dumps(source, sort_keys=True)))


def first_layers_params(model: Model, params: Params, layers: int) -> Params:
    """A model's params -> those of `first_layers(model, layers)`."""
    count = layers // model.config.period
    stacks = jax.tree.map(lambda leaf: leaf[:count], params["layers"])
    return {name: leaf for name, leaf in params.items() if name != "tail"} | {"layers": stacks}
