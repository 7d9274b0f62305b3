"""Credit over turns and over episodes of several rows: by hand, and against one row per episode."""

import itertools
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from tpu_rl.losses import advantages, credit, returns
from tpu_rl.losses.advantages import (
    batch_scaled,
    group_centered,
    group_scaled,
    leave_one_out,
    length_weighted,
)
from tpu_rl.proofs import tiny

NAN = float("nan")
EVERY = [group_centered, group_scaled, batch_scaled, leave_one_out, length_weighted]

# Two turns of two tokens; one turn; nothing.
MASK = jnp.array([[0, 1, 1, 0, 1, 1], [0, 1, 1, 1, 0, 0], [0] * 6]).astype(bool)
REWARDS = jnp.array([[NAN, 0.25, 0.75, NAN, 0.0, 2.0], [NAN, 0.0, 0.0, 3.0, NAN, NAN], [NAN] * 6])
VALUES = jnp.array([[9.0, 0.5, 9.0, 9.0, 1.5, 9.0], [9.0, 1.0, 9.0, 9.0, 9.0, 9.0], [9.0] * 6])


def test_turn_ids():
    np.testing.assert_array_equal(
        advantages.turn_ids(MASK), [[0, 1, 1, 0, 2, 2], [0, 1, 1, 1, 0, 0], [0] * 6]
    )
    # As rows of one episode, which go on counting; the third row is padding.
    np.testing.assert_array_equal(
        advantages.turn_ids(MASK, jnp.array([4, 4, 0])),
        [[0, 1, 1, 0, 2, 2], [0, 3, 3, 3, 0, 0], [0] * 6],
    )


def test_turn_gae_by_hand():
    """Gamma 0.9 and lambda 0.5, backwards: 2 - 1.5; then 1 + 0.9 x 1.5 - 0.5 + 0.45 x 0.5."""
    actual = advantages.turn_gae(REWARDS, VALUES, MASK, 0.9, 0.5)
    first = 1 + 1.35 - 0.5 + 0.225
    np.testing.assert_allclose(
        actual, [[0, first, first, 0, 0.5, 0.5], [0, 2, 2, 2, 0, 0], [0] * 6], rtol=1e-6
    )


def test_turn_returns_by_hand():
    np.testing.assert_allclose(
        advantages.turn_returns(REWARDS, MASK, 0.5),
        [[0, 2, 2, 0, 2, 2], [0, 3, 3, 3, 0, 0], [0] * 6],
    )


def test_the_overlong_penalty_counts_observations_and_whole_episodes():
    """The limit is 8 and the buffer 4. Two of five tokens are observed: 5 tokens cost 1/4, where
    the 3 actions cost nothing. A truncated episode costs 1, though its last observation is in no
    row. The last two rows are one episode, which begins at 2 and reaches to 9."""
    mask = np.zeros((4, 10), bool)
    mask[0, [1, 2, 5]] = mask[1, 1:3] = mask[2, 2:4] = mask[3, 7:9] = True
    rollout = replace(
        tiny.rollout(),
        action_mask=jnp.asarray(mask),
        truncated=jnp.array([False, True, False, False]),
        episode_id=jnp.array([5, 6, 8, 8]),
    )
    penalty = returns.overlong_penalty(rollout, 8, 4)
    np.testing.assert_allclose(penalty, [-0.25, -1, 0, -0.75])
    alone = replace(rollout, episode_id=None)
    np.testing.assert_allclose(returns.overlong_penalty(alone, 8, 4), [-0.25, -1, 0, 0])


def test_turns_of_one_token_are_tokens():
    random = np.random.default_rng(0)
    mask = jnp.asarray(random.random((6, 9)) < 0.4)
    mask = mask & ~jnp.pad(mask, ((0, 0), (1, 0)))[:, :-1]
    rewards, values = jnp.asarray(random.normal(size=(2, 6, 9)))
    for lam in (0.0, 0.95):
        np.testing.assert_array_equal(
            advantages.turn_gae(rewards, values, mask, 0.9, lam),
            advantages.gae(rewards, values, mask, 0.9, lam),
        )


# --- comparisons within a group ---


