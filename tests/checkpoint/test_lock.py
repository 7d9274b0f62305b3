"""One job a run folder, whoever comes when, and however the one before ended. The contenders do not
import jax."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tpu_rl import run_files
from tpu_rl.checkpoint import lock, run_dir
from tpu_rl.errors import InputError, MachineError

HOLDER = """
import sys, time
from pathlib import Path
from tpu_rl.checkpoint import lock
with lock.hold(Path(sys.argv[1])):
    print("holds", flush=True)
    sys.stdin.read()
assert "jax" not in sys.modules
"""

CONTENDER = """
import sys, time
from pathlib import Path
from tpu_rl.checkpoint import lock
from tpu_rl.errors import InputError
while not Path(sys.argv[2]).exists():
    time.sleep(0.001)
try:
    with lock.hold(Path(sys.argv[1])):
        print("in", flush=True)
        time.sleep(3)
except InputError as error:
    print(error.why, flush=True)
"""

ORPHAN = """
import os, sys, time
from pathlib import Path
from tpu_rl.checkpoint import lock
with lock.hold(Path(sys.argv[1])):
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    print("holds", flush=True)
    sys.stdin.read()
"""


def start(source: str, *arguments) -> subprocess.Popen:
    command = [sys.executable, "-c", source, *map(str, arguments)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def first_line(process: subprocess.Popen) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen) -> None:
    """The process and the children it left."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_a_second_job_is_refused_with_the_name_of_the_first(tmp_path):
    holder = start(HOLDER, tmp_path / "run")
    assert first_line(holder) == "holds"
    began = time.monotonic()
    with pytest.raises(InputError, match="another job") as refused, lock.hold(tmp_path / "run"):
        pass
    assert time.monotonic() - began < 1
    who = rf"host {socket.gethostname()}, pid {holder.pid}, since {time.strftime('%Y')}-"
    assert refused.value.why.startswith(who)
    holder.communicate("")
    assert holder.returncode == 0
    with lock.hold(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / lock.LOCK_FILE).read_text())["pid"] == os.getpid()
    assert (tmp_path / "run" / lock.LOCK_FILE).read_text() == ""


@pytest.mark.parametrize("source", [HOLDER, ORPHAN], ids=["alone", "a forked child lives on"])
def test_the_lock_of_a_killed_job_is_free_at_once(tmp_path, source):
    holder = start(source, tmp_path)
    assert first_line(holder) == "holds"
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with lock.hold(tmp_path):
        pass
    if source == ORPHAN:
        os.killpg(holder.pid, signal.SIGKILL)
    holder.communicate()


@pytest.mark.parametrize(
    "pid", [1, 2**22 + 1, os.getpid()], ids=["another process by now", "gone", "this one"]
)
@pytest.mark.parametrize(
    "content", ['{{"host": "{host}", "pid": {pid}, "started": "long ago"}}\n', '{{"host": "']
)
def test_what_a_dead_job_wrote_counts_for_nothing(tmp_path, pid, content):
    (tmp_path / lock.LOCK_FILE).write_text(content.format(host=socket.gethostname(), pid=pid))
    with lock.hold(tmp_path):
        pass


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(MachineError, match="cannot be written[^§]*Not a directory"),
        lock.hold(tmp_path / "file" / "run"),
    ):
        pass


def test_a_deleted_lock_is_made_again(tmp_path, capsys):
    with lock.hold(tmp_path) as confirm:
        confirm()
        (tmp_path / lock.LOCK_FILE).unlink()
        confirm()
        assert "was deleted: it is locked again" in capsys.readouterr().err
        other = start(CONTENDER, tmp_path, tmp_path)
        assert f"pid {os.getpid()}" in first_line(other)
        other.communicate()


def test_a_holder_of_a_deleted_lock_learns_of_the_next_job(tmp_path):
    with lock.hold(tmp_path) as confirm:
        (tmp_path / lock.LOCK_FILE).unlink()
        other = start(HOLDER, tmp_path)
        assert first_line(other) == "holds"
        with pytest.raises(InputError, match="another job") as refused:
            confirm()
        assert f"pid {other.pid}" in refused.value.why
        other.communicate("")


def test_a_link_is_no_lock(tmp_path):
    target = tmp_path / "precious"
    target.write_text("text")
    (tmp_path / lock.LOCK_FILE).symlink_to(target)
    with pytest.raises(InputError, match="is a link"), lock.hold(tmp_path):
        pass
    assert target.read_text() == "text"


def race(folder: Path, starters: int) -> list[str]:
    """Return the output of each of so many processes that try at the same moment."""
    folder.mkdir()
    processes = [start(CONTENDER, folder / "run", folder / "go") for _ in range(starters)]
    time.sleep(0.5)
    (folder / "go").touch()
    lines = [first_line(process) for process in processes]
    for process in processes:
        end(process)
    return lines


def test_of_simultaneous_starters_one_gets_in(tmp_path):
    lines = race(tmp_path / "race", 8)
    assert lines.count("in") == 1
    assert all("pid" in line for line in lines if line != "in")


@pytest.mark.nightly
def test_of_fifty_simultaneous_starters_one_gets_in_every_time(tmp_path):
    for number in range(5):
        assert race(tmp_path / str(number), 50).count("in") == 1


def test_a_copy_with_hard_links_has_a_lock_of_its_own(tmp_path):
    first, copy = tmp_path / "first", tmp_path / "copy"
    holder = start(HOLDER, first)
    assert first_line(holder) == "holds"
    copy.mkdir()
    os.link(first / lock.LOCK_FILE, copy / lock.LOCK_FILE)
    # The link alone lets no second job into the first folder.
    with pytest.raises(InputError, match="another job"), lock.hold(first):
        pass
    with lock.hold(copy) as confirm:
        confirm()
        with pytest.raises(InputError, match="another job"), lock.hold(first):
            pass
    holder.communicate("")
    assert holder.returncode == 0


def test_a_copy_of_a_finished_run_does_not_change_its_original(tmp_path):
    first, copy = tmp_path / "first", tmp_path / "copy"
    names = ["metrics.jsonl", "tensorboard/events", lock.LOCK_FILE]
    for name in names:
        (first / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (first / name).write_text('{"step": 0}\n{"step": 1}\n')
        os.link(first / name, copy / name)
    with run_dir.open_run_folder(str(copy), lambda reason: None):
        run_files.truncate_after(copy / "metrics.jsonl", 0)
    for name in names:
        assert (first / name).read_text() == '{"step": 0}\n{"step": 1}\n'
        assert not os.path.samefile(first / name, copy / name)
    assert (copy / "metrics.jsonl").read_text() == '{"step": 0}\n'
    assert (copy / "tensorboard/events").read_text() == (first / "metrics.jsonl").read_text()
