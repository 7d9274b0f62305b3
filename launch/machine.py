"""What this machine has, as far as a run must know."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import jax


def peak_memory_bytes() -> int:
    """The most memory used so far: of the fullest accelerator, or of this process on a CPU."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
    if peaks:
        return max(peaks)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


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