@pytest.mark.slow
@pytest.mark.parametrize("advantage", EVERY)
def test_with_one_turn_each_credit_is_the_same(advantage):
    """Groups of 1, 2, 6; of equal returns; of 4 and 8 beside a row that nobody scored."""
    returns = jnp.array([1.0, 2.0, 6.0, 5.0, 5.0, 4.0, NAN, 8.0])
    group = jnp.array([0, 0, 0, 1, 1, 2, 2, 2])
    scored = jnp.isfinite(returns)
    mask = jnp.broadcast_to(jnp.arange(5) > 0, (8, 5))
    rewards = jnp.where(jnp.arange(5)[None] == 4, returns[:, None], 0.0)
    turn_returns = advantages.turn_returns(rewards, mask, 0.5)
    expected = jnp.where(mask, advantage(returns, group, scored)[:, None], 0.0)
    by_turn = advantages.per_turn(advantage, turn_returns, mask, group, scored)
    np.testing.assert_array_equal(by_turn, expected)
    tokens = jnp.where(mask, jnp.arange(8)[:, None], 7)
    by_state = advantages.per_state(advantage, turn_returns, tokens, mask, group, scored)
    np.testing.assert_array_equal(by_state, expected)


def turns_of_one_token(observations, rewards):
    """Return (tokens, mask, rewards) of episodes: an observation of one token, an action, a reward,
    and so on."""
    width = 2 * max(map(len, observations))
    tokens, mask = np.zeros((len(rewards), width), int), np.zeros((len(rewards), width), bool)
    placed = np.zeros(mask.shape)
    for row, (states, earned) in enumerate(zip(observations, rewards, strict=True)):
        columns = np.arange(len(states))
        tokens[row, 2 * columns] = states
        tokens[row, 2 * columns + 1] = 99 + row
        mask[row, 2 * columns + 1] = True
        placed[row, 2 * columns + 1] = earned
    return jnp.asarray(tokens), jnp.asarray(mask), jnp.asarray(placed)


@pytest.mark.slow
def test_turns_are_compared_with_the_same_turn_of_the_group_by_hand():
    """Returns from turn 1 are 3, 2, 7; from turn 2, which two rows reach, 2 and 6; one row has a
    third turn."""
    _, mask, rewards = turns_of_one_token([[0] * 2, [0], [0] * 3], [[1, 2], [2], [1, 1, 5]])
    returns = advantages.turn_returns(rewards, mask)
    group, scored = jnp.zeros(3, int), jnp.ones(3, bool)
    np.testing.assert_array_equal(
        advantages.per_turn(group_centered, returns, mask, group, scored)[:, 1::2],
        [[-1, -2, 0], [-2, 0, 0], [3, 2, 0]],
    )
    np.testing.assert_allclose(
        advantages.per_turn(leave_one_out, returns, mask, group, scored)[:, 1::2],
        [[3 - 4.5, -4, 0], [2 - 5, 0, 0], [7 - 2.5, 4, 0]],
        rtol=1e-6,
    )
    # Without the third row, nobody is left to compare with at turn 2.
    np.testing.assert_array_equal(
        advantages.per_turn(group_scaled, returns, mask, group, jnp.array([True, True, False]))[
            :, 3
        ],
        0,
    )


