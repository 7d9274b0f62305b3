"""What this machine has, as far as a run must know."""

from __future__ import annotations

import errno
import os
import re
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import jax

from tpu_rl.errors import MachineError

TPU_DEVICES = ("/dev/accel", "/dev/vfio/")
THREADS_A_DEVICE, MOST_THREADS = 16, 256
"""Of a CPU's pool: how many collectives of a device may wait for others at once, and what XLA takes at most."""


def peak_memory_bytes() -> int:
    """The most memory used so far: of the fullest accelerator, or of this process on a CPU."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
    if peaks:
        return max(peaks)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


_IMPORTED = time.monotonic()


def seconds_since_start(root: Path = Path("/")) -> float:
    """How long this process has lived, its imports included; without /proc, since this module was imported."""
    if not (root / "proc/self/stat").exists():
        return time.monotonic() - _IMPORTED
    # proc(5): field 22, starttime, in clock ticks after boot; the second field may hold blanks.
    started = int((root / "proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def unused_accelerator(root: Path = Path("/")) -> str | None:
    """How to mend it, where the machine has an accelerator that the installed jax does not use; else None."""
    if jax.default_backend() != "cpu":
        return None
    if (root / "proc/driver/nvidia/version").exists():
        return 'an NVIDIA GPU is here but jax uses the CPU: pip install -e ".[cuda]"'
    if any((root / "dev").glob("accel[0-9]*")) or any((root / "dev/vfio").glob("[0-9]*")):
        return 'a TPU is here but jax uses the CPU: pip install -e ".[tpu]"'
    return None


def warn_of_unused_accelerators() -> None:
    advice = unused_accelerator()
    if advice:
        print(f"warning: {advice}", file=sys.stderr)


def cores() -> int:
    """Of the processor, that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def threads_to_wait_in(environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment before jax starts, so that devices of CPUs do not block each other.

    XLA runs programs for CPUs on a pool of as many threads as there are cores or virtual devices, and a collective
    keeps its thread until all its devices have come. Devices that begin independent collectives in different orders can
    so fill the pool, and none goes on; XLA ends the process after 40 s (a "Termination timeout"). PJRT_NPROC is what it
    takes for the number of cores.
    """
    flags = re.findall(r"xla_force_host_platform_device_count=(\d+)", environment.get("XLA_FLAGS", ""))
    devices = int(environment.get("JAX_NUM_CPU_DEVICES", -1))  # which jax prefers to the flag
    if devices < 0:
        devices = int(flags[-1]) if flags else 1
    if "PJRT_NPROC" in environment or (devices == 1 and not jax.distributed.is_initialized()):
        return {}
    return {"PJRT_NPROC": str(max(cores(), min(THREADS_A_DEVICE * devices, MOST_THREADS)))}


def claim_devices(root: Path = Path("/")) -> None:
    """Starts jax on its devices. Raises MachineError where it cannot, naming the process that holds a TPU."""
    os.environ |= threads_to_wait_in(os.environ)
    try:
        jax.devices()
    except RuntimeError as error:
        holders = processes_that_hold_a_tpu(root)
        raise MachineError(
            "jax cannot use this machine's devices",
            where=f"JAX_PLATFORMS={os.environ['JAX_PLATFORMS']}" if "JAX_PLATFORMS" in os.environ else "",
            why=str(error).splitlines()[0][:300],
            fix=f"end the process that holds the TPU: {', '.join(holders)}" if holders else "python launch/doctor.py",
        ) from error


def processes_that_hold_a_tpu(root: Path = Path("/")) -> list[str]:
    """ "pid 123 (python)" for each process, of those that we may look at, with a TPU's device open."""
    found = []
    for process in sorted((root / "proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            targets = [os.readlink(entry) for entry in (process / "fd").iterdir()]
            name = (process / "comm").read_text(encoding="utf-8").strip()
        except OSError:  # it has ended, or is another user's
            continue
        if process.name != str(os.getpid()) and any(target.startswith(TPU_DEVICES) for target in targets):
            found.append(f"pid {process.name} ({name})")
    return found


@contextmanager
def no_space_is_said() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        fix = "free some space: the same command then goes on from the last checkpoint"
        raise MachineError("the disk is full", where=str(error.filename or "the run folder"), fix=fix) from error
