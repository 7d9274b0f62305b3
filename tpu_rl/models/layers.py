"""Functions that the layers of every decoder are made of: norms, rotary angles, visibility, attention.

Letters: B rows, T tokens that look (queries), S slots that are looked at (keys), H heads, K key-value heads,
G = H / K, D model width, E head width.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array

MASKED = -1e30
"""Score of what is not seen and logit of what is not a token: exp gives exactly 0, and gradients stay finite."""

ACTIVATIONS = {"silu": jax.nn.silu, "gelu": jax.nn.gelu, "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False)}


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one kind of layer."""

    theta: float = 10_000.0
    scaling: str = "default"
    """"default", "linear" (all frequencies divided by `factor`) or "llama3" (only the slow ones)."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192
    """llama3: context length, in tokens, before the model was stretched."""


class Cut(NamedTuple):
    """How devices share activations [B, T, ...]: the logical axes of their first two dimensions."""

    rows: str
    tokens: str | None


PACKED = Cut("rows", "tokens")
CACHED = Cut("slots", None)
"""In decoding each row lies on one device, and few tokens are new."""


def balanced_order(length: int, parts: int) -> np.ndarray:
    """Of the tokens of a row, [length], such that so many devices, which take equally long stretches of it, attend to
    equally many tokens before them: each has a stretch from the front and the one as far from the end.

    As they are where the row does not divide into twice as many stretches.
    """
    if length % (2 * parts):
        return np.arange(length, dtype=np.int32)
    stretches = np.arange(length, dtype=np.int32).reshape(2 * parts, -1)
    return np.stack([stretches[:parts], stretches[parts:][::-1]], axis=1).reshape(-1)


class Slots(NamedTuple):
    """What decides who sees whom, one entry a token. All [B, T] (or [B, S]) int32."""

    index: Array
    """Place in the row or in the cache: nothing sees what stands behind it."""
    positions: Array
    segment_ids: Array
    branch_ids: Array


def sees(query: Slots, key: Slots, window: int | None) -> Array:
    """Whether a query sees a key, bool, of slots that broadcast: the one rule for packed rows and for the cache.

    A token sees those of its own segment that do not stand behind it, are trunk (branch 0) or of its own branch, and
    lie less than `window` positions back. Padding is a segment like any other (0), so it sees at least itself.
    """
    seen = (query.segment_ids == key.segment_ids) & (key.index <= query.index)
    seen &= (key.branch_ids == 0) | (key.branch_ids == query.branch_ids)
    return seen if window is None else seen & (query.positions - key.positions < window)


def visible(queries: Slots, keys: Slots, window: int | None) -> Array:
    """Which key each query `sees`, [B, T, S] bool."""
    return sees(Slots(*(part[:, :, None] for part in queries)), Slots(*(part[:, None, :] for part in keys)), window)


def attention(
    query: Array,
    key: Array,
    value: Array,
    queries: Slots,
    keys: Slots,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    key_tiles: Array | None = None,
    scores_by: Callable[..., Array] | None = None,
) -> Array:
    """Attention of query [B, T, H, E] over key and value [B, K, S, E] -> [B, T, H, E]; the softmax is float32.

    `scores_by` computes what `dense_attention` does, which it stands in for.
    With `key_tiles` [B, T / t, n] (see `types.Rows`; packed rows only, where T = S) the keys of other tiles are left
    out, which by `visible` weigh nothing: the same numbers, of padding's hidden states alone others.
    """
    how: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    whole = scores_by or dense_attention
    if key_tiles is None:
        return whole(query, key, value, queries, keys, **how)
    return tiled_attention(query, key, value, queries, key_tiles, whole, **how)


def tiled_attention(
    query: Array, key: Array, value: Array, slots: Slots, key_tiles: Array, whole: Callable[..., Array], **how: Any
) -> Array:
    """Attention by `whole` of each tile of t tokens, as a row of its own, over the n tiles of keys listed for it.

    For G completions of C tokens behind a prompt of P that is about G C (P + C) scores in place of (P + G C)^2.
    """
    rows, tiles, listed = key_tiles.shape
    size = query.shape[1] // tiles

    def of_queries(x: Array) -> Array:
        return x.reshape(rows * tiles, size, *x.shape[2:])

    def of_keys(x: Array) -> Array:
        """[B, S, ...] -> [B S / t, n t, ...]; each row by itself, so that it stays on its device."""
        cut = x.reshape(rows, tiles, size, *x.shape[2:])
        chosen = jax.vmap(lambda row, at: row[at])(cut, jnp.maximum(key_tiles, 0))
        return chosen.reshape(rows * tiles, listed * size, *x.shape[2:])

    absent = jnp.repeat(key_tiles.reshape(rows * tiles, listed) < 0, size, axis=1)
    keys = Slots(*map(of_keys, slots))
    keys = keys._replace(segment_ids=jnp.where(absent, -1, keys.segment_ids))
    key, value = (of_keys(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (key, value))
    mixed = whole(of_queries(query), key, value, Slots(*map(of_queries, slots)), keys, **how)
    return mixed.reshape(query.shape)


def dense_attention(
    query: Array,
    key: Array,
    value: Array,
    queries: Slots,
    keys: Slots,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Array:
    """The reference, which builds the whole [B, K, G, T, S] of scores.

    It is given who sees whom as `Slots` and not as a mask, so that what skips tiles can be made of it.
    """
    rows, length, heads, width = query.shape
    kv_heads, group = key.shape[1], heads // key.shape[1]
    # Heads that share keys become more queries of one head: two plain batched matrix products, a fifth less time in
    # decoding on a CPU than contractions over [B, T, K, G, E], around which the compiler transposes the scores.
    folded = query.reshape(rows, length, kv_heads, group, width).transpose(0, 2, 3, 1, 4)
    folded = folded.reshape(rows, kv_heads, group * length, width)
    scores = jnp.einsum("bkqe,bkse->bkqs", folded, key, preferred_element_type=jnp.float32) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = scores.reshape(rows, kv_heads, group, length, -1)
    scores = jnp.where(visible(queries, keys, window)[:, None, None], scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype).reshape(rows, kv_heads, group * length, -1)
    mixed = jnp.einsum("bkqs,bkse->bkqe", weights, value).reshape(rows, kv_heads, group, length, width)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(query.shape)


def low_rank(x: Array, a: Array, b: Array, scale: float) -> Array:
    """scale (x A) B: x [..., inputs], a [inputs, rank], b [rank, outputs]. The product of A and B is never made."""
    inner = scale * jnp.tensordot(x, a, a.ndim - 1)
    return jnp.tensordot(inner, b, 1)


def product(equation: str, x: Array, weight: Array) -> Array:
    """jnp.einsum of x and a weight; the weight's gradient is one of x and the output's gradient, in this order.

    jax's own rule has it the other way round. XLA for CPUs transposes what stands first, and computes the elementwise
    chain before it once more, transposed: a sixth of an update's time was the gradient of silu.
    """
    result: Any = _product(equation, x, weight)
    return result


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(equation: str, x: Array, weight: Array) -> Array:
    return jnp.einsum(equation, x, weight)


def _product_forward(equation: str, x: Any, weight: Any) -> tuple[Array, tuple[Array, Array, tuple | None]]:
    # The backward pass is told by the structure of what is saved whether the weight learns.
    learns = () if weight.perturbed else None
    return jnp.einsum(equation, x.value, weight.value), (x.value, weight.value, learns)


def _product_backward(equation: str, saved: tuple[Array, Array, tuple | None], gradient: Array) -> tuple[Any, Any]:
    x, weight, learns = saved
    inputs, _, output = equation.partition("->")
    of_x, _, of_weight = inputs.partition(",")
    x_gradient = jnp.einsum(f"{output},{of_weight}->{of_x}", gradient, weight)
    return x_gradient, None if learns is None else jnp.einsum(f"{of_x},{output}->{of_weight}", x, gradient)


_product.defvjp(_product_forward, _product_backward, symbolic_zeros=True)


def rms_norm(x: Array, scale: Array, eps: float, unit_offset: bool) -> Array:
    """x [..., D] divided by its root mean square, in float32, times scale [D] (1 + scale with `unit_offset`)."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    gain = scale.astype(jnp.float32) + (1.0 if unit_offset else 0.0)
    return (normed * jnp.broadcast_to(gain, x.shape)).astype(x.dtype)


def rope_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians a position turns each pair of dimensions, [E / 2] float32.

    "llama3" divides wavelengths beyond original_length / low_freq_factor by `factor`, leaves those under
    original_length / high_freq_factor, and blends in between (Llama 3.1 model card).
    """
    frequencies = 1.0 / config.theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
    if config.scaling == "linear":
        frequencies = frequencies / config.factor
    elif config.scaling == "llama3":
        turns = config.original_length * frequencies / (2 * np.pi)
        blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
        blend = np.clip(blend, 0.0, 1.0)
        frequencies = frequencies * (blend + (1 - blend) / config.factor)
    return frequencies.astype(np.float32)


def rope_angles(config: RopeConfig, head_dim: int, positions: Array) -> tuple[Array, Array]:
    """Cosines and sines for positions [B, T]: two [B, T, E / 2] float32."""
    angles = positions[..., None].astype(jnp.float32) * rope_frequencies(config, head_dim)[None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: Array, angles: tuple[Array, Array]) -> Array:
    """x [B, T, H, E] turned by `angles`: dimension i and i + E / 2 are a pair, as in Hugging Face checkpoints."""
    cos, sin = (part[:, :, None, :] for part in angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
