"""Partial rollouts: nothing is lost, drawn twice or drawn otherwise, and a batch is complete when it says so."""

import datetime
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch import build, config, dataset, run
from launch.carry_over import Batch, Group, dealt
from launch.sources import Setup, Source, sampling
from tests.test_launch import TINY, rows_of
from tests.test_survival import digest
from tpu_rl import rollouts
from tpu_rl.errors import InputError
from tpu_rl.sampler import Begun
from tpu_rl.types import TrainState

SIZE, GROUP, MORE = 4, 2, 2
FLAGS = [
    "arithmetic_grpo", "--batch.prompts", f"{SIZE}", "--batch.completions", f"{GROUP}", "--batch.carry-over", f"{MORE}",
    "--sampling.segment", "4", "--sampling.max-rows", "8",
]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(a setup, the state before the first step, what makes its source)."""
    run_dir = tmp_path_factory.mktemp("run")
    one = config.parse([*FLAGS, "--run-dir", str(run_dir)])
    setup, params = build.make_setup(one, run_dir, build.make_mesh(one.mesh))
    state = TrainState(jnp.zeros((), jnp.int32), params, None, None)
    return setup, state, lambda: build.make_source(setup, one.stages[0], params)


def drawn(setup: Setup, source: Source, state: TrainState, steps: range) -> list:
    with jax.set_mesh(setup.mesh):
        return [source.draw(step, state) for step in steps]


@pytest.mark.slow
def test_every_completion_is_what_one_call_would_have_drawn(made):
    """By the same policy, with the key that it was begun with."""
    setup, state, make = made
    found = drawn(setup, make(), state, range(1, 5))
    assert found[0].metrics["rollout/stale"] == 0
    assert all(0 < one.metrics["rollout/stale"] < 1 for one in found[1:])
    sample = sampling(setup)
    for one in found:
        assert one.data.group_id.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        rows = [{"prompt": record["prompt"]} for record in one.records[::GROUP]]
        prompts = rollouts.encode(rows, setup.language.tokenizer, 99)
        nothing = np.zeros(0, np.int32)
        begun = [Begun(nothing, nothing, nothing, key, 0, False, False) for key in one.data.birth_key]
        whole = sample(9, state, prompts, np.arange(len(begun)), None, begun=begun).rollout
        for name in ("tokens", "action_mask", "truncated"):
            np.testing.assert_array_equal(getattr(one.data, name), getattr(whole, name))
        np.testing.assert_allclose(one.data.log_probs, whole.log_probs, atol=2e-5)


@pytest.mark.slow
def test_every_prompt_comes_once_and_in_time(made):
    """As the stream has them, but for those that are still on their way; none is older than one step."""
    setup, state, make = made
    source, plain = make(), dataset.make_stream(setup.config, setup.config.stages[0], setup.language)
    wanted = [row["prompt"] for _ in range(7) for row in next(plain)[1]]
    begun, seen = [], []
    for step in range(1, 6):
        (one,) = drawn(setup, source, state, range(step, step + 1))
        prompts = [record["prompt"] for record in one.records[::GROUP]]
        assert set(begun) <= set(prompts)
        seen += prompts
        left = source.get_state()
        begun = [row["prompt"] for row in left["on_the_way"]["rows"]]
        assert len(begun) == MORE
        given = len(seen) + len(begun)
        assert sorted(seen + begun) == sorted(wanted[:given])
        assert [row["prompt"] for row in left["waiting"]] == wanted[given : given + len(left["waiting"])]


def test_the_state_is_all_that_goes_on(made):
    setup, state, make = made
    first, second = make(), make()
    drawn(setup, first, state, range(1, 3))
    second.set_state(json.loads(json.dumps(first.get_state())))
    for one, other in zip(*(drawn(setup, source, state, range(3, 5)) for source in (first, second)), strict=True):
        jax.tree.map(np.testing.assert_array_equal, one.data, other.data)
        assert one.records == other.records


def completion(token: int, ended: bool = True) -> Begun:
    return Begun(np.array([token]), np.zeros(1), np.zeros(1), np.zeros(2), 0, ended, truncated=False)


def test_a_batch_takes_all_that_were_begun_and_the_first_of_the_new():
    told = []
    begun = [completion(1), completion(5, ended=False), completion(2), completion(3), *[None] * 6]
    batch = Batch(3, 2, begun, told.append)

    def border(*ended: int) -> bool:
        flags = np.zeros(10, bool)
        flags[list(ended)] = True
        return batch.is_enough(flags)

    seen = [0, 2, 3]  # of five groups, the rows that ended before
    assert not border(*seen)
    assert batch.groups == [1]
    batch.on_finished({8: [8], 9: [9], 4: [4]})
    assert not border(*seen, 8, 9, 4)
    batch.on_finished({5: [5]})
    assert not border(*seen, 8, 9, 4, 5)  # what was begun before is not there
    assert batch.groups == [1, 4]
    batch.on_finished({1: [5, 6]})
    assert border(*seen, 8, 9, 4, 5, 1)
    assert batch.groups == [1, 4, 0]
    assert told == [{2: [2], 3: [3]}, {8: [8], 9: [9]}, {0: [1], 1: [5, 6]}]


def test_what_was_begun_is_dealt_over_the_devices():
    old, new = ([Group({"prompt": f"{name}{i}"}, []) for i in range(count)] for name, count in (("old", 4), ("new", 6)))
    names = [one.row["prompt"] for one in dealt(old, new)]
    assert names == ["old0", "new0", "old1", "new1", "new2", "old2", "new3", "old3", "new4", "new5"]
    assert dealt([], new) == new


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch.carry-over", "4"], "4 of 4 groups cannot be carried over"),
        (["--batch.carry-over", "-1"], "-1 of 4 groups"),
        (["--batch.refill-rounds", "1"], "two would decide it"),
        (["--batch.ahead"], "two steps old"),
    ],
)
def test_what_cannot_be_is_said(flags, message):
    with pytest.raises(InputError, match=message):
        config.parse([*FLAGS, *flags])


def test_rows_that_checkpoints_cannot_keep_are_refused():
    rows = [{"prompt": "a", "when": "1 May"}, {"prompt": "b", "when": datetime.date(2026, 5, 1)}]
    with pytest.raises(InputError, match="'when'") as error:
        dataset.require_json(rows)
    assert error.value.fix
    dataset.require_json(rows[:1])


def test_other_experience_cannot_be_carried_over():
    with pytest.raises(InputError, match="no older completions"):
        config.parse(["arithmetic_sft", "--batch.carry-over", "1"])
    with pytest.raises(InputError, match="of the latest policy alone"):
        config.parse(["arithmetic_mini_llm", "--batch.ahead"])


@pytest.mark.slow
@pytest.mark.parametrize("stale", [["--batch.carry-over", "2", "--sampling.segment", "4"], ["--batch.ahead"]])
def test_a_run_that_was_interrupted_is_the_one_that_was_not(tmp_path: Path, capsys, stale):
    flags = [*TINY, *stale]
    assert run.main([*flags, "--steps", "4", "--run-dir", str(tmp_path / "whole")]) == 0
    for steps in ("2", "4"):
        assert run.main([*flags, "--steps", steps, "--run-dir", str(tmp_path / "parts")]) == 0
    assert "resumed at step 2" in capsys.readouterr().out
    assert digest(tmp_path / "parts") == digest(tmp_path / "whole")
    found, wanted = (rows_of(tmp_path / name) for name in ("parts", "whole"))
    assert found[3:] == wanted[3:]
    assert found[4]["rollout/stale"] > 0
