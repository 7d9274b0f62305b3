"""Images of data rows: their place among token ids, and their pixels.

A text has the mark `MARK` where an image stands. Encoded, it first has the token that stands for an
image, and then (`ImageReader.expand`) ids from `ImageReader.first_id` on, one for each feature of
the image (`models.vision`): those of the first image of a text are first_id, first_id + 1, ..., and
those of the second follow.

Pixels are made by the image processor of transformers that the model's directory names. What the
tower reads at once is a *piece* of an image: all of it, one of its tiles, or the patches of one
feature. All pieces of a model have one shape and equally many features, so the pieces of many
images are one array, and an image has as many as its size asks for. The tower's configuration says
what an image becomes (`vision.config.VisionConfig`): `layout` returns its tokens by its size and
what transformers' image processor says of that, and `pieces` its pieces [p, ...] float32 and its
tokens by what the processor makes of it. Both raise ValueError for an image that the model does not
read.
"""

from __future__ import annotations

import base64
import binascii
import functools
import io
import json
import math
import re
import struct
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tpu_rl.errors import InputError, refused

if TYPE_CHECKING:
    from tpu_rl.models.vision.config import AnyVisionConfig, Layout

MARK = "\ufffc"
"""The object replacement character: an image in a text."""
MAX_PIXELS = 50_000_000
"""The largest image that is opened. A small file may claim to be enormous."""
MAX_BYTES = 50_000_000
MAX_ASPECT = 200
"""The longer side over the shorter one. Processors scale the shorter side to hundreds of pixels."""
TURNED = (5, 6, 7, 8)
"""EXIF's orientations of images that lie on their side."""
MAX_NESTING = 4
"""Objects around an image, such as {"image": {"bytes": ...}}."""
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "PPM", "ICO", "JPEG2000", "AVIF")
"""Formats that are read. Others run programs (EPS) or are no pictures."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


Pixels = tuple[int | None, int | None]
"""The least and the most pixels of an image as the tower reads it; None: those of the file."""
PIXEL_KEYS = (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
"""Their names in the processor's file, and in its `size`, as newer versions write it."""


class TextWithImages(NamedTuple):
    """The ids of a text with images, and what the model's tower reads of them."""

    ids: list[int]
    """Ids from `ImageReader.first_id` on are features."""
    weights: list[float]
    """The weight of each of the ids in training; 0 for those of images."""
    pieces: np.ndarray | None
    """[p, ...] float32: the pieces of all images, in order. None: there are no images."""


