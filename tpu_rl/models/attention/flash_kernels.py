"""The Pallas kernels of `flash_attention`: attention, and its gradients.

A kernel runs over blocks of queries and, for each of them, over blocks of keys; the gradients of
keys and values have it the other way round. Scores are stored as [keys, queries], so that numbers
which belong to a query (maximum, sum, log-sum-exp) are rows of lanes.

Letters in array shapes are those of `layers`; N counts blocks of queries and M blocks of keys. The
two sides of a block of scores are called `queries` and `keys` in shapes.
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
from tpu_rl.models.layers import MASKED, TokenIndex

Array = jax.Array

BLOCK_SIZES = (512, 256, 128)
"""Tokens per block: the largest of these that divides the row."""

WIDE_HEAD_BYTES = 512
"""Bytes of a head's vector above which the largest block size is halved, to fit in the chip's
vector memory."""

LANES = 128
"""Lanes of a vector register: the smallest block size."""


class FlashConfig(NamedTuple):
    """Constants of the compiled kernels."""

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    interpret: bool = False
    """Let JAX interpret the kernels, on any backend and slowly. For tests."""
    token_shards: int = 1
    """Number of devices that the tokens of a row are sharded over, in `layers.balanced_order`."""


# Blocks.


class Grid(NamedTuple):
    """The blocks of queries and keys."""

    rows: int
    num_heads: int
    num_kv_heads: int
    query_block: int
    """Tokens per block of queries."""
    key_block: int
    """Tokens per block of keys."""
    num_query_blocks: int
    num_key_blocks: int
    head_dim: int


def make_grid(query: Array, key: Array) -> Grid:
    """Return the blocks of query [B, H, T, E] and key [B, K, S, E]."""
    rows, num_heads, num_queries, head_dim = query.shape
    _, num_kv_heads, num_keys, _ = key.shape
    is_wide = head_dim * query.dtype.itemsize > WIDE_HEAD_BYTES
    largest = BLOCK_SIZES[0] // 2 if is_wide else BLOCK_SIZES[0]
    sizes = [size for size in BLOCK_SIZES if size <= largest]
    query_block = next(size for size in sizes if num_queries % size == 0)
    key_block = next(size for size in sizes if num_keys % size == 0)
    return Grid(
        rows=rows,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        query_block=query_block,
        key_block=key_block,
        num_query_blocks=num_queries // query_block,
        num_key_blocks=num_keys // key_block,
        head_dim=head_dim,
    )


def visible_blocks(config: FlashConfig, grid: Grid, queries: TokenIndex, keys: TokenIndex) -> Array:
    """Return [B, N, M] bool: False only if no query of a block attends to any key of another.

    The decision uses the least and the greatest value of each field in a block, so it may be True
    although every score is masked.
    """

    def extremes(tokens: TokenIndex, num_blocks: int, axis: int) -> tuple[TokenIndex, TokenIndex]:
        blocks = [
            jnp.expand_dims(field.reshape(grid.rows, num_blocks, -1), axis) for field in tokens
        ]
        lowest = TokenIndex(*(block.min(-1) for block in blocks))
        highest = TokenIndex(*(block.max(-1) for block in blocks))
        return lowest, highest

    low, high = extremes(queries, grid.num_query_blocks, 2)
    key_low, key_high = extremes(keys, grid.num_key_blocks, 1)
    visible = (key_low.index <= high.index) & (low.index < key_high.visible_until)
    if config.sliding_window is None:
        return visible
    return visible & (low.positions - key_high.positions < config.sliding_window)


def num_causal_blocks(config: FlashConfig, grid: Grid) -> int:
    """Return the number of `visible_blocks` [N, M] of a row that holds a single text.

    The text has no branches, and nothing precedes it in a cache. If devices share the row, this is
    the number of the device with the most blocks. Segments and branches hide further blocks. On the
    other hand, a branch has its prompt inside the sliding window wherever it is in the row.
    """
    tokens = grid.num_query_blocks * grid.query_block
    order = layers.balanced_order(tokens * config.token_shards, config.token_shards)
    index = order.reshape(config.token_shards, grid.num_query_blocks, 1, -1)
    key_low = np.arange(grid.num_key_blocks) * grid.key_block
    visible = key_low <= index.max(-1)
    if config.sliding_window is not None:
        key_high = key_low + grid.key_block - 1
        visible &= index.min(-1) - key_high < config.sliding_window
    return int(visible.sum((1, 2)).max())


def _blocks_to_load(visible: Array) -> Array:
    """Return [..., n] int32, the block that is in memory in each of n steps, for visible [..., n].

    It is the step's own block if that is visible, else the last visible one before it, or the first
    one that will be, so that no block is loaded in vain. If none is visible, it is block 0.
    """
    steps = jnp.arange(visible.shape[-1], dtype=jnp.int32)
    latest = jax.lax.cummax(jnp.where(visible, steps, -1), axis=visible.ndim - 1)
    first = jnp.argmax(visible, axis=-1, keepdims=True).astype(jnp.int32)
    return jnp.where(latest >= 0, latest, first)


# Kernels.

A_BT = (((1,), (1,)), ((), ()))
"""Dimension numbers of a b^T."""

AT_B = (((0,), (0,)), ((), ()))
"""Dimension numbers of a^T b."""

A_B = (((1,), (0,)), ((), ()))
"""Dimension numbers of a b."""


def dot(a: Array, b: Array, dimension_numbers: Any) -> Array:
    # The compiler accepts no precision for bfloat16, whose products are exact. For float32 it is
    # the precision that jax is configured with.
    precision = jax.lax.Precision.DEFAULT if a.dtype == jnp.bfloat16 else None
    return jax.lax.dot_general(
        a, b, dimension_numbers, precision, preferred_element_type=jnp.float32
    )


def _block_scores(
    config: FlashConfig, query: Array, key: Array, query_index: Array, key_index: Array
) -> tuple[Array, Array | float]:
    """Return the scores [keys, queries] of a block, and their derivative by the uncapped scores.

    Scores are MASKED where a query does not attend to a key. query_index [4, queries] and key_index
    [keys, 4] are stacked fields of `TokenIndex`.
    """
    scores = dot(key, query, A_BT) * config.scale
    derivative = 1.0
    if config.softcap is not None:
        capped = jnp.tanh(scores / config.softcap)
        scores = config.softcap * capped
        derivative = 1 - capped * capped
    queries = TokenIndex(*(query_index[i : i + 1] for i in range(4)))
    keys = TokenIndex(*(key_index[:, i : i + 1] for i in range(4)))
    mask = layers.can_attend(queries, keys, config.sliding_window)
    return jnp.where(mask, scores, MASKED), derivative


def _forward_kernel(
    config: FlashConfig,
    num_blocks: int,
    loaded: Any,
    query_index: Any,
    key_index: Any,
    query: Any,
    key: Any,
    value: Any,
    output: Any,
    log_sum_exp: Any,
    maximum: Any,
    total: Any,
    weighted: Any,
) -> None:
    """Attend one block of queries to its blocks of keys.

    The outputs are the attention and the log-sum-exp of the scores. `maximum`, `total` and
    `weighted` are scratch: the largest score so far, and the sums of weights and weighted values
    relative to it.
    """
    step = pl.program_id(3)
    last = pl.num_programs(3) - 1

    @pl.when(step == 0)
    def _():
        maximum[...] = jnp.full_like(maximum, MASKED)
        total[...] = jnp.zeros_like(total)
        weighted[...] = jnp.zeros_like(weighted)

    @pl.when(_is_visible(num_blocks, loaded))
    def _():
        scores, _ = _block_scores(config, query[0, 0], key[0, 0], query_index[0], key_index[0])
        new_maximum = jnp.maximum(maximum[...], scores.max(0, keepdims=True))
        weights = jnp.exp(scores - new_maximum)
        rescale = jnp.exp(maximum[...] - new_maximum)
        new_total = rescale * total[...] + weights.sum(0, keepdims=True)
        maximum[...] = new_maximum
        total[...] = new_total
        weights = weights.astype(value.dtype)
        weighted[...] = rescale * weighted[...] + dot(value[0, 0], weights, AT_B)

    @pl.when(step == last)
    def _():
        output[0, 0] = (weighted[...] / total[...]).T.astype(output.dtype)
        log_sum_exp[0, 0] = maximum[...] + jnp.log(total[...])


class Saved(NamedTuple):
    """Operands of the backward pass, besides query, key and value, for a block of queries."""

    gradient: Any
    """[1, 1, queries, E], of the output."""
    log_sum_exp: Any
    """[1, 1, 1, queries], of the scores."""
    offset: Any
    """[1, 1, 1, queries]: what the normalization of the softmax subtracts from the gradient of
    every score."""


def _score_gradients(
    config: FlashConfig, operands: tuple[Any, ...], saved: Saved
) -> tuple[Array, Array]:
    """Return weights and gradients of the scores, before scale and cap, [keys, queries]."""
    query_index, key_index, query, key, value = operands
    scores, derivative = _block_scores(config, query[0, 0], key[0, 0], query_index[0], key_index[0])
    weights = jnp.exp(scores - saved.log_sum_exp[0, 0])
    weight_gradients = dot(value[0, 0], saved.gradient[0, 0], A_BT)
    return weights, weights * (weight_gradients - saved.offset[0, 0]) * derivative


def _query_gradient_kernel(config: FlashConfig, num_blocks: int, loaded: Any, *refs: Any) -> None:
    """Compute the gradient of one block of queries from its blocks of keys."""
    operands = refs[:5]
    saved = Saved(*refs[5:8])
    query_gradient, total = refs[8:]
    key = operands[3]
    step = pl.program_id(3)
    last = pl.num_programs(3) - 1

    @pl.when(step == 0)
    def _():
        total[...] = jnp.zeros_like(total)

    @pl.when(_is_visible(num_blocks, loaded))
    def _():
        _, score_gradients = _score_gradients(config, operands, saved)
        total[...] += dot(key[0, 0], score_gradients.astype(key.dtype), AT_B)

    @pl.when(step == last)
    def _():
        query_gradient[0, 0] = (config.scale * total[...]).T.astype(query_gradient.dtype)


def _key_value_gradient_kernel(
    config: FlashConfig, num_blocks: int, loaded: Any, *refs: Any
) -> None:
    """Compute the gradients of one block of keys and values.

    The steps run over the blocks of queries of all heads that share the keys.
    """
    operands = refs[:5]
    saved = Saved(*refs[5:8])
    key_gradient, value_gradient, key_total, value_total = refs[8:]
    query = operands[2]
    step = pl.program_id(3)
    last = pl.num_programs(3) - 1

    @pl.when(step == 0)
    def _():
        key_total[...] = jnp.zeros_like(key_total)
        value_total[...] = jnp.zeros_like(value_total)

    @pl.when(_is_visible(num_blocks, loaded))
    def _():
        weights, score_gradients = _score_gradients(config, operands, saved)
        weights = weights.astype(saved.gradient.dtype)
        value_total[...] += dot(weights, saved.gradient[0, 0], A_B)
        key_total[...] += dot(score_gradients.astype(query.dtype), query[0, 0], A_B)

    @pl.when(step == last)
    def _():
        key_gradient[0, 0] = (config.scale * key_total[...]).astype(key_gradient.dtype)
        value_gradient[0, 0] = value_total[...].astype(value_gradient.dtype)


def _is_visible(num_blocks: int, loaded: Any) -> Array:
    """Return True if the block in memory is that of this step, so the step has work to do.

    The steps of a grid cycle through `num_blocks` blocks.
    """
    row, block, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    return _loaded_block(num_blocks, loaded, row, block, step) == step % num_blocks


def _loaded_block(num_blocks: int, loaded: Any, row: Any, block: Any, step: Any) -> Any:
    """Return `_blocks_to_load` at [row, block, step % num_blocks].

    `loaded` is flat, because scalar memory pads further dimensions.
    """
    return loaded[(row * pl.num_programs(2) + block) * num_blocks + step % num_blocks]


# Calls.


class _BlockSpecs(NamedTuple):
    """The block of each operand in a step."""

    query_index: pl.BlockSpec
    key_index: pl.BlockSpec
    query: pl.BlockSpec
    key: pl.BlockSpec
    log_sum_exp: pl.BlockSpec


def _block_specs(grid: Grid, locate: Any) -> _BlockSpecs:
    """Return the blocks of a grid's steps.

    `locate` is (row, head of the grid, block, step, loaded) -> (head, block of queries, key-value
    head, block of keys).
    """
    query_block = grid.query_block
    key_block = grid.key_block
    head_dim = grid.head_dim

    def spec(shape: tuple[int, ...], place: Any) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda row, *step: (row, *place(*locate(row, *step))))

    return _BlockSpecs(
        query_index=spec((1, 4, query_block), lambda h, i, k, j: (0, i)),
        key_index=spec((1, key_block, 4), lambda h, i, k, j: (j, 0)),
        query=spec((1, 1, query_block, head_dim), lambda h, i, k, j: (h, i, 0)),
        key=spec((1, 1, key_block, head_dim), lambda h, i, k, j: (k, j, 0)),
        log_sum_exp=spec((1, 1, 1, query_block), lambda h, i, k, j: (h, 0, i)),
    )


class _Steps(NamedTuple):
    """The grid of a kernel, for each row."""

    heads: int
    blocks: int
    """Blocks of the side whose results a kernel computes."""
    steps: int
    """Steps per block."""
    num_blocks: int
    """Blocks of the other side."""


def _steps_over_keys(grid: Grid) -> tuple[_Steps, _BlockSpecs]:
    """Return the grid of each head's blocks of queries, which steps over blocks of keys."""

    def locate(row: Any, head: Any, block: Any, step: Any, loaded: Any) -> tuple[Any, ...]:
        kv_head = head * grid.num_kv_heads // grid.num_heads
        key_block = _loaded_block(grid.num_key_blocks, loaded, row, block, step)
        return head, block, kv_head, key_block

    steps = _Steps(
        heads=grid.num_heads,
        blocks=grid.num_query_blocks,
        steps=grid.num_key_blocks,
        num_blocks=grid.num_key_blocks,
    )
    return steps, _block_specs(grid, locate)


