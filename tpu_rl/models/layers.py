"""Building blocks of decoder layers: attention, RMS norm, rotary embedding, products with weights.

Everything here is a pure function of arrays. `can_attend` is the one visibility rule, for packed
rows and for the cache, and `dense_attention` is the reference for every attention kernel.

Letters in array shapes: B rows, T query tokens, S key tokens, H query heads, K key-value heads,
G = H / K, D hidden size, E head dimension, V that of values (E unless stated).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array

MASKED = -1e30
"""Score of a masked key, and logit of an id that is no token. exp(MASKED) is exactly 0, and
gradients stay finite, which they would not with -inf."""

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
}


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one type of layer."""

    theta: float = 10_000.0
    scaling: str = "default"
    """"default" (none), "linear" (all frequencies are divided by `factor`), "llama3" (only low
    frequencies are), "yarn" (frequencies of few turns are), "longrope" (frequencies are divided by
    `divisors`) or "proportional" (frequencies are those of whole heads, divided by `factor`, but
    pairs of dimensions beyond `fraction` are not rotated: Gemma 4)."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192
    """Context length, in tokens, before the model was extended. For "llama3", "yarn", "longrope".
    """
    beta_fast: float = 32.0
    """For "yarn": frequencies with more turns than this in the original context are kept."""
    beta_slow: float = 1.0
    """For "yarn": frequencies with fewer turns than this in the original context are divided."""
    truncate: bool = True
    """For "yarn": the dimensions at which the two begin are rounded to whole numbers."""
    divisors: tuple[float, ...] = ()
    """For "longrope": divisor of each frequency."""
    magnitude: float = 1.0
    """Factor of cosines and sines ("yarn" and "longrope")."""
    fraction: float = 1.0
    """Part of a head's dimensions, the first ones, that is rotated."""
    interleaved: bool = False
    """True if dimensions 2 i and 2 i + 1 are a pair (GLM-4). Otherwise i and i + E / 2 are."""
    sections: tuple[int, ...] = ()
    """Numbers of frequencies that turn with the time, the row and the column of an image's feature
    (Qwen2-VL). (): all turn with the position."""
    sections_alternate: bool = False
    """True if frequencies of the three kinds alternate (Qwen3-VL). Otherwise those of one kind
    follow those of another."""

    def rotated(self, head_dim: int) -> int:
        """Return the number of a head's dimensions that have an angle, which may be 0."""
        return head_dim if self.scaling == "proportional" else int(head_dim * self.fraction)


class ActivationAxes(NamedTuple):
    """Logical axes of the first two dimensions of activations [B, T, ...] (see
    `train.sharding`)."""

    rows: str
    tokens: str | None


PACKED = ActivationAxes("rows", "tokens")
"""Packed rows: rows and tokens are both sharded."""

CACHED = ActivationAxes("slots", None)
"""New tokens with a cache: each row is on one device, because few tokens are new."""


def balanced_order(length: int, shards: int) -> np.ndarray:
    """Return the order [length] of a row's tokens that balances causal attention over devices.

    The row is cut into 2 * shards stretches. Each device gets one stretch from the front and the
    one at the same distance from the end, so all devices have equally many (query, key) pairs. If
    2 * shards does not divide the length, tokens keep their order.
    """
    if length % (2 * shards):
        return np.arange(length, dtype=np.int32)
    stretches = np.arange(length, dtype=np.int32).reshape(2 * shards, -1)
    return np.stack([stretches[:shards], stretches[shards:][::-1]], axis=1).reshape(-1)


# Visibility.


class TokenIndex(NamedTuple):
    """The numbers of each token that decide which keys it attends to. All [B, T] int32."""

    index: Array
    """Place in the row or in the cache. No token attends to a later place."""
    positions: Array
    """Position in the sequence; only sliding windows depend on it."""
    segment_ids: Array
    """0 is padding."""
    visible_until: Array
    """No token at this place or later attends to the token."""


