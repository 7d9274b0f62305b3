"""Dynamic sampling replaces groups whose rewards are all equal; the filter drops groups whose
rewards hardly differ."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.fixtures.echo import digit, score_prompts
from tpu_rl import data
from tpu_rl.errors import InputError
from tpu_rl.experience.config import BatchConfig
from tpu_rl.experience.source import Source
from tpu_rl.experience.sources import pairing, rollouts
from tpu_rl.rollout import dynamic_sampling, records, scoring
from tpu_rl.rollout.engine import RolloutRequest
from tpu_rl.rollout.scoring import Scored


def collect(rounds: list[list[str]], max_rounds: int) -> Scored:
    """Return a batch of groups of two. `rounds` has the prompts of each round."""
    stream = iter([[{"prompt": prompt} for prompt in prompts] for prompts in rounds])
    num_completions = 2 * len(rounds[0])

    def roll_out(rows: list[dict[str, Any]], round_: int) -> Scored:
        prompts = [row["prompt"] for row in rows]
        return score_prompts(prompts, {"digit": digit}, 2, first_row_id=round_ * num_completions)

    return dynamic_sampling.collect(lambda _: next(stream), roll_out, len(rounds[0]), max_rounds)


def test_groups_with_equal_rewards_are_replaced():
    scored = collect([["11", "10"], ["99", "01"], ["no third round"]], max_rounds=5)
    assert scored.prompts == ["10", "10", "01", "01"]
    np.testing.assert_array_equal(scored.rewards, [1, 0, 0, 1])
    np.testing.assert_array_equal(scored.rollout.group_id, [0, 0, 1, 1])
    np.testing.assert_array_equal(scored.rollout.birth_key[:, 0], [2, 3, 6, 7])


def test_batch_is_filled_after_the_last_round():
    scored = collect([["11", "00"], ["22", "10"], ["no third round"]], max_rounds=1)
    assert scored.prompts == ["10", "10", "11", "11"]
    np.testing.assert_array_equal(scored.rollout.group_id, [0, 0, 1, 1])
    assert len({*scored.rollout.birth_key[:, 0]}) == 4


def test_batch_is_the_first_round_without_dynamic_sampling():
    scored = collect([["11", "00"], ["no second round"]], max_rounds=0)
    assert scored.prompts == ["11", "11", "00", "00"]
    metrics = records.metrics(scored)
    assert metrics["reward/zero_std_groups"] == 1
    assert metrics["rollout/kept"] == 1


def test_metrics_describe_all_rounds():
    scored = collect([["11", "18"], ["44", "10"], ["20", "00"]], max_rounds=2)
    assert scored.prompts == ["10", "10", "20", "20"]
    metrics = records.metrics(scored)
    expected = {
        "reward/mean": 14 / 11,
        "reward/digit/mean": 14 / 11,
        "reward/zero_std_groups": 4 / 6,
        "reward/errors": 1,
        "rollout/kept": 2 / 6,
        "rollout/length_mean": 1.5,
        "rollout/truncated": 0.5,
        "rollout/tokens": 18,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert metrics["perf/rollout_tokens_per_second"] == 18 / metrics["time/rollout"]
    # The fault is in a group that was passed over: there is a warning, but no record in the batch.
    assert records.warnings(scored) == ["1 of 12 completions not scored: digit: no 8 here"]
    assert not any("error" in record for record in records.records(scored, 1))


# --- rounds as large as needed ---


@pytest.mark.parametrize(
    ("informative", "expected"),
    [
        # 2 are missing and 6 of 8 were informative: 2.7 prompts.
        ([1] * 6 + [0] * 2, 4),
        ([1] * 7 + [0], 2),
        # 7 are missing and 1 of 8 was informative: 56.
        ([1] + [0] * 7, 8),
        ([0] * 8, 8),
        # Two rounds: 1 is missing and 7 of 16 were informative, 2.3 prompts.
        ([1] * 7 + [0] * 9, 4),
    ],
)
def test_as_many_prompts_as_the_share_says_are_needed(informative, expected):
    assert dynamic_sampling.num_needed(np.array(informative, bool), 8) == expected


def test_an_odd_batch_is_not_divided():
    assert dynamic_sampling.num_needed(np.array([True, True, False]), 3) == 3


def test_needed_rows_come_one_by_one_and_resume_exactly():
    """Each step samples 4 prompts, then 2 or 1, and none of the rows of the stream is lost."""
    texts = ["10", "20", "30", "11", "40", "22", "12", "13", "14", "31", "32", "21"]
    rows = [{"prompt": text} for text in texts]
    seen: list[str] = []

    class EngineOfEchoes:
        def roll_out(self, params: Any, request: RolloutRequest) -> Scored:
            prompts = [row["prompt"] for row in request.rows]
            seen.extend(prompts)
            return score_prompts(prompts, {"digit": digit}, 2, request.first_row_id)

    def make() -> Source:
        stream = data.stream(rows, seed=0, batch_size=1, shuffle=False)
        engine: Any = EngineOfEchoes()
        batch = BatchConfig(prompts=4, group_size=2)
        return rollouts.rollout_source(engine, stream, batch, 3, only_needed=True)

    state: Any = SimpleNamespace(params={}, step=0)
    source = make()
    first = source.draw(1, state)
    assert seen == ["10", "20", "30", "11", "40", "22"]
    saved = json.loads(json.dumps(source.get_state()))
    assert saved["next_batch"] == 6
    source.draw(2, state)
    whole = list(seen)
    resumed = make()
    resumed.set_state(saved)
    seen.clear()
    resumed.draw(2, state)
    assert whole[6:] == seen == ["12", "13", "14", "31"]
    assert first.metrics["rollout/kept"] == 4 / 6


# --- the filter by variance ---


def test_groups_with_the_largest_deviations_are_kept_in_their_order():
    scored = collect([["12", "33", "40", "13"]], max_rounds=0)
    kept = dynamic_sampling.keep_most_varied(scored, 0.5)
    assert kept.prompts == ["40", "40", "13", "13"]
    np.testing.assert_array_equal(kept.rewards, [4, 0, 1, 3])
    np.testing.assert_array_equal(kept.rollout.group_id, [0, 0, 1, 1])
    metrics = records.metrics(kept)
    assert metrics["rollout/kept"] == 0.5
    assert metrics["reward/mean"] == pytest.approx(17 / 8)
    # Of groups with equal deviations the first is kept, and at least one in all.
    assert dynamic_sampling.keep_most_varied(scored, 0.01).prompts == ["40", "40"]
    equal = collect([["33", "12", "21"]], max_rounds=0)
    assert dynamic_sampling.keep_most_varied(equal, 1 / 3).prompts == ["12", "12"]


def test_a_share_of_one_is_no_filter():
    scored = collect([["12", "33"]], max_rounds=0)
    assert dynamic_sampling.keep_most_varied(scored, 1.0) is scored


def test_a_completion_without_a_reward_counts_in_no_deviation():
    """Group 28 has one reward, and so no deviation."""
    scored = collect([["28", "10", "33"]], max_rounds=0)
    assert np.isnan(scored.rewards[1])
    assert dynamic_sampling.keep_most_varied(scored, 0.3).prompts == ["10", "10"]


def test_the_filter_chooses_from_what_dynamic_sampling_returns():
    scored = collect([["11", "10"], ["40", "44"]], max_rounds=1)
    kept = dynamic_sampling.keep_most_varied(scored, 0.5)
    assert kept.prompts == ["40", "40"]
    metrics = records.metrics(kept)
    assert metrics["rollout/kept"] == 1 / 4
    assert metrics["rollout/tokens"] == 2 * 6


# --- episodes of several rows ---


def with_episodes(scored: Scored, episode_id: list[int]) -> Scored:
    rollout = scored.rollout
    rows = np.arange(len(episode_id), dtype=np.int32)
    parent = np.where(np.diff(episode_id, prepend=-1) == 0, rows - 1, rows).astype(np.int32)
    return replace(
        scored,
        rollout=replace(
            rollout,
            episode_id=np.array(episode_id, np.int32),
            parent=parent,
            shared=np.zeros_like(rows),
        ),
    )


def test_groups_of_episodes_with_several_rows_are_taken_whole():
    """Two episodes a group: of rows 0 1 | 2, then 3 | 4 5. The rewards of rows add up."""
    scored = score_prompts(["123", "201"], {"digit": digit}, 3)
    scored = with_episodes(scored, [0, 0, 1, 2, 3, 3])
    np.testing.assert_array_equal(scoring.by_episode(scored).rewards, [3, 3, 2, 1])
    kept = dynamic_sampling.keep_most_varied(scored, 0.5)
    np.testing.assert_array_equal(kept.rewards, [2, 0, 1])
    np.testing.assert_array_equal(kept.rollout.group_id, [0, 0, 0])
    np.testing.assert_array_equal(kept.rollout.episode_id, [0, 1, 1])
    np.testing.assert_array_equal(kept.rollout.parent, [0, 1, 1])
    metrics = records.metrics(kept)
    expected = {
        "reward/mean": 9 / 4,
        "reward/digit/mean": 9 / 4,
        "reward/zero_std_groups": 0.5,
        "rollout/kept": 0.5,
        "rollout/length_max": 4,
        "rollout/tokens": scored.lengths.sum(),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    for compare in (pairing.pair_up, pairing.grade):
        with pytest.raises(InputError, match="several rows"):
            compare(scored)


def test_rounds_of_other_widths_and_with_other_fields_become_one_batch():
    first = score_prompts(["10", "20"], {"digit": digit}, 2)
    rewritten = with_episodes(
        score_prompts(["342", "120"], {"digit": digit}, 3), [0, 0, 1, 2, 2, 3]
    )
    per_token = ("tokens", "action_mask", "log_probs", "behaviour_log_probs", "rewards")
    narrow = {name: np.asarray(getattr(rewritten.rollout, name))[:, :5] for name in per_token}
    second = replace(rewritten, rollout=replace(rewritten.rollout, **narrow))
    taken = dynamic_sampling.take([first, second], np.array([3, 0]))
    assert taken.prompts == ["120"] * 3 + ["10"] * 2
    np.testing.assert_array_equal(taken.rollout.episode_id, [0, 0, 1, 2, 3])
    np.testing.assert_array_equal(taken.rollout.parent, [0, 0, 2, 3, 3])
    np.testing.assert_array_equal(
        taken.rollout.tokens[:, :5],
        np.concatenate([second.rollout.tokens[3:], np.asarray(first.rollout.tokens)[:2, :5]]),
    )
    assert taken.rollout.birth_key.shape == (5, 2)
    assert not taken.rollout.action_mask[:3, 5:].any()


def test_a_row_for_each_episode_changes_no_metric():
    scored = score_prompts(["12", "33", "18"], {"digit": digit}, 2)
    numbered = with_episodes(scored, [*range(6)])
    expected = records.metrics(scored)
    np.testing.assert_equal(records.metrics(numbered), expected)
    assert scoring.by_episode(numbered).faults == scored.faults
    empty = replace(numbered.rollout, action_mask=np.asarray(numbered.rollout.action_mask).copy())
    empty.action_mask[5] = False
    padded = scoring.by_episode(replace(numbered, rollout=empty))
    np.testing.assert_array_equal(padded.rewards, scored.rewards[:5])
