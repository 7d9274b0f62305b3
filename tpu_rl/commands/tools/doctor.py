"""Check whether this machine can run training, with one line per check and a remedy for each fault.

    python launch/doctor.py [--run-dir DIR]

The exit code is 0 if a run can start and 2 if something prevents it. Lines marked "note" do not
prevent a run.
"""

from __future__ import annotations

import importlib.metadata
import locale
import os
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

from tpu_rl import wings
from tpu_rl.errors import MachineError, TpuRlError, typed_command
from tpu_rl.redaction import redact
from tpu_rl.runtime import host
from tpu_rl.storage import gcs

MIN_PYTHON = (3, 11)
GIB = 2**30
MIN_BYTES = {"memory": 2 * GIB, "disk": 2 * GIB}
"""Bytes that the shipped model needs, with room to spare. launch/plan.py tells the needs of larger
models."""
MIN_OPEN_FILES = 1024
EARLIEST_TIME = 1.75e9
"""Seconds since 1970: June 2025. A clock before it is wrong."""
EXTRAS = {"math-verify": "math", "pyarrow": "parquet", "wandb": "wandb"}
"""Package -> the extra that installs it."""
SHOWN_VARIABLES = ("JAX_PLATFORMS", "XLA_FLAGS", "PJRT_NPROC", "HF_HUB_OFFLINE")


@dataclass(frozen=True)
class Flags:
    run_dir: str = "runs"
    """The folder or bucket (gs://) in which runs will be written."""


def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    flags = tyro.cli(Flags, args=argv, prog=typed_command("doctor"), description=__doc__)
    failed = []
    for finding in examine(flags.run_dir):
        mark = "ok  "
        if finding.fix:
            mark = "FAIL" if finding.prevents_run else "note"
        print(redact(f"{mark} {finding.name:<16} {finding.result}"))
        if finding.fix:
            print(redact(f"     {'':<16} -> {finding.fix}"))
        if mark == "FAIL":
            failed.append(finding.name)
    print(f"this machine cannot run yet: {', '.join(failed)}" if failed else "this machine can run")
    return 2 if failed else 0


class Finding(NamedTuple):
    """The result of a check."""

    name: str
    result: str
    fix: str = ""
    """The remedy; empty if nothing is wrong."""
    prevents_run: bool = True
    """True if a run cannot start while something is wrong."""


def examine(run_dir: str) -> Iterator[Finding]:
    """Run all checks, the fast ones first."""
    yield check_python(sys.version_info[:3])
    yield check_packages()
    yield check_extras()
    yield from check_system()
    yield from check_memory()
    in_bucket = gcs.is_address(run_dir)
    yield from check_disk(Path(tempfile.gettempdir() if in_bucket else run_dir))
    if in_bucket:
        yield check_bucket(run_dir)
    yield check_sandbox()
    yield check_model_cache()
    yield from check_devices()


# --- software ---


def check_python(version: tuple[int, ...]) -> Finding:
    """Check the version of Python."""
    minimum = ".".join(map(str, MIN_PYTHON))
    fix = "" if version >= MIN_PYTHON else f"install Python {minimum} or newer"
    return Finding("python", ".".join(map(str, version)), fix)


def check_packages() -> Finding:
    """Check the installed packages against the requirements of the installed tpu_rl."""
    try:
        lines = importlib.metadata.requires("tpu_rl") or []
    except importlib.metadata.PackageNotFoundError:
        return Finding("packages", "tpu_rl itself is not installed", "pip install -e .")
    requirements = [Requirement(line) for line in lines]
    core = [requirement for requirement in requirements if requirement.marker is None]
    wrong = [
        f"{requirement} ({installed_version(requirement.name) or 'absent'})"
        for requirement in core
        if not is_satisfied(requirement)
    ]
    num_right = len(core) - len(wrong)
    result = f"{num_right} of {len(core)} as required, jax {installed_version('jax')}"
    fix = f"pip install -e .   for {', '.join(wrong)}" if wrong else ""
    return Finding("packages", result, fix)


