"""Metrics, sample records and warnings of scored completions."""

from dataclasses import replace

import numpy as np

from tests.fixtures.echo import digit, score_prompts
from tpu_rl.diagnosis.training_health import HealthMonitor
from tpu_rl.rewards.worker_process import ExplainedReward
from tpu_rl.rollout import records, scoring


def length(completions):
    return [len(text) for text in completions]


def test_faults_are_recorded_with_their_row_and_function():
    scored = score_prompts(["18", "28"], {"digit": digit, "length": length}, group_size=2)
    objects = records.records(scored, step=3)
    errors = [record.get("error") for record in objects]
    assert errors == [None, "digit: no 8 here", None, "digit: no 8 here"]
    assert objects[0] == {
        "step": 3,
        "prompt": "18",
        "completion": "1",
        "reward": 2.0,
        "parts": {"digit": 1.0, "length": 1.0},
    }
    assert scored.errors == ["row 1, digit: no 8 here", "row 3, digit: no 8 here"]
    assert records.metrics(scored)["reward/errors"] == 2
    assert records.metrics(scored)["reward/unscored"] == 0
    assert records.warnings(scored) == ["2 of 4 completions not scored: digit: no 8 here"]


def test_the_reason_of_a_reward_is_no_error():
    def explained(completions):
        return [ExplainedReward(0.0, "not carried") for _ in completions]

    scored = score_prompts(["11"], {"first": explained, "length": length}, group_size=2)
    record = records.records(scored, step=3)[0]
    assert (record["reward"], record["reason"]) == (1.0, "first: not carried")
    assert "error" not in record
    assert records.metrics(scored)["reward/errors"] == 0
    assert records.warnings(scored) == scored.errors == []


def test_completions_that_no_function_judges_are_counted_and_said_once():
    def first_only(prompts, completions):
        return [1.0 if prompt == "11" else None for prompt in prompts]

    scored = score_prompts(["11", "22"], {"first": first_only}, group_size=2)
    row = records.metrics(scored)
    assert (row["reward/unscored"], row["reward/errors"]) == (0.5, 0)
    watch = HealthMonitor()
    assert "50% of the completions have no reward" in watch.observe(row, [])[0]
    assert watch.observe(row, []) == []


def test_completion_on_which_two_functions_fail_counts_once():
    scored = score_prompts(["118"], {"first": digit, "second": digit}, group_size=3)
    assert scored.faults == ["", "", "first: no 8 here; second: no 8 here"]
    assert records.metrics(scored)["reward/errors"] == 1


def test_warnings_are_three_lines_with_the_most_frequent_first():
    scored = score_prompts(["56", "78", "78", "11", "11", "11"], {"digit": digit}, group_size=2)
    assert records.warnings(scored) == [
        "2 of 12 completions not scored: digit: no 7 here",
        "2 of 12 completions not scored: digit: no 8 here",
        "2 more kinds of fault in reward functions",
    ]
    assert records.warnings(score_prompts(["11"], {"digit": digit}, group_size=2)) == []


def test_metrics_if_no_completion_is_scored():
    metrics = records.metrics(score_prompts(["99"], {"digit": digit}, group_size=2))
    means = [metrics["reward/mean"], metrics["reward/std"], metrics["reward/digit/mean"]]
    assert np.isnan(means).all()
    assert metrics["reward/zero_std_groups"] == 1
    assert metrics["rollout/kept"] == 0


def test_zero_std_groups_is_absent_for_groups_of_one():
    scored = score_prompts(["12"], {"digit": digit}, group_size=1)
    assert "reward/zero_std_groups" not in records.metrics(scored)


def test_rows_of_data_are_recorded_without_a_reward():
    pair = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    judged = {"prompt": "1+1=", "completion": "2", "label": True}
    of_pair, of_talk, of_judged, last = records.of_data([pair, talk, judged, judged, judged], 3)
    assert of_pair["completion"] == "2"
    assert of_pair["rejected"] == "3"
    assert of_talk["prompt"] == "user: a"
    assert of_talk["completion"] == "assistant: b"
    assert of_judged["label"] is True
    assert {"step": 3, "reward": None, "source": "data"}.items() <= last.items()


def test_what_nothing_rewards_has_no_reward():
    silent = score_prompts(["18"], {}, group_size=2)
    assert not {"reward/mean", "reward/zero_std_groups"} & records.metrics(silent).keys()
    assert records.records(silent, 1)[0]["reward"] is None
    zeros = score_prompts(["18"], {"none": lambda completions: [0.0] * 2}, group_size=2)
    assert records.metrics(zeros)["reward/mean"] == 0
    assert records.records(zeros, 1)[0]["reward"] == 0


def test_several_completions_or_steps_of_a_row_are_one_text():
    steps = {"prompt": "1+2=", "completions": ["1+2=3;", "#3"], "labels": [True, True]}
    (record,) = records.of_data([steps], 1)
    assert record["completion"] == "1+2=3;\n#3"
    assert record["labels"] == [True, True]
    talks = [[{"role": "assistant", "content": text}] for text in ("3", "4")]
    (record,) = records.of_data([{"prompt": "1+2=", "completions": talks}], 1)
    assert record["completion"] == "assistant: 3\nassistant: 4"


def test_times_of_episodes_are_percentiles():
    outcomes = scoring.EpisodeOutcomes(
        names=["Game"] * 4,
        is_scored=False,
        rewards=np.full(4, np.nan, np.float32),
        turn_rewards=np.zeros((4, 4), np.float32),
        faults=[""] * 4,
        messages=[[]] * 4,
        states=[{}] * 4,
        counts={"turns": np.ones(4, int)},
        waits=[[("policy", first), ("policy", 1.0)] for first in (0.0, 1.0, 2.0, 10.0)],
    )
    scored = score_prompts(["12", "34"], {"digit": digit}, group_size=2)
    row = records.metrics(replace(scored, episodes=outcomes))
    assert row["time/episode_policy_p50"] == 2.5
    np.testing.assert_allclose(row["time/episode_policy_p90"], 8.6)
    assert outcomes.take(np.array([3])).seconds["policy"].tolist() == [11.0]
