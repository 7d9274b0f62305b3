"""Completions are drawn with a copy of the weights where learning keeps them otherwise."""

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

from launch import acting, build, config
from launch.sources import Setup, roller
from tests import several
from tests.topologies import needs_libtpu, tpu_devices
from tpu_rl import sharding
from tpu_rl.errors import InputError
from tpu_rl.types import Params, Rollout, TrainState

TINY = ["--batch.completions", "2", "--sampling.max-new-tokens", "24", "--sampling.max-rows", "8"]


def drawn(flags: list[str], run_dir: Path) -> tuple[Setup, Params, Rollout]:
    """(the setup of a run, its params before the first step, completions of four prompts)."""
    setup, params = made(flags, run_dir)
    with jax.set_mesh(setup.mesh):
        rows = [{"prompt": f"{n}+{n + 2}-1=", "answer": str(2 * n + 1)} for n in range(4)]
        state = TrainState(jnp.zeros((), jnp.int32), params, None, None)
        return setup, params, roller(setup)(1, state, rows, 0).rollout


def made(flags: list[str], run_dir: Path) -> tuple[Setup, Params]:
    one = config.parse(["arithmetic_grpo", *TINY, *flags, "--run-dir", str(run_dir)])
    return build.make_setup(one, run_dir, build.make_mesh(one.mesh))


def test_the_masters_themselves_are_read_where_nothing_differs(tmp_path):
    setup, params = made([], tmp_path)
    read = setup.acting("policy").params(params)
    assert all(a is b for a, b in zip(jax.tree.leaves(read), jax.tree.leaves(params), strict=True))


def test_a_bfloat16_model_draws_the_same_from_its_copy_as_from_float32_masters(tmp_path, monkeypatch):
    flags = ["--model.dtype", "bfloat16", "--algorithm.kl-loss-coef", "0.1"]
    setup, params, copied = drawn(flags, tmp_path)
    before = jax.tree.map(np.asarray, params)
    read = setup.acting("policy").params(params)
    kinds = {path[-1].key: leaf.dtype for path, leaf in jax.tree_util.tree_leaves_with_path(read["policy"])}
    assert kinds["embedding"] == kinds["down"] == jnp.bfloat16
    assert kinds["final_norm"] == kinds["mlp_norm"] == jnp.float32
    assert read["reference"] is params["reference"], "nobody samples from it"
    jax.tree.map(np.testing.assert_array_equal, before, params)

    monkeypatch.setattr(acting, "_copy", lambda weight, wanted, place: weight)
    _, _, direct = drawn(flags, tmp_path)
    jax.tree.map(np.testing.assert_array_equal, direct, copied)


def test_groups_that_do_not_fit_name_those_that_do(tmp_path):
    with pytest.raises(InputError, match="1 devices cannot be cut into groups of 3"):
        made(["--sampling.tensor", "3"], tmp_path)


FOUR_DEVICES = """
import pathlib, sys
import jax, numpy as np
from tests.test_acting import drawn
to = pathlib.Path(sys.argv[1])
setup, params, rollout = drawn(["--mesh.fsdp", "4"], to)
apart, masters, again = drawn(["--mesh.fsdp", "4", "--sampling.tensor", "2"], to)
np.testing.assert_array_equal(rollout.tokens, again.tokens)
np.testing.assert_allclose(rollout.log_probs, again.log_probs, atol=2e-5)
answers = apart.acting("policy")
assert dict(answers.mesh.shape) == {"data": 2, "tensor": 2}
one = masters["policy"]["layers"]["layer_0"]["down"]
copy = answers.params(masters)["policy"]["layers"]["layer_0"]["down"]
_, inner, width = one.shape
assert one.addressable_shards[0].data.shape[1:] == (inner, width // 4)
assert copy.addressable_shards[0].data.shape[1:] == (inner // 2, width)
np.testing.assert_array_equal(one, copy)
jax.tree.map(np.testing.assert_array_equal, params, masters)
print("drawn alike on both meshes")
"""


MOVED = """
import pathlib, sys
import jax, numpy as np
from launch import acting, build
from tests.test_acting import made

setup, params = made(["--mesh.fsdp", "4", "--sampling.tensor", "2", *sys.argv[2:]], pathlib.Path(sys.argv[1]))

def on_device(tree):
    return sum(shard.data.nbytes for leaf in tree for shard in leaf.addressable_shards if shard.device.id == 0)

leaves = jax.tree.leaves(params)
before, home = jax.tree.map(np.asarray, params), acting.places_of(params)
lying = on_device(leaves)
held, move = [], acting._copy

def watched(weight, wanted, place):
    moved = move(weight, wanted, place)
    held.append(on_device(jax.live_arrays()))
    return moved

others = on_device(jax.live_arrays()) - lying
acting._copy = watched
reads = build.drawn_from(setup, setup.config.stages[0])
lent = acting.lent(setup.config, reads, params, setup.mesh)
acting._copy = move
there = on_device(jax.tree.leaves(lent))
largest = max(on_device([leaf]) for leaf in jax.tree.leaves(lent))
assert max(held) - others <= max(lying, there) + largest, (held, lying, there, largest)
assert there > lying  # cut two ways and not four
assert all(leaf.is_deleted() for leaf, kept in zip(leaves, jax.tree.leaves(lent), strict=True) if leaf is not kept)
answers = setup.acting("policy")
for read, leaf in zip(jax.tree.leaves(answers.params(lent)), jax.tree.leaves(lent), strict=True):
    assert read is leaf or read.dtype != leaf.dtype
del read, leaf
back = acting.relaid(lent, home)
assert on_device(jax.tree.leaves(back)) == lying
jax.tree.map(np.testing.assert_array_equal, before, back)
assert acting.places_of(back) == home
print("moved there and back")
"""
ADAPTERS = ["--model.dtype", "bfloat16", "--model.param-dtype", "bfloat16", "--model.lora.rank", "2"]


