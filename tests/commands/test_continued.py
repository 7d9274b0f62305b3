"""The optimizer's state of the model's run: what goes over, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml

from tpu_rl import run_files
from tpu_rl.checkpoint import manager
from tpu_rl.commands import config as configuration
from tpu_rl.commands import continued
from tpu_rl.errors import InputError
from tpu_rl.train import optimizers
from tpu_rl.types import TrainState

FLAGS = ["sft", "--data.path", "rows.jsonl", "--optimizer.learning-rate", "0.1"]


def fresh(weights, **settings) -> tuple[TrainState, optax.GradientTransformation]:
    """Return a state before its first step, and its optimizer, whose learning rate falls."""
    config = optimizers.OptimizerConfig(learning_rate=0.1, weight_decay=0.1, **settings)
    optimizer = optimizers.by_role(config, lambda count: 0.1 / (1 + count), {"policy": 1.0})
    params = {"policy": {"w": jnp.asarray(weights, jnp.float32)}}
    return TrainState(jnp.int32(0), params, optimizer.init(params), ()), optimizer


def train(state: TrainState, optimizer, gradients) -> TrainState:
    for gradient in gradients:
        updates, opt_state = optimizer.update(
            {"policy": {"w": jnp.asarray(gradient)}}, state.opt_state, state.params
        )
        params = optax.apply_updates(state.params, updates)
        state = TrainState(state.step + 1, params, opt_state, ())
    return state


@pytest.fixture
def run_dir(tmp_path):
    """Return the folder of a run of two steps that ended."""
    state, optimizer = fresh([[1.0, -2.0]])
    state = train(state, optimizer, [[[0.3, 0.1]], [[-0.2, 0.4]]])
    folder = tmp_path / "run"
    checkpoints = manager.open_checkpoints(str(folder / "checkpoints"))
    checkpoints.save(2, state, {}, wait=True)
    checkpoints.close()
    config = configuration.parse(FLAGS)
    text = run_files.sealed(yaml.safe_dump(configuration.to_dict(config)))
    (folder / "config.yaml").write_text(text)
    (folder / "model").mkdir()
    return folder


def parsed(run_dir, *flags: str):
    argv = [*FLAGS, "--model.path", f"{run_dir}/model", "--optimizer.continued", *flags]
    return configuration.parse(argv)


@pytest.mark.slow
def test_moments_go_over_and_schedules_begin_anew(run_dir):
    state, optimizer = fresh([[0.5, 0.25]])
    state = continued.with_state(parsed(run_dir), state)
    assert int(state.step) == 0
    np.testing.assert_array_equal(state.params["policy"]["w"], [[0.5, 0.25]])
    # Adam's second moment and its count by hand; the learning rate is that of a first step.
    m = 0.9 * 0.1 * np.array([0.3, 0.1]) + 0.1 * np.array([-0.2, 0.4])
    v = 0.999 * 0.001 * np.array([0.3, 0.1]) ** 2 + 0.001 * np.array([-0.2, 0.4]) ** 2
    gradient = np.array([0.1, -0.1])
    m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
    step = (m / (1 - 0.9**3)) / (np.sqrt(v / (1 - 0.999**3)) + 1e-8)
    expected = np.array([0.5, 0.25]) * (1 - 0.1 * 0.1) - 0.1 * step
    after = train(state, optimizer, [[gradient.astype(np.float32)]])
    np.testing.assert_allclose(after.params["policy"]["w"], [expected], rtol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "lion", "sgd"])
def test_counters_of_schedules_alone_are_new(name):
    first, optimizer = fresh([[1.0, 2.0]], name=name)
    later = train(first, optimizer, [[[0.1, 0.2]], [[0.3, 0.4]]])
    chosen = continued._with_schedules_of(first.opt_state, later.opt_state)
    pairs = zip(jax.tree.leaves_with_path(chosen), jax.tree.leaves(later.opt_state), strict=True)
    reset = [path for (path, new), old in pairs if not np.array_equal(new, old)]
    assert reset
    assert all("count" in str(path[-1]) for path in reset)
    moments = jax.tree.leaves(later.opt_state)
    assert len(reset) < len(moments)


@pytest.mark.slow
def test_states_of_other_weights_are_refused(run_dir, tmp_path):
    state, _ = fresh([[1.0, 2.0, 3.0]])
    with pytest.raises(InputError, match="that of other weights") as error:
        continued.with_state(parsed(run_dir), state)
    assert "[1, 2] in the checkpoint, not float32[1, 3]" in error.value.why
    with pytest.raises(InputError, match="had --optimizer.name adamw"):
        continued.run_of(parsed(run_dir, "--optimizer.name", "sgd"))
    with pytest.raises(InputError, match="weights of their own"):
        continued.run_of(parsed(run_dir, "--model.lora.rank", "8"))
    with pytest.raises(InputError, match="no run wrote the model"):
        continued.run_of(parsed(tmp_path))
