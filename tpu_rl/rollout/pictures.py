"""Small copies of the pictures of samples, for the report.

samples.jsonl names a picture by its copy: `{"file": "NAME", "size": [width, height]}`. The name of
a copy is a hash of its content, so that a picture which many samples show is stored once.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tpu_rl.errors import InputError
from tpu_rl.tokenizers.images import ImageReader

MAX_SIDE = 192
"""Pixels of a copy's longer side, at most."""
MAX_PNG_BYTES = 12_000
"""A copy that takes more as PNG is a JPEG."""
MAX_OF_SAMPLE = 8
"""Pictures of a sample that are copied; the others are counted."""


def kept(sources: Sequence[Any], reader: ImageReader, folder: Path) -> list[dict[str, Any]]:
    """Return the names of pictures in samples.jsonl, and write their copies to a folder.

    A picture that is gone by now has an `error` in place of a file.
    """
    names: list[dict[str, Any]] = []
    for source in sources[:MAX_OF_SAMPLE]:
        try:
            [image] = reader.opened([source])
        except InputError as error:
            names.append({"error": error.why[:200]})
            continue
        content, ending = _small(image)
        name = f"{hashlib.sha256(content).hexdigest()[:24]}.{ending}"
        path = folder / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(f".{os.getpid()}.tmp")
            temporary.write_bytes(content)
            temporary.replace(path)
        names.append({"file": name, "size": list(image.size)})
    rest = len(sources) - MAX_OF_SAMPLE
    return [*names, {"error": f"{rest} more pictures"}] if rest > 0 else names


def _small(image: Any) -> tuple[bytes, str]:
    """Return a copy of at most `MAX_SIDE` pixels a side as a file, and the ending of its name."""
    small = image.convert("RGB")
    small.thumbnail((MAX_SIDE, MAX_SIDE))
    file = io.BytesIO()
    small.save(file, format="PNG")
    if file.tell() <= MAX_PNG_BYTES:
        return file.getvalue(), "png"
    file = io.BytesIO()
    small.save(file, format="JPEG", quality=80)
    return file.getvalue(), "jpg"
