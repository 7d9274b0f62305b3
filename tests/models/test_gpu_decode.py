"""The GPU's decode kernel, interpreted on the CPU against dense attention, and lowered for CUDA."""

import dataclasses
import functools
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from tests.fixtures import decode_rows, several
from tests.fixtures.decoders import tiny
from tests.fixtures.topologies import gpu_device, needs_gpu_compiler
from tests.fixtures.tpu_decoding import compile_decoding
from tpu_rl import models
from tpu_rl.commands import config as configuration
from tpu_rl.commands import roles
from tpu_rl.commands.plan import known_models
from tpu_rl.models import kv_cache, layers
from tpu_rl.models.attention import decode, decode_kernel, gpu_decode, gpu_trials
from tpu_rl.models.attention.decode import SeenTokens
from tpu_rl.models.attention.decode_kernel import DecodeConfig
from tpu_rl.models.config import AttentionConfig, FullHeads, LatentConfig
from tpu_rl.train import sharding
from tpu_rl.types import UNREAD

INTERPRETED = DecodeConfig(0.35, softcap=3.0, interpret=True, on_gpu=True)
FIRST: Any = np.array([0, 0, 70, 0, 130], np.int32)
END: Any = np.array([1, 512, 200, 129, 131], np.int32)


def operands(num_heads: int, kv_heads: int, head_dim: int, places: int = 512) -> Any:
    """Return a query [B, 1, H, E] and the leaves of two layers, NaN where nobody may read."""
    draw = np.random.default_rng(0).normal
    rows = len(FIRST)
    query = draw(size=(rows, 1, num_heads, head_dim)).astype(np.float32)
    leaf = (2, rows, kv_heads, places, head_dim)
    seen = (np.arange(places) >= FIRST[:, None]) & (np.arange(places) < END[:, None])
    seen = seen[None, :, None, :, None] & (np.arange(2) == 1)[:, None, None, None, None]
    return query, {
        name: np.where(seen, draw(size=leaf).astype(np.float32), np.nan) for name in ("k", "v")
    }


def reference(query: Any, stack: Any, sinks: Any = None) -> Any:
    rows, places = len(query), stack["v"].shape[3]
    number = jnp.broadcast_to(jnp.arange(places), (rows, places))
    last = jnp.asarray(END[:, None] - 1)
    return layers.dense_attention(
        query,
        np.nan_to_num(stack["k"][1]),
        np.nan_to_num(stack["v"][1]),
        layers.TokenIndex(last, last, last, last),
        layers.TokenIndex(number, number, number, jnp.where(number >= FIRST[:, None], 999, 0)),
        scale=INTERPRETED.scale,
        softcap=INTERPRETED.softcap,
        sinks=sinks,
    )


@pytest.mark.parametrize(
    ("num_heads", "kv_heads", "head_dim", "programs", "has_sinks", "int8_cache"),
    [
        pytest.param(8, 1, 256, 10, False, False, id="two splits"),
        pytest.param(6, 2, 128, 2048, True, False, id="most splits and sinks"),
        pytest.param(6, 2, 128, 10, True, True, id="int8"),
        pytest.param(2, 2, 64, 1, False, False, id="one split", marks=pytest.mark.slow),
        pytest.param(40, 2, 16, 1, False, False, id="many heads", marks=pytest.mark.slow),
        pytest.param(8, 1, 64, 2048, False, True, id="int8, splits", marks=pytest.mark.slow),
    ],
)
def test_ragged_rows_equal_dense_attention(
    num_heads, kv_heads, head_dim, programs, has_sinks, int8_cache, monkeypatch
):
    monkeypatch.setattr(gpu_decode, "PROGRAMS", programs)
    monkeypatch.setattr(gpu_decode, "SPLIT_PLACES", 128)
    query, stack = operands(num_heads, kv_heads, head_dim)
    expected_of = stack
    if int8_cache:
        rounded = {name: kv_cache.quantize(jnp.nan_to_num(leaf)) for name, leaf in stack.items()}
        expected_of = {name: part * scale[..., None] for name, (part, scale) in rounded.items()}
        # Hidden tokens have a scale that is no number.
        scales = {
            f"{name}_scale": jnp.where(jnp.isnan(stack[name][..., 0]), jnp.nan, scale)
            for name, (_, scale) in rounded.items()
        }
        stack = {name: part for name, (part, _) in rounded.items()} | scales
    sinks = jnp.linspace(-1, 1, num_heads) if has_sinks else None
    attend = functools.partial(decode.decode_attention, config=INTERPRETED, sinks=sinks)
    actual = jax.jit(attend)(query, stack, 1, SeenTokens(FIRST, END))
    np.testing.assert_allclose(actual, reference(query, expected_of, sinks), atol=2e-6, rtol=0)


