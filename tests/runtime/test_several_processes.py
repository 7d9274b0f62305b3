"""One run on several processes: the same as on one, and it ends as one. Each process has a device
of this machine's CPU and a limit of time. Which process of which run one is:
tests/runtime/test_cluster.py."""

import json
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.fixtures import several
from tests.fixtures.fake_store import FakeStore
from tests.fixtures.runs import COMPILING_RUN, TINY, TINY_PAIRS, digest, rows_of, small_q_sharp
from tests.fixtures.several import require_same_step
from tpu_rl.checkpoint import remote_run
from tpu_rl.commands import config, run
from tpu_rl.commands.tools import verify

RUN = [
    "launch/run.py",
    *TINY,
    "--batch.micro-batch-rows",
    "2",
    "--sampling.temperature",
    "1.5",
]


def one_step(tmp_path: Path, count: int, *flags: str) -> dict[str, np.ndarray]:
    out = tmp_path / f"{count}.npz"
    for ended in several.run(count, ["-m", "tests.fixtures.one_step", str(out), *flags]):
        assert ended.code == 0, ended.err[-3000:]
    with np.load(out) as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def on_one(tmp_path_factory) -> dict[str, np.ndarray]:
    return one_step(tmp_path_factory.mktemp("one"), 1)


@pytest.mark.slow
def test_two_processes_sample_score_and_learn_as_one(on_one, tmp_path):
    require_same_step(on_one, one_step(tmp_path, 2))


@pytest.mark.nightly
def test_four_processes_with_tensor_parallelism_do_too(on_one, tmp_path):
    require_same_step(on_one, one_step(tmp_path, 4, "--mesh.data", "2", "--mesh.tensor", "2"))


PICTURES = """
class Gallery:
    def __init__(self):
        self.turns = 0

    def reset(self, **row):
        self.turns = 0

    def step(self, text):
        import PIL.Image

        self.turns += 1
        if self.turns == 2:
            return "", float(len(text) % 3), True, {}
        color = (40 * (len(text) % 6), 90, 200)
        image = {"type": "image", "image": PIL.Image.new("RGB", (32, 32), color)}
        return [image, "\\n"], 0.0, False, {}
"""


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_two_processes_converse_about_images_as_one(tmp_path):
    """Each shows its own episodes' images, which both read."""
    (tmp_path / "gallery.py").write_text(PICTURES)
    flags = [
        *("pictures_look_grpo", "--model.path", "builtin:pictures", "--model.random-init"),
        *("--environment", f"{tmp_path / 'gallery.py'}:Gallery", "--environment-limits.no-isolate"),
        *("--batch.prompts", "4", "--batch.group-size", "4", "--batch.micro-batch-rows", "4"),
        *("--sampling.max-new-tokens", "40", "--sampling.temperature", "1.5"),
    ]
    one = one_step(tmp_path, 1, *flags)
    first_id = 46
    features = (one["tokens"] >= first_id).sum(1)
    assert features.min() < features.max()  # Some episodes have an image of their own.
    two = one_step(tmp_path, 2, *flags)
    # A bias of keys, and a norm behind the features, have no gradient but rounding.
    flat = {
        name for name in one if name.startswith("gradient") and np.linalg.norm(one[name]) < 1e-6
    }
    flat |= {name.replace("gradient", "params") for name in flat}
    assert {name.rpartition("['")[2] for name in flat} == {
        "vision_key_bias']",
        "vision_last_norm']",
        "vision_last_norm_bias']",
    }
    kept = one.keys() - flat
    require_same_step(*({name: arrays[name] for name in kept} for arrays in (one, two)))


# --- how it ends ---

