"""A first signal lets the step end, also while the main thread is busy outside Python. A second one
ends the process at once."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from tests.fixtures.runs import COMPILING_RUN
from tpu_rl.runtime import preemption

BUSY = """
import hashlib
from tpu_rl.runtime import preemption
with preemption.watch():
    print("watching", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # Minutes outside Python, like a compilation.
"""


def wait_for(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_sigterm_is_a_request_and_the_old_handler_is_restored():
    before = signal.getsignal(signal.SIGTERM)
    with preemption.watch() as signals:
        assert not signals.requested()
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(signals.stop.is_set)
        assert signals.requested()
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.set_wakeup_fd(-1) == -1
    assert not [thread for thread in threading.enumerate() if thread.name == "signals"]


def test_ctrl_c_is_a_request_after_the_first_step(capfd):
    with preemption.watch() as signals:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signals.has_stepped.set()
        signal.raise_signal(signal.SIGINT)
        assert "Ctrl-C: the run ends, saved, after this step" in capfd.readouterr().err
        with pytest.raises(preemption.StopRequested) as request, signals.stoppable():
            pass
        assert request.value.code == preemption.INTERRUPTED == 130
        os.kill(os.getpid(), signal.SIGTERM)  # The first SIGTERM, though the run is ending.
        wait_for(lambda: "SIGTERM: the run ends, saved" in capfd.readouterr().err)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_stays_ignored_if_it_was():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with preemption.watch() as signals:
            signals.has_stepped.set()
            signal.raise_signal(signal.SIGINT)
            assert not signals.requested()
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_signals_are_no_request():
    received = []
    before = signal.signal(signal.SIGUSR1, lambda *_: received.append(1))
    try:
        with preemption.watch() as signals:
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_for(lambda: received)
            assert not signals.requested()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_thread_that_is_not_the_main_one_sees_no_request():
    requests = []

    def work():
        with preemption.watch() as signals:
            requests.append(signals.requested())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert requests == [False]


def test_sigterm_to_a_forked_child_is_no_request():
    with preemption.watch() as signals:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGTERM
        time.sleep(0.05)
        assert not signals.requested()


def test_second_sigterm_ends_a_busy_process_at_once():
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "watching\n"
    process.send_signal(signal.SIGTERM)
    assert "ends, saved, after this step" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)  # The same request, as `timeout` makes it.
    time.sleep(preemption.ONE_REQUEST_SECONDS + 0.1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert "ended at once" in process.communicate(timeout=30)[1]
    assert time.monotonic() - began < 5
    assert process.returncode == preemption.TERMINATED


@pytest.mark.slow
def test_sigterm_before_the_first_step_does_not_wait_for_compilation(tmp_path):
    flags = ["arithmetic_grpo", "--run-dir", str(tmp_path / "run")]
    command = [sys.executable, "-c", COMPILING_RUN, str(tmp_path / "begun"), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "compiling\n"
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    error = process.communicate(timeout=30)[1]
    assert time.monotonic() - began < 5
    assert process.returncode == 75
    assert error.startswith("pre-empted before a step was taken")
    assert error.endswith(f"to go on: python launch/run.py {' '.join(flags)}\n")


TWO_PROCESSES = """
import sys, time
import jax
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
from tpu_rl.runtime import preemption
with preemption.watch() as signals:
    for step in range(1000):
        if step == 3:
            print("ready", flush=True)
        if signals.requested():
            print(step, flush=True)
            break
        time.sleep(0.02)
"""


@pytest.mark.slow
def test_two_processes_stop_at_the_same_step_if_one_gets_the_signal():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, address, str(index)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        for index in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        while process.stdout.readline() != "ready\n":  # gloo prints a line first.
            assert process.poll() is None
    processes[1].send_signal(signal.SIGTERM)
    steps = [process.communicate(timeout=120)[0] for process in processes]
    assert steps[0] == steps[1]
    assert 3 <= int(steps[0]) < 1000
