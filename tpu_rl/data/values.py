"""Values of columns: which numbers count, and how errors show a value."""

from __future__ import annotations

import json
import math
from typing import Any


def is_number(value: Any) -> bool:
    """Return True for a finite number. Truth values are none."""
    is_any = isinstance(value, int | float) and not isinstance(value, bool)
    return is_any and math.isfinite(value)


def shown(value: Any, length: int = 60) -> str:
    """Return the beginning of a value as JSON, for an error."""
    return json.dumps(value, ensure_ascii=False, default=repr)[:length]
