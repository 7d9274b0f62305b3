"""Images of published rows: where they are stored, and where they stand in texts.

Images are a column `images` or `image`, or are in the parts of messages. In texts an image is a
part, LLaVA's placeholder `<image>`, or nothing at all. `collected` and `placed` give all rows one
form: a column `images`, and `messages.IMAGE_MARK` where an image stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpu_rl.data.messages import IMAGE_MARK, IMAGE_PARTS

Row = dict[str, Any]

COLUMNS = ("images", "image")
PLACEHOLDER = "<image>"
TEXT_COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected")
"""Columns in which images may stand."""
CONTENT_KEYS = ("image", "image_url", "url", "path", "base64")
"""Keys of a part of a message that may hold the image itself."""


def has_file(row: Mapping[str, Any], column: str, placeholder: str) -> bool:
    """Return True if the column holds files.

    Lists, objects and bytes are. A name may be that of a container: it is one of a file if a text
    has the placeholder, as in LLaVA's rows.
    """
    value = row.get(column)
    is_file = isinstance(value, list | dict | bytes) or hasattr(value, "getbands")
    return bool(value) and (is_file or placeholder in str([*row.values()]))


def collected(row: Row) -> Row:
    """Return the row with all of its images in the column `images`; without images, as it is.

    Raises:
        ValueError: if images are both in a column and in the parts of messages, or missing.
    """
    column = next((name for name in COLUMNS if has_file(row, name, PLACEHOLDER)), None)
    parts = _image_parts(row)
    in_parts = [content for part in parts if (content := _content(part)) is not None]
    if column is None and len(in_parts) < len(parts):
        raise ValueError(
            f"the messages have {len(parts)} places for images, and the row has {len(in_parts)} "
            "images"
        )
    if column is None:
        return row | {"images": in_parts} if in_parts else row
    value = row[column]
    images = list(value) if isinstance(value, list | tuple) else [value]
    if in_parts:
        raise ValueError(
            f"the row has {len(images)} images in `{column}` and {len(in_parts)} in its messages; "
            "give them in one place"
        )
    others = {name: content for name, content in row.items() if name != column}
    return others | {"images": [image for image in images if image is not None]}


def placed(row: Row) -> Row:
    """Return a row with images whose texts have `IMAGE_MARK` where they stand.

    If no text says where, images begin the first message of the user, or the prompt, as in TRL.

    Raises:
        ValueError: if there are more or fewer places than images.
    """
    images = row.get("images")
    count = len(images) if isinstance(images, list) else 0
    if not count:
        return row
    marked = {name: _with_marks(row[name]) for name in TEXT_COLUMNS if name in row}
    # A pair's two answers see the same images, and `messages` were split into the other columns.
    others = {"rejected", "messages"} if "prompt" in marked else {"rejected"}
    places = sum(_count(value) for name, value in marked.items() if name not in others)
    if not places:
        for name in ("prompt", "messages"):
            if name in marked:
                marked[name] = _begun(marked[name], count)
    elif count != places:
        raise ValueError(
            f"the texts have {places} places for images, and the row has {count} images"
        )
    return row | marked


def _image_parts(row: Row) -> list[Mapping[str, Any]]:
    parts = []
    for name in TEXT_COLUMNS:
        messages = row.get(name)
        for message in messages if isinstance(messages, list) else []:
            content = message.get("content") if isinstance(message, dict) else None
            for part in content if isinstance(content, list) else []:
                if isinstance(part, dict) and part.get("type") in IMAGE_PARTS:
                    parts.append(part)
    return parts


def _content(part: Mapping[str, Any]) -> Any:
    """Return the image of a part, None if the part only says where an image stands."""
    value = next((part[key] for key in CONTENT_KEYS if part.get(key)), None)
    if isinstance(value, dict) and "url" in value:
        value = value["url"]
    if part.get("base64") is value and isinstance(value, str):
        return f"data:;base64,{value}"
    return value


def _with_marks(value: Any) -> Any:
    """Return a text or messages with marks in place of placeholders."""
    if isinstance(value, str):
        return value.replace(PLACEHOLDER, IMAGE_MARK)
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
