"""Partial rollouts: no completion is lost or changed, and a batch always has the same size."""

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixtures.runs import TINY, digest, rows_of
from tpu_rl.commands import compose, config
from tpu_rl.commands import run as run_command
from tpu_rl.commands.checks import preflight
from tpu_rl.commands.roles import RunContext
from tpu_rl.errors import InputError
from tpu_rl.experience.rows import tasks
from tpu_rl.experience.source import Source, StepExperience
from tpu_rl.experience.sources.partial_rollouts import interleave
from tpu_rl.rollout import prompts
from tpu_rl.rollout.scoring import PartialGroup
from tpu_rl.runtime import processes
from tpu_rl.sampler import PartialCompletion
from tpu_rl.types import TrainState

NUM_PROMPTS = 4
GROUP_SIZE = 2
MAX_UNFINISHED = 2
FLAGS = [
    "arithmetic_grpo",
    f"--batch.prompts={NUM_PROMPTS}",
    f"--batch.group-size={GROUP_SIZE}",
    f"--rollout.partial={MAX_UNFINISHED}",
    "--sampling.host-sync-steps=4",
    "--sampling.max-num-seqs=8",
]


class Run(NamedTuple):
    """A run before its first step."""

    context: RunContext
    state: TrainState
    make_source: Callable[[], Source]

    def draw(self, source: Source, steps: range) -> list[StepExperience]:
        """Return the experience of some steps, all with the same policy."""
        with jax.set_mesh(self.context.mesh):
            return [source.draw(step, self.state) for step in steps]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    run_dir = tmp_path_factory.mktemp("run")
    run_config = config.parse([*FLAGS, "--run-dir", str(run_dir)])
    mesh = compose.make_mesh(run_config.mesh)
    context, params = compose.make_context(run_config, run_dir, mesh)
    state = TrainState(jnp.zeros((), jnp.int32), params, None, None)
    return Run(context, state, lambda: compose.make_source(context, run_config.stages[0], params))


@pytest.mark.nightly
def test_completions_equal_those_of_a_single_request(run):
    """With the same policy and the keys that they began with."""
    steps = run.draw(run.make_source(), range(1, 5))
    assert steps[0].metrics["rollout/stale"] == 0
    assert all(0 < experience.metrics["rollout/stale"] < 1 for experience in steps[1:])
    decoding = compose.decoding(run.context)
    for experience in steps:
        assert experience.data.group_id.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        rows = [{"prompt": record["prompt"]} for record in experience.records[::GROUP_SIZE]]
        token_ids = prompts.encode(rows, run.context.language.tokenizer, 99)
        nothing = np.zeros(0, np.int32)
        resumed = [
            PartialCompletion(nothing, nothing, nothing, key, 0, False, False)
            for key in experience.data.birth_key
        ]
        rollout = decoding.sample(
            run.state.params, token_ids, 9, np.arange(len(resumed)), resumed=resumed
        )
        for name in ("tokens", "action_mask", "truncated"):
            np.testing.assert_array_equal(getattr(experience.data, name), getattr(rollout, name))
        np.testing.assert_allclose(experience.data.log_probs, rollout.log_probs, atol=2e-5)


@pytest.mark.slow
def test_each_prompt_of_the_stream_is_used_once(run):
    """Unfinished prompts are in the next batch, so that none is more than one step old."""
    source = run.make_source()
    stream = compose.row_stream(run.context, run.context.config.stages[0])
    stream_prompts = [row["prompt"] for _ in range(7) for row in next(stream)[1]]
    unfinished = []
    used = []
    for step in range(1, 6):
        (experience,) = run.draw(source, range(step, step + 1))
        step_prompts = [record["prompt"] for record in experience.records[::GROUP_SIZE]]
        assert set(unfinished) <= set(step_prompts)
        used += step_prompts
        state = source.get_state()
        unfinished = [row["prompt"] for row in state["unfinished"]["rows"]]
        assert len(unfinished) == MAX_UNFINISHED
        num_begun = len(used) + len(unfinished)
        assert sorted(used + unfinished) == sorted(stream_prompts[:num_begun])
        waiting = [row["prompt"] for row in state["waiting"]]
        assert waiting == stream_prompts[num_begun : num_begun + len(waiting)]


@pytest.mark.slow
def test_resume_is_bit_exact(run):
    original = run.make_source()
    resumed = run.make_source()
    run.draw(original, range(1, 3))
    resumed.set_state(json.loads(json.dumps(original.get_state())))
    expected_steps = run.draw(original, range(3, 5))
    actual_steps = run.draw(resumed, range(3, 5))
    for expected, actual in zip(expected_steps, actual_steps, strict=True):
        jax.tree.map(np.testing.assert_array_equal, expected.data, actual.data)
        assert expected.records == actual.records


def test_unfinished_groups_are_spread_over_the_devices():
    old = [PartialGroup({"prompt": f"old{index}"}) for index in range(4)]
    new = [PartialGroup({"prompt": f"new{index}"}) for index in range(6)]
    names = [group.row["prompt"] for group in interleave(old, new)]
    assert names == ["old0", "new0", "old1", "new1", "new2", "old2", "new3", "old3", "new4", "new5"]
    assert interleave([], new) == new


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rollout.partial", "4"], "4 of 4 groups cannot be carried over"),
        (["--rollout.partial", "-1"], "partial is -1"),
        (["--rollout.dynamic-sampling-rounds", "1"], "both choose the groups"),
        (["--batch.staleness=1"], "older than the number says"),
    ],
)
def test_impossible_settings_are_input_errors(flags, message):
    with pytest.raises(InputError, match=message):
        config.parse([*FLAGS, *flags])


