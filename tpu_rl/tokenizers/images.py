"""Images of data rows: their place among token ids, and their pixels.

A text has the mark `MARK` where an image stands. Encoded, an image is a run of ids from
`ImageReader.first_id` on, one for each of its features (`models.vision`): the first image of a text
has the ids first_id, first_id + 1, ..., and those of the second follow.

Pixels are made by the image processor of transformers that the model's directory names.
"""

from __future__ import annotations

import base64
import binascii
import functools
import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tpu_rl.errors import InputError

MARK = "\ufffc"
"""The object replacement character: an image in a text."""
MAX_PIXELS = 50_000_000
"""The largest image that is opened. A small file may claim to be enormous."""
MAX_BYTES = 50_000_000
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class ImageReader:
    """The images of a model that reads them."""

    directory: str
    """The directory of the model, which says how pixels are made."""
    token_id: int
    """The id of the control token that stands for an image in rendered texts."""
    literal: str
    """The text of this token."""
    first_id: int
    """The id of an image's first feature: the number of rows of the model's embedding."""
    tokens_per_image: int
    image_size: int
    """Height and width of the images that the model reads, in pixels."""
    folder: str = "."
    """The folder that relative paths start from: that of the data."""

    def expand(self, ids: Sequence[int]) -> list[int]:
        """Return ids with the features of images in place of the tokens that stand for them."""
        expanded: list[int] = []
        count = 0
        for token_id in ids:
            if token_id != self.token_id:
                expanded.append(token_id)
                continue
            start = self.first_id + count * self.tokens_per_image
            expanded.extend(range(start, start + self.tokens_per_image))
            count += 1
        return expanded

    def collapse(self, ids: Sequence[int]) -> list[int]:
        """Return ids with one token for each image: the inverse of `expand`."""
        return [
            self.token_id if token_id >= self.first_id else token_id
            for token_id in ids
            if token_id < self.first_id or (token_id - self.first_id) % self.tokens_per_image == 0
        ]

    def count(self, ids: Sequence[int]) -> int:
        """Return the number of images that ids refer to; one that is cut at the end counts."""
        last = max((token_id for token_id in ids if token_id >= self.first_id), default=-1)
        return 0 if last < 0 else (last - self.first_id) // self.tokens_per_image + 1

    def pixels(self, sources: Sequence[Any]) -> np.ndarray:
        """Return images, [n, C, H, W] float32, as the model reads them.

        Raises:
            InputError: if one of them is missing, broken or too large.
        """
        shape = (len(sources), 3, self.image_size, self.image_size)
        pixels = np.zeros(shape, np.float32)
        for index, source in enumerate(sources):
            pixels[index] = self._pixels(source, f"image {index + 1} of {len(sources)}")
        return pixels

    def save(self, directory: Path) -> None:
        """Copy the files that say how pixels are made."""
        for name in PROCESSOR_FILES:
            file = Path(self.directory) / name
            if file.is_file():
                (directory / name).write_bytes(file.read_bytes())

    def _pixels(self, source: Any, place: str) -> np.ndarray:
        image = opened(source, Path(self.folder), place)
        made = _processor(self.directory)(images=image, return_tensors="np")["pixel_values"]
        shape = (3, self.image_size, self.image_size)
        if np.shape(made) != (1, *shape):
            raise InputError(
                f"the image processor makes arrays of the shape {np.shape(made)[1:]}",
                where=f"preprocessor_config.json in {self.directory}",
                why=f"the model's tower reads images of the shape {shape}",
                fix="use the preprocessor_config.json that was published with the model",
            )
        return np.asarray(made[0], np.float32)


def sources_of(row: Mapping[str, Any]) -> list[Any]:
    """Return the images of a normalized row: its column `images`."""
    value = row.get("images")
    return list(value) if isinstance(value, list | tuple) else []


def opened(source: Any, folder: Path, place: str) -> Any:
    """Return a PIL image of a path, a data URL, bytes, a dict with one of them, or a PIL image.

    Raises:
        InputError: if it cannot be read.
    """
    from PIL import Image, UnidentifiedImageError

    if isinstance(source, Image.Image):
        return source
    if isinstance(source, Mapping):
        content = next(
            (source[key] for key in ("bytes", "image", "url", "path") if source.get(key)), None
        )
        return opened(content, folder, place)
    shown = repr(source)[:80]
    try:
        content = _bytes_of(source, folder)
        if len(content) > MAX_BYTES:
            raise ValueError(f"it has {len(content):,} bytes, and at most {MAX_BYTES:,} are read")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(content))
            width, height = image.size
            if width * height > MAX_PIXELS:  # PIL refuses only larger ones.
                raise ValueError(
                    f"it is {width:,} x {height:,} pixels, and at most {MAX_PIXELS:,} are read"
                )
            return image.convert("RGB")
    # Decoders of many formats raise errors of many kinds for broken files.
    except (
        *(OSError, ValueError, TypeError, SyntaxError, EOFError, MemoryError, OverflowError),
        *(UnidentifiedImageError, Image.DecompressionBombError),
    ) as error:
        raise InputError(
            f"{place} cannot be read",
            where=shown,
            why=str(error)[:300] or type(error).__name__,
            fix="give a PNG, JPEG or other file that PIL reads: a path, bytes or a data URL",
        ) from error


def _bytes_of(source: Any, folder: Path) -> bytes:
    if isinstance(source, bytes | bytearray):
        return bytes(source)
    if not isinstance(source, str):
        raise ValueError(
            f"an image is a path, bytes or a data URL, and not {type(source).__name__}"
        )
    if source.startswith(("http://", "https://")):
        raise ValueError("files are not fetched from the network")
    if source.startswith("data:"):
        _, _, encoded = source.partition("base64,")
        try:
            return base64.b64decode(encoded, validate=True)
        except binascii.Error as error:
            raise ValueError(f"the data URL is no base64: {error}") from error
    path = Path(source.removeprefix("file://")).expanduser()
    path = path if path.is_absolute() else folder / path
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"the file has {path.stat().st_size:,} bytes")
    return path.read_bytes()


@functools.lru_cache(maxsize=4)
def _processor(directory: str) -> Any:
    """Return the image processor of a model's directory. Raises InputError if there is none."""
    from transformers import AutoImageProcessor

    if not any((Path(directory) / name).is_file() for name in PROCESSOR_FILES):
        raise InputError(
            "the model's directory does not say how images become pixels",
            where=directory,
            why=f"there is no {' or '.join(PROCESSOR_FILES)}",
            fix="download preprocessor_config.json with the model",
        )
    try:
        return AutoImageProcessor.from_pretrained(directory, backend="pil", local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        raise InputError(
            "the image processor cannot be made",
            where=directory,
            why=str(error)[:300],
            fix="use the preprocessor_config.json that was published with the model",
        ) from error
