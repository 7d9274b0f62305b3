"""The Pallas kernels of `flash_attention`: what a block of queries mixes of the blocks of keys, and its gradients.

Scores are [keys, queries] throughout, so that what belongs to a query (maximum, sum, log-sum-exp) is a row of lanes.
Letters as in layers.py, and N blocks of queries, M blocks of keys.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_rl.models import layers
from tpu_rl.models.layers import MASKED, Slots

Array = jax.Array

BLOCKS = (512, 256, 128)
"""Tokens of a block, the largest that divides the row."""
WIDE = 512
"""Bytes of a head's vector above which blocks are half as long at most, for the chip's vector memory."""
LANES = 128
"""Of a vector register: the smallest block."""


class How(NamedTuple):
    """What is fixed when the kernels are compiled."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    interpret: bool = False
    """On any backend, slowly, by jax itself: for tests."""
    parts: int = 1
    """Devices that the tokens of a row lie on, in `layers.balanced_order`."""


# --- which blocks ------------------------------------------------------------------------------------------------


class Grid(NamedTuple):
    """How queries and keys are cut."""

    rows: int
    heads: int
    kv_heads: int
    query_block: int
    key_block: int
    query_blocks: int
    key_blocks: int
    width: int


def grid_of(query: Array, key: Array) -> Grid:
    rows, heads, tokens, width = query.shape
    most = BLOCKS[0] if width * query.dtype.itemsize <= WIDE else BLOCKS[0] // 2
    sizes = [size for size in BLOCKS if size <= most]
    query_block, key_block = (next(size for size in sizes if n % size == 0) for n in (tokens, key.shape[2]))
    blocks = (query_block, key_block, tokens // query_block, key.shape[2] // key_block)
    return Grid(rows, heads, key.shape[1], *blocks, width)


def seen_blocks(how: How, grid: Grid, queries: Slots, keys: Slots) -> Array:
    """[B, N, M] bool: False only where no query of the block sees a key of the other one (`layers.sees`), judged by
    what is least and greatest in each."""

    def ends(slots: Slots, count: int, axis: int) -> tuple[Slots, Slots]:
        # Padding stands behind all segments and branches, whose numbers rise along a row: a segment and branch of its
        # own that is greater than theirs.
        segments, branches = (jnp.where(slots.segment_ids == 0, 2**30, ids) for ids in slots[2:])
        slots = slots._replace(segment_ids=segments, branch_ids=branches)
        parts = [jnp.expand_dims(part.reshape(grid.rows, count, -1), axis) for part in slots]
        return Slots(*(part.min(-1) for part in parts)), Slots(*(part.max(-1) for part in parts))

    low, high = ends(queries, grid.query_blocks, 2)
    key_low, key_high = ends(keys, grid.key_blocks, 1)
    segments = (low.segment_ids <= key_high.segment_ids) & (key_low.segment_ids <= high.segment_ids)
    branches = (low.branch_ids <= key_high.branch_ids) & (key_low.branch_ids <= high.branch_ids)
    seen = segments & (key_low.index <= high.index) & (branches | (key_low.branch_ids == 0))
    return seen if how.window is None else seen & (low.positions - key_high.positions < how.window)


def causal_blocks(how: How, grid: Grid) -> int:
    """How many of `seen_blocks` [N, M] a row of one text has, without branches and with nothing before it in a cache;
    of devices that share the row, the one with the most. Segments and branches hide more; on the other hand a branch,
    wherever it stands, has its prompt in its window."""
    tokens = grid.query_blocks * grid.query_block
    index = layers.balanced_order(tokens * how.parts, how.parts).reshape(how.parts, grid.query_blocks, 1, -1)
    key_low = np.arange(grid.key_blocks) * grid.key_block
    seen = key_low <= index.max(-1)
    if how.window is not None:
        seen &= index.min(-1) - (key_low + grid.key_block - 1) < how.window
    return int(seen.sum((1, 2)).max())


def _fetched(seen: Array) -> Array:
    """seen [..., n] -> int32 of the same shape: the block that stands ready in each of n steps, itself where it is
    seen, and otherwise the one seen before, or the first that will be: nothing is loaded in vain. (Where none is, the
    first block, of which nothing is seen.)"""
    steps = jnp.arange(seen.shape[-1], dtype=jnp.int32)
    before = jax.lax.cummax(jnp.where(seen, steps, -1), axis=seen.ndim - 1)
    first = jnp.argmax(seen, axis=-1, keepdims=True).astype(jnp.int32)
    return jnp.where(before >= 0, before, first)


# --- kernels -----------------------------------------------------------------------------------------------------

_ROWS = (((1,), (1,)), ((), ()))
"""Contraction a b': both over their last dimension."""
_COLUMNS = (((0,), (0,)), ((), ()))
"""a' b."""
_MATRICES = (((1,), (0,)), ((), ()))
"""a b."""


def _dot(a: Array, b: Array, dimensions: Any) -> Array:
    # The compiler takes no precision for bfloat16, whose products are exact; float32 has what jax is set to.
    precision = jax.lax.Precision.DEFAULT if a.dtype == jnp.bfloat16 else None
    return jax.lax.dot_general(a, b, dimensions, precision, preferred_element_type=jnp.float32)


def _scores(how: How, query: Array, key: Array, of_queries: Array, of_keys: Array) -> tuple[Array, Array | float]:
    """(scores [keys, queries] of a block, MASKED where nothing is seen; their derivative by what the cap was put on).

    of_queries [4, queries] and of_keys [keys, 4] are their `Slots`.
    """
    scores, slope = _dot(key, query, _ROWS) * how.scale, 1.0
    if how.softcap is not None:
        capped = jnp.tanh(scores / how.softcap)
        scores, slope = how.softcap * capped, 1 - capped * capped
    looking = Slots(*(of_queries[i : i + 1] for i in range(4)))
    seen = Slots(*(of_keys[:, i : i + 1] for i in range(4)))
    return jnp.where(layers.sees(looking, seen, how.window), scores, MASKED), slope


def _mixing(
    how: How, others: int, fetched: Any, of_queries, of_keys, query, key, value, mixed, total, greatest, sums, mixing
):
    """Of one block of queries, over its blocks of keys: what they see, and the log-sum-exp of their scores."""
    step, last = pl.program_id(3), pl.num_programs(3) - 1

    @pl.when(step == 0)
    def _():
        greatest[...], sums[...] = jnp.full_like(greatest, MASKED), jnp.zeros_like(sums)
        mixing[...] = jnp.zeros_like(mixing)

    @pl.when(_is_seen(others, fetched))
    def _():
        scores, _ = _scores(how, query[0, 0], key[0, 0], of_queries[0], of_keys[0])
        greater = jnp.maximum(greatest[...], scores.max(0, keepdims=True))
        weights, kept = jnp.exp(scores - greater), jnp.exp(greatest[...] - greater)
        greatest[...], sums[...] = greater, kept * sums[...] + weights.sum(0, keepdims=True)
        mixing[...] = kept * mixing[...] + _dot(value[0, 0], weights.astype(value.dtype), _COLUMNS)

    @pl.when(step == last)
    def _():
        mixed[0, 0] = (mixing[...] / sums[...]).T.astype(mixed.dtype)
        total[0, 0] = greatest[...] + jnp.log(sums[...])


class Saved(NamedTuple):
    """What the backward pass has of a block of queries besides them."""

    gradient: Any
    """[1, 1, queries, E], of what was mixed."""
    total: Any
    """[1, 1, 1, queries]: the log-sum-exp of scores."""
    share: Any
    """[1, 1, 1, queries]: what the softmax's normalisation takes from the gradient of every score."""


def _of_scores(how: How, block: tuple[Any, ...], saved: Saved) -> tuple[Array, Array]:
    """(weights, gradient of the scores before scale and cap) [keys, queries] of a block."""
    of_queries, of_keys, query, key, value = block
    scores, slope = _scores(how, query[0, 0], key[0, 0], of_queries[0], of_keys[0])
    weights = jnp.exp(scores - saved.total[0, 0])
    by_value = _dot(value[0, 0], saved.gradient[0, 0], _ROWS)
    return weights, weights * (by_value - saved.share[0, 0]) * slope


def _for_queries(how: How, others: int, fetched: Any, *refs: Any) -> None:
    """Of one block of queries, over its blocks of keys: the gradient of the queries."""
    block, saved, (of_query, sums) = refs[:5], Saved(*refs[5:8]), refs[8:]
    key, step, last = block[3], pl.program_id(3), pl.num_programs(3) - 1

    @pl.when(step == 0)
    def _():
        sums[...] = jnp.zeros_like(sums)

    @pl.when(_is_seen(others, fetched))
    def _():
        _, of_scores = _of_scores(how, block, saved)
        sums[...] += _dot(key[0, 0], of_scores.astype(key.dtype), _COLUMNS)

    @pl.when(step == last)
    def _():
        of_query[0, 0] = (how.scale * sums[...]).T.astype(of_query.dtype)


def _for_keys(how: How, others: int, fetched: Any, *refs: Any) -> None:
    """Of one block of keys, over the blocks of queries of all heads that share it: the gradients of keys and values."""
    block, saved, (of_key, of_value, key_sums, value_sums) = refs[:5], Saved(*refs[5:8]), refs[8:]
    query, step, last = block[2], pl.program_id(3), pl.num_programs(3) - 1

    @pl.when(step == 0)
    def _():
        key_sums[...], value_sums[...] = jnp.zeros_like(key_sums), jnp.zeros_like(value_sums)

    @pl.when(_is_seen(others, fetched))
    def _():
        weights, of_scores = _of_scores(how, block, saved)
        value_sums[...] += _dot(weights.astype(saved.gradient.dtype), saved.gradient[0, 0], _MATRICES)
        key_sums[...] += _dot(of_scores.astype(query.dtype), query[0, 0], _MATRICES)

    @pl.when(step == last)
    def _():
        of_key[0, 0] = (how.scale * key_sums[...]).astype(of_key.dtype)
        of_value[0, 0] = value_sums[...].astype(of_value.dtype)


def _is_seen(others: int, fetched: Any) -> Array:
    """Whether the block that stands ready is the one of this step, of `others` that take turns."""
    row, block, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    return _ready(others, fetched, row, block, step) == step % others


def _ready(others: int, fetched: Any, row: Any, block: Any, step: Any) -> Any:
    """`_fetched` [row, block, other] of the flat array: in scalar memory further dimensions are padded."""
    return fetched[(row * pl.num_programs(2) + block) * others + step % others]


# --- calls -------------------------------------------------------------------------------------------------------


class _Specs(NamedTuple):
    """Which block of each operand a step sees."""

    of_queries: pl.BlockSpec
    of_keys: pl.BlockSpec
    query: pl.BlockSpec
    key: pl.BlockSpec
    total: pl.BlockSpec


def _specs(grid: Grid, at: Any) -> _Specs:
    """`at` (row, head of the grid, block, step, fetched) -> (head, block of queries, head of keys, block of keys)."""
    query_block, key_block, width = grid.query_block, grid.key_block, grid.width

    def spec(shape: tuple[int, ...], place: Any) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda row, *where: (row, *place(*at(row, *where))))

    return _Specs(
        of_queries=spec((1, 4, query_block), lambda h, i, k, j: (0, i)),
        of_keys=spec((1, key_block, 4), lambda h, i, k, j: (j, 0)),
        query=spec((1, 1, query_block, width), lambda h, i, k, j: (h, i, 0)),
        key=spec((1, 1, key_block, width), lambda h, i, k, j: (k, j, 0)),
        total=spec((1, 1, 1, query_block), lambda h, i, k, j: (h, 0, i)),
    )


