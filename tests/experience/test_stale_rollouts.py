"""Stale rollouts: the policy that samples, the time of rewards, and resume."""

import dataclasses
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixtures import several
from tests.fixtures.runs import digest, rows_of
from tpu_rl.commands import compose, config
from tpu_rl.commands.roles import RunContext
from tpu_rl.experience.source import Source, StepExperience
from tpu_rl.experience.sources import stale_rollouts
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
    return make_run(tmp_path_factory.mktemp("run"), jax.devices())


def make_run(
    folder: Path,
    devices: Sequence[Any],
    sampler_devices: tuple[Any, ...] = (),
    further_flags: Sequence[str] = (),
) -> Run:
    """Return a run that learns on `devices`."""
    folder.mkdir(exist_ok=True)
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
        *further_flags,
    ]
    run_config = config.parse(flags)
    mesh = compose.make_mesh(run_config.mesh, devices)
    context, params = compose.make_context(run_config, folder, mesh, sampler_devices)

    def state_after(num_updates: int) -> TrainState:
        updated = jax.tree.map(lambda leaf: leaf * (1 + 0.1 * num_updates), params)
        return TrainState(jnp.int32(num_updates), updated, None, None)

    def make_source(staleness: int) -> Source:
        batch = dataclasses.replace(run_config.batch, staleness=staleness)
        changed = context._replace(config=dataclasses.replace(run_config, batch=batch))
        return compose.make_source(changed, run_config.stages[0], params)

    return Run(context, state_after, make_source, log)


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
        state_before = original.get_state()
        frozen = original.snapshot()
        original.draw(2, run.state_after(1))
        assert frozen() == state_before
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


@pytest.mark.slow
def test_batches_that_are_sampled_during_updates_have_the_same_bits(tmp_path):
    """Several are under way at once, and the update donates the weights that they read."""
    devices = tuple(jax.devices()[:1])
    flags = ["--environment=calculator", "--sampling.max-new-tokens=64"]
    before = make_run(tmp_path / "before", devices, (), flags)
    flags.append("--sampling.during-updates")
    during = make_run(tmp_path / "during", devices, devices, flags)
    sources = [made.make_source(2) for made in (before, during)]

    def draw(made: Run, source: Source, step: int) -> StepExperience:
        with jax.set_mesh(made.context.mesh):
            state = made.state_after(step - 1)
            experience = source.draw(step, state)
            jax.tree.map(lambda leaf: leaf.delete(), state.params)
        return experience

    for step in (1, 2, 3, 4):
        one, other = draw(before, sources[0], step), draw(during, sources[1], step)
        jax.tree.map(np.testing.assert_array_equal, one.data, other.data)
        # Times of episodes are of the clock.
        records = [
            [{key: value for key, value in record.items() if key != "seconds"} for record in drawn]
            for drawn in (one.records, other.records)
        ]
        assert records[0] == records[1]
        assert one.metrics["rollout/staleness"] == other.metrics["rollout/staleness"]
        assert other.metrics["time/rollout_idle"] >= 0
        if step == 2:
            resumed = during.make_source(2)
            resumed.set_state(json.loads(json.dumps(sources[1].get_state())))
        if step > 2:
            again = draw(during, resumed, step)
            jax.tree.map(np.testing.assert_array_equal, other.data, again.data)
    for source in (*sources, resumed):
        source.close()


KILLED = [
    "launch/run.py",
    "arithmetic_grpo",
    "--batch.prompts=4",
    "--batch.group-size=2",
    "--batch.staleness=2",
    "--sampling.devices=1",
    "--evaluation.rows=4",
    "--evaluation.interval=2",
    "--checkpoint.interval=1",
    "--steps=8",
]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("with_tools", [False, True])
def test_a_run_that_is_killed_while_it_samples_and_learns_goes_on_to_the_same_bits(
    tmp_path, with_tools
):
    command = list(KILLED)
    if with_tools:
        command += ["--environment", "calculator", "--sampling.max-new-tokens=96"]

    def start(name: str) -> subprocess.Popen:
        devices = "--xla_force_host_platform_device_count=2"
        run_dir = str(tmp_path / name)
        return several.start(1, [*command, "--run-dir", run_dir], XLA_FLAGS=devices)[0]

    began = time.monotonic()
    (ended,) = several.wait([start("whole")])
    assert ended.code == 0, ended.err
    seconds = time.monotonic() - began
    moments = random.Random(0)
    for number, end in enumerate([signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGKILL]):
        process = start(str(number))
        time.sleep(moments.uniform(0.5, 0.95) * seconds)
        process.send_signal(end)
        process.communicate()
        (ended,) = several.wait([start(str(number))])
        assert ended.code == 0, ended.err
        assert digest(tmp_path / str(number)) == digest(tmp_path / "whole")
        assert rows_of(tmp_path / str(number)) == rows_of(tmp_path / "whole")


APART = """
import pathlib, sys
import jax, numpy as np
from tpu_rl.commands import compose
from tests.experience.test_stale_rollouts import make_run
from tpu_rl.rollout import weights

folder = pathlib.Path(sys.argv[1])
learning, sampler = jax.devices()[:-2], tuple(jax.devices()[-2:])
flags = ["--mesh.fsdp=2", "--sampling.tensor-parallel=2"]
together = make_run(folder, learning, (), flags)
apart = make_run(folder, learning, sampler, [*flags, "--sampling.devices=2"])
sources = [run.make_source(2) for run in (together, apart)]

# The copies are those of the same weights, and stay when an update donates these.
state = apart.state_after(1)
master = state.params["policy"]["layers"]["layer_0"]["down"]
expected = np.asarray(master)
place = apart.context.rollout_policy("policy").params
copies = place(state.params)
jax.tree.map(lambda leaf: leaf.delete(), state.params)
copy = copies["policy"]["layers"]["layer_0"]["down"]
assert copy.sharding.device_set == set(sampler)
assert copy.addressable_shards[0].data.shape[1] == master.shape[1] // 2
np.testing.assert_array_equal(copy, expected)

def draw(run, source, step):
    with jax.set_mesh(run.context.mesh):
        state = run.state_after(step - 1)
        experience = source.draw(step, state)
        jax.tree.map(lambda leaf: leaf.delete(), state.params)  # As the update does.
    return experience

def require_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one.data.tokens, other.data.tokens)
    np.testing.assert_allclose(one.data.log_probs, other.data.log_probs, atol=2e-5)
    for name in ("rollout/staleness", "rollout/staleness_max", "rollout/stale"):
        assert one.metrics[name] == other.metrics[name]

for step in (1, 2, 3, 4):
    one = draw(together, sources[0], step)
    other = draw(apart, sources[1], step)
    require_equal(one, other)
    assert "time/rollout_wait" in other.metrics
state = sources[1].get_state()
assert len(state["store"]) == 2
resumed = apart.make_source(2)
resumed.set_state(state)
for step in (5, 6):
    one, other = draw(apart, sources[1], step), draw(apart, resumed, step)
    jax.tree.map(np.testing.assert_array_equal, one.data, other.data)
    assert one.records == other.records
for source in (*sources, resumed):
    source.close()
print("apart as together")
"""


@pytest.mark.nightly
def test_devices_that_only_sample_sample_the_same(tmp_path):
    """Two devices learn and two sample: tokens are equal, and log-probs up to rounding."""
    command = [sys.executable, "-c", APART, str(tmp_path)]
    done = subprocess.run(
        command, env=several.virtual_devices(4), capture_output=True, text=True, timeout=280
    )
    assert done.stdout.endswith("apart as together\n"), done.stderr
