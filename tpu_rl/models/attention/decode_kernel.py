"""The Pallas kernel of `decode.decode_attention`: one query per row, and keys in the cache.

A row sees the tokens [first, end) and no others are read, up to `ChunkedCache.chunk` tokens at each
border. The keys of a row are visited in blocks, all rows one after another. Blocks are copied from
main memory to the chip's vector memory some visits ahead, across the borders of rows. The softmax
is computed online (Milakov and Gimelshein, arXiv 1805.02867).

Letters in array shapes are those of `layers`; L counts layers and S the places of the cache.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_rl.models.attention.flash_kernels import A_B, A_BT, LANES, dot
from tpu_rl.models.layers import MASKED

Array = jax.Array

MAX_BLOCK = 512
"""Largest number of keys of a visit."""

MAX_VISIT_BYTES = 2 << 20
"""Bytes of keys and values of a visit, above which its block is made smaller."""

BYTES_IN_FLIGHT = 3 << 20
"""Bytes that are on the way from main memory at once. A bus of 2.8 TB/s, as in v5p, moves as many
in a microsecond, which is about the time that a copy takes to begin."""

MAX_BUFFERS = 16

INDEPENDENT_PRODUCTS = 4
"""Products per iteration that do not wait for one another, at least: visits times heads."""

MAX_QUERY_BYTES = 1 << 20
"""Bytes of the queries that are in vector memory at once."""


class DecodeConfig(NamedTuple):
    """Constants of the compiled kernel."""

    scale: float
    softcap: float | None = None
    interpret: bool = False
    """Let JAX interpret the kernel, on any backend and slowly. For tests."""
    has_window: bool = False
    """Rows need not see all their tokens. It only names the kernel, for the planner."""


class Visits(NamedTuple):
    """The pieces into which the kernel cuts rows and keys."""

    rows: int
    """Rows of a group. Groups are computed independently: by the two cores of a chip that has
    two."""
    kv_heads: int
    block: int
    """Keys of a visit; divides S."""
    num_blocks: int
    """S / block."""
    chunk: int
    """Keys are read in multiples of this many."""
    unrolled: int
    """Visits of an iteration."""
    buffers: int
    """Blocks that have room in vector memory; a multiple of `unrolled`."""


def is_supported(places: int) -> bool:
    """Return True if a cache of S `places` can be cut into blocks."""
    return places % LANES == 0


def make_visits(query: Array, key: Array) -> Visits:
    """Return the visits of query [B, K, G, E] to keys [L, B, ..., S, E]."""
    rows, kv_heads, group, head_dim = query.shape
    places = key.shape[3]
    is_int8 = key.dtype == jnp.int8
    key_bytes = 2 * kv_heads * _round_up(head_dim, LANES) * key.dtype.itemsize
    most = max(min(MAX_BLOCK, MAX_VISIT_BYTES // key_bytes), LANES)
    block = max(size for size in range(LANES, most + 1, LANES) if places % size == 0)
    unrolled = max(1, INDEPENDENT_PRODUCTS // kv_heads)
    ahead = min(-(-BYTES_IN_FLIGHT // (block * key_bytes)), MAX_BUFFERS - unrolled)
    query_bytes = kv_heads * _round_up(group, 8) * _round_up(head_dim, LANES) * query.dtype.itemsize
    groups = max(min(rows, 2), math.ceil(rows * query_bytes / MAX_QUERY_BYTES))
    return Visits(
        rows=math.ceil(rows / groups),
        kv_heads=kv_heads,
        block=block,
        num_blocks=places // block,
        # Scales have keys along lanes.
        chunk=LANES if is_int8 else LANES // 2,
        unrolled=unrolled,
        buffers=unrolled + _round_up(ahead, unrolled),
    )


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def block_range(visits: Visits, first: Array, end: Array) -> tuple[Array, Array]:
    """Return the first and the last block of rows that see the tokens [first, end).

    Blocks are numbered on from token 0 also where the cache is a ring.
    """
    return jax.lax.div(first, visits.block), jax.lax.div(end - 1, visits.block)


def read_range(visits: Visits, first: Array, end: Array, block: Array) -> tuple[Array, Array]:
    """Return (start, size): the keys of a block that are read, counted from its beginning."""
    chunk = visits.chunk
    begin = block * visits.block
    start = jnp.maximum(jax.lax.div(first, chunk) * chunk - begin, 0)
    stop = jnp.minimum(jax.lax.div(end + (chunk - 1), chunk) * chunk - begin, visits.block)
    return start, stop - start


class _Visit(NamedTuple):
    row: Array
    """Number of the row in its group; beyond the last one, the visit has no work."""
    block: Array
    number: Array


class _Sums(NamedTuple):
    """State of the online softmax of a row's heads."""

    maximum: Array
    """[G, 1] float32: the largest score."""
    total: Array
    """[G, 1] float32: the sum of weights relative to it."""
    weighted: Array
    """[G, E] float32: the sum of weighted values."""


