"""One-step-off rollouts: the policy that samples, the time of rewards, and resume."""

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
    make_source: Callable[[], Source]
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
        "--rollout.one-step-off",
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

    def make_source() -> Source:
        return compose.make_source(context, run_config.stages[0], params)

    return Run(context, state_after, make_source, log)


def test_each_batch_but_the_first_is_one_update_old(run):
    source = run.make_source()
    decoding = compose.decoding(run.context)
    stream = compose.row_stream(run.context, run.context.config.stages[0])
    batches = [next(stream)[1] for _ in range(4)]
    num_completions = NUM_PROMPTS * GROUP_SIZE
    # Batch -> (the step that samples it, its first row id). Step 1 samples two batches.
    sampled_in = {0: (1, num_completions), 1: (1, 0), 2: (2, 0)}
    with jax.set_mesh(run.context.mesh):
        expected = {}
        for batch, (step, first_row_id) in sampled_in.items():
            expected[batch] = decoding.sample(
                run.state_after(step - 1).params,
                prompts.encode(batches[batch], run.context.language.tokenizer, 99),
                step,
                first_row_id + np.arange(num_completions),
            )
        steps = [source.draw(step, run.state_after(step - 1)) for step in (1, 2, 3)]
    for batch, experience in enumerate(steps):
        drawn_prompts = [record["prompt"] for record in experience.records[::GROUP_SIZE]]
        assert drawn_prompts == [row["prompt"] for row in batches[batch]]
        np.testing.assert_array_equal(experience.data.tokens, expected[batch].tokens)
        np.testing.assert_array_equal(experience.data.log_probs, expected[batch].log_probs)
        assert set(experience.data.policy_step.tolist()) == {max(0, batch - 1)}
        assert [record["reward"] for record in experience.records] == pytest.approx(
            [len(record["completion"]) / 100 + max(1, batch) for record in experience.records]
        )
    assert [experience.metrics["rollout/stale"] for experience in steps] == [0, 1, 1]


def test_rewards_are_requested_one_step_early(run):
    source = run.make_source()
    run.log.unlink(missing_ok=True)
    with jax.set_mesh(run.context.mesh):
        source.draw(1, run.state_after(0))
    pending = {row["prompt"] for row in source.get_state()["pending"]["rows"]}
    deadline = time.monotonic() + 30
    while not pending <= set(run.log.read_text().splitlines()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_resume_is_bit_exact(run):
    original = run.make_source()
    resumed = run.make_source()
    with jax.set_mesh(run.context.mesh):
        original.draw(1, run.state_after(0))
        original.draw(2, run.state_after(1))
        resumed.set_state(json.loads(json.dumps(original.get_state())))
        assert json.dumps(resumed.get_state()) == json.dumps(original.get_state())
        for step in (3, 4):
            state = run.state_after(step - 1)
            expected = original.draw(step, state)
            actual = resumed.draw(step, state)
            jax.tree.map(np.testing.assert_array_equal, expected.data, actual.data)
            assert expected.records == actual.records
            assert expected.metrics["rollout/stale"] == actual.metrics["rollout/stale"]
