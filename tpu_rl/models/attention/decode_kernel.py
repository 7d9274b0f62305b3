"""The Pallas kernel of `decode.decode_attention`: one query per row, and keys in the cache.

A row sees the tokens [first, end) and no others are read, up to `ChunkedCache.chunk` tokens at each
border. The keys of a row are visited in blocks, all rows one after another. Blocks are copied from
main memory to the chip's vector memory some visits ahead, across the borders of rows. The softmax
is computed online (Milakov and Gimelshein, arXiv 1805.02867).

Rows that continue one prompt are a group. The whole blocks of their prompt are visited first, once
for the group, in the place of one of its rows. Such a visit multiplies the queries of all members
at once (as Hydragen, arXiv 2402.05099, and cascade inference do). Each row then begins with what
these visits added up. So every row adds the same blocks in the same order as it would alone.

Letters in array shapes are those of `layers`; L counts layers and S the places of the cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
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

MEMBERS = 8
"""Rows of a group whose queries are multiplied with a block at once."""

MAX_MEMBERS = 32
"""Most rows of a group, a multiple of `MEMBERS`. More rows of one prompt are several groups."""


class DecodeConfig(NamedTuple):
    """Constants of the compiled kernel."""

    scale: float
    softcap: float | None = None
    interpret: bool = False
    """Let JAX interpret the kernel, on any backend and slowly. For tests."""
    on_gpu: bool = False
    """Use `gpu_decode`."""
    has_window: bool = False
    """Rows need not see all their tokens. It only names the kernel, for the planner."""


class Groups(NamedTuple):
    """The groups of rows in each part of the rows (see `Visits.rows`).

    All arrays are [B'] int32, with B' the rows of all parts. A position counts the rows of a part
    in another order, in which the members of a group are neighbors, and rows without a group last.
    """

    member: Array
    """By position: the number of the row in its part."""
    size: Array
    """By position: members of the group that begins here; 0 where none begins."""
    blocks: Array
    """By position: the blocks that this group shares; 0 where none begins."""
    shared: Array
    """By row: the blocks that it shares with its group."""


class Visits(NamedTuple):
    """The pieces into which the kernel cuts rows and keys."""

    rows: int
    """Rows of a part. Parts are computed independently: by the two cores of a chip that has
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
    group_unrolled: int
    """Blocks of a group that an iteration visits; divides `unrolled`."""
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
    parts = max(min(rows, 2), math.ceil(rows * query_bytes / MAX_QUERY_BYTES))
    return Visits(
        rows=math.ceil(rows / parts),
        kv_heads=kv_heads,
        block=block,
        num_blocks=places // block,
        # Scales have keys along lanes.
        chunk=LANES if is_int8 else LANES // 2,
        unrolled=unrolled,
        group_unrolled=min(unrolled, 2),
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


def find_groups(visits: Visits, prompt: Array, tokens: Array, first: Array, end: Array) -> Groups:
    """Return the groups of rows whose first blocks are alike.

    Args:
        visits: the pieces of rows and keys.
        prompt: [B] int32, a number that is the same for rows of one prompt.
        tokens: [B] int32: this many first tokens are the same in all rows of the prompt, and in
            their places in the cache. 0 for rows that share nothing.
        first, end: [B] int32: a row sees the tokens [first, end). It shares its prompt if it sees
            all of it, and a token after the shared blocks: each row has a visit of its own.
    """
    parts = -(-len(prompt) // visits.rows)
    padding = (0, parts * visits.rows - len(prompt))

    def by_part(numbers: Array) -> Array:
        return jnp.pad(numbers, padding).reshape(parts, visits.rows)

    blocks = tokens // visits.block
    blocks = jnp.where((first == 0) & (end > blocks * visits.block), blocks, 0)
    groups = jax.vmap(groups_of_part)(by_part(prompt), by_part(blocks))
    return Groups(*(numbers.reshape(-1) for numbers in groups))


def groups_of_part(prompt: Array, blocks: Array) -> Groups:
    """Return the groups of the rows of one part, from the number of each row's prompt [B] and the
    blocks (or tokens) of it [B] that are shared.

    All numbers are sums over pairs of rows: no sort, and no gather or scatter, which take longer.
    """
    number = jnp.arange(len(prompt))
    is_earlier = number[None, :] < number[:, None]
    has_blocks = (blocks > 0)[:, None] & (blocks > 0)[None, :]
    is_same = has_blocks & (prompt[:, None] == prompt[None, :])
    chunk = (is_same & is_earlier).sum(1) // MAX_MEMBERS
    is_member = is_same & (chunk[:, None] == chunk[None, :])
    size = is_member.sum(1)
    is_shared = size > 1
    leader = jnp.where(is_member, number[None, :], len(prompt)).min(1)
    rank = jnp.where(is_shared, leader, len(prompt))
    is_before = rank[None, :] < rank[:, None]
    is_before |= (rank[None, :] == rank[:, None]) & is_earlier
    is_at = is_before.sum(1)[None, :] == number[:, None]

    def by_position(of_row: Array) -> Array:
        return jnp.where(is_at, of_row[None, :], 0).sum(1, dtype=jnp.int32)

    begins = is_shared & (leader == number)
    return Groups(
        member=by_position(number),
        size=by_position(jnp.where(begins, size, 0)),
        blocks=by_position(jnp.where(begins, blocks, 0)),
        shared=jnp.where(is_shared, blocks, 0),
    )


class _Visit(NamedTuple):
    entry: Array
    """Below `Visits.rows`, the position at which a group begins; from there on, the number of a row
    in its part plus `Visits.rows`. Beyond the last row, the visit has no work."""
    block: Array
    number: Array
    buffer: Array


class _Sums(NamedTuple):
    """State of the online softmax of one head of each key, with n queries."""

    maximum: Array
    """[n, 1] float32: the largest score."""
    total: Array
    """[n, 1] float32: the sum of weights relative to it."""
    weighted: Array
    """[n, E] float32: the sum of weighted values."""


class _SumsRef(NamedTuple):
    """Room for sums in vector memory."""

    statistics: Any
    """[..., n, LANES] float32: the maximum in the first lane, the total in the others."""
    weighted: Any
    """[..., n, E] float32."""

    def read(self, *index: Any) -> _Sums:
        statistics = self.statistics[index]
        return _Sums(statistics[:, 0:1], statistics[:, 1:2], self.weighted[index])

    def write(self, sums: _Sums, *index: Any) -> None:
        lane = jax.lax.broadcasted_iota(jnp.int32, (len(sums.maximum), LANES), 1)
        self.statistics[index] = jnp.where(lane == 0, sums.maximum, sums.total)
        self.weighted[index] = sums.weighted


class _Part(NamedTuple):
    """A part of the rows, as a step of the kernel's grid sees it, and the list of its visits.

    The visits form one list: first the blocks of each group (entries below `rows` are positions of
    groups), then the blocks of each row (entry - rows is the row). Methods take `groups` where a
    visit may be of a group, and None where it is of a row: most visits are, and need fewer numbers
    then.
    """

    visits: Visits
    config: DecodeConfig
    first: Any
    end: Any
    """[B] int32, in scalar memory: a row sees the tokens [first, end)."""
    groups: Groups | None
    query: Any
    """[rows, K, G, E]."""
    sinks: Any
    """[K, G, LANES], all lanes alike, or None."""
    leaves: list[Any]
    """The leaves of the cache, in main memory: two, or with int8 four."""
    buffers: list[Any]
    """Blocks of each leaf, in vector memory."""
    semaphores: Any
    base: Array
    """The part has the rows [base, base + rows)."""
    layer: Array
    first_head: Array
    group_visits: Any = 0
    """Visits of groups, before those of rows."""
    num_visits: Any = 0

    @property
    def heads(self) -> range:
        return range(self.visits.kv_heads)

    # The entries of the list.

    def row_of(self, visit: _Visit) -> Array:
        """Return the number of a row in its part."""
        return jnp.clip(visit.entry - self.visits.rows, 0, self.visits.rows - 1)

    def position_of(self, visit: _Visit) -> Array:
        return self.base + jnp.minimum(visit.entry, self.visits.rows - 1)

    def is_of_group(self, visit: _Visit) -> Array:
        return visit.entry < self.visits.rows

    def row_blocks(self, row: Array) -> tuple[Array, Array]:
        """Return the first and the last block that a row visits alone."""
        row = self.base + jnp.minimum(row, self.visits.rows - 1)
        first_block, last_block = block_range(self.visits, self.first[row], self.end[row])
        if self.groups is None:
            return first_block, last_block
        return jnp.maximum(first_block, self.groups.shared[row]), last_block

    def group_blocks(self, position: Array) -> Array:
        """Return the blocks of a group, rounded up to whole iterations."""
        assert self.groups is not None
        unrolled = self.visits.group_unrolled
        return jax.lax.div(self.groups.blocks[position] + unrolled - 1, unrolled) * unrolled

    def counted(self) -> _Part:
        """Return the part with the length of its list: the blocks of all groups and rows."""

        def count(row: Array, visited: Array) -> Array:
            first_block, last_block = self.row_blocks(row)
            return visited + last_block - first_block + 1

        def count_of_groups(position: Array, visited: Array) -> Array:
            return visited + self.group_blocks(self.base + position)

        rows = self.visits.rows
        group_visits = jnp.int32(0)
        if self.groups is not None:
            group_visits = jax.lax.fori_loop(0, rows, count_of_groups, group_visits)
        num_visits = jax.lax.fori_loop(0, rows, count, group_visits)
        return self._replace(group_visits=group_visits, num_visits=num_visits)

    def first_visit(self) -> _Visit:
        entry = jnp.int32(self.visits.rows)
        if self.groups is not None:
            entry = jnp.where(self.groups.size[self.base] > 0, 0, entry)
        first_block = self.row_blocks(jnp.int32(0))[0]
        block = jnp.where(entry == 0, 0, first_block)
        return _Visit(entry, block, jnp.int32(0), jnp.int32(0))

    def following(self, visit: _Visit, groups: Groups | None) -> _Visit:
        """Return the next block of the same entry, or the first block of the next entry.

        Buffers are used in a ring.
        """
        visits = self.visits
        _, last_block = self.row_blocks(self.row_of(visit))
        next_entry = visit.entry + 1
        if groups is not None:
            position = self.position_of(visit)
            after = visit.entry + groups.size[position]
            is_end = groups.size[self.base + jnp.minimum(after, visits.rows - 1)] == 0
            after = jnp.where(is_end | (after >= visits.rows), visits.rows, after)
            is_group = self.is_of_group(visit)
            last_block = jnp.where(is_group, self.group_blocks(position) - 1, last_block)
            next_entry = jnp.where(is_group, after, next_entry)
        is_last = visit.block == last_block
        entry = jnp.where(is_last, next_entry, visit.entry)
        next_first, _ = self.row_blocks(entry - visits.rows)
        if groups is not None:
            next_first = jnp.where(entry < visits.rows, 0, next_first)
        return _Visit(
            entry,
            jnp.where(is_last, next_first, visit.block + 1),
            visit.number + 1,
            jnp.where(visit.buffer == visits.buffers - 1, 0, visit.buffer + 1),
        )

    def has_work(self, visit: _Visit, groups: Groups | None) -> Array:
        is_visited = visit.number < self.num_visits
        if groups is None:
            return is_visited
        is_padding = visit.block >= groups.blocks[self.position_of(visit)]
        return is_visited & ~(self.is_of_group(visit) & is_padding)

    # Copies from main memory to the chip's vector memory.

    def copies(self, visit: _Visit, groups: Groups | None) -> list[Any]:
        """Return the copies of a block of keys and values [K, block, E].

        Only the tokens [start, start + size) that the row sees are copied. A group sees whole
        blocks, in the cache of one of its members.
        """
        visits = self.visits
        row = self.base + self.row_of(visit)
        start, size = read_range(visits, self.first[row], self.end[row], visit.block)
        if groups is not None:
            is_group = self.is_of_group(visit)
            member = self.base + groups.member[self.position_of(visit)]
            row = jnp.where(is_group, member, row)
            start = jnp.where(is_group, 0, start)
            size = jnp.where(is_group, visits.block, size)
        start = pl.multiple_of(start, visits.chunk)
        size = pl.multiple_of(size, visits.chunk)
        begin = jax.lax.rem(visit.block, visits.num_blocks) * visits.block
        source = pl.ds(pl.multiple_of(begin + start, visits.chunk), size)
        target = pl.ds(start, size)
        read = pl.ds(self.first_head, visits.kv_heads)
        # In the leaves of scales, heads lie along sublanes, which are copied as a whole.
        all_heads = slice(None)
        return [
            pltpu.make_async_copy(
                leaf.at[self.layer, row, read if len(leaf.shape) == 5 else all_heads, source],
                room.at[visit.buffer, :, target],
                self.semaphores.at[number, visit.buffer],
            )
            for number, (leaf, room) in enumerate(zip(self.leaves, self.buffers, strict=True))
        ]

    def start_copies(self, visit: _Visit, groups: Groups | None) -> None:
        @pl.when(self.has_work(visit, groups))
        def _():
            for copy in self.copies(visit, groups):
                copy.start()

    def wait_for_copies(self, visit: _Visit, groups: Groups | None) -> None:
        @pl.when(self.has_work(visit, groups))
        def _():
            for copy in self.copies(visit, groups):
                copy.wait()

    def load(self, loading: _Visit, num_visits: int, groups: Groups | None) -> _Visit:
        """Start the copies of some visits from `loading` on, and return the visit after them."""
        for _ in range(num_visits):
            self.start_copies(loading, groups)
            loading = self.following(loading, groups)
        return loading

    # Sums of one head.

    def scale_of(self, number: int, buffer: Array, head: int) -> Array:
        """Return the scales [1, block] of one head."""
        return self.buffers[number][buffer, pl.ds(self.first_head + head, 1), :]

    def visible_tokens(self, visit: _Visit) -> Array:
        """Return [1, block] bool: what the row of a visit sees."""
        block = self.visits.block
        row = self.base + self.row_of(visit)
        tokens = visit.block * block + jax.lax.broadcasted_iota(jnp.int32, (1, block), 1)
        row_end = jnp.where(visit.number < self.num_visits, self.end[row], 0)
        return (tokens >= self.first[row]) & (tokens < row_end)

    def empty_sums(self) -> _Sums:
        group, head_dim = self.query.shape[2:]
        column = jnp.full((group, 1), MASKED, jnp.float32)
        return _Sums(column, jnp.zeros_like(column), jnp.zeros((group, head_dim), jnp.float32))

    def first_sums(self, head: int, empty: _Sums) -> _Sums:
        if self.sinks is None:
            return empty
        # The sink is a key before all others, whose weight is exp(0) and whose value is zero.
        return _Sums(self.sinks[head][:, :1], jnp.ones_like(empty.maximum), empty.weighted)

    def visit_sums(self, vectors: Array, buffer: Array, head: int, visible: Array | None) -> _Sums:
        """Return the sums of queries [n, E] over the keys of one visit: all or the visible."""
        config = self.config
        is_int8 = len(self.leaves) == 4

        def mask(values: Array, masked: float) -> Array:
            return values if visible is None else jnp.where(visible, values, masked)

        # s = q k^T scale, m = max s, p = exp(s - m), l = sum p, o = p v. Scales of int8 keys
        # multiply s, and those of values multiply p.
        key = self.buffers[0][buffer, head].astype(vectors.dtype)
        value = self.buffers[1][buffer, head].astype(vectors.dtype)
        scores = dot(vectors, key, A_BT) * config.scale
        if is_int8:
            scores = scores * self.scale_of(2, buffer, head)
        if config.softcap is not None:
            scores = config.softcap * jnp.tanh(scores / config.softcap)
        scores = mask(scores, MASKED)
        maximum = scores.max(1, keepdims=True)
        weights = mask(jnp.exp(scores - maximum), 0.0)
        total = weights.sum(1, keepdims=True)
        if is_int8:
            weights = mask(weights * self.scale_of(3, buffer, head), 0.0)
        return _Sums(maximum, total, dot(weights.astype(value.dtype), value, A_B))

    def group_visit_sums(self, vectors: Array, visit: _Visit, head: int, groups: Groups) -> _Sums:
        """Return the sums of queries [n, E] over a block of a group, nothing for padding to whole
        iterations: m = MASKED, l = o = 0."""
        sums = self.visit_sums(vectors, visit.buffer, head, None)
        is_real = self.has_work(visit, groups)
        return _Sums(
            jnp.where(is_real, sums.maximum, MASKED),
            jnp.where(is_real, sums.total, 0.0),
            jnp.where(is_real, sums.weighted, 0.0),
        )


def _add(sums: _Sums, visit: _Sums) -> _Sums:
    """Return the sums of both: m' = max(m1, m2); l' = e^(m1 - m') l1 + e^(m2 - m') l2, and o' in
    the same way."""
    maximum = jnp.maximum(sums.maximum, visit.maximum)
    keep = jnp.exp(sums.maximum - maximum)
    factor = jnp.exp(visit.maximum - maximum)
    return _Sums(
        maximum,
        keep * sums.total + factor * visit.total,
        keep * sums.weighted + factor * visit.weighted,
    )


def _kernel(
    visits: Visits,
    config: DecodeConfig,
    is_int8: bool,
    has_sinks: bool,
    has_groups: bool,
    *refs: Any,
) -> None:
    """Compute the attention of a part of the rows.

    refs: [2] layer and first KV head; [B] first; [B] end; the `Groups`, if there are any; query
    [rows, K, G, E]; sinks [K, G, LANES], all lanes alike, if there are any; the leaves of the cache
    in main memory; the result; buffers for blocks of each leaf; their semaphores; with groups, the
    sums of rows, and the queries and sums of one group.
    """
    num_leaves = 4 if is_int8 else 2
    place, first, end, *rest = refs
    groups = None
    if has_groups:
        groups = Groups(*rest[: len(Groups._fields)])
        rest = rest[len(Groups._fields) :]
    query, *rest = rest
    sinks = rest.pop(0) if has_sinks else None
    leaves = rest[:num_leaves]
    result = rest[num_leaves]
    buffers = rest[num_leaves + 1 : 2 * num_leaves + 1]
    semaphores, *rest = rest[2 * num_leaves + 1 :]
    # A grid step computes one part: the rows [base, base + rows), for K heads of one layer.
    base = pl.program_id(0) * visits.rows
    part = _Part(
        visits,
        config,
        first,
        end,
        groups,
        query,
        sinks,
        leaves,
        buffers,
        semaphores,
        base,
        layer=place[0],
        first_head=place[1],
    ).counted()
    empty = part.empty_sums()
    if not is_int8:
        # Of a block that is read in part, the rest is whatever was in memory, which may be NaN.
        buffers[1][...] = jnp.zeros_like(buffers[1])

    # Start the copies of the first visits. From here on, `loading` runs ahead of `visit` by as many
    # visits as there are spare buffers, so that copies and products overlap.
    visit = part.first_visit()

    def begin(_: Array, visit: _Visit) -> _Visit:
        return part.load(visit, 1, groups)

    loading = jax.lax.fori_loop(0, visits.buffers - visits.unrolled, begin, visit)
    row_sums = None
    if groups is not None:
        alone = _SumsRef(*rest[:2])

        def begin_row(row: Array, _: None) -> None:
            for head in part.heads:
                alone.write(part.first_sums(head, empty), row, head)

        jax.lax.fori_loop(0, visits.rows, begin_row, None)
        visit, loading = _visit_groups(part, groups, alone, rest[2:], visit, loading)
        row_sums = alone
    _visit_rows(part, empty, row_sums, result, visit, loading)


def _visit_groups(
    part: _Part,
    groups: Groups,
    row_sums: _SumsRef,
    rooms: list[Any],
    visit: _Visit,
    loading: _Visit,
) -> tuple[_Visit, _Visit]:
    """Visit the blocks that groups share, and keep the sums of each row in `row_sums`.

    Queries of MEMBERS members, [MEMBERS G, E], are multiplied with a block at once. `rooms` are
    for queries and sums of a group. Returns the visit after them, and the next one to load.
    """
    visits = part.visits
    queries, *sums_rooms = rooms
    group_sums = _SumsRef(*sums_rooms)
    group = part.query.shape[2]

    def num_chunks(visit: _Visit) -> Array:
        return jax.lax.div(groups.size[part.position_of(visit)] + MEMBERS - 1, MEMBERS)

    def of_members(visit: _Visit, do: Callable[[Array, Array, Any], None]) -> None:
        """Call do(row, chunk of the group, place in the chunk) for each member."""
        position = part.position_of(visit)
        size = groups.size[position]

        def of_chunk(chunk: Array, _: Any) -> None:
            for i in range(MEMBERS):

                @pl.when(chunk * MEMBERS + i < size)
                def _(i: int = i) -> None:
                    row = groups.member[position + chunk * MEMBERS + i]
                    do(row, chunk, slice(i * group, (i + 1) * group))

        jax.lax.fori_loop(0, num_chunks(visit), of_chunk, None)

    def take(row: Array, chunk: Array, lines: slice) -> None:
        for head in part.heads:
            queries[head, chunk, lines] = part.query[row, head].astype(jnp.float32)
            group_sums.write(row_sums.read(row, head), head, chunk, lines)

    def give(row: Array, chunk: Array, lines: slice) -> None:
        for head in part.heads:
            row_sums.write(group_sums.read(head, chunk, lines), row, head)

    def iterate(_: Array, carry: Any) -> Any:
        # At a group's first block, take the members' queries and sums; at its last block, give the
        # sums back.
        visit, loading = carry
        loading = part.load(loading, visits.group_unrolled, groups)
        begun = visit

        @pl.when(begun.block == 0)
        def _() -> None:
            of_members(begun, take)

        visited = []
        for _i in range(visits.group_unrolled):
            part.wait_for_copies(visit, groups)
            visited.append(visit)
            visit = part.following(visit, groups)

        def add_chunk(chunk: Array, _: Any) -> None:
            for head in part.heads:
                vectors = queries[head, chunk].astype(part.query.dtype)
                sums = group_sums.read(head, chunk)
                for one in visited:
                    sums = _add(sums, part.group_visit_sums(vectors, one, head, groups))
                group_sums.write(sums, head, chunk)

        jax.lax.fori_loop(0, num_chunks(begun), add_chunk, None)

        @pl.when(visited[-1].block == part.group_blocks(part.position_of(begun)) - 1)
        def _() -> None:
            of_members(begun, give)

        return visit, loading

    iterations = jax.lax.div(part.group_visits, visits.group_unrolled)
    return jax.lax.fori_loop(0, iterations, iterate, (visit, loading))


def _visit_rows(
    part: _Part,
    empty: _Sums,
    row_sums: _SumsRef | None,
    result: Any,
    visit: _Visit,
    loading: _Visit,
) -> None:
    """Visit the blocks that each row visits alone, `unrolled` visits per iteration, whose products
    do not wait for one another. A row begins with `row_sums`, if there are any."""
    visits = part.visits

    def iterate(_: Array, carry: Any) -> Any:
        visit, loading, sums = carry
        loading = part.load(loading, visits.unrolled, None)
        computed = []
        for _i in range(visits.unrolled):
            part.wait_for_copies(visit, None)
            row = part.row_of(visit)
            visible = part.visible_tokens(visit)
            of_heads = [
                part.visit_sums(part.query[row, head], visit.buffer, head, visible)
                for head in part.heads
            ]
            computed.append((visit, of_heads))
            visit = part.following(visit, None)
        for visited, of_heads in computed:
            row = part.row_of(visited)
            is_first = visited.block == part.row_blocks(row)[0]
            is_first &= visited.number < part.num_visits
            for head in part.heads:
                if row_sums is None:
                    begun = part.first_sums(head, empty)
                else:
                    begun = row_sums.read(row, head)
                before = jax.tree.map(functools.partial(jnp.where, is_first), begun, sums[head])
                sums[head] = _add(before, of_heads[head])
            # Every visit writes what is known so far. Those beyond the last add nothing to it.
            for head in part.heads:
                attended = sums[head].weighted / sums[head].total
                result[row, head] = attended.astype(result.dtype)
        return visit, loading, sums

    count = part.num_visits - part.group_visits + visits.unrolled - 1
    iterations = jax.lax.div(count, visits.unrolled)
    jax.lax.fori_loop(0, iterations, iterate, (visit, loading, [empty for _ in part.heads]))


def attention(
    config: DecodeConfig,
    query: Array,
    leaves: list[Array],
    layer: Array | int,
    first_head: Array | int,
    first: Array,
    end: Array,
    sinks: Array | None = None,
    groups: Groups | None = None,
) -> Array:
    """Return the attention [B, K, G, E] of query [B, K, G, E].

    Args:
        query: G query heads per KV head.
        leaves: keys and values [L, B, ..., S, E]; with int8, also their scales [L, B, ..., S]. S
            must be a multiple of `LANES`.
        first_head: the KV heads are K heads of the cache from this one on.
        first, end: [B] int32: a row sees the tokens [first, end), at least one and no more than S.
            Their place in the cache is their number modulo S.
        sinks: [K, G], the score of a further key of each query, whose value is zero.
        groups: what `find_groups` returns; None if no rows share anything.
    """
    visits = make_visits(query, leaves[0])
    rows, kv_heads, group, head_dim = query.shape
    is_int8 = len(leaves) == 4
    places = leaves[0].shape[3]
    parts = math.ceil(rows / visits.rows)
    missing = parts * visits.rows - rows
    assert groups is None or len(groups.member) == parts * visits.rows, "see decode.with_groups"
    # Rows that do not exist are last, and have no visits: their last block is 0, their first is 1.
    first, end = (
        jnp.pad(numbers, (0, missing), constant_values=visits.block) for numbers in (first, end)
    )
    query_spec = pl.BlockSpec(
        (visits.rows, kv_heads, group, head_dim), lambda number, *_: (number, 0, 0, 0)
    )
    scalars = (first, end, *(groups or ()))
    sink_lanes = []
    sink_specs = []
    if sinks is not None:
        shape = (kv_heads, group, LANES)
        sink_lanes = [jnp.broadcast_to(sinks.astype(jnp.float32)[..., None], shape)]
        sink_specs = [pl.BlockSpec(shape, lambda number, *_: (0, 0, 0))]
    token_bytes = sum(math.prod(leaf.shape[4:]) * leaf.dtype.itemsize for leaf in leaves)
    products = 2 * query.size * places
    call = pl.pallas_call(
        functools.partial(_kernel, visits, config, is_int8, sinks is not None, groups is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            1 + len(scalars),
            grid=(parts,),
            in_specs=[
                query_spec,
                *sink_specs,
                *(pl.BlockSpec(memory_space=pl.ANY) for _ in leaves),
            ],
            out_specs=query_spec,
            scratch_shapes=[
                *_rooms(visits, leaves),
                pltpu.SemaphoreType.DMA((len(leaves), visits.buffers)),
                *([] if groups is None else _group_rooms(visits, group, head_dim)),
            ],
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
    return call(place, *scalars, query, *sink_lanes, *leaves)


def _rooms(visits: Visits, leaves: list[Array]) -> list[Any]:
    """Return the vector memory for blocks of each leaf."""
    return [
        pltpu.VMEM(
            (
                visits.buffers,
                visits.kv_heads if leaf.ndim == 5 else leaf.shape[2],
                visits.block,
                *leaf.shape[4:],
            ),
            leaf.dtype,
        )
        for leaf in leaves
    ]


def _group_rooms(visits: Visits, group: int, head_dim: int) -> list[Any]:
    """Return the vector memory for the sums of rows, and the queries and sums of one group."""
    of_rows = (visits.rows, visits.kv_heads, group)
    of_group = (visits.kv_heads, MAX_MEMBERS // MEMBERS, MEMBERS * group)
    shapes = [
        (*of_rows, LANES),
        (*of_rows, head_dim),
        (*of_group, head_dim),
        (*of_group, LANES),
        (*of_group, head_dim),
    ]
    return [pltpu.VMEM(shape, jnp.float32) for shape in shapes]
