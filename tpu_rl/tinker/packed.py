"""Data of a request in packed rows, where tokens that several data begin with stand once.

Clients send each completion with its whole prompt. So data are sorted by their tokens, and each
shares the tokens that it has in common with its neighbor: the data are trees, as the groups of
`train.packing` are. Three arrays refer to each other:

    rows        each token that the model reads                                 [K, R, S]
    targets     each (slot, targets after it), with the slot of its row         [K, R, A]
    numbers     each token of each datum, with its place among `targets`        [K, R, L]

Log-probs are computed once for each of `targets`. Losses are functions of log-probs and numbers,
and data that share tokens have numbers of their own for them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from flax import struct

from tpu_rl.tinker import losses
from tpu_rl.tinker.losses import Numbers
from tpu_rl.tinker.wire import Datum
from tpu_rl.train import packing
from tpu_rl.types import Array, PackedRows

SLOTS_AT_ONCE = 2048
"""Slots of a micro-batch, unless one sequence has more."""
SHORTEST_ROW = 32
"""Rows have this length, times a power of two."""
LONGEST_TREE = 4
"""Rows fit the longest datum; for trees they may be longer, at most by this factor."""
WORTH_SHARING = 8
"""Fewer common tokens are not shared: data that stand alone fill rows better."""


class Targets(NamedTuple):
    """Targets of packed rows; leaves are [K, R, A, ...]."""

    slots: Any
    """int32: the slot, in the same row, of the token after which the targets stand."""
    tokens: Any
    """[K, R, A, C] int32: targets after the same token, one for all but distillation."""


@struct.dataclass
class Batch:
    """Data in packed rows; leaves are [K, R, ...]."""

    rows: PackedRows
    targets: Targets
    numbers: Numbers
    """[K, R, L, ...]."""
    places: Array
    """[K, R, L] int32: the place among the row's targets that the numbers are about; -1 is
    padding."""


Unpack = Callable[[np.ndarray], list[np.ndarray]]
"""Takes values of targets [K, R, A, ...] to those of each datum [n, ...]."""


def pack(
    settings: Mapping[str, Any],
    data: Sequence[Datum],
    width: int,
    row_multiple: int,
    share_prefixes: bool,
) -> tuple[Batch, Unpack]:
    """Pack data into rows, on the host.

    Returns the rows, and a function that unpacks values of their targets.

    Args:
        settings: those of the request's loss.
        width: number of targets after each token, C.
        row_multiple: the rows of a micro-batch are a multiple of this.
        share_prefixes: whether tokens that data begin with stand once. False for models with a
            recurrent state.
    """
    # Neighbors in the order of their tokens share the most.
    order = sorted(range(len(data)), key=lambda index: data[index].tokens.tolist())
    rows, slots = _rows([data[index].tokens for index in order], row_multiple, share_prefixes)
    num_micro_batches, num_rows, row_length = rows.tokens.shape

    # The numbers of all tokens of all data, one after the other: N tokens.
    parts = [losses.numbers_of(settings, data[index], width) for index in order]
    numbers = Numbers(*map(np.concatenate, zip(*parts, strict=True)))

    # Log-probs depend on a slot and on the targets after it, so each such target [1 + C] is
    # computed once: M of them, in the order of the rows. Data of a tree that agree on both share
    # one. `target_of_token` [N] leads from a token to its target.
    slot_and_ids = np.column_stack([np.concatenate(slots), numbers.targets])
    slot_and_ids, target_of_token = np.unique(slot_and_ids, axis=0, return_inverse=True)
    target_row = slot_and_ids[:, 0] // row_length
    target_column = _columns(target_row)
    # Rows are nearly full of targets, and a branch adds one.
    eighth = row_length // 8
    num_targets = max(row_length, -(-int(target_column.max() + 1) // eighth) * eighth)

    def of_targets(values: np.ndarray) -> np.ndarray:
        shape = (num_micro_batches, num_rows, num_targets)
        return _scatter(values, target_row, target_column, shape, 0)

    slot_and_ids = slot_and_ids.astype(np.int32)
    slot_in_row, token_ids = slot_and_ids[:, 0] % row_length, slot_and_ids[:, 1:]
    targets = Targets(of_targets(slot_in_row), of_targets(token_ids))

    # The numbers of a token stand in the row of its target, in the order of the data.
    token_row = target_row[target_of_token]
    token_column = np.zeros_like(token_row)
    by_row = np.argsort(token_row, kind="stable")
    token_column[by_row] = _columns(token_row[by_row])
    num_tokens = max(row_length, packing.power_of_two(int(token_column.max() + 1)))

    def of_tokens(values: np.ndarray, padding: int = 0) -> np.ndarray:
        shape = (num_micro_batches, num_rows, num_tokens)
        return _scatter(values, token_row, token_column, shape, padding)

    # The numbers of a datum are neighbors: its first column tells it apart within its row.
    ends = np.cumsum([len(part) for part in slots])
    firsts = token_column[np.append(0, ends[:-1])] + 1
    ids = np.repeat(firsts, np.diff(ends, prepend=0)).astype(np.int32)
    numbers = numbers._replace(sequence_ids=ids)

    column_of_token = target_column[target_of_token]
    places: Any = of_tokens(column_of_token.astype(np.int32), padding=-1)
    batch = Batch(rows, targets, Numbers(*map(of_tokens, numbers)), places)

    # The way back: the place of each token's target among all of [K, R, A].
    flat_place = token_row * num_targets + column_of_token

    def unpack(values: np.ndarray) -> list[np.ndarray]:
        flat = values.reshape(math.prod(values.shape[:3]), *values.shape[3:])[flat_place]
        by_datum = dict(zip(order, np.split(flat, ends[:-1]), strict=True))
        return [by_datum[index] for index in range(len(data))]

    return batch, unpack


def _rows(
    texts: list[np.ndarray], row_multiple: int, share_prefixes: bool
) -> tuple[PackedRows, list[np.ndarray]]:
    """Pack sorted texts into the rows that the model reads.

    Returns the rows, and the slot of each token of each text; slots count over all rows.
    """
    # A text that shares nothing with the one before it is the root of a new tree.
    lengths = np.asarray([len(text) for text in texts])
    shared = np.zeros_like(lengths)
    if share_prefixes:
        shared[1:] = [_num_shared(*pair) for pair in itertools.pairwise(texts)]
    is_root = shared == 0
    tree = np.cumsum(is_root)
    # A row fits the longest text, and up to LONGEST_TREE times as much for the largest tree.
    longest = int(lengths.max())
    largest_tree = int(np.bincount(tree, lengths - shared).max())
    shortest = max(SHORTEST_ROW, packing.power_of_two(longest))
    most = max(shortest, min(LONGEST_TREE * shortest, SLOTS_AT_ONCE))
    row_length = min(max(shortest, packing.power_of_two(largest_tree)), most)
    # Only tokens that are not shared get slots of their own.
    column = np.arange(longest)
    layout = packing.assign_slots(
        (column >= shared[:, None]) & (column < lengths[:, None]),
        tree,
        row_length=row_length,
        micro_batch_rows=row_multiple,
        parent=np.arange(len(texts)) - ~is_root,
        shared=shared,
    )
    slots = [slot[:length] for slot, length in zip(np.asarray(layout.slot), lengths, strict=True)]

    # Join micro-batches to as many slots as are computed at once.
    count = np.asarray(layout.positions).shape[1]
    at_once = max(1, SLOTS_AT_ONCE // (row_multiple * row_length))
    joined = max(size for size in range(1, count + 1) if count % size == 0 and size <= at_once)
    shape = (count // joined, joined * row_multiple, row_length)

    def rows_of(part: Any) -> Any:
        return np.asarray(part).reshape(shape)

    tokens: Any = np.zeros(shape, np.int32)
    tokens.reshape(-1)[np.concatenate(slots)] = np.concatenate(texts)
    rows = PackedRows(
        tokens=tokens,
        positions=rows_of(layout.positions),
        segment_ids=rows_of(layout.segment_ids),
        branch_ids=rows_of(layout.branch_ids),
        sequence_ids=rows_of(layout.sequence_ids),
        previous=rows_of(layout.previous),
        visible_until=rows_of(layout.visible_until),
    )
    return rows, slots


def _num_shared(before: np.ndarray, text: np.ndarray) -> int:
    """Count the leading tokens of `text` that the text before it has as well.

    The last token never counts, so that each datum has a slot of its own.
    """
    most = min(len(before), len(text) - 1)
    differ = np.flatnonzero(before[:most] != text[:most])
    common = int(differ[0]) if len(differ) else most
    return common if common >= WORTH_SHARING else 0


def _columns(rows: np.ndarray) -> np.ndarray:
    """Return the column of each element, counted within its row; `rows` are sorted."""
    return np.arange(len(rows)) - np.searchsorted(rows, rows)


def _scatter(
    values: np.ndarray, rows: np.ndarray, places: np.ndarray, shape: tuple[int, ...], padding: int
) -> np.ndarray:
    """Return values [n, ...] at their rows and places of [K, R, A, ...]."""
    num_micro_batches, num_rows, num_places = shape
    result = np.full(
        (num_micro_batches * num_rows, num_places, *values.shape[1:]), padding, values.dtype
    )
    result[rows, places] = values
    return result.reshape(*shape, *values.shape[1:])
