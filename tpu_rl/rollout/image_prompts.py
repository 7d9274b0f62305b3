"""Prompts with images, as the sampler reads them.

The token ids of a prompt count the features of its own images. The sampler reads one table of the
features of all prompts, in which each prompt's images follow those of the prompts before it. The
tower makes it once, so an image is encoded once for all completions of its prompt.

Conversations get images while they go on. There an image has token ids of its own (`ImageTable`).
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from tpu_rl import models
from tpu_rl.data.encoding import bucket, stacked_pieces
from tpu_rl.errors import InputError
from tpu_rl.models import Select
from tpu_rl.runtime import processes, typed_json
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.tokenizers.images import ImageReader
from tpu_rl.train import sharding
from tpu_rl.types import FEATURES, Model, Params, Rollout

MOST_FEATURES = 1 << 22
"""Features of the images of one process, of several that share them."""


class ImageFeatures(NamedTuple):
    """The features of images for a role that reads them."""

    compute: Callable[[Params, Any], Any]
    """(the params tree that the policy reads, pieces of images [I, ...]) -> `features.Features`."""
    insert: Callable[[Params, Any], Params]
    """(that tree, features) -> the tree with them."""
    piece_shape: tuple[int, ...]

    def __call__(self, params: Params, images: Any) -> Params:
        """Return the params tree with the features of images."""
        return self.insert(params, self.compute(params, images))


def with_images(model: Model, select: Select | None = None) -> ImageFeatures | None:
    """Return the function that gives a role's params the features of images; None for a model that
    reads texts only. Without `select`, the params are the whole tree."""
    if model.config.vision is None:
        return None
    features = models.image_features(model)

    def compute(params: Params, images: Any) -> Any:
        return features(params if select is None else select(params), images)

    def insert(params: Params, made: Any) -> Params:
        if select is None:
            return params | {FEATURES: made}
        return params | {select.name: params[select.name] | {FEATURES: made}}

    return ImageFeatures(compute, insert, model.config.vision.piece_shape)


def table(
    prompts: Sequence[Sequence[int]], pixels: Sequence[np.ndarray | None], reader: ImageReader
) -> tuple[list[list[int]], np.ndarray]:
    """Return the prompts with ids that count the features of one table, and its images.

    The table of pieces [I, ...] has zeros at its end, so that few numbers of pieces occur.
    """
    shifted: list[list[int]] = []
    count = 0
    for prompt, images in zip(prompts, pixels, strict=True):
        offset = count * reader.tower.features_per_piece
        shifted.append([i + offset if i >= reader.first_id else i for i in prompt])
        count += 0 if images is None else len(images)
    known = [images for images in pixels if images is not None]
    images = np.concatenate(known)
    padding = bucket(count) - count
    return shifted, np.pad(images, ((0, padding), *((0, 0),) * (images.ndim - 1)))


def with_own_images(
    rollout: Rollout, pixels: Sequence[np.ndarray | None], reader: ImageReader, group_size: int
) -> Rollout:
    """Return a rollout of `table`'s prompts with ids that count the features of a row's own images,
    and with these images."""
    counts = [0 if images is None else len(images) for images in pixels]
    offsets = np.cumsum([0, *counts[:-1]]) * reader.tower.features_per_piece
    tokens = np.array(rollout.tokens)
    of_images = tokens >= reader.first_id
    tokens -= of_images * np.repeat(offsets, group_size)[:, None]
    images: Any = stacked_pieces([images for images in pixels for _ in range(group_size)])
    return replace(rollout, tokens=tokens.astype(np.int32), images=images)


# --- conversations ---


@dataclass
class _Image:
    """An image whose features are at [start, start + count) among those of all images."""

    start: int
    count: int
    pieces: np.ndarray
    """[p, ...] float32."""
    features: Any = None
    """The `Features` of the image, on the host; None before it is read for the first time."""


class ImageTable:
    """The images of conversations. The tower reads each once, however many conversations show it.

    Image by image, in the order in which they come, features have the token ids from
    `ImageReader.first_id` on. Equal images have equal ids, so equal ids are equal texts with equal
    images. With several processes, each numbers the images of its own episodes from another number
    on, and `share` tells all processes of them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        features: ImageFeatures,
        most: int | None = None,
        is_shared: bool = False,
    ):
        """Start without images; keep the last `most` of them, or all.

        With `is_shared`, all processes of a run have such a table and call `share`.
        """
        assert tokenizer.images is not None
        self._tokenizer = tokenizer
        self._reader = tokenizer.images
        self._features = features
        self._most = most
        self._per_piece = self._reader.tower.features_per_piece
        self._images: dict[bytes, _Image] = {}
        """By hash; the one that was placed last comes last."""
        self._starts: dict[bytes, int] = {}
        self._is_shared = is_shared
        self._num_features = processes.index() * MOST_FEATURES
        self._new: list[_Image] = []
        """Images that the other processes do not know yet."""
        self._known: dict[int, tuple[Any, list[int]]] = {}
        """By identity: sources of data rows that many episodes show, and their ids."""
        self._lock = threading.Lock()
        self._like: Any = None
        """The shapes and types of features."""

    @property
    def first_id(self) -> int:
        """The id of the first feature."""
        return self._reader.first_id

    def place(self, ids: Sequence[int], sources: Sequence[Any]) -> list[int]:
        """Return the ids of a text, with those of its images in place of each image's one token.

        Raises InputError if an image cannot be read, or there are more or fewer places.
        """
        token_id = self._reader.token_id
        if ids.count(token_id) != len(sources):
            self._tokenizer.with_images({"images": list(sources)}, ids)  # It says so.
        of_images = iter([self._ids_of(source) for source in sources])
        placed: list[int] = []
        for i in ids:
            placed += next(of_images) if i == token_id else [i]
        if placed and placed[-1] >= self._reader.first_id:
            raise InputError(
                "a turn of the model would follow an image directly",
                why="in conversations a text stands between them",
                fix="let the prompt or the observation end with a text, such as a line end",
            )
        return placed

    def keep(self, sources: Iterable[Any]) -> None:
        """Keep images that earlier texts show. Raises InputError if one cannot be read."""
        for source in sources:
            self._ids_of(source)

    def _ids_of(self, source: Any) -> list[int]:
        known = self._known.get(id(source))
        if known is not None and known[0] is source and self._most is None:
            return known[1]
        if processes.count() > 1 and not self._is_shared:
            raise InputError(
                "agents that send images run in one process",
                where="--agent",
                why="each process has its own episodes, and the images of the others are not sent",
                fix="run on one machine, or use --environment",
            )
        row = {"images": [source]}
        ids, _, pieces = self._tokenizer.with_images(row, [self._reader.token_id])
        assert pieces is not None
        key = hashlib.blake2b(pieces.tobytes(), digest_size=16).digest()
        with self._lock:
            start = self._starts.setdefault(key, self._num_features)
            count = len(pieces) * self._per_piece
            self._num_features = max(self._num_features, start + count)
            image = self._images.pop(key, None)
            if image is None:
                image = _Image(start, count, pieces)
                self._new.append(image)
            self._images[key] = image
            if processes.count() > 1 and start % MOST_FEATURES + count > MOST_FEATURES:
                raise InputError(
                    f"the images of a process have more than {MOST_FEATURES:,} features",
                    where="--batch.prompts, --batch.group-size",
                    fix="take fewer or smaller images at once, or more processes",
                )
            if self._most is not None and len(self._images) > self._most:
                del self._images[next(iter(self._images))]
        first_id = self._reader.first_id
        placed = [i + start if i >= first_id else i for i in ids]
        if self._most is None:
            self._known[id(source)] = (source, placed)
        return placed

    def share(self) -> None:
        """Tell all processes of the images that came since the last call.

        A collective operation: all processes must call it together.
        """
        with self._lock:
            new, self._new = self._new, []
        for process, of_process in enumerate(typed_json.gather(new, _Image)):
            if process != processes.index():
                with self._lock:
                    self._images |= {b"%d" % image.start: image for image in of_process}

    def read(self, params: Params, tokens: np.ndarray) -> tuple[Params, np.ndarray]:
        """Return the params with the features that tokens [R, C] refer to, and the tokens with ids
        that count these.

        The features are those of whole pieces, with room for as many as C tokens a row can show, so
        that the shape of the tokens alone decides which program reads them. Raises InputError if an
        image is no longer known.
        """
        with self._lock:
            images = sorted(self._images.values(), key=lambda image: image.start)
        flat = np.array(tokens).reshape(-1)
        places = np.flatnonzero(flat >= self._reader.first_id)
        pieces, of_tokens = np.unique(
            (flat[places] - self._reader.first_id) // self._per_piece, return_inverse=True
        )
        # Each piece is a run of its features; the first and the last run of a row may be cut.
        num_rows, num_columns = tokens.shape
        room = num_rows * (num_columns // self._per_piece + 2)
        if self._like is None:
            piece = jax.ShapeDtypeStruct((1, *self._features.piece_shape), np.float32)
            self._like = jax.eval_shape(self._features.compute, params, piece)
        features = jax.tree.map_with_path(
            lambda path, leaf: np.zeros(_resized(path, leaf, room * self._per_piece), leaf.dtype),
            self._like,
        )
        starts = [image.start for image in images]
        for number, piece in enumerate(pieces):
            offset = int(piece) * self._per_piece
            index = int(np.searchsorted(starts, offset, side="right")) - 1
            image = images[index] if index >= 0 else None
            if image is None or offset >= image.start + image.count:
                raise InputError(
                    "an image of a conversation is no longer kept",
                    why=f"the last {self._most} images are",
                    fix="send fewer images at once",
                )
            within = np.arange(self._per_piece) + offset - image.start
            target = np.arange(self._per_piece) + number * self._per_piece
            for (path, whole), part in zip(
                jax.tree.leaves_with_path(features),
                jax.tree.leaves(self._features_of(params, image)),
                strict=True,
            ):
                axis = _feature_axis(path)
                whole[(slice(None), target) if axis else target] = part.take(within, axis)
        feature = (flat[places] - self._reader.first_id) % self._per_piece
        flat[places] = self._reader.first_id + of_tokens * self._per_piece + feature
        return self._features.insert(params, features), flat.reshape(tokens.shape)

    def _features_of(self, params: Params, image: _Image) -> Any:
        """Return the features of an image, which the tower reads alone: what it makes of an image
        does not depend on others that come at the same time."""
        if image.features is None:
            count = len(image.pieces)
            padding = ((0, bucket(count) - count), *((0, 0),) * (image.pieces.ndim - 1))
            made = self._features.compute(params, np.pad(image.pieces, padding))
            image.features = sharding.to_host(made)
        return image.features

    def with_own_images(self, rollout: Rollout) -> Rollout:
        """Return a rollout with ids that count the features of a row's own images, in the order in
        which the row shows them, and with the pieces of these images."""
        first_id = self._reader.first_id
        tokens = np.array(rollout.tokens)
        pieces = {
            image.start + number * self._per_piece: piece
            for image in self._images.values()
            for number, piece in enumerate(image.pieces)
        }
        of_rows: list[np.ndarray | None] = []
        for row in tokens:
            places = np.flatnonzero(row >= first_id)
            offsets = row[places] - first_id
            within = offsets % self._per_piece
            starts = (offsets - within).tolist()
            order = {start: number for number, start in enumerate(dict.fromkeys(starts))}
            own = np.array([order[start] for start in starts], np.int32) * self._per_piece
            row[places] = first_id + own + within
            of_rows.append(np.stack([pieces[start] for start in order]) if order else None)
        images: Any = stacked_pieces(of_rows)
        return replace(rollout, tokens=tokens, images=images)


def _feature_axis(path: Any) -> int:
    """Return the axis of features in a leaf of `features.Features`."""
    return int(path[0].name == "deep")


def _resized(path: Any, leaf: Any, count: int) -> tuple[int, ...]:
    """Return the shape of a leaf for `count` features."""
    axis = _feature_axis(path)
    return (*leaf.shape[:axis], count, *leaf.shape[axis + 1 :])