def _steps_over_queries(grid: Grid) -> tuple[_Steps, _BlockSpecs]:
    """Return the grid of each key-value head's blocks of keys, which steps over blocks of queries.

    It steps over the blocks of all heads that share the keys, one head after the other.
    """
    group = grid.num_heads // grid.num_kv_heads

    def locate(row: Any, kv_head: Any, block: Any, step: Any, loaded: Any) -> tuple[Any, ...]:
        query_block = _loaded_block(grid.num_query_blocks, loaded, row, block, step)
        head = kv_head * group + step // grid.num_query_blocks
        return head, query_block, kv_head, block

    steps = _Steps(
        heads=grid.num_kv_heads,
        blocks=grid.num_key_blocks,
        steps=group * grid.num_query_blocks,
        num_blocks=grid.num_query_blocks,
    )
    return steps, _block_specs(grid, locate)


def _call(
    config: FlashConfig,
    kernel: Any,
    name: str,
    grid: Grid,
    steps: _Steps,
    *,
    products: int,
    scratch: list[tuple[int, int]],
    in_specs: Any,
    out_specs: Any,
    out_shape: Any,
) -> Any:
    """Return a call of a kernel, which computes `products` matrix products per block of scores."""
    blocks = grid.rows * grid.num_heads * num_causal_blocks(config, grid)
    scores = blocks * grid.query_block * grid.key_block
    cost = pl.CostEstimate(
        flops=2 * products * scores * grid.head_dim,
        transcendentals=scores,
        bytes_accessed=4 * blocks * grid.key_block * grid.head_dim,
    )
    return pl.pallas_call(
        functools.partial(kernel, config, steps.num_blocks),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            1,
            grid=(grid.rows, steps.heads, steps.blocks, steps.steps),
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
            in_specs=in_specs,
            out_specs=out_specs,
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        cost_estimate=cost,
        interpret=config.interpret,
        name=name,
    )