@pytest.mark.parametrize("int8_cache", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_group_reads_its_prompt_once(int8_cache, monkeypatch):
    """Groups of 2 and 6 rows in tiles of 2. What nobody may read is NaN: of a prompt, all copies
    but one in each tile."""
    monkeypatch.setattr(gpu_decode, "QUERIES", 4)
    query, stack, first, end = decode_rows.grouped_operands()
    tokens = decode_rows.PROMPT_TOKENS
    tiles = gpu_decode.find_tiles(2, decode_rows.PROMPT, tokens, first, end)
    # The last token of a prompt may be a row's newest one, which it reads alone.
    assert sorted(tiles.tokens.tolist()) == [0, 0, 0, 99, 259, 299, 299, 299]
    in_tile = np.asarray(tiles.tile) < 8
    # One row has no prompt, and one sees nothing of its prompt.
    assert np.flatnonzero(~in_tile).tolist() == [7, 9]
    assert (np.asarray(tiles.shared) == np.where(in_tile, tokens - 1, 0)).all()
    place = np.arange(512)
    own_begin = np.maximum(np.asarray(first), np.asarray(tiles.shared))
    may_read = (place >= own_begin[:, None]) & (place < np.asarray(end)[:, None])
    for leader, count in zip(tiles.rows[:, 0], tiles.tokens, strict=True):
        may_read[leader, :count] = True
    leaves = stack
    rounded = {name: kv_cache.quantize(leaf) for name, leaf in stack.items()}
    if int8_cache:
        stack = {name: part * scale[..., None] for name, (part, scale) in rounded.items()}
        leaves = {f"{name}_scale": scale for name, (_, scale) in rounded.items()}
    readable = may_read[None, :, None, :]
    leaves = {
        name: jnp.where(readable if leaf.ndim == 4 else readable[..., None], leaf, jnp.nan)
        for name, leaf in leaves.items()
    }
    if int8_cache:
        leaves |= {name: part for name, (part, _) in rounded.items()}
    config = decode_rows.CONFIG._replace(on_gpu=True)
    sinks = jnp.linspace(-1, 1, 4)
    seen = SeenTokens(first, end, tiles)
    actual = jax.jit(lambda: decode.decode_attention(query, leaves, 1, seen, config, 2, sinks))()
    expected = decode_rows.reference(query, stack, 1, first, end, sinks=sinks)
    np.testing.assert_allclose(actual, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("group", [1, 4, 16, 64])
@pytest.mark.parametrize("sizes", [[1], [2], [3, 3], [3, 1, 3, 3], [33], [64, 2, 5], [8] * 8])
def test_each_row_with_a_prompt_has_a_tile(group, sizes):
    prompt = np.repeat(np.arange(len(sizes)), sizes)
    prompt = np.random.default_rng(0).permutation(prompt)
    tokens = np.full(len(prompt), 100)
    zeros = np.zeros_like(prompt)
    tiles = gpu_decode.find_tiles(group, *map(jnp.asarray, (prompt, tokens, zeros, tokens)))
    shared = np.asarray(tiles.shared)
    # A group of more rows than groups may have leaves one row alone.
    assert (shared == 0).sum() == sum(size % decode_kernel.MAX_MEMBERS == 1 for size in sizes)
    for row in np.flatnonzero(shared):
        tile = int(tiles.tile[row])
        assert tiles.rows[tile, tiles.member[row]] == row
        assert tiles.tokens[tile] == shared[row] == 99
        assert prompt[tiles.rows[tile, 0]] == prompt[row]
    assert (np.asarray(tiles.tile)[shared == 0] == len(tiles.tokens)).all()


def shapes_of_cache(head_dim: int, dtype: str, shape: Any = jax.ShapeDtypeStruct) -> Any:
    """Return a query, and the leaves of three layers with 64 rows of 4,096 places. An int8 cache
    belongs to a bfloat16 model."""
    leaf = (3, 64, 8, 4096, head_dim)
    stack = {name: shape(leaf, dtype) for name in ("k", "v")}
    if dtype == "int8":
        stack |= {f"{name}_scale": shape(leaf[:-1], "float32") for name in ("k", "v")}
    return shape((64, 1, 24, head_dim), "bfloat16" if dtype == "int8" else dtype), stack


def text_for_cuda(query: Any, stack: Any, softcap: float | None) -> str:
    """Return the program that a row's decode step is lowered to for CUDA."""
    config = DecodeConfig(0.35, softcap, on_gpu=True)
    attend = functools.partial(decode.decode_attention, config=config)
    row: Any = jax.ShapeDtypeStruct((query.shape[0],), jnp.int32)
    traced = jax.jit(attend).trace(query, stack, 1, SeenTokens(row, row))
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_kernel_is_lowered_for_cuda_and_copies_no_layer(head_dim, dtype):
    query, stack = shapes_of_cache(head_dim, dtype)
    softcap = 50.0 if head_dim == 256 else None
    program = text_for_cuda(query, stack, softcap)
    assert "@__gpu$xla.gpu.triton(" in program
    assert 'name = "gpu_decode_attention"' in program
    # The custom call takes the whole stack; nothing else has the size of a layer, or of its scores.
    cut = [line for line in program.splitlines() if "slice" in line and "4096" in line]
    assert not cut
    # Scales are as many as scores of one head would be.
    whole = program.replace(f"x4096x{head_dim}xf32", "").replace("3x64x8x4096xf32", "")
    assert "x4096xf32" not in whole


@needs_gpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize("card", ["a100", "4090", "h100"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_xla_compiles_the_kernel_for_cards(card, head_dim, dtype):
    placed = SingleDeviceSharding(gpu_device(card))
    shape = functools.partial(jax.ShapeDtypeStruct, sharding=placed)
    query, stack = shapes_of_cache(head_dim, dtype, shape)
    row: Any = shape((64,), jnp.int32)
    config = DecodeConfig(0.35, 50.0, on_gpu=True)
    attend = functools.partial(decode.decode_attention, config=config)
    tiles = jax.eval_shape(functools.partial(gpu_decode.find_tiles, 3), row, row, row, row)
    seen = SeenTokens(row, row, jax.tree.map(lambda leaf: shape(leaf.shape, leaf.dtype), tiles))
    program = jax.jit(attend).lower(query, stack, 1, seen).compile()
    stats = program.memory_analysis()
    assert stats is not None
    # Sums of splits and of tiles, 27 MB, and no layer of the cache, of which the keys in int8 have
    # 134 MB or more.
    assert stats.temp_size_in_bytes < stack["k"].size / 3 / 4


@needs_gpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "xla"])
def test_decode_steps_of_an_h100_copy_no_layer_of_the_cache(kernel):
    shape = known_models.find("Llama-3.2-1B")
    assert shape is not None
    model = models.from_config(shape, dtype="bfloat16", param_dtype="bfloat16")
    if kernel:
        model = models.variant(model, attention={"gpu_decode": "triton"})
    mesh = sharding.make_mesh(devices=[gpu_device("h100")])
    program, _ = compile_decoding(model, mesh, 64, 4096)
    layer = r"bf16\[(1,)?64,8,4096,64\]"
    assert bool(re.search(layer, program.as_text() or "")) != kernel


def decoded(model: Any, params: Any) -> Any:
    """Return logits of four steps of three rows: one wraps around a ring, one begins empty, and
    beside them a slot that nobody reads."""
    lengths = jnp.array([254, 0, 140, 254], jnp.int32)
    tokens = jax.random.randint(jax.random.key(1), (4, 254), 2, 130)
    positions = jnp.broadcast_to(jnp.arange(254), tokens.shape)
    cache = model.init_cache(params, 4, 300)
    step = jax.jit(model.extend)
    _, cache = step(params, cache, tokens, positions, jnp.zeros_like(tokens), lengths)
    logits = []
    for number in range(4):
        live = jnp.array([1, 1, 1, 0])
        column = (tokens[:, number] * 3 % 120)[:, None]
        branch = jnp.where(live, 0, UNREAD)[:, None]
        found, cache = step(params, cache, column, cache["lengths"][:, None], branch, live)
        logits.append(found[:3, 0])
    return jnp.stack(logits)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "llama3",
        "mistral",
        pytest.param("gemma2", marks=pytest.mark.nightly),
        pytest.param("gpt_oss", marks=pytest.mark.nightly),
    ],
)
def test_a_model_decodes_the_same_logits(family):
    """Exact sampling, whose sums have another order too, differs by up to 4e-6 from XLA's."""
    made = tiny(family)
    model = models.variant(made.model, attention={"gpu_decode": "interpreted"})
    wanted = decoded(made.model, made.params)
    np.testing.assert_allclose(decoded(model, made.params), wanted, atol=5e-6, rtol=0)


