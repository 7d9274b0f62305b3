"""Scored completions as pairs, or judged one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tpu_rl.rollouts import Scored, group_size
from tpu_rl.types import Pairs


def pair_up(scored: Scored) -> tuple[Pairs, int]:
    """(of each prompt a completion of the highest reward with one of the lowest, how many prompts have no such two).

    The first of each: completions of a prompt are drawn alike. Two rows a prompt, the better first; without actions
    where the rewards of a prompt are all equal or missing. The sampler's log-probs are the reference's.
    """
    size = group_size(scored)
    rewards_of = scored.rewards.reshape(-1, size)
    finite = np.isfinite(rewards_of)
    best = np.where(finite, rewards_of, -np.inf).argmax(1) + size * np.arange(len(rewards_of))
    worst = np.where(finite, rewards_of, np.inf).argmin(1) + size * np.arange(len(rewards_of))
    margin = scored.rewards[best] - scored.rewards[worst]
    exists = finite.any(1) & (margin > 0)
    rows = np.stack([best, worst], axis=1).reshape(-1)
    pairs = _compared(scored, rows, np.repeat(exists, 2))
    return replace(
        pairs,
        group_id=np.repeat(np.arange(len(best), dtype=np.int32), 2),
        preferred=np.tile([True, False], len(best)),
        margin=np.repeat(np.where(exists, margin, 0.0).astype(np.float32), 2),
    ), int((~exists).sum())


def judge(scored: Scored) -> tuple[Pairs, int]:
    """(every completion by itself, good where its reward is above 0.5, how many were not scored).

    The first of each prompt, then the second of each, and so on: neighbours are of other prompts, as KTO's baseline
    wants them (`preferences.mismatched`).
    """
    rows = np.arange(len(scored.rewards)).reshape(-1, group_size(scored)).T.reshape(-1)
    is_scored = np.isfinite(scored.rewards[rows])
    return _compared(scored, rows, is_scored), int((~is_scored).sum())


def _compared(scored: Scored, rows: np.ndarray, counts: np.ndarray) -> Pairs:
    """Some rows of a rollout as completions judged one by one; no actions where they do not count."""
    rollout = scored.rollout
    arrays: dict[str, Any] = {
        "tokens": np.asarray(rollout.tokens)[rows],
        "action_mask": np.asarray(rollout.action_mask)[rows] & counts[:, None],
        "group_id": np.arange(len(rows), dtype=np.int32),
        "preferred": scored.rewards[rows] > 0.5,
        "margin": np.zeros(len(rows), np.float32),
        "reference_log_probs": np.asarray(rollout.log_probs)[rows],
    }
    return Pairs(**arrays)
