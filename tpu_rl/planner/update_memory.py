"""The memory of an update by formula, for runs that choose micro-batches before anything compiles.

A chip with n trained weights of its own holds, beside the train state, with d the hidden size, V
the words, L the layers, w the weights of a layer that a token meets, and c bytes of the dtype that
the model computes in:

    n (4 + 2 c)             the gradients of the step, summed in float32; those of a micro-batch;
                            and the weights in the dtype of the computation
    3 c (layer + V d)       a layer and the unembedding, gathered, the next, and their gradients
    8 V tokens              logits in float32 and their gradients, of a chunk of tokens
    (4 + c) V tokens        the same of all tokens, with --batch.whole-logits
    tokens c L d            what enters each layer, which --model.remat full keeps
    3 tokens c w / d        the products of a layer that is computed again, and their gradients

docs/benchmarks/scaling.md compares it with compiled programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp

from tpu_rl.models import DecoderConfig
from tpu_rl.models.decoder import param_shapes
from tpu_rl.planner.estimates import matmul_weights
from tpu_rl.train import sharding

PRODUCTS_KEPT = {"full": 0.0, "save-dots": 1.0, "none": 3.0}
"""Memory that --model.remat keeps of each layer, in products of the layer."""


def temporaries(
    config: DecoderConfig,
    own_weights: int,
    tokens: int,
    chunk_tokens: int | None,
    sizes: Mapping[str, int],
) -> int:
    """Return the bytes that an update takes on a chip beside the train state.

    Args:
        config: the model that learns; the largest, if there are several.
        own_weights: trained weights of a chip.
        tokens: tokens of a chip in one micro-batch.
        chunk_tokens: the most tokens whose logits a chip holds at once; None: all, which it keeps.
        sizes: mesh axis -> size.
    """
    tensor = sizes["tensor"]
    size = jnp.dtype(config.dtype).itemsize
    hidden = config.hidden_size
    layers = len(config.layer_types)
    outputs = config.num_outputs or config.vocab.size
    shapes = param_shapes(replace(config, adapters=None))
    in_layers = sum(
        leaf.size
        for name, part in shapes.items()
        if name not in ("embedding", "unembedding")
        for leaf in jax.tree.leaves(part)
    )
    products = (matmul_weights(config) - hidden * outputs) / layers / hidden / tensor
    kept_per_token = layers * (hidden + PRODUCTS_KEPT[config.remat] * products)
    gathered = (in_layers / layers / sizes["expert"] + hidden * outputs) / tensor
    if all(sizes[axis] == 1 for axis in sharding.RULES["embed"]):
        gathered = 0.0
    logits = 8 * outputs / tensor * min(tokens, chunk_tokens or tokens)
    if chunk_tokens is None:
        logits *= (4 + size) / 8
    weights = own_weights * (4 + 2 * size) + 3 * size * gathered
    return int(weights + logits + size * tokens * (kept_per_token + 3 * products))
