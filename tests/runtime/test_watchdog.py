"""A run that stands still is ended with exit code 75 and the stacks; one that is slow, waits or was
stopped is not."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from tests.fixtures.runs import TINY, digest, rows_of
from tpu_rl.commands import config as configuration
from tpu_rl.commands import run
from tpu_rl.commands.checks import preflight
from tpu_rl.errors import InputError
from tpu_rl.runtime import watchdog
from tpu_rl.runtime.watchdog import WatchdogConfig

ROOT = Path(__file__).parents[2]


def ended(program: str, *arguments: str, seconds: float = 120) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own, which compiles what the tests' own process compiles, and
    no more."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(jax.config.values["jax_compilation_cache_dir"])}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True, text=True, timeout=seconds, cwd=ROOT, env=os.environ | cache,
    )  # fmt: skip


IN_C = """
import hashlib, sys
from pathlib import Path
from tpu_rl.runtime import watchdog
with watchdog.watch(watchdog.WatchdogConfig(0.01), Path(sys.argv[1]), "THE COMMAND"):
    watchdog.mark("the rollout of step 7")
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # minutes outside Python, as on a device
"""


def test_a_wait_outside_python_ends_with_the_stacks_and_one_message(tmp_path):
    process = ended(IN_C, str(tmp_path))
    assert process.returncode == 75
    kept = (tmp_path / watchdog.STACKS).read_text()
    assert "without progress at the rollout of step 7" in kept
    assert '"<string>", line 7' in kept
    assert '"<string>", line 7' in process.stderr
    message = process.stderr[process.stderr.index("error:") :]
    assert message.startswith("error: stalled at the rollout of step 7: no progress for 1 s")
    assert str(tmp_path / watchdog.STACKS) in message
    assert "--watchdog.minutes 0.02" in message
    assert message.endswith("to go on: THE COMMAND\n")
    assert (
        "warning: 0 s without progress at the rollout of step 7; the run is ended after 1 s"
        in process.stderr
    )


def test_a_run_folder_that_cannot_be_written_does_not_keep_it(tmp_path):
    process = ended(IN_C, str(tmp_path / "gone"))
    assert process.returncode == 75
    assert "gone/stacks.txt could not be written" in process.stderr


HOLDS_THE_INTERPRETER = """
import re, sys
from pathlib import Path
from tpu_rl.runtime import watchdog
watchdog.REPORT_SECONDS = 0.0
with watchdog.watch(watchdog.WatchdogConfig(0.01), Path("."), ""):
    re.match("(a*)*b", "a" * 60)
"""


def test_code_that_never_lets_go_of_the_interpreter_ends_too():
    process = ended(HOLDS_THE_INTERPRETER)
    assert process.returncode == 1
    assert '"<string>", line 7' in process.stderr


MOVES = """
import time
from pathlib import Path
from tpu_rl.runtime import watchdog
with watchdog.watch(watchdog.WatchdogConfig(1 / 30), Path("."), ""):
    print("ready", flush=True)
    for _ in range(16):
        time.sleep(0.25)
        watchdog.beat()
print("done")
time.sleep(3)  # after the run nobody looks on
"""


@pytest.mark.slow
def test_a_process_that_is_slow_but_moves_goes_on_also_when_it_was_stopped():
    """Ctrl-Z for longer than the limit: time in which the process did not run is no silence."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", MOVES], text=True, cwd=ROOT, **pipes)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(3)
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=60) == ("done\n", "")
    assert process.returncode == 0


LEAVES_CHILDREN = """
import sys, time
from pathlib import Path
from tpu_rl.runtime import watchdog
from tpu_rl.rewards import worker_pool
worker = worker_pool.Worker(sys.argv[1] + "/mine.py:spawn")
print(worker._process.popen.pid, int(worker.call({"completions": ["x"]}, 1, 60)[0]), flush=True)
with watchdog.watch(watchdog.WatchdogConfig(0.01), Path(sys.argv[1]), ""):
    time.sleep(60)
"""


