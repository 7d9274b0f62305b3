"""Assignment of completions to packed rows.

A packed row stores the prompt of a group once and the completions of the group after it:
[prompt, completion 1 .. G]. Completions see the prompt and themselves (`types.Model.hidden`), so
log-probs and gradients equal those of one row per completion. With a prompt of P tokens and G
completions of C tokens, that takes P + G x C tokens instead of G x (P + C).

In general a group is a tree: rows of the [N, T] arrays may share any number of leading tokens
(`types.Rollout.parent`). The shared tokens stand once. The tree is stored depth first and cut into
runs where rows branch off: a run, then the rest of the same row, then the rows that branch off at
the end of the run. So the tokens that see a token are neighbors, from the token to the end of its
subtree (`types.PackedRows.visible_until`).

The assignment happens on the host with numpy, once per batch. Only `one_per_row` and
`over_micro_batches` are for use inside jit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from tpu_rl.errors import InputError
from tpu_rl.types import Layout, PackedRows, Pairs, Paths, ScoredCompletions


@runtime_checkable
class HasRows(Protocol):
    """The batch of an algorithm that computes log-probs of packed rows."""

    rows: PackedRows


TILE = 64
"""Approximate number of slots per tile of `PackedRows.key_tiles`. Smaller tiles leave out more
keys; larger tiles gather less memory per attention score."""

PATH_TILES = (8, 64)
"""Smallest and largest number of queries in a tile of `PackedRows.paths`."""

PATH_KEYS = 64
"""The keys of a tile of `PackedRows.paths` are this number times a power of two."""

WORTH_TILES = 0.7
"""If the longest list of key tiles covers more than this share of a row, attention reads all keys
instead."""


class _Texts(NamedTuple):
    """Facts about the rows of the [N, T] arrays, one list element per row."""

    starts: list[int]
    """Number of tokens before the first action."""
    ends: list[int]
    """Number of tokens up to the last action; 0 without actions."""
    parents: list[int]
    """The row that this row branches off from; -1 if from none."""
    shared: list[int]
    """Number of tokens before the branch: more than the parent itself shares, and 0 without a
    parent."""


class _Run(NamedTuple):
    """Tokens of one row of [N, T] that stand together in a packed row."""

    row: int
    start: int
    """Column of the first token."""
    stop: int
    """Column after the last token."""
    slot: int
    """Slot of the first token, counted from the first slot of the group."""
    path: tuple[int, ...]
    """Numbers of the runs before it on the way from the root of the tree."""

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass
class _Group:
    """Rows of the [N, T] arrays that stand together: a group, or a part of a group."""

    texts: _Texts
    members: list[int] = field(default_factory=list)
    """Rows that are learned from."""
    extents: dict[int, int] = field(default_factory=dict)
    """Row -> number of its leading tokens that are needed: all tokens of a member, and of another
    row those that members share."""
    size: int = 0
    """Number of slots that the group takes."""

    def growth(self, row: int) -> tuple[dict[int, int], int]:
        """Return the changes that a new member would make: extents, and the growth of the size."""
        changed: dict[int, int] = {}
        slots = 0
        extent = self.texts.ends[row]
        # If enough of a row is there, so are the rows that it branches off from.
        while row >= 0 and self.extents.get(row, 0) < extent:
            changed[row] = extent
            slots += extent - self.extents.get(row, self.texts.shared[row])
            extent = self.texts.shared[row]
            row = self.texts.parents[row]
        return changed, slots

    def add(self, row: int) -> None:
        """Make a row a member."""
        changed, slots = self.growth(row)
        self.members.append(row)
        self.extents |= changed
        self.size += slots

    def in_packing_order(self) -> list[int]:
        """Return the members, the longest first; those of a tree of several levels depth first, so
        that neighbors share as much as possible."""
        if len({self.texts.shared[row] for row in self.members}) > 2:
            depth_first = list(dict.fromkeys(run.row for run in self.runs()))
            return sorted(self.members, key=depth_first.index)
        return sorted(self.members, key=lambda row: -self.texts.ends[row])

    def runs(self) -> list[_Run]:
        """Return the tree as runs, in the order of their slots."""
        shared = self.texts.shared
        roots: list[int] = []
        children: dict[int, list[int]] = {row: [] for row in self.extents}
        for row in sorted(self.extents):
            parent = self.texts.parents[row]
            (roots if parent < 0 else children[parent]).append(row)
        runs: list[_Run] = []
        slot = 0
        # What to place next is at the end: (row, column to continue at, runs before it).
        waiting: list[tuple[int, int, tuple[int, ...]]] = [(row, 0, ()) for row in reversed(roots)]
        while waiting:
            row, start, path = waiting.pop()
            later = [shared[child] for child in children[row] if shared[child] > start]
            stop = min(later, default=self.extents[row])
            runs.append(_Run(row, start, stop, slot, path))
            slot += stop - start
            path = (*path, len(runs) - 1)
            branches = [child for child in children[row] if shared[child] == stop]
            waiting.extend((child, stop, path) for child in reversed(branches))
            if stop < self.extents[row]:
                waiting.append((row, stop, path))
        return runs


_PackedRow = list[_Group]
"""The groups of a packed row, one after the other."""


Placement = Literal["split", "kept", "whole"]
"""split: groups are split if they are longer than a row, or if a step takes fewer micro-batches so.
kept: only if they are longer than a row. whole: never."""


def assign_slots(
    action_mask: np.ndarray,
    group_id: np.ndarray,
    *,
    row_length: int,
    micro_batch_rows: int,
    minibatches: int = 1,
    row_limit: int | None = None,
    placement: Placement = "split",
    parent: Any = None,
    shared: Any = None,
    share_prefixes: bool = True,
    paths: bool = False,
) -> Layout:
    """Assign the rows of action_mask [N, T] and group_id [N] to packed rows.

    Groups are split, in order, into `minibatches` optimizer steps with the same number of groups
    each. Within a step they are packed into rows best-fit by decreasing size. If there are fewer
    groups than minibatches, some steps are all padding. Where a group is split, the tokens that its
    parts share are repeated and its branches are numbered anew. Repeated actions are actions in one
    of the parts only.

    Programs are compiled for the shapes of a layout, so it has few of them. The number of
    micro-batches is that of the fullest step, or of `row_limit`, rounded up to one of few values.
    The lists in `PackedRows.actions` and `PackedRows.key_tiles` have one of eight lengths.

    Args:
        row_length: slots per packed row.
        micro_batch_rows: packed rows per micro-batch.
        minibatches: optimizer steps per batch.
        row_limit: room for at least this many packed rows per step, even if fewer are needed.
            Micro-batches without any token are at the end, and are not computed.
        placement: whether groups are split.
        parent, shared: [N] each, the leading tokens that rows share (see `types.Rollout`). None:
            the rows of a group share their prompt.
        share_prefixes: store tokens that rows share once. False: each row stands alone, as models
            with a recurrent state need it, and `parent` and `shared` are not read.
        paths: fill `Layout.paths`.

    Raises:
        InputError: a prompt with one completion is longer than a row, or a group is and
            `placement` is "whole".
    """
    mask = np.asarray(action_mask)
    if not share_prefixes:
        parent = np.arange(len(mask))
        shared = np.zeros_like(parent)
    groups = _groups(mask, np.asarray(group_id), parent, shared)
    if placement == "whole":
        _require_fit(groups, row_length)
    packed: list[list[_PackedRow]] = []
    for step in range(minibatches):
        start = step * len(groups) // minibatches
        end = (step + 1) * len(groups) // minibatches
        rows = _pack(groups[start:end], row_length, keep_groups=True)
        if placement == "split":
            split = _pack(groups[start:end], row_length, keep_groups=False)
            if _ceil_div(len(split), micro_batch_rows) < _ceil_div(len(rows), micro_batch_rows):
                rows = split
        packed.append(rows)
    most_rows = max(len(rows) for rows in packed)
    if row_limit is not None:
        most_rows = max(most_rows, row_limit)
    micro_batches = _round_up_count(_ceil_div(most_rows, micro_batch_rows))
    packed_shape = (minibatches, micro_batches, micro_batch_rows, row_length)
    layout = _index(packed, mask, packed_shape, paths)
    return replace(layout, key_tiles=_key_tiles(packed, packed_shape))


def placement_of(data: Any) -> Placement:
    """Choose the placement of the groups of data."""
    if isinstance(data, Pairs | ScoredCompletions):
        return "whole"  # Losses compare the completions of a group.
    return "split" if data.images is None else "kept"  # A micro-batch encodes its groups' images.


def _groups(mask: np.ndarray, group_id: np.ndarray, parent: Any, shared: Any) -> list[_Group]:
    """Return the groups in order of appearance. Rows without actions are no members."""
    is_member = np.asarray(mask.any(1))
    # argmax finds the first True: the first action, and the last one in the reversed rows.
    starts = mask.argmax(1)
    ends = np.where(is_member, mask.shape[1] - mask[:, ::-1].argmax(1), 0)
    if parent is None or shared is None:
        parent, shared = _shared_prompts(is_member, starts, group_id)
    else:
        parent, shared = np.asarray(parent), np.asarray(shared)
        _require_trees(mask, group_id, parent, shared)
    parents, branches = _branches(parent, shared)
    texts = _Texts(starts.tolist(), ends.tolist(), parents, branches)
    groups: dict[int, _Group] = {}
    for row in np.flatnonzero(is_member):
        groups.setdefault(int(group_id[row]), _Group(texts)).add(int(row))
    return list(groups.values())


def _shared_prompts(
    is_member: np.ndarray, starts: np.ndarray, group_id: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return `parent` and `shared` [N] if the members of a group share their prompt."""
    parent = np.arange(len(group_id))
    shared = np.zeros_like(parent)
    first_members: dict[int, int] = {}
    for row in np.flatnonzero(is_member):
        first = first_members.setdefault(int(group_id[row]), int(row))
        if starts[first] != starts[row]:
            raise ValueError(
                f"rows of group {group_id[row]} have prompts of {starts[first]} and "
                f"{starts[row]} tokens"
            )
        if first != row:
            parent[row] = first
            shared[row] = starts[row]
    return parent, shared


