"""The copy of the weights that the sampler reads, and weights that move to the sampling mesh."""

import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from tests.fixtures import several
from tests.fixtures.topologies import needs_libtpu, tpu_devices
from tpu_rl.commands import compose, config
from tpu_rl.commands.roles import RunContext
from tpu_rl.errors import InputError
from tpu_rl.models import quantization
from tpu_rl.rollout import weights
from tpu_rl.rollout.engine import RolloutRequest
from tpu_rl.train import sharding
from tpu_rl.types import Params, Rollout

TINY = [
    "--batch.group-size=2",
    "--sampling.max-new-tokens=24",
    "--sampling.max-num-seqs=8",
]


def make_context(flags: list[str], run_dir: Path) -> tuple[RunContext, Params]:
    """Return a run of GRPO, and its params before the first step."""
    run_config = config.parse(["arithmetic_grpo", *TINY, *flags, "--run-dir", str(run_dir)])
    return compose.make_context(run_config, run_dir, compose.make_mesh(run_config.mesh))


def roll_out(flags: list[str], run_dir: Path) -> tuple[RunContext, Params, Rollout]:
    """Return a run, its params before the first step, and completions of four prompts."""
    context, params = make_context(flags, run_dir)
    with jax.set_mesh(context.mesh):
        rows = [{"prompt": f"{n}+{n + 2}-1=", "answer": str(2 * n + 1)} for n in range(4)]
        scored = compose.rollout_engine(context).roll_out(params, RolloutRequest(rows, step=1))
        return context, params, scored.rollout


def test_masters_themselves_are_read_if_nothing_differs(tmp_path):
    context, params = make_context([], tmp_path)
    read = context.rollout_policy("policy").params(params)
    assert all(
        leaf is master
        for leaf, master in zip(jax.tree.leaves(read), jax.tree.leaves(params), strict=True)
    )


@pytest.mark.nightly
def test_bfloat16_copy_samples_the_same_as_float32_masters(tmp_path, monkeypatch):
    flags = ["--model.dtype", "bfloat16", "--algorithm.kl-loss-coef", "0.1"]
    context, params, from_copy = roll_out(flags, tmp_path)
    before = jax.tree.map(np.asarray, params)
    read = context.rollout_policy("policy").params(params)
    dtypes = {
        path[-1].key: leaf.dtype
        for path, leaf in jax.tree_util.tree_leaves_with_path(read["policy"])
    }
    assert dtypes["embedding"] == dtypes["down"] == jnp.bfloat16
    assert dtypes["final_norm"] == dtypes["mlp_norm"] == jnp.float32
    assert read["reference"] is params["reference"], "nothing samples from it"
    jax.tree.map(np.testing.assert_array_equal, before, params)

    monkeypatch.setattr(weights, "_copy", lambda weight, target, placement: weight)
    _, _, from_masters = roll_out(flags, tmp_path)
    jax.tree.map(np.testing.assert_array_equal, from_masters, from_copy)


def test_tensor_parallel_size_must_divide_the_devices(tmp_path):
    with pytest.raises(InputError, match="1 devices cannot be cut into groups of 3"):
        make_context(["--sampling.tensor-parallel", "3"], tmp_path)


