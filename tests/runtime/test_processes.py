"""Several processes: shares, gathered values and files, with simulated processes.

The tests with real processes are in test_several_processes.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tpu_rl.commands import config
from tpu_rl.commands.checks import preflight
from tpu_rl.diagnosis import host_agreement
from tpu_rl.errors import InputError
from tpu_rl.rollout import scoring
from tpu_rl.runtime import processes


def run_on_each(monkeypatch, count: int, work: Callable[[], Any]) -> list[Any]:
    """Return the result of `work` on each of `count` simulated processes.

    `work` gathers once. It is called twice for each process: the first call records the value that
    the process contributes, and the second call receives the values of all processes.
    """
    contributions: list[Any] = []

    class Recorded(Exception):
        pass

    def record(value):
        contributions.append(json.loads(json.dumps(value)))
        raise Recorded

    monkeypatch.setattr(processes, "count", lambda: count)
    for index in range(count):
        monkeypatch.setattr(processes, "index", lambda index=index: index)
        monkeypatch.setattr(processes, "gather", record)
        with pytest.raises(Recorded):
            work()
    results = []
    for index in range(count):
        monkeypatch.setattr(processes, "index", lambda index=index: index)
        monkeypatch.setattr(processes, "gather", lambda value: list(contributions))
        results.append(work())
    return results


def test_functions_of_a_single_process():
    assert processes.count() == 1
    assert processes.index() == 0
    assert processes.gather((1, "a")) == [(1, "a")]
    assert processes.any_of(True)
    assert not processes.any_of(False)
    assert processes.from_first(lambda: 3) == 3
    assert list(range(10))[processes.share(10)] == list(range(10))


@pytest.mark.parametrize("num_items", [0, 1, 5, 16])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_each_item_belongs_to_one_process(monkeypatch, num_items, count):
    monkeypatch.setattr(processes, "count", lambda: count)
    shares = []
    for index in range(count):
        monkeypatch.setattr(processes, "index", lambda index=index: index)
        shares.append(list(range(num_items))[processes.share(num_items)])
    assert sorted(item for share in shares for item in share) == list(range(num_items))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_all_processes_get_the_same_value(monkeypatch):
    def any_of_last() -> bool:
        return processes.any_of(processes.index() == 2)

    assert run_on_each(monkeypatch, 3, any_of_last) == [True] * 3
    assert run_on_each(monkeypatch, 3, lambda: processes.any_of(False)) == [False] * 3
    assert run_on_each(monkeypatch, 3, lambda: processes.from_first(processes.index)) == [0] * 3


def test_rewards_of_several_processes_equal_those_of_one(monkeypatch):
    """Each process scores whole groups, also if completions are not scored or fail."""
    group_size = 3
    prompts = [f"p{index // group_size}" for index in range(15)]
    completions = [str(index) for index in range(15)]
    columns = {"answer": [str(index % 4) for index in range(15)]}
    calls: list[list[str]] = []

    def grade(prompts, completions, answer):
        calls.append(list(completions))
        return [
            None if text == "7" else "bad" if text == "13" else float(text) / 3
            for text in completions
        ]

    def length(prompts, completions, **_):
        assert len(prompts) % group_size == 0
        return [0.1 * len(text) for text in completions]

    def score(max_fault_share: float = 0.5) -> Any:
        functions = {"judge": grade, "length": length}
        return scoring.score_across_processes(
            functions, prompts, completions, columns, max_fault_share, group_size, {}
        )

    expected = score()
    for count in (2, 4, 7):
        for actual in run_on_each(monkeypatch, count, score):
            np.testing.assert_array_equal(actual.totals, expected.totals)
            assert actual.totals.dtype == np.float32
            assert actual.parts.keys() == expected.parts.keys()
            for name, part in expected.parts.items():
                np.testing.assert_array_equal(actual.parts[name], part)
            assert [(fault.function, fault.row) for fault in actual.faults] == [("judge", 13)]
    # After a failure a function is called row by row, so only calls with several rows count here.
    assert {len(call) % group_size for call in calls if len(call) > 1} == {0}
    # One of 15 completions failed, which is one of the last process's three. The limit is about 15.
    run_on_each(monkeypatch, 5, lambda: score(0.1))
    with pytest.raises(InputError, match="fail on 1 of 15"):
        run_on_each(monkeypatch, 5, lambda: score(0.05))


# --- files of each host ---


def write_on_each(folder: Path, name: str, *contents: str) -> None:
    """Write a file of each host. The files of host i are in the folder `i`."""
    for index, content in enumerate(contents):
        path = folder / str(index) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "chat_template.jinja"])
def test_model_under_an_adapter_must_be_the_same_on_all_hosts(monkeypatch, tmp_path, name):
    # A base that the working directory has goes before that of the adapter's directory.
    monkeypatch.chdir(tmp_path)
    adapter = json.dumps({"base_model_name_or_path": "../base"})
    write_on_each(tmp_path, "adapter/adapter_config.json", adapter, adapter)
    write_on_each(tmp_path, "base/config.json", "{}", "{}")
    write_on_each(tmp_path, "base/" + name, "one", "one")

    def compare() -> None:
        host_agreement.require_same_models([tmp_path / str(processes.index()) / "adapter"])

    run_on_each(monkeypatch, 2, compare)
    write_on_each(tmp_path, "base/" + name, "one", "two")
    message = rf"(?s)process 1 on host .*model file {name} \(\d\) is 3 bytes"
    with pytest.raises(InputError, match=message):
        run_on_each(monkeypatch, 2, compare)


@pytest.mark.parametrize("flags", [["--reward"], ["--reward", "arithmetic", "--evaluation.reward"]])
def test_reward_files_must_be_the_same_on_all_hosts(monkeypatch, tmp_path, flags):
    program = "def score(prompts, completions, **_):\n    return [{}.0 for _ in completions]\n"
    experiment = config.parse(["arithmetic_grpo", "--run-dir", "runs/a", *flags, "mine.py:score"])

    def compare() -> None:
        monkeypatch.chdir(tmp_path / str(processes.index()))
        preflight.check_rewards(experiment, [])

    write_on_each(tmp_path, "mine.py", program.format(1), program.format(1))
    run_on_each(monkeypatch, 2, compare)
    write_on_each(tmp_path, "mine.py", program.format(1), program.format(2))
    message = r"(?s)process 1 on host .*reward file mine\.py is \d+ bytes"
    with pytest.raises(InputError, match=message):
        run_on_each(monkeypatch, 2, compare)
