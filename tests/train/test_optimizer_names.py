"""Optimizers by name: a step is that of optax, and every state is placed, counted and restored."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.fixtures import tiny_data
from tests.fixtures.update_cases import CASES, MODEL
from tpu_rl import models
from tpu_rl.errors import InputError
from tpu_rl.models.config import WEIGHT_AXES
from tpu_rl.proofs import tiny
from tpu_rl.train import optimizers, sharding, update_step
from tpu_rl.train.optimizers import OptimizerConfig

NAMES = ("adamw", "adafactor", "muon", "lion", "sgd")
RATE = 0.02
SCHEDULE = optax.linear_schedule(RATE, 0.0, 10)
SHAPES = {
    "embedding": (11, 6),
    "final_norm": (6,),
    "layers": {
        "layer_0": {
            "query": (3, 2, 4, 6),
            "query_lora_b": (3, 2, 2, 4),
            "output": (3, 2, 4, 6),
            "down": (3, 10, 6),
            "mlp_norm": (3, 6),
            "router": (3, 5, 6),
            "expert_up": (3, 5, 6, 4),
        }
    },
    "tail": {"layer_0": {"down": (10, 6)}},
}
"""Leaves of a decoder with layers that are stacked and one that is not."""


def random_tree(seed: int) -> Any:
    noise = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(noise.standard_normal(shape), jnp.float32),
        SHAPES,
        is_leaf=lambda node: isinstance(node, tuple),
    )


PARAMS = random_tree(0)
GRADIENTS = [random_tree(1), random_tree(2)]


def config_of(name: str, **changes: Any) -> OptimizerConfig:
    """Return a configuration whose clipping changes nothing."""
    return OptimizerConfig(name=name, learning_rate=RATE, max_grad_norm=1e6, **changes)


def two_updates(optimizer: optax.GradientTransformation, params: Any, gradients: Any) -> Any:
    """Return the updates of the second step, so that momentum and the schedule count."""
    state = optimizer.init(params)
    updates, state = optimizer.update(gradients[0], state, params)
    return optimizer.update(gradients[1], state, params)[0]


def ours(config: OptimizerConfig, params: Any = PARAMS, gradients: Any = GRADIENTS) -> Any:
    return two_updates(optimizers.build(config, SCHEDULE, models.matrix_axes), params, gradients)


def assert_close(actual: Any, expected: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-8), actual, expected
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "optimizer"),
    [
        (config_of("adafactor"), optax.adafactor(SCHEDULE, multiply_by_parameter_scale=False)),
        (config_of("lion", beta2=0.99), optax.lion(SCHEDULE, b1=0.9, b2=0.99, weight_decay=0.0)),
        (config_of("sgd", beta1=0.8), optax.sgd(SCHEDULE, momentum=0.8)),
        (config_of("sgd", beta1=0.0), optax.sgd(SCHEDULE)),
    ],
    ids=["adafactor", "lion", "sgd", "sgd without momentum"],
)
def test_updates_are_those_of_optax(config, optimizer):
    assert_close(ours(config), two_updates(optimizer, PARAMS, GRADIENTS))


@pytest.mark.slow
def test_adamw_keeps_its_bits_and_the_structure_of_its_state():
    config = OptimizerConfig(learning_rate=RATE, weight_decay=0.1, beta2=0.98)
    assert config.name == "adamw"
    adamw = optax.adamw(
        SCHEDULE, b1=0.9, b2=0.98, eps=1e-8, weight_decay=0.1, mask=optimizers.decay_mask
    )
    plain = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    built = optimizers.build(config, SCHEDULE, models.matrix_axes)
    assert jax.tree.structure(built.init(PARAMS)) == jax.tree.structure(plain.init(PARAMS))
    jax.tree.map(np.testing.assert_array_equal, ours(config), two_updates(plain, PARAMS, GRADIENTS))


# --- muon ---


def orthogonalized(matrices: Any) -> np.ndarray:
    """Return optax's updates for the gradients of one matrix [inputs, outputs] by itself."""
    muon = optax.contrib.muon(SCHEDULE, beta=0.9, consistent_rms=0.2)
    gradients = [{"matrix": jnp.asarray(matrix)} for matrix in matrices]
    params = {"matrix": jnp.zeros_like(gradients[0]["matrix"])}
    return np.asarray(two_updates(muon, params, gradients)["matrix"])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "as_matrix"),
    [
        ("query", lambda layer: layer.reshape(8, 6).T),
        ("query_lora_b", lambda layer: layer.reshape(2, 8)),
        ("output", lambda layer: layer.reshape(8, 6)),
        ("down", lambda layer: layer),
        ("router", lambda layer: layer.T),
    ],
)
def test_muon_orthogonalizes_the_matrix_of_each_layer_by_itself(name, as_matrix):
    updates = ours(config_of("muon"))["layers"]["layer_0"][name]
    gradients = [np.asarray(tree["layers"]["layer_0"][name]) for tree in GRADIENTS]
    for layer in range(3):
        expected = orthogonalized([as_matrix(gradient[layer]) for gradient in gradients])
        np.testing.assert_allclose(as_matrix(updates[layer]), expected, rtol=1e-4, atol=1e-7)
        # A second look that does not use optax: Newton-Schulz leaves singular values near 1.
        scale = 0.2 * SCHEDULE(1) * max(expected.shape) ** 0.5
        values = np.linalg.svd(as_matrix(updates[layer]), compute_uv=False) / scale
        assert 0.6 < values.min() < values.max() < 1.3


