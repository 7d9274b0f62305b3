"""Accepted completions: sampled by a role, judged by rewards, and the good ones kept to imitate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tpu_rl.algorithm_spec import Acceptance
from tpu_rl.experience.source import StepExperience, from_scored
from tpu_rl.rollout.scoring import Scored, require_single_rows
from tpu_rl.types import Completions


class Selection(NamedTuple):
    """The completions to learn from. Arrays are [N] bool."""

    accepted: np.ndarray
    duplicates: np.ndarray
    """True for good completions that repeat another one of their prompt."""


def accept(scored: Scored, step: int, rule: Acceptance, on_policy: bool) -> StepExperience:
    """Return the accepted completions. The others stay in the arrays, with an empty mask."""
    require_single_rows(scored)
    tokens = np.asarray(scored.rollout.tokens)
    mask = np.asarray(scored.rollout.action_mask)
    group_id = np.asarray(scored.rollout.group_id)
    token_ids = [tuple(row[row_mask]) for row, row_mask in zip(tokens, mask, strict=True)]
    accepted, duplicates = select(scored.rewards, group_id, token_ids, rule)
    arrays: dict[str, Any] = {
        "tokens": tokens,
        "action_mask": mask & accepted[:, None],
        "group_id": group_id,
        "on_policy": np.full(len(tokens), on_policy),
        "images": scored.rollout.images,
    }
    experience = from_scored(scored, step, Completions(**arrays))
    num_prompts = len(np.unique(group_id))
    experience.metrics["rft/accepted"] = float(accepted.mean())
    experience.metrics["rft/duplicates"] = float(duplicates.mean())
    experience.metrics["rft/prompts_with_accepted"] = (
        len(np.unique(group_id[accepted])) / num_prompts
    )
    if not accepted.any():
        experience.warnings.append("no completion was accepted: the step changes nothing")
    records = [
        record | {"accepted": bool(is_accepted)}
        for record, is_accepted in zip(experience.records, accepted, strict=True)
    ]
    return experience._replace(records=records)


def select(
    rewards: np.ndarray, group_id: np.ndarray, token_ids: Sequence[Hashable], rule: Acceptance
) -> Selection:
    """Return masks of the accepted completions, and of those that would be if they repeated none.

    A prompt's completions are taken from the best on; of equal rewards, the first sampled one.

    Args:
        rewards: [N]; a completion whose reward is NaN is never accepted.
        group_id: [N] the prompt of each completion.
        token_ids: the tokens of each completion.
        rule: which completions are good, and how many of a prompt count.
    """
    is_good = np.isfinite(rewards)
    if rule.keep == "passing":
        is_good &= rewards >= rule.min_reward
    accepted = np.zeros(len(rewards), bool)
    duplicates = np.zeros(len(rewards), bool)
    seen: set[tuple[int, Hashable]] = set()
    num_accepted: Counter[int] = Counter()
    for row in np.argsort(-rewards, kind="stable"):
        if not is_good[row]:
            continue
        group = int(group_id[row])
        completion = (group, token_ids[row])
        if completion in seen:
            duplicates[row] = True
        elif rule.max_per_prompt is None or num_accepted[group] < rule.max_per_prompt:
            accepted[row] = True
            num_accepted[group] += 1
        seen.add(completion)
    return Selection(accepted, duplicates)
