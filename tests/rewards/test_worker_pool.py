"""The firewall: whatever a user's reward function does, the run gets its other rewards, in time,
and a reason."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tpu_rl import rewards
from tpu_rl.errors import InputError
from tpu_rl.rewards.worker_pool import IsolatedReward, RewardLimits, Worker
from tpu_rl.runtime import child_processes

LIMITS = RewardLimits(batch_seconds=8.0, row_seconds=1.0, memory_gb=2.0)
OVER = 2.0
"""Seconds that a question may take beyond its deadline."""
COMPLETIONS = ["1", "2", "bad", "4"]

# What happens on the completion "bad", and what is then said of it. The others are worth their
# number.
FAULTS = {
    "raises": ("1 / 0", "ZeroDivisionError: division by zero (mine.py:"),
    "is None where a number is due": ("return 'nan'", "it returned 'nan' and not a list"),
    "no list": ("return None", "it returned None and not a list of numbers"),
    "a text": (
        "return ['1.0' if text == 'bad' else float(text) for text in completions]",
        "it returned '1.0' and not a number",
    ),
    "nan": (
        "return [float('nan') if text == 'bad' else float(text) for text in completions]",
        "it returned NaN; for what cannot be scored return None",
    ),
    "inf": (
        "return [float('-inf') if text == 'bad' else float(text) for text in completions]",
        "it returned -inf; the squares",
    ),
    "a nested list": (
        "return [[1.0] if text == 'bad' else float(text) for text in completions]",
        "it returned [1.0] and not a number",
    ),
    "never ends": ("while True: pass", "no answer within 1 s (mine.py:"),
    "sleeps": ("time.sleep(1000)", "no answer within 1 s (mine.py:"),
    "is busy in C": ("return [float(len(str(7 ** (10 ** 8))))]", "no answer within 1 s (mine.py:"),
    "crashes": ("ctypes.string_at(0)", "its process was killed by SIGSEGV (mine.py:"),
    "leaves": ("os._exit(0)", "its process ended with exit code 0"),
    "exits": ("sys.exit('bye')", "SystemExit: bye"),
    "interrupts": ("raise KeyboardInterrupt", "its process was killed by SIGINT"),
    "takes all memory": ("return [float(len(bytearray(10 ** 10)))]", "MemoryError"),
    "reads stdin": ("return [float(input())]", "EOFError"),
    "closes every file": ("os.closerange(0, 100)", "its process "),
}

HARMLESS = {
    "forks": "if os.fork() == 0: pass",
    "prints a lot": "print('x' * 10_000_000)",
    "writes to descriptor 1": "os.write(1, b'[1.0]')",
    "leaves a child behind": "subprocess.Popen(['sleep', '1000'])",
    "starts a thread": "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()",
}


def reward_file(folder: Path, on_bad: str) -> str:
    file = folder / "mine.py"
    file.write_text(
        "import ctypes, itertools, os, subprocess, sys, threading, time\n"
        "def score(prompts, completions, **columns):\n"
        "    if 'bad' in completions:\n"
        f"        {on_bad}\n"
        "    return [0.5 if text == 'bad' else float(text) for text in completions]\n"
    )
    return f"{file}:score"


def ended(pid: int) -> bool:
    """Return True if a process is gone, or only waits for its parent to take note."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_its_own_row_only_and_no_more_than_the_deadline(tmp_path, fault):
    code, message = FAULTS[fault]
    function = IsolatedReward(reward_file(tmp_path, code), LIMITS)
    began = time.monotonic()
    scores = rewards.score({"f": function}, COMPLETIONS, COMPLETIONS, {})
    assert time.monotonic() - began < LIMITS.batch_seconds + OVER
    np.testing.assert_array_equal(scores.totals, np.array([1, 2, np.nan, 4], np.float32))
    (found,) = scores.faults
    assert (found.function, found.row) == ("f", 2)
    assert message in found.message
    again = rewards.score({"f": function}, ["7"], ["7"], {})
    assert again.totals == [7]
    function.stop()


