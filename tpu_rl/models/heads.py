"""Models derived from a language model: with a head in place of the vocabulary, or cut to its first
layers.

A head is a linear map from hidden states to a few numbers, such as values or rewards. For each kind
of derived model there is one function for the model and one for its params, so that shapes are
known without any weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import jax

from tpu_rl.errors import InputError
from tpu_rl.models.config import DecoderConfig
from tpu_rl.models.decoder import decoder, score
from tpu_rl.types import Array, Model, Params, Role


def require_writer(model: Model, address: str) -> Model:
    """Return the model of an address, if it is a language model and no classifier.

    Raises InputError if its head is not the vocabulary's.
    """
    if model.config.num_outputs is not None:
        raise InputError(
            f"the model has a head of {model.config.num_outputs} numbers and writes no text",
            where=f"{address}: config.json, architectures",
            why="it is a reward model or a classifier",
            fix="give a language model; a reward model judges with --reward DIR",
        )
    return model


def head_role(trunk: Role, select: Callable[[Params], Params]) -> Role:
    """Return a role with its own head on the hidden states of another role, `trunk`.

    The head is `select(params)["score"]` [K, D].
    """

    def outputs(params: Params, hidden: Array) -> Array:
        return score(select(params), hidden)

    return Role(trunk.hidden, outputs)


def head_params(model: Model, params: Params, num_outputs: int, key: Array) -> Params:
    """Return the params of the model with `num_outputs`, made from those of the language model.

    The head is random and small.
    """
    head = random_head(model, num_outputs, key)
    return {name: leaf for name, leaf in params.items() if name != "unembedding"} | head


def random_head(model: Model, num_outputs: int, key: Array) -> Params:
    """Return {"score": [num_outputs, D]}, random; its outputs have a standard deviation of 0.1."""
    config: DecoderConfig = model.config
    shape = (num_outputs, config.hidden_size)
    noise = 0.1 * config.hidden_size**-0.5 * jax.random.normal(key, shape)
    return {"score": noise.astype(config.param_dtype)}


def first_layers(model: Model, num_layers: int) -> Model:
    """Return the model that ends after its first `num_layers` layers.

    Raises:
        InputError: `num_layers` is not a number of complete patterns of layer types.
    """
    config: DecoderConfig = model.config
    if config.reusing_layers or config.layer_input_size:
        raise InputError(
            f"cannot take the first {num_layers} layers of {len(config.layer_types)}",
            why="the last layers reuse keys of earlier ones, or layers have inputs of their own",
            fix="use all layers, or a model without num_kv_shared_layers and "
            "hidden_size_per_layer_input",
        )
    most = config.dense_layers + config.repetitions * config.period
    after = f" after the first {config.dense_layers}" if config.dense_layers else ""
    repeated = num_layers - config.dense_layers
    if repeated <= 0 or num_layers > most or repeated % config.period:
        raise InputError(
            f"cannot take the first {num_layers} layers of {len(config.layer_types)}",
            why=f"layers come in patterns of {config.period}{after}",
            fix=f"use a multiple of {config.period}{after}, at most {most}",
        )
    source = json.loads(config.source) | {"num_hidden_layers": num_layers}
    if source.get("layer_types"):
        source["layer_types"] = source["layer_types"][:num_layers]
    return decoder(
        replace(
            config,
            layer_types=config.layer_types[:num_layers],
            source=json.dumps(source, sort_keys=True),
        )
    )


def first_layers_params(model: Model, params: Params, num_layers: int) -> Params:
    """Return the params of `first_layers(model, num_layers)`, made from those of `model`."""
    repetitions = (num_layers - model.config.dense_layers) // model.config.period
    stacks = jax.tree.map(lambda leaf: leaf[:repetitions], params["layers"])
    return {name: leaf for name, leaf in params.items() if name != "tail"} | {"layers": stacks}
