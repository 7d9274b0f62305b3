"""A run in a store is the run in a folder, whenever it is killed and on whatever machine it goes
on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fixtures.fake_store import FakeStore
from tests.fixtures.runs import TINY, digest, rows_of, run_until
from tpu_rl.checkpoint import gcs_lock, remote_run
from tpu_rl.commands import run
from tpu_rl.commands.checks import preflight
from tpu_rl.commands.evaluate import evaluate
from tpu_rl.commands.tools import export, verify
from tpu_rl.storage import gcs

STEPS = ["--steps", "4", "--checkpoint.interval", "2"]
ADDRESS = "gs://bucket/runs/first"
COMMAND = [*TINY, *STEPS, "--run-dir", ADDRESS]
QUICK = {"max_retries": 1, "initial_delay": "10ms", "max_delay": "20ms"}


@pytest.fixture(scope="module")
def done():
    """The store with the finished run."""
    fake = FakeStore()
    before = dict(os.environ)
    os.environ.update(fake.environment())
    assert run.main(COMMAND) == 0
    os.environ.clear()
    os.environ.update(before)
    yield fake
    fake.close()


@pytest.fixture
def fake(monkeypatch):
    """A store of the test's own, where nothing is waited for."""
    fake = FakeStore()
    for name, value in fake.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(gcs, "SHORT_RETRIES", QUICK)
    monkeypatch.setattr(gcs, "LONG_RETRIES", QUICK)
    monkeypatch.setattr(gcs_lock, "HEARTBEAT_SECONDS", 0.2)
    yield fake
    fake.close()


@pytest.fixture
def copy(fake, done):
    """The finished run, to be changed."""
    fake.changes[:] = done.changes
    fake.go_back(len(fake.changes))
    return fake


def after(fake: FakeStore, name: str) -> int:
    """Return the number of changes when an object of the run had just been written."""
    return 1 + next(
        i for i, (changed, _) in enumerate(fake.changes) if changed == f"runs/first/{name}"
    )


def same(address: str, whole: Path) -> None:
    """The run there has the digest, the rows and the samples of the one in the folder."""
    there = remote_run.fetch(address)
    assert digest(there) == digest(whole)
    assert rows_of(there) == rows_of(whole)
    assert (there / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()


@pytest.mark.slow
def test_it_is_the_run_of_a_folder(copy, whole, capsys):
    same(ADDRESS, whole)
    names = [name.removeprefix("runs/first/") for name in copy.names() if "/arrays/" not in name]
    assert [name for name in names if name.partition("/")[0] not in ("tensorboard", "model")] == [
        "checkpoints/2.json",
        "checkpoints/4.json",
        "config.yaml",
        "metrics-000000002.jsonl",
        "metrics-000000004.jsonl",
        "report.html",
        "rows-000000002.json",
        "rows-000000004.json",
        "run_folder",
        "run_id",
        "samples-000000002.jsonl",
        "samples-000000004.jsonl",
        "summary.json",
    ]
    parts = b"".join(
        copy.objects[f"runs/first/metrics-00000000{step}.jsonl"].content for step in (2, 4)
    )
    assert [json.loads(line)["step"] for line in parts.splitlines()] == [0, 1, 2, 3, 4]
    assert f"run_dir: {ADDRESS}" in copy.objects["runs/first/config.yaml"].content.decode()
    before = len(copy.changes)
    assert run.main(COMMAND) == 0
    assert f"this run is finished: {ADDRESS}/report.html" in capsys.readouterr().out
    changed = {name.rpartition("/")[2] for name, _ in copy.changes[before:]}
    assert changed == {"run.lock", "config.yaml"}


@pytest.mark.slow
def test_a_kill_between_rows_and_checkpoint(copy, whole, capsys):
    """The machine is gone, and its spool: the part without a checkpoint is written anew."""
    # A checkpoint is written in the background, perhaps while the next rows are published.
    copy.go_back(
        max(after(copy, name) for name in ("samples-000000004.jsonl", "checkpoints/2.json"))
    )
    assert run.main(COMMAND) == 0
    assert "resumed at step 2" in capsys.readouterr().out
    same(ADDRESS, whole)


MOMENTS = [
    "run_folder",
    "config.yaml",
    "metrics-000000002.jsonl",
    "rows-000000002.json",
    "checkpoints/2.json",
    "metrics-000000004.jsonl",
    "rows-000000004.json",
    "checkpoints/4.json",
    "model/model.safetensors",
    "report.html",
]


IN_CI = ("rows-000000002.json", "checkpoints/4.json")


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(moment, marks=pytest.mark.slow if moment in IN_CI else pytest.mark.nightly)
        for moment in MOMENTS
    ],
)
def test_a_kill_at_any_moment(copy, whole, moment):
    """After each kind of object; and again while what it left is cleared away."""
    copy.go_back(after(copy, moment))
    del copy.changes[after(copy, moment) :]
    known = len(copy.changes)
    assert run.main(COMMAND) == 0
    same(ADDRESS, whole)
    copy.go_back(known + 3)
    assert run.main(COMMAND) == 0
    same(ADDRESS, whole)


