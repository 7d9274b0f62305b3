"""Products of few tokens with experts on TPUs, which read experts where they lie.

The layers of a model are one stack, and a loop runs over them. XLA's ragged product is a kernel
that takes the experts of one layer, so each step of the loop first copies them out of the stack:
of a decode step of a mixture, that is most of the bytes. The kernel here takes the whole stack and
the number of the layer. It copies nothing, reads only experts that have a token, and converts
weights in eight bits on the chip.

The kernel visits pairs of an expert and a tile of rows, in the order of the rows, as Megablox does
(Gale et al., arXiv 2211.15841). JAX's kernel of that name (`megablox.gmm`) can read a stack, too.
It takes no weights in eight bits, and makes its list of visits in seven times as many operations.

Letters in array shapes are those of `experts`; L counts layers, n rows and V visits.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_rl.models.attention.flash_kernels import A_B, LANES, dot

Array = jax.Array

NAME = "decode_experts"
"""Name of the kernel in compiled programs."""

TILE_ROWS = 128
"""Largest number of rows of a visit. Multiplying fewer takes as long: loading the expert's matrix
into the matrix unit does."""

ROW_MULTIPLE = 16
"""Rows of a tile are a multiple of this many, unless a tile has all of them."""

MAX_ROWS_BYTES = 1 << 20
"""Bytes of the rows of a visit, above which its tile is made smaller."""

MAX_BLOCK_BYTES = 2 << 20
"""Bytes of the part of a matrix that a visit reads, above which it has fewer outputs. While one
part is multiplied, the next one is on its way."""

MAX_BYTES = 12 << 20
"""Bytes of a visit in vector memory, of which a kernel may use 16 MiB."""


class Tiles(NamedTuple):
    """The pieces into which the kernel cuts a product."""

    rows: int
    outputs: int


def make_tiles(x: Any, stack: Any) -> Tiles | None:
    """Return the tiles of rows x [n, I] and matrices stack [L, E, I, O], or None if the pieces of a
    visit do not fit. Both may be shapes with dtypes."""
    num_rows, inputs = x.shape
    outputs = stack.shape[-1]
    row_bytes = inputs * x.dtype.itemsize
    rows = min(TILE_ROWS, MAX_ROWS_BYTES // row_bytes // ROW_MULTIPLE * ROW_MULTIPLE)
    rows = min(max(rows, ROW_MULTIPLE), num_rows)
    lane_bytes = LANES * inputs * stack.dtype.itemsize
    lanes = math.ceil(outputs / LANES)
    # At least two parts, one for each core of a chip that has two.
    parts = max(math.ceil(lanes / max(MAX_BLOCK_BYTES // lane_bytes, 1)), min(lanes, 2))
    columns = min(LANES * math.ceil(lanes / parts), outputs)
    padded = max(columns, LANES)
    block = inputs * padded
    # Two buffers of all that is copied, and the converted weights.
    room = 2 * (rows * row_bytes + block * stack.dtype.itemsize + rows * padded * x.dtype.itemsize)
    if stack.dtype != x.dtype:
        room += block * x.dtype.itemsize
    return Tiles(rows, columns) if room <= MAX_BYTES else None


class _Visits(NamedTuple):
    """The visits, in order, and the rows of each expert. These are scalars of the kernel."""

    expert: Array
    """[V] int32: the expert of each visit."""
    first_tile: Array
    """[E] int32: the tile of an expert's first visit, less the number of that visit."""
    start: Array
    """[E] int32: the expert's first row."""
    end: Array
    """[E] int32: the row after its last one."""


def _make_visits(ends: Array, num_rows: int, tile_rows: int) -> tuple[_Visits, Array]:
    """Return the visits of rows whose experts end at `ends` [E], and their number.

    An expert visits the tiles that hold its rows. One without rows visits none.
    """
    starts = jnp.pad(ends[:-1], (1, 0))
    first = starts // tile_rows
    last = (ends - 1) // tile_rows
    counts = jnp.where(ends > starts, last - first + 1, 0)
    # A sum of comparisons: running sums and searches are loops on TPUs.
    number = jnp.arange(len(ends))
    is_counted = number[None, :] <= number[:, None]
    visit_ends = jnp.where(is_counted, counts[None, :], 0).sum(1, dtype=jnp.int32)
    most = math.ceil(num_rows / tile_rows) + min(len(ends), num_rows) - 1
    is_done = visit_ends[None, :] <= jnp.arange(most)[:, None]
    expert = jnp.minimum(is_done.sum(1, dtype=jnp.int32), len(ends) - 1)
    return _Visits(expert, first - (visit_ends - counts), starts, ends), visit_ends[-1]


