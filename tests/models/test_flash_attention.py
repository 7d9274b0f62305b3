"""The TPU's attention kernels, interpreted on the CPU, against dense attention."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.fixtures import several
from tests.fixtures.attention_rows import ROWS, TREES, WIDTH, heads, of_model, require_same
from tests.fixtures.decoders import tiny
from tests.fixtures.topologies import needs_libtpu, tpu_devices
from tpu_rl import cost_model, models
from tpu_rl.commands import config as configuration
from tpu_rl.commands import roles
from tpu_rl.models import kv_cache, layers
from tpu_rl.models.attention import flash, flash_cycles, flash_kernels
from tpu_rl.models.attention.flash_kernels import FlashConfig
from tpu_rl.models.layers import TokenIndex
from tpu_rl.models.vision.features import two_way
from tpu_rl.train import sharding

ROWS_AND_TREES = ROWS | {"tree": TREES}
CONFIGS_BY_NAME = {
    "plain": FlashConfig(0.35, interpret=True),
    "window": FlashConfig(0.35, sliding_window=50, interpret=True),
    "softcap": FlashConfig(1.5, softcap=2.0, interpret=True),
}


def both(query, key, value, queries: TokenIndex, keys: TokenIndex, how: FlashConfig, sinks=None):
    """Return values and gradients of the kernels and of the reference, without padding."""
    is_token = (queries.segment_ids > 0)[..., None, None]
    of_output = jnp.where(is_token, heads(3, query.shape[2], query.shape[1]), 0.0)

    def kernels(query, key, value, sinks):
        mixed = flash.flash_attention(query, key, value, queries, keys, how, sinks=sinks)
        return (mixed * of_output).sum(), mixed

    def reference(query, key, value, sinks):
        rules = {"scale": how.scale, "sliding_window": how.sliding_window, "softcap": how.softcap}
        rules["sinks"] = sinks
        mixed = layers.dense_attention(query, key, value, queries, keys, **rules)
        return (mixed * of_output).sum(), mixed

    operands = (0, 1, 2) if sinks is None else (0, 1, 2, 3)
    found = []
    for function in (kernels, reference):
        (_, mixed), gradients = jax.jit(jax.value_and_grad(function, operands, has_aux=True))(
            query, key, value, sinks
        )
        found.append(
            [
                np.asarray(part, np.float32)
                for part in (mixed * (queries.segment_ids > 0)[..., None, None], *gradients)
            ]
        )
    return found


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(flash_kernels, "BLOCK_SIZES", (128,))


def require_alike(found, wanted, tolerance=3e-6):
    names = ("values", "query", "key", "value", "sinks")[: len(wanted)]
    for name, one, other in zip(names, found, wanted, strict=True):
        assert np.abs(other).max() > 0
        np.testing.assert_allclose(
            one, other, atol=tolerance * np.abs(other).max(), rtol=0, err_msg=name
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "how", "kv_heads"),
    [
        ("shared prompts", "plain", 2),
        ("shared prompts", "window", 1),
        ("plain", "softcap", 2),
        ("plain", "window", 4),
        ("tree", "window", 2),
    ],
)
def test_values_and_gradients_equal_dense_attention(rows, how, kv_heads, small_blocks, monkeypatch):
    if kv_heads == 1:  # as if the rows were too long for one backward kernel
        monkeypatch.setattr(flash_kernels, "FUSED_SHARE", 0)
    key, value = (heads(seed, kv_heads, 384).swapaxes(1, 2) for seed in (1, 2))
    slots = ROWS_AND_TREES[rows]
    sinks = jnp.array([0.5, -2.0, 1.0, 3.0]) if rows == "tree" else None
    operands = (heads(0, 4, 384), key, value, slots, slots)
    require_alike(*both(*operands, CONFIGS_BY_NAME[how], sinks))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "window"])
def test_tokens_see_the_rest_of_their_image_in_later_blocks(how, small_blocks):
    tower = SimpleNamespace(is_two_way=True, features_per_piece=150)
    features: Any = SimpleNamespace(grid=None)
    config: Any = SimpleNamespace(vision=tower, vocab=SimpleNamespace(size=1000))
    key, value = (heads(seed, 2, 384).swapaxes(1, 2) for seed in (1, 2))
    slots = ROWS["shared prompts"]
    tokens = np.zeros(slots.index.shape, np.int32)
    tokens[:, 3:153] = tokens[:, 155:305] = np.arange(1000, 1150)
    queries = two_way(config, jnp.asarray(tokens), slots, features)
    assert queries is not None
    assert np.asarray(queries.index > slots.index).sum() > 100
    require_alike(*both(heads(0, 4, 384), key, value, queries, slots, CONFIGS_BY_NAME[how]))


@pytest.mark.slow
def test_bfloat16_differs_by_rounding_only(small_blocks):
    key, value = (heads(seed, 2, 384, jnp.bfloat16).swapaxes(1, 2) for seed in (1, 2))
    slots = ROWS["shared prompts"]
    require_alike(
        *both(heads(0, 4, 384, jnp.bfloat16), key, value, slots, slots, CONFIGS_BY_NAME["plain"]),
        tolerance=2e-2,
    )


@pytest.mark.slow
def test_new_tokens_attend_to_a_longer_cache(small_blocks):
    lengths = jnp.array([5, 200], jnp.int32)
    positions = lengths[:, None] + jnp.arange(128)[None, :]
    queries = kv_cache.query_index(lengths, positions, jnp.zeros_like(positions))
    keys = kv_cache.linear_view(lengths, 384, queries).keys
    key, value = (heads(seed, 2, 384).swapaxes(1, 2) for seed in (1, 2))
    require_alike(*both(heads(0, 4, 128), key, value, queries, keys, CONFIGS_BY_NAME["plain"]))


ON_MESHES = """
import jax
from tests.models import test_flash_attention as here
from tpu_rl import cost_model, models
from tpu_rl.train import sharding

