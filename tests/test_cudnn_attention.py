"""cuDNN's attention without a GPU: what it is asked for is what the reference computes, and CUDA programs ask it."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from launch import config as configuration
from launch import roles
from tests.test_flash_attention import ROWS, heads, of_model, require_same
from tests.test_models import tiny
from tpu_rl import models, sharding
from tpu_rl.errors import InputError
from tpu_rl.models import layers
from tpu_rl.models.cudnn_attention import cudnn_attention, require_fit

TILES = jnp.array([[[0, -1, -1], [0, 1, -1], [0, 1, 2]]] * 2, jnp.int32)
"""Of rows of 384 tokens: each tile of 128 and those before it."""


@pytest.fixture
def by_xla(monkeypatch):
    """The same call, which cuDNN only takes on a GPU, computed by XLA."""
    call = jax.nn.dot_product_attention

    def instead(*operands, implementation, **how):
        assert implementation == "cudnn"
        return call(*operands, implementation="xla", **how)

    monkeypatch.setattr(jax.nn, "dot_product_attention", instead)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("tiles", [None, TILES], ids=["whole", "tiles"])
def test_values_and_gradients_are_the_references(rows, window, tiles, by_xla):
    slots, of_output = ROWS[rows], heads(3, 4, 384) * (ROWS[rows].segment_ids > 0)[..., None, None]
    operands = heads(0, 4, 384), *(heads(seed, 2, 384).swapaxes(1, 2) for seed in (1, 2))

    def total(by, tiles, *operands):
        how = {"scale": 0.35, "window": window, "key_tiles": tiles, "scores_by": by}
        return (layers.attention(*operands, slots, slots, **how) * of_output).sum()

    def found(by, tiles):
        return jax.jit(jax.value_and_grad(functools.partial(total, by, tiles), (0, 1, 2)))(*operands)

    for one, other in zip(*map(jax.tree.leaves, (found(cudnn_attention, tiles), found(None, None))), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max(), rtol=0)


def test_a_model_by_it_is_the_model(by_xla):
    model = tiny("llama3").model
    require_same(of_model(models.with_attention_kernel(model, "cudnn")), of_model(model))


def test_a_program_for_cuda_calls_it_forwards_and_backwards(monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    slots = ROWS["shared prompts"]
    operands = heads(0, 4, 384, jnp.bfloat16), *(heads(i, 2, 384, jnp.bfloat16).swapaxes(1, 2) for i in (1, 2))

    def total(*operands):
        return cudnn_attention(*operands, slots, slots, scale=0.35).astype(jnp.float32).sum()

    program = jax.jit(jax.grad(total, (0, 1, 2))).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert "@__cudnn$fmhaScaleBiasSoftmax(" in program
    assert "@__cudnn$fmhaScaleBiasSoftmaxBackward(" in program


def test_a_model_in_bfloat16_is_lowered_with_its_tiles(monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    plain = tiny("llama3").model.config
    config = dataclasses.replace(plain, dtype="bfloat16", attention=dataclasses.replace(plain.attention, head_dim=16))
    model = models.with_attention_kernel(models.decoder(config), "cudnn")
    slots, tokens = ROWS["shared prompts"], jnp.zeros((2, 384), jnp.int32)

    def total(params):
        return model.hidden(params, tokens, *slots[1:], TILES).astype(jnp.float32).sum()

    params = jax.eval_shape(model.init, jax.random.key(0))
    program = jax.jit(jax.grad(total)).trace(params).lower(lowering_platforms=("cuda",)).as_text()
    assert "@__cudnn$fmhaScaleBiasSoftmax(" in program
    assert "@__cudnn$fmhaScaleBiasSoftmaxBackward(" in program


def test_without_a_gpu_it_is_refused():
    given = configuration.preset("arithmetic_grpo")
    wanted = dataclasses.replace(given, model=dataclasses.replace(given.model, attention="cudnn", dtype="bfloat16"))
    with pytest.raises(InputError, match="this is a cpu"):
        roles.fast_models(wanted, tiny("llama3").model, sharding.make_mesh(devices=jax.devices()[:1]))


@pytest.mark.parametrize(
    ("of_attention", "dtype", "row_length", "axes", "why"),
    [
        ({}, "float32", 512, {}, "--model.dtype bfloat16"),
        ({"softcap": 50.0}, "bfloat16", 512, {}, "capped scores"),
        ({"head_dim": 256}, "bfloat16", 512, {}, "width of 256 is no multiple of 8 up to 128"),
        ({}, "bfloat16", 500, {}, "64 does not divide rows of 500"),
        ({}, "bfloat16", 512, {"context": 2}, "all tokens of a row"),
        ({}, "bfloat16", 512, {"tensor": 4}, "does not divide 2 heads"),
    ],
)
def test_what_cudnn_has_no_kernel_for_is_refused(of_attention, dtype, row_length, axes, why):
    gpu, one = SimpleNamespace(platform="gpu", compute_capability="8.0"), {"context": 1, "tensor": 1}

    def mesh(**axes) -> Any:
        return SimpleNamespace(devices=np.array([gpu]), shape=one | axes)

    config = tiny("llama3").model.config
    fitting = dataclasses.replace(config.attention, head_dim=64, kv_heads=2)
    require_fit(dataclasses.replace(config, attention=fitting, dtype="bfloat16"), 512, mesh())
    wrong = dataclasses.replace(config, attention=dataclasses.replace(fitting, **of_attention), dtype=dtype)
    with pytest.raises(InputError, match=why):
        require_fit(wrong, row_length, mesh(**axes))
