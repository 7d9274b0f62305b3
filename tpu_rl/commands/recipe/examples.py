"""The recipes that ship with the package, with their data: `tpu-rl recipe --copy-to FOLDER`."""

from __future__ import annotations

import shutil
from pathlib import Path

import tpu_rl
from tpu_rl.errors import InputError

FOLDER = "recipes"
"""Its name in a checkout, and inside the installed package (see setup.py)."""


def source() -> Path:
    """Return the folder of the examples, of the installed package or of the checkout."""
    package = Path(tpu_rl.__file__).parent
    installed = package / FOLDER
    return installed if installed.is_dir() else package.parent / FOLDER


def copy(target: Path) -> None:
    """Write the examples to a new folder.

    Raises InputError if the folder exists, or there are no examples.
    """
    if target.exists():
        raise InputError(f"{target} exists", where="--copy-to", fix="name a new folder")
    if not source().is_dir():
        raise InputError("this installation has no recipes", fix="install a wheel of tpu_rl")
    shutil.copytree(source(), target, ignore=shutil.ignore_patterns("__pycache__"))
