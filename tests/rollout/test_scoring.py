"""Rewards of sampled completions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixtures.echo import WIDTH, digit, score_prompts
from tpu_rl import rewards
from tpu_rl.algos.grpo import GrpoConfig, grpo
from tpu_rl.proofs import tiny
from tpu_rl.rollout import records, scoring
from tpu_rl.train import packing
from tpu_rl.types import Experience


def test_reward_is_placed_on_the_last_action():
    scored = score_prompts(["123", "40"], {"digit": digit, "again": digit}, group_size=2)
    assert scored.prompts == ["123", "123", "40", "40"]
    assert scored.completions == ["1", "2", "4", "0"]
    np.testing.assert_array_equal(scored.rewards, [2, 4, 8, 0])
    np.testing.assert_array_equal(scored.parts["again"], [1, 2, 4, 0])
    np.testing.assert_array_equal(scored.lengths, [2, 1, 2, 1])
    expected = np.zeros((4, WIDTH))
    expected[[0, 1, 2, 3], [4, 3, 3, 2]] = [2, 4, 8, 0]
    np.testing.assert_array_equal(scored.rollout.rewards, expected)
    assert scored.rollout.scored.all()


def test_reward_function_receives_the_columns_of_the_data():
    def is_answer(completions, answer):
        return [float(text == truth) for text, truth in zip(completions, answer, strict=True)]

    scored = score_prompts(["123", "21"], {"is_answer": is_answer}, group_size=2)
    np.testing.assert_array_equal(scored.rewards, [1, 0, 0, 1])


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_column_that_some_rows_lack_is_none_there(order):
    def has_hint(completions, hint=None):
        return [float(value is not None) for value in hint or [None] * len(completions)]

    rows = [{"prompt": "a", "hint": "h"}, {"prompt": "b"}]
    prompts, columns = scoring.repeat_rows([rows[index] for index in order], 2)
    assert prompts == [rows[index]["prompt"] for index in order for _ in range(2)]
    assert sorted(has_hint(prompts, **columns)) == [0, 0, 1, 1]


def test_completion_that_is_not_scored_keeps_its_actions():
    scored = score_prompts(["1293"], {"digit": digit}, group_size=4)
    np.testing.assert_array_equal(scored.rewards, [1, 2, np.nan, 3])
    np.testing.assert_array_equal(scored.rollout.scored, [True, True, False, True])
    np.testing.assert_array_equal(scored.rollout.action_mask.sum(-1), [2, 2, 2, 1])
    np.testing.assert_array_equal(scored.rollout.rewards.sum(-1), [1, 2, 0, 3])
    metrics = records.metrics(scored)
    assert metrics["reward/mean"] == 2
    assert metrics["reward/errors"] == 0
    assert metrics["rollout/kept"] == 1


def test_completion_that_is_not_scored_is_not_trained_on():
    """It has no weight, and the baseline of its group does not count it."""
    scored = score_prompts(["1293"], {"digit": digit}, group_size=4)
    data = jax.tree.map(jnp.asarray, scored.rollout)
    layout = packing.assign_slots(
        np.asarray(data.action_mask), np.asarray(data.group_id), row_length=16, micro_batch_rows=1
    )
    algorithm = grpo(
        GrpoConfig(advantages="centered"), tiny.roles(tiny.attention_model()), tiny.SAMPLING
    )
    batch, _ = algorithm.make_batch(Experience(data, layout), {}, ())
    advantages = layout.unpack(batch.advantages)
    weights = layout.unpack(batch.weights["policy"])
    actions = scored.rollout.action_mask
    np.testing.assert_array_equal(advantages[actions], [-1, -1, 0, 0, 0, 0, 1])
    np.testing.assert_allclose(weights[actions], np.array([1, 1, 1, 1, 0, 0, 1]) / 5, rtol=1e-6)


def test_rewards_are_zero_without_reward_functions():
    scored = score_prompts(["12", "34"], {}, group_size=2)
    assert scored.rollout.scored.all()
    assert not scored.rollout.rewards.any()
    assert scored.completions == ["1", "2", "3", "4"]
    assert records.metrics(scored)["reward/mean"] == 0
    assert records.records(scored, 1)[0]["parts"] == {}


def test_what_a_failed_episode_had_earned_is_no_part_of_its_rewards_mean():
    episodes = scoring.EpisodeOutcomes(
        names=["Game"] * 3,
        is_scored=True,
        rewards=np.array([1.0, 2.0, np.nan], np.float32),
        turn_rewards=np.zeros((3, 4), np.float32),
        faults=["", "`step` raised", ""],
        messages=[[]] * 3,
        states=[{}] * 3,
        counts={},
    )
    scores = rewards.Scores(np.zeros(3, np.float32), {}, [])
    judged = scoring.with_episodes(scores, episodes, are_judged=False)
    np.testing.assert_array_equal(judged.totals, [1.0, np.nan, np.nan])
    np.testing.assert_array_equal(judged.parts["Game"], [1.0, np.nan, np.nan])