def _require_trees(
    mask: np.ndarray, group_id: np.ndarray, parent: np.ndarray, shared: np.ndarray
) -> None:
    """Raise ValueError if `parent` or `shared` break the rules of `types.Rollout`."""
    row = np.arange(len(mask))
    in_order = (parent >= 0) & (parent <= row)
    same_group = group_id[np.where(in_order, parent, row)] == group_id
    in_range = (shared >= 0) & (shared <= np.where(parent == row, 0, mask.shape[1]))
    repeats_action = (mask & (np.arange(mask.shape[1]) < shared[:, None])).any(1)
    wrong = np.flatnonzero(~(in_order & same_group & in_range) | repeats_action)
    if len(wrong):
        first = wrong[0]
        raise ValueError(
            f"row {first} cannot share {shared[first]} tokens with row {parent[first]}: a parent "
            "is an earlier row of the same group, and shared tokens are no actions of the later row"
        )


def _branches(parent: np.ndarray, shared: np.ndarray) -> tuple[list[int], list[int]]:
    """Return `_Texts.parents` and `_Texts.shared`.

    A row that shares no more with its parent than the parent shares with its own branches off from
    the parent's parent.
    """
    parents: list[int] = []
    lengths = shared.tolist()
    for row, ancestor in enumerate(parent.tolist()):
        ancestor = -1 if ancestor == row else ancestor
        while ancestor >= 0 and lengths[row] <= lengths[ancestor]:
            ancestor = parents[ancestor]
        parents.append(ancestor)
    return parents, lengths


