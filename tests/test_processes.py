"""Who does what among several processes, and what they learn of each other. Real ones: test_several_processes.py."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch import config, hosts, preflight
from tpu_rl import processes, reward_models, rollouts
from tpu_rl.errors import InputError


def on_each(monkeypatch, count: int, work: Callable[[], Any]) -> list[Any]:
    """What `work` returns on each of so many processes, one after the other; it gathers once.

    Each is played twice: first to hear what it says, then with what all say.
    """
    said: list[Any] = []

    class Heard(Exception):
        pass

    def listen(value):
        said.append(json.loads(json.dumps(value)))
        raise Heard

    monkeypatch.setattr(processes, "count", lambda: count)
    for index in range(count):
        monkeypatch.setattr(processes, "index", lambda index=index: index)
        monkeypatch.setattr(processes, "gather", listen)
        with pytest.raises(Heard):
            work()
    found = []
    for index in range(count):
        monkeypatch.setattr(processes, "index", lambda index=index: index)
        monkeypatch.setattr(processes, "gather", lambda value: list(said))
        found.append(work())
    return found


def test_one_process_decides_alone():
    assert processes.count() == 1
    assert processes.index() == 0
    assert processes.gather((1, "a")) == [(1, "a")]
    assert processes.any_of(True)
    assert not processes.any_of(False)
    assert processes.from_first(lambda: 3) == 3
    assert list(range(10))[processes.share(10)] == list(range(10))


@pytest.mark.parametrize("items", [0, 1, 5, 16])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_each_item_is_one_processs(monkeypatch, items, count):
    monkeypatch.setattr(processes, "count", lambda: count)
    owned = []
    for index in range(count):
        monkeypatch.setattr(processes, "index", lambda index=index: index)
        owned.append(list(range(items))[processes.share(items)])
    assert sorted(item for own in owned for item in own) == list(range(items))
    sizes = [len(own) for own in owned]
    assert max(sizes) - min(sizes) <= 1


def test_what_one_says_all_hear(monkeypatch):
    assert on_each(monkeypatch, 3, lambda: processes.any_of(processes.index() == 2)) == [True] * 3
    assert on_each(monkeypatch, 3, lambda: processes.any_of(False)) == [False] * 3
    assert on_each(monkeypatch, 3, lambda: processes.from_first(processes.index)) == [0] * 3


def test_rewards_of_several_processes_are_those_of_one(monkeypatch):
    """Each asked about once, whole groups on one process; what is not scored and what failed, too."""
    prompts, completions = [f"p{i // 3}" for i in range(15)], [str(i) for i in range(15)]
    columns = {"answer": [str(i % 4) for i in range(15)]}
    asked: list[list[str]] = []

    def judge(prompts, completions, answer):
        asked.append(list(completions))
        return [None if text == "7" else "bad" if text == "13" else float(text) / 3 for text in completions]

    def length(prompts, completions, **_):
        assert len(prompts) % 3 == 0
        return [0.1 * len(text) for text in completions]

    def score(most_faults: float = 0.5) -> Any:
        functions = {"judge": judge, "length": length}
        return rollouts.score_together(functions, prompts, completions, columns, most_faults, 3, {})

    alone = score()
    for count in (2, 4, 7):
        for found in on_each(monkeypatch, count, score):
            np.testing.assert_array_equal(found.totals, alone.totals)
            assert found.totals.dtype == np.float32
            assert found.parts.keys() == alone.parts.keys()
            for name, part in alone.parts.items():
                np.testing.assert_array_equal(found.parts[name], part)
            assert [(fault.function, fault.row) for fault in found.faults] == [("judge", 13)]
    # Asked again row by row where it failed, so batches are looked at: none holds a part of a group.
    assert {len(batch) % 3 for batch in asked if len(batch) > 1} == {0}
    # One of 15 failed, but one of the last process's three: the share counts over all.
    on_each(monkeypatch, 5, lambda: score(0.1))
    with pytest.raises(InputError, match="fail on 1 of 15"):
        on_each(monkeypatch, 5, lambda: score(0.05))


# --- files that are each host's own ------------------------------------------------------------------------------


def write_on_each(folder: Path, name: str, *contents: str) -> None:
    """A file of each host, all of which are folders of this one."""
    for index, content in enumerate(contents):
        path = folder / str(index) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "chat_template.jinja"])
def test_an_adapter_s_bases_must_be_alike(monkeypatch, tmp_path, name):
    write_on_each(tmp_path, "adapter/adapter_config.json", *2 * [json.dumps({"base_model_name_or_path": "../base"})])
    write_on_each(tmp_path, "base/config.json", "{}", "{}")
    write_on_each(tmp_path, "base/" + name, "one", "one")

    def compare() -> None:
        hosts.require_alike_models([tmp_path / str(processes.index()) / "adapter"])

    on_each(monkeypatch, 2, compare)
    write_on_each(tmp_path, "base/" + name, "one", "two")
    with pytest.raises(InputError, match=rf"(?s)process 1 on host .*model file {name} \(\d\) is 3 bytes"):
        on_each(monkeypatch, 2, compare)


@pytest.mark.parametrize("flags", [["--reward"], ["--reward", "arithmetic", "--evaluation.reward"]])
def test_reward_files_must_be_alike(monkeypatch, tmp_path, flags):
    program = "def score(prompts, completions, **_):\n    return [{}.0 for _ in completions]\n"
    wanted = config.parse(["arithmetic_grpo", "--run-dir", "runs/a", *flags, "mine.py:score"])

    def compare() -> None:
        monkeypatch.chdir(tmp_path / str(processes.index()))
        preflight.check_rewards(wanted, [])

    write_on_each(tmp_path, "mine.py", program.format(1), program.format(1))
    on_each(monkeypatch, 2, compare)
    write_on_each(tmp_path, "mine.py", program.format(1), program.format(2))
    with pytest.raises(InputError, match=r"(?s)process 1 on host .*reward file mine\.py is \d+ bytes"):
        on_each(monkeypatch, 2, compare)


def test_trained_reward_models_are_compared_with_their_ensembles(tmp_path):
    for name in ("model", "other"):
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / "config.json").touch()
    reward_models.write_reading(tmp_path / "run/model", reward_models.Reading(others=("other",)))
    wanted = config.parse(["arithmetic_grpo", "--run-dir", "runs/a", "--reward", str(tmp_path / "run")])
    assert preflight.reward_directories(wanted) == [tmp_path / "run/model", tmp_path / "run/other"]