@dataclass(frozen=True)
class ImageReader:
    """The images of a model that reads them."""

    directory: str
    """The directory of the model, which says how pixels are made."""
    token_id: int
    """The id of the control token that stands for an image in rendered texts."""
    literal: str
    """The text of this token, with those of control tokens that always stand around it."""
    first_id: int
    """The id of an image's first feature: the number of rows of the model's embedding."""
    tower: AnyVisionConfig
    written: str = ""
    """The text that chat templates write for an image, if it is not `literal`."""
    folder: str = "."
    """The folder that relative paths start from: that of the data."""
    unsampled: tuple[int, ...] = ()
    """Ids that the model never writes, so that nothing is learned from them."""
    pixels: Pixels = (None, None)
    """The sizes to which images are scaled, in place of those of the processor's file."""

    @property
    def whole_images(self) -> tuple[int, int] | None:
        """The first id of images and the most tokens of one, if their tokens see later ones of the
        same image; None if each token sees earlier ones alone."""
        if not self.tower.is_two_way:
            return None
        processor = self.processor()
        known = type(processor).valid_kwargs.__annotations__
        in_piece = self.tower.features_per_piece
        return self.first_id, processor.max_soft_tokens if "max_soft_tokens" in known else in_piece

    def expand(
        self,
        ids: Sequence[int],
        weights: Sequence[float],
        layouts: Sequence[Layout],
        encode: Callable[[str], list[int]],
    ) -> tuple[list[int], list[float]]:
        """Return ids and weights with each image's tokens in place of the one that stands for it.

        Args:
            ids: ids with `token_id` for each image.
            weights: what each of the ids counts in training.
            layouts: the tokens of each image.
            encode: the encoder of control tokens in layouts.
        """
        expanded: list[int] = []
        expanded_weights: list[float] = []
        of_images = iter(layouts)
        next_id = self.first_id
        for token_id, weight in zip(ids, weights, strict=True):
            tokens = [token_id]
            if token_id in (self.token_id, *self.unsampled):
                weight = 0.0
            if token_id == self.token_id:
                tokens = []
                for run in next(of_images):
                    if isinstance(run, str):
                        tokens += encode(run)
                        continue
                    tokens += range(next_id, next_id + run)
                    next_id += run
            expanded += tokens
            expanded_weights += [weight] * len(tokens)
        return expanded, expanded_weights

    def collapse(self, ids: Sequence[int]) -> list[int]:
        """Return ids with `token_id` for each run of features."""
        before = [-1, *ids]
        return [
            self.token_id if token_id >= self.first_id else token_id
            for token_id, last in zip(ids, before, strict=False)
            if token_id < self.first_id or last < self.first_id or self._begins(token_id)
        ]

    def _begins(self, token_id: int) -> bool:
        """Return True if a feature is the first of its piece. Pieces of one feature tell nothing:
        control tokens part such images."""
        size = self.tower.features_per_piece
        return size > 1 and (token_id - self.first_id) % size == 0

    def rendered(self, text: str) -> str:
        """Return a rendered text with what stands for images in place of `MARK` and `written`.

        Literals in messages, which are no images, have a character for private use behind them
        (`conversations.hide`). What this returns stays as it is.
        """
        shown = f"{self.tower.gap}{self.literal}{self.tower.gap}"
        text = text.replace(MARK, shown)
        if self.written in ("", self.literal):
            return text
        before, _, after = map(re.escape, self.literal.partition(self.written))
        preceded = f"(?<!{before})" if before else ""
        pattern = f"{preceded}{re.escape(self.written)}(?!{after}|[\ue000-\uf8ff])"
        return re.sub(pattern, lambda _: shown, text)

    def count(self, ids: Sequence[int]) -> int:
        """Return the number of pieces that ids refer to; one that is cut at the end counts."""
        last = max((token_id for token_id in ids if token_id >= self.first_id), default=-1)
        return 0 if last < 0 else (last - self.first_id) // self.tower.features_per_piece + 1

    def read(self, sources: Sequence[Any]) -> tuple[np.ndarray, list[Layout]]:
        """Return the pieces [p, ...] float32 of images, and the tokens of each image.

        Raises InputError if one of them is missing, broken or too large.
        """
        processor = self.processor()
        pieces = []
        layouts = []
        for index, image in enumerate(self.opened(sources)):
            try:
                read, layout = self.tower.pieces(processor(images=image, return_tensors="np"))
            except ValueError as error:
                raise self._formless(index, len(sources), image.size, error) from error
            pieces.append(read)
            layouts.append(layout)
        return np.concatenate(pieces), layouts

    def layouts(self, sources: Sequence[Any]) -> list[Layout]:
        """Return the tokens of each image by its size alone: its pixels are not read.

        Raises InputError if one of them is missing, no image, or too large.
        """
        processor = self.processor()
        layouts = []
        for index, (height, width) in enumerate(self.opened(sources, _size)):
            try:
                layouts.append(self.tower.layout(height, width, processor))
            except ValueError as error:
                raise self._formless(index, len(sources), (width, height), error) from error
        return layouts

    def opened(self, sources: Sequence[Any], read: Callable[[Any], Any] | None = None) -> list[Any]:
        """Return images as PIL opens them, or what `read` makes of each. Raises InputError as
        `read`."""
        return [
            opened(source, Path(self.folder), f"image {index + 1} of {len(sources)}", read)
            for index, source in enumerate(sources)
        ]

    def processor(self) -> Any:
        """Return the image processor. Raises InputError if there is none, or it scales images to
        one size whatever `pixels` says."""
        return _processor(self.directory, self.pixels)

    def save(self, directory: Path) -> None:
        """Write the files that say how pixels are made."""
        for name in PROCESSOR_FILES:
            file = Path(self.directory) / name
            if file.is_file():
                content = file.read_bytes()
                if self.pixels != (None, None):
                    content = _with_pixels(content, self.pixels, name)
                (directory / name).write_bytes(content)

    def _formless(
        self, index: int, count: int, size: tuple[int, int], error: ValueError
    ) -> InputError:
        """Return the error for an image that the processor or the tower does not take."""
        width, height = size
        return InputError(
            f"image {index + 1} of {count}, {width} x {height} pixels, has no form that the model "
            "reads",
            where=f"preprocessor_config.json in {self.directory}",
            why=str(error)[:300],
            fix="use the preprocessor_config.json that was published with the model, or another "
            "image",
        )