def _require_fit(groups: list[_Group], row_length: int) -> None:
    """Raise InputError if a group is longer than a packed row."""
    for group in groups:
        prompt_length = group.texts.starts[group.members[0]]
        what = f"its {len(group.members)} completions"
        _require_room(prompt_length, group.size - prompt_length, what, row_length)


def _require_room(prompt_length: int, others: int, what: str, row_length: int) -> None:
    """Raise InputError if a prompt and the tokens of other texts are longer than a row."""
    if prompt_length + others > row_length:
        raise InputError(
            f"a prompt of {prompt_length} tokens and {what} of {others} exceed a row",
            why=f"packed rows hold {row_length} tokens; completions that are compared share one",
            fix="raise --batch.row-length, or limit prompts and completions",
        )


def _pack(groups: list[_Group], row_length: int, keep_groups: bool) -> list[_PackedRow]:
    """Pack groups into rows: the largest group first, its texts by `_Group.in_packing_order`.

    A text stands in the row of its group that it adds least to, if there is room. Otherwise it
    stands, with all tokens that it shares, in the fullest row with room, or in a new one. With
    `keep_groups`, a group that fits into a row is placed as one text is.
    """
    most_rows = sum(len(group.members) for group in groups)
    packed: list[_PackedRow] = [[] for _ in range(most_rows)]
    room = np.full(most_rows, row_length)

    def best_row(size: int) -> int:
        """Return the number of the row with the least room for so many slots."""
        return int(np.where(room >= size, room, row_length + 1).argmin())

    for group in sorted(groups, key=lambda group: -group.size):
        if keep_groups and group.size <= row_length:
            number = best_row(group.size)
            packed[number].append(group)
            room[number] -= group.size
            continue
        pieces: dict[int, _Group] = {}  # Number of a row -> what stands there of the group.
        ends = group.texts.ends
        for member in group.in_packing_order():
            prompt_length = group.texts.starts[member]
            _require_room(prompt_length, ends[member] - prompt_length, "a completion", row_length)
            growths = {number: piece.growth(member)[1] for number, piece in pieces.items()}
            number = min(
                (number for number, growth in growths.items() if growth <= room[number]),
                key=lambda number: (growths[number], room[number]),
                default=-1,
            )
            if number < 0:
                number = best_row(ends[member])
                pieces[number] = _Group(group.texts)
                packed[number].append(pieces[number])
            room[number] -= pieces[number].growth(member)[1]
            pieces[number].add(member)
    return [row for row in packed if row]


