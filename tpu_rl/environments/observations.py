"""Observations with images, on their way from an environment to the model.

An observation is a text, a PIL image, or a list of texts, images and parts of messages:

    [{"type": "image", "image": picture}, {"type": "text", "text": "the enlarged cell"}]

as TRL's multimodal tools return them. An environment is another process, so images travel as the
text of PNG files. In the text, `MARK` stands for each image.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

from tpu_rl.data.images import is_pil
from tpu_rl.data.messages import IMAGE_MARK as MARK
from tpu_rl.data.messages import IMAGE_PARTS

MAX_IMAGES = 16
"""Images of one observation."""
MAX_PIXELS = 16_000_000
"""The largest image of an observation."""
MAX_CHARACTERS = 8_000_000
"""Characters of the files of an observation's images, together."""
IMAGE_KEYS = ("image", "image_url", "url", "bytes", "base64", "data")


def has_images(value: Any) -> bool:
    """Return True if an observation has images, and not only texts."""
    if isinstance(value, list | tuple):
        return any(map(has_images, value))
    if isinstance(value, Mapping) and isinstance(value.get("content"), list | tuple):
        return has_images(value["content"])
    return is_pil(value) or (isinstance(value, Mapping) and value.get("type") in IMAGE_PARTS)


def with_images(value: Any) -> dict[str, Any]:
    """Return an observation with images as {"text", "images"}, which JSON can write.

    Raises ValueError if an image has no known form, or there are too many.
    """
    texts: list[str] = []
    images: list[str] = []
    _collect(value, texts, images)
    if len(images) > MAX_IMAGES:
        raise ValueError(f"an observation has {len(images)} images, and at most {MAX_IMAGES}")
    if sum(map(len, images)) > MAX_CHARACTERS:
        raise ValueError(f"its images are files of more than {MAX_CHARACTERS * 3 // 4:,} bytes")
    return {"text": "".join(texts), "images": images}


def _collect(value: Any, texts: list[str], images: list[str]) -> None:
    if isinstance(value, list | tuple):
        for part in value:
            _collect(part, texts, images)
    elif isinstance(value, Mapping) and isinstance(value.get("content"), list | tuple):
        _collect(value["content"], texts, images)
    elif is_pil(value) or (isinstance(value, Mapping) and value.get("type") in IMAGE_PARTS):
        texts.append(MARK)
        images.append(_png(_picture(value)))
    elif is_text_block(value):
        texts.append(_plain(value.get("content", value.get("text"))))
    else:
        texts.append(_plain(value))


def is_text_block(value: Any) -> bool:
    """Return True for a message, or a part of one, that holds a text."""
    return isinstance(value, Mapping) and ("content" in value or value.get("type") == "text")


def _plain(value: Any) -> str:
    return str(value).replace(MARK, "\ufffd")


def _picture(value: Any) -> Any:
    """Return the PIL image of a picture, or of a part that holds one."""
    from PIL import Image

    if is_pil(value):
        return value
    content = next((value[key] for key in IMAGE_KEYS if value.get(key) is not None), None)
    if isinstance(content, Mapping):
        content = content.get("url", content.get("bytes"))
    if is_pil(content):
        return content
    if isinstance(content, str):
        content = base64.b64decode(content.rpartition("base64,")[2], validate=True)
    if not isinstance(content, bytes):
        raise ValueError(
            "an image of an observation is a PIL image, bytes or base64, and not "
            f"{type(content).__name__}"
        )
    return Image.open(io.BytesIO(content))


def _png(picture: Any) -> str:
    """Return a PNG file of a picture, as base64."""
    width, height = picture.size
    if not 0 < width * height <= MAX_PIXELS:
        raise ValueError(f"an image has {width} x {height} pixels, and at most {MAX_PIXELS:,}")
    file = io.BytesIO()
    picture.convert("RGB").save(file, format="PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode()


def received(value: Any) -> tuple[str, tuple[bytes, ...]]:
    """Return (text, PNG files) of an observation that another process sent.

    Raises:
        TypeError, ValueError: if it has another form.
    """
    if not isinstance(value, Mapping):
        return str(value), ()
    images = tuple(base64.b64decode(image, validate=True) for image in value.get("images", ()))
    return str(value.get("text")), images
