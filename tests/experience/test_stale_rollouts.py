"""Stale rollouts: the policy that samples, the time of rewards, and resume."""

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch import compose, config
from launch.roles import RunContext
from tpu_rl.experience import stale_rollouts
from tpu_rl.experience.source import Source
from tpu_rl.rollout import prompts
from tpu_rl.types import TrainState

NUM_PROMPTS = 4
GROUP_SIZE = 2
LOGGING_REWARD = """
def score(prompts, completions, step, **columns):
    with open({log!r}, "a") as file:
        print(*prompts, sep="\\n", file=file)
    return [len(text) / 100 + number for text, number in zip(completions, step)]
"""
"""The reward depends on the step that samples a batch, which a resumed run must remember."""


class Run(NamedTuple):
    """A run before its first step."""

    context: RunContext
    state_after: Callable[[int], TrainState]
    """Number of updates -> a made-up state after them."""
    make_source: Callable[[int], Source]
    """Staleness -> a source."""
    log: Path
    """The prompts whose rewards were computed, one per line."""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    log = folder / "log"
    (folder / "mine.py").write_text(LOGGING_REWARD.format(log=str(log)))
    flags = [
        "arithmetic_grpo",
        f"--batch.prompts={NUM_PROMPTS}",
        f"--batch.group-size={GROUP_SIZE}",
        "--batch.staleness=1",
        "--reward",
        f"{folder}/mine.py:score",
        "--run-dir",
        str(folder),
    ]
    run_config = config.parse(flags)
    mesh = compose.make_mesh(run_config.mesh)
    context, params = compose.make_context(run_config, folder, mesh)

    def state_after(num_updates: int) -> TrainState:
        updated = jax.tree.map(lambda leaf: leaf * (1 + 0.1 * num_updates), params)
        return TrainState(jnp.int32(num_updates), updated, None, None)

    def make_source(staleness: int) -> Source:
        batch = dataclasses.replace(run_config.batch, staleness=staleness)
        changed = context._replace(config=dataclasses.replace(run_config, batch=batch))
        return compose.make_source(changed, run_config.stages[0], params)

    return Run(context, state_after, make_source, log)


def test_without_staleness_it_is_the_synchronous_source(run):
    synchronous = run.make_source(0)
    stale = stale_rollouts.stale_source(
        compose.rollout_engine(run.context),
        compose.row_stream(run.context, run.context.config.stages[0]),
        dataclasses.replace(run.context.config.batch, staleness=0),
    )
    with jax.set_mesh(run.context.mesh):
        for step in (1, 2):
            state = run.state_after(step - 1)
            expected = synchronous.draw(step, state)
            actual = stale.draw(step, state)
            jax.tree.map(np.testing.assert_array_equal, expected.data, actual.data)
            assert expected.records == actual.records
            assert actual.metrics["rollout/staleness"] == 0


@pytest.mark.parametrize("staleness", [1, 3])
def test_a_batch_is_sampled_so_many_steps_before_its_own(run, staleness):
    source = run.make_source(staleness)
    decoding = compose.decoding(run.context)
    stream = compose.row_stream(run.context, run.context.config.stages[0])
    steps = range(1, staleness + 4)
    with jax.set_mesh(run.context.mesh):
        for step in steps:
            sampled_after = max(step - 1 - staleness, 0)
            rows = next(stream)[1]
            expected = decoding.sample(
                run.state_after(sampled_after).params,
                prompts.encode(rows, run.context.language.tokenizer, 99),
                step,
                np.arange(NUM_PROMPTS * GROUP_SIZE),
            )
            experience = source.draw(step, run.state_after(step - 1))
            drawn_prompts = [record["prompt"] for record in experience.records[::GROUP_SIZE]]
            assert drawn_prompts == [row["prompt"] for row in rows]
            np.testing.assert_array_equal(experience.data.tokens, expected.tokens)
            np.testing.assert_array_equal(experience.data.log_probs, expected.log_probs)
            assert set(experience.data.policy_step.tolist()) == {sampled_after}
            age = step - 1 - sampled_after
            assert experience.metrics["rollout/stale"] == (age > 0)
            assert experience.metrics["rollout/staleness"] == age
            assert experience.metrics["rollout/staleness_max"] == age
            assert [record["reward"] for record in experience.records] == pytest.approx(
                [len(record["completion"]) / 100 + step for record in experience.records]
            )


def test_rewards_are_requested_before_their_step(run):
    source = run.make_source(2)
    run.log.unlink(missing_ok=True)
    with jax.set_mesh(run.context.mesh):
        source.draw(1, run.state_after(0))
    store = source.get_state()["store"]
    assert len(store) == 2
    pending = {row["prompt"] for waiting in store for row in waiting["rows"]}
    deadline = time.monotonic() + 30
    while not pending <= set(run.log.read_text().splitlines()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_resume_is_bit_exact(run):
    original = run.make_source(2)
    resumed = run.make_source(2)
    with jax.set_mesh(run.context.mesh):
        original.draw(1, run.state_after(0))
        original.draw(2, run.state_after(1))
        resumed.set_state(json.loads(json.dumps(original.get_state())))
        assert json.dumps(resumed.get_state()) == json.dumps(original.get_state())
        run.log.unlink(missing_ok=True)
        for step in (3, 4, 5):
            state = run.state_after(step - 1)
            expected = original.draw(step, state)
            actual = resumed.draw(step, state)
            jax.tree.map(np.testing.assert_array_equal, expected.data, actual.data)
            assert expected.records == actual.records
            for name in ("rollout/stale", "rollout/staleness", "rollout/tokens"):
                assert expected.metrics[name] == actual.metrics[name]
