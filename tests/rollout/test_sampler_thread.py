"""The threads that sample while the main thread updates, and what ends their rollouts."""

import threading
from typing import Any

import pytest

from tpu_rl.errors import InputError
from tpu_rl.rollout import signals
from tpu_rl.rollout.engine import Engine, RolloutRequest
from tpu_rl.rollout.sampler_thread import SamplerThreads
from tpu_rl.runtime import preemption, task_threads


def threads_of(generate, most_at_once: int = 1) -> SamplerThreads:
    engine = Engine(generate, lambda sampled: pytest.fail("nothing is scored"))  # Made-up results.
    return SamplerThreads(engine, lambda params: {"copy": params}, most_at_once)


def test_they_sample_with_the_copy():
    main = threading.get_ident()
    threads = threads_of(lambda params, request: (params, request.step, threading.get_ident()))
    result: Any = threads.start("weights", RolloutRequest([], 7)).result(10)
    params, step, ident = result
    assert (params, step) == ({"copy": "weights"}, 7)
    assert ident != main


def test_as_many_batches_as_there_are_threads_are_under_way():
    together = threading.Barrier(2)
    running = []

    def generate(params, request):
        running.append(request.step)
        if request.step < 3:
            together.wait(10)
        return len(running)

    threads = threads_of(generate, most_at_once=2)
    first, second = (threads.start(None, RolloutRequest([], step)) for step in (1, 2))
    third = threads.start(None, RolloutRequest([], 3))
    assert first.done()
    assert [second.result(10), third.result(10)][1] == 3


def test_what_ends_a_rollout_is_raised_by_its_future():
    def generate(params, request):
        raise InputError("a bad row")

    future = threads_of(generate).start(None, RolloutRequest([], 1))
    with pytest.raises(InputError, match="a bad row"):
        future.result(10)


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

    threads = threads_of(generate)
    stopping = preemption.Signals()
    with stopping.stoppable():
        stopping.stop.set()
        future = threads.start(None, RolloutRequest([], 1))
        assert began.wait(10)
        assert not ended_by
        with pytest.raises(preemption.StopRequested):
            signals.between_segments()  # The main thread hears it.
    threads.cancel()
    assert ended_by == [signals.Cancelled]
    assert isinstance(future.exception(0), signals.Cancelled)


def test_the_threads_of_two_names_work_at_the_same_time():
    released = threading.Event()
    first = task_threads.submit("test a", lambda: released.wait(10))
    second = task_threads.submit("test a", lambda: 2)
    assert task_threads.submit("test b", lambda: 3).result(10) == 3
    assert not second.done()
    released.set()
    assert first.result(10)
    assert second.result(10) == 2