def test_environments_whose_episodes_cannot_go_on_are_refused(tmp_path, monkeypatch):
    file = tmp_path / "game.py"
    file.write_text("class Game:\n    def reset(self): ...\n    def step(self, text): ...\n")
    flags = [*FLAGS, "--environment-limits.no-isolate", "--environment"]
    with pytest.raises(InputError, match="episodes of Game cannot go on") as error:
        preflight.check_environment(config.parse([*flags, f"{file}:Game"]), [])
    assert "`__getstate__` and `__setstate__`" in error.value.why
    kept = config.parse([*flags, "multi_attempt"])
    preflight.check_environment(kept, [])
    monkeypatch.setattr(processes, "count", lambda: 2)
    with pytest.raises(InputError, match="a run of several processes"):
        preflight.check_processes(kept)


def test_rows_that_json_cannot_represent_are_refused():
    rows = [{"prompt": "a", "when": "1 May"}, {"prompt": "b", "when": datetime.date(2026, 5, 1)}]
    with pytest.raises(InputError, match="'when'") as error:
        tasks.require_json(rows)
    assert error.value.fix
    tasks.require_json(rows[:1])


def test_a_task_of_pictures_is_refused():
    settings = config.preset("pictures_grpo").data
    spec = config.preset("grpo").algorithm.experience
    arguments = {"seed": 0, "num_held_out": 0, "max_prompt_tokens": 9}
    with pytest.raises(InputError, match="'images' has a value that a checkpoint cannot contain"):
        tasks.usable_rows(settings, spec, None, rows_in_checkpoints=True, **arguments)


def test_algorithms_without_old_rollouts_refuse_them():
    with pytest.raises(InputError, match="only scored completions go on"):
        config.parse(["arithmetic_sft", "--rollout.partial", "1"])
    with pytest.raises(InputError, match="of the latest policy alone"):
        config.parse(["arithmetic_mini_llm", "--batch.staleness", "1"])


GAME = '''
import os
import random
import time
from tpu_rl.environments.contract import PlainState

class Game(PlainState):
    """One to five turns, and notes of all that is asked in a file beside this one."""
    def reset(self, prompt, seed=0, **row):
        self.turns = 1 + sum(map(ord, prompt)) % 5
        self.turn = 0
        self.name = os.urandom(8).hex()
        self._note("reset")
    def _note(self, what):
        with open(__file__ + ".txt", "a") as file:
            file.write(f"{self.name} {what} {self.turn}\\n")
    def step(self, text):
        self.turn += 1
        self._note("step")
        time.sleep(random.choice([0, 0.1]))
        if self.turn == 3 and self.turns == 4:
            raise OSError("the network is down")
        return f"={len(text)};", float(len(text) % 3), self.turn == self.turns, {}
    def get_reward(self):
        self._note("reward")
        return 0.0
'''


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_is_stopped_after_each_step_asks_no_episode_twice(tmp_path: Path):
    """Its last bits are those of a run that was not stopped, and faults are no rewards."""
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "game.py").write_text(GAME)
    digests = {}
    for name, stops in (("whole", [4]), ("parts", [1, 2, 3, 4])):
        environment = f"{tmp_path / name / 'game.py'}:Game"
        for steps in stops:
            flags = [*TINY, "--environment", environment, "--reward", "--rollout.partial", "2"]
            flags += ["--evaluation.rows", "0", "--sampling.max-new-tokens", "64"]
            flags += ["--reward-limits.fault-share", "1", "--batch.row-length", "240"]
            run_dir = tmp_path / name / "run"
            assert run_command.main([*flags, f"--steps={steps}", "--run-dir", str(run_dir)]) == 0
        digests[name] = digest(run_dir)
        rows = rows_of(run_dir)
        assert rows[-1]["rollout/stale"] > 0
        assert rows[-1]["reward/errors"] > 0
        lines = (run_dir / "samples.jsonl").read_text().splitlines()
        failed = [sample for sample in map(json.loads, lines) if "error" in sample]
        assert failed
        assert all(sample["reward"] is None for sample in failed)
        asked = (tmp_path / name / "game.py.txt").read_text().splitlines()
        assert len(set(asked)) == len(asked)
    assert digests["parts"] == digests["whole"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "stale",
    [
        pytest.param(
            ["--rollout.partial", "2", "--sampling.host-sync-steps", "4"], marks=pytest.mark.nightly
        ),
        ["--batch.staleness", "2"],
    ],
)
def test_interrupted_run_equals_uninterrupted_run(tmp_path: Path, capsys, stale):
    flags = [*TINY, *stale]
    assert run_command.main([*flags, "--steps", "4", "--run-dir", str(tmp_path / "whole")]) == 0
    for steps in ("2", "4"):
        command = [*flags, "--steps", steps, "--run-dir", str(tmp_path / "parts")]
        assert run_command.main(command) == 0
    assert "resumed at step 2" in capsys.readouterr().out
    assert digest(tmp_path / "parts") == digest(tmp_path / "whole")
    expected = rows_of(tmp_path / "whole")
    actual = rows_of(tmp_path / "parts")
    assert actual[3:] == expected[3:]
    assert actual[4]["rollout/stale"] > 0