@pytest.mark.parametrize("code", ["return [1.0] * 5", "return itertools.repeat(1.0)"])
def test_a_wrong_number_of_values_is_an_error(tmp_path, code):
    function = IsolatedReward(reward_file(tmp_path, code), LIMITS)
    with pytest.raises(InputError, match="a wrong number of values") as error:
        rewards.score({"f": function}, COMPLETIONS, COMPLETIONS, {})
    assert " values for 4 completions" in error.value.why
    assert error.value.where.endswith("mine.py:score")
    function.stop()


def test_whole_batch_workers_are_not_called_with_a_part(tmp_path):
    path = reward_file(tmp_path, "1 / 0")
    (tmp_path / "mine.py").write_text(
        (tmp_path / "mine.py").read_text() + "score.whole_batch = True\n"
    )
    function = IsolatedReward(path, LIMITS)
    numbers, faults, _ = rewards.apply("mine", function, COMPLETIONS, COMPLETIONS, {})
    assert np.isnan(numbers).all()
    assert [fault.row for fault in faults] == [0, 1, 2, 3]
    function.stop()


@pytest.mark.parametrize("oddity", HARMLESS)
def test_odd_but_harmless_functions_are_scored(tmp_path, oddity, capsys):
    function = IsolatedReward(reward_file(tmp_path, HARMLESS[oddity]), LIMITS)
    for _ in range(2):
        scores = rewards.score({"f": function}, COMPLETIONS, COMPLETIONS, {})
        np.testing.assert_array_equal(scores.totals, np.array([1, 2, 0.5, 4], np.float32))
    function.stop()
    assert len(capsys.readouterr().err) < 100_000


@pytest.mark.slow
def test_a_function_that_never_returns_is_stopped_at_the_deadline_of_the_batch(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def score(completions):\n    while True:\n        pass\n")
    limits = RewardLimits(batch_seconds=4.0, row_seconds=0.5)
    function = IsolatedReward(f"{file}:score", limits)
    began = time.monotonic()
    with pytest.raises(InputError, match="fail on 50 of 50 completions") as error:
        rewards.score({"f": function}, ["p"] * 50, ["c"] * 50, {})
    assert time.monotonic() - began < limits.batch_seconds + OVER
    assert "no answer within" in error.value.why
    assert f'File "{file}", line ' in error.value.why


def test_the_error_that_stops_a_run_shows_the_users_traceback(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def inner(text):\n    return {}[text]\n"
        "\ndef score(completions):\n"
        "    return inner('key')\n"
    )
    for limits in (LIMITS, RewardLimits(isolate=False)):
        with pytest.raises(InputError, match="fail on 4 of 4") as error:
            rewards.score(
                {"f": rewards.from_path(f"{file}:score", limits)}, COMPLETIONS, COMPLETIONS, {}
            )
        assert "KeyError: 'key' (mine.py:2)" in error.value.why
        assert f'File "{file}", line 5, in score\n' in error.value.why
        assert "reward_process" not in error.value.why
        assert str(error.value).count("\n") < 20


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import sys\nsys.exit(3)", "SystemExit: 3"),
        ("import os\nos._exit(3)", "ended with exit code 3"),
        ("import ctypes\nctypes.string_at(0)", "killed by SIGSEGV (mine.py:2)"),
        ("while True: pass", "no answer within 1.5 s (mine.py:1)"),
    ],
)
def test_a_file_that_dies_while_it_loads(tmp_path, monkeypatch, code, why):
    monkeypatch.setattr("tpu_rl.rewards.worker_pool.START_SECONDS", 1.5)
    (tmp_path / "mine.py").write_text(code + "\n")
    with pytest.raises(InputError, match="does not load") as error:
        rewards.from_path(f"{tmp_path / 'mine.py'}:score")
    assert why in error.value.why


