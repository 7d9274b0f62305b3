"""Rewards of sampled completions."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixtures.echo import WIDTH, digit, score_prompts
from tpu_rl import rewards, wings
from tpu_rl.algos.grpo import GrpoConfig, grpo
from tpu_rl.errors import InputError
from tpu_rl.proofs import tiny
from tpu_rl.rewards import terms as rewards_terms
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


@pytest.mark.slow
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
    assert "reward/mean" not in records.metrics(scored)
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


def test_the_reward_of_an_environment_has_weights_gates_and_schedules():
    """Rewards of turns have the same weight, so that rewards still add up to the totals."""
    rollout = score_prompts(["12"], {}, group_size=2).rollout
    turns = np.zeros(rollout.action_mask.shape, np.float32)
    turns[np.arange(2), np.asarray(rollout.action_mask).argmax(1)] = [1.0, 2.0]
    outcomes = scoring.EpisodeOutcomes(
        names=["Game"] * 2,
        is_scored=True,
        rewards=np.array([4.0, 8.0], np.float32),
        turn_rewards=turns,
        faults=["", ""],
        messages=[[{"role": "assistant", "content": text}] for text in ("1", "2")],
        states=[{}] * 2,
        counts={},
    )
    sampled = scoring.Sampled(
        rollout=rollout,
        rows=[{"prompt": "12"}],
        prompts=["12"] * 2,
        completions=["1", "2"],
        lengths=np.array([2, 1]),
        step=2,
        episodes=outcomes,
    )
    functions = {
        "environment": wings.VERIFIERS["environment"].score,
        "digit": lambda completions, **_: [float(c[-1]["content"]) for c in completions],
    }

    def totals(*texts):
        total = rewards_terms.parse_all(texts)
        named = {name: functions[name] for name in rewards_terms.names_of(total)}
        scored = scoring.score(sampled, named, 0.5, total)
        placed = np.asarray(scored.rollout.rewards)
        np.testing.assert_allclose(placed.sum(1), scored.rewards)
        # The turn of the other row is its last action, which has all of its reward.
        return scored.rewards.tolist(), placed[turns == 1].item()

    assert totals("digit") == ([5, 10], 1)
    assert totals("digit", "0.5*environment") == ([3, 6], 0.5)
    assert totals("environment?digit>1") == ([0, 8], 0)
    assert totals("digit", "0*environment") == ([1, 2], 0)
    assert totals("linear(1,0,5)*environment") == ([3, 6], 0.75)
    # As a gate only, it counts with the weight 1 as before.
    assert totals("digit?environment>5") == ([4, 10], 1)
    rows = scoring.EpisodeRows(rollout, np.array([1]), [])
    weighted = rows._replace(rollout=replace(rollout, rewards=turns)).with_weights(np.array([0.5]))
    np.testing.assert_array_equal(weighted.rollout.rewards, turns / 2)


def test_the_reward_of_an_environment_needs_one():
    function = {"environment": wings.VERIFIERS["environment"].score}
    with pytest.raises(InputError, match="the reward environment has no value"):
        score_prompts(["12"], function, group_size=2)
