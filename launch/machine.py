"""What this machine has, as far as a run must know."""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path

import jax

from tpu_rl.errors import MachineError

TPU_DEVICES = ("/dev/accel", "/dev/vfio/")


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


def claim_devices(root: Path = Path("/")) -> None:
    """Starts jax on its devices. Raises MachineError where it cannot, naming the process that holds a TPU."""
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