def test_columns_and_state_reach_the_function_and_the_worker_is_kept(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os, sys\ncalls = 0\n"
        "def score(completions, answer, *, scale=2.0):\n"
        "    global calls\n    calls += 1\n"
        "    return [None if a is None else calls * scale * a['x'] for a in answer]\n"
        "def process(prompts, completions):\n    return [os.getpid()] * len(completions)\n"
        "def has_jax(prompts, completions):\n    return ['jax' in sys.modules] * len(completions)\n"
    )
    score = rewards.from_path(f"{tmp_path / 'mine.py'}:score")
    columns = {"answer": [{"x": 1}, None], "unused": [object, object]}
    for call in (1, 2):
        found = rewards.score({"f": score}, ["p"] * 2, ["c"] * 2, columns)
        np.testing.assert_array_equal(found.totals, np.array([2 * call, np.nan], np.float32))
        assert found.faults == []
    with pytest.raises(InputError, match="needs a column 'answer'"):
        rewards.score({"f": score}, ["p"], ["c"], {"anwser": [1]})
    own = rewards.from_path(f"{tmp_path / 'mine.py'}:process")
    assert own(["p"], ["c"]) == own(["p"], ["c"]) != [os.getpid()]
    assert rewards.from_path(f"{tmp_path / 'mine.py'}:process", RewardLimits(isolate=False))(
        ["p"], ["c"]
    ) == [os.getpid()]
    assert rewards.from_path(f"{tmp_path / 'mine.py'}:has_jax")(["p"], ["c"]) == [0.0]


def test_a_worker_that_died_between_two_calls_is_started_again(tmp_path):
    worker = Worker(reward_file(tmp_path, "pass"))
    os.kill(worker._process.popen.pid, signal.SIGKILL)
    worker._process.popen.wait()
    assert worker.call({"prompts": ["p"], "completions": ["3"]}, 1, 20.0) == [3.0]
    worker.stop()


def test_the_reply_of_an_interrupted_call_is_not_read_by_the_next(tmp_path, monkeypatch):
    worker = Worker(reward_file(tmp_path, "pass"))

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("tpu_rl.runtime.workers.read_frame", interrupted)
        with pytest.raises(KeyboardInterrupt):
            worker.call({"prompts": ["p"], "completions": ["3"]}, 1, 20.0)
    assert worker.call({"prompts": ["p"], "completions": ["4"]}, 1, 20.0) == [4.0]
    worker.stop()


def test_a_large_batch_goes_through_the_pipe(tmp_path):
    worker = Worker(reward_file(tmp_path, "pass"))
    completions = [str(i).zfill(1000) for i in range(3000)]
    assert worker.call({"prompts": completions, "completions": completions}, 3000, 60.0) == list(
        range(3000)
    )
    worker.stop()


def test_a_busy_worker_ends_with_a_trainer_that_is_killed(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os\n"
        "def score(completions):\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "    return [7 ** (10 ** 9)]\n"
    )
    program = (
        "from tpu_rl.rewards.worker_pool import Worker\n"
        f"worker = Worker({str(tmp_path / 'mine.py') + ':score'!r})\n"
        "worker.call({'completions': ['c']}, 1, 100.0)\n"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": ":".join(sys.path)}
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    trainer.kill()
    trainer.wait()
    worker = int((tmp_path / "pid").read_text())
    while not ended(worker):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    "wrong",
    [{"batch_seconds": 0.0}, {"row_seconds": -1.0}, {"fault_share": 1.5}, {"memory_gb": -1.0}],
)
def test_impossible_limits_are_refused_by_their_flag(wrong):
    with pytest.raises(InputError) as error:
        RewardLimits(**wrong)
    (name,) = wrong
    assert error.value.where == f"--reward-limits.{name.replace('_', '-')}"


def test_a_worker_loads_the_standard_library_only(tmp_path):
    """numpy alone would take 100 MB of the address space that --reward-limits.memory-gb grants."""
    (tmp_path / "mine.py").write_text(
        "import sys\n"
        "def score(prompts, completions):\n"
        "    return [float(name in sys.modules) for name in completions]\n"
    )
    score = rewards.from_path(f"{tmp_path / 'mine.py'}:score", RewardLimits())
    assert score(["p"] * 3, ["numpy", "jax", "tpu_rl"]) == [0, 0, 1]
    score.stop()


