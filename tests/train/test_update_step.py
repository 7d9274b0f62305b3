"""The update step: the same step however the batch is cut, and nothing moves that should not."""

import contextlib
import functools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.fixtures import several, tiny_data
from tests.fixtures.update_cases import CASES, MODEL, OPTIMIZER, SCHEDULE, initial_state
from tpu_rl.checkpoint import manager, train_state_io
from tpu_rl.proofs import tiny
from tpu_rl.train import optimizers, sharding
from tpu_rl.train import update_step as training
from tpu_rl.types import Algorithm, First, Max, Metrics, Min, Sum, TrainState


def copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


@functools.cache
def batch_of(name: str, **cut: Any) -> Any:
    """The [K, R, S] batch of the case's only optimizer step."""
    algorithm, data = CASES[name]
    params = tiny.init_params(MODEL)
    return training.minibatch(algorithm.make_batch(tiny.experience(data, **cut), params, ())[0], 0)


@functools.cache
def update_step(name: str) -> training.UpdateStep:
    return training.make_update_step(CASES[name][0], OPTIMIZER, SCHEDULE, tiny_data.train_policy)


def measured(metrics: Metrics) -> dict[str, float]:
    """Return the metrics of one update."""
    return {name: float(number) for name, number in training.reduce_metrics(metrics).items()}


def squares(params: tiny.Params, batch: jax.Array) -> tuple[jax.Array, Metrics]:
    """A loss that compiles in no time."""
    value = (
        sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(params["policy"])) * batch.sum()
    )
    return value, {"squares/loss": Sum(value, jnp.ones(()))}


SQUARES = Algorithm(lambda experience, params, state: (None, state), squares)


def assert_same_bits(actual: Any, expected: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), actual, expected
    )


def assert_close(actual: Any, expected: Any, tolerance: float = 2e-6) -> None:
    """Relative to the largest number of each array."""
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(
            a, b, rtol=0, atol=tolerance * max(np.abs(np.asarray(b)).max(), 1e-30)
        )


# --- however it is cut ---

CUTS = {
    "one micro-batch": {"micro_batch_rows": 4},
    "two micro-batches": {"micro_batch_rows": 2},
    "four micro-batches": {"micro_batch_rows": 1},
    "a micro-batch of padding": {"micro_batch_rows": 4, "row_limit": 8},
    "no shared prompts": {"micro_batch_rows": 8, "shared_prompts": False},
}


@functools.cache
def gradients_and_metrics(name: str, cut: str) -> tuple[Any, dict[str, Any]]:
    def compute(params: tiny.Params, batch: Any) -> tuple[Any, dict[str, Any]]:
        chosen, frozen = training.partition(params, tiny_data.train_policy)
        loss, metrics, gradients = training.accumulate(CASES[name][0], chosen, frozen, batch)
        return gradients, training.reduce_metrics(training.merge_metrics(metrics)) | {"loss": loss}

    return jax.jit(compute, compiler_options=tiny.QUICKLY)(
        tiny.init_params(MODEL), batch_of(name, **CUTS[cut])
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cut"), [("sft", "two micro-batches"), *(("grpo", cut) for cut in list(CUTS)[1:])]
)
def test_gradients_and_metrics_do_not_depend_on_the_cut(name, cut):
    gradients, metrics = gradients_and_metrics(name, "one micro-batch")
    assert all(np.abs(leaf).max() > 1e-4 for leaf in jax.tree.leaves(gradients))
    other_gradients, other_metrics = gradients_and_metrics(name, cut)
    assert_close(other_gradients, gradients)
    assert other_metrics.keys() == metrics.keys()
    for key, value in metrics.items():
        np.testing.assert_allclose(other_metrics[key], value, rtol=1e-5, atol=1e-6, err_msg=key)


ON_DEVICES = """
import json, jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tests import conftest
from tests.train import test_update_step as t
batch = t.batch_of("grpo", micro_batch_rows=4)
results = []
for devices in (1, 2, 4):
    mesh = jax.make_mesh(
        (devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )
    rows = jax.device_put(batch, NamedSharding(mesh, PartitionSpec(None, "data")))
    replicated = NamedSharding(mesh, PartitionSpec())
    state = jax.device_put(t.initial_state(t.CASES["grpo"][0]), replicated)
    state, metrics = t.update_step("grpo")(state, rows)
    leaves = [np.asarray(x).ravel().tolist() for x in jax.tree.leaves(state.params["policy"])]
    results.append({"params": sum(leaves, []), "metrics": t.measured(metrics),
                    "devices": len(rows.advantages.sharding.device_set)})
print(json.dumps({"steps": results, "cut": t.optimizer_state_of_cut_params()}))
"""


