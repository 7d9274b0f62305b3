"""The presets: named experiments, one function each that makes its configuration.

A module holds those of one task. The first sentence of a function's docstring is what
`tpu-rl presets` says of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from tpu_rl.commands.config import ExperimentConfig
from tpu_rl.commands.presets import (
    arithmetic,
    environments,
    own_data,
    pictures,
    problems,
    star_graph,
)

MODULES = (arithmetic, environments, own_data, pictures, problems, star_graph)

PRESETS: dict[str, Callable[[], ExperimentConfig]] = {
    name: function
    for module in MODULES
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if function.__module__ == module.__name__
}
"""Name -> the function that makes the preset."""
