"""The tower of Gemma 4, which reads images of any size in a table of pieces (`qwen_vision`).

Patches attend to all patches of their image. Queries and keys are normed, and then one half of a
head turns with the column of a patch, the other with its row. A feature is the mean of m x m
neighboring patches. Letters in array shapes are those of `qwen_vision`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpu_rl.models import layers
from tpu_rl.models.config import (
    BOUNDS,
    VISION_MATRICES,
    DecoderConfig,
    Gemma4VisionConfig,
)
from tpu_rl.models.layers import ACTIVATIONS, RopeConfig, TokenIndex
from tpu_rl.models.qwen_vision import AXES, attend, grid_of, padded, segments
from tpu_rl.train.sharding import constrain
from tpu_rl.types import Array, Params

Angles = list[tuple[Array, Array]]
"""Cosines and sines [1, T, head / 4] of columns, and of rows."""


def weight_names(vision: Gemma4VisionConfig) -> tuple[list[str], list[str], list[str]]:
    """Return the names of weights outside of layers and in a layer; and none, as DeepStack has."""
    top = ["vision_pixels", "vision_axis_positions"]
    if vision.is_standardized:
        top += ["vision_feature_bias", "vision_feature_gain"]
    layer = [
        *("vision_attention_norm", "vision_query", "vision_key", "vision_value"),
        *("vision_query_norm", "vision_key_norm", "vision_output", "vision_attention_post_norm"),
        *("vision_mlp_norm", "vision_gate", "vision_up", "vision_down", "vision_mlp_post_norm"),
    ]
    if vision.is_clipped:
        layer += [matrix + bound for matrix in VISION_MATRICES for bound in BOUNDS]
    return [*top, "projector_matrix"], layer, []


def features(config: DecoderConfig, params: Params, pieces: Array) -> tuple[Array, None]:
    """Compute the features [I, D] of pieces [I, 3 + m m p p C]; there are none of DeepStack."""
    vision = config.vision
    assert isinstance(vision, Gemma4VisionConfig)
    dtype = jnp.dtype(config.dtype)
    top = params["vision"]
    side = vision.merge_size
    count = len(pieces)
    pieces = padded(config, pieces, side**2)
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
    index = segments(jnp.repeat(jnp.cumsum(grid.number == 0), side**2))

    def apply_layer(x: Array, weights: Params) -> tuple[Array, None]:
        branch = _norm(vision, x, weights["vision_attention_norm"])
        branch = _attention(config, vision, weights, branch, angles, index)
        x = x + _norm(vision, branch, weights["vision_attention_post_norm"])
        branch = _norm(vision, x, weights["vision_mlp_norm"])
        gate = ACTIVATIONS[vision.activation](_linear(weights, branch, "vision_gate"))
        branch = gate * _linear(weights, branch, "vision_up")
        branch = _linear(weights, branch, "vision_down")
        return x + _norm(vision, branch, weights["vision_mlp_post_norm"]), None

    if config.remat != "none":
        apply_layer = jax.checkpoint(apply_layer)
    x, _ = jax.lax.scan(apply_layer, x, params["vision_layers"]["layer_0"])

    pooled = x.reshape(-1, side**2, vision.hidden_size)[:count].astype(jnp.float32).mean(1)
    pooled = pooled * vision.hidden_size**0.5
    if vision.is_standardized:
        bias, gain = (
            jax.lax.stop_gradient(top[name].astype(jnp.float32))[None]
            for name in ("vision_feature_bias", "vision_feature_gain")
        )
        pooled = (pooled - bias) * gain
    normed = _norm(vision, pooled.astype(dtype))
    return jnp.einsum("ie,de->id", normed, top["projector_matrix"].astype(dtype)), None


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
        return _linear(weights, x, name).reshape(*x.shape[:2], -1, vision.head_dim)

    query, key = (
        _turned(_norm(vision, heads(name), weights[f"{name}_norm"]), angles)
        for name in ("vision_query", "vision_key")
    )
    value = _norm(vision, heads("vision_value"))
    attended = attend(config, query, key, value, index, 1.0)
    return _linear(weights, attended.reshape(*x.shape[:2], -1), "vision_output")


def _turned(x: Array, angles: Angles) -> Array:
    """Return x [1, T, H, head] with each half rotated by its angles."""
    halves = jnp.split(x, 2, axis=-1)
    rotated = [layers.apply_rope(half, turn) for half, turn in zip(halves, angles, strict=True)]
    return jnp.concatenate(rotated, axis=-1)


def _linear(weights: Params, x: Array, name: str) -> Array:
    """Return W x for x [..., inputs], with inputs and outputs clipped if there are bounds."""

    def clipped(x: Array, kind: str) -> Array:
        if f"{name}_{kind}_min" not in weights:
            return x
        least, most = (
            jax.lax.stop_gradient(weights[f"{name}_{kind}_{end}"]).astype(x.dtype)
            for end in ("min", "max")
        )
        return jnp.clip(x, least, most)

    product = jnp.einsum("...d,ed->...e", clipped(x, "input"), weights[name].astype(x.dtype))
    return clipped(product, "output")


def _norm(vision: Gemma4VisionConfig, x: Array, gain: Array | None = None) -> Array:
    """Return the RMS norm of x over its last axis, times a gain if there is one."""
    gain = jnp.ones(x.shape[-1]) if gain is None else gain
    return layers.rms_norm(x, gain, vision.eps, unit_offset=False)
