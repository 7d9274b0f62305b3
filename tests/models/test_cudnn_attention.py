"""cuDNN's attention, tested without a GPU.

XLA computes the same call and is compared with the reference; programs that are lowered for CUDA
call cuDNN.
"""

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

from tests.fixtures import several
from tests.fixtures.attention_rows import ROWS, heads, hidden_of, of_model, require_same
from tests.fixtures.decoders import tiny
from tpu_rl import models
from tpu_rl.commands import config as configuration
from tpu_rl.commands import roles
from tpu_rl.errors import InputError
from tpu_rl.models import layers
from tpu_rl.models.attention import gpu_trials
from tpu_rl.models.attention.cudnn import cudnn_attention, unsupported_reason
from tpu_rl.models.config import LatentConfig
from tpu_rl.runtime import processes
from tpu_rl.train import sharding

TILES = jnp.array([[[0, -1, -1], [0, 1, -1], [0, 1, 2]]] * 2, jnp.int32)
"""Key tiles of rows of 384 tokens: each tile of 128 tokens attends to itself and earlier ones."""


@pytest.fixture
def by_xla(monkeypatch):
    """Let XLA compute the call, which cuDNN supports on GPUs only."""
    call = jax.nn.dot_product_attention

    def instead(*operands, implementation, **how):
        assert implementation == "cudnn"
        return call(*operands, implementation="xla", **how)

    monkeypatch.setattr(jax.nn, "dot_product_attention", instead)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("tiles", [None, TILES], ids=["whole", "tiles"])
def test_values_and_gradients_equal_the_reference(rows, window, tiles, by_xla):
    slots, of_output = ROWS[rows], heads(3, 4, 384) * (ROWS[rows].segment_ids > 0)[..., None, None]
    operands = heads(0, 4, 384), *(heads(seed, 2, 384).swapaxes(1, 2) for seed in (1, 2))

    def total(by, tiles, *operands):
        how = {"scale": 0.35, "sliding_window": window, "key_tiles": tiles, "implementation": by}
        return (layers.attention(*operands, slots, slots, **how) * of_output).sum()

    def found(by, tiles):
        return jax.jit(jax.value_and_grad(functools.partial(total, by, tiles), (0, 1, 2)))(
            *operands
        )

    for one, other in zip(
        *map(jax.tree.leaves, (found(cudnn_attention, tiles), found(None, None))), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max(), rtol=0)


@pytest.mark.slow
def test_model_with_cudnn_equals_model_without(by_xla):
    model = tiny("llama3").model
    require_same(of_model(models.with_attention_kernel(model, "cudnn")), of_model(model))


