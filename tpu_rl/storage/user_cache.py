"""The folder in which this user's caches are."""

from __future__ import annotations

import os
from pathlib import Path


def folder() -> Path:
    """Return the cache folder of tpu_rl, which need not exist.

    Raises RuntimeError if the user has no home.
    """
    cache_home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(cache_home) if os.path.isabs(cache_home) else Path("~/.cache").expanduser()
    return base / "tpu_rl"
