"""Make preference pairs, or graded completions, of scored completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tpu_rl.rollout import dynamic_sampling
from tpu_rl.rollout.scoring import Scored, group_size, require_single_rows
from tpu_rl.types import Pairs


def pair_up(scored: Scored) -> tuple[Pairs, int]:
    """Return (pairs, number of prompts without one): each prompt's best and worst completion.

    Each prompt has two rows, the better completion first. Of completions with equal rewards the
    first is taken, which is a fair choice because they are sampled alike. A prompt whose rewards
    are all equal or missing has rows without actions. The reference's log-probs are the sampler's.
    """
    size = group_size(scored)
    rewards = scored.rewards.reshape(-1, size)
    is_scored = np.isfinite(rewards)
    first_rows = size * np.arange(len(rewards))
    best = np.where(is_scored, rewards, -np.inf).argmax(1) + first_rows
    worst = np.where(is_scored, rewards, np.inf).argmin(1) + first_rows
    margin = scored.rewards[best] - scored.rewards[worst]
    exists = is_scored.any(1) & (margin > 0)
    rows = np.stack([best, worst], axis=1).reshape(-1)
    pairs = replace(
        _graded(scored, rows, np.repeat(exists, 2)),
        group_id=np.repeat(np.arange(len(best), dtype=np.int32), 2),
        preferred=np.tile([True, False], len(best)),
        margin=np.repeat(np.where(exists, margin, 0.0).astype(np.float32), 2),
    )
    return pairs, int((~exists).sum())


def pair_with(scored: Scored, others: Scored) -> tuple[Pairs, int]:
    """Return (pairs, number of those without a preference): each completion with the other of the
    same place.

    Each pair has two rows, the completion of `scored` first. Equal or missing rewards prefer none
    of them; such a pair has rows without actions.
    """
    require_single_rows(scored)
    require_single_rows(others)
    count = len(scored.rewards)
    order = np.arange(2 * count).reshape(2, -1).T.reshape(-1)
    both = dynamic_sampling.take_rows([scored, others], order)
    margin = scored.rewards - others.rewards
    exists = np.isfinite(margin) & (margin != 0)
    pairs = replace(
        _graded(both, np.arange(2 * count), np.repeat(exists, 2)),
        group_id=np.repeat(np.arange(count, dtype=np.int32), 2),
        preferred=np.stack([margin > 0, margin < 0], axis=1).reshape(-1),
        margin=np.repeat(np.where(exists, np.abs(margin), 0.0).astype(np.float32), 2),
    )
    return pairs, int((~exists).sum())


def grade(scored: Scored) -> tuple[Pairs, int]:
    """Return (every completion by itself, number of those without a reward).

    A completion is good if its reward is above 0.5. The order is the first completion of each
    prompt, then the second of each, and so on. Neighbors then belong to different prompts, as KTO's
    baseline requires.
    """
    rows = np.arange(len(scored.rewards)).reshape(-1, group_size(scored)).T.reshape(-1)
    is_scored = np.isfinite(scored.rewards[rows])
    return _graded(scored, rows, is_scored), int((~is_scored).sum())


def _graded(scored: Scored, rows: np.ndarray, is_valid: np.ndarray) -> Pairs:
    """Return some rows of a rollout, each graded by itself. Invalid rows have no actions.

    Args:
        scored: the completions.
        rows: [N] indices into them.
        is_valid: [N] bool.
    """
    rollout = scored.rollout
    arrays: dict[str, Any] = {
        "tokens": np.asarray(rollout.tokens)[rows],
        "action_mask": np.asarray(rollout.action_mask)[rows] & is_valid[:, None],
        "group_id": np.arange(len(rows), dtype=np.int32),
        "preferred": scored.rewards[rows] > 0.5,
        "margin": np.zeros(len(rows), np.float32),
        "reference_log_probs": np.asarray(rollout.log_probs)[rows],
        "images": None if rollout.images is None else np.asarray(rollout.images)[rows],
    }
    return Pairs(**arrays)
