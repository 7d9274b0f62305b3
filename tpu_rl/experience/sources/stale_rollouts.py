"""Stale rollouts: each batch is sampled up to N steps before the step that learns from it.

A store holds the N batches that wait. In step k the policy samples the batch of step k + N, and
the update learns from the oldest batch of the store:

    step      1              2      3      4
    samples   1 2 .. 1 + N   2 + N  3 + N  4 + N
    learns    1              2      3      4

The first step samples all of the first N + 1 batches. So a batch is at most N steps old, whatever
takes how long: the schedule counts steps and knows no clock. A batch has the random keys of the
step that learns from it. With N = 0 this is `rollouts.rollout_source`, bit by bit.

Reward functions that work in other processes have the time of N steps to answer, where the run
would otherwise wait for them after the last completion. The devices do no less work, so nothing is
gained if rewards are quick.

The price: log-probs are those of an older policy (after a run has gone back, of a later one), and
the last N batches that are sampled are never trained on. Two corrections: CISPO's truncated weight
of the ratio to the policy that sampled (AIPO: LlamaRL, arXiv 2505.24034), and
`--algorithm.importance-sampling-cap`, which clips the ratio to the latest policy and weights each
token (decoupled PPO: AReaL, arXiv 2505.24298).

A checkpoint contains the store, so a resumed run equals one that never stopped. Rewards that nobody
has asked for yet are computed again.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tpu_rl import data
from tpu_rl.experience.config import BatchConfig
from tpu_rl.experience.source import Source, StepExperience, from_scored
from tpu_rl.experience.sources.partial_rollouts import STALE
from tpu_rl.experience.transforms import Transform, apply
from tpu_rl.rollout import records, sampled_json
from tpu_rl.rollout.engine import Engine, RolloutRequest
from tpu_rl.rollout.sampler_thread import SamplerThread
from tpu_rl.rollout.scoring import Sampled, Scored
from tpu_rl.types import TrainState

AGE_MEAN = "rollout/staleness"
"""Metric: the mean over a batch's tokens of the updates between the policy that sampled a token and
the one that the step updates."""
AGE_MAX = "rollout/staleness_max"
"""Metric: the largest of them."""
WAITED = "time/rollout_wait"
"""Metric: the time in which a step could not begin because the thread was still sampling."""


class _Waiting:
    """A batch of the store."""

    def __init__(self, sampled: Sampled):
        self.sampled = sampled

    @functools.cached_property
    def as_json(self) -> dict[str, Any]:
        """The batch as a checkpoint holds it. It may be in several."""
        return sampled_json.to_json(self.sampled)


def stale_source(
    engine: Engine,
    stream: data.RowStream,
    batch: BatchConfig,
    transforms: Sequence[Transform] = (),
    thread: SamplerThread | None = None,
) -> Source:
    """Return the source of rollouts that are `batch.staleness` steps old.

    With a thread, which samples with the same engine on devices of its own, the latest batch is
    sampled during the update. For the other arguments see `rollouts.rollout_source`.
    """
    store: deque[_Waiting] = deque()
    is_restored = False
    seconds_waited = 0.0

    def request_for(step: int, state: TrainState) -> RolloutRequest:
        """Return the request for the batch that a step will learn from."""
        return RolloutRequest(next(stream)[1], step, policy_step=int(state.step))

    def sample(step: int, state: TrainState) -> Sampled:
        return engine.generate(state.params, request_for(step, state))

    def wait_for_thread() -> None:
        """Take the batch that is sampled during an update into the store."""
        nonlocal seconds_waited
        if thread is None:
            return
        began = time.perf_counter()
        sampled = thread.wait()
        if sampled is not None:
            store.append(_Waiting(sampled))
            seconds_waited = time.perf_counter() - began

    def draw(step: int, state: TrainState) -> StepExperience:
        nonlocal is_restored, seconds_waited
        wait_for_thread()
        if is_restored:
            for waiting in store:
                waiting.sampled = engine.resume(waiting.sampled)
            is_restored = False
        while len(store) < max(batch.staleness, 1):
            store.append(_Waiting(sample(step + len(store), state)))
        current = store.popleft().sampled
        latest = current
        if thread is not None:
            thread.start(state.params, request_for(step + batch.staleness, state))
        elif batch.staleness:
            latest = sample(step + batch.staleness, state)
            store.append(_Waiting(latest))
        scored = engine.score(current)
        experience = from_scored(apply(transforms, scored, step, state), step)
        experience.metrics.update(records.sampling_speed(latest))
        experience.metrics.update(ages(scored, int(state.step)))
        if thread is not None:
            experience.metrics[WAITED] = seconds_waited
            seconds_waited = 0.0
        return experience

    def freeze() -> Callable[[], dict[str, Any]]:
        wait_for_thread()
        stream_state = stream.get_state()
        batches = tuple(store)
        return lambda: {
            "stream": stream_state,
            "store": [waiting.as_json for waiting in batches],
        }

    def get_state() -> dict[str, Any]:
        return freeze()()

    def set_state(state: dict[str, Any]) -> None:
        nonlocal store, is_restored
        stream.set_state(state["stream"])
        close()
        store = deque(_Waiting(sampled_json.from_json(values)) for values in state["store"])
        is_restored = True

    def close() -> None:
        if thread is not None:
            thread.cancel()
        for waiting in store:
            waiting.sampled.cancel_rewards()

    return Source(draw, get_state, set_state, close, freeze)


def ages(scored: Scored, policy_step: int) -> dict[str, float]:
    """Return the metrics of how old completions are, for a policy after `policy_step` updates."""
    updates = np.abs(policy_step - np.asarray(scored.rollout.policy_step, np.int64))
    num_tokens = max(int(scored.lengths.sum()), 1)
    return {
        STALE: int(scored.lengths[updates > 0].sum()) / num_tokens,
        AGE_MEAN: int((updates * scored.lengths).sum()) / num_tokens,
        AGE_MAX: float(updates.max()),
    }
