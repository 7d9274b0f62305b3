"""Towers that read squares of pixels: LLaVA (arXiv 2304.08485) with the tower of CLIP (2103.00020)
or SigLIP (2303.15343), Gemma 3 (2503.19786), Idefics3 and SmolVLM (2408.12637 and 2504.05299) and
InternVL3 (2504.10479).

Letters in array shapes: I pieces, P patches, E the tower's width, D that of the text.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from tpu_rl.models import layers
from tpu_rl.models.attention import flash
from tpu_rl.models.attention.flash_kernels import LANES, FlashConfig
from tpu_rl.models.config import DecoderConfig
from tpu_rl.models.layers import ACTIVATIONS, ActivationAxes, TokenIndex
from tpu_rl.models.vision import blocks
from tpu_rl.models.vision.config import LAYERS, TOP, SquareVisionConfig
from tpu_rl.models.vision.features import Features
from tpu_rl.train.sharding import constrain
from tpu_rl.types import Array, Params

AXES = ActivationAxes("rows", None)
"""Logical axes of patches [I, P, ...]: an image is on one device, as a packed row is."""
PROJECTOR_EPS = 1e-5
"""The epsilon of InternVL's norm of merged states."""


def features(config: DecoderConfig, params: Params, images: Array) -> Features:
    """Compute the features [I P, D] of images [I, C, H, W], P for each image."""
    vision = config.vision
    assert isinstance(vision, SquareVisionConfig)
    dtype = jnp.dtype(config.dtype)
    weights = params[TOP]
    top = {name: leaf.astype(dtype) for name, leaf in weights.items()}
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
        x = blocks.norm(x, weights, "vision_first_norm", vision.eps)
    # Layers behind the one whose states are the features stay in the params, so that a directory
    # is written as it was read.
    read = jax.tree.map(lambda leaf: leaf[: vision.num_read_layers], params[LAYERS]["layer_0"])
    x = blocks.scan_layers(config, functools.partial(_layer, config, vision), x, read)
    if vision.has_last_norm:
        x = blocks.norm(x, weights, "vision_last_norm", vision.eps)
    if not vision.keeps_first:
        x = x[:, 1:]
    return Features(_projected(vision, weights, x).reshape(-1, config.hidden_size))


def _projected(vision: SquareVisionConfig, weights: Params, x: Array) -> Array:
    """Return features [I, P', D] of states x [I, P, E].

    The mean of a square of patches, or all of its states side by side, becomes one feature.
    LLaVA: W_2 gelu(W_1 x + b_1) + b_2. Gemma 3: W norm(mean of a square). Idefics3: W of all states
    of a square, row by row. InternVL: W_2 gelu(W_1 norm(these) + b_1) + b_2.
    """
    activation = ACTIVATIONS[vision.projector_activation]
    if vision.projector == "mlp":
        inner = activation(blocks.linear(weights, x, "projector_in"))
        return blocks.linear(weights, inner, "projector_out")
    side = math.isqrt(x.shape[1]) // vision.merge
    squares = x.reshape(len(x), side, vision.merge, side, vision.merge, vision.hidden_size)
    if vision.projector == "pooled":
        merged = squares.mean((2, 4)).reshape(len(x), side**2, -1)
        gain = weights["projector_pooled_norm"]
        merged = layers.rms_norm(merged, gain, vision.eps, unit_offset=True)
    else:
        merged = squares.swapaxes(2, 3).reshape(len(x), side**2, -1)
    if vision.projector == "shuffled_mlp":
        normed = blocks.norm(merged, weights, "projector_merged_norm", PROJECTOR_EPS)
        inner = activation(blocks.linear(weights, normed, "projector_merge"))
        return blocks.linear(weights, inner, "projector_read")
    return blocks.linear(weights, merged, "projector_matrix")


def _layer(config: DecoderConfig, vision: SquareVisionConfig, x: Array, weights: Params) -> Array:
    """Apply a layer of the tower to x [I, P, E]: attention of all patches to all, and an MLP."""

    def gained(branch: Array, name: str) -> Array:
        if not vision.has_gains:
            return branch
        return branch * weights[name].astype(x.dtype)[None, None]

    linear = functools.partial(blocks.linear, weights)
    normed = blocks.norm(x, weights, "vision_attention_norm", vision.eps)
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
    normed = blocks.norm(x, weights, "vision_mlp_norm", vision.eps)
    branch = linear(ACTIVATIONS[vision.activation](linear(normed, "vision_up")), "vision_down")
    return x + gained(branch, "vision_mlp_gain")


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
