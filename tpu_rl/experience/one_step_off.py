"""One-step-off rollouts: a step's completions are sampled before the previous step's update.

Reward functions that work in other processes then have the time of a whole rollout and update to
answer, where the run would otherwise wait for them after the last completion. The devices do not
less work, so nothing is gained if rewards are quick.

The price: each batch but the first is sampled by the policy of one update before (after a run has
gone back, by a later one), and the last batch that is sampled is never trained on. The log-probs
that a batch was sampled with are the old log-probs of the ratio. GRPO's `--algorithm.old-log-probs
recomputed` with an `--algorithm.importance-sampling-cap` corrects for it (AReaL, arXiv 2505.24298).

A checkpoint contains the sampled batch that waits for its step, so a resumed run equals one that
never stopped. Its rewards are computed again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tpu_rl import data, sampler
from tpu_rl.experience.config import BatchConfig
from tpu_rl.experience.partial_rollouts import STALE, groups_from_json, groups_to_json
from tpu_rl.experience.rollouts import PromptValues, with_baseline
from tpu_rl.experience.source import Source, StepExperience, from_scored
from tpu_rl.rollout import records
from tpu_rl.rollout.dynamic_sampling import keep_most_varied
from tpu_rl.rollout.engine import Engine, RolloutRequest, in_groups
from tpu_rl.rollout.scoring import PartialGroup, Sampled
from tpu_rl.types import TrainState


def one_step_off_source(
    engine: Engine,
    stream: data.RowStream,
    batch: BatchConfig,
    prompt_values: PromptValues | None = None,
    keep_variance_share: float = 1.0,
) -> Source:
    """Return the source of rollouts that are one update old."""
    num_completions = batch.prompts * batch.group_size
    pending: Sampled | None = None
    restored: list[PartialGroup] = []

    def sample_next(step: int, state: TrainState, first_row_id: int) -> Sampled:
        request = RolloutRequest(next(stream)[1], step, first_row_id, int(state.step))
        return engine.generate(state.params, request)

    def resample(step: int, state: TrainState) -> Sampled:
        """Return the batch of a checkpoint. It is complete, so nothing is decoded."""
        request = RolloutRequest(
            [group.row for group in restored],
            step - 1,  # The step that sampled it: rewards may depend on it.
            policy_step=int(state.step),
            resumed=[completion for group in restored for completion in group.completions],
        )
        return engine.generate(state.params, request)

    def draw(step: int, state: TrainState) -> StepExperience:
        nonlocal pending, restored
        if restored:
            current = resample(step, state)
        elif pending is not None:
            current = pending
        else:
            current = sample_next(step, state, num_completions)
        # Before the next batch, whose rewards would be computed first.
        values = None if prompt_values is None else prompt_values(step, state, current.rows, 0)
        following = sample_next(step, state, 0)
        scored = engine.score(current)
        if values is not None:
            scored = with_baseline(scored, values)
        pending = following
        restored = []
        experience = from_scored(keep_most_varied(scored, keep_variance_share), step)
        experience.metrics.update(records.sampling_speed(following))
        stale = np.asarray(scored.rollout.policy_step) != int(state.step)
        num_tokens = max(int(scored.lengths.sum()), 1)
        experience.metrics[STALE] = int(scored.lengths[stale].sum()) / num_tokens
        return experience

    def get_state() -> dict[str, Any]:
        groups = restored
        if pending is not None:
            all_ended = np.ones(num_completions, bool)
            groups = in_groups(
                pending.rows, sampler.partial_completions(pending.rollout, all_ended)
            )
        return {"stream": stream.get_state(), "pending": groups_to_json(groups)}

    def set_state(state: dict[str, Any]) -> None:
        nonlocal pending, restored
        stream.set_state(state["stream"])
        close()
        pending = None
        restored = groups_from_json(state["pending"])

    def close() -> None:
        if pending is not None:
            pending.cancel_rewards()

    return Source(draw, get_state, set_state, close)
