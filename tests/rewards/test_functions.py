"""Reward functions of a user: registered, async, and those that ask about the rollout by name."""

import asyncio
import json
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from tests.fixtures.echo import (
    TOKENIZER,
    EchoDecoding,
    digit,
    echo_engine,
    roll_out,
)
from tpu_rl import rewards, wings
from tpu_rl.errors import InputError
from tpu_rl.rewards import registry
from tpu_rl.rewards.worker_pool import IsolatedReward, RewardLimits
from tpu_rl.rollout.engine import RolloutRequest
from tpu_rl.rollout.streaming_rewards import StreamingRewards
from tpu_rl.verifiers import gsm8k_answers, programs

PROMPTS = ["a", "b", "c"]
COMPLETIONS = ["1", "2", "3"]


def float32(values):
    return np.array(values, np.float32)


def score(function, **columns):
    return rewards.score({"f": function}, PROMPTS, COMPLETIONS, columns)


@pytest.fixture
def no_registered(monkeypatch):
    monkeypatch.setattr(registry.REGISTERED, "by_name", {})


# --- registered functions ---


def test_a_registered_function_has_a_name(no_registered):
    assert rewards.register("digit", digit) == "python:digit"
    functions = registry.reward_functions(["python:digit", "gsm8k"], rewards.DEFAULT_LIMITS)
    assert functions == {"digit": digit, "gsm8k": gsm8k_answers.gsm8k}
    assert not rewards.runs_during_sampling(functions["digit"])
    rewards.register("digit", len)
    assert registry.resolve("python:digit") is len


def test_a_function_that_nobody_registered_is_asked_for(no_registered):
    with pytest.raises(InputError) as error:
        registry.resolve("python:mine")
    assert error.value.what == "the reward mine came from Python; pass it again"


@pytest.mark.parametrize(("name", "near"), [("choise", "choice"), ("python_test", "python_tests")])
def test_a_misspelled_reward_gets_the_nearest_name(name, near):
    with pytest.raises(InputError, match="does not name a reward function") as error:
        registry.resolve(name)
    assert error.value.fix == f"did you mean {near}?"


def test_a_file_can_import_its_neighbors(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbor_of_rewards.py").write_text("VALUE = 0.5\n")
    file = tmp_path / "mine.py"
    file.write_text(
        "from neighbor_of_rewards import VALUE\n"
        "class Score:\n"
        "    def __call__(self, completions, **columns):\n"
        "        return [VALUE] * len(completions)\n"
        "score = Score()\n"
    )
    in_process = RewardLimits(isolate=False)
    function = registry.resolve(f"{file}:score", in_process)
    assert function(completions=COMPLETIONS) == [0.5] * 3
    with pytest.raises(InputError, match="is a class") as error:
        registry.resolve(f"{file}:Score", in_process)
    assert error.value.fix == "name an object of it: score = Score()"


def test_rewards_whose_row_says_so_run_during_sampling():
    names = {name for name, row in wings.VERIFIERS.items() if row.in_workers}
    resolved = sorted(name for name, row in wings.VERIFIERS.items() if not row.required)
    functions = registry.reward_functions(resolved, rewards.DEFAULT_LIMITS, True)
    assert names == {"math", "python_checks", "python_tests"}
    assert {name for name in functions if rewards.runs_during_sampling(functions[name])} == names
    assert rewards.runs_during_sampling(partial(programs.python_tests, confine=False))


@pytest.mark.parametrize(
    ("name", "function", "where"),
    [
        ("my.py:f", digit, "register('my.py:f', <function"),
        ("", digit, "register('', <function"),
        ("f", 1.0, "register('f', 1.0)"),
        ("f", dict, "register('f', <class 'dict'>)"),
    ],
)
def test_only_functions_with_names_are_registered(no_registered, name, function, where):
    with pytest.raises(InputError) as error:
        rewards.register(name, function)
    assert error.value.where.startswith(where)
    assert "register('score', score)" in error.value.fix


def test_a_fault_of_a_registered_function_costs_its_rows_only(no_registered):
    def mine(completions, **_):
        return [1.0 if text == "1" else 1 / 0 if text == "2" else "no" for text in completions]

    functions = registry.reward_functions([rewards.register("mine", mine)], rewards.DEFAULT_LIMITS)
    scores = rewards.score(functions, PROMPTS, COMPLETIONS, {}, max_fault_share=1.0)
    np.testing.assert_array_equal(scores.totals, float32([1, np.nan, np.nan]))
    assert [(fault.function, fault.row) for fault in scores.faults] == [("mine", 1), ("mine", 2)]
    assert scores.faults[0].message.startswith("ZeroDivisionError: ")
    assert scores.faults[1].message == "it returned 'no' and not a number"


# --- async functions ---


async def grade(text):
    await asyncio.sleep(0.001)
    return float(text)


async def grade_all(completions, **_):
    return await asyncio.gather(*(grade(text) for text in completions))


def test_async_functions_are_awaited():
    np.testing.assert_array_equal(score(grade_all).totals, float32([1, 2, 3]))


def test_async_functions_are_awaited_where_an_event_loop_runs():
    async def notebook():
        return score(grade_all)

    np.testing.assert_array_equal(asyncio.run(notebook()).totals, float32([1, 2, 3]))


def test_all_calls_have_one_event_loop():
    loops = []

    async def remember(completions, **_):
        loops.append(asyncio.get_running_loop())
        return [0.0] * len(completions)

    score(remember)
    score(remember)
    assert loops[0] is loops[1]


async def cancelled():
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def ends_the_program():
    sys.exit("bye")


async def fails():
    raise KeyError("three")


async def a_task_ends_the_program():
    await asyncio.gather(ends_the_program())


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (fails, "KeyError: 'three'"),
        (cancelled, "CancelledError"),
        (ends_the_program, "RuntimeError: SystemExit: bye"),
        (a_task_ends_the_program, "RuntimeError: SystemExit: bye"),
    ],
)
def test_a_fault_of_an_async_function_costs_its_row_only(fault, message):
    async def mine(completions, **_):
        if "2" in completions:
            await fault()
        return [1.0] * len(completions)

    scores = score(mine)
    np.testing.assert_array_equal(scores.totals, float32([1, np.nan, 1]))
    assert scores.faults[0].message.startswith(message)
    assert "asyncio" not in scores.faults[0].frames.replace("asyncio.", "")
    np.testing.assert_array_equal(score(grade_all).totals, float32([1, 2, 3]))


