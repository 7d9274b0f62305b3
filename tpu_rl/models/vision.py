"""The part of a vision-language model that reads images: a tower and a projector (LLaVA, arXiv
2304.08485, with the tower of CLIP, arXiv 2103.00020, or SigLIP, arXiv 2303.15343; Gemma 3, arXiv
2503.19786; Idefics3 and SmolVLM, arXiv 2408.12637 and 2504.05299; InternVL3, arXiv 2504.10479).

An image is a square of pixels. The tower makes a vector of each patch, and the projector makes it
as wide as the residual stream of the text. These are the image's features, one for each token that
stands for the image.

**Tokens of images.** A text refers to features by token ids from `VocabConfig.size` on: id V + f is
feature f of the images that come with the text. So rows with images are rows of token ids like all
others: they share prompts, and they are packed, cached and branched alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tpu_rl.models import gemma4_vision, layers, qwen_vision
from tpu_rl.models.attention import flash
from tpu_rl.models.attention.flash_kernels import LANES, FlashConfig
from tpu_rl.models.config import (
    DecoderConfig,
    Gemma4VisionConfig,
    QwenVisionConfig,
    TableVisionConfig,
    VisionConfig,
)
from tpu_rl.models.layers import ACTIVATIONS, ActivationAxes, TokenIndex
from tpu_rl.train.sharding import constrain
from tpu_rl.types import Array, Params

TABLE_TOWERS: dict[type, Any] = {
    QwenVisionConfig: qwen_vision,
    Gemma4VisionConfig: gemma4_vision,
}
"""Configuration of a tower that reads images of any size -> its module."""

TOP_WEIGHTS = (
    "vision_class",
    "vision_patch",
    "vision_patch_bias",
    "vision_position",
    "vision_first_norm",
    "vision_first_norm_bias",
    "vision_last_norm",
    "vision_last_norm_bias",
    "projector_in",
    "projector_in_bias",
    "projector_out",
    "projector_out_bias",
    "projector_pooled_norm",
    "projector_matrix",
    "projector_merged_norm",
    "projector_merged_norm_bias",
    "projector_merge",
    "projector_merge_bias",
    "projector_read",
    "projector_read_bias",
)
LAYER_WEIGHTS = (
    "vision_attention_norm",
    "vision_attention_norm_bias",
    "vision_query",
    "vision_query_bias",
    "vision_key",
    "vision_key_bias",
    "vision_value",
    "vision_value_bias",
    "vision_output",
    "vision_output_bias",
    "vision_attention_gain",
    "vision_mlp_norm",
    "vision_mlp_norm_bias",
    "vision_up",
    "vision_up_bias",
    "vision_down",
    "vision_down_bias",
    "vision_mlp_gain",
)
AXES = ActivationAxes("rows", None)
"""Logical axes of patches [I, P, ...]: an image is on one device, as a packed row is."""
PROJECTOR_EPS = 1e-5
"""The epsilon of InternVL's norm of merged states."""
TOP = "vision"
LAYERS = "vision_layers"
"""The two parts of the params tree. The leaves of the second are stacked over layers."""


def param_shapes(config: DecoderConfig) -> dict[str, Any]:
    """Return the vision parts of a model's params with shapes and dtypes in place of arrays."""
    vision = config.vision
    assert vision is not None

    def leaf(name: str, *stack: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*stack, *config.shape(name)), config.stored_dtype(name))

    if isinstance(vision, TableVisionConfig):
        top, layer, merger = TABLE_TOWERS[type(vision)].weight_names(vision)
        shapes = {
            TOP: {name: leaf(name) for name in top},
            LAYERS: {"layer_0": {name: leaf(name, vision.num_layers) for name in layer}},
        }
        if not merger:
            return shapes
        mergers = {name: leaf(name, len(vision.deep_layers)) for name in merger}
        return shapes | {qwen_vision.MERGERS: {"layer_0": mergers}}
    return {
        TOP: {name: leaf(name) for name in TOP_WEIGHTS if name not in vision.absent},
        LAYERS: {
            "layer_0": {
                name: leaf(name, vision.num_layers)
                for name in LAYER_WEIGHTS
                if name not in vision.absent
            }
        },
    }