def is_satisfied(requirement: Requirement) -> bool:
    """Return True if a suitable version of a package is installed."""
    version = installed_version(requirement.name)
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def installed_version(name: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_extras() -> Finding:
    """List the optional packages that are not installed."""
    absent = [
        f"{name} [{extra}]" for name, extra in EXTRAS.items() if installed_version(name) is None
    ]
    result = f"not installed: {', '.join(absent)}" if absent else "all installed"
    return Finding("extras", result)


def check_sandbox() -> Finding:
    """Check whether programs that a model writes can be confined, as `code_grpo` requires."""
    refusal = wings.MODULES["sandbox"].refusal()
    if not refusal:
        return Finding("sandbox", "model-written programs can be confined")
    fix = "for code_grpo: allow user namespaces, on Linux on x86-64"
    return Finding("sandbox", refusal, fix, prevents_run=False)


def check_system() -> Iterator[Finding]:
    """Check the encoding, the clock, the limits and the environment."""
    encoding = locale.getencoding()
    is_utf8 = encoding.lower().replace("-", "") == "utf8"
    fix = "" if is_utf8 else "export PYTHONUTF8=1"
    yield Finding("text encoding", encoding, fix, prevents_run=False)

    # Certificates and the cache of compiled programs depend on the clock.
    fix = "" if time.time() > EARLIEST_TIME else "set the clock: it stands before June 2025"
    yield Finding("clock", time.strftime("%Y-%m-%d %H:%M"), fix, prevents_run=False)

    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_unlimited = limit == resource.RLIM_INFINITY
    is_enough = is_unlimited or limit >= MIN_OPEN_FILES
    fix = "" if is_enough else f"ulimit -n {MIN_OPEN_FILES}"
    yield Finding("open files", "no limit" if is_unlimited else str(limit), fix)

    settings = [
        f"{name}={os.environ[name][:60]}" for name in SHOWN_VARIABLES if os.environ.get(name)
    ]
    yield Finding("environment", " ".join(settings) or "nothing set")
    has_token = os.environ.get("HF_TOKEN")
    yield Finding("hub token", "set" if has_token else "none: gated models need HF_TOKEN")


# --- memory and disk ---


def check_memory() -> Iterator[Finding]:
    """Check the processor cores and the free memory of the host."""
    yield Finding("processor cores", str(host.cores()))
    free = available_memory()
    if free is not None:
        minimum = MIN_BYTES["memory"]
        fix = ""
        if free < minimum:
            fix = f"end other programs: {gibibytes(minimum)} are needed at least"
        yield Finding("host memory", f"{gibibytes(free)} free", fix)


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that programs can still get from the machine and its container.

    None if the system does not say.
    """
    info = root / "proc/meminfo"
    if not info.exists():
        return None
    line = next(line for line in info.read_text().splitlines() if line.startswith("MemAvailable"))
    free = 1024 * int(line.split()[1])
    limit = root / "sys/fs/cgroup/memory.max"
    used = root / "sys/fs/cgroup/memory.current"
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free


def gibibytes(count: float) -> str:
    """Format a number of bytes."""
    return f"{count / GIB:.1f} GiB"


def check_disk(run_dir: Path) -> Iterator[Finding]:
    """Check the free space and the file systems of run folders and of temporary files."""
    folder = _nearest_existing(run_dir.absolute())
    free = shutil.disk_usage(folder).free
    minimum = MIN_BYTES["disk"]
    fix = ""
    if free < minimum:
        fix = f"free some, or give another --run-dir: {gibibytes(minimum)} at least"
    yield Finding("disk", f"{gibibytes(free)} free at {folder}", fix)
    yield check_writing("run folder", folder)
    yield check_writing("temporary files", Path(tempfile.gettempdir()))


def _nearest_existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


def check_bucket(address: str) -> Finding:
    """Check whether objects can be written, read and deleted."""
    began = time.perf_counter()
    name = f"doctor-{secrets.token_hex(4)}"
    try:
        objects = gcs.Store(address, gcs.SHORT_RETRIES)
        objects.write(name, bytes(2**20))
        objects.read(name)
        objects.delete(name)
    except TpuRlError as error:
        return Finding("store", f"{error.what}: {error.why}", error.fix)
    seconds = time.perf_counter() - began
    return Finding("store", f"1 MiB written, read and deleted in {seconds:.1f} s at {address}")


def check_writing(name: str, folder: Path) -> Finding:
    """Check whether a file can be written, flushed to the disk and renamed, as a checkpoint is."""
    began = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as temporary:
            path = Path(temporary) / "written"
            with path.open("wb") as file:
                file.write(bytes(2**20))
                file.flush()
                os.fsync(file.fileno())
            path.rename(Path(temporary) / "renamed")
            descriptor = os.open(temporary, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    except OSError as error:
        fix = "give a --run-dir, or a TMPDIR, that you may write to"
        return Finding(name, f"{folder}: {error.strerror}", fix)
    milliseconds = 1000 * (time.perf_counter() - began)
    return Finding(name, f"{folder}: write, fsync and rename work, {milliseconds:.0f} ms")


def check_model_cache() -> Finding:
    """Check whether models can be downloaded to the hub's cache."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    result = f"{cache}, not there yet"
    if cache.is_dir():
        result = f"{cache}, {len(list(cache.glob('models--*')))} models"
    is_writable = os.access(_nearest_existing(cache), os.W_OK)
    fix = "" if is_writable else "export HF_HOME=... to a folder that you may write to"
    return Finding("model cache", result, fix, prevents_run=False)


# --- devices ---


def check_devices() -> Iterator[Finding]:
    """Check whether JAX can use this machine's devices."""
    try:
        host.claim_devices()
    except MachineError as error:
        # This is the command that other commands advise.
        fix = error.fix if error.fix != typed_command("doctor") else "install jax for this machine"
        yield Finding("devices", f"{error.what}: {error.why}", fix or "see the message")
        return
    import jax

    local = jax.local_devices()
    yield Finding(
        "devices", f"{jax.device_count()} x {local[0].device_kind} ({jax.default_backend()})"
    )
    advice = host.unused_accelerator()
    result = "one is not used" if advice else "none is left unused"
    yield Finding("accelerator", result, advice or "", prevents_run=False)
    stats = local[0].memory_stats() or {}
    if "bytes_limit" in stats:
        limit = gibibytes(stats["bytes_limit"])
        used = gibibytes(stats["bytes_in_use"])
        yield Finding("device memory", f"{limit} each, {used} in use")
    yield check_compiling()


def check_compiling() -> Finding:
    """Compile and run one step of gradient descent; its loss must fall."""
    import jax
    import jax.numpy as jnp

    def loss(weights: jax.Array) -> jax.Array:
        return jnp.square(jnp.tanh(weights @ weights) - 0.5).mean()

    began = time.perf_counter()
    weights = jnp.full((64, 64), 0.01)
    try:
        step = jax.jit(lambda weights: weights - jax.grad(loss)(weights))
        before = float(loss(weights))
        after = float(loss(step(weights)))
    except RuntimeError as error:  # XLA's: no compiler, no memory, or a driver that does not fit.
        reason = str(error).splitlines()[0][:200]
        return Finding("compiling", reason, "reinstall jax for this device: see README.md")
    seconds = time.perf_counter() - began
    fix = "" if after < before else f"wrong numbers: loss {before} then {after}"
    return Finding("compiling", f"a step takes {seconds:.1f} s to compile and run", fix)