@pytest.mark.slow
def test_empty_micro_batches_are_not_computed():
    """The loss of a micro-batch without tokens is NaN here, and nobody sees it."""
    algorithm = CASES["grpo"][0]

    def nan_if_empty(params: Any, batch: Any) -> tuple[jax.Array, Metrics]:
        loss, metrics = algorithm.loss(params, batch)
        is_empty = ~(batch.rows.segment_ids > 0).any()
        poison = jnp.where(is_empty, jnp.nan, 0.0)
        return loss + poison, metrics | {"max": Max(loss), "min": Min(loss)}

    params = tiny.init_params(MODEL)
    trained, frozen = training.partition(params, tiny_data.train_policy)

    def accumulate(batch: Any) -> tuple[jax.Array, dict[str, jax.Array], Any]:
        loss, metrics, gradients = training.accumulate(
            algorithm._replace(loss=nan_if_empty), trained, frozen, batch
        )
        return loss, training.reduce_metrics(training.merge_metrics(metrics)), gradients

    plain = batch_of("grpo")
    wide = batch_of("grpo", row_limit=12)
    assert (len(plain.rows.tokens), len(wide.rows.tokens)) == (2, 6)
    jax.tree.map(np.testing.assert_array_equal, accumulate(wide), accumulate(plain))


def optimizer_state_of_cut_params() -> dict[str, Any]:
    """Where it lies on four devices, [parameter, first moment, second moment] a leaf, and what two
    updates cost."""
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))

    def cut(x: jax.Array) -> jax.Array:
        return jax.device_put(
            x, NamedSharding(mesh, PartitionSpec("fsdp" if x.shape[0] % 4 == 0 else None))
        )

    params = jax.tree.map(cut, tiny.init_params(MODEL))
    optimizer = optimizers.build(optimizers.OptimizerConfig(weight_decay=0.1), SCHEDULE)
    state = training.init_train_state(params, SQUARES, optimizer, tiny_data.train_policy)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    update = training.make_update_step(
        SQUARES, optimizer, SCHEDULE, tiny_data.train_policy, shardings
    )
    trees = [
        state.params["policy"],
        *(optax.tree.get(state.opt_state, name)["policy"] for name in ("mu", "nu")),
    ]
    moments = [
        [str(leaf.sharding.spec) for leaf in leaves]
        for leaves in zip(*map(jax.tree.leaves, trees), strict=True)
    ]
    counters = [leaf for leaf in jax.tree.leaves((state.step, state.opt_state)) if leaf.ndim == 0]
    copies = [
        len(leaf.sharding.device_set) * leaf.sharding.is_fully_replicated for leaf in counters
    ]
    for _ in range(2):
        state, _ = update(state, jnp.ones((1, 1, 1)))
    stayed = jax.tree.all(
        jax.tree.map(lambda leaf, sharding: leaf.sharding == sharding, state, shardings)
    )
    return {
        "moments": moments,
        "copies": copies,
        "stayed": stayed,
        "programs": update._cache_size(),
    }


@pytest.mark.slow
def test_moments_in_the_hosts_memory_change_no_bit_and_stay_there(tmp_path):
    """Nor do they when they have been saved and restored."""
    mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(AxisType.Auto,))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def two_steps(kind: str) -> TrainState:
        params = jax.device_put(copied(tiny.init_params(MODEL)), everywhere)
        state = training.init_train_state(
            params, CASES["grpo"][0], OPTIMIZER, tiny_data.train_policy
        )
        state = replace(state, opt_state=sharding.in_memory(state.opt_state, kind))
        places = jax.tree.map(lambda leaf: leaf.sharding, state)
        update = training.make_update_step(
            CASES["grpo"][0], OPTIMIZER, SCHEDULE, tiny_data.train_policy, places
        )
        for step in range(2):
            state, _ = update(state, batch_of("grpo"))
            with contextlib.closing(manager.open_checkpoints(str(tmp_path / kind))) as checkpoints:
                train_state_io.save(checkpoints, step, state, {}, wait=True)
                state, _ = train_state_io.restore(checkpoints, step, train_state_io.abstract(state))
        assert {
            leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim
        } == {kind}
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.params)} == {
            sharding.DEVICE
        }
        return state

    on_host, on_device = two_steps(sharding.HOST), two_steps(sharding.DEVICE)
    jax.tree.map(np.testing.assert_array_equal, on_host, on_device)


