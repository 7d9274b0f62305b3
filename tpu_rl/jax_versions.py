"""Differences between the versions of jax that setup.py allows. No other module asks for one."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from typing import Any

import jax
import jax.numpy as jnp
from packaging.requirements import Requirement
from packaging.version import Version

RELEASE = Version(jax.__version__).release


def itemsize_bits(dtype: Any) -> int:
    """Return the bits of an element."""
    if RELEASE >= (0, 9):
        return jax.dtypes.itemsize_bits(dtype)
    if dtype == jnp.bool_:
        return 8
    return (jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).bits


def tpu_info() -> Any | None:
    """Return jax's description of the TPU that a kernel is traced for; None if there is none."""
    if RELEASE < (0, 9):
        return None
    from jax.experimental.pallas import tpu as pltpu

    try:
        return pltpu.get_tpu_info()
    except ValueError:  # Not a TPU.
        return None


@functools.cache
def can_compile_kernels() -> bool:
    """Return False, and print why, if the installed libtpu cannot compile jax's Pallas kernels.

    A libtpu does not read those of a jax that names a later one ("Unsupported Mosaic version").
    """
    # None: the machine has its own.
    installed = next((one.version for one in importlib.metadata.distributions(name="libtpu")), None)
    named = map(Requirement, importlib.metadata.requires("jax") or ())
    for least in [str(one.specifier).strip("=.*") for one in named if one.name == "libtpu"]:
        if installed and Version(installed) < Version(least):
            why = (
                f"note: attention is XLA's, because libtpu {installed} does not read kernels of "
                f'jax {jax.__version__}: pip install "libtpu=={least}"'
            )
            print(why, file=sys.stderr)
            return False
    return True


def allow_absent_devices() -> None:
    """Let programs be compiled for devices that are not here.

    Before 0.9, jax asks them for a client, which they do not have, to learn whether a layout is
    the default one, and ends with signal 11. Here every layout is.
    """
    if RELEASE < (0, 9):
        from jax._src.interpreters import pxla

        pxla.is_default_layout = lambda *of: True
