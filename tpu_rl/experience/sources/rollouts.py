"""Online rollouts: completions of the stream's prompts by the current policy, scored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tpu_rl import data
from tpu_rl.data import Row
from tpu_rl.experience.config import BatchConfig
from tpu_rl.experience.source import Source, StepExperience, from_scored, of_stream
from tpu_rl.experience.transforms import Transform, apply
from tpu_rl.rollout import dynamic_sampling
from tpu_rl.rollout.engine import Engine, RolloutRequest
from tpu_rl.rollout.scoring import Scored
from tpu_rl.sampler import derived_policies
from tpu_rl.types import Array, TrainState


def rollout_source(
    engine: Engine,
    stream: data.RowStream,
    batch: BatchConfig,
    dynamic_sampling_rounds: int = 0,
    transforms: Sequence[Transform] = (),
    only_needed: bool = False,
    make: Callable[[Scored, int], StepExperience] = from_scored,
) -> Source:
    """Return the source of online rollouts.

    Args:
        stream: data rows, `batch.prompts` at a time; one at a time with `only_needed`.
        dynamic_sampling_rounds: `max_rounds` of `dynamic_sampling.collect`.
        transforms: what happens to each batch before it is packed.
        only_needed: see `dynamic_sampling.collect`.
        make: what is learned from a batch.
    """
    num_completions = batch.prompts * batch.group_size

    def draw(step: int, state: TrainState) -> StepExperience:
        def roll_out(rows: list[Row], round_: int) -> Scored:
            request = RolloutRequest(rows, step, round_ * num_completions, int(state.step))
            return engine.roll_out(state.params, request)

        next_rows = stream.take if only_needed else lambda _: next(stream)[1]
        scored = dynamic_sampling.collect(
            next_rows, roll_out, batch.prompts, dynamic_sampling_rounds, only_needed
        )
        return make(apply(transforms, scored, step, state), step)

    return of_stream(stream, draw)


def at_temperature(source: Source, factor_of: Callable[[Any], Array]) -> Source:
    """Return the source that samples at a temperature which the algorithm's state has."""

    def draw(step: int, state: TrainState) -> StepExperience:
        factor = factor_of(state.algorithm_state)
        params = state.params | {derived_policies.TEMPERATURE: factor}
        return source.draw(step, replace(state, params=params))

    return source._replace(draw=draw)
