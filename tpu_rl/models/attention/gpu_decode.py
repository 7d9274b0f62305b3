"""The Pallas kernel (Triton) of `decode.decode_attention` for NVIDIA GPUs.

Each row reads the blocks of keys that hold what it sees, where they lie: nothing is copied out of
the stack of layers. The keys of a row are cut in splits that are computed independently, as in
Flash-Decoding, and `attention` adds them up by their log-sum-exp. The prompt of a group is read for
`QUERIES` queries of its rows at once, and adds one more split to each (as in Hydragen, arXiv
2402.05099).

JAX ships `pallas.ops.gpu.decode_attention`, which takes the keys of one layer, so that XLA would
copy them out of the stack for every layer of every token. It has no caps, sinks or rings, and
rounds the sum of each split to the type of the queries.

Letters in array shapes are those of `layers`; L counts layers, S the places of the cache and P the
splits.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from tpu_rl.models.attention import decode_kernel
from tpu_rl.models.attention.cudnn import nvidia_capability
from tpu_rl.models.attention.decode_kernel import DecodeConfig
from tpu_rl.models.attention.flash_kernels import A_B, A_BT, LANES
from tpu_rl.models.config import AttentionConfig
from tpu_rl.models.layers import MASKED
from tpu_rl.train import sharding

Array = jax.Array

BLOCK_BYTES = 1 << 14
"""Bytes of the keys of a block: those of two blocks, and of their values, are in shared memory."""

MIN_ROWS = 16
"""Triton multiplies matrices of at least so many rows."""

PROGRAMS = 2048
"""Programs that are wanted: some for each multiprocessor, so that long rows do not come last."""

SPLIT_PLACES = 256
"""A split has at least so many places of the cache."""

QUERIES = 32
"""Queries of a KV head, of rows that share a prompt, that are multiplied with it at once."""


class Tiles(NamedTuple):
    """Rows whose queries are multiplied with the prompt that they share: T tiles of n rows."""

    rows: Array
    """[T, n] int32: the rows of a tile; what follows its last row has no meaning."""
    tokens: Array
    """[T] int32: the first tokens of these rows that they share; 0: the tile has no rows."""
    tile: Array
    """[B] int32: the tile that has a row; T if none has it."""
    member: Array
    """[B] int32: the row's number in the tile."""
    shared: Array
    """[B] int32: the first tokens of a row that its tile reads."""


