"""Compiled programs are kept in the user's cache folder, where nothing that is wrong with it stops
a run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tests.fixtures.runs import flip
from tpu_rl.runtime import compilation_cache, host

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, sys
import jax, jax.numpy as jnp
from jax import monitoring
from tpu_rl.runtime import compilation_cache
compilation_cache.enable()
found = []
monitoring.register_event_listener(lambda name, **_: found.append(name))
jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((4, 4))).block_until_ready()
print(sum(name.endswith("cache_hits") for name in found), jax.config.jax_compilation_cache_dir)
"""


def started(home: Path, **env: str) -> subprocess.Popen[str]:
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XDG_"))
    }
    whole = (
        clean
        | {
            "HOME": str(home),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PLATFORMS": "cpu",
        }
        | env
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM], text=True, cwd=ROOT, env=whole, **pipes
    )


def result(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """(programs that were found, the cache's folder, what was said)."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    hits, folder = out.split()
    return int(hits), folder, err


@pytest.mark.slow
def test_programs_are_found_again_also_by_processes_side_by_side(tmp_path):
    """Also beside half an entry of a killed process, which would keep JAX from writing any."""
    folder = compilation_cache.default_folder()
    folder = tmp_path / ".cache" / "tpu_rl" / folder.name
    folder.mkdir(mode=0o700, parents=True)
    (folder / "jit_half-0123-cache").write_bytes(b"half")
    first = [started(tmp_path) for _ in range(2)]
    for process in first:
        _, place, said = result(process)
        assert (place, said) == (str(folder), "")
    assert not list(folder.glob("jit_half*"))
    assert len(list(folder.glob("*-cache"))) == len(list(folder.glob("*-atime"))) > 0
    hits, _, said = result(started(tmp_path))
    assert hits > 0
    assert said == ""


@pytest.mark.slow
def test_a_flipped_entry_is_compiled_again(tmp_path):
    """zstandard decompresses many of them without an error."""
    _, folder, _ = result(started(tmp_path))
    entries = sorted(Path(folder).glob("*-cache"))
    whole = {path.name: path.read_bytes() for path in entries}
    for path in entries:
        flip(path)
    hits, _, said = result(started(tmp_path))
    assert hits == 0
    assert said.count("is compiled again: its entry in the cache is damaged") == len(entries) > 0
    hits, _, said = result(started(tmp_path))
    assert (hits, said) == (len(entries), "")
    assert {path.name for path in Path(folder).glob("*-cache")} == set(whole)


@pytest.mark.slow
def test_the_users_own_word_stands(tmp_path):
    own = started(tmp_path, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "own"))
    off = started(tmp_path, JAX_ENABLE_COMPILATION_CACHE="0")
    assert result(own) == (0, str(tmp_path / "own"), "")
    assert result(off) == (0, "None", "")
    assert list((tmp_path / "own").iterdir())
    assert not (tmp_path / ".cache").exists()


def test_a_home_that_cannot_be_written_is_one_warning(tmp_path):
    (tmp_path / ".cache").write_text("a file where a folder should be")
    hits, folder, said = result(started(tmp_path))
    assert (hits, folder) == (0, "None")
    assert re.fullmatch(r"warning: compiled programs are not kept for the next run: .*\n", said)


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path):
    """Whoever can write there can have this process execute what he likes."""
    folder = tmp_path / "compiled"
    compilation_cache.prepare(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    with pytest.raises(PermissionError, match="others may write"):
        compilation_cache.prepare(folder)


def test_the_folder_is_the_users_and_the_machines(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "proc").mkdir()
    places = set()
    for flags in ("sse avx2", "sse avx2 avx512f"):
        (tmp_path / "proc" / "cpuinfo").write_text(
            f"processor : 0\nmodel name : one\nflags : {flags}\n"
        )
        places.add(compilation_cache.default_folder(tmp_path))
    assert len(places) == 2
    assert {place.parent for place in places} == {tmp_path / "tpu_rl"}
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the standard says: ignore it
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert compilation_cache.default_folder().parent == tmp_path / "home" / ".cache" / "tpu_rl"


def test_tests_keep_out_of_the_users_folder():
    """Those in this process, and those that start others."""
    ours = jax.config.values["jax_compilation_cache_dir"]
    assert ours == os.environ["JAX_COMPILATION_CACHE_DIR"]
    compilation_cache.enable()
    assert jax.config.values["jax_compilation_cache_dir"] == ours


def test_the_time_since_the_start_of_the_program():
    program = (
        "import time; time.sleep(1)\n"
        "from tpu_rl.runtime import host; print(host.seconds_since_start())"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    ).stdout
    assert float(said) > 1
    assert host.seconds_since_start() > float(said)


SECOND_PROCESS = """
import sys
import jax, jax.numpy as jnp
from jax._src import distributed
from tpu_rl.runtime import compilation_cache, processes
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
distributed.global_state.process_id = 1
processes.count = lambda: 2
processes.index = lambda: 1
jax.default_backend = lambda: sys.argv[2]
compilation_cache.fit_processes()
jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((4, 4))).block_until_ready()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "writes"), [("tpu", True), ("cpu", False)])
def test_each_host_keeps_its_programs_but_not_those_of_cpus(tmp_path, backend, writes):
    """JAX itself writes on the first process alone. Programs of several CPU processes hang if one
    of them loads what the other compiles."""
    command = [sys.executable, "-c", SECOND_PROCESS, str(tmp_path), backend]
    subprocess.run(command, check=True, cwd=ROOT, timeout=120)
    assert any(tmp_path.glob("*-cache")) == writes
