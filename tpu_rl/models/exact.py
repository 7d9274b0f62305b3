"""Arithmetic whose bits do not depend on how many rows and keys are computed together.

A decoder with `DecoderConfig.exact` samples a token from the very bits that the update computes for
it. Compilers choose the order of a sum by its shape, so a step that decodes one token per row adds
up in another order than a pass over packed rows, and in bfloat16 the layers amplify a flipped bit
up to the noise of the format. Here every order is written out:

- attention reads keys in blocks, aligned by their position in the sequence, with one online softmax
  (`attention`, and `path_attention` for packed rows);
- sums of norms are trees (`sums.tree_sum`), and so are those of log-probs;
- products with a layer's weights and with the unembedding add up blocks of fixed size (`product`,
  `unembed`), because longer sums are cut into parts whose number depends on the number of rows;
- on CPUs, the rows of every product fill the tiles of XLA's loops (`whole_tiles`), because a last
  tile with few rows is computed by another loop.

On CPUs this also needs XLA without YNNPACK, which chooses its loop by the number of rows: see
`runtime.host.exact_settings`.

Letters in array shapes are those of `layers`.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tpu_rl.models import layers
from tpu_rl.models.layers import MASKED, TokenIndex
from tpu_rl.sums import tree_sum
from tpu_rl.train.sharding import constrain, spread
from tpu_rl.types import Array, Paths

KEY_BLOCK = 64
"""Keys that `attention` reads at once."""

SUM_BLOCK = 1024
"""Largest number of terms that `product` gives to the compiler as one sum on TPUs. The compiler
cuts longer sums into parts, whose number depends on the number of rows. It has not cut one of this
length in any program that we read, which docs/reference/attention.md lists."""

VOCAB_BLOCK = 2048
"""Rows of the unembedding that `unembed` multiplies at once on TPUs. With more, the compiler cuts
the sum over a row, to keep a part of the matrix in its fast memory."""

CPU_SUM_BLOCK = 256
"""Largest number of terms of a sum on CPUs. XLA's matrix library for CPUs cuts longer sums into
parts that depend on the number of rows: sums of 576 terms and more in our measurements, none of
256."""

TILE_ROWS = 6
"""Rows of a tile of that library on a processor with AVX2. In a last tile of one, two or three rows
it adds up the terms in another order."""

TILE_OUTPUTS = 16
"""The unembedding is padded to a multiple of this many rows. With 97 outputs, the order of the last
one's sum depended on the number of rows of the other operand."""

EMBED = "embed"
"""The logical axis of the residual stream. Weights may be sharded along it, but no activation
is."""


def mean(x: Array) -> Array:
    """Return the mean of x [..., n] over its last dimension: [...]."""
    return tree_sum(x) / x.shape[-1]


def whole_tiles(count: int, rows: int = 1) -> int:
    """Return the smallest n >= count for which the last tile of n * rows rows is no short one.

    Short tiles have one, two or three of `TILE_ROWS` rows.
    """
    return next(n for n in itertools.count(count) if n * rows % TILE_ROWS not in (1, 2, 3))


def product(equation: str, x: Array, weight: Array, axes: tuple[str, ...]) -> Array:
    """Return `layers.product` of x [B, T, ...], with a sum whose order does not depend on B and T.

    The sum is over blocks of at most `SUM_BLOCK` terms (`CPU_SUM_BLOCK` on CPUs), one after another
    in float32. Devices that share the summed dimension add up their own terms first, and then each
    other's. On GPUs the order is the compiler's.

    `axes` are the logical axes of the weight.
    """
    return layers.product(equation, x, weight, _Einsum(axes))


def low_rank(
    equation: str, x: Array, a: Array, b: Array, scale: float, axes: tuple[str, ...]
) -> Array:
    """Return `layers.low_rank` for the adapter of a weight with this equation.

    The sum over inputs is that of `product`. `axes` are the logical axes of a.
    """
    inputs, _, output_axes = equation.partition("->")
    x_axes, _, weight_axes = inputs.partition(",")
    summed = "".join(axis for axis in weight_axes if axis in x_axes)
    rows = "".join(axis for axis in x_axes if axis not in summed)
    outputs = output_axes.removeprefix(rows)
    inner = scale * product(f"{x_axes},{summed}r->{rows}r", x, a, axes)
    return product(f"{rows}r,r{outputs}->{output_axes}", inner, b, ("rank",))


