"""A cache of compiled programs in the user's cache folder, so that later runs start sooner.

JAX_COMPILATION_CACHE_DIR names another folder, of any size. JAX_ENABLE_COMPILATION_CACHE=0 switches
the cache off. No failure here stops a run: without a folder, everything is compiled again.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from pathlib import Path

import filelock
import jax

MAX_BYTES = 4 * 2**30
"""The least recently used programs beyond this size are deleted."""
MIN_COMPILE_SECONDS = 0.2
"""Programs that compile faster are not kept. JAX's default of 1 s would leave out most programs of
a default run."""
LOCK_SECONDS = 10.0
"""Seconds to wait for other processes that clean the folder."""


def enable() -> None:
    """Use the cache from now on, unless the user has set JAX's own options."""
    settings = jax.config.values
    if settings["jax_compilation_cache_dir"] or not settings["jax_enable_compilation_cache"]:
        return
    try:
        folder = default_folder()
        prepare(folder)
    except (OSError, RuntimeError) as error:
        print(f"warning: compiled programs are not kept for the next run: {error}", file=sys.stderr)
        return
    jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)
    jax.config.update("jax_compilation_cache_dir", str(folder))


def default_folder(root: Path = Path("/")) -> Path:
    """Return the cache folder of this user for machines with this processor.

    Homes may be shared by several kinds of machines, and JAX's cache keys do not contain the
    instruction set of a CPU. Raises RuntimeError if the user has no home.
    """
    cache_home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(cache_home) if os.path.isabs(cache_home) else Path("~/.cache").expanduser()
    info = root / "proc/cpuinfo"
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    prefixes = ("model name", "flags", "Features", "CPU part")
    features = {line for line in lines if line.startswith(prefixes)}
    machine = " ".join([platform.machine(), platform.processor(), *sorted(features)])
    return base / "tpu_rl" / f"compiled-{hashlib.sha256(machine.encode()).hexdigest()[:8]}"


def prepare(folder: Path) -> None:
    """Create the folder, and delete entries of processes that were killed while writing them.

    An entry is complete once its second file, with the time of its last use, exists. JAX's own
    cleaning would fail forever on an entry without one.

    Raises OSError if this fails, or if other users may write there: programs that are loaded from
    the folder are executed.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"others may write to {folder}")
    # This is JAX's own lock file. filelock.Timeout is an OSError.
    with filelock.FileLock(folder / ".lockfile", timeout=LOCK_SECONDS):
        for entry in folder.glob("*-cache"):
            if not entry.with_name(entry.name.removesuffix("-cache") + "-atime").exists():
                entry.unlink()
