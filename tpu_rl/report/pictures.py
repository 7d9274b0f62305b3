"""Pictures of samples, and the coordinates that answers give in them.

The page holds each picture once, as a data URL, in at most `MAX_BYTES` together.
templates/completions.html draws them.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tpu_rl import run_files
from tpu_rl.errors import TpuRlError

MAX_BYTES = 1_500_000
"""Bytes of the files of all pictures, at most."""
_NAME = re.compile(r"[0-9a-f]{8,64}\.(png|jpg)")
LABELS = ("completion", "answer")


class Mark(NamedTuple):
    """A point or a box of an answer, in pixels."""

    label: str
    """One of `LABELS`."""
    unit: str
    """The unit in which its coordinates were read."""
    left: float
    top: float
    right: float
    bottom: float


class Picture(NamedTuple):
    """A picture of a sample, or a note in its place."""

    note: str = ""
    name: str = ""
    width: int = 0
    height: int = 0
    marks: Sequence[Mark] = ()


class Pictures:
    """The pictures of a page, which grow as samples show them."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.urls: dict[str, str] = {}
        """Name -> data URL; "" for one that is left out."""
        self._num_bytes = 0

    def of_sample(self, sample: dict[str, Any]) -> list[Picture]:
        """Return the pictures of a sample.

        The points and boxes of its answers are marked if there is one picture: nothing says in
        which of several they are.
        """
        images = sample.get("images")
        images = images if isinstance(images, list) else []
        marks = sample.get("marks") if len(images) == 1 else None
        return [self._picture(image, marks) for image in images]

    def _picture(self, image: Any, marks: Any) -> Picture:
        known: dict[str, Any] = image if isinstance(image, dict) else {}
        name, size = known.get("file"), known.get("size", [])
        if not (isinstance(name, str) and _NAME.fullmatch(name) and _is_size(size)):
            return Picture(str(known.get("error") or "a picture that cannot be shown"))
        width, height = size
        if not self._url(name):
            why = f"the page shows at most {MAX_BYTES / 1e6:g} MB of pictures"
            if not (self._folder / name).is_file():
                why = f"there is no file {name}"
            return Picture(f"a picture of {width} x {height} pixels, left out: {why}")
        placed = [
            mark
            for label, numbers in (marks if isinstance(marks, dict) else {}).items()
            if label in LABELS and (mark := _placed(label, numbers, width, height)) is not None
        ]
        return Picture("", name.partition(".")[0], width, height, placed)

    def _url(self, name: str) -> str:
        if name not in self.urls:
            self.urls[name] = self._read(name)
        return self.urls[name]

    def _read(self, name: str) -> str:
        path = self._folder / name
        try:
            content = run_files.read_bytes(path)
        except TpuRlError:
            return ""
        if self._num_bytes + len(content) > MAX_BYTES:
            return ""
        self._num_bytes += len(content)
        kind = "png" if name.endswith("png") else "jpeg"
        return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _is_size(size: Any) -> bool:
    return (
        isinstance(size, list)
        and len(size) == 2
        and all(type(number) is int and 0 < number < 10**6 for number in size)
    )


def _placed(label: str, numbers: Any, width: int, height: int) -> Mark | None:
    """Return the mark of a point or a box; None for other numbers.

    Nothing says in which unit a text gives coordinates. Those up to 1 are read as parts of the
    picture, those inside of it as pixels, and others up to 1000 as thousandths.
    """
    if not isinstance(numbers, list) or len(numbers) not in (2, 4):
        return None
    if not all(isinstance(x, (int, float)) and math.isfinite(x) and x >= 0 for x in numbers):
        return None
    corners: Sequence[float] = numbers * 2 if len(numbers) == 2 else numbers
    left, top, right, bottom = corners
    if right < left or bottom < top:
        return None
    largest = max(numbers)
    if largest <= 1 and any(isinstance(x, float) and x != int(x) for x in numbers):
        scale, unit = (width, height), "parts of the picture"
    elif right <= width and bottom <= height:
        scale, unit = (1.0, 1.0), "pixels"
    elif largest <= 1000:
        scale, unit = (width / 1000, height / 1000), "thousandths"
    else:
        return None
    x, y = scale
    return Mark(label, unit, left * x, top * y, right * x, bottom * y)
