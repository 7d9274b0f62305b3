"""This machine: its devices, memory, processor cores and disk space."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import jax

from tpu_rl import jax_versions
from tpu_rl.errors import MachineError, typed_command

TPU_DEVICES = ("/dev/accel", "/dev/vfio/")
THREADS_PER_DEVICE = 16
"""Threads of the CPU's pool per virtual device: as many collectives of a device may wait for other
devices at once."""
MAX_THREADS = 256
"""The most threads that XLA takes."""

_IMPORT_TIME = time.monotonic()


def peak_memory_bytes() -> int:
    """Return the peak memory of the fullest accelerator, or of this process on a CPU."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [stat["peak_bytes_in_use"] for stat in stats if stat and "peak_bytes_in_use" in stat]
    if peaks:
        return max(peaks)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def seconds_since_start(root: Path = Path("/")) -> float:
    """Return the age of this process in seconds, imports included.

    Without /proc, return the time since this module was imported.
    """
    stat = root / "proc/self/stat"
    if not stat.exists():
        return time.monotonic() - _IMPORT_TIME
    # proc(5): field 22, starttime, is in clock ticks after boot. The second field may hold blanks.
    fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
    start_time = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_time


# --- devices ---


def forbid_tensor_float32() -> None:
    """Let GPUs multiply float32 arrays in float32, unless the user has set a precision.

    XLA's default for them is TensorFloat-32, whose ten bits of mantissa made the log-probs of the
    sampler and of the update differ by 1e-2 in place of 2e-5 (docs/reference/attention.md).
    """
    if jax.default_backend() == "gpu" and jax.config.values["jax_default_matmul_precision"] is None:
        jax.config.update("jax_default_matmul_precision", "highest")


CUDA_DRIVERS = {"cuda13": 580, "cuda12": 525}
"""Extra of jax -> the oldest major version of NVIDIA's driver that its libraries run on."""


def unused_accelerator(root: Path = Path("/")) -> str | None:
    """Return advice if this machine has an accelerator that JAX does not use, else None."""
    if jax.default_backend() != "cpu":
        return None
    driver = root / "proc/driver/nvidia/version"
    if driver.exists():
        accelerator = "an NVIDIA GPU"
        found = re.search(r" (\d+)\.\d", driver.read_text(encoding="utf-8", errors="replace"))
        version = int(found[1]) if found else max(CUDA_DRIVERS.values())
        extra = next((name for name, least in CUDA_DRIVERS.items() if version >= least), "")
        if not extra:
            return (
                f"{accelerator} is here but jax uses the CPU: its driver {version} is too old, "
                f"install {min(CUDA_DRIVERS.values())} or newer"
            )
    elif any((root / "dev").glob("accel[0-9]*")) or any((root / "dev/vfio").glob("[0-9]*")):
        extra = "tpu"
        accelerator = "a TPU"
    else:
        return None
    package = f"jax[{extra}]=={jax.__version__}"
    return f'{accelerator} is here but jax uses the CPU{_misfit()}: pip install "{package}"'


def _misfit() -> str:
    """Return the installed plugin of jax that is not of jax's own version, "" if none is."""
    for name in ("jax-cuda13-plugin", "jax-cuda12-plugin"):
        for found in importlib.metadata.distributions(name=name):
            if found.version != jax.__version__:
                return f", because {name} {found.version} does not fit jax {jax.__version__}"
    return ""


def warn_of_unused_accelerators() -> None:
    """Print a warning if this machine has an accelerator that JAX does not use."""
    if advice := unused_accelerator():
        print(f"warning: {advice}", file=sys.stderr)


def cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def thread_pool_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables to set before JAX starts, so that CPU devices do not deadlock.

    XLA runs programs for CPUs on a pool with one thread per core or virtual device, and a
    collective keeps its thread until all its devices have arrived. Devices that begin independent
    collectives in different orders can fill the pool, and then none of them proceeds; XLA ends the
    process after 40 s (a "Termination timeout"). XLA takes PJRT_NPROC for the number of cores.
    """
    name = "xla_force_host_platform_device_count"
    flags = re.findall(rf"{name}=(\d+)", environment.get("XLA_FLAGS", ""))
    devices = int(environment.get("JAX_NUM_CPU_DEVICES", -1))  # JAX prefers it to the flag.
    if devices < 0:
        devices = int(flags[-1]) if flags else 1
    is_alone = devices == 1 and not jax.distributed.is_initialized()
    if "PJRT_NPROC" in environment or is_alone:
        return {}
    return {"PJRT_NPROC": str(max(cores(), min(THREADS_PER_DEVICE * devices, MAX_THREADS)))}


WITHOUT_YNNPACK = "--xla_cpu_experimental_ynn_fusion_type="
"""XLA flag: no product or sum on a CPU goes to YNNPACK, which chooses its loop by the number of
rows."""


def exact_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables to set before JAX starts, for `DecoderConfig.exact` on CPUs."""
    flags = environment.get("XLA_FLAGS", "")
    # Before 0.9.2 jax does not know the flag, and ends at one that it does not know.
    if WITHOUT_YNNPACK.rstrip("=") in flags or jax_versions.RELEASE < (0, 9, 2):
        return {}
    return {"XLA_FLAGS": f"{flags} {WITHOUT_YNNPACK}".strip()}


def claim_devices(root: Path = Path("/")) -> None:
    """Start JAX on its devices.

    Raises MachineError if that fails, which names the process that holds the TPU.
    """
    os.environ |= thread_pool_settings(os.environ)
    try:
        jax.devices()
    # JAX asserts that a platform is there if all named ones are unknown to it.
    except (RuntimeError, AssertionError) as error:
        platforms = os.environ.get("JAX_PLATFORMS")
        holders = processes_with_tpu(root)
        fix = typed_command("doctor")
        if platforms:
            fix = "unset JAX_PLATFORMS, or install its plugin, as in pip install 'jax[cuda12]'"
        if holders:
            fix = f"end the process that holds the TPU: {', '.join(holders)}"
        raise MachineError(
            "jax cannot use this machine's devices",
            where="" if platforms is None else f"JAX_PLATFORMS={platforms}",
            why=(str(error) or "no such device was found").splitlines()[0][:300],
            fix=fix,
        ) from error


def processes_with_tpu(root: Path = Path("/")) -> list[str]:
    """Return "pid 123 (python)" for each other process that has a TPU's device open.

    Only processes that this user may inspect are found.
    """
    holders = []
    for process in sorted((root / "proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            targets = [os.readlink(entry) for entry in (process / "fd").iterdir()]
            name = (process / "comm").read_text(encoding="utf-8").strip()
        except OSError:  # The process has ended, or it is another user's.
            continue
        has_tpu = any(target.startswith(TPU_DEVICES) for target in targets)
        if has_tpu and process.name != str(os.getpid()):
            holders.append(f"pid {process.name} ({name})")
    return holders


# --- disk ---


@contextmanager
def explain_full_disk() -> Iterator[None]:
    """Raise MachineError in place of an OSError that means that the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise MachineError(
            "the disk is full",
            where=str(error.filename or "the run folder"),
            fix="free some space: the same command then goes on from the last checkpoint",
        ) from error
