"""Algorithms by name, also those in files of the user: `--algorithm NAME|FILE.py:FACTORY`.

A factory is what `docs/how-to/adding_an_algorithm.md` describes: a function (config, roles,
sampling) -> Algorithm, whose first parameter is annotated with the class of its configuration.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpu_rl import user_code
from tpu_rl.algos import ALGORITHMS, Row
from tpu_rl.errors import InputError, unknown_name
from tpu_rl.types import Algorithm


def find(name: str) -> type:
    """Find the class of the configuration of an algorithm.

    Args:
        name: the name of a factory in ALGORITHMS, such as "grpo", or "FILE.py:FACTORY".

    Raises:
        InputError: if there is no such algorithm.
    """
    if ":" in name:
        return from_file(name)
    if name.endswith(".py"):
        fix = f"name its factory: {name}:FACTORY"
        raise InputError(f"the file {name!r} is no algorithm", where="--algorithm", fix=fix)
    if name not in ALGORITHMS:
        raise unknown_name(
            "algorithm", name, (*sorted(ALGORITHMS), "FILE.py:factory"), "--algorithm"
        )
    return ALGORITHMS[name].config


def from_file(path: str) -> type:
    """Load the factory that "FILE.py:FACTORY" names, register it, and return its configuration.

    The result is a subclass of the configuration that the factory takes. Its name is the absolute
    path, so that config.yaml tells where the algorithm comes from.

    Raises:
        InputError: if the file does not load, or holds no such factory.
    """
    factory = user_code.load_function(path, "algorithm")
    config = config_class(factory, path)
    file_name, _, name = path.rpartition(":")
    full_name = f"{Path(file_name).expanduser().absolute()}:{name}"
    # Two factories may take the same configuration, and each needs its own row of ALGORITHMS.
    subclass = type(full_name, (config,), {"__doc__": config.__doc__})
    registered = dataclasses.dataclass(frozen=True)(subclass)
    ALGORITHMS[full_name] = Row(registered, _checked(factory, path))
    return registered


def _checked(factory: Callable[..., Any], path: str) -> Callable[..., Algorithm]:
    """Return the factory with an InputError in place of a result that is no Algorithm."""

    @functools.wraps(factory)
    def build(*arguments: Any) -> Algorithm:
        result = factory(*arguments)
        if not isinstance(result, Algorithm):
            raise _wrong_form(path, f"it returned {result!r:.60}")
        return result

    return build


def config_class(factory: Callable[..., Any], path: str) -> type:
    """Find the class that annotates the first parameter of a factory.

    Raises:
        InputError: if the factory or the class is not of the form that algorithms have.
    """
    try:
        parameters = list(inspect.signature(factory).parameters)
        config = typing.get_type_hints(factory).get(parameters[0]) if parameters else None
    except (NameError, TypeError, ValueError) as error:
        raise _wrong_form(path, f"its annotations cannot be read: {error}") from None
    if len(parameters) != 3:
        raise _wrong_form(path, f"its parameters are ({', '.join(parameters)})")
    # Without a decorator of its own, the settings of a subclass would be no fields.
    options = vars(config).get("__dataclass_params__") if isinstance(config, type) else None
    if not isinstance(config, type) or options is None:
        raise _wrong_form(path, f"the annotation of {parameters[0]} is no dataclass: {config}")
    if not options.frozen:
        raise _wrong_form(path, f"{config.__name__} is not frozen")
    missing = [name for name in ("experience", "roles") if not hasattr(config, name)]
    if missing:
        raise _wrong_form(path, f"{config.__name__} has no {' and no '.join(missing)}")
    try:
        config()
    except TypeError as error:
        raise _wrong_form(path, f"a setting has no default: {error}") from None
    return config


def display_name(config: Any) -> str:
    """Give the name of a configuration's algorithm for people, such as "Grpo"."""
    return type(config).__name__.rpartition(":")[2].removesuffix("Config")


def _wrong_form(path: str, why: str) -> InputError:
    return InputError(
        "this is not the factory of an algorithm",
        where=path,
        why=why,
        fix="write def NAME(config: CONFIG, roles, sampling) -> Algorithm, with CONFIG a frozen "
        "dataclass as in docs/how-to/adding_an_algorithm.md",
    )
