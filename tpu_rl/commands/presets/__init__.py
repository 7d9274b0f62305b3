"""The presets: named experiments, each a table of settings in a YAML file of this folder.

A file holds those of one task. Each preset has `about`, its description, whose first sentence is
what `tpu-rl presets` says of it; `preset`, the name of another one that it changes, if it does; and
its settings in the form of config.yaml. A part with another `kind` takes the place of what was
there, and of any other part only the settings that are named change.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from tpu_rl import plain_values


@functools.cache
def presets() -> dict[str, dict[str, Any]]:
    """Read preset -> its table, which has what the one has that it changes."""
    return plain_values.read_tables(sorted(Path(__file__).parent.glob("*.yaml")), base="preset")
