"""Experience in packed rows: the last step on the host before an algorithm's `make_batch`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from tpu_rl.data.encoding import bucket
from tpu_rl.experience.config import BatchConfig
from tpu_rl.tokenizers.images import ImageReader
from tpu_rl.train import packing, sharding
from tpu_rl.types import Experience, Layout, Rollout

AttentionIndex = Literal["tiles", "paths", "none"]
"""The part of a layout that attention reads: `Layout.key_tiles`, `Layout.paths` or neither. Their
sizes differ from batch to batch, and each new size compiles the programs again."""


class Widths:
    """The largest sizes of a stage's layouts so far. Later ones are padded to them, so that a batch
    runs the programs of a wider one.

    They are part of checkpoints: a resumed run pads as the run did.
    """

    def __init__(self) -> None:
        self._shapes: dict[str, list[int]] = {}
        """Name of an array -> its largest sizes; none of `key_tiles` once all keys were read."""

    @property
    def micro_batches(self) -> int:
        """K: the most micro-batches of an optimizer step."""
        return self._shapes.get("source", [0, 0])[1]

    def get_state(self) -> dict[str, list[int]]:
        """Return a JSON value."""
        return dict(self._shapes)

    def set_state(self, state: dict[str, list[int]]) -> None:
        """Go on from what `get_state` returned."""
        self._shapes = dict(state)

    def padded(self, layout: Layout) -> Layout:
        """Return a layout of `micro_batches` or more as large as the largest so far."""
        row_length = layout.source.shape[-1]
        self._shapes["source"] = list(layout.source.shape)
        if layout.key_tiles is None:
            self._shapes["key_tiles"] = []
        key_tiles = self._pad("key_tiles", layout.key_tiles, -1)
        paths = layout.paths
        if paths is not None:
            queries = self._pad("queries", paths.queries, row_length)
            paths = replace(paths, queries=queries, keys=self._pad("keys", paths.keys, row_length))
        return replace(
            layout,
            actions=self._pad("actions", layout.actions, row_length),
            key_tiles=key_tiles,
            paths=paths,
            images=self._pad("images", layout.images, 0),
        )

    def _pad(self, name: str, array: Any, fill: int) -> Any:
        """Return the array with `fill` behind what it has of each of the largest sizes."""
        before = self._shapes.get(name)
        if array is None or before == []:
            return None
        sizes = list(map(max, array.shape, before or array.shape))
        self._shapes[name] = sizes
        missing = [(0, most - size) for most, size in zip(sizes, array.shape, strict=True)]
        return np.pad(array, missing, constant_values=fill)


def pack_experience(
    batch: BatchConfig,
    data: Any,
    mesh: Mesh,
    attention_index: AttentionIndex = "tiles",
    images: ImageReader | None = None,
    widths: Widths | None = None,
) -> Experience:
    """Return the data with their places in packed rows, as device arrays spread over the mesh.

    `images` says which token ids refer to images, for a model that reads them. `widths` are those
    of the batches before, to which the layout is padded.
    """
    widths = widths or Widths()

    def place(array: Any) -> jax.Array:
        return sharding.put(array, experience_sharding(mesh, np.shape(array)))

    paths = attention_index == "paths"
    layout = layout_of(batch, data, paths=paths, micro_batches=widths.micro_batches)
    if attention_index != "tiles":
        layout = replace(layout, key_tiles=None)
    if isinstance(data, Rollout) and data.routing is not None:
        # Devices read it in packed rows only.
        layout = with_routing(layout, data.routing)
        data = replace(data, routing=None)
    if data.images is not None:
        layout, data = with_images(layout, data, images)
    return jax.tree.map(place, Experience(data, widths.padded(layout)))


def with_routing(layout: Layout, routing: Any) -> Layout:
    """Return the layout with the routing of its tokens, of `Rollout.routing` [N, T, L k]."""
    source = np.asarray(layout.source)
    flat = np.asarray(routing).reshape(-1, routing.shape[-1])
    packed: Any = np.where(source[..., None] >= 0, flat[np.maximum(source, 0)], 0)
    return replace(layout, routing=packed.astype(flat.dtype))


def with_images(layout: Layout, data: Any, reader: ImageReader | None) -> tuple[Layout, Any]:
    """Return the layout with the images of its micro-batches, and the data without theirs.

    Equal images of a group stand once in its micro-batch. The data's token ids, which count the
    features of their own row's images, count those of all images of the micro-batch then.
    """
    assert reader is not None, "only models that read images have data with images"
    tokens = np.array(data.tokens)
    pieces = np.asarray(data.images)
    positions = _positions_with_images(layout, tokens, pieces, reader)
    group_id = np.asarray(data.group_id)
    minibatches, micro_batches, rows, slots = np.shape(layout.source)
    # The micro-batch of each row: that of its first token.
    place = np.asarray(layout.slot)[:, 0] // (rows * slots)
    of_micro_batch: dict[int, list[np.ndarray]] = {}
    index_of: dict[tuple[int, int, bytes], int] = {}
    per_piece = reader.tower.features_per_piece
    for row in range(len(tokens)):
        of_images = tokens[row] >= reader.first_id
        if place[row] < 0 or not of_images.any():
            continue
        listed = of_micro_batch.setdefault(int(place[row]), [])
        features = tokens[row, of_images] - reader.first_id
        # What follows each other is encoded together: an image, or some of them.
        follows = np.diff(np.flatnonzero(of_images), prepend=-2) == 1
        starts = np.flatnonzero(~follows | (np.diff(features, prepend=-2) != 1))
        for run in np.split(features, starts[1:]):
            first = int(run[0]) // per_piece
            shown = pieces[row, first : int(run[-1]) // per_piece + 1]
            content = hashlib.blake2b(shown.tobytes(), digest_size=16).digest()
            key = (int(place[row]), int(group_id[row]), content)
            if key not in index_of:
                index_of[key] = len(listed)
                listed.extend(shown)
            run += (index_of[key] - first) * per_piece
        tokens[row, of_images] = reader.first_id + features
    most = bucket(max(map(len, of_micro_batch.values()), default=1))
    shape = (minibatches * micro_batches, most, *pieces.shape[2:])
    images = np.zeros(shape, np.float32)
    for index, listed in of_micro_batch.items():
        images[index, : len(listed)] = listed
    packed: Any = images.reshape(minibatches, micro_batches, *shape[1:])
    layout = replace(layout, images=packed, positions=positions)
    if reader.tower.is_two_way and layout.key_tiles is not None:
        layout = replace(layout, key_tiles=_with_rest_of_images(layout, tokens, reader))
    return layout, replace(data, tokens=tokens, images=None)


def _positions_with_images(
    layout: Layout, tokens: np.ndarray, pieces: np.ndarray, reader: ImageReader
) -> Any:
    """Return the positions [M, K, R, S] of slots if images take other positions than words do."""
    advances = reader.tower.advances(pieces)
    if advances is None:
        return layout.positions
    index = tokens - reader.first_id
    of_images = np.take_along_axis(advances, np.clip(index, 0, advances.shape[1] - 1), axis=1)
    taken = np.where(index >= 0, of_images, 1)
    positions = np.cumsum(taken, axis=1) - taken
    source = np.asarray(layout.source)
    packed = np.where(source >= 0, positions.reshape(-1)[np.maximum(source, 0)], 0)
    return packed.astype(np.int32)


def _with_rest_of_images(layout: Layout, tokens: np.ndarray, reader: ImageReader) -> Any:
    """Return `Layout.key_tiles` with the tiles of the rest of an image that begins in a tile.

    `tokens` are those of the data, [N, T], which count the features of `Layout.images`. See
    `models.vision.features.two_way`.
    """
    key_tiles = np.asarray(layout.key_tiles)
    source = np.asarray(layout.source)
    ids = np.where(source >= 0, tokens.reshape(-1)[np.maximum(source, 0)], 0)
    num_tiles = key_tiles.shape[-2]
    slots = np.arange(source.shape[-1])
    tile_size = len(slots) // num_tiles
    later_features = reader.tower.later_features(np.asarray(layout.images))
    place = (ids - reader.first_id).reshape(*ids.shape[:2], -1)
    rest = np.take_along_axis(later_features, np.maximum(place, 0), axis=-1)
    last_slot = slots + np.where(place >= 0, rest, 0).reshape(ids.shape)
    last_slot = np.minimum(last_slot, slots[-1]).reshape(*source.shape[:-1], num_tiles, tile_size)
    last_tile = last_slot.max(-1, keepdims=True) // tile_size
    most = -(-bucket(max(int(later_features.max()), 1)) // tile_size)
    later = np.arange(num_tiles)[:, None] + np.arange(1, most + 1)
    later = np.where(later <= last_tile, later, -1).astype(np.int32)
    return np.concatenate([key_tiles, later], axis=-1)


def layout_of(
    batch: BatchConfig,
    data: Any,
    paths: bool = False,
    with_room: bool = True,
    micro_batches: int = 0,
) -> Layout:
    """Return the place of each token in the packed rows of the micro-batches.

    Args:
        data: a pytree with `action_mask` [N, T], `group_id` [N] and `images`.
        paths: fill `Layout.paths`.
        with_room: make room for N texts of T tokens each, so that all batches of N texts have one
            shape. What stays empty is not computed.
        micro_batches: make room for at least so many of an optimizer step.
    """
    mask = np.asarray(data.action_mask)
    texts_per_step = math.ceil(len(mask) / batch.num_minibatches)
    texts_per_row = max(batch.row_length // mask.shape[1], 1)
    row_limit = math.ceil(texts_per_step / texts_per_row) if with_room else 0
    return packing.assign_slots(
        mask,
        np.asarray(data.group_id),
        row_length=batch.row_length,
        micro_batch_rows=batch.rows_at_once,
        minibatches=batch.num_minibatches,
        placement=packing.placement_of(data),
        parent=data.parent if isinstance(data, Rollout) else None,
        shared=data.shared if isinstance(data, Rollout) else None,
        share_prefixes=batch.share_prefixes,
        row_limit=max(row_limit, micro_batches * batch.rows_at_once),
        paths=paths,
    )


def experience_sharding(mesh: Mesh, shape: Sequence[int]) -> NamedSharding:
    """Return the sharding of an array of an `Experience`.

    Completions [N, ...] and packed rows [M, K, R, S] are spread by rows.
    """
    return sharding.batch_sharding(mesh, shape, 2 if len(shape) >= 4 else 0)
