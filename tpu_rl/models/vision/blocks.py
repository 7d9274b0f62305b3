"""The parts of towers: projections, norms, and the attention of patches to those of their image."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tpu_rl.models import layers
from tpu_rl.models.attention import flash
from tpu_rl.models.attention.flash_kernels import LANES, FlashConfig
from tpu_rl.models.config import DecoderConfig
from tpu_rl.models.layers import ActivationAxes, TokenIndex
from tpu_rl.types import Array, Params

AXES = ActivationAxes("images", "rows")
"""Logical axes of patches [1, T, ...] of images of any size: devices share the patches as they
share packed rows."""


def linear(weights: Params, x: Array, name: str) -> Array:
    """Return W x + b for x [..., inputs], without b if there is none.

    Inputs and outputs are clipped if the matrix has bounds (`config.BOUNDS`).
    """

    def clipped(x: Array, kind: str) -> Array:
        if f"{name}_{kind}_min" not in weights:
            return x
        least, most = (
            jax.lax.stop_gradient(weights[f"{name}_{kind}_{end}"]).astype(x.dtype)
            for end in ("min", "max")
        )
        return jnp.clip(x, least, most)

    product = jnp.einsum("...d,ed->...e", clipped(x, "input"), weights[name].astype(x.dtype))
    if f"{name}_bias" in weights:
        product += jnp.broadcast_to(weights[f"{name}_bias"].astype(x.dtype), product.shape)
    return clipped(product, "output")


def norm(x: Array, weights: Params, name: str, eps: float) -> Array:
    """Return the norm of x over its last axis: a layer norm if it has a bias, else an RMS norm."""
    if f"{name}_bias" not in weights:
        return layers.rms_norm(x, weights[name], eps, unit_offset=False)
    wide = x.astype(jnp.float32)
    centered = wide - wide.mean(axis=-1, keepdims=True)
    scaled = centered * jax.lax.rsqrt(jnp.square(centered).mean(axis=-1, keepdims=True) + eps)
    gain, bias = (
        jnp.broadcast_to(weights[leaf].astype(jnp.float32), x.shape)
        for leaf in (name, f"{name}_bias")
    )
    return (scaled * gain + bias).astype(x.dtype)


def scan_layers(
    config: DecoderConfig, apply_layer: Callable[[Array, Any], Array], x: Array, stack: Any
) -> Array:
    """Apply layers to x one after the other, each with its part of the stacked weights.

    The backward pass recomputes them, unless `DecoderConfig.remat` is "none".
    """

    def body(x: Array, part: Any) -> tuple[Array, None]:
        return apply_layer(x, part), None

    x, _ = jax.lax.scan(body if config.remat == "none" else jax.checkpoint(body), x, stack)
    return x


def padded(config: DecoderConfig, pieces: Array, unit: int, multiple: int = 1) -> Array:
    """Return pieces of `unit` patches each with others of zeros, which are images of their own: a
    multiple of `multiple`, and whole blocks of the flash kernel if there is one."""
    if config.attention.kernel in ("tpu", "interpreted"):
        multiple = math.lcm(multiple, LANES // math.gcd(LANES, unit))
    return jnp.pad(pieces, ((0, -len(pieces) % multiple), (0, 0)))


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
