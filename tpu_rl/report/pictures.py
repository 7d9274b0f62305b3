"""Pictures of samples, and the coordinates that answers give in them.

The page holds each picture once, as a data URL, in at most `MAX_BYTES` together.
"""

from __future__ import annotations

import base64
import html
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tpu_rl import run_files
from tpu_rl.errors import TpuRlError

MAX_BYTES = 1_500_000
"""Bytes of the files of all pictures, at most."""
_NAME = re.compile(r"[0-9a-f]{8,64}\.(png|jpg)")
COLORS = {"completion": "var(--c1)", "answer": "var(--c2)"}


class Pictures:
    """The pictures of a page, which grow as samples show them."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._urls: dict[str, str] = {}
        """Name -> data URL; "" for one that is left out."""
        self._num_bytes = 0

    def of_sample(self, sample: dict[str, Any]) -> str:
        """Return the pictures of a sample as HTML.

        The points and boxes of its answers are drawn if there is one picture: nothing says in which
        of several they are.
        """
        images = sample.get("images")
        images = images if isinstance(images, list) else []
        marks = sample.get("marks") if len(images) == 1 else None
        figures = [self._figure(image, marks) for image in images]
        return f"<div class='pictures'>{''.join(figures)}</div>" if figures else ""

    def definitions(self) -> str:
        """Return the pictures themselves: the page needs this once."""
        images = "".join(
            f'<image id="picture-{name.partition(".")[0]}" width="1" height="1" href="{url}"'
            ' preserveAspectRatio="none"/>'
            for name, url in self._urls.items()
            if url
        )
        return f'<svg width="0" height="0"><defs>{images}</defs></svg>' if images else ""

    def _figure(self, image: Any, marks: Any) -> str:
        known: dict[str, Any] = image if isinstance(image, dict) else {}
        name, size = known.get("file"), known.get("size", [])
        is_known = isinstance(name, str) and _NAME.fullmatch(name) and _is_size(size)
        if not is_known:
            return _note(str(known.get("error") or "a picture that cannot be shown"))
        assert isinstance(name, str)
        width, height = size
        if not self._url(name):
            return _note(f"a picture of {width} x {height} pixels, left out: {self._why(name)}")
        shapes = []
        captions = [f"{width} x {height} pixels"]
        for label, numbers in (marks if isinstance(marks, dict) else {}).items():
            if label in COLORS and (placed := _placed(numbers, width, height)) is not None:
                unit, left, top, right, bottom = placed
                shapes.append(_shape(left, top, right, bottom, COLORS[label], max(width, height)))
                captions.append(f"<b style='color:{COLORS[label]}'>{label}</b> in {unit}")
        return (
            f'<figure><svg viewBox="0 0 {width} {height}"><use'
            f' href="#picture-{name.partition(".")[0]}" transform="scale({width} {height})"/>'
            f"{''.join(shapes)}</svg><figcaption>{', '.join(captions)}</figcaption></figure>"
        )

    def _url(self, name: str) -> str:
        if name not in self._urls:
            self._urls[name] = self._read(name)
        return self._urls[name]

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

    def _why(self, name: str) -> str:
        if not (self._folder / name).is_file():
            return f"there is no file {html.escape(name)}"
        return f"the page shows at most {MAX_BYTES / 1e6:g} MB of pictures"


def _note(text: str) -> str:
    return f"<p class='lead'>{html.escape(text)}</p>"


def _is_size(size: Any) -> bool:
    return (
        isinstance(size, list)
        and len(size) == 2
        and all(type(number) is int and 0 < number < 10**6 for number in size)
    )


def _placed(numbers: Any, width: int, height: int) -> tuple[str, float, float, float, float] | None:
    """Return (unit, left, top, right, bottom) of a point or a box, in pixels; None for others.

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
    return unit, left * scale[0], top * scale[1], right * scale[0], bottom * scale[1]


def _shape(left: float, top: float, right: float, bottom: float, color: str, longest: int) -> str:
    line = f'fill="none" stroke="{color}" stroke-width="{longest / 100:g}"'
    if (left, top) == (right, bottom):
        return f'<circle cx="{left:g}" cy="{top:g}" r="{longest / 40:g}" {line}/>'
    return (
        f'<rect x="{left:g}" y="{top:g}" width="{right - left:g}" height="{bottom - top:g}"'
        f" {line}/>"
    )


STYLE = """
.pictures { display: flex; flex-wrap: wrap; gap: 12px; }
.pictures figure { margin: 0; } .pictures svg { height: 192px; max-width: 100%; }
.pictures figcaption { font-size: 12px; color: var(--muted); }
"""