MESH_OF_ITS_OWN = """
import pathlib, sys
import jax, numpy as np
from tests.rollout.test_weights import make_context, roll_out
from tpu_rl import models
from tpu_rl.models import quantization
from tpu_rl.rollout import weights
from tpu_rl.train import sharding

run_dir = pathlib.Path(sys.argv[1])
_, params, rollout = roll_out(["--mesh.fsdp", "4"], run_dir)
flags = ["--mesh.fsdp", "4", "--sampling.tensor-parallel", "2"]
context, masters, same_rollout = roll_out(flags, run_dir)
np.testing.assert_array_equal(rollout.tokens, same_rollout.tokens)
np.testing.assert_allclose(rollout.log_probs, same_rollout.log_probs, atol=2e-5)

policy = context.rollout_policy("policy")
assert dict(policy.mesh.shape) == {"data": 2, "tensor": 2}
master = masters["policy"]["layers"]["layer_0"]["down"]
copy = policy.params(masters)["policy"]["layers"]["layer_0"]["down"]
_, inner, width = master.shape
assert master.addressable_shards[0].data.shape[1:] == (inner, width // 4)
assert copy.addressable_shards[0].data.shape[1:] == (inner // 2, width)
np.testing.assert_array_equal(master, copy)

# The same numbers, whoever holds them.
flags += ["--sampling.weight-dtype", "int8"]
quantized, masters = make_context(flags, run_dir)
layer = quantized.rollout_policy("policy").params(masters)["policy"]["layers"]["layer_0"]
for name in ("down", "query"):
    master = np.asarray(masters["policy"]["layers"]["layer_0"][name])
    numbers, scale = quantization.quantize(name, master, "int8")
    np.testing.assert_array_equal(layer[name], numbers)
    np.testing.assert_allclose(layer[name + "_scale"], scale, rtol=1e-6)
assert layer["down"].addressable_shards[0].data.shape[1:] == (inner // 2, width)
assert layer["query_scale"].addressable_shards[0].data.shape[1] == master.shape[1] // 2

# From two devices that learn to two that only sample.
devices = jax.devices()
learning = sharding.make_mesh(fsdp=2, devices=devices[:2])
own = sharding.sampling_mesh(sharding.make_mesh(2, devices=devices[2:]), 2)
layout = weights.SamplingLayout(own, "float32", learning, "int8")
placed = sharding.place(jax.tree.map(np.asarray, masters), models.axes(masters), learning)
sent = weights.rollout_policy(policy.policy, [models.Select("policy")], layout).params(placed)
jax.tree.map(np.testing.assert_array_equal, layer, sent["policy"]["layers"]["layer_0"])
assert sent["policy"]["layers"]["layer_0"]["query_scale"].devices() == set(devices[2:])
jax.tree.map(np.testing.assert_array_equal, params, masters)
print("both meshes sample the same")
"""


MOVING_WEIGHTS = """
import pathlib, sys
import jax, numpy as np
from tpu_rl.commands import compose
from tests.rollout.test_weights import make_context
from tpu_rl.rollout import weights

flags = ["--mesh.fsdp", "4", "--sampling.tensor-parallel", "2", *sys.argv[2:]]
context, params = make_context(flags, pathlib.Path(sys.argv[1]))

def bytes_on_device(leaves):
    shards = [shard for leaf in leaves for shard in leaf.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device.id == 0)

leaves = jax.tree.leaves(params)
before = jax.tree.map(np.asarray, params)
training_placements = weights.placements_of(params)
training_bytes = bytes_on_device(leaves)
other_bytes = bytes_on_device(jax.live_arrays()) - training_bytes
live_bytes = []
copy = weights._copy

def measure_and_copy(weight, target, placement):
    copied = copy(weight, target, placement)
    live_bytes.append(bytes_on_device(jax.live_arrays()))
    return copied

weights._copy = measure_and_copy
reads = compose.read_for_rollouts(context, context.config.stages[0])
moved = weights.reshard_for_sampling(params, reads, context.sampling_layout)
weights._copy = copy
sampling_bytes = bytes_on_device(jax.tree.leaves(moved))
largest = max(bytes_on_device([leaf]) for leaf in jax.tree.leaves(moved))
limit = max(training_bytes, sampling_bytes) + largest
assert max(live_bytes) - other_bytes <= limit, (live_bytes, training_bytes, sampling_bytes, largest)
assert sampling_bytes > training_bytes  # Sampling cuts weights two ways, training four ways.
for leaf, moved_leaf in zip(leaves, jax.tree.leaves(moved), strict=True):
    assert leaf is moved_leaf or leaf.is_deleted()
read = context.rollout_policy("policy").params(moved)
for leaf, moved_leaf in zip(jax.tree.leaves(read), jax.tree.leaves(moved), strict=True):
    assert leaf is moved_leaf or leaf.dtype != moved_leaf.dtype
del read, leaf, moved_leaf
back = weights.reshard_back(moved, training_placements)
assert bytes_on_device(jax.tree.leaves(back)) == training_bytes
jax.tree.map(np.testing.assert_array_equal, before, back)
assert weights.placements_of(back) == training_placements
print("moved there and back")
"""
ADAPTERS = [
    "--model.dtype=bfloat16",
    "--model.param-dtype=bfloat16",
    "--model.lora.rank=2",
]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param([], id="float32", marks=pytest.mark.nightly),
        pytest.param(ADAPTERS, id="adapters over bfloat16"),
    ],
)
def test_moving_weights_never_holds_two_layouts(flags, tmp_path):
    command = [sys.executable, "-c", MOVING_WEIGHTS, str(tmp_path), *flags]
    done = subprocess.run(
        command, env=several.virtual_devices(4), capture_output=True, text=True, timeout=240
    )
    assert "there and back" in done.stdout, done.stderr[-3000:]