def _kernel(tile_rows: int, has_scale: bool, layer: Any, *refs: Any) -> None:
    """Multiply the rows of a tile that belong to an expert by a part of its matrix.

    refs: the fields of `_Visits`; rows [r, I]; the matrix [I, o]; scales [E, o], if there are any;
    the result [r, o].
    """
    visits = _Visits(*refs[:4])
    x, matrix, *scale, result = refs[4:]
    visit = pl.program_id(1)
    expert = visits.expert[visit]
    product = dot(x[...], matrix[...].astype(x.dtype), A_B)
    if has_scale:
        product = product * scale[0][pl.ds(expert, 1), :]
    begin = (visits.first_tile[expert] + visit) * tile_rows
    row = begin + jax.lax.broadcasted_iota(jnp.int32, product.shape, 0)
    is_own = (row >= visits.start[expert]) & (row < visits.end[expert])
    result[...] = jnp.where(is_own, product.astype(result.dtype), result[...])


def product(x: Array, stack: Array, layer: Array, ends: Array, scale: Array | None = None) -> Array:
    """Return the products [n, O] of rows x [n, I], sorted by expert, with their experts' matrices.

    Values of rows after the last expert's are arbitrary. There is no gradient.

    Args:
        x: rows.
        stack: matrices [L, E, I, O], in eight bits or the type of x.
        ends: [E] int32: the end of each expert's rows.
        scale: [E, O] float32: factors of the layer's outputs.
    """
    run = functools.partial(_product, False)
    interpreted = functools.partial(_product, True)
    return jax.lax.platform_dependent(x, stack, layer, ends, scale, tpu=run, default=interpreted)


def _product(
    interpret: bool, x: Array, stack: Array, layer: Array, ends: Array, scale: Array | None
) -> Array:
    num_rows, inputs = x.shape
    num_experts, _, outputs = stack.shape[1:]
    tiles = make_tiles(x, stack)
    assert tiles is not None, "see make_tiles"
    visits, count = _make_visits(ends, num_rows, tiles.rows)

    def tile(part: Array, visit: Array, layer: Any, *scalars: Any) -> tuple[Any, Any]:
        visits = _Visits(*scalars)
        return visits.first_tile[visits.expert[visit]] + visit, 0

    def result_tile(part: Array, visit: Array, *scalars: Any) -> tuple[Any, Any]:
        return tile(part, visit, *scalars)[0], part

    def matrix_block(part: Array, visit: Array, layer: Any, expert: Any, *_: Any) -> tuple:
        return layer[0], expert[visit], 0, part

    in_specs = [
        pl.BlockSpec((tiles.rows, inputs), tile),
        pl.BlockSpec((None, None, inputs, tiles.outputs), matrix_block),
    ]
    operands = [x, stack]
    if scale is not None:
        in_specs.append(pl.BlockSpec((num_experts, tiles.outputs), lambda part, *_: (0, part)))
        operands.append(scale)
    num_parts = math.ceil(outputs / tiles.outputs)
    matrix_bytes = inputs * outputs * stack.dtype.itemsize
    call = pl.pallas_call(
        functools.partial(_kernel, tiles.rows, scale is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            1 + len(visits),
            grid=(num_parts, count),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((tiles.rows, tiles.outputs), result_tile),
        ),
        out_shape=jax.ShapeDtypeStruct((num_rows, outputs), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        # For as many experts as may have a token: which have one is not known at compile time.
        cost_estimate=pl.CostEstimate(
            flops=2 * num_rows * inputs * outputs,
            transcendentals=0,
            bytes_accessed=min(num_experts, num_rows) * matrix_bytes
            + (num_parts * x.size + num_rows * outputs) * x.dtype.itemsize,
        ),
        interpret=interpret,
        name=NAME,
    )
    return call(jnp.asarray(layer, jnp.int32)[None], *visits, *operands)