@pytest.fixture(scope="module")
def on_devices() -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-c", ON_DEVICES],
        cwd=Path(__file__).parents[2],
        env=several.virtual_devices(4, "--xla_backend_optimization_level=0"),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.slow
def test_one_two_and_four_devices_take_the_same_step(on_devices):
    one, *others = on_devices["steps"]
    for devices, other in zip((2, 4), others, strict=True):
        assert other["devices"] == devices
        np.testing.assert_allclose(other["params"], one["params"], rtol=1e-5, atol=1e-6)
        for key, value in one["metrics"].items():
            np.testing.assert_allclose(
                other["metrics"][key], value, rtol=1e-5, atol=1e-6, err_msg=key
            )


@pytest.mark.slow
def test_moments_are_cut_as_their_parameters_are(on_devices):
    found = on_devices["cut"]
    assert all(moment == place for place, *moments in found["moments"] for moment in moments)
    assert {"'fsdp'" in place for place, *_ in found["moments"]} == {True, False}
    assert found["copies"] == [4] * 3
    assert found["stayed"]
    assert found["programs"] == 1


# --- one step ---


def test_a_step_is_plain_gradient_descent_on_the_trainable_leaves():
    algorithm, _ = CASES["sft"]
    update = training.make_update_step(
        algorithm, optax.sgd(0.5), lambda step: 0.5, tiny_data.train_policy
    )
    state = initial_state(algorithm, optax.sgd(0.5))
    before = jax.tree.map(np.asarray, state.params)
    gradients, metrics = gradients_and_metrics("sft", "one micro-batch")
    state, metrics_of_update = update(state, batch_of("sft"))
    reported = measured(metrics_of_update)
    assert_close(
        state.params["policy"],
        jax.tree.map(lambda p, g: p - 0.5 * g, before["policy"], gradients["policy"]),
    )
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(gradients)))
    np.testing.assert_allclose(reported["optim/grad_norm"], norm, rtol=1e-5)
    np.testing.assert_allclose(reported["optim/loss"], metrics["loss"], rtol=1e-5)


@pytest.mark.slow
def test_frozen_leaves_keep_their_bits_and_have_no_optimizer_state():
    algorithm, _ = CASES["grpo"]
    state = initial_state(algorithm)
    moments = [leaf.shape for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim > 0]
    assert sorted(moments) == sorted(
        2 * [leaf.shape for leaf in jax.tree.leaves(state.params["policy"])]
    )
    before = jax.tree.map(np.asarray, state.params)
    for _ in range(2):
        state, _ = update_step("grpo")(state, batch_of("grpo"))
    assert_same_bits(state.params["reference"], before["reference"])
    jax.tree.map(
        lambda new, old: np.testing.assert_array_less(0, np.abs(new - old).max()),
        *((state.params["policy"], before["policy"])),
    )


def test_one_program_serves_every_step_and_the_rate_follows_the_schedule():
    # A step of its own: another test may have given the shared one other shapes.
    update = training.make_update_step(SQUARES, OPTIMIZER, SCHEDULE, tiny_data.train_policy)
    params = tiny.init_params(MODEL)
    state = training.init_train_state(params, SQUARES, OPTIMIZER, tiny_data.train_policy)
    rates = []
    for _ in range(3):
        state, metrics = update(state, jnp.ones((1, 1, 1)))
        rates.append(measured(metrics)["optim/learning_rate"])
    assert update._cache_size() == 1
    assert int(state.step) == 3
    np.testing.assert_allclose(rates, [0.01, 0.009, 0.008], rtol=1e-6)


def test_moments_of_bfloat16_params_are_float32_and_every_dtype_stays():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny.init_params(MODEL))
    state = training.init_train_state(params, SQUARES, OPTIMIZER, tiny_data.train_policy)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.bfloat16)}
    assert {leaf.dtype for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim} == {
        jnp.dtype(jnp.float32)
    }
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, state)
    update = training.make_update_step(SQUARES, OPTIMIZER, SCHEDULE, tiny_data.train_policy)
    for _ in range(2):
        old = state
        state, _ = update(state, jnp.ones((1, 1, 1)))
        assert jax.tree.map(lambda leaf: leaf.dtype, state) == dtypes
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    assert update._cache_size() == 1


@pytest.mark.slow
def test_the_state_is_donated_and_a_copy_of_the_policy_is_not():
    params = tiny.init_params(MODEL)
    params["reference"] = copied(params["policy"])
    expected = jax.tree.map(np.asarray, params["reference"])
    held = copied(params["policy"])
    state = training.init_train_state(params, CASES["grpo"][0], OPTIMIZER, tiny_data.train_policy)
    new_state, _ = update_step("grpo")(state, batch_of("grpo"))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params["policy"]))
    assert_same_bits(new_state.params["reference"], expected)
    assert_same_bits(held, expected)