MEETING = """
import os, signal, sys, time
import numpy as np
from jax.experimental import multihost_utils
from tpu_rl.runtime import cluster, process_group, processes
from tpu_rl.errors import InputError

def fail(error):
    raise error

kill = lambda: os.kill(os.getpid(), signal.SIGKILL)
WHAT = {
    "killed": {1: kill},
    "killed while the first is busy": {0: lambda: time.sleep(600), 1: kill},
    "first killed": {0: kill},
    "first killed while the second is busy": {0: kill, 1: lambda: time.sleep(600)},
    "error": {1: lambda: fail(InputError("a reward function failed", fix="repair it"))},
    "error everywhere": dict.fromkeys((0, 1), lambda: fail(InputError("all say the same"))),
    "bug": {1: lambda: 1 / 0},
}
member, (how,) = cluster.find(sys.argv[1:])
process_group.TIMEOUT_SECONDS = 4.0
with process_group.join(member):
    for step in range(10**6):
        if step == 3:
            WHAT[how].get(processes.index(), lambda: None)()
        multihost_utils.process_allgather(np.array(step))
        processes.any_of(False)
"""

HOST = socket.gethostname()
ENDS = {
    "killed": (
        (75, -signal.SIGKILL),
        f"error: process 1 on host {HOST} is gone: it gave no sign of life for 4 s.",
    ),
    "first killed": ((-signal.SIGKILL, 75), "error: the first process of this run is gone."),
    "error": (
        (2, 2),
        f"process 1 on host {HOST}: error: a reward function failed\n  fix: repair it\n",
    ),
    "error everywhere": ((2, 2), "error: all say the same\n"),
    "bug": ((1, 1), f"process 1 on host {HOST}: Traceback (most recent call last):\n"),
}
for busy, idle in (
    ("killed while the first is busy", "killed"),
    ("first killed while the second is busy", "first killed"),
):
    ENDS[busy] = ENDS[idle]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "codes", "said"),
    [pytest.param(how, *ends, id=how) for how, ends in ENDS.items()],
)
def test_the_end_of_one_is_the_end_of_all_in_one_message(how, codes, said):
    """With a gathering of host values and one of devices going on; each costs a second of the
    processor."""
    ended = several.run(2, ["-c", MEETING, how], limit=60)
    assert tuple(one.code for one in ended) == codes
    (speaker,) = [one.err for one in ended if one.err]
    assert speaker.startswith(said)
    assert speaker.count("rror: ") == 1
    assert ("ZeroDivisionError" in speaker) == ("Traceback" in speaker) == (how == "bug")


STALLED = (
    MEETING.replace(
        "with process_group.join(member):",
        """
from pathlib import Path
from tpu_rl.runtime import watchdog
process_group.TIMEOUT_SECONDS = 20.0
WHAT["stalled"] = {1: lambda: time.sleep(600)}
limit = watchdog.WatchdogConfig(0.05 if member.index in map(int, sys.argv[2]) else 0)
with process_group.join(member), watchdog.watch(limit, Path(sys.argv[1]), "go on"):
""",
    )
    .replace("    if step == 3", "    watchdog.beat()\n        if step == 3")
    .replace("(how,)", "(*_, how)")
)


@pytest.mark.slow
@pytest.mark.parametrize("watched", ["1", pytest.param("01", marks=pytest.mark.slow)])
def test_the_watchdog_of_one_is_the_end_of_all_in_one_message(tmp_path, watched):
    """The second stands still, the first waits for it in a collective; only the second is watched,
    or both."""
    ended = several.run(2, ["-c", STALLED, str(tmp_path), watched, "stalled"], limit=60)
    assert [one.code for one in ended] == [75, 75]
    assert not ended[1].err
    assert ended[0].err.count("error: stalled at the start: no progress for 3 s\n") == 1
    assert ("process 1 on host" in ended[0].err) >= (watched == "1")
    stacks = (tmp_path / "stacks.txt").read_text()
    assert stacks.count("without progress at the start") == len(watched)
    assert "in <lambda>" in stacks


@pytest.mark.nightly
def test_a_sigterm_to_one_before_the_first_step_ends_both_at_once(tmp_path):
    there = tmp_path / "there"
    flags = ["arithmetic_grpo", "--run-dir", str(tmp_path / "run")]
    processes = several.start(2, ["-c", COMPILING_RUN, str(there), *flags])
    deadline = time.monotonic() + 100
    while not there.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    processes[1].send_signal(signal.SIGTERM)
    first, second = several.wait(processes, 30)
    assert (first.code, second.code) == (75, 75)
    assert first.err.startswith(f"process 1 on host {HOST}: pre-empted before a step was taken")
    assert not second.err


