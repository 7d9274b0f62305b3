"""The presets: named experiments, one function each that makes its configuration.

A module holds those of one task. The first sentence of a function's docstring is what
`tpu-rl presets` says of it. The names are read from the sources, so that a command imports only the
module of its own preset.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import TYPE_CHECKING

from tpu_rl.lazy import LazyTable

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from tpu_rl.commands.config import ExperimentConfig


@functools.cache
def functions() -> dict[str, tuple[str, str]]:
    """Read preset -> (its module, its description) from the sources of this folder."""
    return {
        node.name: (f"{__name__}.{file.stem}", " ".join((ast.get_docstring(node) or "").split()))
        for file in Path(__file__).parent.glob("[!_]*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }


def _function(module: ModuleType, name: str) -> Callable[[], ExperimentConfig]:
    return vars(module)[name]


PRESETS: LazyTable[Callable[[], ExperimentConfig]] = LazyTable(
    _function, {name: module for name, (module, _) in functions().items()}
)
"""Name -> the function that makes the preset."""
