"""Images of published rows: where they are stored, and where they stand in texts.

Images are a column `images` or `image`, or are in the parts of messages. In texts an image is a
part, a tag such as LLaVA's `<image>`, or nothing at all. `collected` and `placed` give all rows one
form: a column `images`, and `messages.IMAGE_MARK` where an image stands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tpu_rl.data.messages import IMAGE_MARK, is_image_part

Row = dict[str, Any]

COLUMNS = ("images", "image")
TAG = re.compile(
    r"<image>|(?:<\|vision_start\|>)?<\|image_pad\|>(?:<\|vision_end\|>)?|<start_of_image>"
    r"|<\|image\|>"
)
"""The tags that stand for an image in texts: of LLaVA and most data, of Qwen, Gemma and Llama."""
UNREAD_TAG = re.compile(
    rf"{TAG.pattern}|<\|vision_(?:start|end)\|>|<\|video_pad\|>|<video>"
    r"|<image[ _]?\d+>|<\|image_\d+\|>|<img>[^<>]+</img>|\[IMG\]"
)
"""Tags that are letters for the model, where they stand in the texts of a normalized row."""
TEXT_COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected")
"""Columns in which images may stand."""
PART_COLUMNS = (*TEXT_COLUMNS, "conversations", "conversation", "rejected_messages")
"""Columns of published rows whose messages may have parts."""
CONTENT_KEYS = ("image", "image_url", "url", "path", "source", *("base64", "data"))
"""Keys of a part of a message that may hold the image itself."""
SUFFIXES = {
    "image": (*(".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"), ".avif"),
    "video": (".mp4", ".avi", ".mov", ".mkv", ".webm"),
    "audio": (".wav", ".mp3", ".flac", ".ogg", ".m4a"),
}
"""Ends of the names of files, by what they hold."""
BASE64_HEADS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")
"""Beginnings of PNG, JPEG, GIF and WebP files in base64."""


def has_file(row: Mapping[str, Any], column: str, kind: str = "image") -> bool:
    """Return True if the column holds files of a kind, a key of `SUFFIXES`.

    Lists, objects and bytes are. A text may be the name of a container: it is one of a file if it
    looks like one, or if a text of the row has the kind's tag, as in LLaVA's rows.
    """
    value = row.get(column)
    if isinstance(value, str):
        tag = f"<{kind}>"
        return bool(value) and (_is_name(value, kind) or tag in str([*row.values()]))
    if isinstance(value, list | tuple):
        return any(not _is_missing(item) for item in value)
    is_file = isinstance(value, dict | bytes) or is_pil(value)
    return is_file and not _is_missing(value)


def is_pil(value: Any) -> bool:
    """Return True for an image of PIL, which need not be installed."""
    return hasattr(value, "getbands")


def unnamed_pictures(row: Row) -> list[str]:
    """Return the other columns of a row that look like pictures."""
    return [name for name, value in row.items() if name not in COLUMNS and _is_picture(value)]


def collected(row: Row) -> Row:
    """Return the row with all of its images in the column `images`; without images, as it is.

    Raises ValueError if images are both in a column and in the parts of messages, or missing.
    """
    row = row | {
        name: [_with_parts(message) for message in row[name]]
        for name in PART_COLUMNS
        if isinstance(row.get(name), list)
    }
    columns = [name for name in COLUMNS if has_file(row, name)]
    parts = _image_parts(row)
    num_parts = sum(map(len, parts))
    in_parts = [
        [content for part in of_column if (content := _content(part)) is not None]
        for of_column in parts
    ]
    num_in_parts = sum(map(len, in_parts))
    if not columns and num_in_parts < num_parts:
        raise ValueError(
            f"the messages have {num_parts} places for images, and the row has {num_in_parts} "
            "images"
        )
    if not columns:
        has_list = bool(num_in_parts) or isinstance(row.get("images"), list)
        return row | {"images": _joined(in_parts)} if has_list else row
    values = [row[name] for name in columns]
    of_columns = [list(value) if isinstance(value, list | tuple) else [value] for value in values]
    images = of_columns[0]
    if num_in_parts:
        raise ValueError(
            f"the row has {len(images)} images in `{columns[0]}` and {num_in_parts} in its "
            "messages; give them in one place"
        )
    if of_columns[-1] != images:
        raise ValueError("`images` and `image` have different images; give them in one column")
    for number, image in enumerate(images, start=1):
        if _is_missing(image):
            raise ValueError(f"image {number} of {len(images)} in `{columns[0]}` is missing")
    rejected = row.get("rejected_images")
    if rejected and rejected != images:
        raise ValueError("`rejected_images` are others: both answers of a pair see the same images")
    images = [_with_scheme(image) for image in _in_order(images, parts)]
    return {name: value for name, value in row.items() if name not in columns} | {"images": images}


def _in_order(images: list[Any], parts: list[list[Mapping[str, Any]]]) -> list[Any]:
    """Return the images in the order of the parts, where these have an `index`."""
    indices = _joined([[part.get("index") for part in of_column] for of_column in parts])
    if not any(isinstance(index, int) for index in indices):
        return images
    if not all(isinstance(index, int) and 0 <= index < len(images) for index in indices):
        raise ValueError(f"the parts have the indices {indices} of {len(images)} images")
    return [images[index] for index in indices]


def placed(row: Row) -> Row:
    """Return a row with images whose texts have `IMAGE_MARK` where they stand.

    If no text says where, images begin the first message of the user, or the prompt, as in TRL.
    Raises ValueError if there are more or fewer places than images, in one of the answers too.
    """
    images = row.get("images")
    count = len(images) if isinstance(images, list) else 0
    if not count:
        return row
    marked = {name: _with_marks(row[name]) for name in TEXT_COLUMNS if name in row}
    answers = [_count(marked[name]) for name in ("chosen", "rejected") if name in marked]
    if len(set(answers)) > 1:
        raise ValueError(
            f"`chosen` has {answers[0]} places for images and `rejected` {answers[1]}: both see "
            "the same images"
        )
    # A pair's two answers see the same images, and `messages` were split into the other columns.
    others = {"rejected", "messages"} if "prompt" in marked else {"rejected"}
    places = sum(_count(value) for name, value in marked.items() if name not in others)
    if not places:
        for name in ("prompt", "messages"):
            if name in marked:
                marked[name] = _begun(marked[name], count)
    elif count == places:
        _begin_with_prompt(marked)
    else:
        raise ValueError(
            f"the texts have {places} places for images, and the row has {count} images"
        )
    return row | marked


def _is_name(text: str, kind: str) -> bool:
    """Return True if a text looks like the name, the URL or the content of a file."""
    is_url = re.match(r"data:[\w/]*[;,]|file:|https?:", text) is not None
    is_image = kind == "image" and (is_url or _is_base64(text))
    return is_image or text.lower().endswith(SUFFIXES[kind])


def _is_base64(text: str) -> bool:
    return text.startswith(BASE64_HEADS) and len(text) > 64


def _with_scheme(image: Any) -> Any:
    is_base64 = isinstance(image, str) and _is_base64(image)
    return f"data:;base64,{image}" if is_base64 else image


def _is_missing(value: Any) -> bool:
    """Return True for nothing, and for an object of Arrow without a file."""
    if isinstance(value, Mapping):
        return all(_is_missing(item) for item in value.values())
    return value is None or (isinstance(value, str | bytes) and not value)


def _is_picture(value: Any) -> bool:
    """Return True if a value is one picture or more for certain, and nothing else."""
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_is_picture, value))
    if isinstance(value, Mapping):
        return value.keys() <= {"bytes", "path"} and any(map(_is_picture, value.values()))
    if isinstance(value, bytes):
        is_webp = value[:4] == b"RIFF" and value[8:12] == b"WEBP"
        return is_webp or value.startswith((b"\x89PNG", b"\xff\xd8\xff", b"GIF8"))
    if not isinstance(value, str):
        return is_pil(value)
    is_file = value.lower().endswith(SUFFIXES["image"]) and not re.search(r"[\n<>]", value)
    return is_file or value.startswith("data:image/") or _is_base64(value)


def _with_parts(message: Any) -> Any:
    """Return a message whose own list of images, as in Ollama's, are its first parts."""
    images = message.get("images") if isinstance(message, dict) else None
    if not isinstance(images, list) or not images or not isinstance(message.get("content"), str):
        return message
    parts = [{"type": "image", "image": image} for image in images]
    others = {key: value for key, value in message.items() if key != "images"}
    return others | {"content": [*parts, {"type": "text", "text": message["content"]}]}


