"""cuDNN's attention without a GPU: what it is asked for is what the reference computes, and CUDA programs ask it."""

import dataclasses
import functools
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from launch import attention_trial, roles
from launch import config as configuration
from tests import several
from tests.test_flash_attention import ROWS, heads, of_model, require_same
from tests.test_models import tiny
from tpu_rl import models, processes, sharding
from tpu_rl.errors import InputError
from tpu_rl.models import layers
from tpu_rl.models.cudnn_attention import cudnn_attention, unfit

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


def wanting(attention):
    given = configuration.preset("arithmetic_grpo")
    return dataclasses.replace(given, model=dataclasses.replace(given.model, attention=attention, dtype="bfloat16"))


def one_device() -> Any:
    return sharding.make_mesh(devices=jax.devices()[:1])


def test_without_a_gpu_it_is_refused():
    with pytest.raises(InputError, match="this is a cpu"):
        roles.fast_models(wanting("cudnn"), tiny("llama3").model, one_device())


def kernels(attention, mesh):
    return {
        model.config.attention.kernel
        for model in roles.fast_models(wanting(attention), tiny("llama3").model, mesh).values()
    }


def test_on_gpus_it_is_the_default_where_it_can(monkeypatch, capsys):
    gpu: Any = SimpleNamespace(devices=np.array([SimpleNamespace(platform="gpu")]))
    monkeypatch.setattr(roles, "_not_by_cudnn", lambda *_: "")
    assert kernels("auto", gpu) == {"cudnn"}
    assert kernels("tiles", gpu) == kernels("auto", one_device()) == {"none"}
    assert not capsys.readouterr().err
    monkeypatch.setattr(roles, "_not_by_cudnn", lambda *_: "it was tried")
    assert kernels("auto", gpu) == {"none"}
    assert capsys.readouterr().err == "note: attention is XLA's and not cuDNN's: it was tried\n"
    with pytest.raises(InputError, match="cuDNN cannot compute this run's attention\n.*\n.*it was tried"):
        kernels("cudnn", gpu)


WINDOWED = dataclasses.replace(tiny("llama3").model.config.attention, window=128)


def test_a_trial_without_cudnn_says_so():
    assert attention_trial.fault.__wrapped__(WINDOWED, one_device()).startswith("it does not compile: ")


def test_a_trial_finds_nothing_where_nothing_is_wrong(by_xla):
    assert attention_trial.fault.__wrapped__(WINDOWED, one_device()) == ""


WRONG = {
    "no window": lambda queries, keys, window: layers.visible(queries, keys, None),
    "no branches": lambda queries, keys, window: layers.visible(
        *(slots._replace(branch_ids=0 * slots.branch_ids) for slots in (queries, keys)), window
    ),
    "one key more": lambda queries, keys, window: layers.visible(queries, keys, window and window + 1),
    "not causal": lambda queries, keys, window: queries.segment_ids[:, :, None] == keys.segment_ids[:, None, :],
    "nothing": lambda queries, keys, window: jnp.zeros((*queries.index.shape, keys.index.shape[1]), bool),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_trial_finds_what_is_wrong(wrong, by_xla, monkeypatch):
    monkeypatch.setattr("tpu_rl.models.cudnn_attention.visible", WRONG[wrong])
    assert attention_trial.fault.__wrapped__(WINDOWED, one_device()).startswith("a trial of it differs")


def test_a_trial_that_compiles_and_does_not_run_says_so(by_xla, monkeypatch):
    def failing(seed):
        raise jax.errors.JaxRuntimeError("CUDNN_STATUS_EXECUTION_FAILED")

    class Lowered(SimpleNamespace):
        def lower(self, seed):
            return SimpleNamespace(compile=lambda: failing)

    monkeypatch.setattr(jax, "jit", lambda function: Lowered())
    fault = attention_trial.fault.__wrapped__(WINDOWED, one_device())
    assert fault == "it does not run: CUDNN_STATUS_EXECUTION_FAILED"


def test_a_trial_that_fails_elsewhere_is_no_trial(by_xla, monkeypatch):
    monkeypatch.setattr(processes, "any_of", lambda here: True)
    assert "another host" in attention_trial.fault.__wrapped__(WINDOWED, one_device())


OVER_ALL_DEVICES = """
import jax
from tests import test_cudnn_attention as here
from tpu_rl import sharding
from launch import attention_trial
call = jax.nn.dot_product_attention
jax.nn.dot_product_attention = lambda *given, implementation, **how: call(*given, **how)
assert attention_trial.fault(here.WINDOWED, sharding.make_mesh(fsdp=2, tensor=2)) == ""
"""


def test_a_trial_goes_over_all_devices():
    run = [sys.executable, "-c", OVER_ALL_DEVICES]
    ended = subprocess.run(run, env=several.virtual_devices(4), capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr[-2000:]


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
def test_what_cudnn_has_no_kernel_for(of_attention, dtype, row_length, axes, why):
    gpu, one = SimpleNamespace(platform="gpu", compute_capability="8.0"), {"context": 1, "tensor": 1}

    def mesh(device=gpu, **axes) -> Any:
        return SimpleNamespace(devices=np.array([device]), shape=one | axes)

    config = tiny("llama3").model.config
    fitting = dataclasses.replace(config.attention, head_dim=64, kv_heads=2)
    fits = dataclasses.replace(config, attention=fitting, dtype="bfloat16")
    assert unfit(fits, 512, mesh()) == ""
    assert "NVIDIA" in unfit(fits, 512, mesh(SimpleNamespace(platform="gpu", compute_capability="gfx90a")))
    wrong = dataclasses.replace(config, attention=dataclasses.replace(fitting, **of_attention), dtype=dtype)
    assert why in unfit(wrong, row_length, mesh(**axes))
