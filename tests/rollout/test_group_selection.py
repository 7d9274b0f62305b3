"""A rollout ends once enough groups are complete."""

import numpy as np

from tpu_rl.rollout.group_selection import FirstGroups
from tpu_rl.sampler import PartialCompletion


def completion(token: int, ended: bool = True) -> PartialCompletion:
    return PartialCompletion(
        np.array([token]), np.zeros(1), np.zeros(1), np.zeros(2), 0, ended, truncated=False
    )


def test_resumed_groups_and_the_first_new_ones_are_taken():
    resumed = [completion(1), completion(5, ended=False), completion(2), completion(3)]
    taken = []
    selection = FirstGroups(3, 2, [*resumed, *[None] * 6], taken.append)

    def is_enough(*ended_rows: int) -> bool:
        ended = np.zeros(10, bool)
        ended[list(ended_rows)] = True
        return selection.is_enough(ended)

    ended_before = [0, 2, 3]
    assert not is_enough(*ended_before)
    assert selection.groups == [1]
    selection.on_finished({8: [8], 9: [9], 4: [4]})
    assert not is_enough(*ended_before, 8, 9, 4)
    selection.on_finished({5: [5]})
    assert not is_enough(*ended_before, 8, 9, 4, 5)  # The place of resumed group 0 is kept.
    assert selection.groups == [1, 4]
    selection.on_finished({1: [5, 6]})
    assert is_enough(*ended_before, 8, 9, 4, 5, 1)
    assert selection.groups == [1, 4, 0]
    assert taken == [{2: [2], 3: [3]}, {8: [8], 9: [9]}, {0: [1], 1: [5, 6]}]
