"""Decode steps as the TPU's compiler makes them: no copies of the cache, and few collectives."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding

from tests.fixtures.topologies import needs_libtpu, tpu_devices
from tests.fixtures.tpu_decoding import compile_decoding, copies
from tpu_rl import cost_model, models
from tpu_rl.commands import compose
from tpu_rl.commands.config import MeshConfig
from tpu_rl.planner.steps import chip_bytes
from tpu_rl.sampler import SamplerConfig, SegmentConfig, sample_tokens
from tpu_rl.train import sharding, update_step

ROWS, LENGTH = 32, 1024

FAMILIES = {
    "llama": {"model_type": "llama"},
    "narrow": {"model_type": "llama", "head_dim": 64},
    "gemma": {"model_type": "gemma2", "sliding_window": 256, "query_pre_attn_scalar": 128},
    "mixture": {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
    },
}


def model_of(family, kv_heads, vocabulary=1024, **sizes):
    config = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 2 * kv_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
    }
    return models.from_config(
        config | FAMILIES[family] | sizes, dtype="bfloat16", param_dtype="bfloat16"
    )


@needs_libtpu
@pytest.mark.parametrize(
    ("family", "kv_heads", "tensor", "cache_dtype"),
    [
        ("llama", 8, 1, "bfloat16"),
        ("llama", 2, 2, "bfloat16"),
        ("narrow", 4, 2, "bfloat16"),
        ("gemma", 2, 1, "bfloat16"),
        ("mixture", 2, 1, "bfloat16"),
        pytest.param("llama", 1, 1, "bfloat16", marks=pytest.mark.nightly),
        pytest.param("llama", 2, 1, "bfloat16", marks=pytest.mark.nightly),
        pytest.param("llama", 2, 1, "int8", marks=pytest.mark.nightly),
        *(
            pytest.param(family, kv_heads, 1, "bfloat16", marks=pytest.mark.nightly)
            for family in ("gemma", "mixture")
            for kv_heads in (1, 8)
        ),
    ],
)
def test_no_token_copies_the_cache(family, kv_heads, tensor, cache_dtype):
    """`kv_heads` are those of a chip. The mixture records its routing."""
    model = models.with_attention_kernel(model_of(family, kv_heads * tensor), tensor=tensor)
    if family == "mixture":
        model = models.variant(model, records_routing=True)
    if cache_dtype == "int8":
        model = models.with_int8_cache(model)
    program, cache = compiled(model, tensor)
    assert "decode_attention" in (program.as_text() or "")
    require_no_copies(program, cache)


@needs_libtpu
@pytest.mark.nightly
@pytest.mark.parametrize("cache_dtype", ["bfloat16", "int8"])
def test_no_token_copies_the_cache_without_the_kernel(cache_dtype):
    model = model_of("llama", 2)
    if cache_dtype == "int8":
        model = models.with_int8_cache(model)
    require_no_copies(*compiled(model, 1))


@needs_libtpu
@pytest.mark.nightly
def test_no_segment_copies_the_projections():
    """Weights with heads between inputs and their elements were copied to another layout."""
    model = models.with_attention_kernel(model_of("gemma", 4, hidden_size=2304, head_dim=256))
    program, cache = compiled(model, 1)
    assert not copies(program, math.prod(model.config.shape("key")))
    stats = program.memory_analysis()
    assert stats is not None
    assert stats.temp_size_in_bytes <= 0.1 * chip_bytes(cache)


@needs_libtpu
def test_quantized_matrices_are_read_in_eight_bits():
    """Each token converts them inside the products: nothing of a matrix's size is written."""
    hidden, wide = 2048, 16_384
    model = model_of("llama", 2, hidden_size=hidden, intermediate_size=wide)
    model = models.variant(models.with_attention_kernel(model), weight_dtype="int8")
    program, _ = compiled(model, 1)
    matrix = hidden * wide
    assert not copies(program, matrix)
    products = [
        op
        for op in cost_model.operations(cost_model.read(program.as_text() or ""))
        if ".mlp" in op.name and op.flops
    ]
    steps = SegmentConfig().steps
    read = sum(op.times * op.bytes for op in products) / steps
    num_layers, num_matrices = 2, 3
    assert num_layers * num_matrices * matrix <= read <= 1.1 * num_layers * num_matrices * matrix