@pytest.mark.parametrize(
    "flags",
    [pytest.param([], id="float32", marks=pytest.mark.slow), pytest.param(ADAPTERS, id="adapters over bfloat16")],
)
def test_weights_that_lie_elsewhere_in_drawing_are_never_there_twice(flags, tmp_path):
    command = [sys.executable, "-c", MOVED, str(tmp_path), *flags]
    done = subprocess.run(command, env=several.virtual_devices(4), capture_output=True, text=True, timeout=240)
    assert "there and back" in done.stdout, done.stderr[-3000:]


STOPPED = """
import sys
from launch import acting, preemption, run

copy, move, moving = acting._copy, acting._move, []

def watched_move(weight, place):
    moving.append(weight)
    there = move(weight, place)
    moving.pop()
    return there

def watched_copy(weight, wanted, place):
    there = copy(weight, wanted, place)
    assert moving or there is weight or there.dtype != weight.dtype, "a second layout"
    return there

acting._copy, acting._move = watched_copy, watched_move
flags = "--steps 2 --batch.prompts 4 --batch.completions 2 --sampling.max-new-tokens 16 --sampling.segment 4 \\
--evaluation.rows 4 --mesh.fsdp 2 --sampling.tensor 2 --checkpoint-every 10 --run-dir".split()
border, calls = preemption.border, []

def stopping():
    calls.append(None)
    if len(calls) == int(sys.argv[2]):
        raise preemption.Asked(75)
    border()

preemption.border = stopping
sys.exit(run.main(["arithmetic_grpo", *flags, sys.argv[1]]))
"""


@pytest.mark.slow
def test_a_run_that_ends_while_weights_are_elsewhere_goes_on_the_same(tmp_path):
    def ended(folder: str, at: int) -> int:
        command = [sys.executable, "-c", STOPPED, str(tmp_path / folder), str(at)]
        return subprocess.run(command, env=several.virtual_devices(2), timeout=200, check=False).returncode

    def digest(folder: str) -> str:
        return json.loads((tmp_path / folder / "summary.json").read_text())["params_digest"]

    assert ended("whole", 0) == 0
    assert ended("stopped", 8) == 75  # the second step's rollout has begun
    assert not (tmp_path / "stopped" / "summary.json").exists()
    assert ended("stopped", 0) == 0
    assert digest("stopped") == digest("whole")


def test_only_what_draws_is_lent(tmp_path):
    def lent(*flags: str) -> tuple[list[str], list[str]]:
        one = config.parse([*flags, "--model.path", "builtin:arithmetic", "--run-dir", str(tmp_path)])
        setup = build.make_setup(one, tmp_path, build.make_mesh(one.mesh))[0]
        reads = build.drawn_from(setup, one.stages[-1]), build.answered_from(setup, one.stages[-1])
        return [select.name for select in reads[0]], [select.name for select in reads[1]]

    gkd = ["arithmetic_gkd", "--algorithm.teacher", "builtin:arithmetic", "--algorithm.off-policy", "teacher"]
    assert lent("arithmetic_grpo", "--evaluation.rows", "0") == (["policy"], [])
    assert lent(*gkd, "--algorithm.on-policy", "1") == (["policy"], ["policy"])
    assert lent(*gkd, "--algorithm.on-policy", "0.5") == (["policy", "teacher"], ["policy"])
    assert lent("arithmetic_q_sharp") == ([], ["policy", "q"])
    assert lent("arithmetic_process_reward") == (["reference"], [])


def test_what_differs_in_type_stays_for_learning(tmp_path):
    setup, params = made(["--model.dtype", "bfloat16"], tmp_path)
    lent = acting.lent(setup.config, build.drawn_from(setup, setup.config.stages[0]), params, setup.mesh)
    assert all(a is b for a, b in zip(jax.tree.leaves(lent), jax.tree.leaves(params), strict=True))


@needs_libtpu
def test_no_device_gathers_a_whole_leaf_on_the_way():
    learning = sharding.make_mesh(fsdp=16, devices=tpu_devices("v5e:4x4"))
    drawing, axes, shape = sharding.drawing_mesh(learning, 8), ("layers", "embed", "mlp"), (32, 4096, 14_336)
    source, place = (NamedSharding(mesh, sharding.spec(axes, shape, mesh)) for mesh in (learning, drawing))

    def temporaries(source, place):
        weight = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=source)
        way = acting.on_the_way(source, place, shape)
        program = acting._converted(weight.dtype, way, place).lower(weight).compile()
        return program.memory_analysis().temp_size_in_bytes

    whole = 2 * math.prod(shape)
    assert temporaries(source, place) <= 1.01 * whole / 8  # straight: all of it
    assert temporaries(place, source) <= 1.01 * whole / 8


@pytest.mark.slow
def test_a_mesh_of_its_own_draws_the_same(tmp_path):
    env = several.virtual_devices(4)
    command = [sys.executable, "-c", FOUR_DEVICES, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert "drawn alike" in done.stdout, done.stderr[-3000:]


def test_evaluation_rounds_nothing(tmp_path):
    setup, params = made(["--sampling.cache", "int8"], tmp_path)

    def kinds(setup: Setup) -> set[str]:
        answers = setup.acting("policy")
        cache = answers.policy.init_cache(answers.params(params), 2, 4)
        return {leaf.dtype.name for leaf in jax.tree.leaves(cache["full"])}

    assert "int8" in kinds(setup)
    assert kinds(build.exactly(setup)) == {"float32"}
