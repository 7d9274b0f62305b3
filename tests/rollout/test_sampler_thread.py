"""The thread that samples while the main thread updates, and what ends its rollouts."""

import threading
from typing import Any

import pytest

from tpu_rl.errors import InputError
from tpu_rl.rollout import signals
from tpu_rl.rollout.engine import Engine, RolloutRequest
from tpu_rl.rollout.sampler_thread import SamplerThread
from tpu_rl.runtime import preemption, task_threads


def thread_of(generate) -> SamplerThread:
    engine = Engine(generate, lambda sampled: pytest.fail("nothing is scored"))  # Made-up results.
    return SamplerThread(engine, lambda params: {"copy": params})


def test_it_samples_with_the_copy_and_says_so_once():
    main = threading.get_ident()
    thread = thread_of(lambda params, request: (params, request.step, threading.get_ident()))
    assert thread.wait() is None
    thread.start("weights", RolloutRequest([], 7))
    result: Any = thread.wait()
    params, step, ident = result
    assert (params, step) == ({"copy": "weights"}, 7)
    assert ident != main
    assert thread.wait() is None


def test_what_ends_a_rollout_is_raised_by_wait():
    def generate(params, request):
        raise InputError("a bad row")

    thread = thread_of(generate)
    thread.start(None, RolloutRequest([], 1))
    with pytest.raises(InputError, match="a bad row"):
        thread.wait()
    assert thread.wait() is None


def test_only_cancel_ends_a_rollout_early():
    """A request to stop the run does not: a checkpoint is to contain what is sampled."""
    began = threading.Event()
    ended_by = []

    def generate(params, request):
        try:
            while True:
                signals.between_segments()
                began.set()
        except BaseException as error:
            ended_by.append(type(error))
            raise

    thread = thread_of(generate)
    stopping = preemption.Signals()
    with stopping.stoppable():
        stopping.stop.set()
        thread.start(None, RolloutRequest([], 1))
        assert began.wait(10)
        assert not ended_by
        with pytest.raises(preemption.StopRequested):
            signals.between_segments()  # The main thread hears it.
    thread.cancel()
    assert ended_by == [signals.Cancelled]
    assert thread.wait() is None


def test_the_threads_of_two_names_work_at_the_same_time():
    released = threading.Event()
    first = task_threads.submit("test a", lambda: released.wait(10))
    second = task_threads.submit("test a", lambda: 2)
    assert task_threads.submit("test b", lambda: 3).result(10) == 3
    assert not second.done()
    released.set()
    assert first.result(10)
    assert second.result(10) == 2