@pytest.mark.nightly
def test_a_kill_of_the_process(fake, whole):
    """SIGKILL after the first checkpoint, of step 2, on the way to the next one."""
    environment = os.environ | fake.environment() | {"JAX_PLATFORMS": "cpu"}
    script = Path(__file__).parents[2] / "launch" / "run.py"
    slow = [sys.executable, str(script), *COMMAND]
    process = subprocess.Popen(slow, env=environment, stdout=subprocess.PIPE, text=True)
    while "runs/first/checkpoints/2.json" not in fake.objects and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert "runs/first/run.lock" in fake.objects
    ended = subprocess.run(slow, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 0
    assert "resumed at step" in ended.stdout
    same(ADDRESS, whole)


def test_a_second_job_is_refused(fake, capsys, monkeypatch):
    monkeypatch.setattr(preflight, "prepare", lambda config: pytest.fail("a device is claimed"))
    with gcs_lock.hold(gcs.Store(ADDRESS), lambda why: pytest.fail(why)):
        began = time.monotonic()
        assert run.main(COMMAND) == 2
        assert time.monotonic() - began < 10
    assert (
        f"another job is working in this run folder\n  where: {ADDRESS}\n  why: host"
        in capsys.readouterr().err
    )


def test_a_configuration_of_another_run_is_refused(copy, capsys):
    assert run.main([*COMMAND, "--seed", "1"]) == 2
    assert (
        f"another configuration\n  where: {ADDRESS}\n  why: seed: 0 -> 1" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (503, "the store does not answer"),
        (404, "there is no bucket"),
        (403, "roles/storage.objectUser"),
    ],
)
def test_a_store_that_refuses_is_one_message(fake, capsys, monkeypatch, status, words):
    monkeypatch.setattr(preflight, "prepare", lambda config: pytest.fail("a device is claimed"))
    fake.refuse = lambda request: status
    assert run.main(COMMAND) == 3
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said
    assert evaluate.main([ADDRESS]) in (2, 3)


def test_no_right_to_list_is_no_empty_folder(copy, capsys):
    copy.refuse = lambda request: 403 if request.startswith("LIST") else 0
    before = copy.names()
    assert run.main(COMMAND) == 3
    assert "list its objects" in capsys.readouterr().err
    assert copy.names() == before


@pytest.mark.parametrize(
    "name", ["metrics-000000002.jsonl", "samples-000000004.jsonl", "rows-000000002.json"]
)
@pytest.mark.parametrize("is_missing", [True, False])
def test_a_part_that_is_missing_or_damaged_is_named(copy, capsys, monkeypatch, name, is_missing):
    monkeypatch.setattr(preflight, "prepare", lambda config: pytest.fail("a device is claimed"))
    content = copy.objects[f"runs/first/{name}"].content
    copy.remove(f"runs/first/{name}")
    if not is_missing:
        copy.put(f"runs/first/{name}", content.replace(b"2", b"3", 1))
    named = "rows-000000004.json" if is_missing and name.startswith("rows") else name
    for program, arguments in ((run, COMMAND), (verify, [ADDRESS])):
        assert program.main(arguments) == 4
        assert (
            f"rows that were published are damaged\n  where: {ADDRESS}/{named}"
            in capsys.readouterr().err
        )


