"""Environments by name: `--environment NAME`, FAMILY:NAME or FILE.py:Class."""

from __future__ import annotations

from typing import Any

from tpu_rl import user_code
from tpu_rl.environments import contract
from tpu_rl.environments.contract import Factories
from tpu_rl.errors import InputError, did_you_mean, unknown_name
from tpu_rl.user_code import PYTHON, Passed
from tpu_rl.wings import ENVIRONMENTS, FAMILIES

PASSED = Passed("environment", "make the same call of tpu_rl.train(..., environment=CLASS)")


def passed_class(name: str) -> Any:
    """Return the class, or the dict of classes, that a Python program passed; else the name."""
    return PASSED.find(name) if name.startswith(PYTHON) else name


def load(name: str) -> Factories:
    """Return the factories of a name.

    Raises InputError if there is no such environment, or its file does not load.
    """
    family, colon, rest = name.partition(":")
    if colon and family in FAMILIES:
        return contract.as_factories(FAMILIES[family](rest), name)
    if is_file(name):
        return contract.as_factories(_member(name), name)
    if name in ENVIRONMENTS:
        return contract.as_factories(ENVIRONMENTS[name], name)
    names = [*ENVIRONMENTS, *(f"{family}:NAME" for family in FAMILIES), "FILE.py:Class"]
    raise unknown_name("environment", name, names, "--environment")


def is_file(name: str) -> bool:
    """Return True if a name is that of a class in a file."""
    return name.rpartition(":")[0].endswith(".py")


def _member(path: str) -> Any:
    """Return the object that a path FILE.py:NAME names."""
    file, _, name = path.rpartition(":")
    members = user_code.load_members(file, "environment")
    if name not in members:
        classes = [
            key
            for key, value in members.items()
            if isinstance(value, type) and value.__module__ == members["__name__"]
        ]
        raise InputError(
            f"no class {name!r} in the environment file",
            where=f"{file} defines {', '.join(classes) or 'no class'}",
            fix=did_you_mean(name, classes),
        )
    return members[name]
