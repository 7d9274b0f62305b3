"""Can this machine run? One line a check, with a remedy for each that fails.

    python launch/doctor.py [--run-dir DIR]

Exit code 0 if a run can start, 2 if something stands in its way; what is only worth knowing does not count.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import locale
import os
import resource
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import tyro
from packaging.requirements import Requirement

from launch import machine
from tpu_rl import sandbox, stores
from tpu_rl.errors import MachineError, TpuRlError
from tpu_rl.redaction import redact

PYTHON = (3, 11)
GIB = 2**30
NEEDED = {"memory": 2 * GIB, "disk": 2 * GIB}
"""Bytes: for the shipped model with room to spare; a large model needs far more, which launch/plan.py tells."""
OPEN_FILES = 1024
EXTRAS = {"math-verify": "math", "pyarrow": "parquet", "wandb": "wandb"}
"""Package -> the extra that installs it."""


@dataclass(frozen=True)
class Flags:
    run_dir: str = "runs"
    """Where runs will be written."""


class Finding(NamedTuple):
    name: str
    found: str
    fix: str = ""
    """How to mend it, where something is wrong."""
    stops: bool = True
    """Whether what is wrong stops a run."""


def main(argv: list[str]) -> int:
    flags = tyro.cli(Flags, args=argv, prog="launch/doctor.py", description=__doc__)
    findings = list(examine(flags.run_dir))
    for finding in findings:
        mark = "ok  " if not finding.fix else "FAIL" if finding.stops else "note"
        print(redact(f"{mark} {finding.name:<16} {finding.found}"))
        if finding.fix:
            print(redact(f"     {'':<16} -> {finding.fix}"))
    failed = [finding.name for finding in findings if finding.fix and finding.stops]
    print(f"this machine cannot run yet: {', '.join(failed)}" if failed else "this machine can run")
    return 2 if failed else 0


def examine(run_dir: str) -> Iterator[Finding]:
    """Every check, the quick ones first."""
    yield python(sys.version_info[:3])
    yield packages()
    yield extras()
    yield from system()
    yield from memory()
    in_store = stores.is_address(run_dir)
    yield from disk(Path(tempfile.gettempdir() if in_store else run_dir))
    if in_store:
        yield store(run_dir)
    yield programs()
    yield from caches()
    yield from devices()


# --- software ----------------------------------------------------------------------------------------------------


def python(version: tuple[int, ...]) -> Finding:
    found = ".".join(map(str, version))
    return Finding("python", found, "" if version >= PYTHON else f"install Python {PYTHON[0]}.{PYTHON[1]} or newer")


def packages() -> Finding:
    """What setup.py asks for, as the installed package has it."""
    try:
        asked = [Requirement(line) for line in importlib.metadata.requires("tpu_rl") or []]
    except importlib.metadata.PackageNotFoundError:
        return Finding("packages", "tpu_rl itself is not installed", "pip install -e .")
    core = [need for need in asked if need.marker is None]
    wrong = [f"{need} ({installed(need.name) or 'absent'})" for need in core if not satisfied(need)]
    found = f"{len(core) - len(wrong)} of {len(core)} as asked, jax {installed('jax')}"
    return Finding("packages", found, f"pip install -e .   for {', '.join(wrong)}" if wrong else "")


def satisfied(need: Requirement) -> bool:
    version = installed(need.name)
    return version is not None and need.specifier.contains(version, prereleases=True)


def installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def extras() -> Finding:
    absent = [f"{name} [{extra}]" for name, extra in EXTRAS.items() if installed(name) is None]
    return Finding("extras", f"not installed: {', '.join(absent)}" if absent else "all installed")


def programs() -> Finding:
    """Whether what a model writes can be run (`code_grpo`)."""
    reason = sandbox.refusal()
    fix = "for code_grpo: allow user namespaces, on Linux on x86-64" if reason else ""
    return Finding("sandbox", reason or "model-written programs can be confined", fix, stops=False)


def system() -> Iterator[Finding]:
    encoding = locale.getencoding()
    is_utf8 = encoding.lower().replace("-", "") == "utf8"
    yield Finding("text encoding", encoding, "" if is_utf8 else "export PYTHONUTF8=1", stops=False)
    # Certificates and the cache of compiled programs go by the clock.
    now = time.strftime("%Y-%m-%d %H:%M")
    yield Finding(
        "clock", now, "" if time.time() > 1.75e9 else "set the clock: it stands before June 2025", stops=False
    )
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = files == resource.RLIM_INFINITY or files >= OPEN_FILES
    found = "no limit" if files == resource.RLIM_INFINITY else str(files)
    yield Finding("open files", found, "" if enough else f"ulimit -n {OPEN_FILES}")
    named = [name for name in ("JAX_PLATFORMS", "XLA_FLAGS", "PJRT_NPROC", "HF_HUB_OFFLINE") if os.environ.get(name)]
    yield Finding("environment", " ".join(f"{name}={os.environ[name][:60]}" for name in named) or "nothing set")
    yield Finding("hub token", "set" if os.environ.get("HF_TOKEN") else "none: gated models need HF_TOKEN")


# --- memory and disk ---------------------------------------------------------------------------------------------


def memory() -> Iterator[Finding]:
    yield Finding("processor cores", str(machine.cores()))
    free = available_memory()
    if free is not None:
        fix = "" if free >= NEEDED["memory"] else f"end other programs: {size(NEEDED['memory'])} are needed at least"
        yield Finding("host memory", f"{size(free)} free", fix)


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that programs can still get, of the machine and of its container; None where the system does not say."""
    info = root / "proc/meminfo"
    if not info.exists():
        return None
    line = next(line for line in info.read_text().splitlines() if line.startswith("MemAvailable"))
    free = 1024 * int(line.split()[1])
    limit, used = root / "sys/fs/cgroup/memory.max", root / "sys/fs/cgroup/memory.current"
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free