def test_no_reward_worker_and_none_of_its_children_is_left_behind(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import subprocess\n"
        "def spawn(completions):\n"
        "    return [float(subprocess.Popen(['sleep', '100'], stdout=subprocess.DEVNULL).pid)]\n"
    )
    process = ended(LEAVES_CHILDREN, str(tmp_path))
    assert process.returncode == 75
    worker, child = map(int, process.stdout.split())
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in (worker, child)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Neither gone nor a zombie that nobody has waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- whole runs ---

STALLS = """
import sys, time
import jax, numpy as np
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
from tpu_rl.commands import run
from tpu_rl import wings, rewards
from tpu_rl.train import update_step

def reward(prompts, completions, **columns):
    if len(completions) == 16:
        batches.append(None)
    if len(batches) == 3:
        time.sleep(1000)
    return arithmetic.score(prompts, completions, **columns)

def make_update_step(*arguments):
    update = make(*arguments)

    def stalls(state, batch):
        if state.step == 2:
            shape = jax.ShapeDtypeStruct((), np.float32)
            never = jax.jit(lambda: jax.pure_callback(lambda: time.sleep(1000), shape))
            never().block_until_ready()
        return update(state, batch)

    return stalls

batches, arithmetic, make = [], wings.VERIFIERS["arithmetic"], update_step.make_update_step
if sys.argv[1] == "reward":
    wings.VERIFIERS["arithmetic"] = arithmetic._replace(score=reward)
else:
    update_step.make_update_step = make_update_step
sys.exit(run.main(sys.argv[2:]))
"""
FLAGS = [*TINY, "--steps", "4", "--evaluation.rows", "0"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert run.main([*FLAGS, "--run-dir", str(run_dir)]) == 0
    return run_dir


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("what", "at", "frame"),
    [
        pytest.param("reward", "the rewards of step 3", "reward", marks=pytest.mark.slow),
        pytest.param("device", "the update of step 3", "stalls", marks=pytest.mark.nightly),
    ],
)
def test_a_run_that_stalls_goes_on_to_the_same_bits(whole, tmp_path, what, at, frame):
    run_dir = tmp_path / "run"
    command = [*FLAGS, "--run-dir", str(run_dir), "--watchdog.minutes", "0.35"]
    process = ended(STALLS, what, *command)
    assert process.returncode == 75, process.stderr
    assert f"error: stalled at {at}: no progress for 2" in process.stderr
    assert process.stderr.endswith(f"to go on: python launch/run.py {' '.join(command)}\n")
    assert f"in {frame}" in (run_dir / watchdog.STACKS).read_text()
    assert [row["step"] for row in rows_of(run_dir)] == [0, 1, 2]

    assert run.main([*FLAGS, "--run-dir", str(run_dir)]) == 0
    assert digest(run_dir) == digest(whole)
    assert rows_of(run_dir) == rows_of(whole)


# --- settings ---


@pytest.mark.slow
def test_zero_waits_for_ever(tmp_path):
    program = IN_C.replace("0.01", "0").replace(
        "hashlib.pbkdf2_hmac", "__import__('time').sleep(3) #"
    )
    process = ended(program, str(tmp_path))
    assert (process.returncode, process.stderr) == (0, "")


@pytest.mark.parametrize("minutes", [-1.0, float("nan")])
def test_a_limit_that_cannot_be_is_refused(minutes):
    with pytest.raises(InputError, match="--watchdog.minutes"):
        WatchdogConfig(minutes)


def test_rewards_that_may_take_longer_than_the_watchdog_waits_are_refused():
    config = configuration.parse([*TINY, "--reward", "mine.py:score", "--watchdog.minutes", "5"])
    with pytest.raises(InputError, match="--watchdog.minutes 20"):
        preflight.check_rewards(config, [])
