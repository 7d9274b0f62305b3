"""The firewall: whatever an environment does, the other episodes go on, and its own one has a
reason."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tpu_rl.environments.pool import EnvironmentLimits, EnvironmentPool, ToolResult
from tpu_rl.errors import InputError

FILE = '''
import asyncio, ctypes, os, sqlite3, sys, time

class Env:
    """An environment as TRL's documentation has them."""

    made = 0

    def __init__(self):
        type(self).made += 1
        self.reward = 0.0
        self._connection = sqlite3.connect(":memory:")

    def reset(self, **row) -> str | None:
        if row.get("fault"):
            exec(row["fault"])
        self.reward = 0.0
        self.text = row.get("text", "")
        self._connection.execute("select 1")
        return f"Hello {self.text}." if self.text else None

    def echo(self, message: str) -> str:
        """
        Echo the message back from the environment.

        Args:
            message: The message to echo

        Returns:
            The echoed message.
        """
        if message == "over":
            raise ValueError("Game over.")
        self._connection.execute("select 1")
        self.reward = float(len(message))
        return message

    async def wait(self, seconds: float) -> str:
        """Wait.

        Args:
            seconds: How long.
        """
        await asyncio.sleep(seconds)
        return "waited"

    def block(self, seconds: float) -> str:
        """Wait in a way that blocks the thread.

        Args:
            seconds: How long.
        """
        time.sleep(seconds)
        return "waited"

    def do(self, code: str) -> str:
        """Run code.

        Args:
            code: The code.
        """
        exec(code)
        return "done"

    async def get_reward(self) -> float | None:
        return {"unscored": None, "nan": float("nan")}.get(self.text, self.reward)