# The trial.

TRIED = dataclasses.replace(tiny("llama3").model.config.attention, head_dim=16)


def one_device() -> Any:
    return sharding.make_mesh(devices=jax.devices()[:1])


def trial(config: AttentionConfig = TRIED, dtype: str = "float32", **options: bool) -> str:
    error_of = gpu_trials.gpu_decode_error(dtype, interpret=True, **options)
    return gpu_trials.failure_reason.__wrapped__(config, one_device(), error_of)


@pytest.mark.parametrize("int8_cache", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_the_trial_accepts_the_kernel(dtype, int8_cache):
    config = dataclasses.replace(TRIED, softcap=20.0, sinks=True)
    assert trial(config, dtype, int8_cache=int8_cache) == ""


def test_the_trial_detects_a_prompt_that_is_too_long(monkeypatch):
    attention = gpu_decode.attention

    def longer(config, query, leaves, layer, first_head, first, end, sinks, tiles):
        tiles = tiles._replace(tokens=tiles.tokens + 1)
        return attention(config, query, leaves, layer, first_head, first, end, sinks, tiles)

    monkeypatch.setattr(gpu_decode, "attention", longer)
    assert trial().startswith("in a trial it differs from the reference by ")


def test_the_trial_detects_scales_that_are_not_used(monkeypatch):
    attention = gpu_decode.attention

    def unscaled(config, query, leaves, *arguments):
        leaves = [*leaves[:3], jnp.ones_like(leaves[3])]
        return attention(config, query, leaves, *arguments)

    monkeypatch.setattr(gpu_decode, "attention", unscaled)
    assert trial(int8_cache=True).startswith("in a trial it differs from the reference by ")


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["first", "end"])
@pytest.mark.parametrize("step", [-1, 1])
def test_the_trial_detects_a_token_more_or_less(wrong, step, monkeypatch):
    attention = gpu_decode.attention

    def shifted(config, query, leaves, layer, first_head, first, end, sinks, tiles):
        seen = {"first": first, "end": end}
        # Rows of one token see it in any case.
        moved = jnp.where(end - first > 1, seen[wrong] + step, seen[wrong])
        seen[wrong] = jnp.clip(moved, 0, None)
        moved = (seen["first"], seen["end"], sinks, tiles)
        return attention(config, query, leaves, layer, first_head, *moved)

    monkeypatch.setattr(gpu_decode, "attention", shifted)
    assert trial().startswith("in a trial it differs from the reference by ")


