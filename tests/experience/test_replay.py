"""Successes of the past in groups that have none."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.fixtures.echo import TOKENIZER, digit, score_prompts
from tpu_rl.algos.mixed import MixedConfig
from tpu_rl.errors import InputError
from tpu_rl.experience import transforms
from tpu_rl.experience.replay import Replay
from tpu_rl.types import RowSource

PROMPTS = ["12", "34"]


def scored_with(returns, prompts=PROMPTS, shift=0.0):
    scored = score_prompts(prompts, {"digit": digit}, group_size=2)
    returns = np.array(returns, np.float32)
    mask = np.asarray(scored.rollout.action_mask)
    log_probs = np.where(mask, -1.0 - 0.1 * np.arange(mask.shape[1]) - shift, 0.0)
    rollout = replace(
        scored.rollout,
        log_probs=log_probs.astype(np.float32),
        behaviour_log_probs=(2 * log_probs).astype(np.float32),
    )
    return replace(scored, rollout=rollout, rewards=returns)


def added(scored):
    """(tokens, log-probs, reward) of the replayed actions of each group, or None."""
    rollout = scored.rollout
    result = []
    for row in np.flatnonzero(np.asarray(rollout.source) == RowSource.REPLAY):
        mask = np.asarray(rollout.action_mask)[row]
        assert rollout.scored[row] == mask.any()
        assert np.isnan(scored.rewards[row])
        found = [np.asarray(getattr(rollout, name))[row, mask] for name in ("tokens", "log_probs")]
        reward = float(np.asarray(rollout.rewards)[row].sum())
        result.append((*(array.tolist() for array in found), reward) if mask.any() else None)
    return result


def test_a_group_without_success_gets_the_latest_one():
    replay = Replay(TOKENIZER, size=9, min_reward=0.5)
    first = scored_with([0.0, 1.0, 0.0, np.nan])
    assert added(replay(first, 1, None)) == [None, None]
    again = scored_with([0.0, 0.0, 0.0, 0.8], shift=1.0)
    mixed = replay(again, 2, None)
    mask = np.asarray(first.rollout.action_mask)[1]
    ids, log_probs, reward = added(mixed)[0]
    assert ids == np.asarray(first.rollout.tokens)[1, mask].tolist()
    assert log_probs == np.asarray(first.rollout.log_probs)[1, mask].tolist()
    assert reward == 1.0
    assert added(mixed)[1] is None
    assert replay.metrics() == {"rollout/replayed": 1.0, "rollout/replay_store": 2.0}
    # The rows of the policy are as they were.
    policy = np.asarray(mixed.rollout.source) == RowSource.POLICY
    np.testing.assert_array_equal(np.asarray(mixed.rollout.tokens)[policy], again.rollout.tokens)
    np.testing.assert_array_equal(mixed.rewards[policy], again.rewards)
    both = added(replay(scored_with([0.0] * 4), 3, None))
    assert [reward for _, _, reward in both] == [1.0, pytest.approx(0.8)]


def test_the_store_is_bounded_and_a_part_of_checkpoints():
    replay = Replay(TOKENIZER, size=2, min_reward=0.5)
    for prompts in (["12", "34"], ["12", "56"]):
        replay(scored_with([1.0, 0.0, 1.0, 0.0], prompts), 1, None)
    # "34" was solved before "12" and "56".
    resumed = Replay(TOKENIZER, size=2, min_reward=0.5)
    # Buckets hold records with sorted keys; the order of the store decides who leaves it.
    resumed.set_state(json.loads(json.dumps(replay.get_state(), sort_keys=True)))
    assert list(map(list, resumed.get_state())) == list(map(list, replay.get_state()))
    for store in (replay, resumed):
        failed = store(scored_with([0.0] * 6, ["12", "34", "56"]), 2, None)
        assert [row is not None for row in added(failed)] == [True, False, True]
    assert added(failed) == added(replay(scored_with([0.0] * 6, ["12", "34", "56"]), 2, None))


def test_the_algorithm_counts_and_checks_its_rows():
    spec = MixedConfig(method="replay").experience
    assert (spec.rows_added, spec.columns, spec.expert_column) == (1, ("prompt",), None)
    replay = Replay(TOKENIZER, spec.replay.size, spec.replay.min_reward)
    (chain,) = transforms.of_algorithm(spec, TOKENIZER, (replay,))
    assert len(chain(scored_with([0.0] * 4), 1, None).rollout.tokens) == 6
    for settings in ({"old_log_probs": "recomputed"}, {"column": "other"}):
        with pytest.raises(InputError):
            MixedConfig(method="replay", **settings)
