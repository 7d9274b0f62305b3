"""Dynamic sampling: groups whose rewards are all equal are replaced."""

from typing import Any

import numpy as np
import pytest

from tests.fixtures.echo import digit, score_prompts
from tpu_rl.rollout import dynamic_sampling, records
from tpu_rl.rollout.scoring import Scored


def collect(rounds: list[list[str]], max_rounds: int) -> Scored:
    """Return a batch of groups of two. `rounds` has the prompts of each round."""
    stream = iter([[{"prompt": prompt} for prompt in prompts] for prompts in rounds])
    num_completions = 2 * len(rounds[0])

    def roll_out(rows: list[dict[str, Any]], round_: int) -> Scored:
        prompts = [row["prompt"] for row in rows]
        return score_prompts(prompts, {"digit": digit}, 2, first_row_id=round_ * num_completions)

    return dynamic_sampling.collect(lambda: next(stream), roll_out, max_rounds)


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
