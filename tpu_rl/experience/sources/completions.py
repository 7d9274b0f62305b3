"""Demonstrations and completions: texts to imitate, from the data or from a teacher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tpu_rl import data
from tpu_rl.data import Row
from tpu_rl.data.encoding import alike
from tpu_rl.experience.config import BatchConfig
from tpu_rl.experience.source import Source, StepExperience, from_scored, of_rows, offline
from tpu_rl.rollout import records
from tpu_rl.rollout.engine import Engine, RolloutRequest
from tpu_rl.rollout.scoring import Scored, require_single_rows
from tpu_rl.types import Completions, Demonstrations, Rollout, ScoredCompletions, TrainState

Demonstrate = Callable[[list[Row]], Demonstrations]
"""Rows that bring completions -> their texts as token ids."""


def with_scores(scored: Scored) -> ScoredCompletions:
    """Return sampled completions with the scores of their rewards."""
    require_single_rows(scored)
    is_scored = np.isfinite(scored.rewards)
    arrays: dict[str, Any] = {
        "tokens": scored.rollout.tokens,
        "action_mask": np.asarray(scored.rollout.action_mask) & is_scored[:, None],
        "group_id": scored.rollout.group_id,
        "scores": np.where(is_scored, scored.rewards, 0).astype(np.float32),
        "images": scored.rollout.images,
    }
    return ScoredCompletions(**arrays)


def completion_source(
    policy: Engine,
    teacher: Engine | None,
    stream: data.RowStream,
    batch: BatchConfig,
    num_on_policy: int,
    demonstrate: Demonstrate,
    teacher_role: str | None = None,
) -> Source:
    """Return the source of completions for distillation.

    The policy completes the first `num_on_policy` prompts of each batch. The teacher completes the
    others; without a teacher, the data rows bring their completions.
    """

    def make(rows: list[Row], step: int, state: TrainState) -> StepExperience:
        experience = offline(None)
        parts: list[tuple[Rollout | Demonstrations, bool]] = []
        if num_on_policy:
            request = RolloutRequest(rows[:num_on_policy], step, 0, int(state.step))
            experience = from_scored(policy.roll_out(state.params, request), step)
            parts.append((experience.data, True))
        remaining = rows[num_on_policy:]
        if remaining and teacher is not None:
            first_row_id = num_on_policy * batch.group_size
            request = RolloutRequest(remaining, step, first_row_id, int(state.step))
            taught = from_scored(teacher.roll_out(state.params, request), step)
            parts.append((taught.data, False))
            if "reward/mean" in taught.metrics:
                experience.metrics["distill/teacher_reward"] = taught.metrics["reward/mean"]
            experience.records.extend(record | {"by": teacher_role} for record in taught.records)
            experience.warnings.extend(taught.warnings)
            experience = experience._replace(rollouts=experience.rollouts + taught.rollouts)
        elif remaining:
            parts.append((demonstrate(remaining), False))
            experience.records.extend(records.of_data(remaining, step))
        return experience._replace(data=together(parts))

    return of_rows(stream, make)


def together(parts: list[tuple[Rollout | Demonstrations, bool]]) -> Completions:
    """Return texts, each with True if the policy sampled them, as one batch with new group ids."""
    width = max(texts.tokens.shape[1] for texts, _ in parts)
    num_groups = 0
    columns = []
    for texts, on_policy in parts:
        padding = ((0, 0), (0, width - texts.tokens.shape[1]))
        group_index = np.unique(np.asarray(texts.group_id), return_inverse=True)[1]
        group_id = num_groups + group_index
        num_groups = int(group_id.max()) + 1
        tokens = np.pad(np.asarray(texts.tokens), padding)
        mask = np.pad(np.asarray(texts.action_mask), padding)
        columns.append((tokens, mask, group_id.astype(np.int32), np.full(len(tokens), on_policy)))
    arrays: list[Any] = [np.concatenate(column) for column in zip(*columns, strict=True)]
    images = alike([texts.images for texts, _ in parts], [len(texts.tokens) for texts, _ in parts])
    joined: Any = None if images[0] is None else np.concatenate(images)
    return Completions(*arrays, images=joined)
