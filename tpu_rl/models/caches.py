"""The cache of a decoder: a place for each token, or, in layers that see a window, a ring. Letters as in `layers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tpu_rl.models.architecture import DecoderConfig
from tpu_rl.models.layers import Slots
from tpu_rl.types import Array

SPARE = 128
"""Places of a ring beyond what a window's tokens need: so many tokens may be read at once into their places, be only
looked at, or be forgotten, and none that is still seen is written over."""
ALL = 2**31 - 1
"""Tokens that a cache without rings can forget."""


def ring(window: int) -> int:
    """Places of the cache of a sliding layer: a token's place is its number modulo this. Whole blocks of the kernel."""
    return -(-(window - 1 + SPARE) // 128) * 128


TRANSPOSED = "k_transposed"
"""Of a cache that has it in place of "k": keys, their widths in front of their places."""


def init_cache(config: DecoderConfig, rows: int, length: int) -> Any:
    """{"lengths": [B], kind: {"k", "v": [layers of that kind, B, K, S, E]}} for B `rows` of S = `length` tokens, in
    sliding layers of at most `ring` of them; of integers also "k_scale" and "v_scale" [layers, B, K, S]. With
    `AttentionConfig.cache_for_cpus` there is `TRANSPOSED` [layers, B, K, E, S] in place of "k".

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
        if attention.cache_for_cpus:
            shapes = {TRANSPOSED: (*shape[:-2], shape[-1], shape[-2]), "v": shape}
        cache[kind] = {name: jnp.zeros(of, config.cache_dtype or config.dtype) for name, of in shapes.items()}
        if config.cache_dtype is not None:
            cache[kind] |= {f"{name}_scale": jnp.zeros(shape[:-1], jnp.float32) for name in ("k", "v")}
    return cache


def ring_of(config: DecoderConfig, kind: str) -> int | None:
    """Places of the ring of a kind of layers; None where each token has its own."""
    window = config.attention.window
    return ring(window) if kind == "sliding" and window is not None else None


class Read(NamedTuple):
    """New tokens [B, T] and a cache: where they are written, and what they see."""

    places: Array
    """[B, T] int32, in the cache; those beyond its end are dropped."""
    keys: Slots
    """[B, S] of the cache once they are written; [B, S + T] where more are new than a ring has room for: then of the
    cache before, and behind it of the new ones."""


def new_slots(lengths: Array, positions: Array, branch_ids: Array) -> Slots:
    """Tokens [B, T] behind the committed ones, lengths [B], as queries."""
    index = lengths[:, None] + jnp.arange(positions.shape[1])[None, :]
    return Slots(index, positions, jnp.ones_like(index), branch_ids)


def read(config: DecoderConfig, kind: str, lengths: Array, commit: Array, capacity: int, new: Slots) -> Read:
    """Of a cache of layers of a kind with room for `capacity` tokens: a ring, or places of their own."""
    if capacity == ring_of(config, kind):
        return read_into_ring(lengths, commit, capacity, new)
    return read_into_places(lengths, capacity, new)


def read_into_places(lengths: Array, capacity: int, new: Slots) -> Read:
    """A cache in which each token has a place of its own: its number."""
    places = jnp.broadcast_to(jnp.arange(capacity)[None, :], (len(lengths), capacity))
    return Read(new.index, _keys(lengths, places, new))


def read_into_ring(lengths: Array, commit: Array, capacity: int, new: Slots) -> Read:
    """A `ring`, of which each place has the newest token that belongs there."""
    width, place, ends = new.index.shape[1], jnp.arange(capacity)[None, :], lengths + commit
    fits = width <= SPARE
    newest = lengths[:, None] + (width if fits else 0) - 1
    keys = _keys(lengths, newest - (newest - place) % capacity, new)
    if fits:
        return Read(new.index % capacity, keys)
    # Of the new ones those stay that are committed and the last; the others have no place, each another one.
    stays = (new.index < ends[:, None]) & (new.index >= ends[:, None] - capacity)
    places = jnp.where(stays, new.index % capacity, capacity + jnp.arange(width)[None, :])
    return Read(places, Slots(*(jnp.concatenate(parts, axis=1) for parts in zip(keys, new, strict=True))))


def _keys(lengths: Array, index: Array, new: Slots) -> Slots:
    """The tokens with the numbers index [B, S], of committed and new ones; segment 0 where there is none."""
    width = new.index.shape[1]
    age = index - lengths[:, None]  # 0 for the first of the new tokens, negative for what is committed

    def of(committed: Array, new: Array) -> Array:
        return jnp.where(age < 0, committed, jnp.take_along_axis(new, jnp.clip(age, 0, width - 1), axis=1))

    exists = (index >= 0) & (age < width)
    return Slots(index, of(index, new.positions), jnp.int32(exists), of(jnp.zeros_like(index), new.branch_ids))


LookUp = Callable[[Array | int, int], tuple[Array, Array]]
"""(first row, how many) -> their keys and values in a layer, [rows, K, S, E] each."""


def write(cache: Any, kind: str, layer: Array | int, read: Read, key: Array, value: Array) -> tuple[Any, LookUp]:
    """The cache with key and value [B, T, K, E] of new tokens of a layer, and what looks up all that belong to
    `read.keys`.

    What lies beyond the cache's end is dropped. A cache of integers holds scales, too; what is read from it, new tokens
    included, is rounded.
    """
    before = cache[kind]
    keys = TRANSPOSED if TRANSPOSED in before else "k"
    new = {keys: key, "v": value}
    if "k_scale" in before:
        (new[keys], new["k_scale"]), (new["v"], new["v_scale"]) = quantise(key), quantise(value)

    def places(name: str) -> tuple:
        in_front = (slice(None),) * (2 if name == TRANSPOSED else 1)
        return layer, jnp.arange(len(key))[:, None], *in_front, read.places

    stack = {
        name: before[name].at[places(name)].set(part, mode="drop", unique_indices=True) for name, part in new.items()
    }
    is_beside = read.keys.index.shape[1] > before["v"].shape[3]

    def look_up(first: Array | int, rows: int) -> tuple[Array, Array]:
        def stored(stack: dict[str, Array], name: str) -> Array:
            whole = stack[name]
            part = jax.lax.dynamic_slice(whole, (layer, first, *(0,) * (whole.ndim - 2)), (1, rows, *whole.shape[2:]))
            return part[0].swapaxes(2, 3) if name == TRANSPOSED else part[0]

        def look(name: str) -> Array:
            if not is_beside:
                return stored(stack, name)
            beside = jax.lax.dynamic_slice_in_dim(new[name], first, rows).swapaxes(1, 2)
            return jnp.concatenate([stored(before, name), beside], axis=2)

        def widened(name: str, scale: str) -> Array:
            seen = look(name)
            return (seen * look(scale)[..., None]).astype(key.dtype) if scale in stack else seen

        return widened(keys, "k_scale"), widened("v", "v_scale")

    return {**cache, kind: stack}, look_up


AT_ONCE = 5 << 19
"""Bytes of keys and values that a CPU cuts out of a stack of layers at once: no more than its caches still have when
scores and means are computed from them. Measured on a machine with 2 x 1 MiB and 32 MiB for all."""


def rows_at_once(keys: Array) -> int:
    """Of the rows of keys [B, K, S, E], the most that divide them evenly and with their values fit in `AT_ONCE`; at
    least 1."""
    row = 2 * keys.size * keys.dtype.itemsize // len(keys)
    return max(size for size in range(1, min(max(AT_ONCE // row, 1), len(keys)) + 1) if len(keys) % size == 0)


def attend_in_blocks(attend: Callable[..., Array], look_up: LookUp, size: int, query: Array, *slots: Slots) -> Array:
    """`attend` to what `look_up` finds, for query [B, T, H, E], `size` rows after one another -> the same shape."""
    if size == len(query):
        return attend(query, *look_up(0, size), *slots)

    def block(number: Array) -> Array:
        def cut(rows: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(rows, number * size, size)

        return attend(cut(query), *look_up(number * size, size), *(Slots(*map(cut, part)) for part in slots))

    return jax.lax.map(block, jnp.arange(len(query) // size)).reshape(query.shape)


def quantise(x: Array) -> tuple[Array, Array]:
    """x [..., E] -> (int8 of the same shape, float32 scales [...]): x is their product but for half a step at most, a
    step being a 127th of the largest of E numbers."""
    x = x.astype(jnp.float32)
    scale = jnp.abs(x).max(-1) / 127
    return jnp.round(x / jnp.where(scale > 0, scale, 1.0)[..., None]).astype(jnp.int8), scale
