"""Decode steps that read experts in the stack of all layers, interpreted on the CPU."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, SingleDeviceSharding

from tests.fixtures.decoders import tiny
from tests.fixtures.mixtures import CHOSEN, COUNT, INNER, SWIGLU, case, on_four_devices
from tests.fixtures.topologies import needs_libtpu, tpu_devices
from tpu_rl import models
from tpu_rl.models import quantization
from tpu_rl.models.config import EXPERT_MATRICES, MoeConfig
from tpu_rl.models.decoder import expert_stacks, param_shapes, random_params
from tpu_rl.models.moe import decode_kernel, experts
from tpu_rl.models.moe.experts import Matrices
from tpu_rl.train import sharding

LAYERS = 3


def stacked(matrices, layer=1):
    """Return matrices that are read in a stack whose other layers are NaN."""

    def stack(matrix):
        others = jnp.full((LAYERS, *matrix.weight.shape), jnp.nan, matrix.weight.dtype)
        whole = others.at[layer].set(matrix.weight)
        return matrix._replace(weight=whole, layer=jnp.int32(layer))

    return Matrices(*map(stack, matrices))


@pytest.mark.parametrize(
    "sizes", [(130, 0, 41, 88), (0, 128, 0, 7), (0, 0, 5, 0), (0, 0, 0, 0)], ids=str
)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_kernel_equals_the_ragged_product(sizes, dtype):
    """Of 300 rows the last belong to no expert. What no row needs is NaN in float32."""
    noise = np.random.default_rng(0)
    inputs, outputs = 16, 200
    x = jnp.asarray(noise.normal(size=(300, inputs)) / inputs, jnp.float32)
    weight = jnp.asarray(noise.normal(size=(4, inputs, outputs)), jnp.float32)
    assert decode_kernel.make_tiles(x, weight[None]) == (128, 128)
    group_sizes = jnp.array(sizes)
    ends = jnp.cumsum(group_sizes)
    scale = None
    read, layer = weight, 2
    if dtype == "int8":
        numbers, scale = quantization.quantize("expert_up", weight, "int8")
        stack = jnp.zeros((LAYERS, *weight.shape), jnp.int8).at[layer].set(numbers)
        read = numbers * scale[:, None]
    else:
        used = jnp.where((group_sizes > 0)[:, None, None], weight, jnp.nan)
        stack = jnp.full((LAYERS, *weight.shape), jnp.nan).at[layer].set(used)
    found = jax.jit(decode_kernel.product)(x, stack, jnp.int32(layer), ends, scale)
    wanted = jax.lax.ragged_dot(x, read, group_sizes)
    count = sum(sizes)
    np.testing.assert_allclose(found[:count], wanted[:count], atol=1e-6, rtol=0)


def mixed(x, logits, matrices):
    config = MoeConfig(COUNT, CHOSEN, INNER)
    return experts.mixture(x, experts.route(config, logits), matrices, SWIGLU)


@pytest.mark.parametrize("rank", [0, 2])
def test_mixture_is_the_same_in_place(rank):
    """With adapters and biases, too."""
    x, logits, matrices = case(rows=5, length=1, rank=rank, bias=rank > 0)
    found = jax.jit(mixed)(x, logits, stacked(matrices))
    wanted = jax.jit(mixed)(x, logits, matrices)
    np.testing.assert_allclose(found, wanted, atol=1e-6 * float(jnp.abs(wanted).max()))


ON_MESHES = """
import jax, numpy as np
from tests.models.test_expert_decoding import case, mixed, stacked
from tpu_rl.train import sharding

# So many assignments to experts of one device take several passes.
x, logits, matrices = case(skew=50.0, bias=True)
wanted = np.asarray(jax.jit(mixed)(x, logits, matrices))
mesh = sharding.make_mesh(tensor=2, expert=2)
for mesh in (mesh, sharding.sampling_mesh(mesh, 2)):
    with jax.set_mesh(mesh):
        found = jax.jit(mixed)(x, logits, stacked(matrices))
        np.testing.assert_allclose(found, wanted, atol=2e-6 * np.abs(wanted).max())