@pytest.mark.slow
def test_muon_orthogonalizes_the_matrix_of_each_expert_and_of_a_single_layer():
    updates = ours(config_of("muon"))
    experts = updates["layers"]["layer_0"]["expert_up"]
    gradients = [np.asarray(tree["layers"]["layer_0"]["expert_up"]) for tree in GRADIENTS]
    expected = orthogonalized([gradient[2, 4] for gradient in gradients])
    np.testing.assert_allclose(experts[2, 4], expected, rtol=1e-4, atol=1e-7)
    expected = orthogonalized([tree["tail"]["layer_0"]["down"] for tree in GRADIENTS])
    np.testing.assert_allclose(updates["tail"]["layer_0"]["down"], expected, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_muon_leaves_embeddings_and_stacked_norms_to_adamw():
    def others(tree: Any) -> Any:
        return {
            "embedding": tree["embedding"],
            "final_norm": tree["final_norm"],
            "mlp_norm": tree["layers"]["layer_0"]["mlp_norm"],
        }

    # The AdamW inside optax's Muon has Nesterov momentum.
    adamw = optax.adamw(SCHEDULE, weight_decay=0.0, nesterov=True)
    expected = two_updates(adamw, others(PARAMS), [others(tree) for tree in GRADIENTS])
    assert_close(others(ours(config_of("muon"))), expected)


def test_every_weight_is_a_matrix_or_left_out():
    """The axes of a matrix are all axes of the weight but that of the experts."""
    left_out = {name for name in WEIGHT_AXES if models.matrix_axes(name) is None}
    vectors = (
        "_norm",
        "_bias",
        "_scale",
        "_taps",
        "decay_log",
        "_gain",
        "_scalar",
        "_min",
        "_max",
        "shared_router",
    )
    tables = ("embedding", "layer_embedding", "unembedding", "score")
    of_images = ("vision_class", "vision_patch", "vision_frames", "vision_position")
    of_images += ("vision_pixels", "vision_axis_positions")
    assert left_out == {*tables, *of_images} | {
        name for name in WEIGHT_AXES if name.endswith(vectors)
    }
    for name in WEIGHT_AXES.keys() - left_out:
        inputs, outputs = models.matrix_axes(name)
        axes = [WEIGHT_AXES[name][axis] for axis in sorted((*inputs, *outputs))]
        assert axes == [axis for axis in WEIGHT_AXES[name] if axis != "experts"]
        assert inputs
        assert outputs


# --- what all have in common ---


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_weight_decay_follows_the_learning_rate_and_spares_norms(name):
    plain = ours(config_of(name))
    decayed = ours(config_of(name, weight_decay=0.5))
    difference = jax.tree.map(lambda a, b: np.asarray(a - b), decayed, plain)
    rate = float(SCHEDULE(1))
    np.testing.assert_allclose(
        difference["embedding"], -0.5 * rate * PARAMS["embedding"], rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(
        difference["layers"]["layer_0"]["query"],
        -0.5 * rate * PARAMS["layers"]["layer_0"]["query"],
        rtol=1e-4,
        atol=1e-6,
    )
    assert not np.any(difference["final_norm"])
    assert not np.any(difference["layers"]["layer_0"]["mlp_norm"])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_roles_have_optimizers_of_their_own(name):
    config = config_of(name)
    optimizer = optimizers.by_role(
        config, SCHEDULE, {"policy": 1.0, "value": 0.5}, models.matrix_axes
    )

    def both(tree: Any) -> Any:
        frozen = {"reference": jax.tree.map(lambda _: None, tree)}
        return {"policy": tree, "value": tree} | frozen

    updates = two_updates(optimizer, both(PARAMS), [both(tree) for tree in GRADIENTS])
    alone = ours(config)
    assert_close(updates["policy"], alone)
    assert_close(updates["value"], jax.tree.map(lambda leaf: 0.5 * leaf, alone))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_clipped_first(name):
    config = replace(config_of(name), max_grad_norm=1e-3)
    clip = optax.clip_by_global_norm(1e-3)
    clipped = [clip.update(tree, clip.init(tree))[0] for tree in GRADIENTS]
    assert_close(ours(config), ours(config_of(name), gradients=clipped))


def attention_axes(name: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the axes of the matrices of `tiny.attention_model`."""
    return ((-2,), (-1,)) if name in ("query", "key", "value") else None


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "rate"),
    [("adamw", 0.03), ("adafactor", 0.03), ("muon", 0.03), ("lion", 0.01), ("sgd", 0.3)],
)
def test_a_small_model_learns(name, rate):
    """The loss of demonstrations halves in 30 steps."""
    algorithm, data = CASES["sft"]
    config = OptimizerConfig(name=name, learning_rate=rate)
    schedule = optimizers.learning_rate(config, 30)
    optimizer = optimizers.build(config, schedule, attention_axes)
    params = tiny.init_params(MODEL)
    batch = update_step.minibatch(algorithm.make_batch(tiny.experience(data), params, ())[0], 0)
    state = update_step.init_train_state(params, algorithm, optimizer, tiny_data.train_policy)
    update = update_step.make_update_step(algorithm, optimizer, schedule, tiny_data.train_policy)
    losses = []
    for _ in range(30):
        state, metrics = update(state, batch)
        losses.append(float(update_step.reduce_metrics(metrics)["optim/loss"]))
    assert losses[-1] < 0.5 * losses[0], losses


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_state_is_sharded_as_params_or_replicated_and_moves_to_the_host(name):
    """And a step with the state in host memory changes no bit."""
    mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(AxisType.Auto,))
    everywhere, cut = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("fsdp",)))
    algorithm = CASES["sft"][0]._replace(
        loss=lambda params, batch: (
            batch.sum() * sum(jnp.sum(leaf**3) for leaf in jax.tree.leaves(params["policy"])),
            {},
        )
    )
    optimizer = optimizers.build(config_of(name), SCHEDULE, models.matrix_axes)

    def step(kind: str) -> Any:
        params = {"policy": jax.device_put(jax.tree.map(jnp.copy, PARAMS), cut)}
        state = update_step.init_train_state(params, algorithm, optimizer, lambda path: True)
        shapes = {leaf.shape for leaf in jax.tree.leaves(params)}
        for leaf in jax.tree.leaves(state.opt_state):
            assert leaf.sharding == (cut if leaf.shape in shapes else everywhere)
        state = replace(state, opt_state=sharding.in_memory(state.opt_state, kind))
        places = jax.tree.map(lambda leaf: leaf.sharding, state)
        update = update_step.make_update_step(
            algorithm, optimizer, SCHEDULE, lambda path: True, places
        )
        state, _ = update(state, jnp.ones((1, 1, 1)))
        kinds = {
            leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim
        }
        assert kinds == {kind}
        return state

    on_host, on_device = step(sharding.HOST), step(sharding.DEVICE)
    jax.tree.map(np.testing.assert_array_equal, on_host, on_device)


# --- bytes ---


@pytest.mark.parametrize(
    ("config", "per_number"),
    [
        (config_of("adamw"), 8),
        (config_of("lion"), 4),
        (config_of("sgd"), 4),
        (config_of("sgd", beta1=0.0), 0),
    ],
    ids=["adamw", "lion", "sgd", "sgd without momentum"],
)
def test_bytes_of_a_state_by_parameter(config, per_number):
    """Whatever the dtype of the parameters; the counters of steps come on top."""
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    size = optimizers.state_bytes(config, narrow, models.matrix_axes)
    numbers = sum(leaf.size for leaf in jax.tree.leaves(PARAMS))
    assert 0 <= size - per_number * numbers <= 8


def test_bytes_of_muon_are_one_moment_for_matrices_and_two_for_the_rest():
    size = optimizers.state_bytes(config_of("muon"), PARAMS, models.matrix_axes)
    flat = jax.tree_util.tree_flatten_with_path(PARAMS)[0]
    numbers = sum(
        leaf.size * (2 if models.matrix_axes(path[-1].key) is None else 1) for path, leaf in flat
    )
    assert 0 <= size - 4 * numbers <= 32  # counters, and three coefficients


def test_bytes_of_adafactor_are_rows_and_columns_of_large_matrices():
    params = {
        "down": jax.ShapeDtypeStruct((3, 256, 128), jnp.bfloat16),
        "mlp_norm": jax.ShapeDtypeStruct((3, 128), jnp.bfloat16),
    }
    size = optimizers.state_bytes(config_of("adafactor"), params)
    # A leaf that is not factored has two placeholders of one number, a factored one has one.
    assert size - 4 * (3 * (256 + 128) + 3 * 128 + 2 + 1) in (4, 8)


# --- settings that do not apply ---


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("adafactor", {"beta1": 0.8}),
        ("adafactor", {"beta2": 0.95}),
        ("adafactor", {"epsilon": 1e-6}),
        ("lion", {"epsilon": 1e-6}),
        ("sgd", {"beta2": 0.95}),
        ("sgd", {"epsilon": 1e-6}),
    ],
)
def test_settings_that_do_not_apply_are_refused(name, setting):
    [field] = setting
    with pytest.raises(InputError, match=f"{field} is not read with name {name}") as error:
        OptimizerConfig(name=name, **setting)
    default = getattr(OptimizerConfig(), field)
    assert f"the default is {default}" in error.value.fix
    # The advice works.
    OptimizerConfig(name=name, **{field: default})


@pytest.mark.parametrize("setting", [{"beta1": 1.0}, {"beta1": -0.1}, {"beta2": 1.5}])
def test_decay_rates_are_below_one(setting):
    with pytest.raises(InputError, match="must be at least 0 and below 1"):
        OptimizerConfig(name="lion", **setting)