def _index(
    packed: list[list[_PackedRow]],
    mask: np.ndarray,
    packed_shape: tuple[int, int, int, int],
    paths: bool,
) -> Layout:
    """Return the index arrays of packed rows, without `key_tiles`.

    `mask` is action_mask [N, T] and `packed_shape` is [M, K, R, S]. With `paths`, the arrays of
    `PackedRows.paths` are among them.
    """
    total_rows, width = mask.shape
    _, micro_batches, micro_batch_rows, row_length = packed_shape
    slots_per_step = micro_batches * micro_batch_rows * row_length
    total_slots = len(packed) * slots_per_step

    slot = np.full(mask.shape, -1, np.int32)
    minibatch = np.full(total_rows, len(packed), np.int32)
    # The packed arrays are filled flat and reshaped to [M, K, R, S] at the end.
    source = np.full(total_slots, -1, np.int32)
    is_action = np.zeros(total_slots, bool)
    positions = np.zeros(total_slots, np.int32)
    segment_ids = np.zeros(total_slots, np.int32)
    branch_ids = np.zeros(total_slots, np.int32)
    sequence_ids = np.zeros(total_slots, np.int32)
    visible_until = np.full(total_slots, row_length, np.int32)
    # `previous` counts slots within a row. First tokens and padding point to themselves.
    slots_of_row = np.arange(row_length, dtype=np.int32)
    previous = np.tile(slots_of_row, total_slots // row_length)
    tile_size = _path_tile_size(width)
    # For each packed row, its tiles: (slots of the queries, slots of the keys).
    path_tiles: list[list[tuple[np.ndarray, np.ndarray]]] = [
        [] for _ in range(total_slots // row_length)
    ]

    for step, rows in enumerate(packed):
        for row_number, row in enumerate(rows):
            # Groups follow one another in the row; `cursor` is the first slot of the current one.
            row_start = step * slots_per_step + row_number * row_length
            cursor = row_start
            sequence_id = 0
            for segment_id, group in enumerate(row, start=1):
                starts = group.texts.starts
                ends = group.texts.ends
                runs = group.runs()
                segment_ids[cursor : cursor + group.size] = segment_id
                # Once per run of the tree, shared or not: a token's position is its column in
                # [N, T]; `previous` is the slot before it, or for the first token of a branch the
                # last slot of its parent; descendants see it up to `visible_until`.
                for run, until in zip(runs, _ends_of_subtrees(runs), strict=True):
                    first = cursor + run.slot
                    last = first + run.length
                    positions[first:last] = np.arange(run.start, run.stop)
                    previous[first + 1 : last] = np.arange(first, last - 1) - row_start
                    if run.path and run.length:
                        parent = runs[run.path[-1]]
                        previous[first] = cursor + parent.slot + parent.length - 1 - row_start
                    visible_until[first:last] = cursor + until - row_start
                if paths:
                    tiles = _tiles_of_paths(runs, cursor - row_start, tile_size)
                    path_tiles[row_start // row_length].extend(tiles)

                # Once per member, along its path from the root to its own last run: `slot` maps the
                # columns of [N, T] to slots, and `source` maps back.
                last_runs = {run.row: number for number, run in enumerate(runs)}
                filled = [run.start for run in runs]  # Columns before this have a source.
                for branch_id, member in enumerate(sorted(group.members), start=1):
                    sequence_id += 1
                    minibatch[member] = step
                    last_run = last_runs[member]
                    for number in (*runs[last_run].path, last_run):
                        run = runs[number]
                        stop = min(run.stop, ends[member])
                        offset = cursor + run.slot - run.start  # From a column to its slot.
                        slot[member, run.start : stop] = np.arange(
                            offset + run.start, offset + stop
                        )
                        # Shared tokens are read from the first member that has them: there they
                        # are actions, if they are actions at all.
                        if filled[number] < stop:
                            slots = slice(offset + filled[number], offset + stop)
                            begin = member * width
                            source[slots] = np.arange(begin + filled[number], begin + stop)
                            is_action[slots] = mask[member, filled[number] : stop]
                            filled[number] = stop
                        # From its first action on, a row has ids of its own. The prompt has id 0.
                        completion = slice(offset + max(run.start, starts[member]), offset + stop)
                        branch_ids[completion] = branch_id
                        sequence_ids[completion] = sequence_id
                cursor += group.size

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
        "visible_until": visible_until.reshape(packed_shape),
        "actions": _action_slots(is_action.reshape(packed_shape)),
        "paths": _paths(path_tiles, tile_size, packed_shape) if paths else None,
    }
    return Layout(**fields)


def _ends_of_subtrees(runs: list[_Run]) -> list[int]:
    """Return for each run the slot of its group after the last token that it is an ancestor of."""
    ends = [0] * len(runs)
    # Runs come depth first, so the last one that sets an end ends the subtree.
    for number, run in enumerate(runs):
        for ancestor in (*run.path, number):
            ends[ancestor] = run.slot + run.length
    return ends


def _tiles_of_paths(
    runs: list[_Run], start: int, tile_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the tiles of a group's runs: (slots of the queries, slots of the keys).

    `start` is the slot of the packed row at which the group starts.
    """
    for number, run in enumerate(runs):
        on_path = [runs[other] for other in (*run.path, number)]
        slots = np.concatenate(
            [np.arange(other.slot, other.slot + other.length) + start for other in on_path]
        )
        for first in range(run.start, run.stop, tile_size):
            keys = slots[: min(first + tile_size, run.stop)]
            yield keys[first:], keys


def _path_tile_size(width: int) -> int:
    """Return the number of queries in a tile of `PackedRows.paths` for texts of `width` tokens."""
    smallest, largest = PATH_TILES
    return min(max(power_of_two(width) // 4, smallest), largest)


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << max(count - 1, 0).bit_length()


def _paths(
    path_tiles: list[list[tuple[np.ndarray, np.ndarray]]],
    tile_size: int,
    packed_shape: tuple[int, int, int, int],
) -> Paths:
    """Return `PackedRows.paths` of the tiles of each packed row: (slots of queries, slots of keys).

    Sizes are rounded up to few values, so that few programs are compiled.
    """
    *counts, row_length = packed_shape
    most_tiles = max(len(tiles) for tiles in path_tiles)
    most_tiles = power_of_two(max(most_tiles, 2 * row_length // tile_size))
    longest = max((len(keys) for tiles in path_tiles for _, keys in tiles), default=1)
    longest = PATH_KEYS * power_of_two(_ceil_div(longest, PATH_KEYS))
    queries = np.full((len(path_tiles), most_tiles, tile_size), row_length, np.int32)
    keys = np.full((len(path_tiles), most_tiles, longest), row_length, np.int32)
    for row, tiles in enumerate(path_tiles):
        for tile, (tile_queries, tile_keys) in enumerate(tiles):
            queries[row, tile, : len(tile_queries)] = tile_queries
            keys[row, tile, : len(tile_keys)] = tile_keys
    fields: dict[str, Any] = {"queries": queries, "keys": keys}
    return Paths(**{name: x.reshape(*counts, *x.shape[1:]) for name, x in fields.items()})


def _action_slots(is_action: np.ndarray) -> np.ndarray:
    """is_action [M, K, R, S] bool -> `PackedRows.actions` [M, K, R, A]."""
    row_length = is_action.shape[-1]
    slots_of_rows = [np.flatnonzero(row) for row in is_action.reshape(-1, row_length)]
    most_actions = max(map(len, slots_of_rows))
    length = min(_round_up_to_eighth(most_actions, row_length), row_length)
    actions = np.full((len(slots_of_rows), length), row_length, np.int32)
    for row, slots in enumerate(slots_of_rows):
        actions[row, : len(slots)] = slots
    return actions.reshape(*is_action.shape[:-1], length)


def _key_tiles(
    packed: list[list[_PackedRow]], packed_shape: tuple[int, int, int, int]
) -> np.ndarray | None:
    """Return `PackedRows.key_tiles`, or None if reading all keys is cheaper than gathering some."""
    minibatches, micro_batches, micro_batch_rows, row_length = packed_shape
    tile_size = _tile_size(row_length)
    if tile_size is None:
        return None
    tiles = row_length // tile_size
    causal = np.tri(tiles, dtype=bool)
    rows_per_step = micro_batches * micro_batch_rows
    # For each packed row, the needed pairs in order: (tiles of queries, tiles of keys).
    needed: dict[int, tuple[np.ndarray, ...]] = {}
    length = _round_up_to_eighth(0, tiles)
    for step, rows in enumerate(packed):
        for row_number, row in enumerate(rows, start=step * rows_per_step):
            # is_needed[i, j]: tile j holds keys that queries of tile i see.
            is_needed = np.zeros((tiles, tiles), bool)
            _mark_needed_tiles(is_needed, row, tile_size)
            # Attention is causal: no later tile is needed.
            is_needed &= causal
            needed[row_number] = is_needed.nonzero()
            longest = int(is_needed.sum(-1).max())
            length = max(length, _round_up_to_eighth(longest, tiles))
            # The other rows need not be looked at.
            if length * tile_size > WORTH_TILES * row_length:
                return None
    if length * tile_size > WORTH_TILES * row_length:
        return None
    key_tiles = np.full((minibatches * rows_per_step, tiles, length), -1, np.int32)
    for row_number, (queries, keys) in needed.items():
        place_in_list = np.arange(len(queries)) - np.searchsorted(queries, queries)
        key_tiles[row_number, queries, place_in_list] = keys
    return key_tiles.reshape(minibatches, micro_batches, micro_batch_rows, tiles, length)


def _mark_needed_tiles(is_needed: np.ndarray, row: _PackedRow, tile_size: int) -> None:
    """Set is_needed [tile of queries, tile of keys] where a query sees a key of the same group.

    Later keys are marked too; the caller removes them.
    """

    def tiles_of(start: int, length: int) -> slice:
        return slice(start // tile_size, _ceil_div(start + length, tile_size))

    cursor = 0
    for group in row:
        tiles: list[slice] = []
        for run in group.runs():
            tiles.append(tiles_of(cursor + run.slot, run.length))
            for number in (*run.path, -1):
                is_needed[tiles[-1], tiles[number]] = True
        cursor += group.size


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


def _round_up_to_eighth(count: int, total: int) -> int:
    """Round `count` up to a multiple of an eighth of `total`: one of at most 8 sizes."""
    step = _ceil_div(total, 8)
    return max(1, _ceil_div(count, step)) * step


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def one_per_row(tokens: jax.Array, action_mask: jax.Array, rows_at_once: int) -> PackedRows:
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
    rows = PackedRows(
        tokens=tokens,
        positions=column,
        segment_ids=in_sequence.astype(jnp.int32),
        branch_ids=in_completion,
        sequence_ids=in_completion,
        previous=jnp.maximum(column - 1, 0),
    )
    return jax.tree.map(lambda leaf: leaf.reshape(1, -1, rows_at_once, leaf.shape[1]), rows)


def is_occupied(batch: Any) -> jax.Array:
    """Return [..., K] bool: False for micro-batches [..., K, R, S] without any token.

    `batch` is PackedRows, or has them as its field `rows`. The content of a batch without rows is
    not known, so all of it counts as occupied.
    """
    rows = batch.rows if isinstance(batch, HasRows) else batch
    if not isinstance(rows, PackedRows):
        return jnp.ones(jax.tree.leaves(batch)[0].shape[:1], bool)
    return jnp.any(rows.segment_ids > 0, (-2, -1))


@jax.jit
def occupancy(source: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the share of packed rows without a token in the micro-batches that are computed, and
    the number of tokens.

    `source` is that of `Layout`, [M, K, R, S].
    """
    has_tokens = jnp.any(source >= 0, -1)
    is_computed = jnp.any(has_tokens, -1, keepdims=True)
    empty = jnp.sum(is_computed & ~has_tokens)
    rows = jnp.maximum(jnp.sum(is_computed) * source.shape[-2], 1)
    return empty / rows, jnp.sum(source >= 0)


def over_micro_batches(function: Callable[[Any], Any], batch: Any) -> Any:
    """Map a function of leaves [R, S] over a pytree with leaves [M, K, R, S].

    Processes one micro-batch at a time. For forward passes inside make_batch. The results of
    micro-batches without any token are zeros; they are not computed. See `is_occupied` for what
    `batch` may be.
    """
    minibatches, micro_batches = jax.tree.leaves(batch)[0].shape[:2]
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)

    def compute_or_skip(item: tuple[Any, jax.Array]) -> Any:
        micro_batch, occupied = item
        result = jax.eval_shape(function, micro_batch)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), result)
        return jax.lax.cond(occupied, function, lambda _: zeros, micro_batch)

    results = jax.lax.map(compute_or_skip, (flat, is_occupied(flat)))
    return jax.tree.map(
        lambda leaf: leaf.reshape(minibatches, micro_batches, *leaf.shape[1:]), results
    )
