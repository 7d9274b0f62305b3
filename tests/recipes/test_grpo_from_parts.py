"""The training loop without a launcher."""

import pytest

from recipes import grpo_from_parts


def test_the_reward_reads_the_number_after_the_hash():
    assert grpo_from_parts.reward("3*5-4=", "3*5=15;15-4=11;#11") == 1.0
    assert grpo_from_parts.reward("3*5-4=", "3*5=15;15-4=12;#12") == 0.0
    assert grpo_from_parts.reward("3*5-4=", "") == 0.0


@pytest.mark.nightly
def test_it_learns():
    rewards = grpo_from_parts.train(grpo_from_parts.SHIPPED, steps=12)
    assert sum(rewards[-5:]) > sum(rewards[:5])
