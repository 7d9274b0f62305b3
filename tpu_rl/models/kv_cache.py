"""The cache of a decoder: keys and values, and the states of linear attention.

In full layers each token has its own place in the cache. Sliding layers keep a ring, in which a
token's place is its number modulo the ring's size, so memory does not grow with the context. Keys
and values are stored in the compute dtype or in int8. Linear layers keep one state for all tokens
of a row, float32, and the last inputs of their convolutions.

Letters in array shapes are those of `layers`; here S counts the places of the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tpu_rl.models import layers
from tpu_rl.models.attention import decode
from tpu_rl.models.attention.decode import SeenTokens
from tpu_rl.models.attention.flash_kernels import LANES
from tpu_rl.models.config import RECURRENT, DecoderConfig
from tpu_rl.models.layers import TokenIndex
from tpu_rl.types import MISSING_POSITIONS, ROUTING, SHARED_PROMPT, UNREAD, Array

RING_SLACK = 128
"""Places of a ring beyond those that the sliding window needs.

Up to this many tokens can be written at once, be looked at without being committed, or be taken
back, without overwriting a token that is still inside the window.
"""

UNLIMITED = 2**31 - 1
"""`Model.max_rollback` of a decoder whose cache has no rings."""

TRANSPOSED_KEYS = "k_transposed"
"""Entry of a cache in place of "k" if `AttentionConfig.cpu_cache` is set: keys [..., E, S]."""


STATE = "state"
"""Entry of a linear layer's cache: the states [L, B, H, E, V]."""


def max_rollback(config: DecoderConfig) -> int:
    """Return the number of last tokens that a cache can take back (see `types.Policy`)."""
    if config.is_recurrent:
        return 0
    has_rings = any(ring_size_of(config, layer_type) for layer_type in config.layer_types)
    return RING_SLACK if has_rings else UNLIMITED