key, value = (here.heads(seed, 2, 384).swapaxes(1, 2) for seed in (1, 2))
slots, how = here.ROWS["shared prompts"], here.CONFIGS_BY_NAME["window"]
wanted = here.both(here.heads(0, 4, 384), key, value, slots, slots, how)[1]
# Rows and heads are sharded, over more devices than there are key-value heads, or rows.
for data, tensor in ((2, 2), (1, 4), (4, 1)):
    with jax.set_mesh(sharding.make_mesh(data, 1, tensor)):
        found = here.both(here.heads(0, 4, 384), key, value, slots, slots, how)[0]
        here.require_alike(found, wanted)

model = here.tiny("gemma2").model
wanted = here.of_model(model)
# The tokens of each row are sharded.
with jax.set_mesh(sharding.make_mesh(context=3, devices=jax.devices()[:3])):
    here.require_same(here.of_model(models.with_attention_kernel(model, "interpreted")), wanted)
"""


@pytest.mark.nightly
def test_result_is_the_same_on_every_mesh():
    command, env = [sys.executable, "-c", ON_MESHES], several.virtual_devices(4)
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr[-3000:]


TAKEN = {
    ("shared prompts", "plain"): [5, 5],  # of the 6 on the diagonal and below it
    ("shared prompts", "window"): [5, 5],  # positions begin anew with each completion
    ("plain", "plain"): [6, 6],
    ("plain", "window"): [5, 5],
    ("tree", "plain"): [5, 6],
}


@pytest.mark.parametrize(("rows", "how"), TAKEN)
def test_kinds_of_blocks_follow_from_the_mask(rows, how, small_blocks):
    """Blocks that are taken cover the mask, and those without a mask hide nothing."""
    slots, grid = (
        ROWS_AND_TREES[rows],
        flash_kernels.make_grid(*[heads(0, 1, 384).swapaxes(1, 2)] * 2, (128, 128)),
    )
    kinds = flash_kernels.block_kinds(CONFIGS_BY_NAME[how], grid, slots, slots)
    taken, full = (np.asarray(kind) for kind in kinds)
    sees = np.asarray(
        layers.attention_mask(slots, slots, CONFIGS_BY_NAME[how].sliding_window)
    ).reshape(2, 3, 128, 3, 128)
    assert (taken >= sees.any((2, 4))).all()
    assert taken.sum((1, 2)).tolist() == TAKEN[rows, how]
    assert (full <= sees.all((2, 4))).all()
    assert full.any() == (rows != "shared prompts" and how == "plain")


def blocks_of_one_text(how: FlashConfig, grid: flash_kernels.Grid) -> tuple[int, int]:
    """Count visible and full blocks by `layers.can_attend`, token by token.

    They are those of the device with the most.
    """
    keys = np.arange(grid.num_key_blocks * grid.key_block)
    own = grid.num_query_blocks * grid.query_block
    most = (0, 0)
    for queries in layers.balanced_order(own * how.token_shards, how.token_shards).reshape(
        how.token_shards, own
    ):
        query, key = (
            TokenIndex(at, at, np.ones_like(at), np.full_like(at, keys.size))
            for at in (queries[:, None], keys[None, :])
        )
        shape = (grid.num_query_blocks, grid.query_block, grid.num_key_blocks, grid.key_block)
        sees = np.asarray(layers.can_attend(query, key, how.sliding_window)).reshape(shape)
        most = max(most, (int(sees.any((1, 3)).sum()), int(sees.all((1, 3)).sum())))
    return most


@pytest.mark.parametrize(
    ("how", "queries", "keys"),
    [
        (FlashConfig(1.0), (128, 4), (128, 4)),
        (FlashConfig(1.0), (128, 3), (384, 1)),
        (FlashConfig(1.0), (512, 1), (128, 5)),  # a prompt in a cache with room for more
        *[
            (FlashConfig(1.0, window), (128, 8), (128, 8))
            for window in (1, 2, 128, 129, 130, 500, 1024, 5000)
        ],
        (FlashConfig(1.0, 300), (256, 4), (128, 8)),
        (FlashConfig(1.0, 300), (128, 8), (512, 2)),
        *[(FlashConfig(1.0, window, token_shards=2), (128, 4), (128, 8)) for window in (None, 200)],
        *[(FlashConfig(1.0, window, token_shards=4), (128, 2), (128, 8)) for window in (None, 200)],
        (FlashConfig(1.0, token_shards=2), (512, 1), (512, 2)),  # its two stretches are one block
    ],
)
def test_cost_counts_the_blocks_of_a_single_text(how, queries, keys):
    grid = flash_kernels.Grid(1, 1, 1, queries[0], keys[0], queries[1], keys[1], WIDTH)
    assert flash_kernels.causal_blocks(how, grid) == blocks_of_one_text(how, grid)
    if how == FlashConfig(1.0) and queries == keys:
        assert flash_kernels.causal_blocks(how, grid).visible == queries[1] * (queries[1] + 1) // 2


def test_sliding_window_lowers_the_cost(small_blocks, monkeypatch):
    """The costs are those that kernels report to the compiler, for values and gradients."""

    def operations(how: FlashConfig) -> list[int]:
        def total(query, key, value):
            return flash.flash_attention(query, key, value, slots, slots, how).sum()

        slots = TokenIndex(*(jnp.zeros((1, 512), jnp.int32) for _ in range(4)))
        query, key = jnp.zeros((1, 512, 4, WIDTH)), jnp.zeros((1, 2, 512, WIDTH))
        jaxpr = jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(query, key, key)
        return [int(flops) for flops in re.findall(r"CostEstimate\(flops=(\d+)", str(jaxpr))]

    block = 2 * 128 * 128 * WIDTH * 4
    assert operations(FlashConfig(1.0)) == [products * 10 * block for products in (2, 5)]
    assert operations(FlashConfig(1.0, sliding_window=128)) == [
        products * 7 * block for products in (2, 5)
    ]
    monkeypatch.setattr(flash_kernels, "FUSED_SHARE", 0)
    assert operations(FlashConfig(1.0)) == [products * 10 * block for products in (2, 4, 3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "gemma2",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("gpt_oss", "deepseek_v3")),
    ],
)
def test_model_with_the_kernel_equals_model_without(family, small_blocks):
    """Hidden states and gradients of packed rows, through layers of both kinds, remade in the
    backward pass. gpt-oss has sinks, and values of DeepSeek-V3 are narrower than keys."""
    model = tiny(family).model
    with jax.set_mesh(sharding.make_mesh(devices=jax.devices()[:1])):  # as in a run on one chip
        found = of_model(models.with_attention_kernel(model, "interpreted"))
    require_same(found, of_model(model))


@pytest.mark.parametrize(
    ("platform", "kernel", "transposed"),
    [("cpu", "none", True), ("tpu", "tpu", False), ("gpu", "none", False)],
)
def test_each_platform_gets_its_kernel_and_cache_layout(platform, kernel, transposed):
    mesh: Any = SimpleNamespace(
        devices=np.array([SimpleNamespace(platform=platform)]), shape={"tensor": 1}
    )
    found = roles.fast_model(
        configuration.preset("arithmetic_grpo"), tiny("llama3").model, mesh
    ).config.attention
    assert (found.kernel, found.cpu_cache) == (kernel, transposed)


@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1"])
@pytest.mark.parametrize(
    ("how", "dtype", "width", "kv_heads", "axis"),
    [
        pytest.param(FlashConfig(0.1), "bfloat16", 128, 2, "data", id="llama"),
        pytest.param(FlashConfig(0.1), "bfloat16", 128, 2, "context", id="llama_long"),
        pytest.param(
            FlashConfig(0.1, sliding_window=300, softcap=50.0),
            "bfloat16",
            256,
            1,
            "data",
            id="gemma2",
        ),
        pytest.param(
            FlashConfig(0.1),
            "bfloat16",
            192,
            4,
            "data",
            id="deepseek_v3",
            marks=pytest.mark.nightly,
        ),
        pytest.param(FlashConfig(0.1), "float32", 24, 4, "data", id="small"),
        pytest.param(FlashConfig(0.1), "float32", 128, 2, "data", id="llama_float32"),
        pytest.param(
            FlashConfig(0.1, sliding_window=300, softcap=50.0),
            "float32",
            256,
            1,
            "data",
            id="gemma2_float32",
        ),
    ],
)
def test_tpu_compiler_accepts_the_kernels(topology, how, dtype, width, kv_heads, axis):
    mesh = sharding.make_mesh(**{axis: 2}, tensor=2, devices=tpu_devices(topology))

    def array(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes))
        )

    query = array((4, 1024, 4, width), dtype, "data", None, "tensor")
    key = array((4, kv_heads, 1024, width), dtype, "data")
    slots = TokenIndex(*[array((4, 1024), jnp.int32, "data")] * 4)

    def total(query, key, value, slots):
        return flash.flash_attention(query, key, value, slots, slots, how).astype(jnp.float32).sum()

    with jax.set_mesh(mesh):
        text = jax.jit(jax.grad(total, (0, 1, 2))).lower(query, key, key, slots).compile().as_text()
    stated = {}
    for operation in cost_model.operations(cost_model.read(text)):
        for kernel in ("flash_attention_forward", "flash_attention_gradients"):
            if kernel in operation.name:
                stated[kernel] = operation.cycles
    assert len(stated) == 2
    if dtype == "float32":
        assert set(stated.values()) == {None}
    elif (width, axis) == (128, "data"):
        chip, cores = ("v5e", 1) if topology == "v5e:2x2" else ("v5p", 2)
        forward, backward = (flash_cycles.CYCLES[chip][128][kernel] for kernel in stated)
        # On each device two rows of two heads: one block of 1,024 x 1,024, and three of 512 x 512
        # on and below the diagonal, of which two need a mask.
        per_head = (
            forward.step + forward.edge + 4 * forward.masked,
            4 * backward.step + 2 * backward.edge + 2 * backward.masked + backward.full,
        )
        assert stated == dict(
            zip(stated, (4 * cycles // cores for cycles in per_head), strict=True)
        )


@pytest.mark.parametrize(
    ("chip", "width", "dtype", "like"),
    [
        ("v5p", 96, "bfloat16", ("v5p", 128, 1)),  # fills the tiles of 128
        ("v6e", 512, "bfloat16", ("v6e", 256, 2)),
        ("v4", 64, "bfloat16", ("v5p", 64, 1)),  # the same matrix units
        ("v5e", 128, "float32", None),
        ("7x", 128, "bfloat16", None),
    ],
)
def test_cycles_of_other_heads_and_chips_are_those_of_the_nearest(
    chip, width, dtype, like, monkeypatch
):
    info = SimpleNamespace(chip_version=chip, num_cores=2)
    monkeypatch.setattr(flash_cycles.jax_versions, "tpu_info", lambda: info)
    visits = flash_cycles.Visits(steps=16, visible=10, full=6, edges=4)
    name = "flash_attention_gradients"
    found = flash_cycles.expected(name, width, jnp.dtype(dtype), visits, 512 * 512)
    if like is None:
        assert found == 0
    else:
        near, size, times = like
        step, edge, masked, full = flash_cycles.CYCLES[near][size][name]
        total = 16 * step + 4 * edge + times * (4 * masked + 6 * full)
        assert found == total // 2


@needs_libtpu
@pytest.mark.nightly
def test_the_compilers_schedule_has_the_cycles_of_the_table():
    """In a process of its own, because libtpu reads once where to write schedules."""
    command = [sys.executable, "bench/kernel_schedules.py", "v6e:2x2", "128", "2048"]
    ended = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    for kernel, cycles in flash_cycles.CYCLES["v6e"][128].items():
        assert "\t".join(map(str, ("v6e", 128, kernel, *cycles))) in ended.stdout