def test_the_optimal_token_baseline_by_hand():
    """Two episodes of 2 and 3 actions with the returns 1 and 3. The third action is alone; the
    first two have the baselines (.5 x 1 + 1 x 3) / 1.5 and (1.5 x 1 + 2 x 3) / 3.5."""
    mask = jnp.array([[0, 1, 0, 1], [0, 1, 1, 0], [0, 0, 1, 0], [0, 1, 1, 1]], bool)
    norms = jnp.array([[9, 0.5, 9, 1], [9, 1, 1, 9], [9, 9, 2, 9], [9, 9, 9, 9]])
    returns = jnp.array([[0, 1, 0, 1], [0, 3, 3, 0], [0, 0, 3, 0], [NAN] * 4])
    # The second episode has two rows; the last row is not scored.
    group, episode = jnp.zeros(4, int), jnp.array([0, 1, 1, 2])
    scored = jnp.array([True, True, True, False])
    actual = advantages.per_token(
        length_weighted, returns, mask, group, scored, norms, episode_id=episode
    )
    expected = [[0, -4 / 3, 0, -8 / 7], [0, 2 / 3, 6 / 7, 0], [0] * 4, [0] * 4]
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.slow
def test_step_groups_by_hand():
    """Discount 1/2. The first group comes to state 5 three times, in one episode twice; its last
    turns answer 6 and 8, once each. The second group has the same observations, and shares
    nothing with the first."""
    tokens, mask, rewards = turns_of_one_token(
        [[7, 5, 6], [7, 5, 5], [7, 8], [7, 5]], [[0, 0, 4], [0, 0, 2], [0, 3], [0, 9]]
    )
    returns = advantages.turn_returns(rewards, mask, 0.5)[:, 1::2]
    np.testing.assert_array_equal(returns, [[1, 2, 4], [0.5, 1, 2], [1.5, 3, 0], [4.5, 9, 0]])
    group, scored = jnp.array([0, 0, 0, 1]), jnp.ones(4, bool)
    actual = advantages.per_state(
        group_centered, advantages.turn_returns(rewards, mask, 0.5), tokens, mask, group, scored
    )
    mean = (2 + 1 + 2) / 3
    np.testing.assert_allclose(
        actual[:, 1::2],
        [[0, 2 - mean, 0], [-0.5, 1 - mean, 2 - mean], [0.5, 0, 0], [0, 0, 0]],
        rtol=1e-6,
        atol=1e-7,
    )


def test_all_tokens_of_an_observation_count():
    observations = np.array([[1, 2, 3], [1, 2, 3], [3, 2, 1], [0, 2, 3], [1, 2, 0], [2, 3, 1]])
    tokens = jnp.asarray(np.pad(observations, ((0, 0), (0, 1))))
    mask = jnp.arange(4)[None] == jnp.full((6, 1), 3)
    ids = advantages.observation_ids(tokens, mask, jnp.zeros(6, int))[:, 3]
    assert ids[0] == ids[1]
    assert len({*ids.tolist()}) == 5
    # Of different lengths: the row that begins earlier with the same tokens is another state.
    shifted = mask.at[0].set(jnp.array([False, False, True, False]))
    ids = advantages.observation_ids(tokens, shifted, jnp.zeros(6, int))
    assert ids[0, 2] != ids[1, 3]


@pytest.mark.slow
def test_step_groups_of_an_enumerated_problem_are_its_advantages():
    """Two binary actions; the first one decides the state of the second. With every episode of the
    uniform policy once, step groups compute Q(s, a) - V(s), which neither the episode's return
    nor a comparison of second turns does."""
    first, second = np.array([*itertools.product((0, 1), (0, 1))]).T
    rewards = np.array([[1.0, 5.0], [7.0, 8.0]])[first, second]
    tokens, mask, placed = turns_of_one_token(
        [[9, state] for state in first], [[0, reward] for reward in rewards]
    )
    returns = advantages.turn_returns(placed, mask)
    group, scored = jnp.zeros(4, int), jnp.ones(4, bool)
    by_state = advantages.per_state(group_centered, returns, tokens, mask, group, scored)
    # Mean over the episodes that take an action: Q - V. Values: V(9) = 5.25, V(0) = 3, V(1) = 7.5.
    np.testing.assert_allclose(by_state[:2, 1].mean(), 3 - 5.25, rtol=1e-6)
    np.testing.assert_allclose(by_state[2:, 1].mean(), 7.5 - 5.25, rtol=1e-6)
    np.testing.assert_allclose(by_state[:, 3], [1 - 3, 5 - 3, 7 - 7.5, 8 - 7.5], rtol=1e-6)
    by_turn = advantages.per_turn(group_centered, returns, mask, group, scored)
    assert by_turn[1, 3] < 0 < by_state[1, 3]


# --- episodes of several rows ---