STOPPED_RUN = """
import sys
from tpu_rl.commands import run
from tpu_rl.rollout import weights
from tpu_rl.runtime import preemption

copy = weights._copy
move = weights._move
moving = []

def watched_move(weight, placement):
    moving.append(weight)
    moved = move(weight, placement)
    moving.pop()
    return moved

def watched_copy(weight, target, placement):
    copied = copy(weight, target, placement)
    is_second_layout = copied is not weight and copied.dtype == weight.dtype
    assert moving or not is_second_layout, "a second layout"
    return copied

weights._copy = watched_copy
weights._move = watched_move
stop_if_requested = preemption.stop_if_requested
num_calls = 0

def stop_at_call():
    global num_calls
    num_calls += 1
    if num_calls == int(sys.argv[2]):
        raise preemption.StopRequested(75)
    stop_if_requested()

preemption.stop_if_requested = stop_at_call
flags = [
    "--steps=2", "--batch.prompts=4", "--batch.group-size=2", "--sampling.max-new-tokens=16",
    "--sampling.host-sync-steps=4", "--evaluation.rows=4", "--mesh.fsdp=2",
    "--sampling.tensor-parallel=2", "--checkpoint.interval=10", "--run-dir", sys.argv[1],
]
sys.exit(run.main(["arithmetic_grpo", *flags]))
"""


@pytest.mark.nightly
def test_resume_is_exact_after_a_stop_during_sampling(tmp_path):
    def exit_code(folder: str, stop_at_call: int) -> int:
        command = [sys.executable, "-c", STOPPED_RUN, str(tmp_path / folder), str(stop_at_call)]
        return subprocess.run(
            command, env=several.virtual_devices(2), timeout=200, check=False
        ).returncode

    def digest(folder: str) -> str:
        return json.loads((tmp_path / folder / "summary.json").read_text())["params_digest"]

    assert exit_code("whole", 0) == 0
    assert exit_code("stopped", 8) == 75  # During the rollout of the second step.
    assert not (tmp_path / "stopped" / "summary.json").exists()
    assert exit_code("stopped", 0) == 0
    assert digest("stopped") == digest("whole")


@pytest.mark.slow
def test_only_weights_that_sampling_reads_move(tmp_path):
    def moving_roles(*flags: str) -> tuple[list[str], list[str]]:
        """Return the roles that move for rollouts and for evaluations."""
        run_config = config.parse(
            [*flags, "--model.path", "builtin:arithmetic", "--run-dir", str(tmp_path)]
        )
        mesh = compose.make_mesh(run_config.mesh)
        context, _ = compose.make_context(run_config, tmp_path, mesh)
        stage = run_config.stages[-1]
        for_rollouts = compose.read_for_rollouts(context, stage)
        for_evaluation = compose.read_for_evaluation(context, stage)
        return [select.name for select in for_rollouts], [select.name for select in for_evaluation]

    gkd = [
        "arithmetic_gkd",
        "--algorithm.teacher=builtin:arithmetic",
        "--algorithm.off-policy=teacher",
    ]
    assert moving_roles("arithmetic_grpo", "--evaluation.rows", "0") == (["policy"], [])
    assert moving_roles(*gkd, "--algorithm.on-policy", "1") == (["policy"], ["policy"])
    half_on_policy = moving_roles(*gkd, "--algorithm.on-policy", "0.5")
    assert half_on_policy == (["policy", "teacher"], ["policy"])
    assert moving_roles("arithmetic_q_sharp") == ([], ["policy", "q"])
    assert moving_roles("arithmetic_process_reward") == (["reference"], [])