class _Steps(NamedTuple):
    """What a kernel runs over, for each row."""

    heads: int
    blocks: int
    count: int
    """Of blocks of the other kind, for all heads that share the first."""
    others: int
    """Blocks of the other kind."""


def _call(
    how: How, kernel: Any, grid: Grid, steps: _Steps, *, products: int, scratch: Any, out_shape: Any, **specs: Any
) -> Any:
    """A kernel over rows and `steps`, which makes `products` matrix products of a block."""
    blocks = grid.rows * grid.heads * causal_blocks(how, grid)
    scores = blocks * grid.query_block * grid.key_block
    cost = pl.CostEstimate(
        flops=2 * products * scores * grid.width,
        transcendentals=scores,
        bytes_accessed=4 * blocks * grid.key_block * grid.width,
    )
    scratch_shapes = [pltpu.VMEM(shape, jnp.float32) for shape in scratch]
    all_steps = (grid.rows, steps.heads, steps.blocks, steps.count)
    return pl.pallas_call(
        functools.partial(kernel, how, steps.others),
        grid_spec=pltpu.PrefetchScalarGridSpec(1, grid=all_steps, scratch_shapes=scratch_shapes, **specs),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        cost_estimate=cost,
        interpret=how.interpret,
        name=f"attention{kernel.__name__}",
    )


