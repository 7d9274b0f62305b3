"""The towers of Qwen2-VL (arXiv 2409.12191), Qwen2.5-VL (2502.13923) and Qwen3-VL (2511.21631),
which read images of any size, and the rotary positions of their features.

A piece (`tokenizers.images`) has the m x m neighboring patches that become one feature. It is a row
[3 + m m C p p] of numbers: the feature's number in its image, the rows and the columns of the
image's grid of features, and the pixels of the patches. The number 0 begins an image. So the table
of all pieces says by itself which patches attend to each other, and no image is padded.

Letters in array shapes: I pieces and so features, T = I m m patches, E the tower's width, D that of
the text.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpu_rl.models import layers
from tpu_rl.models.attention import flash
from tpu_rl.models.attention.flash_kernels import LANES, FlashConfig
from tpu_rl.models.config import DecoderConfig, QwenVisionConfig
from tpu_rl.models.layers import ACTIVATIONS, ActivationAxes, RopeConfig, TokenIndex
from tpu_rl.train.sharding import constrain
from tpu_rl.types import Array, Params

AXES = ActivationAxes("images", "rows")
"""Logical axes of patches [1, T, ...]: devices share the patches as they share packed rows."""

MERGERS = "vision_mergers"
"""The part of the params with the projectors of the layers that DeepStack reads."""

EPS = 1e-6
"""The epsilon of all norms of these towers."""


def weight_names(vision: QwenVisionConfig) -> tuple[list[str], list[str], list[str]]:
    """Return the names of weights outside of layers, in a layer, and in one of `MERGERS`."""

    def biased(*names: str) -> list[str]:
        return [form for name in names for form in (name, f"{name}_bias")]

    def norm(name: str) -> list[str]:
        return [name] if vision.has_rms_norms else biased(name)

    top = biased("vision_frames") if vision.has_patch_bias else ["vision_frames"]
    top += ["vision_position"] if vision.position_side else []
    top += norm("projector_norm") + biased("projector_merge", "projector_read")
    gate = biased("vision_gate") if vision.is_gated else []
    layer = [
        *norm("vision_attention_norm"),
        *biased("vision_query", "vision_key", "vision_value", "vision_output"),
        *norm("vision_mlp_norm"),
        *gate,
        *biased("vision_up", "vision_down"),
    ]
    deep = ("projector_merged_norm", "projector_merge", "projector_read")
    return top, layer, biased(*deep) if vision.deep_layers else []


class Grid(NamedTuple):
    """The places of features [I] in their images. All int32."""

    number: Array
    rows: Array
    columns: Array

    @property
    def row(self) -> Array:
        return self.number // jnp.maximum(self.columns, 1)

    @property
    def column(self) -> Array:
        return self.number % jnp.maximum(self.columns, 1)

    @property
    def later(self) -> Array:
        """The number of later features of the same image."""
        return self.rows * self.columns - 1 - self.number

    @property
    def advance(self) -> Array:
        """The number of positions from each token of an image to the next token: 0 inside, and
        after the last one the longer side, so that all features have earlier positions."""
        is_last = self.number == self.rows * self.columns - 1
        return jnp.where(is_last, jnp.maximum(self.rows, self.columns), 0)


def grid_of(pieces: Any) -> Grid:
    """Return the grid of pieces [..., 3 + ...]."""
    return Grid(*(pieces[..., i].astype(np.int32) for i in range(3)))


def features(config: DecoderConfig, params: Params, pieces: Array) -> tuple[Array, Array | None]:
    """Compute the features [I, D] of pieces [I, 3 + m m C p p], and those of DeepStack [L, I, D].

    Features of DeepStack (arXiv 2406.04334) are added to the first layers of the text; None: there
    are none.
    """
    vision = config.vision
    assert isinstance(vision, QwenVisionConfig)
    dtype = jnp.dtype(config.dtype)
    top = params["vision"]
    unit = vision.merge_size**2
    count = len(pieces)
    pieces = padded(config, pieces, unit, (vision.window or 1) ** 2)
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
    x = constrain(x[None], (*AXES, None))
    angles = _angles(vision, row, column)
    of_images, of_windows = (segments(jnp.repeat(ids, unit)) for ids in (image, window))

    def apply_layer(x: Array, step: tuple[Params, Array]) -> tuple[Array, None]:
        weights, is_full = step

        def attend_to_image(x: Array) -> Array:
            return _attention(config, vision, weights, x, angles, of_images)

        def attend_to_window(x: Array) -> Array:
            return _window_attention(vision, weights, x, angles, of_windows)

        normed = _norm(x, weights, "vision_attention_norm")
        if vision.window:
            x = x + jax.lax.cond(is_full, attend_to_image, attend_to_window, normed)
        else:
            x = x + attend_to_image(normed)
        return x + _mlp(vision, weights, _norm(x, weights, "vision_mlp_norm")), None

    if config.remat != "none":
        apply_layer = jax.checkpoint(apply_layer)
    is_full = jnp.asarray(np.isin(np.arange(vision.num_layers), vision.full_layers))
    stack = (params["vision_layers"]["layer_0"], is_full)

    def in_order(features: Array) -> Array:
        return (features if order is None else features[jnp.argsort(order)])[:count]

    deep = []
    ends = [layer + 1 for layer in vision.deep_layers]
    for start, end in itertools.pairwise([0, *ends, vision.num_layers]):
        part = jax.tree.map(lambda leaf, start=start, end=end: leaf[start:end], stack)
        x, _ = jax.lax.scan(apply_layer, x, part)
        if len(deep) < len(ends):
            index = len(deep)
            merger = jax.tree.map(lambda leaf, index=index: leaf[index], params[MERGERS]["layer_0"])
            merged = x.reshape(-1, unit * vision.hidden_size)
            merged = _norm(merged, merger, "projector_merged_norm")
            deep.append(in_order(_project(merger, merged)))
    # The projector: W_2 gelu(W_1 [x_1 .. x_mm] + b_1) + b_2 of the normed patches of a piece.
    normed = _norm(x, top, "projector_norm")
    read = in_order(_project(top, normed.reshape(-1, unit * vision.hidden_size)))
    return read, jnp.stack(deep) if deep else None


def padded(config: DecoderConfig, pieces: Array, unit: int, multiple: int = 1) -> Array:
    """Return pieces of `unit` patches each with others of zeros, which are images of their own: a
    multiple of `multiple`, and whole blocks of the flash kernel if there is one."""
    if config.attention.kernel in ("tpu", "interpreted"):
        multiple = math.lcm(multiple, LANES // math.gcd(LANES, unit))
    return jnp.pad(pieces, ((0, -len(pieces) % multiple), (0, 0)))


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


def segments(ids: Array) -> tuple[TokenIndex, TokenIndex]:
    """Return the indices of queries and keys [1, T] with which all patches of an image, or of a
    window, attend to each other. `ids` [T] are equal in a segment, whose patches are neighbors.

    By `layers.can_attend` a query sees keys that are not later and whose subtree it is in: queries
    are at the end of their segment, which is where the subtrees of its keys end.
    """
    segments = ids[None]
    ends = layers.visible_until(segments, jnp.zeros_like(segments))
    places = jnp.arange(ids.size)[None]
    return (
        TokenIndex(ends - 1, places, segments, ends),
        TokenIndex(places, places, segments, ends),
    )


def _linear(weights: Params, x: Array, name: str) -> Array:
    """Return W x + b for x [..., inputs]."""
    product = jnp.einsum("...d,ed->...e", x, weights[name].astype(x.dtype))
    return product + jnp.broadcast_to(weights[f"{name}_bias"].astype(x.dtype), product.shape)


def _heads(
    vision: QwenVisionConfig, weights: Params, x: Array, angles: tuple[Array, Array]
) -> tuple[Array, Array, Array]:
    """Return queries, keys and values [1, T, H, head] of normed patches."""
    query, key, value = (
        _linear(weights, x, name).reshape(*x.shape[:2], vision.num_heads, -1)
        for name in ("vision_query", "vision_key", "vision_value")
    )
    return layers.apply_rope(query, angles), layers.apply_rope(key, angles), value


def _attention(
    config: DecoderConfig,
    vision: QwenVisionConfig,
    weights: Params,
    x: Array,
    angles: tuple[Array, Array],
    index: tuple[TokenIndex, TokenIndex],
) -> Array:
    """Return the attention branch of normed patches x [1, T, E], each of which sees its image."""
    query, key, value = _heads(vision, weights, x, angles)
    attended = attend(config, query, key, value, index, query.shape[-1] ** -0.5)
    return _linear(weights, attended.reshape(x.shape), "vision_output")


def attend(
    config: DecoderConfig,
    query: Array,
    key: Array,
    value: Array,
    index: tuple[TokenIndex, TokenIndex],
    scale: float,
) -> Array:
    """Return the attention [1, T, H, head] of patches to those of their segment.

    Keys and values are [1, T, K, head], and `index` is that of `segments`.
    """
    key, value = (part.swapaxes(1, 2) for part in (key, value))
    kernel = config.attention.kernel
    if kernel in ("tpu", "interpreted") and flash.is_supported(query.shape[1]):
        flash_config = FlashConfig(scale=scale, interpret=kernel == "interpreted")
        return flash.flash_attention(query, key, value, *index, flash_config, AXES)
    chunks = layers.score_chunks(query, key.shape[2], None, 4 * query.shape[2])
    return layers.attention(query, key, value, *index, scale=scale, chunks=chunks)


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
        own = blocks(part)
        zeros = jnp.zeros_like(own[:1])
        before = jnp.concatenate([zeros, own[:-1]])
        after = jnp.concatenate([own[1:], zeros])
        return jnp.concatenate([before, own, after], axis=1)

    queries, keys = index
    attended = layers.dense_attention(
        blocks(query),
        with_neighbors(key).swapaxes(1, 2),
        with_neighbors(value).swapaxes(1, 2),
        jax.tree.map(blocks, queries),
        jax.tree.map(with_neighbors, keys),
        scale=query.shape[-1] ** -0.5,
    )
    return _linear(weights, attended.reshape(x.shape), "vision_output")


def _mlp(vision: QwenVisionConfig, weights: Params, x: Array) -> Array:
    activation = ACTIVATIONS[vision.activation]
    up = _linear(weights, x, "vision_up")
    inner = activation(_linear(weights, x, "vision_gate")) * up if vision.is_gated else None
    return _linear(weights, activation(up) if inner is None else inner, "vision_down")


def _project(weights: Params, x: Array) -> Array:
    """Return the features [I, D] of merged patches [I, m m E]."""
    inner = ACTIVATIONS["gelu_exact"](_linear(weights, x, "projector_merge"))
    return _linear(weights, inner, "projector_read")


def _norm(x: Array, weights: Params, name: str) -> Array:
    """Return the norm of x over its last axis, with or without mean and bias."""
    if f"{name}_bias" not in weights:
        return layers.rms_norm(x, weights[name], EPS, unit_offset=False)
    wide = x.astype(jnp.float32)
    centered = wide - wide.mean(axis=-1, keepdims=True)
    scaled = centered * jax.lax.rsqrt(jnp.square(centered).mean(axis=-1, keepdims=True) + EPS)
    gain, bias = (
        jnp.broadcast_to(weights[leaf].astype(jnp.float32), x.shape)
        for leaf in (name, f"{name}_bias")
    )
    return (scaled * gain + bias).astype(x.dtype)