def sources_of(row: Mapping[str, Any]) -> list[Any]:
    """Return the images of a normalized row: its column `images`."""
    value = row.get("images")
    return list(value) if isinstance(value, list | tuple) else []


def opened(source: Any, folder: Path, place: str, read: Callable[[Any], Any] | None = None) -> Any:
    """Return a PIL image of a path, a data URL, bytes, a dict with one of them, or a PIL image.

    With `read`, what this function makes of the image that PIL has opened and not read. Raises
    InputError if it cannot be read.
    """
    from PIL import Image, UnidentifiedImageError

    shown = repr(source)[:80]
    read = _in_rgb if read is None else read
    try:
        for _ in range(MAX_NESTING):
            if not isinstance(source, Mapping):
                break
            values = (source.get(key) for key in ("bytes", "image", "url", "path"))
            source = next((value for value in values if value not in (None, b"", "")), None)
        if isinstance(source, Image.Image):
            return read(source)
        content = _bytes_of(source, folder)
        if len(content) > MAX_BYTES:
            raise ValueError(f"it has {len(content):,} bytes, and at most {MAX_BYTES:,} are read")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            Image.init()
            formats = [name for name in FORMATS if name in Image.OPEN]
            return read(Image.open(io.BytesIO(content), formats=formats))
    # Decoders of many formats raise errors of many kinds for broken files.
    except (
        *(OSError, ValueError, TypeError, SyntaxError, EOFError, MemoryError, OverflowError),
        *(UnidentifiedImageError, Image.DecompressionBombError, RuntimeError),
        *(LookupError, ArithmeticError, AttributeError, NotImplementedError, struct.error),
    ) as error:
        unknown = isinstance(error, UnidentifiedImageError)  # Its message names a Python object.
        why = "its bytes are those of no picture" if unknown else str(error)[:300]
        raise InputError(
            f"{place} cannot be read",
            where=shown,
            why=why or type(error).__name__,
            fix="give a PNG, JPEG or other file that PIL reads: a path, bytes or a data URL",
        ) from error


def _size(image: Any) -> tuple[int, int]:
    """Return height and width of a PIL image as people see it.

    Raises:
        ValueError: if it is too large.
    """
    from PIL import ExifTags

    _check_size(image)
    width, height = image.size
    is_turned = image.getexif().get(ExifTags.Base.Orientation) in TURNED
    return (width, height) if is_turned else (height, width)


def _check_size(image: Any) -> None:
    """Raise ValueError if a PIL image is too large, or one side far longer than the other."""
    width, height = image.size
    if width * height > MAX_PIXELS:  # PIL refuses only larger ones.
        raise ValueError(
            f"it is {width:,} x {height:,} pixels, and at most {MAX_PIXELS:,} are read"
        )
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise ValueError(
            f"it is {width:,} x {height:,} pixels, and one side is at most {MAX_ASPECT} times as "
            "long as the other"
        )


def _in_rgb(image: Any) -> Any:
    """Return a PIL image as people see it: its first frame, turned as its EXIF data say, in RGB.

    Raises:
        ValueError: if it is too large, or its numbers have no meaning as colors.
    """
    from PIL import Image, ImageOps

    _check_size(image)
    if image.mode.startswith("I;16"):  # PIL would cut numbers above 255.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("its pixels are numbers of 32 bits, which are no colors")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return ImageOps.exif_transpose(image).convert("RGB")


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
        _, separator, encoded = source.partition(";base64,")
        if not separator:
            raise ValueError("the data URL is no base64")
        try:
            return base64.b64decode(encoded, validate=True)
        except binascii.Error as error:
            raise ValueError(f"the data URL is no base64: {error}") from error
    path = Path(source.removeprefix("file://")).expanduser()
    path = path if path.is_absolute() else folder / path
    if not path.is_file():
        raise ValueError(f"there is no file {path}; relative paths start from the data's folder")
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"the file has {path.stat().st_size:,} bytes")
    return path.read_bytes()


