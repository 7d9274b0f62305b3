"""Which completion goes where in the packed rows.

A group's prompt stands once in its row, its completions after it: [prompt, completion 1 .. G]. Completions see the
prompt and themselves (`types.Model.hidden`), so log-probs and gradients are those of a row per completion, at
P + G x C tokens instead of G x (P + C). Decided on the host with numpy, once per batch; nothing here is traced but
`over_micro_batches`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_rl.errors import InputError
from tpu_rl.types import Layout, Rows

TILE = 64
"""Slots of a tile of `Rows.key_tiles`, about: smaller ones leave out more, larger ones gather less for each score."""

WORTH_TILES = 0.75
"""The share of a row's keys above which all are taken."""


@dataclass
class _Group:
    """Completions (rows of the [N, T] arrays) that share a prompt."""

    prompt_length: int
    members: list[int]
    lengths: list[int]
    """Of the completions alone."""

    @property
    def size(self) -> int:
        return self.prompt_length + sum(self.lengths)


@dataclass
class _PackedRow:
    """A row being filled: groups one after the other."""

    groups: list[_Group] = field(default_factory=list)

    @property
    def used(self) -> int:
        return sum(group.size for group in self.groups)


def lay_out(
    action_mask: np.ndarray,
    group_id: np.ndarray,
    *,
    row_length: int,
    micro_batch_rows: int,
    minibatches: int = 1,
    row_limit: int | None = None,
    whole_groups: bool = False,
) -> Layout:
    """The Layout of action_mask [N, T] and group_id [N] in rows of `row_length` slots, `micro_batch_rows` at a time.

    Groups are cut, in order, into `minibatches` optimizer steps of as many groups each, and first-fit by falling size
    into rows there; with fewer groups than minibatches, some of them are all padding. A group longer than a row is
    split, its prompt repeated and its branches numbered anew, unless `whole_groups`. The number of micro-batches is
    that of the fullest step, rounded up to one of few values so that few programs are compiled, as the lists' lengths
    are; `row_limit` makes room for that many rows even where fewer are needed. Raises InputError where a prompt with
    one completion, or one of `whole_groups`, exceeds a row.
    """
    mask = np.asarray(action_mask)
    groups = _groups(mask, np.asarray(group_id))
    if whole_groups:
        _require_whole(groups, row_length)
    parts = [groups[i * len(groups) // minibatches : (i + 1) * len(groups) // minibatches] for i in range(minibatches)]
    packed = [_first_fit(part, row_length) for part in parts]
    needed = max(max(len(rows) for rows in packed), row_limit or 0)
    micro_batches = _rounded(-(-needed // micro_batch_rows))
    shape = (minibatches, micro_batches, micro_batch_rows, row_length)
    layout = _index(packed, mask.shape, shape)
    actions = _actions(np.where(layout.source >= 0, mask.reshape(-1)[layout.source], False))
    return replace(layout, actions=actions, key_tiles=_key_tiles(packed, shape))


def _groups(mask: np.ndarray, group_id: np.ndarray) -> list[_Group]:
    """The groups in order of appearance, without the rows that have no action."""
    groups: dict[int, _Group] = {}
    starts = mask.argmax(1)
    ends = mask.shape[1] - mask[:, ::-1].argmax(1)
    for row in np.flatnonzero(mask.any(1)):
        start, length = int(starts[row]), int(ends[row] - starts[row])
        group = groups.setdefault(int(group_id[row]), _Group(start, [], []))
        if group.prompt_length != start:
            raise ValueError(f"rows of group {group_id[row]} have prompts of {group.prompt_length} and {start} tokens")
        group.members.append(int(row))
        group.lengths.append(length)
    return list(groups.values())


def _require_whole(groups: list[_Group], row_length: int) -> None:
    for group in groups:
        if group.size > row_length:
            raise InputError(
                f"a prompt of {group.prompt_length} tokens and its {len(group.members)} completions of "
                f"{sum(group.lengths)} exceed a row",
                why=f"packed rows hold {row_length} tokens, and completions that are compared stand in one row",
                fix="raise --batch.row-length, or limit prompts and completions",
            )


def _first_fit(groups: list[_Group], row_length: int) -> list[_PackedRow]:
    rows: list[_PackedRow] = []
    pieces = [piece for group in groups for piece in _split(group, row_length)]
    for piece in sorted(pieces, key=lambda piece: -piece.size):
        row = next((row for row in rows if row.used + piece.size <= row_length), None)
        if row is None:
            row = _PackedRow()
            rows.append(row)
        row.groups.append(piece)
    return rows


def _split(group: _Group, row_length: int) -> list[_Group]:
    """The group in pieces that fit a row each, every one with the prompt."""
    pieces = [_Group(group.prompt_length, [], [])]
    for member, length in zip(group.members, group.lengths, strict=True):
        if group.prompt_length + length > row_length:
            raise InputError(
                f"a prompt of {group.prompt_length} and a completion of {length} tokens exceed a row",
                why=f"packed rows hold {row_length} tokens",
                fix="raise --batch.row-length, or limit prompts and completions",
            )
        if pieces[-1].size + length > row_length:
            pieces.append(_Group(group.prompt_length, [], []))
        pieces[-1].members.append(member)
        pieces[-1].lengths.append(length)
    return pieces


def _rounded(count: int) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is not below count."""
    power = 1
    while power * 2 <= count:
        power *= 2
    return next(size for size in (power, power * 3 // 2, power * 2) if size >= count)


def _index(packed: list[list[_PackedRow]], shape: tuple[int, int], packed_shape: tuple[int, ...]) -> Layout:
    """The index arrays of rows that have been decided on."""
    total_rows, length = shape
    row_length = packed_shape[-1]
    source = np.full(packed_shape, -1, np.int32)
    slot = np.full(shape, -1, np.int32)
    minibatch = np.full(total_rows, len(packed), np.int32)
    positions, segments, branches, sequences = (np.zeros(packed_shape, np.int32) for _ in range(4))
    previous = np.broadcast_to(np.arange(row_length, dtype=np.int32), packed_shape).copy()

    for part, rows in enumerate(packed):
        flat = (-1, row_length)
        for index, row in enumerate(rows):
            views = [x[part].reshape(flat)[index] for x in (source, positions, segments, branches, sequences, previous)]
            first_slot = (part * packed_shape[1] * packed_shape[2] + index) * row_length
            sequence = 0
            cursor = 0
            for segment, group in enumerate(row.groups, start=1):
                prompt = np.arange(group.prompt_length)
                prompt_slots = cursor + prompt
                _write(views, prompt_slots, group.members[0] * length + prompt, prompt, segment, 0, 0)
                views[5][prompt_slots[1:]] = prompt_slots[:-1]
                cursor += group.prompt_length
                prompt_end = max(cursor - 1, 0)
                for branch, (member, count) in enumerate(zip(group.members, group.lengths, strict=True), start=1):
                    sequence += 1
                    columns = group.prompt_length + np.arange(count)
                    slots = cursor + np.arange(count)
                    _write(views, slots, member * length + columns, columns, segment, branch, sequence)
                    views[5][slots] = np.concatenate([[prompt_end], slots[:-1]])
                    slot[member, columns] = first_slot + slots
                    slot[member, : group.prompt_length] = first_slot + prompt_slots
                    minibatch[member] = part
                    cursor += count
    arrays: list[Any] = [source, slot, minibatch, positions, segments, branches, sequences, previous]
    return Layout(*arrays)


def _actions(learned: np.ndarray) -> np.ndarray:
    """learned [M, K, R, S] bool -> `Rows.actions`."""
    slots = learned.shape[-1]
    length = min(_sixteenths(int(learned.sum(-1).max()), slots), slots)
    order = np.argsort(~learned, axis=-1, kind="stable")[..., :length].astype(np.int32)
    return np.where(np.take_along_axis(learned, order, axis=-1), order, np.int32(slots))


def _key_tiles(packed: list[list[_PackedRow]], shape: tuple[int, ...]) -> np.ndarray | None:
    """`Rows.key_tiles`; None where leaving keys out is not worth the gathering of those that are left."""
    row_length = shape[-1]
    size = _tile(row_length)
    if size is None:
        return None
    count = row_length // size
    needed = np.zeros((shape[0], shape[1] * shape[2], count, count), bool)
    for part, rows in enumerate(packed):
        for index, row in enumerate(rows):
            _mark(needed[part, index], row, size)
    needed &= np.tri(count, dtype=bool)
    longest = _sixteenths(int(needed.sum(-1).max()), count)
    if longest * size > WORTH_TILES * row_length:
        return None
    order = np.argsort(~needed, axis=-1, kind="stable")[..., :longest].astype(np.int32)
    tiles = np.where(np.take_along_axis(needed, order, axis=-1), order, np.int32(-1))
    return tiles.reshape(*shape[:3], count, longest)


def _mark(needed: np.ndarray, row: _PackedRow, size: int) -> None:
    """Sets needed [tile of queries, tile of keys] where a token of the one sees one of the other, or stands before."""

    def tiles(start: int, length: int) -> slice:
        return slice(start // size, -(-(start + length) // size))

    cursor = 0
    for group in row.groups:
        prompt = tiles(cursor, group.prompt_length)
        needed[prompt, prompt] = True
        cursor += group.prompt_length
        for length in group.lengths:
            own = tiles(cursor, length)
            needed[own, own] = needed[own, prompt] = True
            cursor += length


def _tile(row_length: int) -> int | None:
    """The divisor of a row's length that is nearest to TILE, if one is near."""
    near = [size for size in range(TILE // 2, 2 * TILE + 1) if row_length % size == 0]
    return min(near, key=lambda size: abs(size - TILE), default=None)


def _sixteenths(count: int, whole: int) -> int:
    """`count` rounded up to one of at most 16 sizes: multiples of a sixteenth of `whole`."""
    step = -(-whole // 16)
    return max(1, -(-count // step)) * step


def _write(views: list[np.ndarray], slots: np.ndarray, *values: np.ndarray | int) -> None:
    """Each of (source, positions, segments, branches, sequences) at `slots` of one packed row."""
    for view, value in zip(views, values, strict=False):
        view[slots] = value


def one_a_row(tokens: jax.Array, action_mask: jax.Array, rows_at_once: int) -> Rows:
    """[N, T] sequences -> Rows [1, K, R, T], each in a row of its own; rows that are missing to K x R are padding.

    For sequences that are made within make_batch, where no layout can be. They end with their last action.
    """
    missing = -len(tokens) % rows_at_once
    tokens, mask = (jnp.pad(x, ((0, missing), (0, 0))) for x in (tokens, action_mask))
    column = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :], tokens.shape)
    inside = jnp.flip(jnp.cumsum(jnp.flip(mask, 1), axis=1), 1) > 0
    completion = (inside & (jnp.cumsum(mask, axis=1) > 0)).astype(jnp.int32)
    rows = Rows(tokens, column, inside.astype(jnp.int32), completion, completion, jnp.maximum(column - 1, 0))
    return jax.tree.map(lambda x: x.reshape(1, -1, rows_at_once, x.shape[1]), rows)


def over_micro_batches(function: Callable[[Any], Any], batch: Any) -> Any:
    """`function` of leaves [R, S] mapped over a pytree with leaves [M, K, R, S], one micro-batch at a time.

    For make_batch's own forwards.
    """
    minibatches, micro_batches = jax.tree.leaves(batch)[0].shape[:2]
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
    return jax.tree.map(lambda x: x.reshape(minibatches, micro_batches, *x.shape[1:]), jax.lax.map(function, flat))
