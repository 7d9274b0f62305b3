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
from concurrent.futures import Future
from typing import Any

import numpy as np

from tpu_rl import data
from tpu_rl.experience.config import BatchConfig
from tpu_rl.experience.source import Source, StepExperience, from_scored
from tpu_rl.experience.sources.partial_rollouts import STALE
from tpu_rl.experience.transforms import Transform, apply
from tpu_rl.rollout import records
from tpu_rl.rollout.engine import Engine, RolloutRequest
from tpu_rl.rollout.sampler_thread import SamplerThreads
from tpu_rl.rollout.scoring import EpisodeOutcomes, EpisodeRows, Sampled, Scored
from tpu_rl.runtime import typed_json
from tpu_rl.runtime.typed_json import finished
from tpu_rl.types import Rollout, TrainState

AGE_MEAN = "rollout/staleness"
"""Metric: the mean over a batch's tokens of the updates between the policy that sampled a token and
the one that the step updates."""
AGE_MAX = "rollout/staleness_max"
"""Metric: the largest of them."""
WAITED = "time/rollout_wait"
"""Metric: the time in which a step could not begin because its batch was still being sampled."""


class _Waiting:
    """A batch of the store, which may still be under way."""

    def __init__(self, future: Future[Sampled]):
        self.future = future

    @functools.cached_property
    def as_json(self) -> dict[str, Any]:
        """The batch as a checkpoint holds it. It may be in several."""
        return typed_json.to_json(self.future.result())


def stale_source(
    engine: Engine,
    stream: data.RowStream,
    batch: BatchConfig,
    transforms: Sequence[Transform] = (),
    threads: SamplerThreads | None = None,
) -> Source:
    """Return the source of rollouts that are `batch.staleness` steps old.

    With threads, which sample with the same engine, the latest batches are sampled during updates.
    For the other arguments see `rollouts.rollout_source`.
    """
    store: deque[_Waiting] = deque()
    is_restored = False

    def begin(step: int, state: TrainState) -> None:
        """Take the batch that a step will learn from into the store."""
        request = RolloutRequest(next(stream)[1], step, policy_step=int(state.step))
        if threads is None:
            store.append(_Waiting(finished(engine.generate(state.params, request))))
        else:
            store.append(_Waiting(threads.start(state.params, request)))

    def draw(step: int, state: TrainState) -> StepExperience:
        nonlocal is_restored, store
        if is_restored:
            store = deque(
                _Waiting(finished(engine.resume(waiting.future.result()))) for waiting in store
            )
            is_restored = False
        began = time.perf_counter()
        while len(store) <= batch.staleness:
            begin(step + len(store), state)
        current = store.popleft().future.result()
        seconds_waited = time.perf_counter() - began
        latest = current if threads is not None or not store else store[-1].future.result()
        scored = engine.score(current)
        experience = from_scored(apply(transforms, scored, step, state), step)
        experience.metrics.update(records.speed(latest.lengths, latest.seconds))
        experience.metrics.update(ages(scored, int(state.step)))
        if threads is not None:
            experience.metrics[WAITED] = seconds_waited
        return experience

    def snapshot() -> Callable[[], dict[str, Any]]:
        stream_state = stream.get_state()
        batches = tuple(store)
        return lambda: {"stream": stream_state, "store": [waiting.as_json for waiting in batches]}

    def set_state(state: dict[str, Any]) -> None:
        nonlocal store, is_restored
        stream.set_state(state["stream"])
        close()
        restored = typed_json.of_checkpoint(
            state["store"], Sampled, Rollout, EpisodeOutcomes, EpisodeRows
        )
        store = deque(_Waiting(finished(sampled)) for sampled in restored)
        is_restored = True

    def close() -> None:
        if threads is not None:
            threads.cancel()
        for waiting in store:
            if waiting.future.exception() is None:
                waiting.future.result().cancel_rewards()

    return Source(draw, snapshot, set_state, close)


def ages(scored: Scored, policy_step: int) -> dict[str, float]:
    """Return the metrics of how old completions are, for a policy after `policy_step` updates."""
    updates = np.abs(policy_step - np.asarray(scored.rollout.policy_step, np.int64))
    num_tokens = max(int(scored.lengths.sum()), 1)
    return {
        STALE: int(scored.lengths[updates > 0].sum()) / num_tokens,
        AGE_MEAN: int((updates * scored.lengths).sum()) / num_tokens,
        AGE_MAX: float(updates.max()),
    }