def test_the_trial_says_that_the_kernel_does_not_compile():
    """XLA has no Triton on CPUs."""
    error_of = gpu_trials.gpu_decode_error("float32")
    reason = gpu_trials.failure_reason.__wrapped__(TRIED, one_device(), error_of)
    assert reason.startswith("it does not compile: ")


ON_MESHES = """
import dataclasses
from tests.models import test_gpu_decode as here
from tpu_rl.models.attention import gpu_trials
from tpu_rl.train import sharding

config = dataclasses.replace(here.TRIED, num_heads=8, num_kv_heads=2)
mesh = sharding.make_mesh(fsdp=2, tensor=2)
# Heads and their keys on one device; and more devices than KV heads.
for mesh in (mesh, sharding.sampling_mesh(mesh, 4)):
    for int8_cache in (False, True):
        error_of = gpu_trials.gpu_decode_error("float32", int8_cache=int8_cache, interpret=True)
        assert gpu_trials.failure_reason(config, mesh, error_of) == ""
"""


@pytest.mark.nightly
def test_the_trial_runs_on_every_mesh():
    command, env = [sys.executable, "-c", ON_MESHES], several.virtual_devices(4)
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr[-3000:]


# When a run uses it.


def test_it_is_the_default_on_gpus(monkeypatch, capsys):
    amd = SimpleNamespace(platform="gpu", compute_capability="gfx942")
    gpu: Any = SimpleNamespace(devices=np.array([amd]))
    preset = configuration.preset("arithmetic_grpo")
    base = tiny("llama3").model
    monkeypatch.setattr(roles, "_cudnn_obstacle", lambda *_: "")

    def kernels(attention: Any, mesh: Any) -> set[str]:
        config = dataclasses.replace(
            preset, model=dataclasses.replace(preset.model, attention=attention)
        )
        made = roles.fast_models(config, base, mesh).values()
        return {model.config.attention.gpu_decode for model in made}

    assert kernels("auto", gpu) == {"none"}
    assert "no kernel: the kernel is for NVIDIA GPUs" in capsys.readouterr().err
    monkeypatch.setattr(roles, "_decode_obstacle", lambda *_: "")
    assert kernels("auto", gpu) == kernels("cudnn", gpu) == {"triton"}
    assert kernels("xla", gpu) == kernels("auto", one_device()) == {"none"}
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "capability", "why"),
    [
        ({}, "7.5", "8.0 (A100) and newer"),
        ({}, "gfx90a", "NVIDIA GPUs"),
        ({"head_dim": 96}, "9.0", "head dimension 96 is not a power of two"),
        ({"latent": LatentConfig(16, 8, 32)}, "9.0", "latent attention has two"),
        ({"full": FullHeads(1, 32)}, "9.0", "full layers have others"),
        ({"softcap": 50.0, "sinks": True, "sliding_window": 64}, "8.0", ""),
    ],
)
def test_unsupported_models_are_named_with_a_reason(changes, capability, why):
    device = SimpleNamespace(platform="gpu", compute_capability=capability)
    config = dataclasses.replace(TRIED, **changes)
    reason = gpu_decode.unsupported_reason(config, device)
    assert why in reason
    assert bool(why) == bool(reason)


def test_several_tokens_and_some_int8_caches_are_left_to_xla():
    model = models.variant(tiny("llama3").model, attention={"gpu_decode": "triton"})
    config = model.config.attention
    query = jnp.zeros((1, 1, config.num_heads, config.head_dim))
    cache = model.init_cache(None, 1, 130)
    assert cache["full"]["k"].shape[3] == 256
    assert decode.is_supported(config, query, cache["full"])
    assert not decode.is_supported(config, jnp.repeat(query, 2, 1), cache["full"])
    rounded = models.with_int8_cache(model).init_cache(None, 1, 130)
    assert decode.is_supported(config, query, rounded["full"])
    for rows, is_numbered in ((8, True), (16, False), (32, False), (64, True)):
        key: Any = jax.ShapeDtypeStruct((32, rows, 8, 4096, 128), jnp.int8)
        assert decode.is_supported(config, query, {"k": key}) == is_numbered
    assert models.with_exact_sampling(model).config.attention.gpu_decode == "none"