LEAK = """
kept = []
def score(prompts, completions):
    kept.append(bytearray(MEGABYTES << 20))
    return [float(len(text)) for text in completions]
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("megabytes", "limit", "batches"),
    [
        (30, 0.25, 10),
        pytest.param(90, 0.25, 20, marks=pytest.mark.slow),
        pytest.param(50, 1.0, 200, marks=pytest.mark.slow),
    ],
)
def test_a_reward_that_leaks_loses_no_row(tmp_path, megabytes, limit, batches):
    (tmp_path / "mine.py").write_text(LEAK.replace("MEGABYTES", str(megabytes)))
    limits = RewardLimits(memory_gb=limit)
    score = rewards.from_path(f"{tmp_path / 'mine.py'}:score", limits)
    processes = set()
    for _ in range(batches):
        assert score(["p"] * 3, ["a", "bb", "ccc"]) == [1, 2, 3]
        processes.add(score._worker._process.popen.pid)
    # Each process serves as many batches as fit.
    assert 2 <= len(processes) <= batches * megabytes / (limit * 1024 / 4)
    score.stop()


def test_a_stray_frame_does_not_shift_later_batches(tmp_path):
    code = """
        import json, os, struct
        text = json.dumps({"values": [7.0], "number": 0, "bytes": 1, "no_memory": False}).encode()
        for number in range(3, 32):
            try: os.write(number, struct.pack("<Q", len(text)) + text)
            except OSError: pass
    """
    (tmp_path / "mine.py").write_text(
        "calls = 0\n"
        "def score(completions):\n"
        "    global calls\n    calls += 1\n"
        "    if calls == 2:\n" + code + "\n"
        "    return [float(text) for text in completions]\n"
    )
    worker = Worker(f"{tmp_path / 'mine.py'}:score")
    for text in ("3", "4", "5", "6"):
        assert worker.call({"completions": [text]}, 1, 20.0) == [float(text)]
    worker.stop()


DAEMON = (
    "import subprocess, sys\n"
    "daemon = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(999)'],\n"
    "                          start_new_session=True)\n"
    "def score(completions):\n    return [daemon.pid]\n"
)


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 20
    while not ended(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_daemon_of_a_reward_ends_with_it(tmp_path):
    (tmp_path / "mine.py").write_text(DAEMON)
    worker = Worker(f"{tmp_path / 'mine.py'}:score")
    [daemon] = worker.call({"completions": ["c"]}, 1, 20.0)
    assert not ended(int(daemon))
    worker.stop()
    wait_for_end(int(daemon))


def test_a_daemon_of_a_reward_ends_with_a_trainer_that_is_killed(tmp_path):
    (tmp_path / "mine.py").write_text(DAEMON)
    program = (
        "import os, signal\n"
        "from tpu_rl.rewards.worker_pool import Worker\n"
        f"worker = Worker({str(tmp_path / 'mine.py')!r} + ':score')\n"
        "[daemon] = worker.call({'completions': ['c']}, 1, 20.0)\n"
        "print(int(daemon), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    trainer = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=100)
    assert trainer.returncode == -signal.SIGKILL
    wait_for_end(int(trainer.stdout))


def test_a_process_that_still_loads_its_program_is_found():
    """For a moment after its start a process has no environment that could be read."""
    for _ in range(20):
        mark = child_processes.add_mark()
        program = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(999)"]
        process = subprocess.Popen(program, env={child_processes.MARK: mark})
        child_processes.kill_marked([mark])
        child_processes.marks.discard(mark)
        assert process.wait(timeout=20) == -signal.SIGKILL


def test_a_set_is_no_answer(tmp_path):
    """It has no order, and equal scores would become one."""
    (tmp_path / "mine.py").write_text("def score(completions):\n    return {1.0, 2.0}\n")
    worker = Worker(f"{tmp_path / 'mine.py'}:score")
    failure = worker.call({"completions": ["a", "b"]}, 2, 20.0)
    assert "not a list of numbers" in str(failure)
    worker.stop()
