"""Batches that are sampled an update before they are learned from: which policy drew them, and what is asked when."""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch import build, config, dataset
from launch.sources import sampling
from tpu_rl import rollouts
from tpu_rl.types import TrainState

SIZE, GROUP = 4, 2
LOGGING = """
def score(prompts, completions, **columns):
    with open({log!r}, "a") as file:
        print(*prompts, sep="\\n", file=file)
    return [len(text) / 100 for text in completions]
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(a setup, the state after so many updates, what makes its source, the file with the prompts that were asked)."""
    folder = tmp_path_factory.mktemp("run")
    log = folder / "log"
    (folder / "mine.py").write_text(LOGGING.format(log=str(log)))
    one = config.parse(
        ["arithmetic_grpo", "--batch.prompts", f"{SIZE}", "--batch.completions", f"{GROUP}", "--batch.ahead",
         "--reward", f"{folder}/mine.py:score", "--run-dir", str(folder)]
    )  # fmt: skip
    setup, params = build.make_setup(one, folder, build.make_mesh(one.mesh))

    def after(updates: int) -> TrainState:
        moved = jax.tree.map(lambda leaf: leaf * (1 + 0.1 * updates), params)
        return TrainState(jnp.int32(updates), moved, None, None)

    return setup, after, lambda: build.make_source(setup, one.stages[0], params), log


def test_each_batch_but_the_first_is_one_update_old(made):
    setup, after, make, _ = made
    source, sample = make(), sampling(setup)
    plain = dataset.make_stream(setup.config, setup.config.stages[0], setup.language)
    rows, wanted = [next(plain)[1] for _ in range(4)], {}
    with jax.set_mesh(setup.mesh):
        for step in (1, 2, 3):  # step 1 samples two batches
            for which, first in ((0, GROUP * SIZE), (1, 0)) if step == 1 else ((step, 0),):
                prompts = rollouts.encode(rows[which], setup.language.tokenizer, 99)
                ids = first + np.arange(GROUP * SIZE)
                wanted[which] = sample(step, after(step - 1), prompts, ids, None).rollout
        found = [source.draw(step, after(step - 1)) for step in (1, 2, 3)]
    for which, one in enumerate(found):
        assert [record["prompt"] for record in one.records[::GROUP]] == [row["prompt"] for row in rows[which]]
        np.testing.assert_array_equal(one.data.tokens, wanted[which].tokens)
        np.testing.assert_array_equal(one.data.log_probs, wanted[which].log_probs)
        assert set(one.data.policy_step.tolist()) == {max(0, which - 1)}
        assert [record["reward"] for record in one.records] == pytest.approx(
            [len(record["completion"]) / 100 for record in one.records]
        )
    assert [one.metrics["rollout/stale"] for one in found] == [0, 1, 1]


def test_rewards_are_asked_for_before_the_step_that_needs_them(made):
    setup, after, make, log = made
    source = make()
    log.unlink(missing_ok=True)
    with jax.set_mesh(setup.mesh):
        source.draw(1, after(0))
    pending = [row["prompt"] for row in source.get_state()["pending"]["rows"]]
    deadline = time.monotonic() + 30
    while not set(pending) <= set(log.read_text().splitlines()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_state_is_all_that_goes_on(made):
    setup, after, make, _ = made
    first, second = make(), make()
    with jax.set_mesh(setup.mesh):
        first.draw(1, after(0))
        first.draw(2, after(1))
        second.set_state(json.loads(json.dumps(first.get_state())))
        assert json.dumps(second.get_state()) == json.dumps(first.get_state())
        for step in (3, 4):
            one, other = (source.draw(step, after(step - 1)) for source in (first, second))
            jax.tree.map(np.testing.assert_array_equal, one.data, other.data)
            assert one.records == other.records
            assert one.metrics["rollout/stale"] == other.metrics["rollout/stale"]
