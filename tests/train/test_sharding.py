"""The mesh and the table. Several devices run in a process of their own: their number is fixed when
JAX starts."""

import itertools
import math
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from tests.fixtures import several
from tests.fixtures.topologies import needs_libtpu, tpu_devices
from tpu_rl.errors import InputError
from tpu_rl.train import sharding


def abstract(*sizes):
    sizes += (1,) * (len(sharding.MESH_AXES) - len(sizes))
    return AbstractMesh(sizes, sharding.MESH_AXES, axis_types=(AxisType.Auto,) * len(sizes))


FOUR = abstract(1, 2, 2, 1)
ROWS, WIDTHS = ("data", "fsdp", "expert"), ("fsdp", "expert", "context")


def test_spec_cuts_what_divides():
    spec = sharding.spec
    assert spec(("layers", "heads", "head_dim", "embed"), (3, 4, 6, 8), FOUR) == PartitionSpec(
        None, ("tensor",), None, WIDTHS
    )
    assert spec(("kv_heads", "head_dim", "embed"), (1, 6, 8), FOUR) == PartitionSpec(
        None, None, WIDTHS
    )
    assert spec(("vocab", "embed"), (131, 7), FOUR) == PartitionSpec(None, None)


def test_a_mesh_axis_cuts_one_dimension_only():
    mesh = abstract(1, 2, 1, 2)
    wanted = PartitionSpec(("expert",), ("fsdp", "context"), ("tensor",))
    assert sharding.spec(("experts", "embed", "expert_mlp"), (6, 8, 5), mesh) == wanted
    assert sharding.spec(("embed", "mlp"), (8, 5), mesh) == PartitionSpec(WIDTHS, ("tensor",))


def test_rows_use_as_many_mesh_axes_as_divide_them():
    mesh = abstract(2, 2, 1, 2)
    assert sharding.spec((None, "rows"), (5, 8), mesh)[1] == ("data", "fsdp", "expert")
    assert sharding.spec((None, "rows"), (5, 4), mesh)[1] == ("data", "fsdp")
    assert sharding.spec((None, "rows"), (5, 6), mesh)[1] == "data"
    assert sharding.spec((None, "rows"), (5, 3), mesh)[1] is None


def test_one_device_mesh_and_batches():
    mesh = sharding.make_mesh()
    assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "tensor": 1, "expert": 1, "context": 1}
    batch = sharding.batch_sharding(mesh, (4, 8, 16), rows=1)
    assert batch.spec == PartitionSpec(None, ("data", "fsdp", "expert"), None)
    placed = sharding.place({"up": np.ones((4, 6))}, {"up": ("embed", "mlp")}, mesh)
    assert placed["up"].sharding.spec == PartitionSpec(WIDTHS, ("tensor",))


def test_a_long_row_s_tokens_lie_on_several_devices_and_decoded_rows_do_not():
    mesh = abstract(1, 2, 1, 1, 4)
    assert sharding.spec(("rows", "tokens", None), (2, 64, 8), mesh) == PartitionSpec(
        ("data", "fsdp", "expert"), "context", None
    )
    assert sharding.spec(("rows", "tokens"), (2, 3), mesh) == PartitionSpec(ROWS, None)
    assert sharding.spec(("slots", None), (8, 1), mesh) == PartitionSpec((*ROWS, "context"), None)


def test_for_drawing_experts_are_whole_and_nothing_is_gathered():
    mesh = AbstractMesh((4, 2), sharding.SAMPLING_AXES, axis_types=(AxisType.Auto,) * 2)
    spec = sharding.spec
    assert spec(("experts", "embed", "expert_mlp"), (16, 8, 6), mesh) == PartitionSpec(
        ("data", "tensor"), None, None
    )
    few = spec(("experts", "embed", "expert_mlp"), (4, 8, 6), mesh)
    assert few == PartitionSpec("data", None, "tensor"), (
        "four experts for eight devices: two share one's width"
    )
    assert spec(("embed", "mlp"), (8, 6), mesh) == PartitionSpec(None, "tensor")
    assert (
        spec(("slots", None), (8, 1), mesh)
        == spec(("rows", "tokens"), (8, 16), mesh)
        == PartitionSpec("data", None)
    )


def test_spread_is_over_the_mesh_that_is_set():
    assert sharding.spread("rows", 8) == 1
    with jax.sharding.use_abstract_mesh(FOUR):
        assert sharding.spread("rows", 8) == 2
        assert sharding.spread("rows", 3) == 1
        assert sharding.spread("outputs", 8) == 1
    with jax.sharding.use_abstract_mesh(abstract(2, 2, 1, 1)):
        assert sharding.spread("rows", 8) == 4
        assert sharding.spread("rows", 6) == 2


def test_impossible_meshes_name_those_that_fit():
    with pytest.raises(
        InputError, match=r"(?s)fsdp 3.*takes 6 devices and there are 8.*\(2, 4, 1, 1, 1\)"
    ) as error:
        sharding.make_mesh(2, 3, devices=jax.devices() * 8)
    assert error.value.fix.count("(") == 4
    with pytest.raises(InputError, match="data 0"):
        sharding.make_mesh(0)