print("four devices agree with one")
"""


@pytest.mark.slow
def test_four_devices_equal_one_in_place():
    on_four_devices(ON_MESHES)


@pytest.mark.nightly
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_a_model_decodes_the_same_logits_in_place(weights):
    """DeepSeek-V3: a layer without experts is first, and an MLP sees every token."""
    made = tiny("deepseek_v3")
    model, params = made.model, made.params
    if weights == "int8":
        model = models.variant(model, weight_dtype="int8")
        quantized = {
            name: quantization.quantize(name, params["layers"]["layer_0"][name], "int8")
            for name in EXPERT_MATRICES
        }
        shapes = param_shapes(model.config)
        params = random_params(model.config, jax.random.key(1), shapes)
        layer = params["layers"]["layer_0"] | quantized
        params = quantization.with_scales(params | {"layers": {"layer_0": layer}})
    tokens = jax.random.randint(jax.random.key(1), (4, 1), 2, 130)
    zeros = jnp.zeros_like(tokens)

    def logits(model):
        cache = model.init_cache(params, 4, 8)
        return jax.jit(model.extend)(params, cache, tokens, zeros, zeros, jnp.ones(4, jnp.int32))[0]

    kernel = models.with_attention_kernel(model, "interpreted")
    assert expert_stacks(kernel.config, params, tokens.size)
    assert "decode_experts" in str(jax.make_jaxpr(lambda: logits(kernel))())
    np.testing.assert_allclose(logits(kernel), logits(model), atol=3e-6, rtol=0)


@pytest.mark.parametrize(
    ("change", "in_place"),
    [
        ({}, True),
        ({"kernel": "none"}, False),
        ({"tokens": 10_000}, False),
        ({"stored": "int8"}, True),
        ({"stored": "float32", "dtype": "bfloat16"}, False),
        ({"mesh": {"data": 2, "tensor": 2}}, True),
        ({"mesh": {"fsdp": 2}}, False),
        ({"inputs": 1 << 20}, False),
    ],
    ids=str,
)
def test_experts_are_read_in_place_by_few_tokens_where_devices_hold_them(change, in_place):
    """A wide mesh axis, or another type, makes each device gather or convert a layer anyway."""
    model = tiny("olmoe").model
    config = replace(model.config, dtype=change.get("dtype", "float32"))
    attention = replace(config.attention, kernel=change.get("kernel", "tpu"))
    config = replace(config, attention=attention)
    width, inner = change.get("inputs", 40), 16
    shapes = [(2, 8, width, inner), (2, 8, width, inner), (2, 8, inner, width)]
    leaves = {
        name: jax.ShapeDtypeStruct(shape, change.get("stored", "float32"))
        for name, shape in zip(EXPERT_MATRICES, shapes, strict=True)
    }
    params = {"layers": {"layer_0": leaves}}
    sizes = change.get("mesh", {"fsdp": 1})
    if "fsdp" in sizes:
        sizes = dict.fromkeys(sharding.MESH_AXES, 1) | sizes
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    with jax.sharding.use_abstract_mesh(mesh):
        found = expert_stacks(config, params, change.get("tokens", 4))
    assert (found is not None) == in_place


@needs_libtpu
@pytest.mark.parametrize(
    ("topology", "rows", "inputs", "outputs", "dtype"),
    [
        pytest.param("v5e:2x2", 160, 2048, 768, "bfloat16", id="qwen_v5e"),
        pytest.param("v5p:2x2x1", 160, 768, 2048, "bfloat16", id="qwen_v5p"),
        pytest.param("v5p:2x2x1", 24, 2880, 2880, "int8", id="gpt_oss_int8_v5p"),
        pytest.param("v5e:2x2", 64, 14_336, 4096, "float8_e4m3fn", id="mixtral_float8_v5e"),
        pytest.param("v6e:2x2", 64, 14_336, 4096, "float8_e4m3fn", id="mixtral_float8_v6e"),
    ],
)
def test_tpu_compiler_accepts_the_kernel(topology, rows, inputs, outputs, dtype):
    place = SingleDeviceSharding(tpu_devices(topology)[0])

    def array(*shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    x = array(rows, inputs, dtype="bfloat16")
    stack = array(LAYERS, 8, inputs, outputs, dtype=dtype)
    scale = None if dtype == "bfloat16" else array(8, outputs, dtype="float32")
    ends = array(8, dtype="int32")
    layer = array(dtype="int32")
    program = jax.jit(decode_kernel.product).lower(x, stack, layer, ends, scale).compile()
    assert decode_kernel.NAME in (program.as_text() or "")
    stats = program.memory_analysis()
    assert stats is not None
    assert stats.temp_size_in_bytes < 1 << 20
