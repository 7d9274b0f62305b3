"""Assignment of completions to packed rows.

A packed row stores the prompt of a group once and the completions of the group after it:
[prompt, completion 1 .. G]. Completions see the prompt and themselves (`types.Model.hidden`), so
log-probs and gradients equal those of one row per completion. With a prompt of P tokens and G
completions of C tokens, that takes P + G x C tokens instead of G x (P + C).

The assignment happens on the host with numpy, once per batch. Only `one_per_row` and
`over_micro_batches` are for use inside jit.
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
"""Approximate number of slots per tile of `Rows.key_tiles`. Smaller tiles leave out more keys;
larger tiles gather less memory per attention score."""

WORTH_TILES = 0.75
"""If the longest list of key tiles covers more than this share of a row, attention reads all keys
instead."""


@dataclass
class _Group:
    """Completions (rows of the [N, T] arrays) that share a prompt."""

    prompt_length: int
    members: list[int]
    """Row indices into the [N, T] arrays."""
    lengths: list[int]
    """Tokens of each completion, without the prompt."""

    @property
    def size(self) -> int:
        """Number of slots that the group takes."""
        return self.prompt_length + sum(self.lengths)


@dataclass
class _PackedRow:
    """A packed row in the making: groups, one after the other."""

    groups: list[_Group] = field(default_factory=list)

    @property
    def used(self) -> int:
        """Number of slots taken."""
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
    """Assign the rows of action_mask [N, T] and group_id [N] to packed rows.

    Groups are split, in order, into `minibatches` optimizer steps with the same number of groups
    each. Within a step they are packed into rows first-fit by decreasing size. If there are fewer
    groups than minibatches, some steps are all padding. A group that is longer than a row is split:
    its prompt is repeated and its branches are numbered anew.

    The number of micro-batches is that of the fullest step. It is rounded up to one of few values,
    as are the lengths of the lists in `Rows.actions` and `Rows.key_tiles`, so that few programs are
    compiled.

    Args:
        row_length: slots per packed row.
        micro_batch_rows: packed rows per micro-batch.
        minibatches: optimizer steps per batch.
        row_limit: room for at least this many packed rows per step, even if fewer are needed.
        whole_groups: never split a group.

    Raises:
        InputError: a prompt with one completion is longer than a row, or a group is and
            `whole_groups` is set.
    """
    mask = np.asarray(action_mask)
    groups = _groups(mask, np.asarray(group_id))
    if whole_groups:
        _require_fit(groups, row_length)
    packed: list[list[_PackedRow]] = []
    for step in range(minibatches):
        start = step * len(groups) // minibatches
        end = (step + 1) * len(groups) // minibatches
        packed.append(_first_fit(groups[start:end], row_length))
    most_rows = max(len(rows) for rows in packed)
    if row_limit is not None:
        most_rows = max(most_rows, row_limit)
    micro_batches = _round_up_count(_ceil_div(most_rows, micro_batch_rows))
    packed_shape = (minibatches, micro_batches, micro_batch_rows, row_length)
    layout = _index(packed, mask.shape, packed_shape)
    is_action = np.where(layout.source >= 0, mask.reshape(-1)[layout.source], False)
    return replace(
        layout, actions=_action_slots(is_action), key_tiles=_key_tiles(packed, packed_shape)
    )


def _groups(mask: np.ndarray, group_id: np.ndarray) -> list[_Group]:
    """Return the groups in order of appearance. Rows without actions are left out."""
    groups: dict[int, _Group] = {}
    # argmax finds the first True: the first action, and the last one in the reversed rows.
    starts = mask.argmax(1)
    ends = mask.shape[1] - mask[:, ::-1].argmax(1)
    for row in np.flatnonzero(mask.any(1)):
        prompt_length = int(starts[row])
        length = int(ends[row] - starts[row])
        group = groups.setdefault(int(group_id[row]), _Group(prompt_length, [], []))
        if group.prompt_length != prompt_length:
            raise ValueError(
                f"rows of group {group_id[row]} have prompts of {group.prompt_length} and "
                f"{prompt_length} tokens"
            )
        group.members.append(int(row))
        group.lengths.append(length)
    return list(groups.values())


def _require_fit(groups: list[_Group], row_length: int) -> None:
    """Raise InputError if a group is longer than a packed row."""
    for group in groups:
        if group.size > row_length:
            raise InputError(
                f"a prompt of {group.prompt_length} tokens and its {len(group.members)} "
                f"completions of {sum(group.lengths)} exceed a row",
                why=f"packed rows hold {row_length} tokens, and completions that are compared must "
                "be in one row",
                fix="raise --batch.row-length, or limit prompts and completions",
            )


def _first_fit(groups: list[_Group], row_length: int) -> list[_PackedRow]:
    """Pack groups into rows: the largest first, each into the first row with room for it."""
    pieces: list[_Group] = []
    for group in groups:
        pieces.extend(_split(group, row_length))
    rows: list[_PackedRow] = []
    for piece in sorted(pieces, key=lambda piece: -piece.size):
        row = next((row for row in rows if row.used + piece.size <= row_length), None)
        if row is None:
            row = _PackedRow()
            rows.append(row)
        row.groups.append(piece)
    return rows


def _split(group: _Group, row_length: int) -> list[_Group]:
    """Split a group into pieces that fit into a row each, every piece with the prompt."""
    pieces = [_Group(group.prompt_length, [], [])]
    for member, length in zip(group.members, group.lengths, strict=True):
        if group.prompt_length + length > row_length:
            raise InputError(
                f"a prompt of {group.prompt_length} and a completion of {length} tokens exceed a "
                "row",
                why=f"packed rows hold {row_length} tokens",
                fix="raise --batch.row-length, or limit prompts and completions",
            )
        if pieces[-1].size + length > row_length:
            pieces.append(_Group(group.prompt_length, [], []))
        pieces[-1].members.append(member)
        pieces[-1].lengths.append(length)
    return pieces


def _index(
    packed: list[list[_PackedRow]],
    shape: tuple[int, int],
    packed_shape: tuple[int, int, int, int],
) -> Layout:
    """Return the index arrays of packed rows.

    `shape` is that of the [N, T] arrays and `packed_shape` is [M, K, R, S].
    """
    total_rows, width = shape
    _, micro_batches, micro_batch_rows, row_length = packed_shape
    slots_per_step = micro_batches * micro_batch_rows * row_length
    total_slots = len(packed) * slots_per_step

    slot = np.full(shape, -1, np.int32)
    minibatch = np.full(total_rows, len(packed), np.int32)
    # The packed arrays are filled flat and reshaped to [M, K, R, S] at the end.
    source = np.full(total_slots, -1, np.int32)
    positions = np.zeros(total_slots, np.int32)
    segment_ids = np.zeros(total_slots, np.int32)
    branch_ids = np.zeros(total_slots, np.int32)
    sequence_ids = np.zeros(total_slots, np.int32)
    # `previous` counts slots within a row. First tokens and padding point to themselves.
    previous = np.tile(np.arange(row_length, dtype=np.int32), total_slots // row_length)

    for step, rows in enumerate(packed):
        for row_number, row in enumerate(rows):
            row_start = step * slots_per_step + row_number * row_length
            cursor = row_start
            sequence_id = 0
            for segment_id, group in enumerate(row.groups, start=1):
                prompt_columns = np.arange(group.prompt_length)
                prompt_slots = cursor + prompt_columns
                # All members have the same prompt, so it is read from the first one's row.
                source[prompt_slots] = group.members[0] * width + prompt_columns
                positions[prompt_slots] = prompt_columns
                segment_ids[prompt_slots] = segment_id
                previous[prompt_slots[1:]] = prompt_slots[:-1] - row_start
                cursor += group.prompt_length
                prompt_end = max(cursor - row_start - 1, 0)
                members = zip(group.members, group.lengths, strict=True)
                for branch_id, (member, length) in enumerate(members, start=1):
                    sequence_id += 1
                    columns = group.prompt_length + np.arange(length)
                    slots = cursor + np.arange(length)
                    source[slots] = member * width + columns
                    positions[slots] = columns
                    segment_ids[slots] = segment_id
                    branch_ids[slots] = branch_id
                    sequence_ids[slots] = sequence_id
                    # Every completion follows the prompt, not the completion stored before it.
                    previous[slots[0]] = prompt_end
                    previous[slots[1:]] = slots[:-1] - row_start
                    slot[member, columns] = slots
                    slot[member, prompt_columns] = prompt_slots
                    minibatch[member] = step
                    cursor += length

    # Layout's fields are declared as jax arrays; these numpy arrays are placed on devices later.
    fields: dict[str, Any] = {
        "source": source.reshape(packed_shape),
        "slot": slot,
        "minibatch": minibatch,
        "positions": positions.reshape(packed_shape),
        "segment_ids": segment_ids.reshape(packed_shape),
        "branch_ids": branch_ids.reshape(packed_shape),
        "sequence_ids": sequence_ids.reshape(packed_shape),
        "previous": previous.reshape(packed_shape),
    }
    return Layout(**fields)


def _action_slots(is_action: np.ndarray) -> np.ndarray:
    """is_action [M, K, R, S] bool -> `Rows.actions` [M, K, R, A]."""
    row_length = is_action.shape[-1]
    most_actions = int(is_action.sum(-1).max())
    length = min(_round_up_to_sixteenth(most_actions, row_length), row_length)
    return _true_indices(is_action, length, padding=row_length)


def _key_tiles(
    packed: list[list[_PackedRow]], packed_shape: tuple[int, int, int, int]
) -> np.ndarray | None:
    """Return `Rows.key_tiles`, or None if reading all keys is cheaper than gathering some."""
    minibatches, micro_batches, micro_batch_rows, row_length = packed_shape
    tile_size = _tile_size(row_length)
    if tile_size is None:
        return None
    tiles = row_length // tile_size
    # is_needed[..., i, j]: tile j holds keys that queries of tile i see.
    is_needed = np.zeros((minibatches, micro_batches * micro_batch_rows, tiles, tiles), bool)
    for step, rows in enumerate(packed):
        for row_number, row in enumerate(rows):
            _mark_needed_tiles(is_needed[step, row_number], row, tile_size)
    # Attention is causal: no later tile is needed.
    is_needed &= np.tri(tiles, dtype=bool)
    longest = _round_up_to_sixteenth(int(is_needed.sum(-1).max()), tiles)
    if longest * tile_size > WORTH_TILES * row_length:
        return None
    key_tiles = _true_indices(is_needed, longest, padding=-1)
    return key_tiles.reshape(minibatches, micro_batches, micro_batch_rows, tiles, longest)


def _true_indices(flags: np.ndarray, length: int, padding: int) -> np.ndarray:
    """flags [..., n] -> [..., length] int32: indices of the True flags in order, then padding.

    `length` must be at least the largest number of True flags.
    """
    # False sorts before True, and a stable sort keeps the order of equal flags.
    order = np.argsort(~flags, axis=-1, kind="stable")[..., :length].astype(np.int32)
    return np.where(np.take_along_axis(flags, order, axis=-1), order, np.int32(padding))


def _mark_needed_tiles(is_needed: np.ndarray, row: _PackedRow, tile_size: int) -> None:
    """Set is_needed [tile of queries, tile of keys] where a query sees a key of the same group.

    Later keys are marked too; the caller removes them.
    """

    def tiles_of(start: int, length: int) -> slice:
        return slice(start // tile_size, _ceil_div(start + length, tile_size))

    cursor = 0
    for group in row.groups:
        prompt = tiles_of(cursor, group.prompt_length)
        is_needed[prompt, prompt] = True
        cursor += group.prompt_length
        for length in group.lengths:
            completion = tiles_of(cursor, length)
            is_needed[completion, completion] = True
            is_needed[completion, prompt] = True
            cursor += length


def _tile_size(row_length: int) -> int | None:
    """Return the divisor of a row's length that is nearest to TILE.

    None if there is no divisor between TILE / 2 and 2 TILE.
    """
    sizes = [size for size in range(TILE // 2, 2 * TILE + 1) if row_length % size == 0]
    return min(sizes, key=lambda size: abs(size - TILE), default=None)


def _round_up_count(count: int) -> int:
    """Return the smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is at least `count`."""
    power = 1
    while power * 2 <= count:
        power *= 2
    return next(size for size in (power, power * 3 // 2, power * 2) if size >= count)


def _round_up_to_sixteenth(count: int, total: int) -> int:
    """Round `count` up to a multiple of a sixteenth of `total`: one of at most 16 sizes."""
    step = _ceil_div(total, 16)
    return max(1, _ceil_div(count, step)) * step


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def one_per_row(tokens: jax.Array, action_mask: jax.Array, rows_at_once: int) -> Rows:
    """Put each of the [N, T] sequences into a row of its own -> Rows [1, K, R, T].

    R is `rows_at_once`. Rows that are missing to K x R are padding, as is everything after the last
    action of a sequence. For sequences that are made inside make_batch, where the host can compute
    no layout.
    """
    missing = -len(tokens) % rows_at_once
    tokens = jnp.pad(tokens, ((0, missing), (0, 0)))
    mask = jnp.pad(action_mask, ((0, missing), (0, 0)))
    column = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :], tokens.shape)
    # A reversed cumulative sum counts the actions at or after each token.
    in_sequence = jnp.flip(jnp.cumsum(jnp.flip(mask, 1), axis=1), 1) > 0
    in_completion = (in_sequence & (jnp.cumsum(mask, axis=1) > 0)).astype(jnp.int32)
    rows = Rows(
        tokens=tokens,
        positions=column,
        segment_ids=in_sequence.astype(jnp.int32),
        branch_ids=in_completion,
        sequence_ids=in_completion,
        previous=jnp.maximum(column - 1, 0),
    )
    return jax.tree.map(lambda leaf: leaf.reshape(1, -1, rows_at_once, leaf.shape[1]), rows)


def over_micro_batches(function: Callable[[Any], Any], batch: Any) -> Any:
    """Map a function of leaves [R, S] over a pytree with leaves [M, K, R, S].

    Processes one micro-batch at a time. For forward passes inside make_batch.
    """
    minibatches, micro_batches = jax.tree.leaves(batch)[0].shape[:2]
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)
    results = jax.lax.map(function, flat)
    return jax.tree.map(
        lambda leaf: leaf.reshape(minibatches, micro_batches, *leaf.shape[1:]), results
    )