def _image_parts(row: Row) -> list[list[Mapping[str, Any]]]:
    """Return the parts that are images of each column with messages."""
    parts = []
    for name in PART_COLUMNS:
        messages = row.get(name)
        of_column = []
        for message in messages if isinstance(messages, list) else []:
            content = message.get("content") if isinstance(message, dict) else None
            for part in content if isinstance(content, list) else []:
                if is_image_part(part):
                    of_column.append(part)
        parts.append(of_column)
    return parts


def _joined(images: list[list[Any]]) -> list[Any]:
    """Return the images of all columns in order.

    Those of a prompt that also begins the conversations of another column are taken once.
    """
    joined: list[Any] = []
    for of_column in images:
        shared = min(len(joined), len(of_column))
        is_repeated = bool(shared) and of_column[:shared] == joined[:shared]
        joined = max(joined, of_column, key=len) if is_repeated else joined + of_column
    return [*map(_with_scheme, joined)]


def _content(part: Mapping[str, Any]) -> Any:
    """Return the image of a part, None if the part only says where an image stands."""
    key = next((key for key in CONTENT_KEYS if not _is_missing(part.get(key))), None)
    value = part.get(key) if key is not None else None
    if isinstance(value, Mapping) and "url" in value:
        value = value["url"]
    # Anthropic's.
    if isinstance(value, Mapping) and isinstance(value.get("data"), str):
        return f"data:;base64,{value['data']}"
    return f"data:;base64,{value}" if key in ("base64", "data") else value


def _with_marks(value: Any) -> Any:
    """Return a text or messages with marks in place of tags."""
    if isinstance(value, str):
        return TAG.sub(IMAGE_MARK, value)
    if not isinstance(value, list):
        return value
    return [
        message | {"content": _with_marks(message["content"])}
        if isinstance(message, dict) and isinstance(message.get("content"), str)
        else message
        for message in value
    ]


def _count(value: Any) -> int:
    if isinstance(value, str):
        return value.count(IMAGE_MARK)
    if not isinstance(value, list):
        return 0
    return sum(str(message.get("content")).count(IMAGE_MARK) for message in value if message)


def _begin_with_prompt(marked: Row) -> None:
    """Let images at the beginning of a text without a prompt be its prompt."""
    text = marked.get("completion")
    if marked.get("prompt") == "" and isinstance(text, str):
        marked["completion"] = text.lstrip(IMAGE_MARK)
        marked["prompt"] = IMAGE_MARK * (len(text) - len(marked["completion"]))


def _begun(value: Any, count: int) -> Any:
    """Return a text, or messages, that begin with images."""
    if not isinstance(value, list):
        return IMAGE_MARK * count + str(value)
    messages = list(value)
    for index, message in enumerate(messages):
        if isinstance(message, dict) and message.get("role") == "user":
            content = str(message.get("content") or "")
            messages[index] = message | {"content": IMAGE_MARK * count + content}
            break
    return messages
