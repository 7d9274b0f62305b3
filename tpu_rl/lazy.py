"""Names that are loaded when somebody asks for them: exports of folders, and tables of wings.

The core of the library does not import its wings (serving, tasks, verifiers, reports, ...), and a
run loads only what it uses. Two forms:

    lazy.exports(__name__, __file__)    in an __init__.py: what it imports under `if TYPE_CHECKING:`
    TASKS = LazyTable(read, {"reverse": "tpu_rl.tasks.reverse"})
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")


def exports(package: str, file: str) -> None:
    """Let a package have the names that its `if TYPE_CHECKING:` block imports.

    A name stays what it is there, also if a module of the package has the same name:
    `tpu_rl.algos.grpo` is the function, and `from tpu_rl.algos.grpo import grpo` reads the module.

    Args:
        file: the `__file__` of the package. Its block has only `from MODULE import NAME [as NAME]`.
    """
    block = next(
        node
        for node in ast.parse(Path(file).read_text(encoding="utf-8")).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    places = {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    class Package(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name not in places:
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            module, member = places[name]
            value = vars(importlib.import_module(module))[member]
            super().__setattr__(name, value)
            return value

        def __setattr__(self, name: str, value: Any) -> None:
            # Importing a module binds its name in its package.
            if not (name in places and isinstance(value, ModuleType)):
                super().__setattr__(name, value)

        def __dir__(self) -> list[str]:
            return sorted({*super().__dir__(), *places})

    sys.modules[package].__class__ = Package


def name_of(class_name: str, suffix: str) -> str:
    """Return the name of a row by the class of its settings: mini_llm of MiniLlmConfig.

    A class with a colon in its name is of a file of the user, and its row has the same name.
    """
    if ":" in class_name:
        return class_name
    return re.sub(r"(?<!^)(?=[A-Z])", "_", class_name.removesuffix(suffix)).lower()


class LazyTable(MutableMapping[str, T]):
    """Name -> value, where reading a value first imports the module that has it.

    Names, their number and `in` need no import. A test may set a value.
    """

    def __init__(self, read: Callable[[ModuleType, str], T], modules: Mapping[str, str]):
        """Make a table.

        Args:
            read: (module, name) -> value.
            modules: name -> the module that has the value of the name.
        """
        self._read = read
        self._modules = dict(modules)
        self._values: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name not in self._values:
            self._values[name] = self._read(importlib.import_module(self._modules[name]), name)
        return self._values[name]

    def __setitem__(self, name: str, value: T) -> None:
        self._modules.setdefault(name, "")
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        del self._modules[name]
        self._values.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._modules

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def loaded(self) -> list[T]:
        """List the values that were read so far."""
        return list(self._values.values())
