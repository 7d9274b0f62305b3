"""Matrices in eight bits with a scale per output, and models that compute with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixtures.decoders import CAPACITY, LENGTH, plain, tiny, tokens_of
from tpu_rl import models
from tpu_rl.models import quantization
from tpu_rl.models.config import QUANTIZED, SCALE, LoraConfig
from tpu_rl.models.quantization import Quantized

DTYPES = tuple(quantization.LARGEST)


def dequantized(name, quantized):
    """Return numbers * scale, in float32."""
    inputs, _ = models.matrix_axes(name)
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


def quantize_tree(params, dtype):
    """Return params with numbers and scales, and the params that these stand for."""

    def quantized(path, leaf):
        name = path[-1].key
        return quantization.quantize(name, leaf, dtype) if name in QUANTIZED else leaf

    def rounded(path, leaf):
        is_quantized = isinstance(leaf, Quantized)
        return dequantized(path[-1].key, leaf) if is_quantized else leaf

    tree = jax.tree.map_with_path(quantized, params)
    whole = jax.tree.map_with_path(rounded, tree, is_leaf=lambda leaf: isinstance(leaf, Quantized))
    return quantization.with_scales(tree), whole


@pytest.mark.parametrize(
    ("family", "dtype", "rank"),
    [
        ("llama2", "int8", 0),
        pytest.param("llama2", "float8_e4m3fn", 2, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "int8", 0, marks=pytest.mark.slow),
        pytest.param("gpt_oss", "int8", 0, marks=pytest.mark.slow),
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

    found = log_probs(models.with_quantized_weights(model, dtype), numbers)
    np.testing.assert_allclose(found, log_probs(model, rounded), atol=2e-5)
    assert float(jnp.abs(found - log_probs(model, params)).max()) > 1e-3


def test_every_quantized_matrix_has_scales_in_the_params():
    model, params, _, _ = tiny("gpt_oss")
    quantized = models.with_quantized_weights(model, "int8")
    numbers, _ = quantize_tree(params, "int8")
    shapes = jax.eval_shape(quantized.init, jax.random.key(0))
    as_shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), numbers)
    assert as_shapes == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), shapes)
    names = {path[-1].key for path, _ in jax.tree.leaves_with_path(shapes)}
    assert {name + SCALE for name in names & QUANTIZED} == {n for n in names if n.endswith(SCALE)}