def visible_until(segment_ids: Array, branch_ids: Array) -> Array:
    """Return `TokenIndex.visible_until` [B, T] of prompts with branches, counted from the first
    token.

    A token is visible to the rest of its segment if it is trunk (branch 0), else to the rest of its
    branch. Segments are contiguous, and so are branches.
    """
    length = segment_ids.shape[1]

    def ends(is_new: Array) -> Array:
        """[B, T - 1], True where the next token begins a part -> [B, T], the ends of the parts."""
        borders = jnp.where(is_new, jnp.arange(1, length), length)
        borders = jnp.pad(borders, ((0, 0), (0, 1)), constant_values=length)
        return jax.lax.cummin(borders, axis=1, reverse=True)

    new_segment = segment_ids[:, 1:] != segment_ids[:, :-1]
    new_branch = branch_ids[:, 1:] != branch_ids[:, :-1]
    return jnp.where(branch_ids == 0, ends(new_segment), ends(new_segment | new_branch))


def can_attend(query: TokenIndex, key: TokenIndex, sliding_window: int | None) -> Array:
    """Return True where a query may attend to a key; fields of the two indices broadcast.

    A token attends to tokens that are not later, whose subtree it belongs to, and that are less
    than `sliding_window` positions back. Packed rows store trees depth first, so the subtree of a
    token is what follows it up to `visible_until`. Every token attends to at least itself, also in
    padding.
    """
    allowed = (key.index <= query.index) & (query.index < key.visible_until)
    if sliding_window is None:
        return allowed
    return allowed & (query.positions - key.positions < sliding_window)


def attention_mask(queries: TokenIndex, keys: TokenIndex, sliding_window: int | None) -> Array:
    """Return the mask [B, T, S] bool of queries [B, T] and keys [B, S], by `can_attend`."""
    return can_attend(
        TokenIndex(*(field[:, :, None] for field in queries)),
        TokenIndex(*(field[:, None, :] for field in keys)),
        sliding_window,
    )


# Attention.


def attention(
    query: Array,
    key: Array,
    value: Array,
    queries: TokenIndex,
    keys: TokenIndex,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    key_tiles: Array | None = None,
    implementation: Callable[..., Array] | None = None,
    chunks: int = 1,
) -> Array:
    """Return the attention [B, T, H, V] of query [B, T, H, E] to key [B, K, S, E].

    Args:
        query, key, value: projections; value is [B, K, S, V]. The softmax is float32.
        queries, keys: indices of the tokens, [B, T] and [B, S].
        scale: factor of the scores.
        sliding_window: see `can_attend`.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: [H], the score in each head of a further key that all queries see, and whose value is
            zero (arXiv 2309.17453; gpt-oss).
        key_tiles: [B, T / t, n], see `types.PackedRows`; for packed rows only, where T = S. Keys
            outside of the listed tiles are skipped. They have weight zero anyway, so results are
            the same, except in padding.
        implementation: a function to use in place of `dense_attention`.
        chunks: so many parts of the queries are computed one after the other, in the backward pass
            again, and the scores of one part exist at a time. See `score_chunks`.
    """
    attend = functools.partial(
        implementation or dense_attention,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
    )

    def of_part(
        query: Array, queries: TokenIndex, key_tiles: Array | None, key: Array, value: Array
    ) -> Array:
        if key_tiles is None:
            return attend(query, key, value, queries, keys, sinks=sinks)
        return tiled_attention(query, key, value, queries, keys, key_tiles, attend, sinks=sinks)

    if chunks == 1:
        return of_part(query, queries, key_tiles, key, value)

    def split(x: Array) -> Array:
        """[B, T, ...] -> [chunks, B, T / chunks, ...]."""
        return jnp.moveaxis(x.reshape(len(x), chunks, -1, *x.shape[2:]), 1, 0)

    parts = jax.tree.map(split, (query, queries, key_tiles))
    # The gradients of keys and values, which all parts share, add up in float32.
    wide = [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (key, value)]
    attended = jax.lax.map(
        jax.checkpoint(lambda part: of_part(*part, *(x.astype(key.dtype) for x in wide))), parts
    )
    return jnp.moveaxis(attended, 0, 1).reshape(*query.shape[:-1], -1)


MAX_SCORE_BYTES = 2**30
"""Bytes of scores that a device computes at once, at most, if queries can be cut into parts."""