ASYNC_FILE = """
import asyncio

loops = []

async def score(completions, **_):
    loops.append(asyncio.get_running_loop())
    assert all(loop is loops[0] for loop in loops)
    await asyncio.sleep(0)
    return [1 / (float(text) - 2) for text in completions]
"""


def test_async_functions_of_files_are_awaited_in_their_worker(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(ASYNC_FILE)
    function = IsolatedReward(f"{file}:score", RewardLimits())
    scores = score(function)
    np.testing.assert_array_equal(scores.totals, float32([-1, np.nan, 1]))
    assert scores.faults[0].message.startswith("ZeroDivisionError: ")
    assert "(mine.py:10)" in scores.faults[0].message
    function.stop()


# --- what functions may ask about the rollout ---

ASKING = """
import json

def score(completions, completion_ids, token_counts, truncated, group, step, **columns):
    assert set(columns) <= {"prompts", "answer"}
    with open(__file__ + ".log", "a") as log:
        for row in zip(completions, completion_ids, token_counts, truncated, group, step):
            print(json.dumps(row), file=log)
    return [
        100 * number + 10 * count + ended + sum(ids) / 1000 + steps / 10
        for ids, count, ended, number, steps in zip(
            completion_ids, token_counts, truncated, group, step
        )
    ]
"""


class Reporting(EchoDecoding):
    """Reports all rows as they end, the first group first."""

    def sample(self, *args, **settings):
        rollout = super().sample(*args, **settings)
        for row in range(len(rollout.tokens)):
            ids = rollout.tokens[row][rollout.action_mask[row]].tolist()
            settings["on_finished"]({row: ids})
        return rollout


def test_functions_get_what_they_ask_for_by_name_in_both_paths(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(ASKING)
    log = tmp_path / "mine.py.log"
    rows = [{"prompt": "12", "answer": "1"}, {"prompt": "34", "answer": "1"}]
    function = IsolatedReward(f"{file}:score", RewardLimits())
    eos = TOKENIZER.eos_ids[0]
    ids = {digit: TOKENIZER.encode(digit)[0] for digit in "1234"}
    expected = [
        ["1", [ids["1"], eos], 2, False, 0, 1],
        ["2", [ids["2"]], 1, True, 0, 1],
        ["3", [ids["3"], eos], 2, False, 1, 1],
        ["4", [ids["4"]], 1, True, 1, 1],
    ]
    scored = {}
    for name, decoding in (("end", EchoDecoding(2)), ("streamed", Reporting(2))):
        log.write_text("")
        scored[name] = roll_out(echo_engine(decoding, {"mine": function}), rows)
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert lines == expected
        assert scored[name].errors == []
    np.testing.assert_array_equal(scored["end"].rewards, scored["streamed"].rewards)
    assert np.isfinite(scored["end"].rewards).all()
    function.stop()


def test_functions_that_name_nothing_get_nothing():
    received = {}

    def everything(**columns):
        received.update(columns)
        return [0.0] * 4

    rows = [{"prompt": "12", "answer": "1"}, {"prompt": "34", "answer": "1"}]
    roll_out(echo_engine(EchoDecoding(2), {"f": everything}), rows)
    assert set(received) == {"prompts", "completions", "answer"}


def test_a_column_of_the_data_goes_first():
    def mine(completions, step, group):
        return [float(value) for value in step]

    engine = echo_engine(EchoDecoding(2), {"f": mine})
    scored = engine.roll_out({}, RolloutRequest([{"prompt": "12", "step": 7}], step=3))
    np.testing.assert_array_equal(scored.rewards, [7, 7])


def test_what_is_asked_for_is_cut_to_rows_when_a_call_fails():
    def mine(completions, group):
        assert len(group) == len(completions) == 1, "only one"
        return [float(group[0])]

    scores = rewards.score(
        {"f": mine}, PROMPTS, COMPLETIONS, {}, rollout_columns={"group": [4, 5, 6]}
    )
    np.testing.assert_array_equal(scores.totals, float32([4, 5, 6]))
    assert scores.faults == []


def test_asking_outside_a_rollout_is_a_missing_column():
    with pytest.raises(InputError, match="needs a column 'step'"):
        score(lambda completions, step: [0.0] * 3)


def test_truncated_is_known_at_the_end_only_where_streaming_cannot_tell(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def score(completions, truncated):\n    return truncated\n")
    function = IsolatedReward(f"{file}:score", RewardLimits())
    arguments = ({"mine": function}, [{"prompt": "1"}], 2, TOKENIZER.decode_answer)
    assert StreamingRewards(*arguments).on_finished is None
    streaming = StreamingRewards(*arguments, is_truncated=lambda ids: len(ids) == 2)
    assert streaming.on_finished is not None
    streaming.on_finished({0: TOKENIZER.encode("1"), 1: TOKENIZER.encode("12")})
    np.testing.assert_array_equal(streaming.answers()["mine"][0], [0, 1])
    function.stop()


# --- conversations ---


def test_the_answer_to_a_conversation_is_a_message():
    talk = [{"role": "user", "content": "hello"}]
    answer = [{"role": "assistant", "content": "7"}]
    assert rewards.as_answers([talk, "hello"], ["7", "8"]) == [answer, "8"]
    received = []

    def mine(prompts, completions):
        received.extend(zip(prompts, completions, strict=True))
        return [float(rewards.text_of(completion)) for completion in completions]

    engine = echo_engine(EchoDecoding(2), {"f": mine})
    sampled = engine.generate({}, RolloutRequest([{"prompt": "12"}, {"prompt": "34"}], step=1))
    scored = engine.score(replace(sampled, rows=[{"prompt": talk}, {"prompt": "34"}]))
    assert received == [
        (talk, [{"role": "assistant", "content": "1"}]),
        (talk, [{"role": "assistant", "content": "2"}]),
        ("34", "3"),
        ("34", "4"),
    ]
    np.testing.assert_array_equal(scored.rewards, [1, 2, 3, 4])


def test_the_streamed_answer_to_a_conversation_is_a_message(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def score(prompts, completions):\n"
        "    return [float(messages[-1]['content']) for messages in completions]\n"
    )
    function = IsolatedReward(f"{file}:score", RewardLimits())
    talk = [{"role": "user", "content": "hello"}]
    streaming = StreamingRewards({"mine": function}, [{"prompt": talk}], 2, TOKENIZER.decode_answer)
    assert streaming.on_finished is not None
    streaming.on_finished({0: TOKENIZER.encode("5"), 1: TOKENIZER.encode("6")})
    np.testing.assert_array_equal(streaming.answers()["mine"][0], [5, 6])
    function.stop()