def test_cuda_program_calls_cudnn_forward_and_backward(monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    slots = ROWS["shared prompts"]
    operands = (
        heads(0, 4, 384, jnp.bfloat16),
        *(heads(i, 2, 384, jnp.bfloat16).swapaxes(1, 2) for i in (1, 2)),
    )

    def total(*operands):
        return cudnn_attention(*operands, slots, slots, scale=0.35).astype(jnp.float32).sum()

    program = (
        jax.jit(jax.grad(total, (0, 1, 2)))
        .trace(*operands)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    assert "@__cudnn$fmhaScaleBiasSoftmax(" in program
    assert "@__cudnn$fmhaScaleBiasSoftmaxBackward(" in program


def test_bfloat16_model_with_key_tiles_is_lowered_for_cuda(monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    plain = tiny("llama3").model.config
    config = dataclasses.replace(
        plain, dtype="bfloat16", attention=dataclasses.replace(plain.attention, head_dim=16)
    )
    model = models.with_attention_kernel(models.decoder(config), "cudnn")
    slots, tokens = ROWS["shared prompts"], jnp.zeros((2, 384), jnp.int32)

    def total(params):
        return hidden_of(model, params, tokens, slots, TILES).astype(jnp.float32).sum()

    params = jax.eval_shape(model.init, jax.random.key(0))
    program = jax.jit(jax.grad(total)).trace(params).lower(lowering_platforms=("cuda",)).as_text()
    assert "@__cudnn$fmhaScaleBiasSoftmax(" in program
    assert "@__cudnn$fmhaScaleBiasSoftmaxBackward(" in program


@pytest.mark.parametrize(("tokens", "calls"), [(128, True), (96, False), (1, False)])
def test_prefill_calls_cudnn_where_it_has_a_kernel(tokens, calls, monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    plain = tiny("llama3").model.config
    config = dataclasses.replace(
        plain, dtype="bfloat16", attention=dataclasses.replace(plain.attention, head_dim=16)
    )
    model = models.with_attention_kernel(models.decoder(config), "cudnn")

    def extend(params):
        rows = jnp.zeros((2, tokens), jnp.int32)
        cache = model.init_cache(params, 2, 256)
        return model.extend(params, cache, rows, rows, rows, jnp.ones(2, jnp.int32))

    params = jax.eval_shape(model.init, jax.random.key(0))
    program = jax.jit(extend).trace(params).lower(lowering_platforms=("cuda",)).as_text()
    assert ("@__cudnn$fmhaScaleBiasSoftmax(" in program) == calls


def wanting(attention):
    given = configuration.preset("arithmetic_grpo")
    return dataclasses.replace(
        given, model=dataclasses.replace(given.model, attention=attention, dtype="bfloat16")
    )


def one_device() -> Any:
    return sharding.make_mesh(devices=jax.devices()[:1])


def test_cudnn_without_a_gpu_is_refused():
    with pytest.raises(InputError, match="this is a cpu"):
        roles.fast_models(wanting("cudnn"), tiny("llama3").model, one_device())


def kernels(attention, mesh):
    return {
        model.config.attention.kernel
        for model in roles.fast_models(wanting(attention), tiny("llama3").model, mesh).values()
    }


def test_cudnn_is_the_default_on_gpus(monkeypatch, capsys):
    gpu: Any = SimpleNamespace(devices=np.array([SimpleNamespace(platform="gpu")]))
    monkeypatch.setattr(roles, "_decode_obstacle", lambda *_: "")
    monkeypatch.setattr(roles, "_cudnn_obstacle", lambda *_: "")
    monkeypatch.setattr(roles, "_decode_obstacle", lambda *_: "")
    assert kernels("auto", gpu) == {"cudnn"}
    assert kernels("xla", gpu) == kernels("auto", one_device()) == {"none"}
    assert not capsys.readouterr().err
    monkeypatch.setattr(roles, "_cudnn_obstacle", lambda *_: "it was tried")
    assert kernels("auto", gpu) == {"none"}
    assert capsys.readouterr().err == "note: attention is XLA's and not cuDNN's: it was tried\n"
    with pytest.raises(
        InputError, match="cuDNN cannot compute this run's attention\n.*\n.*it was tried"
    ):
        kernels("cudnn", gpu)


WINDOWED = dataclasses.replace(tiny("llama3").model.config.attention, sliding_window=128)


def trial() -> str:
    return gpu_trials.failure_reason.__wrapped__(WINDOWED, one_device(), gpu_trials.cudnn_error)


def test_trial_reports_that_cudnn_does_not_compile():
    assert trial().startswith("it does not compile: ")


@pytest.mark.slow
def test_trial_accepts_correct_attention(by_xla):
    assert trial() == ""


WRONG = {
    "no window": lambda queries, keys, window: layers.attention_mask(queries, keys, None),
    "no branches": lambda queries, keys, window: layers.attention_mask(
        *(
            slots._replace(
                visible_until=layers.visible_until(slots.segment_ids, 0 * slots.segment_ids)
            )
            for slots in (queries, keys)
        ),
        window,
    ),
    "one key more": lambda queries, keys, window: layers.attention_mask(
        queries, keys, window and window + 1
    ),
    "not causal": lambda queries, keys, window: (
        queries.segment_ids[:, :, None] == keys.segment_ids[:, None, :]
    ),
    "nothing": lambda queries, keys, window: jnp.zeros(
        (*queries.index.shape, keys.index.shape[1]), bool
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("wrong", WRONG)
def test_trial_detects_wrong_masks(wrong, by_xla, monkeypatch):
    monkeypatch.setattr("tpu_rl.models.attention.cudnn.attention_mask", WRONG[wrong])
    assert trial().startswith("in a trial it differs")


def test_trial_reports_a_failure_at_run_time(by_xla, monkeypatch):
    def failing(seed):
        raise jax.errors.JaxRuntimeError("CUDNN_STATUS_EXECUTION_FAILED")

    class Lowered(SimpleNamespace):
        def lower(self, seed):
            return SimpleNamespace(compile=lambda: failing)

    monkeypatch.setattr(jax, "jit", lambda function: Lowered())
    fault = trial()
    assert fault == "it does not run: CUDNN_STATUS_EXECUTION_FAILED"


def test_trial_fails_if_it_fails_on_another_host(by_xla, monkeypatch):
    monkeypatch.setattr(processes, "any_of", lambda here: True)
    assert "another host" in trial()


OVER_ALL_DEVICES = """
import jax
from tests.models import test_cudnn_attention as here
from tpu_rl.train import sharding
from tpu_rl.models.attention import gpu_trials
call = jax.nn.dot_product_attention
jax.nn.dot_product_attention = lambda *given, implementation, **how: call(*given, **how)
mesh = sharding.make_mesh(fsdp=2, tensor=2)
assert gpu_trials.failure_reason(here.WINDOWED, mesh, gpu_trials.cudnn_error) == ""
"""


@pytest.mark.nightly
def test_trial_runs_on_all_devices():
    run = [sys.executable, "-c", OVER_ALL_DEVICES]
    ended = subprocess.run(
        run, env=several.virtual_devices(4), capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr[-2000:]


@pytest.mark.parametrize(
    ("of_attention", "dtype", "row_length", "axes", "why"),
    [
        ({}, "float32", 512, {}, "--model.dtype bfloat16"),
        ({"softcap": 50.0}, "bfloat16", 512, {}, "capped scores"),
        ({"sinks": True}, "bfloat16", 512, {}, "no attention sinks"),
        ({"latent": LatentConfig(16, 8, 32)}, "bfloat16", 512, {}, "must have one width"),
        (
            {"head_dim": 256},
            "bfloat16",
            512,
            {},
            "head dimension 256 is not a multiple of 8 up to 128",
        ),
        ({}, "bfloat16", 500, {}, "rows of 500 tokens are not a multiple of 64"),
        ({}, "bfloat16", 512, {"context": 2}, "all tokens of a row"),
        ({}, "bfloat16", 512, {"tensor": 4}, "does not divide 2 key-value heads"),
    ],
)
def test_unsupported_models_are_named_with_a_reason(of_attention, dtype, row_length, axes, why):
    gpu, one = (
        SimpleNamespace(platform="gpu", compute_capability="8.0"),
        {"context": 1, "tensor": 1},
    )

    def mesh(device=gpu, **axes) -> Any:
        return SimpleNamespace(devices=np.array([device]), shape=one | axes)

    config = tiny("llama3").model.config
    fitting = dataclasses.replace(config.attention, head_dim=64, num_kv_heads=2)
    fits = dataclasses.replace(config, attention=fitting, dtype="bfloat16")
    assert unsupported_reason(fits, 512, mesh()) == ""
    assert "NVIDIA" in unsupported_reason(
        fits, 512, mesh(SimpleNamespace(platform="gpu", compute_capability="gfx90a"))
    )
    wrong = dataclasses.replace(
        config, attention=dataclasses.replace(fitting, **of_attention), dtype=dtype
    )
    assert why in unsupported_reason(wrong, row_length, mesh(**axes))
