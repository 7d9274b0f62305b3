"""The tower of Gemma 4, which reads images of any size in a table of pieces (`vision.qwen`).

Patches attend to all patches of their image. Queries and keys are normed, and then one half of a
head turns with the column of a patch, the other with its row. A feature is the mean of m x m
neighboring patches. Letters in array shapes are those of `vision.qwen`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpu_rl.models import layers
from tpu_rl.models.config import DecoderConfig
from tpu_rl.models.layers import ACTIVATIONS, RopeConfig, TokenIndex
from tpu_rl.models.vision import blocks
from tpu_rl.models.vision.blocks import AXES, linear
from tpu_rl.models.vision.config import LAYERS, TOP, Gemma4VisionConfig
from tpu_rl.models.vision.features import Features, grid_of
from tpu_rl.train.sharding import constrain
from tpu_rl.types import Array, Params

Angles = list[tuple[Array, Array]]
"""Cosines and sines [1, T, head / 4] of columns, and of rows."""


def features(config: DecoderConfig, params: Params, pieces: Array) -> Features:
    """Compute the features [I, D] of pieces [I, 3 + m m p p C]."""
    vision = config.vision
    assert isinstance(vision, Gemma4VisionConfig)
    dtype = jnp.dtype(config.dtype)
    top = params[TOP]
    places = grid_of(pieces)
    side = vision.merge_size
    count = len(pieces)
    pieces = blocks.padded(config, pieces, side**2)
    grid = grid_of(pieces)
    inside = jnp.arange(side**2)[None]
    row = (side * grid.row[:, None] + inside // side).reshape(-1)
    column = (side * grid.column[:, None] + inside % side).reshape(-1)

    # Pixels are from 0 to 1.
    patches = 2 * (pieces[:, 3:].reshape(len(row), -1) - 0.5)
    x = jnp.einsum("tc,ec->te", patches.astype(dtype), top["vision_pixels"].astype(dtype))
    of_columns, of_rows = top["vision_axis_positions"].astype(dtype)
    x = x + jnp.take(of_columns, column, axis=0) + jnp.take(of_rows, row, axis=0)
    x = constrain(x[None], (*AXES, None))

    frequencies = layers.rope_frequencies(RopeConfig(vision.rope_theta), vision.head_dim // 2)
    turns = [
        place.astype(jnp.float32)[None, :, None] * frequencies[None, None]
        for place in (column, row)
    ]
    angles = [(jnp.cos(turn), jnp.sin(turn)) for turn in turns]
    index = blocks.segments(jnp.repeat(jnp.cumsum(grid.number == 0), side**2))

    def apply_layer(x: Array, weights: Params) -> Array:
        branch = blocks.norm(x, weights, "vision_attention_norm", vision.eps)
        branch = _attention(config, vision, weights, branch, angles, index)
        x = x + blocks.norm(branch, weights, "vision_attention_post_norm", vision.eps)
        branch = blocks.norm(x, weights, "vision_mlp_norm", vision.eps)
        gate = ACTIVATIONS[vision.activation](linear(weights, branch, "vision_gate"))
        branch = gate * linear(weights, branch, "vision_up")
        branch = linear(weights, branch, "vision_down")
        return x + blocks.norm(branch, weights, "vision_mlp_post_norm", vision.eps)

    x = blocks.scan_layers(config, apply_layer, x, params[LAYERS]["layer_0"])
    pooled = x.reshape(-1, side**2, vision.hidden_size)[:count].astype(jnp.float32).mean(1)
    pooled = pooled * vision.hidden_size**0.5
    if vision.is_standardized:
        bias, gain = (
            jax.lax.stop_gradient(top[name].astype(jnp.float32))[None]
            for name in ("vision_feature_bias", "vision_feature_gain")
        )
        pooled = (pooled - bias) * gain
    normed = _without_gain(vision, pooled.astype(dtype))
    return Features(linear(top, normed, "projector_matrix"), grid=places)


def _attention(
    config: DecoderConfig,
    vision: Gemma4VisionConfig,
    weights: Params,
    x: Array,
    angles: Angles,
    index: tuple[TokenIndex, TokenIndex],
) -> Array:
    """Return the attention branch of normed patches x [1, T, E], each of which sees its image."""

    def heads(name: str) -> Array:
        return linear(weights, x, name).reshape(*x.shape[:2], -1, vision.head_dim)

    query, key = (
        _turned(blocks.norm(heads(name), weights, f"{name}_norm", vision.eps), angles)
        for name in ("vision_query", "vision_key")
    )
    value = _without_gain(vision, heads("vision_value"))
    attended = blocks.attend(config, query, key, value, index, 1.0)
    return linear(weights, attended.reshape(*x.shape[:2], -1), "vision_output")


def _turned(x: Array, angles: Angles) -> Array:
    """Return x [1, T, H, head] with each half rotated by its angles."""
    halves = jnp.split(x, 2, axis=-1)
    rotated = [layers.apply_rope(half, turn) for half, turn in zip(halves, angles, strict=True)]
    return jnp.concatenate(rotated, axis=-1)


def _without_gain(vision: Gemma4VisionConfig, x: Array) -> Array:
    """Return the RMS norm of x over its last axis."""
    return layers.rms_norm(x, jnp.ones(x.shape[-1]), vision.eps, unit_offset=False)