def ring_size(sliding_window: int) -> int:
    """Return the number of places of a sliding layer's ring, a multiple of the kernel's blocks."""
    return -(-(sliding_window - 1 + RING_SLACK) // 128) * 128


def ring_size_of(config: DecoderConfig, layer_type: str) -> int | None:
    """Return the ring size of a layer type, or None if each token has its own place.

    With `DecoderConfig.exact` every token has, because a ring holds keys in another order.
    """
    if config.exact:
        return None
    sliding_window = config.attention.sliding_window
    if layer_type == "sliding" and sliding_window is not None:
        return ring_size(sliding_window)
    return None


def pair_heads(x: Array) -> Array:
    """Return x [B, T, K, E] with two heads side by side, [B, T, K / 2, 2 E]. If K is odd, the last
    head stands beside zeros."""
    x = jnp.pad(x, ((0, 0), (0, 0), (0, x.shape[2] % 2), (0, 0)))
    return x.reshape(*x.shape[:2], -1, 2 * x.shape[3])


def single_heads(pairs: Array, kv_heads: int) -> Array:
    """Return the K = `kv_heads` heads [B, K, S, E] of pairs [B, K / 2, S, 2 E]."""
    rows, _, places, width = pairs.shape
    halves = pairs.reshape(rows, -1, places, 2, width // 2)
    return halves.swapaxes(2, 3).reshape(rows, -1, places, width // 2)[:, :kv_heads]


def init_cache(config: DecoderConfig, rows: int, length: int) -> Any:
    """Return an empty cache for B `rows` of at most `length` tokens.

    The cache is {"lengths": [B] int32, layer type: {"k", "v": [L, B, K, S, E]}}, with L layers of
    that type and S = length, or at most the ring size in sliding layers. With decode kernels S
    is rounded up to whole blocks. In int8, "k_scale" and "v_scale" [L, B, K, S] float32 are added.
    With `AttentionConfig.cpu_cache`, `TRANSPOSED_KEYS` [L, B, K, E, S] replaces "k". Latent
    attention has the one head of `AttentionConfig.cached_dims`, whose values are wider than its
    keys. With `AttentionConfig.pairs_heads` there are K / 2 heads, rounded up, of 2 E elements.
    With `DecoderConfig.records_routing` there is the entry `ROUTING`, where the decode kernel is
    used `SHARED_PROMPT`, and with `RopeConfig.sections` and images `MISSING_POSITIONS`.

    Linear layers have {"state": [L, B, H, E, V] float32} and the last W - 1 inputs of the three
    convolutions: {"delta_query", "delta_key": [L, B, W - 1, K, E], "delta_value": [L, B, W - 1, H,
    V]} (see `attention.delta_rule`).

    The place of a committed token is its position (in a ring: modulo the size). `extend` writes all
    its tokens after the committed ones, and the next call overwrites those that were not committed.
    A token beyond the end of the cache is dropped, and no token attends to it. `length` must
    therefore include tokens that are looked at but never committed.
    """
    attention = config.attention
    cache: dict[str, Any] = {"lengths": jnp.zeros(rows, jnp.int32)}
    if attention.kernel in ("tpu", "interpreted") or attention.gpu_decode != "none":
        length = -(-length // LANES) * LANES
        if decode.reads_groups(attention):
            cache[SHARED_PROMPT] = jnp.zeros((2, rows), jnp.int32)
    if config.vision is not None and config.rope.sections:
        cache[MISSING_POSITIONS] = jnp.zeros((1, rows), jnp.int32)
    for layer_type in sorted(set(config.layer_types)):
        if layer_type == RECURRENT:
            cache[layer_type] = _init_states(config, rows)
            continue
        capacity = min(length, ring_size_of(config, layer_type) or length)
        num_layers = config.layer_types[: config.first_reusing].count(layer_type)
        heads, key_dim, value_dim = config.of_layers(layer_type).attention.cached_dims
        if attention.pairs_heads:
            heads, key_dim, value_dim = -(-heads // 2), 2 * key_dim, 2 * value_dim
        places = (num_layers, rows, heads, capacity)
        shapes = {"k": (*places, key_dim), "v": (*places, value_dim)}
        if attention.cpu_cache:
            shapes[TRANSPOSED_KEYS] = (*places[:-1], key_dim, capacity)
            del shapes["k"]
        dtype = config.cache_dtype or config.dtype
        stack = {name: jnp.zeros(leaf, dtype) for name, leaf in shapes.items()}
        if config.cache_dtype is not None:
            stack["k_scale"] = jnp.zeros(places, jnp.float32)
            stack["v_scale"] = jnp.zeros(places, jnp.float32)
        cache[layer_type] = stack
    if config.records_routing:
        assert config.moe is not None
        places = (config.mixture_layers, rows, config.moe.experts_per_token, length)
        cache[ROUTING] = jnp.zeros(places, config.moe.routing_dtype)
    return cache


def _init_states(config: DecoderConfig, rows: int) -> dict[str, Array]:
    """Return the states of all linear layers before the first token."""
    delta = config.delta
    assert delta is not None
    num_layers = config.layer_types.count(RECURRENT)
    inputs = (num_layers, rows, delta.taps - 1)
    keys = jnp.zeros((*inputs, delta.key_heads, delta.key_dim), config.dtype)
    values = jnp.zeros((*inputs, delta.value_heads, delta.value_dim), config.dtype)
    states = (num_layers, rows, delta.value_heads, delta.key_dim, delta.value_dim)
    return {
        "delta_query": keys,
        "delta_key": keys,
        "delta_value": values,
        STATE: jnp.zeros(states, jnp.float32),
    }


def read_states(cache: Any, layer: Array | int, has_past: Array) -> dict[str, Array]:
    """Return the states of a linear layer; zeros for rows without tokens (`has_past` [B] False)."""

    def read(leaf: Array) -> Array:
        states = jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False)
        is_kept = has_past.reshape(-1, *(1,) * (states.ndim - 1))
        return jnp.where(is_kept, states, jnp.zeros_like(states))

    return {name: read(leaf) for name, leaf in cache[RECURRENT].items()}


def write_states(cache: Any, layer: Array | int, states: dict[str, Array]) -> Any:
    """Return the cache with the states of a linear layer replaced."""
    stack = {
        name: jax.lax.dynamic_update_index_in_dim(leaf, states[name].astype(leaf.dtype), layer, 0)
        for name, leaf in cache[RECURRENT].items()
    }
    return {**cache, RECURRENT: stack}


def write_routing(cache: Any, layer: Array | int, experts: Array) -> Any:
    """Return the cache with the experts [B, T, k] of new tokens.

    `layer` counts layers with a mixture. The tokens take the first places, wherever their keys are:
    what was recorded before has been read. So decoding writes one slice, where the places of tokens
    would take a scatter of single numbers.
    """
    record = cache[ROUTING]
    numbers = (experts + 1).astype(record.dtype).swapaxes(1, 2)[..., : record.shape[3]]
    written = jax.lax.dynamic_update_slice(record, numbers[None], (layer, 0, 0, 0))
    return {**cache, ROUTING: written}


# Places of new tokens, and the keys that they see.


class CacheView(NamedTuple):
    """The places where new tokens [B, T] are written in a cache, and which keys they see."""

    places: Array
    """[B, T] int32: places in the cache; beyond its end, the token is dropped."""
    keys: TokenIndex
    """[B, S]: the tokens in the cache after the new ones are written. If there are more new tokens
    than `RING_SLACK`, [B, S + T]: the ring before they are written, followed by the new tokens."""
    seen: SeenTokens | None = None
    """The same for a single new token per row, T = 1."""


def query_index(lengths: Array, positions: Array, branch_ids: Array) -> TokenIndex:
    """Return the index of new tokens [B, T] that follow `lengths` [B] committed tokens."""
    index = lengths[:, None] + jnp.arange(positions.shape[1])[None, :]
    segment_ids = jnp.ones_like(index)
    until = lengths[:, None] + layers.visible_until(segment_ids, branch_ids)
    return TokenIndex(index, positions, segment_ids, until)


def view(
    config: DecoderConfig,
    layer_type: str,
    lengths: Array,
    commit: Array,
    capacity: int,
    new: TokenIndex,
    branch_ids: Array,
) -> CacheView:
    """Return the view of `new` tokens, whose branches are `branch_ids`, on a layer type's cache.

    `lengths` and `commit` [B] are the numbers of tokens committed before and now; `capacity` is S,
    the number of places.
    """
    is_ring = capacity == ring_size_of(config, layer_type)
    if is_ring:
        view = ring_view(lengths, commit, capacity, new)
    else:
        view = linear_view(lengths, capacity, new)
    if new.index.shape[1] > 1:
        return view
    sliding_window = config.attention.sliding_window if layer_type == "sliding" else None
    seen = decode.seen_tokens(
        lengths,
        new.positions[:, 0],
        branch_ids[:, 0] != UNREAD,
        None if is_ring else capacity,
        sliding_window,
    )
    return view._replace(seen=seen)


def with_groups(
    config: DecoderConfig, cache: Any, views: dict[str, CacheView]
) -> dict[str, CacheView]:
    """Return the views of layer types, with the groups of rows that share reads of their prompt.

    They are found here, once for all layers of a type: from the loop over layers, the compiler
    would not move them.
    """
    if SHARED_PROMPT not in cache:
        return views

    def shared(layer_type: str, view: CacheView) -> CacheView:
        attention = config.of_layers(layer_type).attention
        if view.seen is None or not decode.reads_groups(attention):
            return view
        key = cache[layer_type]["k"]
        prompt, tokens = cache[SHARED_PROMPT]
        seen = decode.with_groups(attention, config.dtype, key, view.seen, prompt, tokens)
        return view._replace(seen=seen)

    return {layer_type: shared(layer_type, view) for layer_type, view in views.items()}


def linear_view(lengths: Array, capacity: int, new: TokenIndex) -> CacheView:
    """Return the view on a cache in which the place of a token is its number."""
    places = jnp.broadcast_to(jnp.arange(capacity)[None, :], (len(lengths), capacity))
    return CacheView(new.index, _cached_tokens(lengths, places, new))


def ring_view(lengths: Array, commit: Array, capacity: int, new: TokenIndex) -> CacheView:
    """Return the view on a ring, each place of which holds its newest token."""
    num_new = new.index.shape[1]
    place = jnp.arange(capacity)[None, :]
    ends = lengths + commit
    fits = num_new <= RING_SLACK
    newest = lengths[:, None] + (num_new if fits else 0) - 1
    keys = _cached_tokens(lengths, newest - (newest - place) % capacity, new)
    if fits:
        return CacheView(new.index % capacity, keys)
    # Only the last committed tokens are written. The others get distinct places beyond the end, so
    # that places stay unique and these tokens are dropped.
    is_written = (new.index < ends[:, None]) & (new.index >= ends[:, None] - capacity)
    dropped = capacity + jnp.arange(num_new)[None, :]
    places = jnp.where(is_written, new.index % capacity, dropped)
    both = (jnp.concatenate(fields, axis=1) for fields in zip(keys, new, strict=True))
    return CacheView(places, TokenIndex(*both))


def _cached_tokens(lengths: Array, index: Array, new: TokenIndex) -> TokenIndex:
    """Return the index of the tokens with numbers `index` [B, S], committed or new.

    Numbers that no token has get segment 0, and are visible to none.
    """
    num_new = new.index.shape[1]
    # 0 for the first new token, negative for committed ones.
    offset = index - lengths[:, None]

    def select(of_committed: Array, of_new: Array) -> Array:
        of_new = jnp.take_along_axis(of_new, jnp.clip(offset, 0, num_new - 1), axis=1)
        return jnp.where(offset < 0, of_committed, of_new)

    exists = (index >= 0) & (offset < num_new)
    # Committed tokens are visible to all new ones.
    until = select(lengths[:, None] + num_new, new.visible_until)
    return TokenIndex(
        index, select(index, new.positions), jnp.int32(exists), jnp.where(exists, until, 0)
    )


# Writing and reading.

ReadRows = Callable[[Array | int, int], tuple[Array, Array]]
"""(first row, number of rows) -> their keys and values in one layer, [rows, K, S, E] each."""


def write(
    cache: Any,
    layer_type: str,
    layer: Array | int,
    view: CacheView,
    key: Array,
    value: Array,
    scales_by_mask: bool = False,
) -> tuple[Any, ReadRows]:
    """Write the key and value [B, T, K, E] of new tokens into a layer of the cache.

    Returns the new cache, and a function that reads the keys and values of all tokens in
    `view.keys`. Tokens beyond the end of the cache are dropped. Everything that is read from an
    int8 cache is rounded, new tokens included.

    `scales_by_mask` is for T = 1 and the decode kernel: it reads scales with places along lanes,
    and in this layout the TPU's compiler would rewrite those of all layers to change one number.
    Instead, a select rewrites those of this layer.
    """
    before = cache[layer_type]
    key_name = TRANSPOSED_KEYS if TRANSPOSED_KEYS in before else "k"
    new = {key_name: key, "v": value}
    if "k_scale" in before:
        new[key_name], new["k_scale"] = quantize(key)
        new["v"], new["v_scale"] = quantize(value)

    rows = jnp.arange(len(key))[:, None, None]
    kv_heads = jnp.arange(before["v"].shape[2])[None, None, :]
    is_paired = before["v"].shape[4] == 2 * value.shape[3]
    places = view.places[:, :, None]

    def indices(name: str) -> tuple:
        # Heads have indices, too. With a slice over them, the TPU's compiler stores the new tokens
        # in another layout than attention reads, and copies the whole cache for every token.
        dims_before_place = (slice(None),) if name == TRANSPOSED_KEYS else ()
        return layer, rows, kv_heads, *dims_before_place, places

    def written(name: str, part: Array) -> Array:
        leaf = before[name]
        if scales_by_mask and leaf.ndim == 4:
            old = jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False)
            is_place = jnp.arange(leaf.shape[3])[None, None] == places
            masked = jnp.where(is_place, part.swapaxes(1, 2), old)
            return jax.lax.dynamic_update_index_in_dim(leaf, masked, layer, 0)
        return leaf.at[indices(name)].set(part, mode="drop", unique_indices=True)

    after = {
        name: written(name, pair_heads(part) if is_paired else part) for name, part in new.items()
    }
    # In a ring, new tokens may overwrite keys that earlier new tokens still see.
    is_appended = view.keys.index.shape[1] > before["v"].shape[3]

    leaves = LeafReader(layer, key.shape[2], is_paired)
    if not is_appended:
        return {**cache, layer_type: after}, reader(after, leaves, key.dtype)

    def read_rows(first: Array | int, rows: int) -> tuple[Array, Array]:
        def read(name: str) -> Array:
            appended = jax.lax.dynamic_slice_in_dim(new[name], first, rows).swapaxes(1, 2)
            return jnp.concatenate([leaves.read(before, name, first, rows), appended], axis=2)

        return _dequantized(after, read, key.dtype)

    return {**cache, layer_type: after}, read_rows


class LeafReader(NamedTuple):
    """Reads the leaves of a layer type in one layer."""

    layer: Array | int
    kv_heads: int
    is_paired: bool
    """True if the leaves have two heads side by side."""

    def read(self, stack: dict[str, Array], name: str, first: Array | int, rows: int) -> Array:
        """Return rows of a leaf, [rows, K, S, E]; of scales, [rows, K, S]."""
        leaf = stack[name]
        start = (self.layer, first, *(0,) * (leaf.ndim - 2))
        part = jax.lax.dynamic_slice(leaf, start, (1, rows, *leaf.shape[2:]))
        if self.is_paired:
            return single_heads(part[0], self.kv_heads)
        return part[0].swapaxes(2, 3) if name == TRANSPOSED_KEYS else part[0]


def reader(stack: dict[str, Array], leaves: LeafReader, dtype: Any) -> ReadRows:
    """Return a function that reads keys and values of a layer, in `dtype` also from int8."""

    def read_rows(first: Array | int, rows: int) -> tuple[Array, Array]:
        return _dequantized(stack, lambda name: leaves.read(stack, name, first, rows), dtype)

    return read_rows


def array_reader(keys: Array, values: Array) -> ReadRows:
    """Return a function that reads rows of keys and values [B, K, S, E]."""

    def read_rows(first: Array | int, rows: int) -> tuple[Array, Array]:
        return (
            jax.lax.dynamic_slice_in_dim(keys, first, rows),
            jax.lax.dynamic_slice_in_dim(values, first, rows),
        )

    return read_rows


def _dequantized(
    stack: dict[str, Array], read: Callable[[str], Array], dtype: Any
) -> tuple[Array, Array]:
    """Return the keys and values that `read` reads, by the names of leaves."""

    def dequantized(name: str, scale_name: str) -> Array:
        numbers = read(name)
        if scale_name not in stack:
            return numbers
        return (numbers * read(scale_name)[..., None]).astype(dtype)

    key_name = TRANSPOSED_KEYS if TRANSPOSED_KEYS in stack else "k"
    return dequantized(key_name, "k_scale"), dequantized("v", "v_scale")


CPU_BLOCK_BYTES = 5 << 19
"""Bytes of keys and values that a CPU reads from a layer's cache at once.

They stay in the CPU's own caches until scores and means are computed from them. Measured on a
machine with 2 x 1 MiB of L2 and 32 MiB of shared cache.
"""


def rows_per_block(keys: Array) -> int:
    """Return the number of rows of keys [B, K, S, E] to read at once on CPUs.

    That is the largest divisor of B whose keys and values fit in `CPU_BLOCK_BYTES`, or 1.
    """
    row_bytes = 2 * keys.size * keys.dtype.itemsize // len(keys)
    most = min(max(CPU_BLOCK_BYTES // row_bytes, 1), len(keys))
    return max(size for size in range(1, most + 1) if len(keys) % size == 0)


def attend_in_blocks(
    attend: Callable[..., Array],
    read_rows: ReadRows,
    block_rows: int,
    query: Array,
    queries: TokenIndex,
    keys: TokenIndex,
) -> Array:
    """Return `attend` for query [B, T, H, E], computed for `block_rows` rows after one another.

    `block_rows` must divide B. Keys and values come from `read_rows`; the result is [B, T, H, E].
    """
    if block_rows == len(query):
        return attend(query, *read_rows(0, block_rows), queries, keys)

    def attend_block(number: Array) -> Array:
        start = number * block_rows

        def cut(rows: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(rows, start, block_rows)

        return attend(
            cut(query),
            *read_rows(start, block_rows),
            TokenIndex(*map(cut, queries)),
            TokenIndex(*map(cut, keys)),
        )

    blocks = jax.lax.map(attend_block, jnp.arange(len(query) // block_rows))
    return blocks.reshape(*query.shape[:-1], -1)


def quantize(x: Array) -> tuple[Array, Array]:
    """Return x [..., E] as (int8 of the same shape, float32 scales [...]), whose product is x.

    The error is at most half a step, where a step is 1/127 of the largest of the E absolute values.
    """
    x = x.astype(jnp.float32)
    scale = jnp.abs(x).max(-1) / 127
    return jnp.round(x / jnp.where(scale > 0, scale, 1.0)[..., None]).astype(jnp.int8), scale