@pytest.mark.slow
def test_the_last_part_is_missing_though_there_is_its_checkpoint(copy, capsys):
    copy.remove("runs/first/rows-000000004.json")
    copy.remove("runs/first/summary.json")
    assert run.main(COMMAND) == 4
    assert f"{ADDRESS}/rows-000000004.json" in capsys.readouterr().err
    assert "runs/first/metrics-000000004.jsonl" in copy.objects


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_set_aside(copy, whole, capsys):
    arrays = [
        name
        for name in copy.names("runs/first/checkpoints/arrays/4-")
        if not name.endswith("zarr.json")
    ]
    largest = max(arrays, key=lambda name: len(copy.objects[name].content))
    content = copy.objects[largest].content
    copy.put(largest, content[:99] + bytes([content[99] ^ 1]) + content[100:])
    copy.remove("runs/first/summary.json")
    assert verify.main([ADDRESS]) == 4
    assert "Checkpoint 4 is damaged" in capsys.readouterr().out
    assert run.main(COMMAND) == 0
    said = capsys.readouterr()
    assert "resumed at step 2" in said.out
    assert f"set aside as {ADDRESS}/checkpoints/damaged/4.json" in said.err
    same(ADDRESS, whole)
    assert verify.main([ADDRESS]) == 0


@pytest.mark.nightly
def test_readers(copy, whole, tmp_path, capsys):
    assert verify.main([ADDRESS]) == 0
    assert f"{ADDRESS}: whole" in capsys.readouterr().out
    before = len(copy.changes)
    assert export.main([ADDRESS, "--to", str(tmp_path / "model")]) == 0
    weights = [
        (folder / "model" / "model.safetensors").read_bytes() for folder in (tmp_path, whole)
    ]
    assert weights[0] == weights[1]
    assert evaluate.main([ADDRESS, "--greedy", "--rows", "4"]) == 0
    assert f"{ADDRESS}, step 4" in capsys.readouterr().out
    assert len(copy.changes) == before  # who reads writes nothing
    assert evaluate.main(["gs://bucket/runs/none"]) == 2
    assert export.main(["gs://bucket/runs/none", "--to", str(tmp_path / "none")]) == 2
    assert "not a run folder" in capsys.readouterr().err


@pytest.mark.nightly
def test_a_sigterm_publishes_the_last_whole_step(fake, whole, monkeypatch):
    assert run_until(signal.SIGTERM, COMMAND, 3, monkeypatch) == 75
    assert "runs/first/checkpoints/3.json" in fake.objects
    assert "runs/first/run.lock" not in fake.objects
    assert fake.names("runs/first/tensorboard/")
    assert run.main(COMMAND) == 0
    same(ADDRESS, whole)


LOSES = """
import sys
from tpu_rl.commands import run
from tpu_rl.checkpoint import gcs_lock
gcs_lock.HEARTBEAT_SECONDS = 0.1
run.run = lambda *arguments: __import__("time").sleep(60)
sys.exit(run.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_run_whose_lock_is_taken_ends_at_once(fake):
    environment = os.environ | fake.environment() | {"JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        [sys.executable, "-c", LOSES, *COMMAND], env=environment, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while "runs/first/config.yaml" not in fake.objects:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    holder = {"host": "tpu-7", "pid": 12, "started": "now"}
    fake.put(f"runs/first/{gcs_lock.LOCK}", json.dumps(holder).encode())
    said = process.communicate(timeout=30)[1]
    assert process.returncode == 2
    assert (
        "error: another job has taken this run folder over: host tpu-7, pid 12, since now" in said
    )
    assert b"tpu-7" in fake.objects[f"runs/first/{gcs_lock.LOCK}"].content