class Features(NamedTuple):
    """The features of images."""

    states: Array
    """[F, D]: what stands in the text."""
    deep: Array | None = None
    """[L, F, D]: what the first L layers of the text add (Qwen3-VL)."""
    grid: qwen_vision.Grid | None = None
    """The places of features in their images, if these have any size."""


def features(config: DecoderConfig, params: Params, images: Array) -> Features:
    """Compute the features of pieces of images [I, ...] (see `tokenizers.images`).

    The pixels are those of the image processor: scaled and normalized.
    """
    vision = config.vision
    if isinstance(vision, TableVisionConfig):
        states, deep = TABLE_TOWERS[type(vision)].features(config, params, images)
        return Features(states, deep, qwen_vision.grid_of(images))
    assert vision is not None
    return Features(_clip_features(config, vision, params, images))


def _clip_features(
    config: DecoderConfig, vision: VisionConfig, params: Params, images: Array
) -> Array:
    """Compute the features [I P, D] of images [I, C, H, W], P for each image."""
    dtype = jnp.dtype(config.dtype)
    top = {name: leaf.astype(dtype) for name, leaf in params[TOP].items()}
    # Patch embedding: x_p = W pixels_p, a convolution whose stride is its width.
    grid = vision.image_size // vision.patch_size
    pixels = images.astype(dtype).reshape(
        len(images), vision.channels, grid, vision.patch_size, grid, vision.patch_size
    )
    x = jnp.einsum("icgphq,ecpq->ighe", pixels, top["vision_patch"])
    x = x.reshape(len(images), grid * grid, vision.hidden_size)
    if vision.has_patch_bias:
        x = x + top["vision_patch_bias"][None, None]
    if vision.has_class:
        first = jnp.broadcast_to(top["vision_class"], (len(images), 1, vision.hidden_size))
        x = jnp.concatenate([first, x], axis=1)
    x = constrain(x + top["vision_position"][None], (*AXES, None))
    if vision.has_first_norm:
        x = _layer_norm(vision, x, params[TOP], "vision_first_norm")

    def apply_layer(x: Array, weights: Params) -> tuple[Array, None]:
        return _layer(config, vision, weights, x), None

    if config.remat != "none":
        apply_layer = jax.checkpoint(apply_layer)
    # Layers behind the one whose states are the features stay in the params, so that a directory
    # is written as it was read.
    read = jax.tree.map(lambda leaf: leaf[: vision.num_read_layers], params[LAYERS]["layer_0"])
    x, _ = jax.lax.scan(apply_layer, x, read)
    if vision.has_last_norm:
        x = _layer_norm(vision, x, params[TOP], "vision_last_norm")
    if not vision.keeps_first:
        x = x[:, 1:]
    if vision.projector != "mlp":
        return _merged(vision, params[TOP], x).reshape(-1, config.hidden_size)
    # The projector: W_2 gelu(W_1 x + b_1) + b_2.
    for name in ("projector_in", "projector_out"):
        x = jnp.einsum("ipd,ed->ipe", x, top[name])
        if vision.projector_bias:
            x = x + top[f"{name}_bias"][None, None]
        if name == "projector_in":
            x = ACTIVATIONS[vision.projector_activation](x)
    return x.reshape(-1, config.hidden_size)


