"""Checks of the shapes and types that public functions of `losses` and `algos` have in their
annotations, at every call. `install` is called before anything imports these packages."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.machinery
import inspect
import sys
import types
import typing
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from typing import Any

import jax.numpy as jnp
from jaxtyping import AbstractArray, jaxtyped

PACKAGES = ("tpu_rl.losses.", "tpu_rl.algos.")
SHAPES = "tpu_rl.losses.shapes"
DECORATOR = "__checked__"


def install() -> None:
    """Check the functions of every module of `PACKAGES` that is imported from now on."""
    if early := [name for name in sys.modules if name.startswith(PACKAGES)]:
        raise ImportError(f"imported before their shapes can be checked: {', '.join(early)}")
    sys.meta_path.insert(0, _Finder())


def checked(function: Callable) -> Callable:
    """Wrap a function: a call with wrong shapes, or one that returns some, is a TypeError."""
    names = vars(importlib.import_module(SHAPES))
    hints = {
        name: eval(text, {**function.__globals__, "Callable": Callable})
        for name, text in function.__annotations__.items()
        if any(_is_shape(names.get(word)) for word in _words(text))
    }
    if not hints:
        return function
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        with jaxtyped("context"):
            for name, value in arguments.items():
                if name in hints:
                    _require(function, name, value, hints[name])
            result = function(*args, **kwargs)
            if "return" in hints:
                _require(function, "return", result, hints["return"])
        return result

    return wrapped


def _words(annotation: str) -> list[str]:
    return [node.id for node in ast.walk(ast.parse(annotation)) if isinstance(node, ast.Name)]


def _is_shape(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, AbstractArray)


def _require(function: Callable, name: str, value: Any, hint: Any) -> None:
    if not _agrees(value, hint):
        text = function.__annotations__[name]
        shape, dtype = jnp.shape(value), getattr(value, "dtype", type(value).__name__)
        raise TypeError(f"{function.__name__}, {name}: {dtype}{list(shape)} is no {text}")


def _agrees(value: Any, hint: Any) -> bool:
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_agrees(value, argument) for argument in arguments)
    if typing.get_origin(hint) is tuple:
        return all(map(_agrees, value, arguments))
    if _is_shape(hint):
        # NumPy arrays and Python numbers count as arrays, as they do for jax.numpy.
        return value is not None and isinstance(jnp.asarray(value), hint)
    return not isinstance(hint, type) or isinstance(value, hint)


class _Loader(importlib.machinery.SourceFileLoader):
    """Decorates the public functions of a module with `checked`."""

    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        source = self.get_data(path)
        if fullname == SHAPES:
            source = source.replace(b"if TYPE_CHECKING:", b"if True:")
        tree = ast.parse(source)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                node.decorator_list.append(ast.Name(DECORATOR, ast.Load()))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module)[DECORATOR] = checked
        super().exec_module(module)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(PACKAGES):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec
