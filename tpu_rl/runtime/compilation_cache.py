"""A cache of compiled programs in the user's cache folder, so that later runs start sooner.

JAX_COMPILATION_CACHE_DIR names another folder, of any size. JAX_ENABLE_COMPILATION_CACHE=0 switches
the cache off. No failure here stops a run: without a folder, everything is compiled again.

Each entry of our folder ends with its SHA-256. JAX has none: zstandard, which it uses where that is
installed, decompresses flipped bits without an error, and a wrong program computes wrong numbers.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from pathlib import Path
from typing import Any

import filelock
import jax
from jax._src import compilation_cache as jax_cache
from jax._src import compiler as jax_compiler
from jax._src.compilation_cache_interface import CacheInterface

from tpu_rl.runtime import processes
from tpu_rl.storage import user_cache

MAX_BYTES = 4 * 2**30
"""The least recently used programs beyond this size are deleted."""
MIN_COMPILE_SECONDS = 0.2
"""Programs that compile faster are not kept. JAX's default of 1 s would leave out most programs of
a default run."""
LOCK_SECONDS = 10.0
"""Seconds to wait for other processes that clean the folder."""
MARK = b"tpu_rl sha256 "
"""The beginning of the end of an entry; its digest follows."""
END_BYTES = len(MARK) + hashlib.sha256().digest_size


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
    check_entries(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))


def fit_processes() -> None:
    """Adapt the cache to a run of several processes, once their devices are there.

    On CPUs it is switched off: a program that XLA loads from a cache has lost the order of the
    collectives inside of its loops, so that it hangs beside one that another process compiled.
    Elsewhere every process writes, and not only the first, so that each host finds its programs in
    its own folder when the run starts again. Hosts that share the folder lock it.
    """
    if processes.count() == 1:
        return
    if jax.default_backend() == "cpu":
        jax.config.update("jax_enable_compilation_cache", False)
        jax_cache.reset_cache()
    elif processes.index():
        jax_compiler._cache_write = _write


def _write(
    key: str, seconds: float, module: str, backend: Any, executable: Any, host_callbacks: Any
) -> None:
    """Write an entry, as JAX's function of the first process does."""
    if host_callbacks or seconds < jax.config.values["jax_persistent_cache_min_compile_time_secs"]:
        return
    try:
        jax_cache.put_executable_and_time(key, module, executable, backend, int(seconds))
    except Exception as error:
        print(f"warning: {module} is not kept for the next run: {error}", file=sys.stderr)


def check_entries(folder: Path) -> None:
    """Make JAX write and compare our checksums in this folder, and in no other.

    JAX has no public way to do so. Without the function that this replaces, entries have no
    checksums, and the folder is not used.
    """
    open_cache = jax_cache.get_file_cache

    def open_checked(path: str) -> Any:
        opened = open_cache(path)
        if opened is None or path != str(folder):
            return opened
        return CheckedEntries(opened[0], folder), path

    jax_cache.get_file_cache = open_checked


class CheckedEntries(CacheInterface):
    """A cache of JAX whose entries end with a checksum. A damaged one is dropped."""

    def __init__(self, entries: Any, folder: Path):
        self._entries = entries
        self._folder = folder
        self._path = entries._path

    def get(self, key: str) -> bytes | None:
        """Return an entry, or None if it is missing or not what was written."""
        written = self._entries.get(key)
        if written is None:
            return None
        value = written[:-END_BYTES]
        if written[-END_BYTES:] == end_of(value):
            return value
        name = key.rpartition("-")[0] or key
        print(
            f"warning: {name} is compiled again: its entry in the cache is damaged", file=sys.stderr
        )
        for kind in ("cache", "atime"):
            (self._folder / f"{key}-{kind}").unlink(missing_ok=True)
        return None

    def put(self, key: str, value: bytes) -> None:
        """Write an entry."""
        self._entries.put(key, value + end_of(value))


def end_of(value: bytes) -> bytes:
    """Return the end of an entry."""
    return MARK + hashlib.sha256(value).digest()


def default_folder(root: Path = Path("/")) -> Path:
    """Return the cache folder of this user for machines with this processor.

    Homes may be shared by several kinds of machines, and JAX's cache keys do not contain the
    instruction set of a CPU. Raises RuntimeError if the user has no home.
    """
    info = root / "proc/cpuinfo"
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    prefixes = ("model name", "flags", "Features", "CPU part")
    features = {line for line in lines if line.startswith(prefixes)}
    machine = " ".join([platform.machine(), platform.processor(), *sorted(features)])
    machine += MARK.decode()  # Entries of earlier versions have no checksums.
    return user_cache.folder() / f"compiled-{hashlib.sha256(machine.encode()).hexdigest()[:8]}"


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
