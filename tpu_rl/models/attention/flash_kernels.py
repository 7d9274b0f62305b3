"""The Pallas kernels of `flash_attention`: attention, and its gradients.

A kernel runs over blocks of queries and, for each of them, over blocks of keys; the gradients of
keys and values have it the other way round. Scores are stored as [keys, queries], so that numbers
which belong to a query (maximum, sum, log-sum-exp) are rows of lanes.

Letters in array shapes are those of `layers`; N counts blocks of queries and M blocks of keys. The
two sides of a block of scores are called `queries` and `keys` in shapes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_rl import jax_versions
from tpu_rl.models import layers
from tpu_rl.models.attention import flash_cycles
from tpu_rl.models.attention.flash_cycles import Visits
from tpu_rl.models.layers import MASKED, TokenIndex

Array = jax.Array

BLOCK_SIZES = (1024, 512, 256, 128)
"""Tokens per block: the largest of these that divides the row and that `TUNING` allows."""

WIDE_HEAD_BYTES = 512
"""Bytes of a head's vector above which the largest block sizes are halved, to fit in the chip's
vector memory."""

FUSED_SHARE = 0.25
"""Share of a chip's vector memory that the fused backward kernel's sums for queries may take."""

DEFAULT_VECTOR_BYTES = 2**24
"""Vector memory that the compiler gives a kernel which asks for no more."""

LOG2_E = math.log2(math.e)

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


class Tuning(NamedTuple):
    """Sizes with the fewest cycles in the compiler's schedule (`bench/kernel_schedules.py`)."""

    forward: tuple[int, int]
    """Largest blocks of queries and keys."""
    backward: tuple[int, int]
    chunk: int
    """Keys of a block that a kernel takes at a time. The compiler lets the products of one chunk
    overlap with the exponentials of another."""


TUNING = {
    128: Tuning(forward=(1024, 1024), backward=(512, 512), chunk=128),
    256: Tuning(forward=(1024, 1024), backward=(1024, 512), chunk=256),
}
"""Columns of the chip's matrix units -> sizes, for heads of 64 to 256. v4, v5e and v5p have 128
columns, v6e and later chips 256."""


def chip() -> tuple[Tuning, int]:
    """Return sizes, and the bytes of vector memory, of the chip that a kernel is traced for.

    It is that of jax's mesh, if there is one.
    """
    info = jax_versions.tpu_info()
    if info is None:  # Kernels are interpreted, only their costs are read, or jax is old.
        return TUNING[128], DEFAULT_VECTOR_BYTES
    return TUNING[info.mxu_column_size], info.vmem_capacity_bytes


def forward_grid(query: Array, key: Array) -> Grid:
    """Return the blocks of the forward kernel."""
    return make_grid(query, key, chip()[0].forward)


def backward_grid(query: Array, key: Array) -> Grid:
    """Return the blocks of the kernels of gradients."""
    return make_grid(query, key, chip()[0].backward)


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


def make_grid(query: Array, key: Array, largest: tuple[int, int]) -> Grid:
    """Return the blocks of query [B, H, T, E] and key [B, K, S, E], of at most these sizes."""
    rows, num_heads, num_queries, head_dim = query.shape
    _, num_kv_heads, num_keys, _ = key.shape
    is_wide = head_dim * query.dtype.itemsize > WIDE_HEAD_BYTES

    def block(tokens: int, limit: int) -> int:
        limit = limit // 2 if is_wide else limit
        return next(size for size in BLOCK_SIZES if size <= limit and tokens % size == 0)

    query_block = block(num_queries, largest[0])
    key_block = block(num_keys, largest[1])
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


class BlockKinds(NamedTuple):
    """Kinds of blocks of scores, by the work that they need. Both [B, N, M] bool."""

    visible: Array
    """False only if no query of the block attends to any key of the other."""
    full: Array
    """True only if every query attends to every key."""