def _merged(vision: VisionConfig, weights: Params, x: Array) -> Array:
    """Return features [I, P, D] of states [I, N, E]: a matrix W of each square of patches.

    Gemma 3 takes W norm(mean of the square). Idefics3 takes W of all states of the square, row by
    row, and InternVL W_2 gelu(W_1 norm(these) + b_1) + b_2.
    """
    side = math.isqrt(x.shape[1]) // vision.merge
    squares = x.reshape(len(x), side, vision.merge, side, vision.merge, vision.hidden_size)
    if vision.projector == "pooled":
        merged = squares.mean((2, 4)).reshape(len(x), side**2, -1)
        gain = weights["projector_pooled_norm"]
        merged = layers.rms_norm(merged, gain, vision.eps, unit_offset=True)
    else:
        merged = squares.swapaxes(2, 3).reshape(len(x), side**2, -1)
    if vision.projector == "shuffled_mlp":
        normed = _layer_norm(vision, merged, weights, "projector_merged_norm", PROJECTOR_EPS)
        inner = ACTIVATIONS[vision.projector_activation](
            _linear(weights, normed, "projector_merge")
        )
        return _linear(weights, inner, "projector_read")
    return jnp.einsum("ipe,de->ipd", merged, weights["projector_matrix"].astype(x.dtype))


def place_features(
    config: DecoderConfig, x: Array, tokens: Array, features: Features | None
) -> Array:
    """Put features into the embedded tokens x [B, T, D] where the ids [B, T] refer to them.

    An id without a feature gives NaN, which no training step accepts.
    """
    index = tokens - config.vocab.size
    if features is None:
        placed = jnp.full_like(x, jnp.nan)
    else:
        placed = jnp.take(features.states.astype(x.dtype), jnp.maximum(index, 0), axis=0)
    return jnp.where((index >= 0)[..., None], placed, x)


def add_deep_features(
    config: DecoderConfig, x: Array, tokens: Array, features: Features, layer: Array | int
) -> Array:
    """Add what a layer has of images to its output x [B, T, D], where ids [B, T] are features."""
    assert features.deep is not None
    count = len(features.deep)
    index = tokens - config.vocab.size

    def added(deep: Array) -> Array:
        of_layer = jax.lax.dynamic_index_in_dim(deep, jnp.minimum(layer, count - 1), keepdims=False)
        placed = jnp.take(of_layer.astype(x.dtype), jnp.maximum(index, 0), axis=0)
        return x + jnp.where((index >= 0)[..., None], placed, jnp.zeros_like(x))

    return jax.lax.cond(jnp.asarray(layer) < count, added, lambda _: x, features.deep)


def rotary_positions(
    config: DecoderConfig, tokens: Array, positions: Array, features: Features | None
) -> Array:
    """Return the positions of tokens in time, rows and columns [B, T, 3]; where no images are in
    the text or each token takes one, the positions [B, T] as they are.

    `positions` of features are all that of the first feature of their image.
    """
    if not config.rope.sections or features is None or features.grid is None:
        return positions
    grid = features.grid
    index = tokens - config.vocab.size
    places = jnp.stack([jnp.zeros_like(grid.row), grid.row, grid.column], axis=1)
    inside = jnp.where((index >= 0)[..., None], places[jnp.maximum(index, 0)], 0)
    return positions[..., None] + inside


def missing_positions(config: DecoderConfig, tokens: Array, features: Features | None) -> Array:
    """Return for each of the tokens [B, T] how many positions more than one it takes, which is
    negative inside of an image."""
    if features is None or features.grid is None:
        return jnp.zeros_like(tokens)
    index = tokens - config.vocab.size
    return jnp.where(index >= 0, features.grid.advance[jnp.maximum(index, 0)] - 1, 0)


def two_way(
    config: DecoderConfig, tokens: Array, queries: TokenIndex, features: Features | None
) -> TokenIndex | None:
    """Return the index of tokens [B, T] as queries, which see all of their own image; None if no
    layer sees images so (`VisionConfig.two_way`), or there are none.

    A query sees keys up to its own place. The tokens of an image follow one another, so they all
    see the image, and nothing else behind themselves, if they have the place of its last token. An
    image that is cut ends where its text does.
    """
    vision = config.vision
    if vision is None or not vision.is_two_way or features is None:
        return None
    place = tokens - config.vocab.size
    if features.grid is None:
        later = vision.features_per_piece - 1 - place % vision.features_per_piece
    else:
        later = features.grid.later[jnp.maximum(place, 0)]
    last = queries.index + later
    last = jnp.minimum(last, queries.visible_until - 1)
    return queries._replace(index=jnp.where(place >= 0, last, queries.index))


