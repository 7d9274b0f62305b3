"""SIGTERM is noted and waits for a border, also while the main thread is busy outside Python; the second does not."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from launch import preemption

BUSY = """
import hashlib
from launch import preemption
with preemption.watch():
    print("watching", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # minutes outside Python, as a compilation is
"""


def wait_for(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_sigterm_is_noted_and_what_was_before_comes_back():
    before = signal.getsignal(signal.SIGTERM)
    with preemption.watch() as signals:
        assert not signals.requested()
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(signals.terminate.is_set)
        assert signals.requested()
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.set_wakeup_fd(-1) == -1
    assert not [thread for thread in threading.enumerate() if thread.name == "signals"]


def test_ctrl_c_is_noted_once_there_is_something_to_save(capfd):
    with preemption.watch() as signals:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signals.has_begun.set()
        signal.raise_signal(signal.SIGINT)
        assert "Ctrl-C: the run ends, saved, after this step" in capfd.readouterr().err
        with pytest.raises(preemption.Asked) as asked, signals.at_borders():
            pass
        assert asked.value.code == preemption.INTERRUPTED == 130
        os.kill(os.getpid(), signal.SIGTERM)  # the first, though the run is ending
        wait_for(lambda: "SIGTERM: the run ends, saved" in capfd.readouterr().err)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_where_ctrl_c_is_ignored_it_stays_so():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with preemption.watch() as signals:
            signals.has_begun.set()
            signal.raise_signal(signal.SIGINT)
            assert not signals.requested()
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_signals_are_not_taken_for_it():
    received = []
    before = signal.signal(signal.SIGUSR1, lambda *_: received.append(1))
    try:
        with preemption.watch() as signals:
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_for(lambda: received)
            assert not signals.requested()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_thread_cannot_watch_and_does_without():
    found = []

    def work():
        with preemption.watch() as signals:
            found.append(signals.requested())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False]


def test_the_sigterm_of_a_forked_child_is_its_own():
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


def test_the_second_sigterm_ends_a_busy_process_at_once():
    process = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "watching\n"
    process.send_signal(signal.SIGTERM)
    assert "ends, saved, after this step" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert "ended at once" in process.communicate(timeout=30)[1]
    assert time.monotonic() - began < 5
    assert process.returncode == preemption.AT_ONCE


COMPILES = """
import hashlib, sys
from launch import run
def compiles(*arguments):
    print("compiling", flush=True)
    open(sys.argv[1], "w").close()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
run.run = compiles
sys.exit(run.main(sys.argv[2:]))
"""


def test_a_sigterm_before_the_first_step_waits_for_no_compilation(tmp_path):
    flags = ["arithmetic_grpo", "--run-dir", str(tmp_path / "run")]
    command = [sys.executable, "-c", COMPILES, str(tmp_path / "there"), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "compiling\n"
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    said = process.communicate(timeout=30)[1]
    assert time.monotonic() - began < 5
    assert process.returncode == 75
    assert said.startswith("pre-empted before a step was taken")
    assert said.endswith(f"to go on: python launch/run.py {' '.join(flags)}\n")


TWO_PROCESSES = """
import sys, time
import jax
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
from launch import preemption
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
def test_two_processes_end_at_the_same_step_though_one_was_told():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, address, str(number)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        for number in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        while process.stdout.readline() != "ready\n":  # gloo has a line to say before
            assert process.poll() is None
    processes[1].send_signal(signal.SIGTERM)
    steps = [process.communicate(timeout=120)[0] for process in processes]
    assert steps[0] == steps[1]
    assert 3 <= int(steps[0]) < 1000