@needs_libtpu
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("int8", marks=pytest.mark.nightly)])
def test_no_token_copies_or_converts_the_experts_of_a_layer(dtype):
    """Half of them, those of a device, do not fit in a chip's vector memory: without the kernel,
    each of the three matrices is copied."""
    model = model_of("mixture", 2, num_experts=256, moe_intermediate_size=2048)
    if dtype == "int8":
        model = models.variant(model, weight_dtype=dtype)
    program, _ = compiled(models.with_attention_kernel(model), 1)
    experts, *sides = model.config.shape("expert_up")
    assert not copies(program, experts // 2 * math.prod(sides))
    products = [
        op
        for op in cost_model.operations(cost_model.read(program.as_text() or ""))
        if "decode_experts" in op.name
    ]
    read = sum(op.times * op.bytes for op in products) / SegmentConfig().steps
    # All tokens may have experts of one device, and none of them the same.
    assert model.config.moe is not None
    most = ROWS * model.config.moe.experts_per_token
    num_layers, num_matrices = 2, 3
    size = jnp.dtype(dtype).itemsize
    least = num_layers * num_matrices * most * math.prod(sides) * size
    assert least <= read <= 1.1 * least


def compiled(model, tensor):
    devices = tpu_devices("v5e:2x2")[: 2 * tensor]
    mesh = sharding.sampling_mesh(sharding.make_mesh(fsdp=len(devices), devices=devices), tensor)
    return compile_decoding(model, mesh, ROWS, LENGTH)


def require_no_copies(program, cache):
    smallest_layer = min(
        math.prod(leaf.sharding.shard_shape(leaf.shape)[1:]) for leaf in cache if leaf.ndim == 5
    )
    assert not copies(program, smallest_layer)
    stats = program.memory_analysis()
    assert stats is not None
    assert stats.temp_size_in_bytes <= 0.1 * chip_bytes(cache)


def collectives(program):
    """Return (kind, elements of the largest result) of each collective of a program."""

    def elements(shapes):
        sizes = re.findall(r"\[([\d,]+)]", shapes)
        return max((math.prod(map(int, dims.split(","))) for dims in sizes), default=1)

    lines = re.findall(r"= (.*?) (all-gather|all-reduce)(?:-start)?\(", program.as_text())
    return [(kind, elements(shapes)) for shapes, kind in lines]


@needs_libtpu
def test_logits_stay_on_their_shards():
    """A shard of 8,250 tokens is no multiple of the sampler's blocks."""
    vocabulary = 33_000
    mesh = sharding.sampling_mesh(sharding.make_mesh(fsdp=4, devices=tpu_devices("v5e:2x2")), 4)
    program, _ = compile_decoding(model_of("llama", 4, vocabulary), mesh, ROWS, LENGTH)
    assert max(size for _, size in collectives(program)) < ROWS * vocabulary / 4


@needs_libtpu
def test_sampling_reads_the_logits_once():
    """Behind their product, one pass sums blocks; no second array of their size is written."""
    rows, vocabulary = 128, 128 * 1187
    place = SingleDeviceSharding(tpu_devices("v5e:2x2")[0])
    logits, uniform = (
        jax.ShapeDtypeStruct(shape, "float32", sharding=place)
        for shape in ((rows, vocabulary), (rows,))
    )
    config = SamplerConfig(max_new_tokens=1, temperature=0.7)
    sample = jax.jit(lambda logits, uniform: sample_tokens(logits, uniform, config))
    program = sample.lower(logits, uniform).compile()
    operations = cost_model.operations(cost_model.read(program.as_text() or ""))
    # The largest, in the product's own pass if there is one, and the sums of blocks.
    assert sum(op.times * op.bytes for op in operations) < 2.2 * 4 * rows * vocabulary
    assert not copies(program, rows * vocabulary)


@needs_libtpu
@pytest.mark.timeout(300)
def test_default_mesh_of_a_cube_gathers_weights():
    """Weights that are sharded over a whole cube come by all-reduces, which are synchronous."""
    mesh = compose.make_mesh(MeshConfig(), tpu_devices("v5p:4x4x4"))
    assert (mesh.shape["data"], mesh.shape["fsdp"]) == (2, 32)
    program, _ = compile_decoding(model_of("llama", 8, 4096), mesh, 256, 512)
    weight = 256 * 512
    kinds = {kind for kind, size in collectives(program) if size >= weight}
    assert kinds == {"all-gather"}


@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:4x4x4", "v6e:2x2"])
def test_the_compiler_knows_the_options_of_training(topology):
    devices = tpu_devices(topology)
    mesh = sharding.make_mesh(fsdp=len(devices), devices=devices)
    options = update_step.compiler_options(mesh)
    assert options
    one = jax.ShapeDtypeStruct((8, 128), "float32", sharding=SingleDeviceSharding(devices[0]))
    jax.jit(lambda x: 2 * x, compiler_options=options).lower(one).compile()


@needs_libtpu
def test_products_of_training_take_whole_weights():
    """Without the options, XLA multiplies shard by shard and rounds the sums."""
    devices = tpu_devices("v5e:4x4")
    mesh = sharding.make_mesh(fsdp=16, devices=devices)

    def shape(axes: tuple[str | None, ...], *sizes: int) -> Any:
        place = NamedSharding(mesh, sharding.spec(axes, sizes, mesh))
        return jax.ShapeDtypeStruct(sizes, "bfloat16", sharding=place)

    def product(x: Any, weight: Any) -> Any:
        return sharding.constrain(jnp.einsum("btd,df->btf", x, weight), ("rows", None, None))

    operands = (shape(("rows", None, None), 16, 2048, 4096), shape(("embed", "mlp"), 4096, 14336))

    def kinds(options: dict[str, Any] | None) -> set[str]:
        with jax.set_mesh(mesh):
            program = jax.jit(product, compiler_options=options).lower(*operands).compile()
        text = program.as_text() or ""
        return set(re.findall(r" (all-gather|collective-permute)(?:-start)?\(", text))

    assert kinds(update_step.compiler_options(mesh)) == {"all-gather"}
    assert "collective-permute" in kinds(None)