class _Einsum(NamedTuple):
    axes: tuple[str, ...]

    def __call__(self, equation: str, x: Array, weight: Array) -> Array:
        return jax.lax.platform_dependent(
            x,
            weight,
            tpu=functools.partial(blocked_einsum, equation, self.axes),
            cpu=functools.partial(cpu_einsum, equation, self.axes),
            default=functools.partial(jnp.einsum, equation),
        )


def cpu_einsum(
    equation: str, axes: tuple[str, ...], x: Array, weight: Array, dtype: Any = None
) -> Array:
    """Return the einsum of x [B, T, ...] that `product` computes on CPUs, in `dtype` if given."""
    batch, length = x.shape[:2]
    # One dimension for the rows of each device, which are padded together.
    shards = spread("rows", batch)
    rows = batch // shards * length
    x = x.reshape(shards, rows, *x.shape[2:])
    x = jnp.pad(x, ((0, 0), (0, whole_tiles(rows) - rows), *((0, 0),) * (x.ndim - 2)))
    y = blocked_einsum(equation, axes, x, weight, CPU_SUM_BLOCK, dtype)
    return y[:, :rows].reshape(batch, length, *y.shape[2:])


def blocked_einsum(
    equation: str,
    axes: tuple[str, ...],
    x: Array,
    weight: Array,
    limit: int = SUM_BLOCK,
    dtype: Any = None,
) -> Array:
    """Return an einsum that sums blocks of at most `limit` terms, in `dtype` if given."""
    inputs, _, output_axes = equation.partition("->")
    x_axes, _, weight_axes = inputs.partition(",")
    summed = [axis for axis in weight_axes if axis not in output_axes]
    # The first summed dimension is cut; others, of heads, are short and stay whole.
    place = weight_axes.index(summed[0])
    whole = math.prod(weight.shape[weight_axes.index(axis)] for axis in summed[1:])
    length = weight.shape[place]
    shards = 1
    if axes[place] == EMBED:
        weight = constrain(weight, [None if axis == EMBED else axis for axis in axes])
    else:
        shards = spread(axes[place], length)
    block = _block(length // shards, limit // whole)
    einsum = functools.partial(jnp.einsum, equation, preferred_element_type=dtype)
    if block * shards == length:
        return einsum(x, weight)

    def blocks(array: Array, dim: int) -> Array:
        """[..., shards * n * block, ...] -> [n, ..., shards, block, ...]."""
        parts = (shards, length // (shards * block), block)
        array = array.reshape(*array.shape[:dim], *parts, *array.shape[dim + 1 :])
        return jnp.moveaxis(array, dim + 1, 0)

    def add(total: Array, terms: tuple[Array, Array]) -> tuple[Array, None]:
        return total + jnp.einsum(block_equation, *terms, preferred_element_type=jnp.float32), None

    block_equation = equation.replace(summed[0], "z" + summed[0]).replace("->", "->z")
    shape = jax.eval_shape(einsum, x, weight)
    total, _ = jax.lax.scan(
        add,
        jnp.zeros((shards, *shape.shape), jnp.float32),
        (blocks(x, x_axes.index(summed[0])), blocks(weight, place)),
    )
    return total.sum(0).astype(shape.dtype)


@jax.custom_vjp
def unembed(hidden: Array, matrix: Array) -> Array:
    """Return logits [B, T, V] float32 of hidden [B, T, D] and the unembedding [V, D].

    On TPUs and CPUs the order of each sum does not depend on B and T. The gradient is that of an
    einsum.
    """
    return jax.lax.platform_dependent(
        hidden,
        matrix,
        tpu=blocked_unembed,
        cpu=cpu_unembed,
        default=functools.partial(_float32_einsum, UNEMBED),
    )


def _unembed_backward(terms: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    _, pull_back = jax.vjp(functools.partial(_float32_einsum, UNEMBED), *terms)
    return pull_back(gradient)


unembed.defvjp(lambda *inputs: (unembed(*inputs), inputs), _unembed_backward)


UNEMBED = "btd,vd->btv"


def _float32_einsum(equation: str, *terms: Array) -> Array:
    return jnp.einsum(equation, *terms, preferred_element_type=jnp.float32)


def cpu_unembed(hidden: Array, matrix: Array) -> Array:
    """Return the logits that `unembed` computes on CPUs."""
    size = len(matrix)
    matrix = jnp.pad(matrix, ((0, -size % TILE_OUTPUTS), (0, 0)))
    return cpu_einsum(UNEMBED, ("vocab", EMBED), hidden, matrix, jnp.float32)[..., :size]


def blocked_unembed(hidden: Array, matrix: Array) -> Array:
    """Return the logits that `unembed` computes on TPUs.

    The last block of rows may repeat some of the block before it.
    """
    matrix = constrain(matrix, ["vocab", None])
    size, width = matrix.shape
    shards = spread("vocab", size)
    shard_size = size // shards
    rows = min(VOCAB_BLOCK, shard_size)
    block = _block(width, SUM_BLOCK)
    matrix = matrix.reshape(shards, shard_size, width)

    def add_rows(logits: Array, number: Array) -> tuple[Array, None]:
        start = jnp.minimum(number * rows, shard_size - rows)
        part = jax.lax.dynamic_slice_in_dim(matrix, start, rows, axis=1)
        total = 0.0
        for first in range(0, width, block):
            terms = slice(first, first + block)
            total += _float32_einsum("btd,zvd->btzv", hidden[..., terms], part[..., terms])
        return jax.lax.dynamic_update_slice_in_dim(logits, total, start, axis=3), None

    empty = jnp.zeros((*hidden.shape[:2], shards, shard_size), jnp.float32)
    logits, _ = jax.lax.scan(add_rows, empty, jnp.arange(-(-shard_size // rows)))
    return logits.reshape(*hidden.shape[:2], size)


def _block(length: int, limit: int) -> int:
    """Return the largest divisor of `length` up to `limit`, a multiple of 128 if there is one."""
    divisors = [size for size in range(1, limit + 1) if length % size == 0]
    aligned = [size for size in divisors if size % 128 == 0]
    return max(aligned or divisors)


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
) -> Array:
    """Return the attention of `layers.attention`, with bits that depend only on visible keys.

    Keys are read in blocks of `KEY_BLOCK`, one after another. A block in which a query sees nothing
    changes no bit of its result. So a query gets the same bits wherever the keys that it sees come
    in the same order and have the same places modulo `KEY_BLOCK`.

    The gradient is that of `layers.dense_attention`.
    """
    length = query.shape[1]
    group = query.shape[2] // key.shape[1]

    def attend(padded: int, query: Array, queries: TokenIndex, *others: Any) -> Array:
        """Return the attention, with repetitions of the last query until there are `padded`."""
        missing = padded - length
        query = jnp.pad(query, ((0, 0), (0, missing), (0, 0), (0, 0)), "edge")
        queries = TokenIndex(*(jnp.pad(field, ((0, 0), (0, missing)), "edge") for field in queries))
        attended: Any = _attention(scale, sliding_window, softcap, query, queries, *others)
        return attended[:, :length]

    return jax.lax.platform_dependent(
        *(query, queries, key, value, sinks, keys),
        cpu=functools.partial(attend, whole_tiles(length, group)),
        default=functools.partial(attend, max(length, 2)),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attention(
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    query: Array,
    queries: TokenIndex,
    key: Array,
    value: Array,
    sinks: Array | None,
    keys: TokenIndex,
) -> Array:
    rows, length, num_heads, head_dim = query.shape
    kv_heads = key.shape[1]
    group = num_heads // kv_heads
    missing = -key.shape[2] % KEY_BLOCK
    num_blocks = (key.shape[2] + missing) // KEY_BLOCK
    folded = query.reshape(rows, length, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    folded = folded.reshape(rows, kv_heads, group * length, head_dim)

    def key_blocks(x: Array) -> Array:
        """[B, K, S, E] -> [blocks, B, K, 64, E]."""
        x = jnp.pad(x, ((0, 0), (0, 0), (0, missing), (0, 0)))
        return jnp.moveaxis(x.reshape(rows, kv_heads, num_blocks, KEY_BLOCK, -1), 2, 0)

    def index_blocks(x: Array) -> Array:
        """[B, S] -> [blocks, B, 64]. No query sees the padding, whose `visible_until` is 0."""
        x = jnp.pad(x, ((0, 0), (0, missing)))
        return jnp.moveaxis(x.reshape(rows, num_blocks, KEY_BLOCK), 1, 0)

    def add_block(
        sums: tuple[Array, Array, Array], block: tuple[Array, Array, TokenIndex]
    ) -> tuple[tuple[Array, Array, Array], None]:
        max_score, total, weighted = sums
        block_key, block_value, block_index = block
        scores = jnp.zeros((), jnp.float32)
        for first in range(0, head_dim, CPU_SUM_BLOCK):
            terms = slice(first, first + CPU_SUM_BLOCK)
            scores += _float32_einsum("bkqe,bkse->bkqs", folded[..., terms], block_key[..., terms])
        scores = scores * scale
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        mask = layers.attention_mask(queries, block_index, sliding_window)[:, None, None]
        scores = scores.reshape(rows, kv_heads, group, length, KEY_BLOCK)
        scores = jnp.where(mask, scores, MASKED)
        new_max = jnp.maximum(max_score, scores.max(-1))
        shrink = jnp.exp(max_score - new_max)
        weights = jnp.where(mask, jnp.exp(scores - new_max[..., None]), 0.0)
        block_weighted = jnp.einsum(
            "bkqs,bkse->bkqe",
            weights.astype(value.dtype).reshape(rows, kv_heads, group * length, KEY_BLOCK),
            block_value,
            preferred_element_type=jnp.float32,
        )
        total = total * shrink + tree_sum(weights)
        weighted = weighted * shrink[..., None] + block_weighted.reshape(weighted.shape)
        return (new_max, total, weighted), None

    shape = (rows, kv_heads, group, length)
    if sinks is None:
        first_scores, first_total = jnp.full(shape, MASKED, jnp.float32), 0.0
    else:
        # The sink is a key before all others, whose weight is exp(0).
        sink_scores = sinks.astype(jnp.float32).reshape(1, kv_heads, group, 1)
        first_scores, first_total = jnp.broadcast_to(sink_scores, shape), 1.0
    sums = (
        first_scores,
        jnp.full(shape, first_total, jnp.float32),
        jnp.zeros((*shape, value.shape[-1]), jnp.float32),
    )
    blocks = (key_blocks(key), key_blocks(value), TokenIndex(*map(index_blocks, keys)))
    (_, total, weighted), _ = jax.lax.scan(add_block, sums, blocks)
    attended = weighted / jnp.where(total > 0, total, 1.0)[..., None]
    attended = attended.astype(query.dtype).transpose(0, 3, 1, 2, 4)
    return attended.reshape(rows, length, num_heads, -1)


def _attention_forward(
    scale: float, sliding_window: int | None, softcap: float | None, *arguments: Any
) -> tuple[Array, tuple]:
    return _attention(scale, sliding_window, softcap, *arguments), arguments


def _attention_backward(
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    arguments: tuple,
    gradient: Array,
) -> tuple:
    query, queries, key, value, sinks, keys = arguments

    def dense(query: Array, key: Array, value: Array, sinks: Array | None) -> Array:
        return layers.dense_attention(
            query,
            key,
            value,
            queries,
            keys,
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
        )

    _, pull_back = jax.vjp(dense, query, key, value, sinks)
    of_query, *others = pull_back(gradient)
    return of_query, None, *others, None


_attention.defvjp(_attention_forward, _attention_backward)


def path_attention(
    query: Array,
    key: Array,
    value: Array,
    tokens: TokenIndex,
    paths: Paths,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """Return `attention` of packed rows, with the bits of one row per sequence.

    Args:
        query: [R, S, H, E].
        key, value: [R, K, S, E].
        tokens: indices of the tokens, [R, S].
        paths: the queries of each tile, and its keys by their position in the sequence.
    """
    rows, tiles, tile_size = paths.queries.shape
    slots = query.shape[1]

    def take(x: Array, index: Array) -> Array:
        """[R, S, ...] at index [R, n, t] -> [R n, t, ...]."""
        flat = jnp.minimum(index, slots - 1).reshape(rows, -1)
        selected = jax.vmap(lambda row, at: row[at])(x, flat)
        return selected.reshape(rows * tiles, -1, *x.shape[2:])

    is_key = (paths.keys < slots).reshape(rows * tiles, -1)
    keys = TokenIndex(*(take(field, paths.keys) for field in tokens))
    keys = keys._replace(visible_until=jnp.where(is_key, keys.visible_until, 0))
    key, value = (take(x.swapaxes(1, 2), paths.keys).swapaxes(1, 2) for x in (key, value))
    attended = attention(
        take(query, paths.queries),
        key,
        value,
        TokenIndex(*(take(field, paths.queries) for field in tokens)),
        keys,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
    )

    def put(row: Array, at: Array) -> Array:
        """[n t, H, E] -> [S, H, E]."""
        return jnp.zeros((slots, *row.shape[1:]), row.dtype).at[at].set(row, mode="drop")

    attended = attended.reshape(rows, tiles * tile_size, query.shape[2], -1)
    return jax.vmap(put)(attended, paths.queries.reshape(rows, -1))
