"""The batch in which every text has full length, which plans are made of."""

import numpy as np

from tpu_rl.algos import AStarPoConfig, GrpoConfig
from tpu_rl.commands.plan.plan_steps import longest_texts
from tpu_rl.experience.config import BatchConfig, SamplingConfig


def test_longest_texts_have_the_fields_that_the_algorithm_reads():
    batch = BatchConfig(prompts=2, group_size=2)
    sampling = SamplingConfig(max_prompt_tokens=3, max_new_tokens=4)
    plain = longest_texts(batch, sampling, GrpoConfig().experience)
    assert plain.baseline is None
    with_values = longest_texts(batch, sampling, AStarPoConfig().experience)
    assert with_values.baseline.shape == (4,)
    assert with_values.parent is with_values.shared is with_values.episode_id is None
    np.testing.assert_array_equal(with_values.action_mask.sum(1), 4)