def _by_queries(grid: Grid) -> tuple[_Steps, _Specs]:
    """Steps over the blocks of keys of each head's blocks of queries."""

    def at(row: Any, head: Any, block: Any, step: Any, fetched: Any) -> tuple[Any, ...]:
        return head, block, head * grid.kv_heads // grid.heads, _ready(grid.key_blocks, fetched, row, block, step)

    return _Steps(grid.heads, grid.query_blocks, grid.key_blocks, grid.key_blocks), _specs(grid, at)


def _by_keys(grid: Grid) -> tuple[_Steps, _Specs]:
    """Steps over the blocks of queries of all heads that share a block of keys, one head after the other."""
    group = grid.heads // grid.kv_heads

    def at(row: Any, kv_head: Any, block: Any, step: Any, fetched: Any) -> tuple[Any, ...]:
        ready = _ready(grid.query_blocks, fetched, row, block, step)
        return kv_head * group + step // grid.query_blocks, ready, kv_head, block

    steps = _Steps(grid.kv_heads, grid.key_blocks, group * grid.query_blocks, grid.query_blocks)
    return steps, _specs(grid, at)


def mixed(how: How, query: Array, key: Array, value: Array, queries: Slots, keys: Slots) -> tuple[Array, Array]:
    """query [B, H, T, E], key and value [B, K, S, E] -> (mixed [B, H, T, E], log-sum-exp of scores [B, H, 1, T])."""
    grid = grid_of(query, key)
    steps, specs = _by_queries(grid)
    call = _call(
        how,
        _mixing,
        grid,
        steps,
        products=2,
        scratch=[(1, grid.query_block), (1, grid.query_block), (grid.width, grid.query_block)],
        in_specs=[specs.of_queries, specs.of_keys, specs.query, specs.key, specs.key],
        out_specs=[specs.query, specs.total],
        out_shape=[_like(query), jax.ShapeDtypeStruct((grid.rows, grid.heads, 1, query.shape[2]), jnp.float32)],
    )
    fetched = _fetched(seen_blocks(how, grid, queries, keys))
    output, total = call(*_tables(fetched, queries, keys), query, key, value)
    return output, total