'''


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("environments") / "mine.py"
    file.write_text(FILE)
    return f"{file}:Env"


@pytest.fixture
def pool(path):
    pool = EnvironmentPool(path, EnvironmentLimits(workers=2, call_seconds=1.0, memory_gb=2.0))
    yield pool
    pool.close()


@pytest.mark.parametrize("isolate", [True, False])
def test_a_class_written_for_trl_runs_unchanged(path, isolate):
    pool = EnvironmentPool(path, EnvironmentLimits(isolate=isolate, workers=1))
    (description,) = pool.descriptions.values()
    names = [tool["function"]["name"] for tool in description.tools]
    assert names == ["block", "do", "echo", "wait"]
    assert description.is_scored
    assert pool.reset(0, {"prompt": "p", "text": "you"}).result().text == "Hello you."
    assert pool.reset(1, {"prompt": "p", "text": "unscored"}).result().text == "Hello unscored."
    calls = [("echo", {"message": "abc"}), ("wait", {"seconds": 0.0}), ("echo", {"m": 1})]
    reply = pool.call(0, [*calls, ("echo", {"message": "over"}), ("search", {})]).result()
    assert reply.results[:2] == (
        ToolResult("echo", "abc", False),
        ToolResult("wait", "waited", False),
    )
    assert [result.is_error for result in reply.results] == [False, False, True, True, True]
    assert "unexpected keyword argument 'm'" in reply.results[2].content
    assert reply.results[3].content == "{'error': 'Game over.'}"
    assert reply.results[4].content == "{'error': 'Tool search not found.'}"
    scored = pool.reward(0).result()
    assert (scored.reward, scored.fault) == (3.0, "")
    assert scored.state == {"reward": 3.0, "text": "you"}
    assert pool.reward(1).result().reward is None
    # The second instance is made for the second episode, and then both are used again.
    for episode in (0, 1):
        pool.release(episode)
    time.sleep(0.1)
    for episode in (5, 6):
        assert pool.reset(episode, {}).result().text is None
    made = pool.call(5, [("do", {"code": "raise ValueError(type(self).made)"})]).result()
    assert made.results[0].content == "{'error': '3'}", "one instance is made to look at"
    if isolate and "PYTHONHASHSEED" not in os.environ:
        ordered = pool.call(5, [("do", {"code": "raise ValueError({'a', 'b', 'c', 'd'})"})])
        assert ordered.result().results[0].content == str(
            {
                "error": subprocess.check_output(
                    [sys.executable, "-c", "print({'a', 'b', 'c', 'd'})"],
                    env=os.environ | {"PYTHONHASHSEED": "0"},
                    text=True,
                ).strip()
            }
        )
    pool.close()


FAULTS = {
    "reset raises": (None, "raise ValueError('no')", "ValueError: no (<string>:1)"),
    "exits": ("sys.exit('bye')", "", "SystemExit: bye"),
    "sleeps": ("time.sleep(1000)", "", "no answer within 1 s ("),
    "never ends": ("while True: pass", "", "no answer within 1 s (<string>:1)"),
    "takes all memory": ("bytearray(10 ** 10)", "", "MemoryError"),
}
"""Name -> (code of a tool, or None; code of reset; what is said)."""


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_costs_its_own_episode_only(pool, name):
    code, reset_code, message = FAULTS[name]
    for episode in range(4):
        assert not pool.reset(episode, {"text": str(episode)}).result().fault
    if code is None:
        reply = pool.reset(1, {"fault": reset_code}).result()
    else:
        reply = pool.call(1, [("do", {"code": code})]).result()
    assert message in reply.fault
    for episode in (0, 2, 3):
        assert pool.call(episode, [("echo", {"message": "x"})]).result().results[0].content == "x"
        assert pool.reward(episode).result().reward == 1.0
    for episode in range(4):
        pool.release(episode)
    assert pool.reset(7, {"text": "again"}).result().text == "Hello again."


DEATHS = {
    "crashes": ("ctypes.string_at(0)", "its process was killed by SIGSEGV"),
    "leaves": ("os._exit(3)", "its process ended with exit code 3"),
    "hangs in C": ("str(7 ** (10 ** 8))", "no answer within 1 s"),
    "closes every file": ("os.closerange(0, 100)", "its process "),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEATHS)
def test_a_worker_that_dies_costs_the_episodes_that_lived_in_it(pool, name):
    code, message = DEATHS[name]
    for episode in range(4):
        pool.reset(episode, {"text": str(episode)}).result()
    reply = pool.call(1, [("do", {"code": code})]).result()
    assert message in reply.fault
    replies = [pool.reward(episode).result() for episode in range(4)]
    lost = [episode for episode in range(4) if replies[episode].fault]
    assert len(lost) == 2
    assert 1 in lost
    for episode in range(4):
        pool.release(episode)
        assert pool.reset(episode, {"text": "again"}).result().text == "Hello again."


def test_a_reward_that_is_no_number_is_a_fault(pool):
    pool.reset(0, {"text": "nan"}).result()
    assert "it returned NaN" in pool.reward(0).result().fault


@pytest.mark.parametrize("tool", ["wait", "block"])
def test_slow_tools_make_nobody_wait(pool, tool):
    resets = [pool.reset(episode, {}) for episode in range(64)]
    assert not any(future.result().fault for future in resets)
    began = time.monotonic()
    futures = [pool.call(episode, [(tool, {"seconds": 0.2})]) for episode in range(64)]
    assert all(future.result().results[0].content == "waited" for future in futures)
    assert time.monotonic() - began < 1.0, "one after the other they take 12.8 s"


def test_an_episode_goes_on_in_another_pool(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        textwrap.dedent('''
        from tpu_rl.environments.contract import PlainState
        class Sum(PlainState):
            def __init__(self):
                self.seen = []
            def reset(self, **row):
                self.total = 0
            def add(self, number: int) -> str:
                """Add.

                Args:
                    number: The number.
                """
                self.total += number
                self.seen.append(number)
                return str(self.total)
            def get_reward(self):
                return float(self.total)
        class Bare:
            def reset(self, **row):
                pass
        ''')
    )
    pools = [EnvironmentPool(f"{file}:Sum", EnvironmentLimits(workers=1)) for _ in range(2)]
    pools[0].require_resumable()
    assert pools[0].reset(0, {}, saves=True).result().saved == {"seen": [], "total": 0}
    reply = pools[0].call(0, [("add", {"number": 3})]).result()
    assert reply.saved == {"seen": [3], "total": 3}
    assert pools[0].reset(1, {}).result().saved is None
    # An instance that other episodes have used gives nothing to this one.
    pools[1].reset(7, {}).result()
    pools[1].call(7, [("add", {"number": 50})]).result()
    pools[1].release(7)
    assert not pools[1].restore(7, {}, reply.saved).result().fault
    reply = pools[1].call(7, [("add", {"number": 4})]).result()
    assert (reply.results[0].content, reply.saved) == ("7", {"seen": [3, 4], "total": 7})
    assert pools[1].reward(7).result().reward == 7
    with pytest.raises(InputError, match="episodes of Bare cannot go on in the next step"):
        EnvironmentPool(f"{file}:Bare", EnvironmentLimits(isolate=False)).require_resumable()
    for pool in pools:
        pool.close()


def test_rows_select_their_class(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        textwrap.dedent('''
        class Left:
            def reset(self, side, **row):
                return f"{side} {sorted(row)}"
        class Right(Left):
            def turn(self) -> str:
                """Turn."""
                return "turned"
        SIDES = {"left": Left, "right": Right}
        ''')
    )
    pool = EnvironmentPool(f"{file}:SIDES", EnvironmentLimits(workers=1))
    row = {"environment": "right", "side": "r", "prompt": "p"}
    assert pool.reset(0, row).result().text == "r ['prompt']"
    assert pool.reset(1, {**row, "environment": "left"}).result().text == "r ['prompt']"
    assert pool.call(0, [("turn", {})]).result().results[0].content == "turned"
    assert pool.call(1, [("turn", {})]).result().results[0].is_error
    assert [len(pool.description({"environment": name}).tools) for name in ("left", "right")] == [
        0,
        1,
    ]
    with pytest.raises(InputError, match="a row belongs to the environment 'up'"):
        pool.reset(2, {"environment": "up"})
    with pytest.raises(InputError, match="the environment Left needs the column `side`"):
        pool.require_columns(["prompt", "sides"])
    pool.require_columns(["side"])
    pool.close()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("class Other: pass", "no class 'Env' in the environment file"),
        ("class Env: pass", "the environment Env has no method `reset`"),
        ("Env = 3", "an environment is a class, not 3"),
        ("1 / 0", "the environment file does not load"),
        ("import os; os._exit(7)", "the environment does not load"),
        ("class Env:\n    def __init__(self, x): pass", "the environment cannot be made"),
    ],
)
def test_bad_files_are_refused_at_once(tmp_path: Path, text, what):
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(InputError, match=what):
        EnvironmentPool(f"{file}:Env")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_process_that_cannot_be_started_makes_nobody_wait(monkeypatch):
    def fail(*_):
        raise OSError("no memory")

    monkeypatch.setattr("tpu_rl.runtime.workers.spawn", fail)
    with pytest.raises(RuntimeError, match="its process does not start"):
        EnvironmentPool("calculator", EnvironmentLimits(workers=1))


FORGE = """
import json, os, struct, sys
for frame in sys._current_frames().values():
    while frame is not None and frame.f_code.co_name != "main":
        frame = frame.f_back
    if frame is not None:
        replies = frame.f_locals["replies"]
for number in range(50):
    text = json.dumps({"id": number, "results": [["wait", "forged", False]]}).encode()
    os.write(replies, struct.pack("<Q", len(text)) + text)
"""


def test_an_episode_cannot_answer_for_another_one(path):
    pool = EnvironmentPool(path, EnvironmentLimits(workers=1))
    pool.reset(0, {}).result()
    waiting = pool.call(0, [("wait", {"seconds": 0.2})])
    assert pool.reset(1, {"fault": FORGE}).result().fault == ""
    assert waiting.result().results == (ToolResult("wait", "waited", False),)
    pool.close()
