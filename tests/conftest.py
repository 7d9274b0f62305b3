"""Settings of every test: silent broadcasting is an error, float32 means float32, and compiled
programs and bytecode are kept between sessions."""

import atexit
import fnmatch
import functools
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import filelock
import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests import shapes
from tests.fixtures import library_caches, program_cache, several

shapes.install()

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
# Compiling takes longer than running: the programs run for milliseconds.
jax.config.update("jax_disable_most_optimizations", True)
library_caches.share_ir_contexts()
library_caches.remember_what_tyro_reads()
if several.QUICK_COMPILER not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {several.QUICK_COMPILER}".strip()
# Processes that tests start find the programs of the tests in the cache only if they compile alike.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"

# A shell starts background jobs with Ctrl-C ignored; some tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    cache_dir = program_cache.default_dir()
    try:
        program_cache.prepare(cache_dir)
    except OSError as error:
        print(f"compiled programs are not kept for the next session: {error}")
        cache_dir = Path(tempfile.mkdtemp(prefix="tpu_rl_xla_"))
        atexit.register(shutil.rmtree, cache_dir, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache_dir)

if sys.dont_write_bytecode:
    # No bytecode beside the sources, but processes that compile all of them take twice as long.
    sys.pycache_prefix = str(Path(os.environ["JAX_COMPILATION_CACHE_DIR"]) / "bytecode")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    os.environ["PYTHONDONTWRITEBYTECODE"] = ""
    sys.dont_write_bytecode = False

# The environment is for processes that tests start; the workers of pytest-xdist find the first
# process's folder there, too.
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


NIGHTLY = Path(__file__).with_name("nightly.txt")


@functools.cache
def nightly_patterns() -> list[str]:
    """Read the patterns of node ids behind tests/ that are nightly."""
    lines = NIGHTLY.read_text(encoding="utf-8").splitlines()
    return [line.replace("[", "[[]") for line in lines if line and not line.startswith("#")]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what nightly.txt names, before pytest deselects by marks."""
    files = {pattern.split("::")[0] for pattern in nightly_patterns()}
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if name.split("::")[0] in files and any(
            fnmatch.fnmatchcase(name, pattern) for pattern in nightly_patterns()
        ):
            item.add_marker(pytest.mark.nightly)


_died: set[str] = set()
"""Ids of tests during which a worker of pytest-xdist died."""


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport, sched) -> None:
    """Run a test once more during which its worker died, and say so.

    XLA ends a process of thousands of programs now and then. A test that always ends its process
    fails the second time.
    """
    if crashitem in _died:
        return
    _died.add(crashitem)
    sched.mark_test_pending(crashitem)
    report.outcome = "rerun"  # type: ignore[assignment]
    print(f"\n{crashitem}: its process died, and it runs once more", file=sys.stderr)


def pytest_collection_finish() -> None:
    """Leave modules and tests, which live to the end, out of garbage collections.

    These take half a second each otherwise, and a damaged checkpoint makes one.
    """
    gc.collect()
    gc.freeze()


# Traces are many objects, and few of them are garbage.
gc.set_threshold(50_000, 20, 50)

MEMORY_MAPS = 30_000
"""Memory maps that a process may have after a test module without dropping compiled programs."""


def memory_maps() -> int | None:
    """Return how many memory maps this process has, or None where the system does not say."""
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except FileNotFoundError:
        return None


@pytest.fixture(autouse=True, scope="module")
def _drop_compiled_programs() -> Iterator[None]:
    """Drop the programs of a test module after it, if there are many.

    Each compiled program keeps memory maps, of which a process may have 65,530. All tests together
    make more, and the process dies with a segmentation fault.
    """
    yield
    maps = memory_maps()
    if maps is None or maps > MEMORY_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True)
def _no_algorithm_of_a_file_stays_registered() -> Iterator[None]:
    """Drop the algorithms that a test has registered by loading files of users."""
    algos = sys.modules.get("tpu_rl.algos")
    before = set(algos.ALGORITHMS) if algos else None
    yield
    if algos:
        for config in set(algos.ALGORITHMS) - before:
            del algos.ALGORITHMS[config]


@pytest.fixture(scope="session")
def whole(tmp_path_factory) -> Path:
    """The folder of a run of four steps of TINY that nothing disturbed. Do not change it.

    The workers of pytest-xdist share it: the first that needs it makes it.
    """
    # Imported here because it takes seconds, and most tests do not need it.
    from tests.fixtures.runs import TINY
    from tpu_rl.commands import run

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with filelock.FileLock(folder / "whole.lock"):
        run_dir = folder / "whole" / "run"
        if not (run_dir / "summary.json").exists():
            assert run.main([*TINY, "--steps", "4", "--run-dir", str(run_dir)]) == 0
    return run_dir


@pytest.fixture
def no_program_cache() -> Iterator[None]:
    """Compile without the folder: jax can write what the TPU's compiler makes but not read it."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