def gradient_of_queries(how: How, query: Array, key: Array, value: Array, *rest: Any) -> Array:
    """rest: the parts of `Saved` [B, H, ...], and the slots of queries and keys."""
    *saved, queries, keys = rest
    grid = grid_of(query, key)
    steps, specs = _by_queries(grid)
    call = _call(
        how,
        _for_queries,
        grid,
        steps,
        products=3,
        scratch=[(grid.width, grid.query_block)],
        in_specs=_backward_specs(specs),
        out_specs=specs.query,
        out_shape=_like(query),
    )
    fetched = _fetched(seen_blocks(how, grid, queries, keys))
    return call(*_tables(fetched, queries, keys), query, key, value, *saved)


def gradients_of_keys(
    how: How, query: Array, key: Array, value: Array, *rest: Any, dtype: Any = None
) -> tuple[Array, Array]:
    """As `gradient_of_queries`, of keys and values; in `dtype`, or in theirs."""
    *saved, queries, keys = rest
    grid = grid_of(query, key)
    steps, specs = _by_keys(grid)
    call = _call(
        how,
        _for_keys,
        grid,
        steps,
        products=4,
        scratch=[(grid.key_block, grid.width)] * 2,
        in_specs=_backward_specs(specs),
        out_specs=[specs.key, specs.key],
        out_shape=[jax.ShapeDtypeStruct(part.shape, dtype or part.dtype) for part in (key, value)],
    )
    fetched = _fetched(seen_blocks(how, grid, queries, keys).swapaxes(1, 2))
    of_key, of_value = call(*_tables(fetched, queries, keys), query, key, value, *saved)
    return of_key, of_value


def _tables(fetched: Array, queries: Slots, keys: Slots) -> tuple[Array, ...]:
    """The kernels' first operands: `fetched` in scalar memory, the slots of queries [B, 4, T] and of keys [B, S, 4]."""
    return fetched.reshape(-1), jnp.stack(queries, 1), jnp.stack(keys, 2)


def _backward_specs(specs: _Specs) -> list[pl.BlockSpec]:
    return [specs.of_queries, specs.of_keys, specs.query, specs.key, specs.key, specs.query, specs.total, specs.total]


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