def size(count: float) -> str:
    return f"{count / GIB:.1f} GiB"


def disk(run_dir: Path) -> Iterator[Finding]:
    place = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    fix = "" if free >= NEEDED["disk"] else f"free some, or give another --run-dir: {size(NEEDED['disk'])} at least"
    yield Finding("disk", f"{size(free)} free at {place}", fix)
    yield writing("run folder", place)
    yield writing("temporary files", Path(tempfile.gettempdir()))


def store(address: str) -> Finding:
    """Whether objects can be written, read and deleted there."""
    began, name = time.perf_counter(), f"doctor-{secrets.token_hex(4)}"
    try:
        objects = stores.Store(address, stores.BRIEF)
        objects.write(name, bytes(2**20))
        objects.read(name)
        objects.delete(name)
    except TpuRlError as error:
        return Finding("store", f"{error.what}: {error.why}", error.fix)
    return Finding("store", f"1 MiB written, read and deleted in {time.perf_counter() - began:.1f} s at {address}")


def writing(name: str, place: Path) -> Finding:
    """Whether files can be written, forced to the disk and renamed there: what a checkpoint does."""
    began = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=place) as folder:
            whole = Path(folder) / "whole"
            with whole.open("wb") as file:
                file.write(bytes(2**20))
                file.flush()
                os.fsync(file.fileno())
            whole.rename(Path(folder) / "renamed")
            directory = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
    except OSError as error:
        return Finding(name, f"{place}: {error.strerror}", "give a --run-dir, or a TMPDIR, that you may write to")
    took = 1000 * (time.perf_counter() - began)
    return Finding(name, f"{place}: write, fsync and rename work, {took:.0f} ms")


def caches() -> Iterator[Finding]:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    found = f"{cache}, {len(list(cache.glob('models--*')))} models" if cache.is_dir() else f"{cache}, not there yet"
    place = next(path for path in (cache, *cache.parents) if path.exists())
    fix = "" if os.access(place, os.W_OK) else "export HF_HOME=... to a folder that you may write to"
    yield Finding("model cache", found, fix, stops=False)


# --- devices -----------------------------------------------------------------------------------------------------


def devices() -> Iterator[Finding]:
    try:
        machine.claim_devices()
    except MachineError as error:
        yield Finding("devices", f"{error.what}: {error.why}", error.fix or "see the message")
        return
    import jax

    local = jax.local_devices()
    yield Finding("devices", f"{jax.device_count()} x {local[0].device_kind} ({jax.default_backend()})")
    advice = machine.unused_accelerator()
    yield Finding("accelerator", "one is not used" if advice else "none is left unused", advice or "", stops=False)
    stats = local[0].memory_stats() or {}
    if "bytes_limit" in stats:
        yield Finding("device memory", f"{size(stats['bytes_limit'])} each, {size(stats['bytes_in_use'])} in use")
    yield compiling()


def compiling() -> Finding:
    """One step of gradient descent, compiled and run; its loss must fall."""
    import jax
    import jax.numpy as jnp

    def loss(weights: jax.Array) -> jax.Array:
        return jnp.square(jnp.tanh(weights @ weights) - 0.5).mean()

    began = time.perf_counter()
    weights = jnp.full((64, 64), 0.01)
    try:
        step = jax.jit(lambda weights: weights - jax.grad(loss)(weights))
        before, after = float(loss(weights)), float(loss(step(weights)))
    except RuntimeError as error:  # XLA's errors: no compiler, no memory, a driver that does not fit
        return Finding("compiling", str(error).splitlines()[0][:200], "reinstall jax for this device: see README.md")
    found = f"a step takes {time.perf_counter() - began:.1f} s to compile and run"
    return Finding("compiling", found, "" if after < before else f"wrong numbers: loss {before} then {after}")


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main(sys.argv[1:]))