def unsupported_reason(config: AttentionConfig, device: Any) -> str:
    """Return a reason for which a device cannot use the kernel for a model; "" if it can."""
    if nvidia_capability(device) < 8:
        return "the kernel is for NVIDIA GPUs of compute capability 8.0 (A100) and newer"
    head_dim = config.head_dim
    reasons = {
        "keys and values must have one width, and this model's latent attention has two": (
            config.latent is not None
        ),
        "all layers must have the same heads, and this model's full layers have others": (
            config.full is not None
        ),
        f"the head dimension {head_dim} is not a power of two from 16 to 256": (
            head_dim not in (16, 32, 64, 128, 256)
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def is_supported(stack: dict[str, Array]) -> bool:
    """Return True if the kernel reads the leaves of a layer type: whole blocks, and no int8 leaf of
    2 to 4 GiB on a device.

    Pallas numbers the elements of a leaf of up to 4 GiB in 32 bits, one of them for the sign.
    """
    leaf = stack["k"]
    _, rows, kv_heads, places, _ = leaf.shape
    if places % LANES:
        return False
    devices = sharding.spread("slots", rows) * sharding.spread("kv_heads", kv_heads)
    return leaf.dtype != jnp.int8 or not 1 << 31 <= leaf.size // devices <= 1 << 32


def find_tiles(group: int, prompt: Array, tokens: Array, first: Array, end: Array) -> Tiles:
    """Return the tiles of rows that see their prompt, and a token after it.

    `group` query heads read one KV head. `prompt`, `tokens`, `first` and `end` [B] are those of
    `decode_kernel.find_groups`.
    """
    rows = len(prompt)
    number = jnp.arange(rows)
    size = max(2, QUERIES // group)
    # A row reads at least one token alone: the newest, which may be the prompt's last.
    tokens = jnp.maximum(tokens - 1, 0)
    tokens = jnp.where((first == 0) & (end > tokens), tokens, 0)
    groups = decode_kernel.groups_of_part(prompt, tokens)
    # By position, where the members of a group are neighbors: the number in the group.
    begin = jax.lax.cummax(jnp.where(groups.size > 0, number, -1))
    number_in_group = number - begin
    is_member = (begin >= 0) & (number_in_group < groups.size[begin])
    is_first = is_member & (number_in_group % size == 0)
    # The most tiles: groups of three rows in tiles of two and one.
    count = -(-2 * rows // 3)
    starts = jnp.nonzero(is_first, size=count, fill_value=rows)[0]
    positions = jnp.minimum(starts[:, None] + jnp.arange(size)[None, :], rows - 1)
    tile = jnp.where(is_member, jnp.cumsum(is_first) - 1, count)
    zeros = jnp.zeros_like(groups.member)
    return Tiles(
        rows=groups.member[positions],
        tokens=jnp.where(starts < rows, groups.blocks[begin[positions[:, 0]]], 0),
        tile=zeros.at[groups.member].set(tile),
        member=zeros.at[groups.member].set(number_in_group % size),
        shared=groups.shared,
    )


def _kernel(config: DecodeConfig, block: int, splits: int, *refs: Any) -> None:
    """Compute one split of one row and KV head.

    refs: [2] layer and first KV head; [R] the row of the cache; [R] first; [R] end; query
    [R, K, G, E]; keys and values [L, B, ..., S, E], and in int8 their scales [L, B, ..., S]; the
    results, weighted sums [R, K, P, G, E], maxima and totals [R, K, P, G].
    """
    (
        layer_and_head,
        cache_rows,
        first,
        end,
        query,
        keys,
        values,
        *scales,
        weighted_sums,
        maxima,
        totals,
    ) = refs
    row, head, split = (pl.program_id(axis) for axis in range(3))
    cache_row = cache_rows[row]
    layer = layer_and_head[0]
    kv_head = layer_and_head[1] + head
    begin = first[row]
    stop = end[row]
    first_block = jax.lax.div(begin, block)
    num_blocks = pl.cdiv(stop, block) - first_block
    share = pl.cdiv(num_blocks, splits)
    begin_block = jnp.minimum(split * share, num_blocks)
    end_block = jnp.minimum(begin_block + share, num_blocks)
    group, head_dim = query.shape[2:]
    queries = query[row, head, :, :]
    # XLA's products have this precision in float32; bfloat16 has no choice.
    precision = jax.lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None

    def product(a: Array, b: Array, dimension_numbers: Any) -> Array:
        return jax.lax.dot_general(
            a, b, dimension_numbers, precision, preferred_element_type=jnp.float32
        )

    def visit(number: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        maximum, total, weighted = sums
        start = (first_block + number) * block
        tokens = start + jnp.arange(block)
        visible = (tokens >= begin) & (tokens < stop)
        # In a ring, the place of a token is its number modulo the ring's size.
        places = pl.ds(jax.lax.rem(start, keys.shape[3]), block)

        def read(leaf: Any) -> Array:
            part = leaf.at[layer, cache_row, kv_head, places, :]
            return triton.load(part, mask=visible[:, None], other=0).astype(queries.dtype)

        def scale_of(leaf: Any) -> Array:
            part = leaf.at[layer, cache_row, kv_head, places]
            return triton.load(part, mask=visible, other=0)[None, :]

        # s = q k^T scale, p = exp(s - m). Scales of int8 keys multiply s, those of values p.
        scores = product(queries, read(keys), A_BT) * config.scale
        if scales:
            scores *= scale_of(scales[0])
        if config.softcap is not None:
            scores = config.softcap * jnp.tanh(scores / config.softcap)
        scores = jnp.where(visible[None, :], scores, MASKED)
        new_maximum = jnp.maximum(maximum, scores.max(1))
        weights = jnp.exp(scores - new_maximum[:, None])
        factor = jnp.exp(maximum - new_maximum)
        new_total = factor * total + weights.sum(1)
        if scales:
            weights *= scale_of(scales[1])
        added = product(weights.astype(queries.dtype), read(values), A_B)
        return new_maximum, new_total, factor[:, None] * weighted + added

    maximum, total, weighted = jax.lax.fori_loop(
        begin_block,
        end_block,
        visit,
        (
            jnp.full(group, MASKED, jnp.float32),
            jnp.zeros(group, jnp.float32),
            jnp.zeros((group, head_dim), jnp.float32),
        ),
    )
    weighted_sums[row, head, split, :, :] = weighted
    maxima[row, head, split, :] = maximum
    totals[row, head, split, :] = total


class _Sums(NamedTuple):
    """Sums of the splits of rows or tiles: R of them, with P splits each."""

    weighted: Array
    """[R, K, P, G, E] float32: the sum of weighted values."""
    maximum: Array
    """[R, K, P, G] float32: the largest score."""
    total: Array
    """[R, K, P, G] float32: the sum of weights relative to it."""


def attention(
    config: DecodeConfig,
    query: Array,
    leaves: list[Array],
    layer: Array | int,
    first_head: Array | int,
    first: Array,
    end: Array,
    sinks: Array | None = None,
    tiles: Tiles | None = None,
) -> Array:
    """Return the attention [B, K, G, E] of query [B, K, G, E].

    The arguments are those of `decode_kernel.attention`, but for `tiles` of `find_tiles`.
    """
    layer_and_head = jnp.stack([jnp.asarray(layer, jnp.int32), jnp.asarray(first_head, jnp.int32)])
    rows = jnp.arange(len(query), dtype=jnp.int32)
    if tiles is None:
        sums = _sums(config, query, leaves, layer_and_head, rows, first, end)
    else:
        after_prompt = jnp.maximum(first, tiles.shared)
        row_sums = _sums(config, query, leaves, layer_and_head, rows, after_prompt, end)
        prompt_sums = _sums_of_tiles(config, query, leaves, layer_and_head, tiles)
        pairs = zip(row_sums, prompt_sums, strict=True)
        sums = _Sums(*(jnp.concatenate(pair, axis=2) for pair in pairs))
    weighted, maximum, total = sums
    highest = maximum.max(2, keepdims=True)
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, None], highest.shape)
        highest = jnp.maximum(highest, sinks)
    factor = jnp.exp(maximum - highest)
    denominator = (total * factor).sum(2)
    if sinks is not None:
        denominator += jnp.exp(sinks - highest)[:, :, 0]
    attended = (weighted * factor[..., None]).sum(2) / denominator[..., None]
    return attended.astype(query.dtype)


def _sums_of_tiles(
    config: DecodeConfig, query: Array, leaves: list[Array], layer_and_head: Array, tiles: Tiles
) -> _Sums:
    """Return the sums of each row over the prompt that its tile reads, nothing for other rows."""
    count, size = tiles.rows.shape
    kv_heads, group = query.shape[1:3]
    # [T, n, K, G, E] -> [T, K, n G, E]: a tile is a row with n times as many queries.
    queries = query[tiles.rows].swapaxes(1, 2).reshape(count, kv_heads, size * group, -1)
    start = jnp.zeros_like(tiles.tokens)
    sums = _sums(config, queries, leaves, layer_and_head, tiles.rows[:, 0], start, tiles.tokens)

    def of_rows(part: Array, nothing: float) -> Array:
        """Gather [T, K, P, n G, ...] -> [B, K, P, G, ...]."""
        members = part.reshape(*part.shape[:3], size, group, *part.shape[4:])
        members = jnp.moveaxis(members, 3, 1)
        return members.at[tiles.tile, tiles.member].get(mode="fill", fill_value=nothing)

    return _Sums(of_rows(sums.weighted, 0), of_rows(sums.maximum, MASKED), of_rows(sums.total, 0))


def _sums(
    config: DecodeConfig,
    query: Array,
    leaves: list[Array],
    layer_and_head: Array,
    cache_rows: Array,
    first: Array,
    end: Array,
) -> _Sums:
    """Return the sums of query [R, K, G, E] over the tokens [first, end) of `cache_rows` [R].

    `layer_and_head` is [2]: the layer and the first KV head.
    """
    rows, kv_heads, group, head_dim = query.shape
    places = leaves[0].shape[3]
    block = min(max(BLOCK_BYTES // (head_dim * leaves[0].dtype.itemsize), MIN_ROWS), LANES)
    splits = max(1, min(math.ceil(PROGRAMS / (rows * kv_heads)), places // SPLIT_PLACES))
    padded_group = max(MIN_ROWS, pl.next_power_of_2(group))
    padded = jnp.pad(query, ((0, 0), (0, 0), (0, padded_group - group), (0, 0)))
    results = (rows, kv_heads, splits, padded_group)
    weighted, maximum, total = pl.pallas_call(
        functools.partial(_kernel, config, block, splits),
        grid=(rows, kv_heads, splits),
        out_shape=(
            jax.ShapeDtypeStruct((*results, head_dim), jnp.float32),
            jax.ShapeDtypeStruct(results, jnp.float32),
            jax.ShapeDtypeStruct(results, jnp.float32),
        ),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=config.interpret,
        name="gpu_decode_attention",
    )(layer_and_head, cache_rows, first, end, padded, *leaves)
    return _Sums(weighted[..., :group, :], maximum[..., :group], total[..., :group])