def block_kinds(
    config: FlashConfig, grid: Grid, queries: TokenIndex, keys: TokenIndex
) -> BlockKinds:
    """Return the kinds of all blocks of scores.

    The decision uses the least and the greatest value of each field in a block, so `visible` may be
    True although every score is masked, and `full` False although none is.
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
    full = (key_high.index <= low.index) & (high.index < key_low.visible_until)
    if config.sliding_window is not None:
        visible &= low.positions - key_high.positions < config.sliding_window
        full &= high.positions - key_low.positions < config.sliding_window
    return BlockKinds(visible, full)


class CausalBlocks(NamedTuple):
    """Numbers of `BlockKinds` of a row."""

    visible: int
    full: int


def causal_blocks(config: FlashConfig, grid: Grid) -> CausalBlocks:
    """Return the numbers of blocks [N, M] of a row that holds a single text.

    The text has no branches, and nothing precedes it in a cache. If devices share the row, these
    are the numbers of the device with the most visible blocks. Segments and branches hide further
    blocks. On the other hand, a branch has its prompt inside the sliding window wherever it is in
    the row.
    """
    tokens = grid.num_query_blocks * grid.query_block
    order = layers.balanced_order(tokens * config.token_shards, config.token_shards)
    index = order.reshape(config.token_shards, grid.num_query_blocks, 1, -1)
    low, high = index.min(-1), index.max(-1)
    key_low = np.arange(grid.num_key_blocks) * grid.key_block
    key_high = key_low + grid.key_block - 1
    visible = key_low <= high
    full = key_high <= low
    if config.sliding_window is not None:
        visible &= low - key_high < config.sliding_window
        full &= high - key_low < config.sliding_window
    of_devices = zip(visible.sum((1, 2)), full.sum((1, 2)), strict=True)
    return max(CausalBlocks(*map(int, counts)) for counts in of_devices)


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


def _chunks(size: int, compute: Any) -> Iterator[tuple[slice, Any]]:
    """Yield each chunk of a block of this size with its compute(chunk).

    The next chunk is computed before a chunk is yielded, so that its products need not wait.
    """
    step = min(chip()[0].chunk, size)
    parts = [slice(start, start + step) for start in range(0, size, step)]
    ahead = compute(parts[0])
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        computed = ahead
        if following is not None:
            ahead = compute(following)
        yield part, computed


def _block_scores(
    config: FlashConfig, query: Array, key: Array, index: tuple[Array, Array] | None
) -> tuple[Array, Array | float]:
    """Return the scores [keys, queries] of a block, and their derivative by the uncapped scores.

    Scores are the logarithms of weights to the base of 2, which is what the chip can exponentiate.
    They are MASKED where a query does not attend to a key. `index` is the stacked fields of
    `TokenIndex`, [4, queries] and [keys, 4]. None: every query attends to every key.
    """
    scores = dot(key, query, A_BT)
    derivative = 1.0
    if config.softcap is None:
        scores = scores * (config.scale * LOG2_E)
    else:
        capped = jnp.tanh(scores * (config.scale / config.softcap))
        scores = (config.softcap * LOG2_E) * capped
        derivative = 1 - capped * capped
    if index is None:
        return scores, derivative
    query_index, key_index = index
    queries = TokenIndex(*(query_index[i : i + 1] for i in range(4)))
    keys = TokenIndex(*(key_index[:, i : i + 1] for i in range(4)))
    mask = layers.can_attend(queries, keys, config.sliding_window)
    return jnp.where(mask, scores, MASKED), derivative


def _forward_kernel(
    config: FlashConfig,
    num_blocks: int,
    loaded: Any,
    index_loaded: Any,
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

    def attend(is_masked: bool) -> None:
        def scores_of(part: slice) -> Array:
            index = (query_index[0], key_index[0, part]) if is_masked else None
            return _block_scores(config, query[0, 0], key[0, 0, part], index)[0]

        # s = scale k q^T, [keys, queries], in powers of 2. Online softmax over the chunks of keys:
        # m' = max(m, max s), l' = 2^(m - m') l + sum 2^(s - m'), o' in the same way with v.
        for part, scores in _chunks(key.shape[2], scores_of):
            new_maximum = jnp.maximum(maximum[...], scores.max(0, keepdims=True))
            weights = jnp.exp2(scores - new_maximum)
            rescale = jnp.exp2(maximum[...] - new_maximum)
            maximum[...] = new_maximum
            total[...] = rescale * total[...] + weights.sum(0, keepdims=True)
            products = dot(value[0, 0, part], weights.astype(value.dtype), AT_B)
            weighted[...] = rescale * weighted[...] + products

    _visit(num_blocks, loaded, index_loaded, attend)

    @pl.when(step == last)
    def _():
        # o / l, and the log-sum-exp m + log2(l), from base 2 to base e, for the backward pass.
        output[0, 0] = (weighted[...] / total[...]).T.astype(output.dtype)
        log_sum_exp[0, 0] = (maximum[...] + jnp.log2(total[...])) / LOG2_E


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
    config: FlashConfig, operands: tuple[Any, ...], saved: Saved, is_masked: bool
) -> Iterator[tuple[slice, Array, Array]]:
    """Yield chunks of a block's keys, with weights and gradients of their scores, [keys, queries].

    The gradients are those before scale and cap.
    """
    query_index, key_index, query, key, value = operands

    def products(part: slice) -> tuple[Array, Array | float, Array]:
        index = (query_index[0], key_index[0, part]) if is_masked else None
        scores, derivative = _block_scores(config, query[0, 0], key[0, 0, part], index)
        weight_gradients = dot(value[0, 0, part], saved.gradient[0, 0], A_BT)
        return scores, derivative, weight_gradients

    # p = 2^(s - log-sum-exp), dp = v do^T and ds = p (dp - offset) times the cap's derivative, with
    # offset = sum_j p_j dp_j of each query.
    for part, (scores, derivative, weight_gradients) in _chunks(key.shape[2], products):
        weights = jnp.exp2(scores - LOG2_E * saved.log_sum_exp[0, 0])
        yield part, weights, weights * (weight_gradients - saved.offset[0, 0]) * derivative


def _query_gradient_kernel(
    config: FlashConfig, num_blocks: int, loaded: Any, index_loaded: Any, *refs: Any
) -> None:
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

    def add(is_masked: bool) -> None:
        # dq = scale * ds^T k, summed over the blocks of keys.
        for part, _, score_gradients in _score_gradients(config, operands, saved, is_masked):
            total[...] += dot(key[0, 0, part], score_gradients.astype(key.dtype), AT_B)

    _visit(num_blocks, loaded, index_loaded, add)

    @pl.when(step == last)
    def _():
        query_gradient[0, 0] = (config.scale * total[...]).T.astype(query_gradient.dtype)


def _key_value_gradient_kernel(
    config: FlashConfig,
    num_blocks: int,
    loaded: Any,
    index_loaded: Any,
    *refs: Any,
    query_total: Any = None,
) -> None:
    """Compute the gradients of one block of keys and values.

    The steps run over the blocks of queries of all heads that share the keys. `query_total`
    [steps, E, queries] is for `_gradients_kernel`: the sums to which the gradient of each step's
    queries is added.
    """
    operands = refs[:5]
    saved = Saved(*refs[5:8])
    key_gradient, value_gradient, key_total, value_total = refs[8:]
    query, key = operands[2:4]
    step = pl.program_id(3)
    last = pl.num_programs(3) - 1

    @pl.when(step == 0)
    def _():
        key_total[...] = jnp.zeros_like(key_total)
        value_total[...] = jnp.zeros_like(value_total)

    def add(is_masked: bool) -> None:
        for part, weights, score_gradients in _score_gradients(config, operands, saved, is_masked):
            # dv = p do, dk = scale * ds q, and dq = scale * ds^T k if the caller wants it, too.
            rounded = score_gradients.astype(query.dtype)
            value_total[part] += dot(weights.astype(query.dtype), saved.gradient[0, 0], A_B)
            key_total[part] += dot(rounded, query[0, 0], A_B)
            if query_total is not None:
                query_total[step] += dot(key[0, 0, part], rounded, AT_B)

    _visit(num_blocks, loaded, index_loaded, add)

    @pl.when(step == last)
    def _():
        key_gradient[0, 0] = (config.scale * key_total[...]).astype(key_gradient.dtype)
        value_gradient[0, 0] = value_total[...].astype(value_gradient.dtype)


def _gradients_kernel(
    config: FlashConfig, num_blocks: int, loaded: Any, index_loaded: Any, *refs: Any
) -> None:
    """Compute the gradients of one block of keys and values, and add to those of all queries.

    The scratch holds the sums for the queries of all heads that share the keys, until the last
    block of keys has been added.
    """
    inputs = refs[:8]
    query_gradient, *of_keys, query_total, key_total, value_total = refs[8:]
    block, step = pl.program_id(2), pl.program_id(3)

    @pl.when(block == 0)
    def _():
        query_total[step] = jnp.zeros(query_total.shape[1:], query_total.dtype)

    _key_value_gradient_kernel(
        config,
        num_blocks,
        loaded,
        index_loaded,
        *inputs,
        *of_keys,
        key_total,
        value_total,
        query_total=query_total,
    )

    @pl.when(block == pl.num_programs(2) - 1)
    def _():
        total = config.scale * query_total[step]
        query_gradient[0, 0] = total.T.astype(query_gradient.dtype)


def _visit(num_blocks: int, loaded: Any, index_loaded: Any, compute: Any) -> None:
    """Call compute(is_masked) if the block in memory is that of this step.

    The steps of a grid cycle through `num_blocks` blocks. A block needs a mask if its index is in
    memory, too.
    """
    row, block, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    step_block = step % num_blocks
    is_visible = _loaded_block(num_blocks, loaded, row, block, step) == step_block
    is_masked = _loaded_block(num_blocks, index_loaded, row, block, step) == step_block
    pl.when(is_visible & is_masked)(functools.partial(compute, True))
    pl.when(is_visible & ~is_masked)(functools.partial(compute, False))


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

    `locate` is (row, head of the grid, block, step, loaded, index_loaded) -> (head, block of
    queries, key-value head, block of keys, block of the queries' index, block of the keys' index).
    """
    query_block = grid.query_block
    key_block = grid.key_block
    head_dim = grid.head_dim

    def spec(shape: tuple[int, ...], place: Any) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda row, *step: (row, *place(*locate(row, *step))))

    return _BlockSpecs(
        query_index=spec((1, 4, query_block), lambda h, i, k, j, i_index, j_index: (0, i_index)),
        key_index=spec((1, key_block, 4), lambda h, i, k, j, i_index, j_index: (j_index, 0)),
        query=spec((1, 1, query_block, head_dim), lambda h, i, k, j, *index: (h, i, 0)),
        key=spec((1, 1, key_block, head_dim), lambda h, i, k, j, *index: (k, j, 0)),
        log_sum_exp=spec((1, 1, 1, query_block), lambda h, i, k, j, *index: (h, 0, i)),
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

    def locate(row: Any, head: Any, block: Any, step: Any, *loaded: Any) -> tuple[Any, ...]:
        kv_head = head * grid.num_kv_heads // grid.num_heads
        key_block, index_block = (
            _loaded_block(grid.num_key_blocks, blocks, row, block, step) for blocks in loaded
        )
        return head, block, kv_head, key_block, block, index_block

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

    def locate(row: Any, kv_head: Any, block: Any, step: Any, *loaded: Any) -> tuple[Any, ...]:
        query_block, index_block = (
            _loaded_block(grid.num_query_blocks, blocks, row, block, step) for blocks in loaded
        )
        head = kv_head * group + step // grid.num_query_blocks
        return head, query_block, kv_head, block, index_block, block

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
    dtype: Any,
    products: int,
    scratch: list[tuple[int, ...]],
    in_specs: Any,
    out_specs: Any,
    out_shape: Any,
    blocks_are_parallel: bool = True,
    vector_bytes: int | None = None,
) -> Any:
    """Return a call of a kernel, which computes `products` matrix products per block of scores.

    It states their cost, and the cycles that it is expected to take, for the planner.
    vector_bytes is the vector memory that it may take. None: the compiler's default.
    """
    edges = steps.heads * steps.blocks
    if not blocks_are_parallel:
        # The fused kernel has first and last steps of blocks of queries, too.
        edges = max(edges, steps.heads * steps.steps)
    per_row = causal_blocks(config, grid)
    heads = grid.rows * grid.num_heads
    blocks = heads * per_row.visible
    block_scores = grid.query_block * grid.key_block
    scores = blocks * block_scores
    visits = Visits(
        steps=grid.rows * steps.heads * steps.blocks * steps.steps,
        visible=blocks,
        full=heads * per_row.full,
        edges=grid.rows * edges,
    )
    cycles = flash_cycles.expected(name, grid.head_dim, dtype, visits, block_scores)
    cost = pl.CostEstimate(
        flops=2 * products * scores * grid.head_dim,
        transcendentals=scores,
        bytes_accessed=4 * blocks * grid.key_block * grid.head_dim,
    )
    return pl.pallas_call(
        functools.partial(kernel, config, steps.num_blocks),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            2,
            grid=(grid.rows, steps.heads, steps.blocks, steps.steps),
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
            in_specs=in_specs,
            out_specs=out_specs,
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=(
                "parallel",
                "parallel",
                "parallel" if blocks_are_parallel else "arbitrary",
                "arbitrary",
            ),
            # They take 50 of a step's 260 cycles on v5e. `_blocks_to_load` chooses no other blocks.
            disable_bounds_checks=True,
            vmem_limit_bytes=vector_bytes,
        ),
        cost_estimate=cost,
        metadata={"cycles": str(cycles)} if cycles else None,
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
    grid = forward_grid(query, key)
    steps, specs = _steps_over_keys(grid)
    row_scratch = (1, grid.query_block)
    log_sum_exp_shape = (grid.rows, grid.num_heads, 1, query.shape[2])
    call = _call(
        config,
        _forward_kernel,
        "flash_attention_forward",
        grid,
        steps,
        dtype=query.dtype,
        products=2,
        scratch=[row_scratch, row_scratch, (grid.head_dim, grid.query_block)],
        in_specs=[specs.query_index, specs.key_index, specs.query, specs.key, specs.key],
        out_specs=[specs.query, specs.log_sum_exp],
        out_shape=[
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct(log_sum_exp_shape, jnp.float32),
        ],
    )
    kinds = block_kinds(config, grid, queries, keys)
    output, log_sum_exp = call(*_index_operands(kinds, queries, keys), query, key, value)
    return output, log_sum_exp