@pytest.mark.nightly
def test_a_flag_that_differs_ends_all_before_anything_is_touched(tmp_path):
    command = [*RUN, "--steps", "1", "--run-dir", str(tmp_path / "run")]
    ended = several.wait(several.start(2, command, each=[["--seed", "0"], ["--seed", "1"]]), 120)
    assert [one.code for one in ended] == [2, 2]
    assert ended[0].err.startswith("error: the processes of this run differ\n")
    assert f"process 1 on host {HOST}\n  why: seed is 1 there and 0 on the first\n" in ended[0].err
    assert not ended[1].err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("index", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_a_process_that_waits_for_another_in_vain_says_so(index):
    program = MEETING.replace(
        "process_group.TIMEOUT_SECONDS = 4.0", "process_group.START_SECONDS = 3"
    )
    flags = ["--coordinator-address", f"127.0.0.1:{several.free_port()}", "--num-processes", "2"]
    (ended,) = several.run(1, ["-c", program, "error", *flags, "--process-id", index], limit=60)
    assert "the processes of this run did not find each other" in ended.err
    assert ended.code == 75


def test_a_port_that_is_taken_is_said(capsys):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        flags = [
            "--coordinator-address",
            f"127.0.0.1:{port}",
            "--num-processes",
            "2",
            "--process-id",
            "0",
        ]
        assert run.main([*TINY, *flags]) == 3
    assert f"port {port} is not free on this host" in capsys.readouterr().err


CHECKPOINTS = """
import pathlib, sys
import jax
import numpy as np
from tpu_rl.runtime import cluster, process_group
from tests.fixtures.runs import flip
from tpu_rl.checkpoint import manager
from tpu_rl.runtime import processes
from tpu_rl.train import sharding
from tpu_rl.errors import DamagedDataError

member, (folder,) = cluster.find(sys.argv[1:])
with process_group.join(member):
    mesh = sharding.make_mesh(fsdp=2)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    tree = {"params": sharding.put({"w": np.arange(4096, dtype=np.float32)}, rows)}
    checkpoints = manager.open_checkpoints(folder, keep=3)
    for step in (1, 2):
        checkpoints.save(step, tree, {"step": step}, wait=True)
    write, calls = checkpoints._write, []

    def fail_once_on_the_second(*arguments, **how):
        calls.append(1)
        if len(calls) > 1:
            write(*arguments, **how)
        elif processes.index() == 1:
            raise OSError(5, "a disk that fails once")

    checkpoints._write = fail_once_on_the_second
    checkpoints.save(3, tree, {"step": 3}, wait=True)
    assert len(calls) == 2
    checkpoints.wait()

    def damage(step):
        files = pathlib.Path(folder, str(step), "arrays").rglob("d/*")
        flip(max(files, key=lambda path: path.stat().st_size))

    processes.from_first(lambda: damage(3))
    asked = manager.abstract(tree)
    try:
        checkpoints.restore(checkpoints.latest(), asked)
        raise AssertionError("restored what is damaged")
    except DamagedDataError:
        checkpoints.set_aside(3)
    assert checkpoints.latest() == 2
    restored, extra = checkpoints.restore(2, asked)
    assert extra == {"step": 2}
    np.testing.assert_array_equal(sharding.to_host(restored)["params"]["w"], np.arange(4096))
    checkpoints.close()
    print("all is well")
"""


@pytest.mark.slow
def test_two_processes_save_fail_restore_and_set_aside_together(tmp_path):
    """A write that fails on one is tried again by both; a damaged step is set aside by both."""
    first, second = several.run(2, ["-c", CHECKPOINTS, str(tmp_path)], limit=200)
    assert (first.code, second.code) == (0, 0), first.err
    assert "all is well" in first.out
    assert "checkpoint 3 was not written; trying once more" in first.err
    assert (tmp_path / "damaged" / "3").is_dir()


STORED = """
import sys
import jax
import numpy as np
from jax.experimental.array_serialization import tensorstore_impl
from tpu_rl.runtime import cluster, process_group, processes
from tpu_rl.checkpoint import manager
from tpu_rl.storage import gcs
from tpu_rl.train import sharding

member, (address,) = cluster.find(sys.argv[1:])
with process_group.join(member):
    processes.from_first(lambda: gcs.Store(address).write(gcs.MARK, b""))
    mesh = sharding.make_mesh(fsdp=2)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    tree = {"params": sharding.put({"w": np.arange(4096, dtype=np.float32)}, rows)}
    checkpoints = manager.open_checkpoints(f"{address}/checkpoints")
    serialize, calls = tensorstore_impl.async_serialize, []

    def fail_once_on_the_second(*arguments, **how):
        calls.append(1)
        if len(calls) == 1 and processes.index() == 1:
            raise OSError(5, "a store that fails once")
        return serialize(*arguments, **how)

    for step in (1, 2, 3):
        checkpoints.save(step, tree, {"step": step}, wait=step < 3)
        tensorstore_impl.async_serialize = fail_once_on_the_second if step == 1 else serialize
    assert checkpoints.latest() == 3
    restored, extra = checkpoints.restore(3, manager.abstract(tree))
    assert extra == {"step": 3}
    np.testing.assert_array_equal(sharding.to_host(restored)["params"]["w"], np.arange(4096))
    checkpoints.close()
    print("all is well")
"""


@pytest.mark.slow
def test_two_processes_save_in_a_store():
    """Each its part; what fails on one is tried again by both, and leaves no litter."""
    fake = FakeStore()
    first, second = several.run(
        2, ["-c", STORED, "gs://bucket/run"], limit=200, **fake.environment()
    )
    fake.close()
    assert (first.code, second.code) == (0, 0), first.err
    assert "all is well" in first.out
    assert "checkpoint 2 was not written; trying once more" in first.err
    assert fake.names("run/checkpoints/2.json") + fake.names("run/checkpoints/3.json")
    folders = {name.split("/")[3] for name in fake.names("run/checkpoints/arrays/")}
    assert sorted(folder.partition("-")[0] for folder in folders) == ["2", "3"]
    parts = [name for name in fake.names("run/checkpoints/arrays/3-") if "/c/" in name]
    assert [name.rpartition("/")[2] for name in parts] == ["0", "1"]


# --- runs ---


def command(run_dir: Path, steps: int = 3) -> list[str]:
    return [*RUN, "--steps", str(steps), "--run-dir", str(run_dir)]


def start_until(run_dir: Path, rows: int) -> list[subprocess.Popen]:
    """Two processes of a run that has written so many rows."""
    processes = several.start(2, command(run_dir))
    deadline = time.monotonic() + 600
    metrics = run_dir / "metrics.jsonl"
    while not (metrics.exists() and len(metrics.read_bytes().splitlines()) >= rows):
        assert time.monotonic() < deadline
        if any(process.poll() is not None for process in processes):
            raise AssertionError([ended.err for ended in several.wait(processes)])
        time.sleep(0.02)
    return processes


def go_on(count: int, run_dir: Path, steps: int = 3, *flags: str) -> str:
    """What the first process says of a run that comes to its end; the others say nothing."""
    first, *others = several.run(count, [*command(run_dir, steps), *flags], limit=900)
    assert [first.code, *(other.code for other in others)] == [0] * count, first.err
    assert not any(other.out + other.err for other in others)
    return first.out


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run of three steps on two processes that nothing disturbed."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    go_on(2, run_dir)
    return run_dir


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_run_of_two_that_is_killed_goes_on_to_the_same_bits(whole, tmp_path):
    processes = start_until(tmp_path / "run", 3)  # the checkpoint before is whole by then
    for process in processes:
        process.kill()
    several.wait(processes)
    assert "(digest ok)" in go_on(2, tmp_path / "run")
    assert digest(tmp_path / "run") == digest(whole)
    assert rows_of(tmp_path / "run") == rows_of(whole)
    assert verify.main([str(tmp_path / "run")]) == 0


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_sigterm_to_one_of_two_saves_the_same_step_of_both(whole, tmp_path):
    """Between two checkpoints: without the signal, nothing would be saved there."""
    run_dir = tmp_path / "run"
    processes = start_until(run_dir, 2)
    processes[1].send_signal(signal.SIGTERM)
    first, second = several.wait(processes)
    assert (first.code, second.code) == (75, 75)
    assert "pre-empted: step" in first.err
    assert "to go on: python launch/run.py" in first.err
    assert not second.err
    go_on(2, run_dir)
    assert digest(run_dir) == digest(whole)
    assert rows_of(run_dir) == rows_of(whole)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_moments_in_the_memory_of_two_hosts_change_no_bit(whole, tmp_path):
    go_on(2, tmp_path / "run", 3, "--optimizer.offload")
    assert digest(tmp_path / "run") == digest(whole)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_of_two_goes_on_as_one_and_then_on_another_mesh(whole, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    assert "resumed at step 3 (digest ok)" in go_on(1, run_dir, 4)
    assert "resumed at step 4 (digest ok)" in go_on(2, run_dir, 5, "--mesh.tensor", "2")
    assert [row["step"] for row in rows_of(run_dir)] == [0, 1, 2, 3, 4, 5]


def kill_behind(fake: FakeStore, name: str, processes: list[subprocess.Popen]) -> None:
    """As soon as the store has that object."""
    deadline = time.monotonic() + 600
    while name not in fake.objects:
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in processes)
        time.sleep(0.02)
    for process in processes:
        process.kill()
    several.wait(processes)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_run_of_two_in_a_store_is_killed_and_goes_on_to_the_same_bits(whole, monkeypatch):
    """No disk is shared: each process has its own spool, which is gone when the run resumes."""
    fake, address = FakeStore(), "gs://bucket/run"
    for name, value in fake.environment().items():
        monkeypatch.setenv(name, value)
    stored = [*RUN, "--steps", "3", "--run-dir", address]
    processes = several.start(2, stored)
    kill_behind(fake, "run/checkpoints/2.json", processes)
    assert "run/summary.json" not in fake.objects
    first, second = several.run(2, stored, limit=900)
    assert (first.code, second.code) == (0, 0), first.err
    assert "(digest ok)" in first.out
    there = remote_run.fetch(address)
    assert digest(there) == digest(whole)
    assert rows_of(there) == rows_of(whole)
    assert verify.main([address]) == 0
    fake.close()


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_two_processes_learn_q_from_rounds_in_a_store(tmp_path, monkeypatch):
    """Each keeps what they collect where it works itself, to the last bit, and reads it back when
    it goes on."""
    fake = FakeStore()
    for name, value in fake.environment().items():
        monkeypatch.setenv(name, value)
    one = small_q_sharp(tmp_path / "run")
    config.save(replace(one, evaluation=replace(one.evaluation, rows=0)), tmp_path / "run.yaml")
    for steps in ("3", "4"):
        flags = ["--steps", steps, "--run-dir", "gs://bucket/run"]
        first, second = several.run(
            2, ["launch/run.py", str(tmp_path / "run.yaml"), *flags], limit=600
        )
        assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "(digest ok)" in first.out
    assert fake.names("run/examples/") == ["run/examples/round_1.npz", "run/examples/round_2.npz"]
    fake.close()


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_two_processes_learn_from_pairs_in_a_store(tmp_path, monkeypatch):
    """Each keeps the reference's log-probs, which it needs again, where it works itself."""
    fake = FakeStore()
    for name, value in fake.environment().items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "pairs.jsonl"
    file.write_text(
        "".join(
            json.dumps({"prompt": f"{a}+1=", "chosen": f"#{a + 1}", "rejected": "#0"}) + "\n"
            for a in range(1, 21)
        )
    )
    flags = ["--data.path", str(file), "--steps", "1", "--run-dir", "gs://bucket/run"]
    first, second = several.run(2, ["launch/run.py", *TINY_PAIRS, *flags])
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "run/reference_log_probs_0.npz" in fake.objects
    fake.close()