def _layer(
    config: DecoderConfig, vision: VisionConfig, weights: Mapping[str, Array], x: Array
) -> Array:
    """Apply a layer of the tower to x [I, P, E]: attention of all patches to all, and an MLP."""

    def gained(branch: Array, name: str) -> Array:
        if not vision.has_gains:
            return branch
        return branch * weights[name].astype(x.dtype)[None, None]

    linear = functools.partial(_linear, weights)
    normed = _layer_norm(vision, x, weights, "vision_attention_norm")
    heads = (*x.shape[:2], vision.num_heads, -1)
    query, key, value = (
        linear(normed, name).reshape(heads)
        for name in ("vision_query", "vision_key", "vision_value")
    )
    if config.attention.kernel in ("tpu", "interpreted"):
        attended = _flash_attention(config, query, key, value)
    else:
        scores = jnp.einsum("iphd,ikhd->ihpk", query, key, preferred_element_type=jnp.float32)
        shares = jax.nn.softmax(scores * query.shape[-1] ** -0.5, axis=-1).astype(x.dtype)
        attended = jnp.einsum("ihpk,ikhd->iphd", shares, value)
    x = x + gained(linear(attended.reshape(x.shape), "vision_output"), "vision_attention_gain")
    normed = _layer_norm(vision, x, weights, "vision_mlp_norm")
    branch = linear(ACTIVATIONS[vision.activation](linear(normed, "vision_up")), "vision_down")
    return x + gained(branch, "vision_mlp_gain")


def _linear(weights: Mapping[str, Array], x: Array, name: str) -> Array:
    """Return W x + b for x [I, P, inputs], without b if there is none."""
    product = jnp.einsum("ipd,ed->ipe", x, weights[name].astype(x.dtype))
    bias = weights.get(f"{name}_bias")
    return product if bias is None else product + bias.astype(x.dtype)[None, None]


def _flash_attention(config: DecoderConfig, query: Array, key: Array, value: Array) -> Array:
    """Return the attention [I, P, H, E] of all patches of an image to all, by the kernel of packed
    rows: the scores of Gemma 3's 4,096 patches would take 1 GiB an image.

    Patches are padded to whole blocks. The padding is a segment of its own.
    """
    count, length = query.shape[:2]
    missing = -length % LANES
    query, key, value = (
        jnp.pad(part, ((0, 0), (0, missing), (0, 0), (0, 0))) for part in (query, key, value)
    )
    places = jnp.broadcast_to(jnp.arange(length + missing), (count, length + missing))
    is_padding = places >= length
    ends = jnp.where(is_padding, length + missing, length)
    # A query at the end of its segment sees all of it.
    queries = TokenIndex(ends - 1, places, is_padding + 1, ends)
    keys = TokenIndex(places, places, is_padding + 1, ends)
    flash_config = FlashConfig(
        scale=query.shape[-1] ** -0.5, interpret=config.attention.kernel == "interpreted"
    )
    key, value = (part.swapaxes(1, 2) for part in (key, value))
    attended = flash.flash_attention(query, key, value, queries, keys, flash_config, AXES)
    return attended[:, :length]


def _layer_norm(
    vision: VisionConfig,
    x: Array,
    weights: Mapping[str, Array],
    name: str,
    eps: float | None = None,
) -> Array:
    """Return the layer norm of x [I, P, E], computed in float32. `eps` is the tower's if None."""
    wide = x.astype(jnp.float32)
    centered = wide - wide.mean(axis=-1, keepdims=True)
    scaled = centered * jax.lax.rsqrt(
        jnp.square(centered).mean(axis=-1, keepdims=True) + (vision.eps if eps is None else eps)
    )
    gain = weights[name][None, None]
    bias = weights[f"{name}_bias"][None, None]
    return (scaled * gain + bias).astype(x.dtype)