def _with_pixels(content: bytes, pixels: Pixels, name: str) -> bytes:
    """Return the content of a file of `PROCESSOR_FILES` with other sizes of images."""
    settings = json.loads(content)
    # The second file has settings of other processors too, and not always these.
    inner = settings if name == PROCESSOR_FILES[0] else settings.get("image_processor")
    if inner is None:
        return content
    size = inner.get("size")
    for value, (key, edge) in zip(pixels, PIXEL_KEYS, strict=True):
        if value is None:
            continue
        in_size = isinstance(size, dict) and edge in size
        if in_size:
            size[edge] = value
        if key in inner or not in_size:
            inner[key] = value
    return json.dumps(settings, indent=2).encode()


@functools.lru_cache(maxsize=4)
def _processor(directory: str, pixels: Pixels = (None, None)) -> Any:
    """Return the image processor of a model's directory. Raises InputError as
    `ImageReader.processor`."""
    from transformers import AutoImageProcessor

    with refused(
        (OSError, ValueError, TypeError, KeyError, ImportError),
        "the model's directory does not say how images become pixels",
        where=directory,
        fix="use the preprocessor_config.json that was published with the model",
    ):
        processor = AutoImageProcessor.from_pretrained(
            directory, backend="pil", local_files_only=True
        )
    known = type(processor).valid_kwargs.__annotations__
    if "do_pan_and_scan" in known and processor.do_pan_and_scan:
        raise InputError(
            "pan and scan, which cuts an image into further ones, is not supported",
            where=f"do_pan_and_scan in preprocessor_config.json, {directory}",
            why="the crops would be left out, or the texts around them",
            fix="set do_pan_and_scan to false, as in the published file",
        )
    changed = {
        name: value
        for value, (name, _) in zip(pixels, PIXEL_KEYS, strict=True)
        if value is not None
    }
    where = f"--data.{', --data.'.join(changed).replace('_', '-')}"
    if not changed.keys() <= known.keys():
        raise InputError(
            "the model's image processor has no least or most number of pixels",
            where=f"{where}; {directory}",
            why=f"{type(processor).__name__} scales images by other rules",
            fix="leave it out, or set `size` (`max_soft_tokens` of Gemma 4) in "
            "preprocessor_config.json",
        )
    if changed:
        processor = type(processor).from_dict(processor.to_dict() | changed)
        least, most = (processor.size[edge] for _, edge in PIXEL_KEYS)
        if not 0 < least <= most:
            raise InputError(
                f"images cannot have {least:,} pixels at least and {most:,} at most",
                where=where,
                why="one of the numbers may be that of preprocessor_config.json",
                fix="set both --data.min-pixels and --data.max-pixels",
            )
    if "max_soft_tokens" in known:
        processor.get_number_of_image_patches = functools.partial(_gemma4_patches, processor)
    if "crop_to_patches" in known:
        processor.crop_to_patches = True  # As InternVL's processor of texts and images does.
    if "return_row_col_info" in known:
        processor.return_row_col_info = True  # Texts name the rows and columns of tiles.
    return processor


def _gemma4_patches(processor: Any, height: int, width: int) -> int:
    """Return the number of patches that Gemma 4's image processor makes of an image of so many
    pixels, by its own rule. Raises ValueError if it makes none."""
    from transformers.models.gemma4 import image_processing_pil_gemma4

    scaled = image_processing_pil_gemma4.get_aspect_ratio_preserving_size(
        height,
        width,
        processor.patch_size,
        processor.max_soft_tokens * processor.pooling_kernel_size**2,
        processor.pooling_kernel_size,
    )
    return math.prod(size // processor.patch_size for size in scaled)