def score_chunks(
    query: Array, num_keys: int, key_tiles: Array | None, score_bytes: float, multiple: int = 1
) -> int:
    """Return the number of parts of queries [B, T, H, E] for the `chunks` of `attention`.

    It is the smallest with which the scores of a part take at most `MAX_SCORE_BYTES`.

    Args:
        query, key_tiles: see `attention`.
        num_keys: S.
        score_bytes: bytes of a device per pair of a query and a key, of all heads.
        multiple: parts have a multiple of so many queries, or whole tiles.
    """
    rows, length = query.shape[:2]
    places = length // multiple
    if key_tiles is not None:
        places = key_tiles.shape[1]
        num_keys = key_tiles.shape[2] * (length // places)
    least = rows * length * num_keys * score_bytes / MAX_SCORE_BYTES
    return next((n for n in range(1, places + 1) if places % n == 0 and n >= least), places)


def tiled_attention(
    query: Array,
    key: Array,
    value: Array,
    queries: TokenIndex,
    keys: TokenIndex,
    key_tiles: Array,
    attend: Callable[..., Array],
    *,
    sinks: Array | None = None,
) -> Array:
    """Return the attention of packed rows [B, S], where each tile sees only its `key_tiles`.

    The queries may be some of the tiles of the rows: [B, T], with T / t tiles.

    Each tile of t queries becomes a row of its own, whose keys are the n tiles listed for it, and
    `attend` computes those rows. For G completions of C tokens after a prompt of P tokens this
    takes about G C (P + C) scores instead of (P + G C)^2.
    """
    rows, tiles, listed = key_tiles.shape
    tile_size = query.shape[1] // tiles

    def to_query_tiles(x: Array) -> Array:
        """[B, T, ...] -> [B T / t, t, ...]."""
        return x.reshape(rows * tiles, tile_size, *x.shape[2:])

    def to_key_tiles(x: Array) -> Array:
        """[B, S, ...] -> [B T / t, n t, ...]."""
        row_tiles = x.reshape(rows, -1, tile_size, *x.shape[2:])
        # Row by row, so that each row stays on its device.
        selected = jax.vmap(lambda row, at: row[at])(row_tiles, jnp.maximum(key_tiles, 0))
        return selected.reshape(rows * tiles, listed * tile_size, *x.shape[2:])

    absent = jnp.repeat(key_tiles.reshape(rows * tiles, listed) < 0, tile_size, axis=1)
    keys = TokenIndex(*map(to_key_tiles, keys))
    keys = keys._replace(visible_until=jnp.where(absent, 0, keys.visible_until))
    key, value = (to_key_tiles(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (key, value))
    attended = attend(
        to_query_tiles(query),
        key,
        value,
        TokenIndex(*map(to_query_tiles, queries)),
        keys,
        sinks=sinks,
    )
    return attended.reshape(*query.shape[:-1], -1)


def dense_attention(
    query: Array,
    key: Array,
    value: Array,
    queries: TokenIndex,
    keys: TokenIndex,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """Return the attention of `attention`, computed from the full [B, K, G, T, S] scores.

    This is the reference implementation. It takes token indices and not a mask, so that
    implementations which skip blocks of keys can have the same signature.
    """
    rows, length, num_heads, head_dim = query.shape
    kv_heads = key.shape[1]
    group = num_heads // kv_heads
    # Heads that share keys become further queries of one head. The two products are then plain
    # batched matrix products, which decode a fifth faster on CPUs than contractions over
    # [B, T, K, G, E], around which the compiler transposes the scores.
    folded = query.reshape(rows, length, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    folded = folded.reshape(rows, kv_heads, group * length, head_dim)
    scores = jnp.einsum("bkqe,bkse->bkqs", folded, key, preferred_element_type=jnp.float32) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = scores.reshape(rows, kv_heads, group, length, -1)
    mask = attention_mask(queries, keys, sliding_window)
    scores = jnp.where(mask[:, None, None], scores, MASKED)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        weights = _softmax_with_sinks(scores, sinks)
    weights = weights.astype(value.dtype).reshape(rows, kv_heads, group * length, -1)
    attended = jnp.einsum("bkqs,bkse->bkqe", weights, value)
    attended = attended.reshape(rows, kv_heads, group, length, -1)
    return attended.transpose(0, 3, 1, 2, 4).reshape(rows, length, num_heads, -1)


def _softmax_with_sinks(scores: Array, sinks: Array) -> Array:
    """Return the weights of scores [B, K, G, T, S], which add up to 1 with that of the sink [H]."""
    rows, kv_heads, group, length, _ = scores.shape
    sink_scores = sinks.astype(jnp.float32).reshape(1, kv_heads, group, 1, 1)
    sink_scores = jnp.broadcast_to(sink_scores, (rows, kv_heads, group, length, 1))
    highest = jnp.maximum(scores.max(-1, keepdims=True), sink_scores)
    highest = jax.lax.stop_gradient(highest)
    weights = jnp.exp(scores - highest)
    return weights / (weights.sum(-1, keepdims=True) + jnp.exp(sink_scores - highest))


# Products with weights.


def low_rank(x: Array, a: Array, b: Array, scale: float) -> Array:
    """Return scale * (x A) B for x [..., inputs], a [inputs, rank] and b [rank, outputs].

    Inputs and outputs may be several dimensions. The product A B is never formed.
    """
    inner = scale * jnp.tensordot(x, a, a.ndim - 1)
    return jnp.tensordot(inner, b, 1)


Einsum = Callable[[str, Array, Array], Array]
"""A function that computes what `jnp.einsum` does. Equal ones must be equal as keys of a dict."""


def float32_einsum(equation: str, x: Array, weight: Array) -> Array:
    """Return the einsum, summed in float32 and rounded once to the dtype of x.

    Sums over several devices are float32, too. `product` computes its gradients likewise.
    """
    return jnp.einsum(equation, x, weight, preferred_element_type=jnp.float32).astype(x.dtype)


def product(equation: str, x: Array, weight: Array, einsum: Einsum = jnp.einsum) -> Array:
    """Return `einsum(equation, x, weight)`, with a gradient that is faster on CPUs.

    The gradient of the weight is computed as a product of x and the output's gradient, in this
    order. JAX's own rule has them the other way round, and XLA for CPUs transposes the first
    operand and computes the elementwise operations before it a second time, transposed: the
    gradient of silu took a sixth of the time of an update.
    """
    result: Any = _product(equation, einsum, x, weight)
    return result


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(equation: str, einsum: Einsum, x: Array, weight: Array) -> Array:
    return einsum(equation, x, weight)


def _product_forward(
    equation: str, einsum: Einsum, x: Any, weight: Any
) -> tuple[Array, tuple[Array, Array, tuple | None]]:
    # The structure of the residuals tells the backward pass whether the weight is trainable.
    trainable = () if weight.perturbed else None
    return einsum(equation, x.value, weight.value), (x.value, weight.value, trainable)


def _product_backward(
    equation: str, einsum: Einsum, residuals: tuple[Array, Array, tuple | None], gradient: Array
) -> tuple[Any, Any]:
    x, weight, trainable = residuals
    inputs, _, output_axes = equation.partition("->")
    x_axes, _, weight_axes = inputs.partition(",")
    einsum = float32_einsum if einsum is float32_einsum else jnp.einsum
    x_gradient = einsum(f"{output_axes},{weight_axes}->{x_axes}", gradient, weight)
    if trainable is None:
        return x_gradient, None
    weight_gradient = einsum(f"{x_axes},{output_axes}->{weight_axes}", x, gradient)
    return x_gradient, weight_gradient


_product.defvjp(_product_forward, _product_backward, symbolic_zeros=True)


# Norm and rotary embedding.


@jax.custom_vjp
def gradient_barrier(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """Return the arrays. Their gradients are written to memory before a product reads them.

    Otherwise XLA may fuse what makes a gradient with each product that reads it, and compute it
    again for every tile of the product.
    """
    return arrays


gradient_barrier.defvjp(
    lambda arrays: (arrays, None), lambda _, gradients: (jax.lax.optimization_barrier(gradients),)
)


def rms_norm(
    x: Array,
    scale: Array,
    eps: float,
    unit_offset: bool,
    mean: Callable[[Array], Array] = functools.partial(jnp.mean, axis=-1),
) -> Array:
    """Return the RMS norm of x [..., D] with scale [D], computed in float32, in the dtype of x.

    With `unit_offset` the gain is 1 + scale. `mean` is over the last dimension.
    """
    x_float32 = x.astype(jnp.float32)
    mean_square = mean(x_float32 * x_float32)[..., None]
    normed = x_float32 * jax.lax.rsqrt(mean_square + eps)
    gain = scale.astype(jnp.float32) + (1.0 if unit_offset else 0.0)
    return (normed * jnp.broadcast_to(gain, x.shape)).astype(x.dtype)


def rope_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Return the angle per position, in radians, of each pair of dimensions: [E / 2] float32.

    E is the number of rotated dimensions, `head_dim` unless `fraction` is below 1. "llama3" divides
    frequencies by `factor` if their wavelength is above original_length / low_freq_factor, keeps
    those below original_length / high_freq_factor, and interpolates in between (model card of Llama
    3.1). "yarn" interpolates between two dimensions instead (arXiv 2309.00071, section 3.2).
    """
    rotated = config.rotated(head_dim)
    exponents = np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated)
    frequencies = 1.0 / config.theta**exponents
    if config.scaling == "linear":
        frequencies = frequencies / config.factor
    elif config.scaling == "llama3":
        turns = config.original_length * frequencies / (2 * np.pi)
        unscaled = (turns - config.low_freq_factor) / (
            config.high_freq_factor - config.low_freq_factor
        )
        unscaled = np.clip(unscaled, 0.0, 1.0)
        frequencies = frequencies * (unscaled + (1 - unscaled) / config.factor)
    elif config.scaling == "yarn":
        scaled = _yarn_ramp(config, rotated)
        frequencies = frequencies * ((1 - scaled) + scaled / config.factor)
    elif config.scaling == "proportional":
        num_turning = int(config.fraction * head_dim / 2)
        is_turning = np.arange(rotated // 2) < num_turning
        frequencies = np.where(is_turning, frequencies / config.factor, 0.0)
    elif config.scaling == "longrope":
        frequencies = frequencies / np.asarray(config.divisors, np.float32)
    return frequencies.astype(np.float32)


def _yarn_ramp(config: RopeConfig, rotated: int) -> np.ndarray:
    """Return the share of each frequency that "yarn" divides: [E / 2], from 0 to 1."""

    def dimension(turns: float) -> float:
        """Return the pair of dimensions that turns this often in the original context."""
        wavelength = config.original_length / turns
        return rotated * math.log(wavelength / (2 * math.pi)) / (2 * math.log(config.theta))

    first, last = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotated - 1)
    width = last - first or 0.001
    return np.clip((np.arange(rotated // 2, dtype=np.float32) - first) / width, 0.0, 1.0)


def _axis_of_frequency(config: RopeConfig) -> np.ndarray:
    """Return for each frequency [E / 2] whether it turns with time (0), row (1) or column (2)."""
    if not config.sections_alternate:
        return np.repeat(np.arange(3), config.sections)
    axes = np.zeros(sum(config.sections), int)
    for axis in (1, 2):
        axes[axis : 3 * config.sections[axis] : 3] = axis
    return axes


def rope_angles(config: RopeConfig, head_dim: int, positions: Array) -> tuple[Array, Array]:
    """Return cosines and sines, two [B, T, E / 2] float32, for positions [B, T], or positions in
    time, rows and columns [B, T, 3].

    E is the number of rotated dimensions. Both are multiplied by `RopeConfig.magnitude`.
    """
    frequencies = rope_frequencies(config, head_dim)
    if positions.ndim == 2:
        positions = positions[..., None]
    else:
        positions = positions[..., _axis_of_frequency(config)]
    angles = positions.astype(jnp.float32) * frequencies[None, None, :]
    return config.magnitude * jnp.cos(angles), config.magnitude * jnp.sin(angles)


def apply_rope(x: Array, angles: tuple[Array, Array], interleaved: bool = False) -> Array:
    """Return x [B, T, H, E] with its first dimensions rotated by `angles`, from `rope_angles`.

    Of R rotated dimensions, i and i + R / 2 are a pair, or, if `interleaved`, 2 i and 2 i + 1.
    """
    cos, sin = (part[:, :, None, :] for part in angles)
    num_rotated = 2 * cos.shape[-1]
    x_float32 = x[..., :num_rotated].astype(jnp.float32)
    if interleaved:
        first = x_float32[..., 0::2]
        second = x_float32[..., 1::2]
    else:
        first, second = jnp.split(x_float32, 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    if interleaved:
        merged = jnp.stack(rotated, axis=-1).reshape(x_float32.shape)
    else:
        merged = jnp.concatenate(rotated, axis=-1)
    merged = merged.astype(x.dtype)
    if num_rotated == x.shape[-1]:
        return merged
    return jnp.concatenate([merged, x[..., num_rotated:]], axis=-1)