def attention(
    config: FlashConfig,
    query: Array,
    key: Array,
    value: Array,
    queries: TokenIndex,
    keys: TokenIndex,
) -> tuple[Array, Array]:
    """Return the attention [B, H, T, E], and the log-sum-exp of the scores [B, H, 1, T] float32.

    query is [B, H, T, E]; key and value are [B, K, S, E].
    """
    grid = make_grid(query, key)
    steps, specs = _steps_over_keys(grid)
    row_scratch = (1, grid.query_block)
    log_sum_exp_shape = (grid.rows, grid.num_heads, 1, query.shape[2])
    call = _call(
        config,
        _forward_kernel,
        "flash_attention_forward",
        grid,
        steps,
        products=2,
        scratch=[row_scratch, row_scratch, (grid.head_dim, grid.query_block)],
        in_specs=[specs.query_index, specs.key_index, specs.query, specs.key, specs.key],
        out_specs=[specs.query, specs.log_sum_exp],
        out_shape=[
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct(log_sum_exp_shape, jnp.float32),
        ],
    )
    loaded = _blocks_to_load(visible_blocks(config, grid, queries, keys))
    output, log_sum_exp = call(*_index_operands(loaded, queries, keys), query, key, value)
    return output, log_sum_exp


def query_gradient(
    config: FlashConfig, query: Array, key: Array, value: Array, *rest: Any
) -> Array:
    """Return the gradient [B, H, T, E] of query.

    `rest` is the fields of `Saved`, [B, H, ...], then the indices of queries and keys.
    """
    *saved, queries, keys = rest
    grid = make_grid(query, key)
    steps, specs = _steps_over_keys(grid)
    call = _call(
        config,
        _query_gradient_kernel,
        "flash_attention_query_gradient",
        grid,
        steps,
        products=3,
        scratch=[(grid.head_dim, grid.query_block)],
        in_specs=_backward_specs(specs),
        out_specs=specs.query,
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
    )
    loaded = _blocks_to_load(visible_blocks(config, grid, queries, keys))
    return call(*_index_operands(loaded, queries, keys), query, key, value, *saved)


