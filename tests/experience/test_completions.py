"""Texts of the policy and of a teacher in one batch."""

import numpy as np

from tpu_rl.experience.sources import completions
from tpu_rl.proofs import tiny


def test_texts_of_policy_and_teacher_are_joined():
    sampled = tiny.rollout(groups=((3, (4, 1)), (2, (2, 2))))
    given = tiny.demonstrations(groups=((5, (6,)), (1, (2,))))
    batch = completions.together([(sampled, True), (given, False)])
    assert batch.tokens.shape == (6, 11)
    np.testing.assert_array_equal(batch.group_id, [0, 0, 1, 1, 2, 3])
    np.testing.assert_array_equal(batch.on_policy, [True] * 4 + [False] * 2)
    for rows, texts in ((slice(0, 4), sampled), (slice(4, 6), given)):
        width = texts.tokens.shape[1]
        np.testing.assert_array_equal(batch.tokens[rows, :width], texts.tokens)
        np.testing.assert_array_equal(batch.action_mask[rows, :width], texts.action_mask)
        assert not batch.action_mask[rows, width:].any()
