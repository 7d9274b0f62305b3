"""The processes of one run must be alike, or they wait for each other for ever, or learn different things."""

from __future__ import annotations

import hashlib
import importlib.metadata
import secrets
import socket
import sys
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import tpu_rl
from launch.config import ExperimentConfig, to_dict
from tpu_rl import model_files, models, processes
from tpu_rl.errors import InputError, MachineError

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "grain", "transformers", "tokenizers")
"""Whose versions must be the same everywhere."""

MEGABYTE = 2**20

PATIENCE = 30.0
"""Seconds until a file that one host wrote is seen by all: NFS clients look for new names no more often than that."""


def require_the_same(config: ExperimentConfig) -> None:
    """Raises InputError on all processes where one has another configuration, code or packages than the first.

    All of them call it together, here as everywhere in this module. No device is touched.
    """
    require_alike(identity(config) if processes.count() > 1 else {})


def require_alike(settings: Mapping[str, str]) -> None:
    """Raises InputError on all processes where one of them has other settings, by name, than the first."""
    if processes.count() == 1:
        return
    everywhere = processes.gather({"host": socket.gethostname(), "settings": dict(settings)})
    for index, other in enumerate(everywhere):
        lines = differences(everywhere[0]["settings"], other["settings"])
        if lines:
            more = f"; and {len(lines) - 5} more" if len(lines) > 5 else ""
            raise InputError(
                "the processes of this run differ",
                where=f"process {index} on host {other['host']}",
                why="; ".join(lines[:5]) + more,
                fix="start every process with the same command, the same files, code and packages",
            )


def differences(first: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """What `other` has otherwise, one line each."""

    def shown(settings: Mapping[str, str], name: str) -> str:
        return settings[name][:60] if name in settings else "missing"

    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    return [f"{name} is {shown(other, name)} there and {shown(first, name)} on the first" for name in names]


def identity(config: ExperimentConfig) -> dict[str, str]:
    """Name -> value of every setting, of the code and of the packages that compute with it."""

    def flat(value: Any, name: str) -> dict[str, str]:
        if not isinstance(value, dict):
            return {name: repr(value)}
        return {k: v for key, inner in value.items() for k, v in flat(inner, f"{name}.{key}".strip(".")).items()}

    code = 0
    for folder in (Path(tpu_rl.__file__).parent, Path(__file__).parent):
        for file in sorted(folder.rglob("*.py")):
            code = zlib.crc32(file.read_bytes(), code)
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return flat(to_dict(config), "") | versions | {"code": f"{code:08x}", "python": sys.version.split()[0]}


def require_alike_models(directories: Iterable[Path]) -> None:
    """Raises InputError where model directories, or those of the bases that adapters among them name, hold other files,
    by size, first and last megabyte: each process reads its devices' part of the weights from its own host's files."""
    if processes.count() == 1:
        return
    found = {}
    for directory in directories:
        for place in (directory, *([models.base_directory(directory)] if models.is_adapter(directory) else [])):
            for path in model_files.files(place):
                with path.open("rb") as file:
                    ends = zlib.crc32(file.read(MEGABYTE))
                    file.seek(max(path.stat().st_size - MEGABYTE, 0))
                    found[str(path)] = f"{path.stat().st_size} bytes, {zlib.crc32(file.read(MEGABYTE), ends):08x}"
    # Paths may differ: a hub's cache lies in each user's home.
    require_alike({f"model file {Path(path).name} ({number})": it for number, (path, it) in enumerate(found.items())})


def require_alike_rewards(names: Iterable[str]) -> None:
    """Raises InputError where the FILE.py of a FILE.py:function differs: each process scores completions of its own.
    What such a file imports is not looked at."""
    if processes.count() == 1:
        return
    files = dict.fromkeys(name.rpartition(":")[0] for name in names if ".py:" in name)
    contents = {name: Path(name).expanduser().read_bytes() for name in files}
    digests = {name: hashlib.sha256(content).hexdigest()[:16] for name, content in contents.items()}
    require_alike({f"reward file {name}": f"{len(contents[name])} bytes, {digest}" for name, digest in digests.items()})


def require_alike_devices() -> None:
    """Raises InputError where processes have other kinds or numbers of devices, MachineError where the devices count
    the processes in another order than they were started in."""
    if processes.count() == 1:
        return
    devices = jax.local_devices()
    require_alike({"the devices": f"{len(devices)} x {devices[0].device_kind}"})
    orders: Sequence[Sequence[int]] = processes.gather([processes.index(), jax.process_index()])
    if any(started != counted for started, counted in orders):
        raise MachineError(
            "the devices count the processes in another order than they were started in",
            where=", ".join(f"process {started} is the devices' {counted}" for started, counted in orders)[:200],
            fix="give each process the --process-id that its devices have, or none",
        )


def require_shared(run_dir: Path) -> None:
    """Raises InputError where not every process sees the run folder that the first one works in."""
    if processes.count() == 1:
        return
    name = processes.from_first(lambda: f".shared_{secrets.token_hex(8)}")
    if processes.index() == 0:
        (run_dir / name).touch()
    processes.gather(None)
    deadline = time.monotonic() + PATIENCE
    while not (seen := (run_dir / name).exists()) and time.monotonic() < deadline:
        time.sleep(0.2)
    everywhere = processes.gather({"host": socket.gethostname(), "seen": seen})
    if processes.index() == 0:
        (run_dir / name).unlink()
    without = [one["host"] for one in everywhere if not one["seen"]]
    if without:
        raise InputError(
            "the run folder is not the same folder on all hosts",
            where=str(run_dir.absolute()),
            why=f"not seen on {', '.join(without[:8])}: every process writes its part of the checkpoints into it",
            fix="give a --run-dir on storage that all hosts share (docs/pods.md)",
        )
