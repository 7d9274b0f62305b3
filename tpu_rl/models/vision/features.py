"""The features of images, and their places among the tokens of a text."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpu_rl.models.config import DecoderConfig
from tpu_rl.models.layers import TokenIndex
from tpu_rl.types import Array


class Grid(NamedTuple):
    """The places of features [I] in their images. All int32."""

    number: Array
    rows: Array
    columns: Array

    @property
    def row(self) -> Array:
        return self.number // jnp.maximum(self.columns, 1)

    @property
    def column(self) -> Array:
        return self.number % jnp.maximum(self.columns, 1)

    @property
    def later(self) -> Array:
        """The number of later features of the same image."""
        return self.rows * self.columns - 1 - self.number

    @property
    def advance(self) -> Array:
        """The number of positions from each token of an image to the next token: 0 inside, and
        after the last one the longer side, so that all features have earlier positions."""
        is_last = self.number == self.rows * self.columns - 1
        return jnp.where(is_last, jnp.maximum(self.rows, self.columns), 0)


def grid_of(pieces: Any) -> Grid:
    """Return the grid of pieces [..., 3 + ...]."""
    return Grid(*(pieces[..., i].astype(np.int32) for i in range(3)))


class Features(NamedTuple):
    """The features of images."""

    states: Array
    """[F, D]: what stands in the text."""
    deep: Array | None = None
    """[L, F, D]: what the first L layers of the text add (Qwen3-VL)."""
    grid: Grid | None = None
    """The places of features in their images, if these have any size."""


def place_features(
    config: DecoderConfig, x: Array, tokens: Array, features: Features | None
) -> Array:
    """Put features into the embedded tokens x [B, T, D] where the ids [B, T] refer to them.

    An id without a feature gives NaN, which no training step accepts.
    """
    index = tokens - config.vocab.size
    if features is None:
        placed = jnp.full_like(x, jnp.nan)
    else:
        placed = jnp.take(features.states.astype(x.dtype), jnp.maximum(index, 0), axis=0)
    return jnp.where((index >= 0)[..., None], placed, x)


def add_deep_features(
    config: DecoderConfig, x: Array, tokens: Array, features: Features, layer: Array | int
) -> Array:
    """Add what a layer has of images to its output x [B, T, D], where ids [B, T] are features."""
    assert features.deep is not None
    count = len(features.deep)
    index = tokens - config.vocab.size

    def added(deep: Array) -> Array:
        of_layer = jax.lax.dynamic_index_in_dim(deep, jnp.minimum(layer, count - 1), keepdims=False)
        placed = jnp.take(of_layer.astype(x.dtype), jnp.maximum(index, 0), axis=0)
        return x + jnp.where((index >= 0)[..., None], placed, jnp.zeros_like(x))

    return jax.lax.cond(jnp.asarray(layer) < count, added, lambda _: x, features.deep)


def rotary_positions(
    config: DecoderConfig, tokens: Array, positions: Array, features: Features | None
) -> Array:
    """Return the positions of tokens in time, rows and columns [B, T, 3]; where no images are in
    the text or each token takes one, the positions [B, T] as they are.

    `positions` of features are all that of the first feature of their image.
    """
    if not config.rope.sections or features is None or features.grid is None:
        return positions
    grid = features.grid
    index = tokens - config.vocab.size
    places = jnp.stack([jnp.zeros_like(grid.row), grid.row, grid.column], axis=1)
    inside = jnp.where((index >= 0)[..., None], places[jnp.maximum(index, 0)], 0)
    return positions[..., None] + inside


def missing_positions(config: DecoderConfig, tokens: Array, features: Features | None) -> Array:
    """Return for each of the tokens [B, T] how many positions more than one it takes, which is
    negative inside of an image."""
    if features is None or features.grid is None:
        return jnp.zeros_like(tokens)
    index = tokens - config.vocab.size
    return jnp.where(index >= 0, features.grid.advance[jnp.maximum(index, 0)] - 1, 0)


def two_way(
    config: DecoderConfig, tokens: Array, queries: TokenIndex, features: Features | None
) -> TokenIndex | None:
    """Return the index of tokens [B, T] as queries, which see all of their own image; None if no
    layer sees images so (`VisionConfig.two_way`), or there are none.

    A query sees keys up to its own place. The tokens of an image follow one another, so they all
    see the image, and nothing else behind themselves, if they have the place of its last token. An
    image that is cut ends where its text does.
    """
    vision = config.vision
    if vision is None or not vision.is_two_way or features is None:
        return None
    place = tokens - config.vocab.size
    if features.grid is None:
        later = vision.features_per_piece - 1 - place % vision.features_per_piece
    else:
        later = features.grid.later[jnp.maximum(place, 0)]
    last = queries.index + later
    last = jnp.minimum(last, queries.visible_until - 1)
    return queries._replace(index=jnp.where(place >= 0, last, queries.index))
