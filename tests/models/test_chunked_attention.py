"""Attention in parts: the same values and gradients, and no scores of whole rows at once."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from tests.fixtures.attention_rows import ROWS, heads, hidden_of
from tests.fixtures.decoders import tiny
from tpu_rl import models
from tpu_rl.models import layers
from tpu_rl.proofs.tiny import QUICKLY

TILES = jnp.array([[[0, -1, -1], [0, 1, -1], [0, 1, 2]]] * 2, jnp.int32)
"""Key tiles of rows of 384 tokens: each tile of 128 tokens attends to itself and earlier ones."""
SLOTS = ROWS["shared prompts"]


@pytest.mark.parametrize("tiles", [None, TILES], ids=["whole", "tiles"])
def test_parts_give_the_values_and_gradients_of_the_whole(tiles):
    operands = heads(0, 4, 384), *(heads(seed, 2, 384).swapaxes(1, 2) for seed in (1, 2))
    of_output = heads(3, 4, 384) * (SLOTS.segment_ids > 0)[..., None, None]

    def total(chunks, *operands):
        how = {"scale": 0.35, "sliding_window": 50, "sinks": jnp.arange(4.0)}
        attended = layers.attention(*operands, SLOTS, SLOTS, key_tiles=tiles, chunks=chunks, **how)
        return (attended * of_output).sum()

    def found(chunks):
        gradients = jax.value_and_grad(functools.partial(total, chunks), (0, 1, 2))
        return jax.jit(gradients, compiler_options=QUICKLY)(*operands)

    for one, other in zip(*map(jax.tree.leaves, (found(3), found(1))), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max(), rtol=0)


def test_gradients_of_bfloat16_keys_add_up_in_float32():
    """64 parts that each add 1/256 to a gradient of 1, which bfloat16 would lose."""
    query = jnp.ones((1, 64, 1, 1), jnp.bfloat16)
    key = jnp.zeros((1, 1, 64, 1), jnp.bfloat16)
    index = jnp.zeros((1, 64), jnp.int32)
    alike = layers.TokenIndex(index, index, index, index + 1)  # All see all.
    weigh = jnp.concatenate([jnp.full((1, 1), 64.0), jnp.full((1, 63), 0.25)], 1)

    def total(value):
        attended = layers.attention(query, key, value, alike, alike, scale=1.0, chunks=64)
        return (attended[..., 0, 0].astype(jnp.float32) * weigh).sum()

    gradient = jax.grad(total)(key)
    np.testing.assert_array_equal(gradient.astype(jnp.float32), jnp.bfloat16((64 + 63 / 4) / 64))


@pytest.mark.parametrize(
    ("shape", "keys", "tiles", "score_bytes", "multiple", "parts"),
    [
        ((32, 4096, 32, 128), 4096, None, 4 * 32, 1, 64),  # 64 GiB
        ((256, 512, 32, 128), 512, None, 4 * 32, 1, 8),
        ((256, 1, 32, 128), 4096, None, 4 * 32, 1, 1),  # a decode step
        ((1, 32768, 32, 128), 32768, None, 4, 64, 4),  # cuDNN's mask and its gradient
        ((1, 192, 32, 128), 2**24, None, 128, 64, 3),  # no smaller parts
        ((16, 2048, 32, 128), 2048, (16, 16, 4), 4 * 32, 1, 2),
    ],
)
def test_number_of_parts_by_hand(shape, keys, tiles, score_bytes, multiple, parts):
    query = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    key_tiles = None if tiles is None else jax.ShapeDtypeStruct(tiles, jnp.int32)
    assert layers.score_chunks(query, keys, key_tiles, score_bytes, multiple) == parts


def lowered(kernel: str, limit: int, monkeypatch) -> tuple[str, str]:
    """Return the CUDA programs of packed rows with their gradient, and of a prefill."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(layers, "MAX_SCORE_BYTES", limit)
    plain = tiny("llama3").model.config
    attention = dataclasses.replace(plain.attention, head_dim=16)
    model = models.decoder(dataclasses.replace(plain, dtype="bfloat16", attention=attention))
    if kernel == "cudnn":
        model = models.with_attention_kernel(model, "cudnn")
    rows = jnp.zeros((2, 384), jnp.int32)

    def total(params):
        return hidden_of(model, params, rows, SLOTS, None).astype(jnp.float32).sum()

    def extend(params):
        cache = model.init_cache(params, 2, 384)
        return model.extend(params, cache, rows, rows, rows, jnp.ones(2, jnp.int32))

    params = jax.eval_shape(model.init, jax.random.key(0))
    programs = (
        jax.jit(function).trace(params).lower(lowering_platforms=("cuda",)).as_text()
        for function in (jax.grad(total), extend)
    )
    return tuple(programs)


@pytest.mark.parametrize("kernel", ["none", "cudnn"])
def test_gpu_programs_hold_no_scores_of_whole_rows(kernel, monkeypatch):
    whole = lowered(kernel, 2**30, monkeypatch)
    parts = lowered(kernel, 2**20, monkeypatch)
    for one, other in zip(whole, parts, strict=True):
        assert "384x384x" in one
        assert "384x384x" not in other
        assert ("@__cudnn$fmhaScaleBiasSoftmax(" in other) == (kernel == "cudnn")