def test_weights_of_another_type_do_not_move(tmp_path):
    context, params = make_context(["--model.dtype", "bfloat16"], tmp_path)
    reads = compose.read_for_rollouts(context, context.config.stages[0])
    moved = weights.reshard_for_sampling(params, reads, context.sampling_layout)
    assert all(
        leaf is master
        for leaf, master in zip(jax.tree.leaves(moved), jax.tree.leaves(params), strict=True)
    )


@needs_libtpu
def test_no_device_gathers_a_whole_leaf_that_moves():
    training_mesh = sharding.make_mesh(fsdp=16, devices=tpu_devices("v5e:4x4"))
    sampling_mesh = sharding.sampling_mesh(training_mesh, 8)
    axes = ("layers", "embed", "mlp")
    shape = (32, 4096, 14_336)
    training, sampling = (
        NamedSharding(mesh, sharding.spec(axes, shape, mesh))
        for mesh in (training_mesh, sampling_mesh)
    )

    def temporary_bytes(source: NamedSharding, placement: NamedSharding) -> int:
        weight = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=source)
        transit = weights.transit_sharding(source, placement, shape)
        program = weights._convert(weight.dtype, transit, placement).lower(weight).compile()
        return program.memory_analysis().temp_size_in_bytes

    leaf_bytes = 2 * math.prod(shape)
    # Without the sharding in transit, it would be the whole leaf.
    assert temporary_bytes(training, sampling) <= 1.01 * leaf_bytes / 8
    assert temporary_bytes(sampling, training) <= 1.01 * leaf_bytes / 8


@pytest.mark.slow
def test_sampling_mesh_samples_the_same_as_the_training_mesh(tmp_path):
    command = [sys.executable, "-c", MESH_OF_ITS_OWN, str(tmp_path)]
    done = subprocess.run(
        command, env=several.virtual_devices(4), capture_output=True, text=True, timeout=240
    )
    assert "sample the same" in done.stdout, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--model.lora.rank", "2"]])
def test_matrices_are_quantized_from_the_weights_of_the_computation(flags, tmp_path):
    flags = ["--sampling.weight-dtype", "int8", "--model.dtype", "bfloat16", *flags]
    context, params = make_context(flags, tmp_path)
    role = "base" if "base" in params else "policy"
    before = jax.tree.map(np.asarray, params)
    read = context.rollout_policy("policy").params(params)
    jax.tree.map(np.testing.assert_array_equal, before, params)
    masters, layer = (tree[role]["layers"]["layer_0"] for tree in (params, read))
    for name in ("query", "output", "down"):
        rounded = masters[name].astype(jnp.bfloat16)
        numbers, scale = jax.jit(quantization.quantize, static_argnums=(0, 2))(
            name, rounded, "int8"
        )
        np.testing.assert_array_equal(layer[name], numbers)
        np.testing.assert_array_equal(layer[f"{name}_scale"], scale)
    assert read[role]["embedding"].dtype == jnp.bfloat16
    assert "query_scale" not in masters
    # Plans count what runs hold.
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), params
    )
    planned = context.rollout_policy("policy").params(shapes)
    like = jax.tree.map(
        lambda leaf, shape: (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype), read, planned
    )
    assert all(jax.tree.leaves(like))


def test_evaluation_rounds_neither_weights_nor_the_cache(tmp_path):
    flags = ["--sampling.kv-cache-dtype", "int8", "--sampling.weight-dtype", "int8"]
    context, params = make_context(flags, tmp_path)
    read = context.unrounded().rollout_policy("policy").params(params)
    assert all(
        leaf is master
        for leaf, master in zip(jax.tree.leaves(read), jax.tree.leaves(params), strict=True)
    )

    def cache_dtypes(context: RunContext) -> set[str]:
        policy = context.rollout_policy("policy")
        cache = policy.policy.init_cache(policy.params(params), 2, 4)
        return {leaf.dtype.name for leaf in jax.tree.leaves(cache["full"])}

    assert "int8" in cache_dtypes(context)
    assert cache_dtypes(context.unrounded()) == {"float32"}