# --- steps that are not finite ---


def counting(algorithm: Algorithm) -> Algorithm:
    """With a state, and a reference that follows the policy, as adaptive coefficients and moving
    averages do."""

    def after_update(
        params: tiny.Params, state: Any, metrics: dict[str, Any]
    ) -> tuple[tiny.Params, Any]:
        reference = jax.tree.map(
            lambda r, p: 0.9 * r + 0.1 * p, params["reference"], params["policy"]
        )
        return params | {"reference": reference}, {"total": state["total"] + metrics["optim/loss"]}

    return algorithm._replace(
        init_state=lambda params: {"total": jnp.zeros(())}, after_update=after_update
    )


def test_a_step_that_is_not_finite_changes_no_bit():
    algorithm, _ = CASES["sft"]

    def loss(params: tiny.Params, batch: Any) -> tuple[jax.Array, Any]:
        inner, poison = batch
        value, metrics = algorithm.loss(params, inner)
        weight = params["policy"]["embedding"][0, 0]
        broken_loss = jnp.log(jnp.where(poison.max() == 1, 0.0 * weight, 1.0))
        # The square root of zero is zero; its derivative is infinite.
        broken_gradient = jnp.sqrt(jnp.where(poison.max() == 2, 0.0 * weight, 1.0))
        return value + broken_loss + broken_gradient, metrics

    fragile = counting(algorithm._replace(loss=loss))
    update = training.make_update_step(fragile, OPTIMIZER, SCHEDULE, tiny_data.train_policy)
    batch = batch_of("sft")
    poison = np.zeros(batch.weights["policy"].shape, np.int32)
    state, metrics = update(initial_state(fragile), (batch, jnp.asarray(poison)))
    assert (measured(metrics)["optim/skipped"], int(state.step)) == (0.0, 1)
    before = jax.tree.map(np.asarray, copied(state))
    assert before.algorithm_state["total"] != 0
    for kind in (1, 2):
        poison[-1] = kind
        state, metrics = update(state, (batch, jnp.asarray(poison)))
        assert measured(metrics)["optim/skipped"] == 1.0
        assert np.isfinite(measured(metrics)["optim/loss"]) == (kind == 2)
        assert_same_bits(state, before)


NOT_FINITE = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}


@pytest.mark.parametrize("kind", NOT_FINITE)
@pytest.mark.parametrize("of", ["rewards", "log_probs"])
def test_no_number_of_a_rollout_that_is_not_finite_moves_a_bit(of, kind):
    """Advantages are made of rewards; of a clipped ratio an infinite log-prob leaves loss and
    gradient finite."""
    algorithm, data = CASES["grpo"]
    spoiled = np.array(getattr(data, of))
    row = int(np.flatnonzero(np.asarray(data.action_mask).any(1))[0])
    spoiled[row, np.flatnonzero(np.asarray(data.action_mask)[row])[0]] = NOT_FINITE[kind]
    make_batch = make_batch_step("grpo")
    params = tiny.init_params(MODEL)
    spoiled_data = data.replace(**{of: jnp.asarray(spoiled)})
    batch = training.minibatch(make_batch(tiny.experience(spoiled_data), params, ())[0], 0)
    state = initial_state(algorithm)
    before = jax.tree.map(np.asarray, copied(state))
    state, metrics = update_step("grpo")(state, batch)
    assert measured(metrics)["optim/skipped"] == 1.0
    assert_same_bits(state, before)


@functools.cache
def make_batch_step(name: str) -> Any:
    return training.make_batch_step(CASES[name][0])


def test_an_algorithm_state_that_is_not_finite_is_not_taken_over():
    def make_batch(
        experience: jax.Array, params: Any, state: dict[str, jax.Array]
    ) -> tuple[jax.Array, Any]:
        return experience, {
            "mean": 0.5 * (state["mean"] + experience.sum()),
            "count": state["count"] + 1,
        }

    step = training.make_batch_step(SQUARES._replace(make_batch=make_batch))
    state = {"mean": jnp.ones(()), "count": jnp.zeros((), jnp.int32)}
    _, state = step(jnp.ones(3), {}, state)
    assert (float(state["mean"]), int(state["count"])) == (2.0, 1)
    for value in NOT_FINITE.values():
        _, state = step(jnp.array([1.0, value, 1.0]), {}, state)
        assert (float(state["mean"]), int(state["count"])) == (2.0, 1)


# --- pieces ---


