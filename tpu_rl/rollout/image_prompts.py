"""Prompts with images, as the sampler reads them.

The token ids of a prompt count the features of its own images. The sampler reads one table of the
features of all prompts, in which each prompt's images follow those of the prompts before it. The
tower makes it once, so an image is encoded once for all completions of its prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tpu_rl import models
from tpu_rl.data.encoding import bucket, stacked_pieces
from tpu_rl.models import Select
from tpu_rl.tokenizers.images import ImageReader
from tpu_rl.types import FEATURES, Model, Params, Rollout

WithImages = Callable[[Params, np.ndarray], Params]
"""(the params tree that the policy reads, pieces of images [I, ...]) -> the tree with features."""


def with_images(model: Model, select: Select) -> WithImages | None:
    """Return the function that gives a role's params the features of images; None for a model that
    reads texts only."""
    if model.config.vision is None:
        return None
    features = models.image_features(model)

    def add(params: Params, images: np.ndarray) -> Params:
        made = features(select(params), images)
        return params | {select.name: params[select.name] | {FEATURES: made}}

    return add


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
