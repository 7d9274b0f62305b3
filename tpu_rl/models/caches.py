"""Empty caches of a decoder: a place for each token, or, in layers that see a window, a ring."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from tpu_rl.models import layers
from tpu_rl.models.architecture import DecoderConfig


def init_cache(config: DecoderConfig, rows: int, length: int) -> Any:
    """{"lengths": [B], kind: {"k", "v": [layers of that kind, B, K, S, E]}} for B `rows` of S = `length` tokens, in
    sliding layers of at most `layers.ring` of them; of integers also "k_scale" and "v_scale" [layers, B, K, S]. With
    `AttentionConfig.transposed_keys` there is `layers.TRANSPOSED` [layers, B, K, E, S] in place of "k".

    A committed token's place is its position, in a ring modulo the ring's size. All of `extend`'s tokens are written
    behind the committed ones, the next call overwrites those that were only looked at, and a token beyond the cache's
    end is dropped and seen by nobody: `length` must count tokens that will only be looked at, too.
    """
    attention = config.attention
    cache: dict[str, Any] = {"lengths": jnp.zeros(rows, jnp.int32)}
    for kind in sorted(set(config.kinds)):
        places = min(length, ring_of(config, kind) or length)
        shape = (config.kinds.count(kind), rows, attention.kv_heads, places, attention.head_dim)
        shapes = {"k": shape, "v": shape}
        if attention.transposed_keys:
            shapes = {layers.TRANSPOSED: (*shape[:-2], shape[-1], shape[-2]), "v": shape}
        cache[kind] = {name: jnp.zeros(of, config.cache_dtype or config.dtype) for name, of in shapes.items()}
        if config.cache_dtype is not None:
            cache[kind] |= {f"{name}_scale": jnp.zeros(shape[:-1], jnp.float32) for name in ("k", "v")}
    return cache


def ring_of(config: DecoderConfig, kind: str) -> int | None:
    """Places of the ring of a kind of layers; None where each token has its own."""
    window = config.attention.window
    return layers.ring(window) if kind == "sliding" and window is not None else None
