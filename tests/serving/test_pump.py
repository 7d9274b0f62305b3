"""The pump at its end: no call waits forever, and no cache is kept."""

import gc
import weakref

import numpy as np
import pytest

from tpu_rl.sampler import Turn, TurnRequest
from tpu_rl.serving.pump import MOST_SAMPLERS, Distribution, Pump


class Sampler:
    """Ends a turn in each step, unless it is told to go on."""

    def __init__(self, distribution):
        self.goes_on = distribution.temperature == 0
        self.requests = []

    @property
    def is_idle(self):
        return not self.requests

    def submit(self, requests):
        self.requests += requests

    def close(self, conversation):
        self.requests = [r for r in self.requests if r.conversation != conversation]

    def step(self):
        if self.goes_on:
            return []
        ended, self.requests = self.requests, []
        one = np.zeros(1, np.float32)
        return [Turn(request.conversation, [7], one, one, True) for request in ended]


def request(conversation):
    return TurnRequest(conversation, [1], np.zeros(2, np.uint32), 1)


def test_the_end_answers_every_call_and_frees_the_samplers():
    made = []

    def make(distribution):
        sampler = Sampler(distribution)
        made.append(weakref.ref(sampler))
        return sampler

    pump = Pump(make)
    running = pump.submit(Distribution(0.0), request(0))
    pump.step(0.0)
    waiting = pump.submit(Distribution(0.0), request(1))
    pump.end(ValueError("over"))
    late = pump.submit(Distribution(0.0), request(2))
    for future in (running, waiting, late):
        with pytest.raises(ValueError, match="over"):
            future.result(0)
    gc.collect()
    assert [sampler() for sampler in made] == [None]


def test_a_cancelled_call_is_not_decoded():
    pump = Pump(Sampler)
    cancelled = pump.submit(Distribution(1.0), request(0))
    other = pump.submit(Distribution(1.0), request(1))
    assert cancelled.cancel()
    pump.step(0.0)
    assert other.result(0).tokens == [7]


def test_idle_samplers_beyond_the_limit_are_dropped():
    pump = Pump(Sampler)
    for number in range(MOST_SAMPLERS + 3):
        pump.submit(Distribution(1.0 + number), request(number))
    pump.step(0.0)
    pump.submit(Distribution(99.0), request(99))
    pump.step(0.0)
    assert len(pump._samplers) == MOST_SAMPLERS
