"""Compiled programs are kept between runs, in the user's cache folder: the second run begins to learn much sooner.

JAX_COMPILATION_CACHE_DIR names another folder, of any size; JAX_ENABLE_COMPILATION_CACHE=0 switches it off. Nothing
here can keep a run from running: without a folder everything is compiled, as ever.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from pathlib import Path

import filelock
import jax

MOST_BYTES = 4 * 2**30
"""Beyond which goes what was used longest ago."""
WORTH_KEEPING = 0.2
"""Seconds of compilation; jax's own limit of 1 s would leave out most programs of a default run."""
PATIENCE = 10.0
"""Seconds to wait for other processes that look after the folder."""


def use() -> None:
    """From now on, unless the user has said where compiled programs go, or that they go nowhere."""
    settings = jax.config.values
    if settings["jax_compilation_cache_dir"] or not settings["jax_enable_compilation_cache"]:
        return
    try:
        folder = place()
        prepare(folder)
    except (OSError, RuntimeError) as error:
        print(f"warning: compiled programs are not kept for the next run: {error}", file=sys.stderr)
        return
    jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", WORTH_KEEPING)
    jax.config.update("jax_compilation_cache_dir", str(folder))


def place(root: Path = Path("/")) -> Path:
    """The folder: of this user, and of machines like this one, as homes may be shared by several.

    jax knows a program's device, but of a CPU not which instructions it has. Raises RuntimeError without a home.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(given) if os.path.isabs(given) else Path("~/.cache").expanduser()
    info = root / "proc/cpuinfo"
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    told = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    machine = " ".join([platform.machine(), platform.processor(), *sorted(told)])
    return base / "tpu_rl" / f"compiled-{hashlib.sha256(machine.encode()).hexdigest()[:8]}"


def prepare(folder: Path) -> None:
    """Makes the folder, and takes out what a process that was killed while it wrote has left.

    An entry is whole when its second file, with the time of its use, stands beside it; on one without jax's own
    clean-up would fail for ever. Raises OSError where that cannot be done, or others may write there: what a process
    loads from the folder, it executes.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"others may write to {folder}")
    with filelock.FileLock(folder / ".lockfile", timeout=PATIENCE):  # jax's own; its Timeout is an OSError
        for entry in folder.glob("*-cache"):
            if not entry.with_name(entry.name.removesuffix("-cache") + "-atime").exists():
                entry.unlink()
