"""Rewards of groups that have ended, while others are being decoded: the same ones as of all at the end."""

import time
from pathlib import Path

import numpy as np
import pytest

from tests.test_rollouts import LIMIT, TOKENIZER, digit, speaker
from tpu_rl import early_rewards, rewards, rollouts
from tpu_rl.errors import InputError
from tpu_rl.reward_workers import IsolatedReward, RewardLimits

PROMPTS = ["123", "409", "217", "36"]
GROUP = 2
REWARD = """
def score(prompts, completions, answer, **columns):
    with open({log!r}, "a") as log:
        print(*completions, file=log)
    if any("7" in prompt for prompt in prompts):
        raise ValueError("not sevens")
    return [None if text == "9" else ValueError(f"no {{text}}") if text == "4" else float(text) + float(right)
            for text, right in zip(completions, answer)]
{more}
"""


def reward(folder: Path, more: str = "", name: str = "mine") -> tuple[IsolatedReward, Path]:
    """A function in a worker, and the file in which it notes what it is asked."""
    log = folder / f"{name}.log"
    log.touch()
    (folder / f"{name}.py").write_text(REWARD.format(log=str(log), more=more))
    return IsolatedReward(f"{folder / name}.py:score", RewardLimits(fault_share=1.0)), log


def wait_for(log: Path, lines: int) -> None:
    deadline = time.monotonic() + 60
    while len(log.read_text().splitlines()) < lines:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def telling(order: list[list[int]], log: Path, calls: list[int]) -> rollouts.Generate:
    """A sampler that tells of rows in this order, and each time waits until so many calls have been made."""

    def generate(prompts, row_ids, on_finished):
        rollout = speaker(GROUP)(prompts, row_ids, None)
        assert on_finished is not None
        for rows, count in zip(order, calls, strict=True):
            on_finished({row: rollout.tokens[row][rollout.action_mask[row]].tolist() for row in rows})
            wait_for(log, count)
        return rollout

    return generate


def roll(generate: rollouts.Generate, functions: dict) -> rollouts.Scored:
    rows = [{"prompt": prompt, "answer": str(i)} for i, prompt in enumerate(PROMPTS)]
    return rollouts.roll_out(rows, np.arange(len(rows) * GROUP), generate, TOKENIZER, functions, LIMIT, 1.0)


def test_whole_groups_are_scored_before_the_last_row_ends_and_get_the_same_rewards(tmp_path):
    function, log = reward(tmp_path)
    functions = {"mine": function, "digit": digit}
    late = roll(speaker(GROUP), functions)
    assert log.read_text().splitlines()[0] == "1 2 4 0 2 1 3 6"
    log.write_text("")
    # Rows 0 and 3 complete no group; then groups 0 and 1; at the last border 2 and 3, of which the first raises.
    early = roll(telling([[0, 3], [1, 2, 5], [4, 6, 7]], log, [0, 1, 2]), functions)
    lines = log.read_text().splitlines()
    assert lines[:2] == ["1 2 4 0", "2 1 3 6"]
    np.testing.assert_array_equal(early.rewards, late.rewards)
    for name in functions:
        np.testing.assert_array_equal(early.parts[name], late.parts[name])
    assert np.isnan(late.parts["mine"]).tolist() == [False, False, True, False, True, True, False, False]
    assert [bool(fault) for fault in early.faults] == [bool(fault) for fault in late.faults]
    assert "no 4" in early.faults[2]
    assert "not sevens" in early.faults[4]
    function.stop()


def test_who_must_see_the_whole_batch_is_asked_once_at_its_end(tmp_path):
    function, log = reward(tmp_path, "score.whole_batch = True")
    per_group, other = reward(tmp_path, name="other")
    assert not rewards.works_elsewhere(function)
    assert rewards.works_elsewhere(per_group)
    roll(telling([[0, 1], [2, 3, 4, 5, 6, 7]], other, [1, 2]), {"all": function, "some": per_group})
    assert log.read_text().splitlines()[0] == "1 2 4 0 2 1 3 6"
    assert other.read_text().splitlines()[0] == "1 2"
    function.stop()
    per_group.stop()