def as_rows_of_turns(rollout):
    """Return the rollout with a row for each turn: its history is no action there."""
    turns = np.asarray(advantages.turn_ids(rollout.action_mask))
    kept = [(row, k) for row in range(len(turns)) for k in range(1, max(turns[row].max(), 1) + 1)]
    rows = np.array([row for row, _ in kept])
    mask = turns[rows] == np.array([k for _, k in kept])[:, None]
    split = type(rollout)(
        **{
            name: None if array is None else jnp.asarray(np.asarray(array)[rows])
            for name, array in vars(rollout).items()
        }
    )
    split = replace(
        split,
        action_mask=jnp.asarray(mask),
        rewards=jnp.where(mask, split.rewards, 0.0),
        episode_id=jnp.asarray(rows + 7),
    )
    return split, rows


@pytest.mark.slow
@pytest.mark.parametrize("advantage", EVERY)
@pytest.mark.parametrize("given_to", ["episode", "turn"])
def test_an_episode_counts_once_however_many_rows_it_has(advantage, given_to):
    rollout = tiny.rollout()
    split, rows = as_rows_of_turns(rollout)
    assert len(rows) > len(rollout.tokens)

    def credited(data):
        returns = jnp.where(data.action_mask, data.rewards, 0.0).sum(-1)
        return credit.credited_advantages(
            data, data.rewards, returns, advantage, given_to, 0.9, 1.0
        )

    expected = jnp.where(split.action_mask, credited(rollout)[rows], 0.0)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(credited(split), expected, rtol=0, atol=3e-6)
    # A row for each episode is no change at all.
    numbered = replace(rollout, episode_id=jnp.arange(len(rollout.tokens)))
    np.testing.assert_array_equal(credited(numbered), credited(rollout))


@pytest.mark.parametrize("estimate", [advantages.gae, advantages.turn_gae])
@pytest.mark.parametrize("lam", [0.0, 0.8])
def test_gae_goes_on_in_the_next_row_of_an_episode(estimate, lam):
    rollout = tiny.rollout()
    split, rows = as_rows_of_turns(rollout)
    values = jnp.asarray(np.random.default_rng(3).normal(size=rollout.tokens.shape))
    whole = estimate(rollout.rewards, values, rollout.action_mask, 0.9, lam)
    actual = estimate(split.rewards, values[rows], split.action_mask, 0.9, lam, split.episode_id)
    np.testing.assert_allclose(
        actual, jnp.where(split.action_mask, whole[rows], 0.0), rtol=0, atol=2e-6
    )


def test_compared_turns_are_those_with_others_of_their_kind():
    """By state, 8 answers to nobody else; by turn, only one row has a third turn."""
    tokens, mask, rewards = turns_of_one_token([[7, 5], [7, 5], [7, 6, 6], [8]], np.zeros((4, 1)))
    rollout = replace(
        tiny.rollout(groups=((2, (1, 1, 1, 1)),)),
        tokens=tokens,
        action_mask=mask,
        rewards=rewards,
    )
    assert credit.compared_turns(rollout, "episode") is None
    by_turn = credit.compared_turns(rollout, "turn")
    by_state = credit.compared_turns(rollout, "step")
    np.testing.assert_array_equal(by_turn, mask & (jnp.arange(6) != 5)[None])
    np.testing.assert_array_equal(by_state, mask.at[3].set(False))


@pytest.mark.slow
def test_padding_rows_count_nothing():
    """Neither inside the batch nor at its end, whatever their numbers are."""
    split, _ = as_rows_of_turns(tiny.rollout())
    order = np.insert(np.arange(len(split.tokens)), 3, 2)
    padded = type(split)(
        **{
            name: None if array is None else jnp.asarray(np.asarray(array)[order])
            for name, array in vars(split).items()
        }
    )
    padded = replace(padded, action_mask=padded.action_mask.at[3].set(False))
    for unit in ("episode", "turn"):
        results = [
            np.asarray(
                credit.credited_advantages(
                    data,
                    data.rewards,
                    jnp.where(data.action_mask, data.rewards, 0.0).sum(-1),
                    group_scaled,
                    unit,
                    0.9,
                    1.0,
                )
            )
            for data in (split, padded)
        ]
        np.testing.assert_allclose(np.delete(results[1], 3, 0), results[0], rtol=0, atol=1e-6)
        assert not results[1][3].any()
