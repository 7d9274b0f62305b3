"""Checks that the processes of one run have the same configuration, code, packages and files.

Each check is collective: all processes call it at the same place. See
`tpu_rl.runtime.agreement` for the comparison itself.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from tpu_rl import models, untrusted_files
from tpu_rl.errors import MachineError
from tpu_rl.plain_values import flatten
from tpu_rl.runtime import processes
from tpu_rl.runtime.agreement import require_equal

PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
    "grain",
    "transformers",
    "tokenizers",
)
"""The packages whose versions must be the same on every process."""

MEGABYTE = 2**20


def require_same_run(settings: Mapping[str, Any], code: Iterable[Path]) -> None:
    """Raise InputError if any process has other settings, code or package versions.

    Touches no device.

    Args:
      code: Python files, and folders of them, that must be the same.
    """
    require_equal(identity(settings, code) if processes.count() > 1 else {})


def identity(settings: Mapping[str, Any], code: Iterable[Path]) -> dict[str, str]:
    """Return name -> value of every setting, of the code and of the packages it computes with."""
    checksum = 0
    for path in code:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            checksum = zlib.crc32(file.read_bytes(), checksum)
    return {
        **{name: repr(value) for name, value in flatten(settings).items()},
        **{name: importlib.metadata.version(name) for name in PACKAGES},
        "code": f"{checksum:08x}",
        "python": sys.version.split()[0],
    }


def require_same_models(directories: Iterable[Path]) -> None:
    """Raise InputError if model directories, or the bases of adapters among them, differ.

    Each process reads the weights of its devices from the files of its own host. Files are
    compared by size and by their first and last megabyte.
    """
    if processes.count() == 1:
        return
    fingerprints: dict[str, str] = {}
    for directory in directories:
        folders = [directory]
        if models.is_adapter(directory):
            folders.append(models.base_directory(directory))
        for folder in folders:
            for path in untrusted_files.files(folder):
                fingerprints[str(path)] = _fingerprint(path)
    # Paths may differ, since a hub's cache lies in each user's home: compare names and order.
    require_equal(
        {
            f"model file {Path(path).name} ({number})": fingerprint
            for number, (path, fingerprint) in enumerate(fingerprints.items())
        }
    )


def _fingerprint(path: Path) -> str:
    """Return the size of a file and a checksum of its first and last megabyte."""
    size = path.stat().st_size
    with path.open("rb") as file:
        checksum = zlib.crc32(file.read(MEGABYTE))
        file.seek(max(size - MEGABYTE, 0))
        checksum = zlib.crc32(file.read(MEGABYTE), checksum)
    return f"{size} bytes, {checksum:08x}"


def require_same_reward_files(names: Iterable[str]) -> None:
    """Raise InputError if the FILE.py of a reward FILE.py:function differs between processes.

    Each process scores its own completions. Modules that such a file imports are not compared.
    """
    if processes.count() == 1:
        return
    files = dict.fromkeys(name.rpartition(":")[0] for name in names if ".py:" in name)
    contents = {name: Path(name).expanduser().read_bytes() for name in files}
    require_equal(
        {
            f"reward file {name}": f"{len(content)} bytes, "
            f"{hashlib.sha256(content).hexdigest()[:16]}"
            for name, content in contents.items()
        }
    )


def require_same_devices() -> None:
    """Check the devices of all processes.

    Raises:
      InputError: processes have different kinds or numbers of devices.
      MachineError: the devices number the processes in another order than the launcher did.
    """
    if processes.count() == 1:
        return
    devices = jax.local_devices()
    require_equal({"the devices": f"{len(devices)} x {devices[0].device_kind}"})
    orders: Sequence[Sequence[int]] = processes.gather([processes.index(), jax.process_index()])
    if any(launched != by_devices for launched, by_devices in orders):
        pairs = (f"process {launched} is the devices' {index}" for launched, index in orders)
        raise MachineError(
            "the devices number the processes in another order than they were started in",
            where=", ".join(pairs)[:200],
            fix="give each process the --process-id that its devices have, or none",
        )