def query_gradient(
    config: FlashConfig, query: Array, key: Array, value: Array, *rest: Any
) -> Array:
    """Return the gradient [B, H, T, E] of query.

    `rest` is the fields of `Saved`, [B, H, ...], then the indices of queries and keys.
    """
    *saved, queries, keys = rest
    grid = backward_grid(query, key)
    steps, specs = _steps_over_keys(grid)
    call = _call(
        config,
        _query_gradient_kernel,
        "flash_attention_query_gradient",
        grid,
        steps,
        dtype=query.dtype,
        products=3,
        scratch=[(grid.head_dim, grid.query_block)],
        in_specs=_backward_specs(specs),
        out_specs=specs.query,
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
    )
    kinds = block_kinds(config, grid, queries, keys)
    return call(*_index_operands(kinds, queries, keys), query, key, value, *saved)


def key_value_gradients(
    config: FlashConfig, query: Array, key: Array, value: Array, *rest: Any, dtype: Any = None
) -> tuple[Array, Array]:
    """Return the gradients [B, K, S, E] of key and value, in `dtype` (None: in their own).

    `rest` is that of `query_gradient`.
    """
    *saved, queries, keys = rest
    grid = backward_grid(query, key)
    steps, specs = _steps_over_queries(grid)
    call = _call(
        config,
        _key_value_gradient_kernel,
        "flash_attention_key_value_gradient",
        grid,
        steps,
        dtype=query.dtype,
        products=4,
        scratch=[(grid.key_block, grid.head_dim)] * 2,
        in_specs=_backward_specs(specs),
        out_specs=[specs.key, specs.key],
        out_shape=[jax.ShapeDtypeStruct(part.shape, dtype or part.dtype) for part in (key, value)],
    )
    kinds = BlockKinds(*(kind.swapaxes(1, 2) for kind in block_kinds(config, grid, queries, keys)))
    key_gradient, value_gradient = call(
        *_index_operands(kinds, queries, keys), query, key, value, *saved
    )
    return key_gradient, value_gradient