def test_functions_of_this_process_are_asked_once_with_all():
    sizes = []

    def score(completions, **_):
        sizes.append(len(completions))
        return [0.0] * len(completions)

    def generate(prompts, row_ids, on_finished):
        assert on_finished is None
        return speaker(GROUP)(prompts, row_ids, None)

    roll(generate, {"score": score})
    assert sizes == [8]


def test_a_missing_column_is_known_before_anything_is_sampled():
    def score(completions, solution):
        return [0.0] * len(completions)

    def generate(prompts, row_ids, on_finished):
        raise AssertionError

    with pytest.raises(InputError, match="needs a column 'solution'"):
        roll(generate, {"score": score})


def test_processes_ask_about_their_own_rows_only(tmp_path):
    function, log = reward(tmp_path)
    columns = {"answer": ["0"] * 8}
    early = early_rewards.EarlyRewards({"mine": function}, ["1"] * 8, columns, 2, slice(4, 8), TOKENIZER.decode)
    assert early.on_finished is not None
    early.on_finished({row: TOKENIZER.encode_prompt(str(row)) for row in range(8)})
    values, faults = early.answers()["mine"]
    assert log.read_text().splitlines()[0] == "4 5 6 7"
    np.testing.assert_array_equal(values, [np.nan, 5, 6, 7])
    assert [fault.row for fault in faults] == [0]
    without_rows = early_rewards.EarlyRewards({"mine": function}, ["1"] * 8, columns, 2, slice(8, 8), TOKENIZER.decode)
    assert without_rows.on_finished is not None  # it takes part in the looking all the same
    without_rows.on_finished({0: [1]})
    assert without_rows.answers() == {}
    function.stop()


def test_a_part_of_the_batch_has_that_part_of_its_time(tmp_path):
    file = tmp_path / "slow.py"
    file.write_text("import time\ndef score(completions, **_):\n    time.sleep(60)\n")
    limits = RewardLimits(batch_seconds=8.0, row_seconds=0.2)
    whole = IsolatedReward(f"{file}:score", limits)
    began = time.monotonic()
    values, faults = rewards.ask("slow", whole.of_share(0.25), ["a", "b"], ["1", "2"], {})
    assert time.monotonic() - began < 30  # and not the minute that it would sleep; starting again takes a while
    assert np.isnan(values).all()
    assert len(faults) == 2
    whole.stop()


def test_a_question_has_time_for_one_completion_whatever_its_share_until_the_batchs_is_spent():
    """A judge that takes what a completion may take is not stopped as its group is small."""
    limits = RewardLimits(batch_seconds=300.0, row_seconds=10.0)
    function = IsolatedReward.__new__(IsolatedReward)
    function._limits = limits

    def seconds(share: float, spent: float) -> float:
        return function.of_share(share, spent)._seconds

    assert seconds(0.5, 0.0) == 150
    assert seconds(1 / 32, 0.0) / 2 > limits.row_seconds
    assert seconds(1 / 32, 280.0) == 20
    assert seconds(1 / 32, 400.0) == 300 / 32  # its own
    spent = 0.0
    for _ in range(32):  # each takes all that it may
        spent += seconds(1 / 32, spent)
    assert spent <= 2 * limits.batch_seconds


def test_a_slow_judge_of_small_groups_is_not_stopped(tmp_path):
    """Sixteen groups of a batch of 32 s: a sixteenth of it, halved, is less than the judge takes for one."""
    file = tmp_path / "judge.py"
    file.write_text(
        "import time\ndef score(completions, **_):\n    time.sleep(1.2)\n    return [1.0] * len(completions)\n"
    )
    function = IsolatedReward(f"{file}:score", RewardLimits(batch_seconds=32.0, row_seconds=10.0))
    rewards_of = {"judge": function}
    early = early_rewards.EarlyRewards(rewards_of, ["1"] * 32, {}, 2, slice(0, 32), TOKENIZER.decode)
    assert early.on_finished is not None
    early.on_finished({row: TOKENIZER.encode_prompt("1") for row in range(2)})
    values, faults = early.answers([0])["judge"]
    np.testing.assert_array_equal(values, 1.0)
    assert faults == []
    function.stop()
