"""Matrices in eight and in four bits, and models that compute with them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

from tests.fixtures.decoders import CAPACITY, LENGTH, plain, tiny, tokens_of
from tpu_rl import models
from tpu_rl.errors import InputError
from tpu_rl.models import quantization
from tpu_rl.models.config import QUANTIZED, SCALE, LoraConfig
from tpu_rl.planner.steps import chip_bytes

DTYPES = tuple(quantization.LARGEST)


def dequantized(name, quantized):
    """Return the matrix that numbers and scales stand for, in float32."""
    inputs, _ = models.matrix_axes(name)
    if quantized.numbers.dtype == jnp.uint4:
        values = np.asarray(quantization.NF4, np.float32)[np.asarray(quantized.numbers, int)]
        scale = np.asarray(quantized.scale, np.float32)
        block = values.shape[inputs[-1]] // scale.shape[inputs[-1]]
        return jnp.asarray(values * scale.repeat(block, inputs[-1]))
    return quantized.numbers.astype(jnp.float32) * jnp.expand_dims(quantized.scale, inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "shape", "scales"),
    [
        ("query", (3, 4, 8, 20), (3, 4, 8)),
        ("output", (3, 4, 8, 20), (3, 20)),
        ("expert_down", (3, 5, 16, 20), (3, 5, 20)),
    ],
)
def test_rounding_errors_are_those_of_eight_bits(name, shape, scales, dtype):
    weight = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    # Each output has its own size, and one is zero.
    axis = models.matrix_axes(name)[1][-1]
    sizes = jnp.logspace(-3, 1, shape[axis]).at[2].set(0.0)
    weight = weight * jnp.broadcast_to(sizes.reshape(-1, *(1,) * (-1 - axis)), shape)
    quantized = quantization.quantize(name, weight, dtype)
    assert quantized.numbers.dtype == dtype
    assert quantized.scale.shape == scales
    found = dequantized(name, quantized)
    np.testing.assert_array_equal(jnp.take(found, 2, axis), 0.0)
    step = jnp.expand_dims(quantized.scale, models.matrix_axes(name)[0])
    # float8_e4m3fn has three bits of mantissa down to 2 ** -6.
    limit = 0.5 * step if dtype == "int8" else jnp.maximum(2**-4 * jnp.abs(weight), 2**-10 * step)
    assert bool((jnp.abs(found - weight) <= 1.0001 * limit).all())
    largest = jnp.abs(quantized.numbers.astype(jnp.float32)).max()
    assert largest == quantization.LARGEST[dtype]


def test_the_values_of_nf4_are_quantiles_of_a_normal_distribution():
    """QLoRA, appendix E: 8 above 0, 7 below, and 0, with equal mass between neighbors."""
    end = 1 - (1 / 32 + 1 / 30) / 2
    above = norm.ppf(np.linspace(end, 0.5, 9))[:-1]
    below = -norm.ppf(np.linspace(end, 0.5, 8))[:-1]
    values = np.sort([*above, 0.0, *below])
    np.testing.assert_allclose(quantization.NF4, values / values.max(), atol=2e-7)


@pytest.mark.parametrize(
    ("name", "shape", "scales"),
    [
        ("query", (3, 4, 8, 128), (3, 4, 8, 2)),
        ("output", (3, 4, 80, 20), (3, 4, 2, 20)),
        ("expert_down", (3, 5, 67, 20), (3, 5, 67, 20)),
    ],
)
def test_in_four_bits_every_weight_becomes_the_nearest_value_of_its_block(name, shape, scales):
    weight = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    weight[0, 0] = 0.0
    quantized = quantization.quantize(name, jnp.asarray(weight), "nf4")
    assert quantized.numbers.dtype == jnp.uint4
    assert quantized.scale.dtype == jnp.bfloat16
    assert quantized.scale.shape == scales
    axis = models.matrix_axes(name)[0][-1]
    sizes = np.asarray(quantized.scale, np.float32)
    sizes = sizes.repeat(shape[axis] // scales[axis], axis)
    candidates = sizes[..., None] * np.asarray(quantization.NF4, np.float32)
    nearest = np.abs(candidates - weight[..., None]).min(-1)
    found = np.asarray(dequantized(name, quantized))
    np.testing.assert_allclose(np.abs(found - weight), nearest, atol=1e-6)
    np.testing.assert_array_equal(found[0, 0], 0.0)
    np.testing.assert_array_equal(quantization.dequantize(name, quantized, "float32"), found)


def test_a_plan_counts_two_weights_in_a_byte():
    numbers = jax.ShapeDtypeStruct((64, 6), jnp.uint4)
    scale = jax.ShapeDtypeStruct((1, 6), jnp.bfloat16)
    assert chip_bytes([numbers, scale]) == 64 * 6 // 2 + 6 * 2


def test_normal_weights_lose_less_in_nf4_than_in_even_steps():
    weight = jax.random.normal(jax.random.key(0), (256, 256))
    found = dequantized("up", quantization.quantize("up", weight, "nf4"))
    blocks = weight.reshape(4, 64, 256)
    step = jnp.broadcast_to(jnp.abs(blocks).max(1, keepdims=True) / 7, blocks.shape)
    even = (jnp.round(blocks / step) * step).reshape(weight.shape)
    assert jnp.square(found - weight).mean() < 0.85 * jnp.square(even - weight).mean()


def quantize_tree(params, dtype):
    """Return params with numbers and scales, and the params that these stand for."""

    def rounded(path, leaf):
        name = path[-1].key
        if name not in QUANTIZED:
            return leaf
        return dequantized(name, quantization.quantize(name, leaf, dtype))

    whole = jax.tree.map_with_path(rounded, params)
    return quantization.quantize_tree(params, dtype), whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype", "rank"),
    [
        ("llama2", "int8", 0),
        pytest.param("llama2", "float8_e4m3fn", 2, marks=pytest.mark.nightly),
        ("llama2", "nf4", 2),
        pytest.param("deepseek_v3", "nf4", 0, marks=pytest.mark.nightly),
        ("gpt_oss", "nf4", 2),
        pytest.param("qwen3_5", "nf4", 0, marks=pytest.mark.nightly),
        pytest.param("deepseek_v3", "int8", 0, marks=pytest.mark.nightly),
        pytest.param("gpt_oss", "int8", 0, marks=pytest.mark.nightly),
        pytest.param("qwen3_5", "int8", 0, marks=pytest.mark.nightly),
    ],
)
def test_a_quantized_model_computes_with_the_rounded_matrices(family, dtype, rank):
    """Biases, adapters, latents and experts included."""
    model, params, _, _ = tiny(family)
    if rank:
        model = models.with_lora(model, LoraConfig(rank=rank))
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        noise = np.random.default_rng(1)
        adapters = jax.tree.map(
            lambda leaf: jnp.asarray(0.1 * noise.standard_normal(leaf.shape), jnp.float32),
            models.split(shapes)[1],
        )
        params = models.join(params, adapters)
    numbers, rounded = quantize_tree(params, dtype)
    tokens, lengths = tokens_of((3, LENGTH)), jnp.array([11, 6, 1])
    positions, _, branches = plain(3)

    def log_probs(model, params):
        cache = model.init_cache(params, 3, CAPACITY)
        extend = jax.jit(model.extend)
        logits, _ = extend(params, cache, tokens, positions, branches, lengths)
        return jax.nn.log_softmax(logits)

    found = log_probs(models.variant(model, weight_dtype=dtype), numbers)
    np.testing.assert_allclose(found, log_probs(model, rounded), atol=2e-5)
    assert float(jnp.abs(found - log_probs(model, params)).max()) > 1e-3


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["int8", "nf4"])
def test_every_quantized_matrix_has_scales_in_the_params(dtype):
    model, params, _, _ = tiny("gpt_oss")
    quantized = models.variant(model, weight_dtype=dtype)
    numbers, _ = quantize_tree(params, dtype)
    shapes = jax.eval_shape(quantized.init, jax.random.key(0))
    as_shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), numbers)
    assert as_shapes == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), shapes)
    names = {path[-1].key for path, _ in jax.tree.leaves_with_path(shapes)}
    scales = {quantization.scale_name(name, dtype) for name in names & QUANTIZED}
    assert scales == {name for name in names if name.endswith(SCALE)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama3", "nf4"),
        pytest.param("llama3", "int8", marks=pytest.mark.slow),
        pytest.param("mixtral", "nf4", marks=pytest.mark.nightly),
        pytest.param("mixtral", "int8", marks=pytest.mark.nightly),
    ],
)
def test_a_model_is_read_in_few_bits_and_written_whole(family, dtype, tmp_path):
    model, params, _, _ = tiny(family)
    models.save(tmp_path / "model", model, params)
    found_model, found = models.load(tmp_path / "model", weight_dtype=dtype)
    expected, rounded = quantize_tree(params, dtype)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert found_model.config.weight_dtype == dtype
    models.save(tmp_path / "whole", found_model, found)
    _, written = models.load(tmp_path / "whole")
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), written, rounded)


def test_a_matrix_that_is_not_finite_is_refused_in_few_bits_too(tmp_path):
    model, params, _, _ = tiny("llama3")
    query = params["layers"]["layer_0"]["query"].at[1, 0, 0].set(jnp.nan)
    layer = params["layers"]["layer_0"] | {"query": query}
    models.save(tmp_path / "model", model, params | {"layers": {"layer_0": layer}})
    with pytest.raises(InputError, match=r"(?s)1 of .* tensors hold NaN.*q_proj"):
        models.load(tmp_path / "model", weight_dtype="nf4")