FOUR_DEVICES = """
import jax, numpy as np
from tests.fixtures.decoders import CONFIGS, plain, tiny, tokens_of, LENGTH
from tpu_rl import models
from tpu_rl.train import sharding
import tempfile, pathlib
jax.config.update("jax_default_matmul_precision", "highest")
mesh = sharding.make_mesh(fsdp=2, tensor=2)
model, params, logits, extend = tiny("gemma3")
directory = pathlib.Path(tempfile.mkdtemp()) / "model"
models.save(directory, model, params)
_, cut = models.load(directory, mesh=mesh)
jax.tree.map(np.testing.assert_array_equal, params, cut)
query = cut["layers"]["layer_0"]["query"]
assert query.addressable_shards[0].data.shape == (2, 2, 10, 20), query.sharding
rows = (tokens_of((3, LENGTH)), *plain(3))
np.testing.assert_allclose(logits(cut, *rows), logits(params, *rows), atol=2e-5)
again = pathlib.Path(tempfile.mkdtemp()) / "model"
models.save(again, model, cut)
assert (again / "model.safetensors").read_bytes() == (directory / "model.safetensors").read_bytes()
policy = models.policy(model)
cache = policy.init_cache(cut, 4, 8)
four = [part[:, :6] for part in (tokens_of((4, LENGTH)), plain(4)[0], plain(4)[2])]
step = jax.jit(policy.extend)
one, _ = step(params, cache, *four, np.array([6, 5, 4, 3]))
many, _ = step(cut, cache, *four, np.array([6, 5, 4, 3]))
np.testing.assert_allclose(one, many, atol=2e-5)
with jax.set_mesh(mesh):
    whole = jax.jit(model.hidden)(cut, *(np.tile(part[:2], (2, 1)) for part in rows))
assert whole.addressable_shards[0].data.shape == (2, LENGTH, 40), whole.sharding
print("four devices agree with one")
"""


@pytest.mark.slow
def test_four_devices_equal_one():
    env = several.virtual_devices(4)
    done = subprocess.run(
        [sys.executable, "-c", FOUR_DEVICES], env=env, capture_output=True, text=True, timeout=240
    )
    assert "four devices agree with one" in done.stdout, done.stderr[-3000:]


REWARD_MODEL = """
import pathlib, tempfile
import jax

from tpu_rl import models, tokenizers
from tpu_rl.rewards import reward_model
from tpu_rl.train import sharding
import tpu_rl
shipped = pathlib.Path(tpu_rl.__file__).parent / "pretrained" / "arithmetic"
model = models.variant(models.from_config(shipped), num_outputs=1)
path = pathlib.Path(tempfile.mkdtemp()) / "model"
models.save(path, model, model.init(jax.random.key(0)), tokenizers.load(shipped))
asked = ["8+9=", "1+1="], ["#17", "#2"]
reward = reward_model.load(path)
alone = reward(*asked)
with jax.set_mesh(sharding.make_mesh(fsdp=2)):
    assert reward(*asked) == alone
    assert reward_model.load(path)(*asked) == alone
print("scored", alone)
"""


@pytest.mark.nightly
def test_a_reward_model_scores_inside_a_run_on_several_devices():
    env = several.virtual_devices(2)
    done = subprocess.run(
        [sys.executable, "-c", REWARD_MODEL], env=env, capture_output=True, text=True, timeout=240
    )
    assert "scored" in done.stdout, done.stderr[-3000:]


def test_the_last_devices_only_sample():
    devices = jax.devices() * 4
    assert sharding.split_devices(devices, 1) == (tuple(devices[:3]), tuple(devices[3:]))
    for count in (4, 5):
        with pytest.raises(InputError, match=f"{count} of 4 devices") as error:
            sharding.split_devices(devices, count)
        assert "at most 3" in error.value.fix


# --- chips that are not there ---


@needs_libtpu
def test_a_slice_is_cut_between_planes():
    """Both parts are cuboids, on which meshes can be laid out."""
    devices = tpu_devices("v5e:4x4")
    for count in (4, 8):
        learning, sampling = sharding.split_devices(devices, count)
        assert len(sampling) == count
        assert {d.id for d in learning + sampling} == {d.id for d in devices}
        assert len({d.coords[0] for d in sampling}) * 4 == count
        for part in (learning, sampling):
            assert sharding.make_mesh(fsdp=len(part), devices=part).size == len(part)
    with pytest.raises(InputError, match="not whole planes") as error:
        sharding.split_devices(devices, 3)
    assert "multiple of 4" in error.value.fix


@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:4x4", "v5p:4x4x4", "v6e:8x4"])
def test_every_mesh_lies_on_a_torus(topology):
    devices = tpu_devices(topology)
    for data, tensor in itertools.product((1, 2, 4, 8), (1, 2, 4, 8)):
        sizes = (data, len(devices) // (data * tensor), tensor)
        if math.prod(sizes) == len(devices):
            mesh = sharding.make_mesh(*sizes, devices=devices)
            assert {device.id for device in mesh.devices.flat} == {device.id for device in devices}


@needs_libtpu
def test_slices_lie_along_data():
    tpu_devices("v5e:2x2")  # which sets what the compiler reads
    two = topologies.get_topology_desc(
        topology_name="v5e:2x2", platform="tpu", num_slices=2
    ).devices
    mesh = sharding.make_mesh(2, 2, 2, devices=two)
    assert [{device.slice_index for device in part.flat} for part in mesh.devices] == [{0}, {1}]
    with pytest.raises(InputError, match="2 slices") as error:
        sharding.make_mesh(1, 4, 2, devices=two)
    assert "--mesh.data 2" in error.value.fix
