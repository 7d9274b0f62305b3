"""Settings of every test: silent broadcasting is an error, float32 means float32, a program is compiled once."""

import atexit
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
# Nearly all time goes to compiling what runs for milliseconds; also in the processes that tests start.
jax.config.update("jax_disable_most_optimizations", True)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

# What a script starts in the background ignores Ctrl-C, which some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Runs of the whole program compile the same steps again and again: within one session they need not.
_cache = tempfile.mkdtemp(prefix="tpu_rl_xla_")
atexit.register(shutil.rmtree, _cache, ignore_errors=True)
for name, value in (
    ("jax_compilation_cache_dir", _cache),
    ("jax_persistent_cache_min_compile_time_secs", 0.03),
    ("jax_persistent_cache_min_entry_size_bytes", -1),
):
    jax.config.update(name, value)
    os.environ[name.upper()] = str(value)  # of the processes that tests start, too


@pytest.fixture(autouse=True, scope="module")
def _programs_are_let_go() -> Iterator[None]:
    """Each compiled program keeps memory maps, of which a process may have 65,530: all tests together make more, and
    die with a segmentation fault."""
    yield
    jax.clear_caches()
    gc.collect()
