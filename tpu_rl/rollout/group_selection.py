"""End a rollout once enough groups are complete, as partial rollouts do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tpu_rl.sampler import OnFinished, PartialCompletion


class FirstGroups:
    """Takes groups as they become complete: all resumed ones and, of the new ones, the first."""

    def __init__(
        self,
        num_groups: int,
        group_size: int,
        resumed: Sequence[PartialCompletion | None],
        on_taken: OnFinished | None,
    ):
        """Wait for `num_groups` groups.

        Args:
            num_groups: groups to take in all.
            group_size: completions per group.
            resumed: [N] the unfinished completion that a row continues; None for a new row. All
                rows of a group are new, or none.
            on_taken: is told of the completions of each group that is taken.
        """
        self.groups: list[int] = []
        """Groups taken so far, in the order of their completion."""
        self.ended = np.zeros(0, bool)
        """[N] rows that had ended when `is_enough` was last called."""
        self._num_groups = num_groups
        self._group_size = group_size
        self._on_taken = on_taken
        self._resumed_groups = {
            row // group_size for row, completion in enumerate(resumed) if completion is not None
        }
        self._token_ids = ended_before(resumed)

    def on_finished(self, ended: dict[int, list[int]]) -> None:
        """Receive the token ids of rows that have ended, from the sampler."""
        self._token_ids |= ended

    def is_enough(self, ended: np.ndarray) -> bool:
        """Take the groups that are complete, given [N] rows that have ended.

        Returns True once `num_groups` are taken.
        """
        self.ended = ended
        complete = np.flatnonzero(ended.reshape(-1, self._group_size).all(1)).tolist()
        waiting = [group for group in complete if group not in self.groups]
        old = [group for group in waiting if group in self._resumed_groups]
        new = [group for group in waiting if group not in self._resumed_groups]
        # Places are kept for resumed groups that are not complete yet.
        num_free = self._num_groups - len(self._resumed_groups | set(self.groups))
        taken = old + new[:num_free]
        self.groups += taken
        if taken and self._on_taken is not None:
            rows = [
                row
                for group in taken
                for row in range(group * self._group_size, (group + 1) * self._group_size)
            ]
            self._on_taken({row: self._token_ids[row] for row in rows})
        return len(self.groups) == self._num_groups


def ended_before(resumed: Sequence[PartialCompletion | None]) -> dict[int, list[int]]:
    """Return row -> token ids of resumed rows that had ended before: the sampler reports none."""
    return {
        row: completion.tokens.tolist()
        for row, completion in enumerate(resumed)
        if completion is not None and completion.ended
    }


def num_kept(num_groups: int, share: float) -> int:
    """Count the groups that `dynamic_sampling.keep_most_varied` keeps, at least one."""
    return max(1, round(share * num_groups))
