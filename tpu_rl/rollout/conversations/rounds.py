"""Rounds of turns: they decide which episodes a step learns from, and which go on in the next.

An episode of a step takes its turns in rounds: its k-th turn of the step is in round k. The step
ends with the first round after which the groups that were begun earlier are complete, and enough
new ones. Every other episode has then taken one turn in each round. What the environment answers to
the turn of the last round is read in the next step, so that it has the time of the update.

So turns are counted, and never seconds. An answer that comes late changes nothing but how long the
step takes: an episode does not begin a turn before it is certain that the step has such a round.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Rounds:
    """The rounds of N episodes in G groups of equal size."""

    def __init__(self, num_groups: int, is_old: Sequence[bool], group_size: int):
        """Begin a step.

        Args:
            num_groups: groups to take in all.
            is_old: [G] whether a group was begun earlier. All of these are taken.
            group_size: episodes of a group.
        """
        self.num_groups = num_groups
        self._old = np.flatnonzero(is_old).tolist()
        self._new = np.flatnonzero(~np.asarray(is_old, bool)).tolist()
        self._first = np.ones((len(is_old), group_size), np.int32)
        """The first round in which an episode may be complete."""
        self._has_ended = np.zeros((len(is_old), group_size), bool)

    def add_turn(self, episode: int) -> None:
        """Count a turn of an episode that did not end with it."""
        self._first.flat[episode] += 1

    def end(self, episode: int) -> None:
        """Take notice of the end of an episode: by its turn, or by the answer to it."""
        self._has_ended.flat[episode] = True

    def _first_groups(self) -> list[int]:
        """Return the groups that are taken if each ends as early as it may."""
        rounds = self._first.max(1)
        new = sorted(self._new, key=lambda group: (rounds[group], group))
        return self._old + new[: self.num_groups - len(self._old)]

    @property
    def last(self) -> int:
        """The round with which the step ends, if it does not turn out to be a later one."""
        return int(self._first[self._first_groups()].max(initial=0))

    def may_begin(self, episodes: Sequence[int]) -> list[int]:
        """Return those of the episodes whose next turn is in a round that the step surely has."""
        last = self.last
        return [episode for episode in episodes if self._first.flat[episode] <= last]

    @property
    def complete(self) -> list[int]:
        """The groups whose episodes have ended, and that are surely taken."""
        return [group for group in self._first_groups() if self._has_ended[group].all()]

    @property
    def is_over(self) -> bool:
        """True if the step has taken its groups, and all its turns."""
        is_waited_for = ~self._has_ended & (self._first <= self.last)
        return len(self.complete) == self.num_groups and not is_waited_for.any()
