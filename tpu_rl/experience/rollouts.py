"""Online rollouts: completions of the stream's prompts by the current policy, scored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from tpu_rl import data
from tpu_rl.algorithm_spec import PromptValue
from tpu_rl.data import Row
from tpu_rl.experience.config import BatchConfig
from tpu_rl.experience.source import Source, StepExperience, from_scored
from tpu_rl.losses import advantages
from tpu_rl.rollout import dynamic_sampling
from tpu_rl.rollout.engine import Engine, RolloutRequest
from tpu_rl.rollout.scoring import Scored, by_episode, first_of_runs
from tpu_rl.types import TrainState

PromptValues = Callable[[int, TrainState, list[Row], int], np.ndarray]
"""(step, state, rows, round) -> [rows] the value of each prompt; NaN if nothing scored it."""


def rollout_source(
    engine: Engine,
    stream: data.RowStream,
    batch: BatchConfig,
    dynamic_sampling_rounds: int = 0,
    prompt_values: PromptValues | None = None,
    keep_variance_share: float = 1.0,
) -> Source:
    """Return the source of online rollouts.

    Args:
        engine: samples from the current policy.
        stream: data rows, `batch.prompts` at a time.
        batch: the size of a batch.
        dynamic_sampling_rounds: see `dynamic_sampling.collect`.
        prompt_values: computes each prompt's value, for algorithms that subtract it.
        keep_variance_share: see `dynamic_sampling.keep_most_varied`.
    """
    num_completions = batch.prompts * batch.group_size

    def draw(step: int, state: TrainState) -> StepExperience:
        def roll_out(rows: list[Row], round_: int) -> Scored:
            request = RolloutRequest(rows, step, round_ * num_completions, int(state.step))
            scored = engine.roll_out(state.params, request)
            if prompt_values is None:
                return scored
            return with_baseline(scored, prompt_values(step, state, rows, round_))

        scored = dynamic_sampling.collect(
            lambda: next(stream)[1], roll_out, dynamic_sampling_rounds
        )
        return from_scored(dynamic_sampling.keep_most_varied(scored, keep_variance_share), step)

    return Source(draw, stream.get_state, stream.set_state)


def make_prompt_values(engine: Engine, spec: PromptValue) -> PromptValues:
    """Return what computes prompts' values from `spec.samples` completions of each, by `engine`."""

    def prompt_values(step: int, state: TrainState, rows: list[Row], round_: int) -> np.ndarray:
        first_row_id = round_ * len(rows) * spec.samples
        request = RolloutRequest(rows, step, first_row_id, int(state.step))
        scored = by_episode(engine.roll_out(state.params, request))
        rewards = scored.rewards.reshape(-1, spec.samples)
        values = advantages.optimal_value(jnp.asarray(rewards), jnp.isfinite(rewards), spec.beta)
        return np.asarray(values)

    return prompt_values


def with_baseline(scored: Scored, values: np.ndarray) -> Scored:
    """Return the completions with the value of their prompt as baseline.

    Completions of a prompt whose value is NaN are marked as not scored, so that training skips
    them.
    """
    group_id = np.asarray(scored.rollout.group_id)
    rows_of_groups = np.diff([*first_of_runs(group_id), len(group_id)])
    baseline = np.repeat(values, rows_of_groups).astype(np.float32)
    known = np.isfinite(baseline)
    rollout = replace(
        scored.rollout,
        baseline=np.where(known, baseline, np.float32(0.0)),
        scored=scored.rollout.scored & known,
    )
    return replace(scored, rollout=rollout)
