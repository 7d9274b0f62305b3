"""Texts of the policy and of a teacher in one batch."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.fixtures.echo import EchoDecoding, digit, echo_engine
from tpu_rl.algorithm_spec import TeachersByRow
from tpu_rl.data import Row
from tpu_rl.errors import InputError
from tpu_rl.experience.config import BatchConfig
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


def test_the_teacher_of_a_text_is_the_one_that_its_row_names():
    """The policy completes two prompts twice; the data bring one text."""
    rows: list[Row] = [
        {"prompt": "12", "answer": "1", "domain": "code"},
        {"prompt": "03", "answer": "1", "domain": "teacher"},
        {"prompt": "44", "answer": "1", "domain": "code"},
    ]

    class Stream:
        def __next__(self):
            return 0, rows

        def get_state(self):
            return {}

        def set_state(self, state):
            del state

    stream: Any = Stream()
    state: Any = SimpleNamespace(params={}, step=0)
    source = completions.completion_source(
        echo_engine(EchoDecoding(2), {"digit": digit}),
        None,
        stream,
        BatchConfig(prompts=3, group_size=2),
        2,
        lambda some: tiny.demonstrations(groups=tuple((2, (3,)) for _ in some)),
        teachers=TeachersByRow("domain", ("teacher", "code")),
    )
    assert source.draw(1, state).data.teacher.tolist() == [1, 1, 0, 0, 1]
    rows[1]["domain"] = "cod"
    with pytest.raises(InputError, match="no teacher 'cod'"):
        source.draw(1, state)
