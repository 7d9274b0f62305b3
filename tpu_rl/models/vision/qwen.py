"""The towers of Qwen2-VL (arXiv 2409.12191), Qwen2.5-VL (2502.13923) and Qwen3-VL (2511.21631),
which read images of any size.

A piece (`tokenizers.images`) has the m x m neighboring patches that become one feature. It is a row
[3 + m m C p p] of numbers: the feature's number in its image, the rows and the columns of the
image's grid of features, and the pixels of the patches. The number 0 begins an image. So the table
of all pieces says by itself which patches attend to each other, and no image is padded.

Letters in array shapes: I pieces and so features, T = I m m patches, E the tower's width, D that of
the text.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_rl.models import layers
from tpu_rl.models.config import DecoderConfig
from tpu_rl.models.layers import ACTIVATIONS, RopeConfig, TokenIndex
from tpu_rl.models.vision import blocks
from tpu_rl.models.vision.blocks import AXES, linear
from tpu_rl.models.vision.config import LAYERS, MERGERS, TOP, QwenVisionConfig
from tpu_rl.models.vision.features import Features, Grid, grid_of
from tpu_rl.train.sharding import constrain
from tpu_rl.types import Array, Params


def features(config: DecoderConfig, params: Params, pieces: Array) -> Features:
    """Compute the features [I, D] of pieces [I, 3 + m m C p p], and those of DeepStack [L, I, D],
    which are added to the first layers of the text (arXiv 2406.04334)."""
    vision = config.vision
    assert isinstance(vision, QwenVisionConfig)
    dtype = jnp.dtype(config.dtype)
    top = params[TOP]
    places = grid_of(pieces)
    unit = vision.merge_size**2
    count = len(pieces)
    pieces = blocks.padded(config, pieces, unit, (vision.window or 1) ** 2)
    grid = grid_of(pieces)
    image = jnp.cumsum(grid.number == 0)
    order = None
    window = image
    if vision.window:
        # Windows of w x w features stand together, so most attention is among neighbors.
        place = (grid.row // vision.window, grid.column // vision.window)
        order = jnp.lexsort((grid.number, place[1], place[0], image))
        pieces = pieces[order]
        image = image[order]
        grid, place = jax.tree.map(lambda field: field[order], (grid, place))
        is_new = [field[1:] != field[:-1] for field in (image, *place)]
        window = jnp.pad(jnp.cumsum(is_new[0] | is_new[1] | is_new[2]), (1, 0))

    x, angles = _embedded(vision, top, pieces, grid, dtype)
    of_images, of_windows = (blocks.segments(jnp.repeat(ids, unit)) for ids in (image, window))

    def apply_layer(x: Array, step: tuple[Params, Array]) -> Array:
        weights, is_full = step

        def attend_to_image(x: Array) -> Array:
            query, key, value = _heads(vision, weights, x, angles)
            scale = query.shape[-1] ** -0.5
            attended = blocks.attend(config, query, key, value, of_images, scale)
            return linear(weights, attended.reshape(x.shape), "vision_output")

        def attend_to_window(x: Array) -> Array:
            return _window_attention(vision, weights, x, angles, of_windows)

        normed = blocks.norm(x, weights, "vision_attention_norm", vision.eps)
        if vision.window:
            x = x + jax.lax.cond(is_full, attend_to_image, attend_to_window, normed)
        else:
            x = x + attend_to_image(normed)
        normed = blocks.norm(x, weights, "vision_mlp_norm", vision.eps)
        return x + _mlp(vision, weights, normed)

    is_full = jnp.asarray(np.isin(np.arange(vision.num_layers), vision.full_layers))
    stack = (params[LAYERS]["layer_0"], is_full)

    def projected(weights: Params, x: Array) -> Array:
        """Return W_2 gelu(W_1 [x_1 .. x_mm] + b_1) + b_2 of the patches x of each piece."""
        merged = x.reshape(-1, unit * vision.hidden_size)
        if "projector_merged_norm" in weights:
            merged = blocks.norm(merged, weights, "projector_merged_norm", vision.eps)
        inner = ACTIVATIONS["gelu_exact"](linear(weights, merged, "projector_merge"))
        read = linear(weights, inner, "projector_read")
        return (read if order is None else read[jnp.argsort(order)])[:count]

    # The layers up to each one that DeepStack reads, and then the rest.
    deep = []
    ends = [layer + 1 for layer in vision.deep_layers]
    for start, end in itertools.pairwise([0, *ends, vision.num_layers]):
        part = jax.tree.map(lambda leaf, start=start, end=end: leaf[start:end], stack)
        x = blocks.scan_layers(config, apply_layer, x, part)
        index = len(deep)
        if index < len(ends):
            merger = jax.tree.map(lambda leaf, index=index: leaf[index], params[MERGERS]["layer_0"])
            deep.append(projected(merger, x))
    states = projected(top, blocks.norm(x, top, "projector_norm", vision.eps))
    return Features(states, jnp.stack(deep) if deep else None, places)


def _embedded(
    vision: QwenVisionConfig, top: Params, pieces: Array, grid: Grid, dtype: Any
) -> tuple[Array, tuple[Array, Array]]:
    """Return the embedded patches [1, T, E] of pieces, and cosines and sines of their places."""
    unit = vision.merge_size**2
    # x = sum_t W_t patch + b: the frames of a picture are equal.
    patches = pieces[:, 3:].reshape(-1, vision.channels, vision.patch_size, vision.patch_size)
    weight = top["vision_frames"].sum(2).astype(dtype)
    x = jnp.einsum("tcpq,ecpq->te", patches.astype(dtype), weight)
    if vision.has_patch_bias:
        x = x + top["vision_frames_bias"].astype(dtype)[None]
    inside = jnp.tile(jnp.arange(unit), len(pieces))
    row = vision.merge_size * jnp.repeat(grid.row, unit) + inside // vision.merge_size
    column = vision.merge_size * jnp.repeat(grid.column, unit) + inside % vision.merge_size
    if vision.position_side:
        x = x + _positions(vision, top["vision_position"], row, column, grid).astype(dtype)
    return constrain(x[None], (*AXES, None)), _angles(vision, row, column)


def _positions(
    vision: QwenVisionConfig, table: Array, row: Array, column: Array, grid: Grid
) -> Array:
    """Return the position embeddings [T, E] of patches, which stretch the square table of S x S
    learned ones over each image: bilinear, and corners are on corners."""
    side = vision.position_side
    assert side is not None
    unit = vision.merge_size**2
    total = 0.0
    axes = []
    for place, size in ((row, grid.rows), (column, grid.columns)):
        last = jnp.maximum(jnp.repeat(size, unit) * vision.merge_size - 1, 1)
        source = place.astype(jnp.float32) * (side - 1) / last.astype(jnp.float32)
        low = jnp.floor(source)
        share = source - low
        taps = [jnp.clip(low.astype(jnp.int32) + i, 0, side - 1) for i in (0, 1)]
        axes.append(list(zip(taps, (1 - share, share), strict=True)))
    for row_tap, row_share in axes[0]:
        for column_tap, column_share in axes[1]:
            taken = jnp.take(table, row_tap * side + column_tap, axis=0)
            total = total + taken * (row_share * column_share)[:, None]
    return jnp.asarray(total)


def _angles(vision: QwenVisionConfig, row: Array, column: Array) -> tuple[Array, Array]:
    """Return cosines and sines [1, T, head / 2]: a half of the frequencies turns with the row of a
    patch, the other with its column."""
    head_dim = vision.hidden_size // vision.num_heads
    frequencies = layers.rope_frequencies(RopeConfig(vision.rope_theta), head_dim // 2)
    turns = [place.astype(jnp.float32)[:, None] * frequencies[None] for place in (row, column)]
    angles = jnp.concatenate(turns, axis=1)[None]
    return jnp.cos(angles), jnp.sin(angles)


def _heads(
    vision: QwenVisionConfig, weights: Params, x: Array, angles: tuple[Array, Array]
) -> tuple[Array, Array, Array]:
    """Return queries, keys and values [1, T, H, head] of normed patches."""
    query, key, value = (
        linear(weights, x, name).reshape(*x.shape[:2], vision.num_heads, -1)
        for name in ("vision_query", "vision_key", "vision_value")
    )
    return layers.apply_rope(query, angles), layers.apply_rope(key, angles), value


def _window_attention(
    vision: QwenVisionConfig,
    weights: Params,
    x: Array,
    angles: tuple[Array, Array],
    index: tuple[TokenIndex, TokenIndex],
) -> Array:
    """Return the attention branch of normed patches x [1, T, E], each of which sees its window.

    A window has at most as many patches as a block, so it is in two neighboring blocks at most:
    queries of a block see keys of three.
    """
    assert vision.window is not None
    size = (vision.window * vision.merge_size) ** 2
    query, key, value = _heads(vision, weights, x, angles)

    def blocks(part: Array) -> Array:
        """[1, T, ...] -> [T / size, size, ...]."""
        return part.reshape(-1, size, *part.shape[2:])

    def with_neighbors(part: Array) -> Array:
        """[1, T, ...] -> [T / size, 3 size, ...]; nothing sees the zeros beyond both ends."""
        middle = blocks(part)
        zeros = jnp.zeros_like(middle[:1])
        before = jnp.concatenate([zeros, middle[:-1]])
        after = jnp.concatenate([middle[1:], zeros])
        return jnp.concatenate([before, middle, after], axis=1)

    queries, keys = index
    attended = layers.dense_attention(
        blocks(query),
        with_neighbors(key).swapaxes(1, 2),
        with_neighbors(value).swapaxes(1, 2),
        jax.tree.map(blocks, queries),
        jax.tree.map(with_neighbors, keys),
        scale=query.shape[-1] ** -0.5,
    )
    return linear(weights, attended.reshape(x.shape), "vision_output")


def _mlp(vision: QwenVisionConfig, weights: Params, x: Array) -> Array:
    activation = ACTIVATIONS[vision.activation]
    up = linear(weights, x, "vision_up")
    inner = activation(linear(weights, x, "vision_gate")) * up if vision.is_gated else None
    return linear(weights, activation(up) if inner is None else inner, "vision_down")