def _kernel(
    visits: Visits, config: DecodeConfig, is_int8: bool, has_sinks: bool, *refs: Any
) -> None:
    """Compute the attention of a group of rows.

    refs: [2] layer and first KV head; [B] first; [B] end; query [rows, K, G, E]; sinks
    [K, G, LANES], all lanes alike, if there are any; the leaves of the cache in main memory; the
    result; buffers for blocks of each leaf; their semaphores.
    """
    num_leaves = 4 if is_int8 else 2
    place, first, end, query, *rest = refs
    sinks = rest.pop(0) if has_sinks else None
    leaves = rest[:num_leaves]
    result = rest[num_leaves]
    buffers = rest[num_leaves + 1 : -1]
    semaphores = rest[-1]
    base = pl.program_id(0) * visits.rows
    layer = place[0]
    first_head = place[1]
    heads = range(visits.kv_heads)

    def row_of(visit: _Visit) -> Array:
        return base + jnp.minimum(visit.row, visits.rows - 1)

    def blocks(row: Array) -> tuple[Array, Array]:
        row = base + jnp.minimum(row, visits.rows - 1)
        return block_range(visits, first[row], end[row])

    def count(row: Array, visited: Array) -> Array:
        first_block, last_block = blocks(row)
        return visited + last_block - first_block + 1

    num_visits = jax.lax.fori_loop(0, visits.rows, count, jnp.int32(0))

    def following(visit: _Visit) -> _Visit:
        _, last_block = blocks(visit.row)
        is_last = visit.block == last_block
        row = visit.row + is_last.astype(jnp.int32)
        next_first, _ = blocks(row)
        return _Visit(row, jnp.where(is_last, next_first, visit.block + 1), visit.number + 1)

    def copies(visit: _Visit, buffer: Array) -> list[Any]:
        row = row_of(visit)
        start, size = read_range(visits, first[row], end[row], visit.block)
        start = pl.multiple_of(start, visits.chunk)
        size = pl.multiple_of(size, visits.chunk)
        begin = jax.lax.rem(visit.block, visits.num_blocks) * visits.block
        source = pl.ds(pl.multiple_of(begin + start, visits.chunk), size)
        target = pl.ds(start, size)
        read = pl.ds(first_head, visits.kv_heads)
        # In the leaves of scales, heads lie along sublanes, which are copied as a whole.
        all_heads = slice(None)
        return [
            pltpu.make_async_copy(
                leaf.at[layer, row, read if len(leaf.shape) == 5 else all_heads, source],
                room.at[buffer, :, target],
                semaphores.at[number, buffer],
            )
            for number, (leaf, room) in enumerate(zip(leaves, buffers, strict=True))
        ]

    def start_copies(visit: _Visit, buffer: Array) -> None:
        @pl.when(visit.number < num_visits)
        def _():
            for copy in copies(visit, buffer):
                copy.start()

    def wait_for_copies(visit: _Visit, buffer: Array) -> None:
        @pl.when(visit.number < num_visits)
        def _():
            for copy in copies(visit, buffer):
                copy.wait()

    def scale_of(number: int, buffer: Array, head: int) -> Array:
        """Return the scales [1, block] of one head."""
        return buffers[number][buffer, pl.ds(first_head + head, 1), :]

    def visit_sums(visit: _Visit, buffer: Array, head: int) -> _Sums:
        """Return the sums over the keys of one visit."""
        row = row_of(visit)
        tokens = visit.block * visits.block + jax.lax.broadcasted_iota(
            jnp.int32, (1, visits.block), 1
        )
        row_end = jnp.where(visit.number < num_visits, end[row], 0)
        visible = (tokens >= first[row]) & (tokens < row_end)
        vectors = query[jnp.minimum(visit.row, visits.rows - 1), head]
        key = buffers[0][buffer, head].astype(vectors.dtype)
        value = buffers[1][buffer, head].astype(vectors.dtype)
        scores = dot(vectors, key, A_BT) * config.scale
        if is_int8:
            scores = scores * scale_of(2, buffer, head)
        if config.softcap is not None:
            scores = config.softcap * jnp.tanh(scores / config.softcap)
        scores = jnp.where(visible, scores, MASKED)
        maximum = scores.max(1, keepdims=True)
        weights = jnp.where(visible, jnp.exp(scores - maximum), 0.0)
        total = weights.sum(1, keepdims=True)
        if is_int8:
            weights = jnp.where(visible, weights * scale_of(3, buffer, head), 0.0)
        return _Sums(maximum, total, dot(weights.astype(value.dtype), value, A_B))

    def add(sums: _Sums, visit: _Sums, is_first: Array, head: int) -> _Sums:
        first_maximum = MASKED
        first_total = 0.0
        if sinks is not None:
            # The sink is a key before all others, whose weight is exp(0) and whose value is zero.
            first_maximum = sinks[head][:, :1]
            first_total = 1.0
        before = jnp.where(is_first, first_maximum, sums.maximum)
        maximum = jnp.maximum(before, visit.maximum)
        keep = jnp.exp(before - maximum)
        factor = jnp.exp(visit.maximum - maximum)
        return _Sums(
            maximum,
            keep * jnp.where(is_first, first_total, sums.total) + factor * visit.total,
            keep * jnp.where(is_first, 0.0, sums.weighted) + factor * visit.weighted,
        )

    if not is_int8:
        # Of a block that is read in part, the rest is whatever was in memory, which may be NaN.
        buffers[1][...] = jnp.zeros_like(buffers[1])

    def begin(buffer: Array, visit: _Visit) -> _Visit:
        start_copies(visit, buffer)
        return following(visit)

    ahead = visits.buffers - visits.unrolled
    first_visit = _Visit(jnp.int32(0), blocks(jnp.int32(0))[0], jnp.int32(0))
    loading = jax.lax.fori_loop(0, ahead, begin, first_visit)

    turns = visits.buffers // visits.unrolled

    def iterate(_: Array, carry: Any) -> Any:
        turn, visit, loading, sums = carry
        previous_turn = jnp.where(turn == 0, turns - 1, turn - 1)
        for i in range(visits.unrolled):
            start_copies(loading, previous_turn * visits.unrolled + i)
            loading = following(loading)
        computed = []
        for i in range(visits.unrolled):
            buffer = turn * visits.unrolled + i
            wait_for_copies(visit, buffer)
            computed.append((visit, [visit_sums(visit, buffer, head) for head in heads]))
            visit = following(visit)
        for visited, new in computed:
            is_first = visited.block == blocks(visited.row)[0]
            is_first &= visited.number < num_visits
            sums = [add(sums[head], new[head], is_first, head) for head in heads]
            # Every visit writes what is known so far. Those beyond the last add nothing to it.
            for head in heads:
                attended = sums[head].weighted / sums[head].total
                row = jnp.minimum(visited.row, visits.rows - 1)
                result[row, head] = attended.astype(result.dtype)
        return jnp.where(turn == turns - 1, 0, turn + 1), visit, loading, sums

    group, head_dim = query.shape[2:]
    column = jnp.full((group, 1), MASKED, jnp.float32)
    empty = _Sums(column, jnp.zeros_like(column), jnp.zeros((group, head_dim), jnp.float32))
    iterations = (num_visits + visits.unrolled - 1) // visits.unrolled
    carry = (jnp.int32(0), first_visit, loading, [empty for _ in heads])
    jax.lax.fori_loop(0, iterations, iterate, carry)