def gradients(
    config: FlashConfig, query: Array, key: Array, value: Array, *rest: Any, dtype: Any = None
) -> tuple[Array, Array, Array]:
    """Return the gradients of query, key and value, as the functions below do.

    One kernel computes all of them where the sums for the queries of a key-value head fit in the
    chip's vector memory.
    """
    operands = (query, key, value, *rest)
    if _sum_bytes(query, key) <= FUSED_SHARE * chip()[1]:
        return fused_gradients(config, *operands, dtype=dtype)
    of_keys = key_value_gradients(config, *operands, dtype=dtype)
    return query_gradient(config, *operands), *of_keys


def _sum_bytes(query: Array, key: Array) -> int:
    """Return the bytes of `_gradients_kernel`'s sums for queries."""
    return 4 * query.shape[1] // key.shape[1] * query.shape[2] * query.shape[3]


def fused_gradients(
    config: FlashConfig, query: Array, key: Array, value: Array, *rest: Any, dtype: Any = None
) -> tuple[Array, Array, Array]:
    """Return the gradients of `query_gradient` and `key_value_gradients` from one kernel."""
    *saved, queries, keys = rest
    grid = backward_grid(query, key)
    steps, specs = _steps_over_queries(grid)
    last = grid.num_key_blocks - 1
    sums = _sum_bytes(query, key)

    def locate(row: Any, kv_head: Any, block: Any, step: Any, *_: Any) -> tuple[Any, ...]:
        # Nothing is written before the last block of keys.
        written = jnp.where(block == last, step, 0)
        head = kv_head * (grid.num_heads // grid.num_kv_heads) + written // grid.num_query_blocks
        return row, head, written % grid.num_query_blocks, 0

    call = _call(
        config,
        _gradients_kernel,
        "flash_attention_gradients",
        grid,
        steps,
        dtype=query.dtype,
        products=5,
        scratch=[
            (steps.steps, grid.head_dim, grid.query_block),
            *[(grid.key_block, grid.head_dim)] * 2,
        ],
        in_specs=_backward_specs(specs),
        out_specs=[
            pl.BlockSpec((1, 1, grid.query_block, grid.head_dim), locate),
            specs.key,
            specs.key,
        ],
        out_shape=[
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            *(jax.ShapeDtypeStruct(part.shape, dtype or part.dtype) for part in (key, value)),
        ],
        blocks_are_parallel=False,
        vector_bytes=DEFAULT_VECTOR_BYTES + sums if sums > DEFAULT_VECTOR_BYTES // 4 else None,
    )
    kinds = BlockKinds(*(kind.swapaxes(1, 2) for kind in block_kinds(config, grid, queries, keys)))
    results = call(*_index_operands(kinds, queries, keys), query, key, value, *saved)
    return tuple(results)


def _index_operands(
    kinds: BlockKinds, queries: TokenIndex, keys: TokenIndex
) -> tuple[Array, Array, Array, Array]:
    """Return the kernels' first operands.

    They are the blocks to load, and those whose index to load, flat, for scalar memory; and the
    indices of queries [B, 4, T] and keys [B, S, 4].
    """
    loaded = _blocks_to_load(kinds.visible)
    index_loaded = _blocks_to_load(kinds.visible & ~kinds.full)
    return (loaded.reshape(-1), index_loaded.reshape(-1), jnp.stack(queries, 1), jnp.stack(keys, 2))


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