def key_value_gradients(
    config: FlashConfig, query: Array, key: Array, value: Array, *rest: Any, dtype: Any = None
) -> tuple[Array, Array]:
    """Return the gradients [B, K, S, E] of key and value, in `dtype` (None: in their own).

    `rest` is that of `query_gradient`.
    """
    *saved, queries, keys = rest
    grid = make_grid(query, key)
    steps, specs = _steps_over_queries(grid)
    call = _call(
        config,
        _key_value_gradient_kernel,
        "flash_attention_key_value_gradient",
        grid,
        steps,
        products=4,
        scratch=[(grid.key_block, grid.head_dim)] * 2,
        in_specs=_backward_specs(specs),
        out_specs=[specs.key, specs.key],
        out_shape=[jax.ShapeDtypeStruct(part.shape, dtype or part.dtype) for part in (key, value)],
    )
    loaded = _blocks_to_load(visible_blocks(config, grid, queries, keys).swapaxes(1, 2))
    key_gradient, value_gradient = call(
        *_index_operands(loaded, queries, keys), query, key, value, *saved
    )
    return key_gradient, value_gradient


def _index_operands(
    loaded: Array, queries: TokenIndex, keys: TokenIndex
) -> tuple[Array, Array, Array]:
    """Return the kernels' first operands.

    They are the blocks to load, flat, for scalar memory, and the indices of queries [B, 4, T] and
    keys [B, S, 4].
    """
    return loaded.reshape(-1), jnp.stack(queries, 1), jnp.stack(keys, 2)


def _backward_specs(specs: _BlockSpecs) -> list[pl.BlockSpec]:
    return [
        specs.query_index,
        specs.key_index,
        specs.query,
        specs.key,
        specs.key,
        specs.query,
        specs.log_sum_exp,
        specs.log_sum_exp,
    ]