def attention(
    config: DecodeConfig,
    query: Array,
    leaves: list[Array],
    layer: Array | int,
    first_head: Array | int,
    first: Array,
    end: Array,
    sinks: Array | None = None,
) -> Array:
    """Return the attention [B, K, G, E] of query [B, K, G, E].

    Args:
        config: constants.
        query: G query heads per KV head.
        leaves: keys and values [L, B, ..., S, E]; with int8, also their scales [L, B, ..., S]. S
            must be a multiple of `LANES`.
        layer: number of the layer.
        first_head: the KV heads are K heads of the cache from this one on.
        first, end: [B] int32: a row sees the tokens [first, end), at least one and no more than S.
            Their place in the cache is their number modulo S.
        sinks: [K, G], the score of a further key of each query, whose value is zero.
    """
    visits = make_visits(query, leaves[0])
    rows, kv_heads, group, head_dim = query.shape
    is_int8 = len(leaves) == 4
    places = leaves[0].shape[3]
    groups = math.ceil(rows / visits.rows)
    missing = groups * visits.rows - rows
    # Rows that do not exist are last, and have no visits: their last block is 0, their first is 1.
    first, end = (
        jnp.pad(numbers, (0, missing), constant_values=visits.block) for numbers in (first, end)
    )
    query_spec = pl.BlockSpec(
        (visits.rows, kv_heads, group, head_dim), lambda number, *_: (number, 0, 0, 0)
    )
    rooms = [
        pltpu.VMEM(
            (
                visits.buffers,
                kv_heads if leaf.ndim == 5 else leaf.shape[2],
                visits.block,
                *leaf.shape[4:],
            ),
            leaf.dtype,
        )
        for leaf in leaves
    ]
    sink_lanes = []
    sink_specs = []
    if sinks is not None:
        shape = (kv_heads, group, LANES)
        sink_lanes = [jnp.broadcast_to(sinks.astype(jnp.float32)[..., None], shape)]
        sink_specs = [pl.BlockSpec(shape, lambda number, *_: (0, 0, 0))]
    token_bytes = sum(math.prod(leaf.shape[4:]) * leaf.dtype.itemsize for leaf in leaves)
    products = 2 * query.size * places
    call = pl.pallas_call(
        functools.partial(_kernel, visits, config, is_int8, sinks is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            3,
            grid=(groups,),
            in_specs=[
                query_spec,
                *sink_specs,
                *(pl.BlockSpec(memory_space=pl.ANY) for _ in leaves),
            ],
            out_specs=query_spec,
            scratch_shapes=[*rooms, pltpu.SemaphoreType.DMA((len(leaves), visits.buffers))],
        ),
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        # For full caches: how long the rows are is not known when this is compiled.
        cost_estimate=pl.CostEstimate(
            flops=2 * products,
            transcendentals=rows * kv_heads * group * places,
            bytes_accessed=rows * kv_heads * places * token_bytes
            + 2 * query.size * query.dtype.itemsize,
        ),
        interpret=pltpu.InterpretParams() if config.interpret else False,
        name="decode_attention_window" if config.has_window else "decode_attention",
    )
    place = jnp.stack([jnp.asarray(layer, jnp.int32), jnp.asarray(first_head, jnp.int32)])
    return call(place, first, end, query, *sink_lanes, *leaves)
