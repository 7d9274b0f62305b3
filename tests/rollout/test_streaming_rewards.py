"""Rewards computed while other rows are decoded equal rewards computed at the end."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fixtures.echo import TOKENIZER, EchoDecoding, digit, echo_engine, roll_out
from tpu_rl import rewards
from tpu_rl.errors import InputError
from tpu_rl.rewards.worker_pool import IsolatedReward, RewardLimits
from tpu_rl.rollout.engine import Decoding
from tpu_rl.rollout.scoring import Scored
from tpu_rl.rollout.streaming_rewards import StreamingRewards
from tpu_rl.types import Rollout

PROMPTS = ["123", "409", "217", "36"]
GROUP_SIZE = 2
REWARD = """
def score(prompts, completions, answer, **columns):
    with open({log!r}, "a") as log:
        print(*completions, file=log)
    if any("7" in prompt for prompt in prompts):
        raise ValueError("not sevens")

    def score_text(text, right):
        if text == "9":
            return None
        return ValueError(f"no {{text}}") if text == "4" else float(text) + float(right)

    return [score_text(text, right) for text, right in zip(completions, answer)]
{more}
"""


def isolated_reward(
    folder: Path, more: str = "", name: str = "mine"
) -> tuple[IsolatedReward, Path]:
    """Return a function in a worker, and the file to which it writes the completions of a call."""
    log = folder / f"{name}.log"
    log.touch()
    (folder / f"{name}.py").write_text(REWARD.format(log=str(log), more=more))
    return IsolatedReward(f"{folder / name}.py:score", RewardLimits(fault_share=1.0)), log


def wait_for_lines(log: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(log.read_text().splitlines()) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


class ReportingDecoding(EchoDecoding):
    """Reports rows in a given order, and waits for a number of calls after each report."""

    def __init__(self, order: list[list[int]], log: Path, num_calls: list[int]):
        """Report `order[i]`, then wait until the log has `num_calls[i]` lines."""
        super().__init__(GROUP_SIZE)
        self.reports = (order, log, num_calls)

    def sample(self, *args: Any, **settings: Any) -> Rollout:
        order, log, num_calls = self.reports
        rollout = super().sample(*args, **settings)
        assert settings["on_finished"] is not None
        for rows, count in zip(order, num_calls, strict=True):
            ended = {row: rollout.tokens[row][rollout.action_mask[row]].tolist() for row in rows}
            settings["on_finished"](ended)
            wait_for_lines(log, count)
        return rollout


def score_prompts(decoding: Decoding, functions: dict[str, Any]) -> Scored:
    rows = [{"prompt": prompt, "answer": str(index)} for index, prompt in enumerate(PROMPTS)]
    return roll_out(echo_engine(decoding, functions, max_fault_share=1.0), rows)


def test_streamed_rewards_equal_rewards_at_the_end(tmp_path):
    function, log = isolated_reward(tmp_path)
    functions = {"mine": function, "digit": digit}
    at_end = score_prompts(EchoDecoding(GROUP_SIZE), functions)
    assert log.read_text().splitlines()[0] == "1 2 4 0 2 1 3 6"
    log.write_text("")
    # Rows 0 and 3 complete no group. Then groups 0 and 1 are complete, and at last groups 2 and 3,
    # of which the first makes the function raise.
    order = [[0, 3], [1, 2, 5], [4, 6, 7]]
    streamed = score_prompts(ReportingDecoding(order, log, [0, 1, 2]), functions)
    assert log.read_text().splitlines()[:2] == ["1 2 4 0", "2 1 3 6"]
    np.testing.assert_array_equal(streamed.rewards, at_end.rewards)
    for name in functions:
        np.testing.assert_array_equal(streamed.parts[name], at_end.parts[name])
    assert np.flatnonzero(np.isnan(at_end.parts["mine"])).tolist() == [2, 4, 5]
    assert [bool(fault) for fault in streamed.faults] == [bool(fault) for fault in at_end.faults]
    assert "no 4" in streamed.faults[2]
    assert "not sevens" in streamed.faults[4]
    function.stop()


def test_whole_batch_reward_is_called_once_at_the_end(tmp_path):
    function, log = isolated_reward(tmp_path, "score.whole_batch = True")
    per_group, group_log = isolated_reward(tmp_path, name="other")
    assert not rewards.runs_during_sampling(function)
    assert rewards.runs_during_sampling(per_group)
    decoding = ReportingDecoding([[0, 1], [2, 3, 4, 5, 6, 7]], group_log, [1, 2])
    score_prompts(decoding, {"all": function, "some": per_group})
    assert log.read_text().splitlines()[0] == "1 2 4 0 2 1 3 6"
    assert group_log.read_text().splitlines()[0] == "1 2"
    function.stop()
    per_group.stop()


def test_function_of_this_process_is_called_once_at_the_end():
    sizes = []

    def score(completions, **_):
        sizes.append(len(completions))
        return [0.0] * len(completions)

    class NeverReports(EchoDecoding):
        def sample(self, *args: Any, **settings: Any) -> Rollout:
            assert settings["on_finished"] is None
            return super().sample(*args, **settings)

    score_prompts(NeverReports(GROUP_SIZE), {"score": score})
    assert sizes == [8]


def test_missing_column_is_an_error_before_sampling():
    def score(completions, solution):
        return [0.0] * len(completions)

    class NeverSamples(EchoDecoding):
        def sample(self, *args: Any, **settings: Any) -> Rollout:
            raise AssertionError

    with pytest.raises(InputError, match="needs a column 'solution'"):
        score_prompts(NeverSamples(GROUP_SIZE), {"score": score})


def test_each_process_scores_its_own_rows(tmp_path):
    function, log = isolated_reward(tmp_path)
    functions = {"mine": function}
    rows = [{"prompt": "1", "answer": "0"}] * (8 // GROUP_SIZE)
    streaming = StreamingRewards(
        functions, rows, GROUP_SIZE, TOKENIZER.decode_answer, local=slice(4, 8)
    )
    assert streaming.on_finished is not None
    streaming.on_finished({row: TOKENIZER.encode_prompt(str(row)) for row in range(8)})
    values, faults, _ = streaming.answers()["mine"]
    assert log.read_text().splitlines()[0] == "4 5 6 7"
    np.testing.assert_array_equal(values, [np.nan, 5, 6, 7])
    assert [fault.row for fault in faults] == [0]
    without_rows = StreamingRewards(
        functions, rows, GROUP_SIZE, TOKENIZER.decode_answer, local=slice(8, 8)
    )
    assert without_rows.on_finished is not None  # All processes must gather together.
    without_rows.on_finished({0: [1]})
    assert without_rows.answers() == {}
    function.stop()


def test_part_of_a_batch_has_its_share_of_the_time(tmp_path):
    file = tmp_path / "slow.py"
    file.write_text("import time\ndef score(completions, **_):\n    time.sleep(60)\n")
    limits = RewardLimits(batch_seconds=8.0, row_seconds=0.2)
    function = IsolatedReward(f"{file}:score", limits)
    began = time.monotonic()
    limited = function.limited_to_share(0.25)
    values, faults, _ = rewards.apply("slow", limited, ["a", "b"], ["1", "2"], {})
    # It would sleep for a minute. Starting the worker again takes a while.
    assert time.monotonic() - began < 30
    assert np.isnan(values).all()
    assert len(faults) == 2
    function.stop()


def test_call_has_time_for_one_completion_until_the_time_of_the_batch_is_spent():
    """A small group does not end a judge that takes the time allowed for one completion."""
    limits = RewardLimits(batch_seconds=300.0, row_seconds=10.0)
    function = IsolatedReward.__new__(IsolatedReward)
    function._limits = limits

    def seconds(share: float, spent: float) -> float:
        return function.limited_to_share(share, spent)._seconds

    assert seconds(0.5, 0.0) == 150
    assert seconds(1 / 32, 0.0) / 2 > limits.row_seconds
    assert seconds(1 / 32, 280.0) == 20
    assert seconds(1 / 32, 400.0) == 300 / 32  # Its own share.
    spent = 0.0
    for _ in range(32):  # Each call takes all its time.
        spent += seconds(1 / 32, spent)
    assert spent <= 2 * limits.batch_seconds


def test_slow_judge_of_small_groups_is_not_stopped(tmp_path):
    """There are 16 groups and 32 s. Half of a group's share is less than the judge takes for one
    completion."""
    file = tmp_path / "judge.py"
    file.write_text(
        "import time\n"
        "def score(completions, **_):\n"
        "    time.sleep(1.2)\n"
        "    return [1.0] * len(completions)\n"
    )
    function = IsolatedReward(f"{file}:score", RewardLimits(batch_seconds=32.0, row_seconds=10.0))
    streaming = StreamingRewards(
        {"judge": function}, [{"prompt": "1"}] * 16, 2, TOKENIZER.decode_answer
    )
    assert streaming.on_finished is not None
    streaming.on_finished({row: TOKENIZER.encode_prompt("1") for row in range(2)})
    values, faults, _ = streaming.answers([0])["judge"]
    np.testing.assert_array_equal(values, 1.0)
    assert faults == []
    function.stop()