def test_partition_goes_by_path_and_combine_undoes_it():
    params = {"policy": {"a": 1, "b": [2, 3]}, "reference": {"a": 4}}
    seen = []
    chosen, frozen = training.partition(
        params, lambda path: seen.append(path) or path == "policy/b/1"
    )
    assert {*seen} == {"policy/a", "policy/b/0", "policy/b/1", "reference/a"}
    assert chosen == {"policy": {"a": None, "b": [None, 3]}, "reference": {"a": None}}
    assert frozen == {"policy": {"a": 1, "b": [2, None]}, "reference": {"a": 4}}
    assert training.combine(chosen, frozen) == params


def test_metrics_are_reduced_by_kind():
    stacked: Metrics = {
        "mean": Sum(jnp.array([6.0, 1.0, 0.0]), jnp.array([3.0, 1.0, 0.0])),
        "nothing": Sum(jnp.zeros(3), jnp.zeros(3)),
        "largest": Max(jnp.array([1.0, 5.0, 2.0])),
        "smallest": Min(jnp.array([1.0, -5.0, 2.0])),
        "gap": First(Max(jnp.array([1.0, 4.0, 2.0]))),
    }
    expected = {"mean": 7 / 4, "nothing": 0, "largest": 5, "smallest": -5, "gap": 4}
    assert measured(training.merge_metrics(stacked)) == expected


def one_update(number: float, weight: float, skipped: bool = False) -> Metrics:
    value, weight_ = np.float32(number), np.float32(weight)
    return {
        "mean": Sum(value * weight_, weight_),
        "largest": Max(value),
        "smallest": Min(value),
        "gap": First(Sum(value * weight_, weight_)),
        "largest gap": First(Max(value)),
        "optim/skipped": Max(np.float32(skipped)),
    }


def test_the_metrics_of_several_updates_as_one_row():
    numbers = {"mean": 2.5, "largest": 4.0, "smallest": 2.0, "gap": 2.0, "largest gap": 2.0}
    updates = [one_update(2.0, weight=3), one_update(4.0, weight=1)]
    assert training.reduce_updates(updates) == numbers | {"optim/skipped": 0.0}
    broken = one_update(np.nan, weight=5, skipped=True)
    assert training.reduce_updates([broken, updates[0], broken, updates[1]]) == numbers | {
        "optim/skipped": 2.0
    }
    assert training.reduce_updates([broken]) == {"optim/skipped": 1.0}


# --- several roles ---


def test_moments_of_every_role_lie_where_their_parameters_do():
    """Two roles with equal leaves in different places; counters are replicated."""
    mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(AxisType.Auto,))
    everywhere, cut = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("fsdp",)))

    def leaf(sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((4, 2), np.float32, sharding=sharding)

    params = {
        "policy": {"kernel": leaf(cut)},
        "value": {"kernel": leaf(everywhere)},
        "reference": {"kernel": None},
    }
    optimizer = optimizers.by_role(
        optimizers.OptimizerConfig(), SCHEDULE, {"policy": 1.0, "value": 5.0}
    )
    opt_state = jax.eval_shape(optimizer.init, params)
    found = training.opt_state_shardings(opt_state, params, default=everywhere)
    paths = jax.tree_util.tree_flatten_with_path(found)[0]
    moments = {jax.tree_util.keystr(path): sharding for path, sharding in paths}
    assert sum(sharding == cut for sharding in moments.values()) == 2
    assert all(
        ("'policy'" in path and "kernel" in path) == (sharding == cut)
        for path, sharding in moments.items()
    )
    assert len(moments) == 8  # of each role two moments, and two counters


def test_what_an_algorithm_remembers_is_placed_as_the_step_is():
    mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(AxisType.Auto,))
    params = jax.device_put(tiny.init_params(MODEL), NamedSharding(mesh, PartitionSpec()))
    algorithm = CASES["grpo"][0]._replace(init_state=lambda params: jnp.ones((), jnp.float32))
    state = training.init_train_state(params, algorithm, OPTIMIZER, tiny_data.train_policy)
    assert (
        state.algorithm_state.sharding
        == state.step.sharding
        == NamedSharding(mesh, PartitionSpec())
    )


def test_this_jaxlib_knows_the_options_for_gpus():
    """An option that XLA has dropped is an error where the program is compiled."""
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
    one, eight = (SimpleNamespace(devices=np.array([gpu] * n), size=n) for n in (1, 8))
    assert training.compiler_options(cast(Any, one)) is None
    options = training.compiler_options(cast(Any, eight))
    assert options
    jax.jit(lambda x: x + 1, compiler_options=options).lower(1.0).compile()
