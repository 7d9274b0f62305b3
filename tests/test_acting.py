"""Completions are drawn with a copy of the weights where learning keeps them otherwise."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch import acting, build, config
from launch.sources import Setup, roller
from tests import several
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
