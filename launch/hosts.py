"""The processes of one run must have the same configuration and the same code, or they wait for each other for ever."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import tpu_rl
from launch.config import ExperimentConfig, to_dict
from tpu_rl.errors import InputError

PLACES = 4096


def require_the_same(config: ExperimentConfig) -> None:
    """Raises InputError on all processes where one has another configuration, code or jax than the first.

    All of them call it together.
    """
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils  # imported here: it takes a while, and one process never needs it

    settings = identity(config)
    others = differing(settings, multihost_utils.process_allgather(fingerprints(settings)))
    if others:
        here = [f"{name} is {settings[name][:60]} here" for name in others[:5] if name in settings]
        raise InputError(
            "the processes of this run differ",
            where=f"process {jax.process_index()}",
            why="; ".join(here) or "one of them has settings that this one lacks",
            fix="start every process with the same command, the same code and the same packages",
        )


def identity(config: ExperimentConfig) -> dict[str, str]:
    """Name -> value of every setting, of the code and of jax."""

    def flat(value: Any, name: str) -> dict[str, str]:
        if not isinstance(value, dict):
            return {name: repr(value)}
        return {k: v for key, inner in value.items() for k, v in flat(inner, f"{name}.{key}".strip(".")).items()}

    code = 0
    for folder in (Path(tpu_rl.__file__).parent, Path(__file__).parent):
        for file in sorted(folder.rglob("*.py")):
            code = zlib.crc32(file.read_bytes(), code)
    return flat(to_dict(config), "") | {"code": f"{code:08x}", "jax": jax.__version__}


def fingerprints(settings: Mapping[str, str]) -> np.ndarray:
    """[PLACES] uint32: each setting in the place of its name, so that arrays of other names can be compared too."""
    found = np.zeros(PLACES, np.uint32)
    for name, value in settings.items():
        found[_place(name)] ^= np.uint32(zlib.crc32(f"{name}={value}".encode()))
    return found


def differing(settings: Mapping[str, str], gathered: np.ndarray) -> list[str]:
    """gathered [processes, PLACES] -> the names of our settings that some process has not like the first.

    One that others alone have appears as "?".
    """
    places = {int(place) for place in np.flatnonzero((gathered != gathered[:1]).any(0))}
    names = [name for name in settings if _place(name) in places]
    return names + ["?"] * bool(places - {_place(name) for name in names})


def _place(name: str) -> int:
    return zlib.crc32(name.encode()) % PLACES
