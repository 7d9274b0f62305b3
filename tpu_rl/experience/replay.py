"""Successes of the past in groups that have none now, so that these groups teach something.

The latest success of each prompt is kept, with the log-probs of the policy that sampled it. A group
without a success gets it as a further row of `RowSource.REPLAY`, with its reward, and any other
group a row without actions. So `algos.mixed` compares it with the group, by the ratio to the policy
that sampled it (trajectory replay of Mobile-Agent-v3, arXiv 2508.15144).

The store has the `size` prompts that were last solved, and is a part of each checkpoint.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tpu_rl import data
from tpu_rl.experience.transforms import AddedRow, add_rows
from tpu_rl.plain_values import fields_of
from tpu_rl.rollout.scoring import Scored
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.types import RowSource, TrainState


class Replay:
    """A store of successes: a `source.Memory`."""

    def __init__(self, tokenizer: Tokenizer, size: int, min_reward: float):
        self._tokenizer = tokenizer
        self._size = size
        self._min_reward = min_reward
        self._successes: dict[str, dict[str, Any]] = {}
        """Digest of a data row -> its success, from the one that was solved first to the last."""
        self._replayed = 0

    def __call__(self, scored: Scored, step: int, state: TrainState) -> Scored:
        """Add successes to groups without one, and keep those of the others."""
        digests = [data.row_digest(row) for row in scored.rows]
        returns = np.asarray(scored.rewards).reshape(len(digests), -1)
        is_success = returns >= self._min_reward  # False for NaN.
        replayed = [
            None if solved.any() else self._successes.get(digest)
            for digest, solved in zip(digests, is_success, strict=True)
        ]
        self._replayed = sum(success is not None for success in replayed)
        self._keep(scored, digests, is_success)
        rows = [self._added_row(success) for success in replayed]
        mixed = add_rows(scored, [[row] for row in rows], RowSource.REPLAY)
        rollout = mixed.rollout
        numbers = {
            name: np.array(fields_of(rollout)[name])
            for name in ("log_probs", "behaviour_log_probs", "rewards", "scored")
        }
        mask = np.asarray(rollout.action_mask)
        places = np.flatnonzero(np.asarray(rollout.source) == RowSource.REPLAY)
        for place, success in zip(places, replayed, strict=True):
            columns = np.flatnonzero(mask[place])
            if success is None or not columns.size:
                continue
            numbers["log_probs"][place, columns] = success["log_probs"]
            numbers["behaviour_log_probs"][place, columns] = success["behaviour_log_probs"]
            numbers["rewards"][place, columns[-1]] = success["reward"]
            numbers["scored"][place] = True
        return replace(mixed, rollout=replace(rollout, **numbers))

    def _keep(self, scored: Scored, digests: list[str], is_success: np.ndarray) -> None:
        rollout = scored.rollout
        group_size = is_success.shape[1]
        for group, digest in enumerate(digests):
            if not is_success[group].any():
                continue
            row = group * group_size + int(is_success[group].argmax())
            actions = np.asarray(rollout.action_mask)[row]
            self._successes.pop(digest, None)
            self._successes[digest] = {
                "ids": np.asarray(rollout.tokens)[row, actions].tolist(),
                "log_probs": np.asarray(rollout.log_probs)[row, actions].tolist(),
                "behaviour_log_probs": np.asarray(rollout.behaviour_log_probs)[
                    row, actions
                ].tolist(),
                "reward": float(scored.rewards[row]),
            }
        for digest in list(self._successes)[: -self._size]:
            del self._successes[digest]

    def _added_row(self, success: dict[str, Any] | None) -> AddedRow:
        if success is None:
            return AddedRow([], "")
        return AddedRow(success["ids"], self._tokenizer.decode(success["ids"]))

    def metrics(self) -> dict[str, float]:
        """Return the number of groups with a replayed row, and of prompts in the store."""
        return {
            "rollout/replayed": float(self._replayed),
            "rollout/replay_store": float(len(self._successes)),
        }

    def get_state(self) -> list[tuple[str, dict[str, Any]]]:
        # Pairs, because JSON may sort keys. Entries are replaced and never changed.
        return list(self._successes.items())

    def set_state(self, state: list[tuple[str, dict[str, Any]]]) -> None:
        self._successes = dict(state)
