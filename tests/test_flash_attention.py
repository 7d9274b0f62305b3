"""The TPU's attention kernels, interpreted on the CPU, against the reference mask: values and gradients."""

import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding, PartitionSpec

from launch import config as configuration
from launch import roles
from tests import several
from tests.test_models import tiny
from tests.topologies import needs_libtpu, tpu_devices
from tpu_rl import models, sharding
from tpu_rl.models import caches, flash_attention, flash_kernels, layers
from tpu_rl.models.flash_kernels import How
from tpu_rl.models.layers import Slots
from tpu_rl.types import Model

WIDTH = 8


def packed_row(parts: list[tuple[int, int, int]], length: int) -> Slots:
    """Slots of a row of groups; (tokens, segment, branch) each, branches behind their trunk; padding behind all."""
    segments, branches, positions, trunk = [], [], [], 0
    for count, segment, branch in parts:
        start = trunk if branch else 0
        trunk = trunk if branch else count
        segments += [segment] * count
        branches += [branch] * count
        positions += range(start, start + count)
    padding = [0] * (length - len(segments))
    columns = (range(length), positions + padding, segments + padding, branches + padding)
    return Slots(*(jnp.array([column], jnp.int32) for column in columns))


def stacked(*rows: Slots) -> Slots:
    return Slots(*(jnp.concatenate(parts) for parts in zip(*rows, strict=True)))


SHARED = packed_row([(40, 1, 0), (70, 1, 1), (90, 1, 2), (30, 2, 0), (100, 2, 1)], 384)
"""Two prompts; a block of the second one's completion hides the first prompt's."""
PLAIN = packed_row([(384, 1, 0)], 384)
SPREAD = packed_row([(20, 1, 0), (108, 1, 1), (128, 1, 2), (120, 1, 3)], 384)
"""Completions that lie in blocks of their own and do not see each other."""
ROWS = {"shared prompts": stacked(SHARED, SPREAD), "plain": stacked(PLAIN, PLAIN)}
HOWS = {
    "plain": How(0.35, interpret=True),
    "window": How(0.35, window=50, interpret=True),
    "softcap": How(1.5, softcap=2.0, interpret=True),
}


def heads(seed: int, count: int, tokens: int, dtype=jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (2, tokens, count, WIDTH), dtype)


def both(query, key, value, queries: Slots, keys: Slots, how: How):
    """(kernels, reference): values and gradients of a weighted sum of them over what is no padding."""
    is_token = (queries.segment_ids > 0)[..., None, None]
    of_output = jnp.where(is_token, heads(3, query.shape[2], query.shape[1]), 0.0)

    def kernels(query, key, value):
        mixed = flash_attention.flash_attention(query, key, value, queries, keys, how)
        return (mixed * of_output).sum(), mixed

    def reference(query, key, value):
        rules = {"scale": how.scale, "window": how.window, "softcap": how.softcap}
        mixed = layers.dense_attention(query, key, value, queries, keys, **rules)
        return (mixed * of_output).sum(), mixed

    found = []
    for function in (kernels, reference):
        (_, mixed), gradients = jax.jit(jax.value_and_grad(function, (0, 1, 2), has_aux=True))(query, key, value)
        found.append(
            [np.asarray(part, np.float32) for part in (mixed * (queries.segment_ids > 0)[..., None, None], *gradients)]
        )
    return found


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(flash_kernels, "BLOCKS", (128,))


def require_alike(found, wanted, tolerance=3e-6):
    for name, one, other in zip(("values", "query", "key", "value"), found, wanted, strict=True):
        assert np.abs(other).max() > 0
        np.testing.assert_allclose(one, other, atol=tolerance * np.abs(other).max(), rtol=0, err_msg=name)


@pytest.mark.parametrize(
    ("rows", "how", "kv_heads"),
    [("shared prompts", "plain", 2), ("shared prompts", "window", 1), ("plain", "softcap", 2), ("plain", "window", 4)],
)
def test_values_and_gradients_are_those_of_the_mask(rows, how, kv_heads, small_blocks):
    key, value = (heads(seed, kv_heads, 384).swapaxes(1, 2) for seed in (1, 2))
    require_alike(*both(heads(0, 4, 384), key, value, ROWS[rows], ROWS[rows], HOWS[how]))


def test_bfloat16_differs_by_its_own_rounding(small_blocks):
    key, value = (heads(seed, 2, 384, jnp.bfloat16).swapaxes(1, 2) for seed in (1, 2))
    slots = ROWS["shared prompts"]
    require_alike(*both(heads(0, 4, 384, jnp.bfloat16), key, value, slots, slots, HOWS["plain"]), tolerance=2e-2)


def test_a_block_of_new_tokens_over_a_longer_cache(small_blocks):
    lengths = jnp.array([5, 200], jnp.int32)
    positions = lengths[:, None] + jnp.arange(128)[None, :]
    queries = caches.new_slots(lengths, positions, jnp.zeros_like(positions))
    keys = caches.read_into_places(lengths, 384, queries).keys
    key, value = (heads(seed, 2, 384).swapaxes(1, 2) for seed in (1, 2))
    require_alike(*both(heads(0, 4, 128), key, value, queries, keys, HOWS["plain"]))


ON_MESHES = """
import jax
from tests import test_flash_attention as here
from tpu_rl import models, sharding

key, value = (here.heads(seed, 2, 384).swapaxes(1, 2) for seed in (1, 2))
slots, how = here.ROWS["shared prompts"], here.HOWS["window"]
wanted = here.both(here.heads(0, 4, 384), key, value, slots, slots, how)[1]
for data, tensor in ((2, 2), (1, 4), (4, 1)):  # rows and heads are cut; more parts than heads of keys, or than rows
    with jax.set_mesh(sharding.make_mesh(data, 1, tensor)):
        here.require_alike(here.both(here.heads(0, 4, 384), key, value, slots, slots, how)[0], wanted)

model = here.tiny("gemma2").model
wanted = here.of_model(model)
with jax.set_mesh(sharding.make_mesh(context=3, devices=jax.devices()[:3])):  # the tokens of each row are cut
    here.require_same(here.of_model(models.with_attention_kernel(model, "interpreted")), wanted)
"""


@pytest.mark.slow
def test_on_a_mesh_it_is_the_same():
    command, env = [sys.executable, "-c", ON_MESHES], several.virtual_devices(4)
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr[-3000:]


def of_model(model: Model) -> tuple[jax.Array, np.ndarray]:
    """(a sum over the hidden states of packed rows, its gradients)."""
    slots = ROWS["shared prompts"]
    params, tokens = model.init(jax.random.key(0)), jax.random.randint(jax.random.key(1), (2, 384), 0, 7)

    def total(params):
        hidden = model.hidden(params, tokens, slots.positions, slots.segment_ids, slots.branch_ids)
        return (jnp.sin(hidden) * (slots.segment_ids > 0)[..., None]).sum()

    value, gradients = jax.jit(jax.value_and_grad(total))(params)
    return value, np.asarray(ravel_pytree(gradients)[0])


def require_same(found, wanted):
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    assert np.linalg.norm(found[1] - wanted[1]) <= 1e-5 * np.linalg.norm(wanted[1])


TAKEN = {
    ("shared prompts", "plain"): [5, 5],  # of the 6 on the diagonal and below it
    ("shared prompts", "window"): [5, 5],  # positions begin anew with each completion
    ("plain", "plain"): [6, 6],
    ("plain", "window"): [5, 5],
}


@pytest.mark.parametrize(("rows", "how"), TAKEN)
def test_every_block_that_sees_is_taken_and_hidden_ones_are_not(rows, how, small_blocks):
    slots, grid = ROWS[rows], flash_kernels.grid_of(*[heads(0, 1, 384).swapaxes(1, 2)] * 2)
    taken = np.asarray(flash_kernels.seen_blocks(HOWS[how], grid, slots, slots))
    sees = np.asarray(layers.visible(slots, slots, HOWS[how].window)).reshape(2, 3, 128, 3, 128).any((2, 4))
    assert (taken >= sees).all()
    assert taken.sum((1, 2)).tolist() == TAKEN[rows, how]


def blocks_of_one_text(how: How, grid: flash_kernels.Grid) -> int:
    """By `layers.sees`, token by token, of the device with the most."""
    keys = np.arange(grid.key_blocks * grid.key_block)
    own = grid.query_blocks * grid.query_block
    most = 0
    for queries in layers.balanced_order(own * how.parts, how.parts).reshape(how.parts, own):
        query, key = (Slots(at, at, np.ones_like(at), np.zeros_like(at)) for at in (queries[:, None], keys[None, :]))
        shape = (grid.query_blocks, grid.query_block, grid.key_blocks, grid.key_block)
        most = max(most, int(np.asarray(layers.sees(query, key, how.window)).reshape(shape).any((1, 3)).sum()))
    return most


@pytest.mark.parametrize(
    ("how", "queries", "keys"),
    [
        (How(1.0), (128, 4), (128, 4)),
        (How(1.0), (128, 3), (384, 1)),
        (How(1.0), (512, 1), (128, 5)),  # a prompt in a cache with room for more
        *[(How(1.0, window), (128, 8), (128, 8)) for window in (1, 2, 128, 129, 130, 500, 1024, 5000)],
        (How(1.0, 300), (256, 4), (128, 8)),
        (How(1.0, 300), (128, 8), (512, 2)),
        *[(How(1.0, window, parts=2), (128, 4), (128, 8)) for window in (None, 200)],
        *[(How(1.0, window, parts=4), (128, 2), (128, 8)) for window in (None, 200)],
        (How(1.0, parts=2), (512, 1), (512, 2)),  # its two stretches are one block
    ],
)
def test_costs_are_of_the_blocks_that_one_text_needs(how, queries, keys):
    grid = flash_kernels.Grid(1, 1, 1, queries[0], keys[0], queries[1], keys[1], WIDTH)
    assert flash_kernels.causal_blocks(how, grid) == blocks_of_one_text(how, grid)
    if how == How(1.0) and queries == keys:
        assert flash_kernels.causal_blocks(how, grid) == queries[1] * (queries[1] + 1) // 2


def test_a_window_s_cost_is_less(small_blocks):
    """As compilers are told it, of values and gradients."""

    def operations(how: How) -> list[int]:
        def total(query, key, value):
            return flash_attention.flash_attention(query, key, value, slots, slots, how).sum()

        slots = Slots(*(jnp.zeros((1, 512), jnp.int32) for _ in range(4)))
        query, key = jnp.zeros((1, 512, 4, WIDTH)), jnp.zeros((1, 2, 512, WIDTH))
        jaxpr = jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(query, key, key)
        return [int(flops) for flops in re.findall(r"CostEstimate\(flops=(\d+)", str(jaxpr))]

    block = 2 * 128 * 128 * WIDTH * 4
    assert operations(How(1.0)) == [products * 10 * block for products in (2, 3, 4)]
    assert operations(How(1.0, window=128)) == [products * 7 * block for products in (2, 3, 4)]


def test_a_model_by_the_kernel_is_the_model(small_blocks):
    """Hidden states and gradients of packed rows, through layers of both kinds, remade in the backward pass."""
    model = tiny("gemma2").model
    with jax.set_mesh(sharding.make_mesh(devices=jax.devices()[:1])):  # as in a run on one chip
        found = of_model(models.with_attention_kernel(model, "interpreted"))
    require_same(found, of_model(model))


@pytest.mark.parametrize(
    ("platform", "kernel", "transposed"), [("cpu", "none", True), ("tpu", "tpu", False), ("gpu", "none", False)]
)
def test_each_platform_has_its_kernel_and_its_cache(platform, kernel, transposed):
    mesh: Any = SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)]))
    found = roles.fast_model(configuration.preset("arithmetic_grpo"), tiny("llama3").model, mesh).config.attention
    assert (found.kernel, found.cache_for_cpus) == (kernel, transposed)


@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1"])
@pytest.mark.parametrize(
    ("how", "dtype", "width", "kv_heads", "axis"),
    [
        pytest.param(How(0.1), "bfloat16", 128, 2, "data", id="llama"),
        pytest.param(How(0.1), "bfloat16", 128, 2, "context", id="llama_long"),
        pytest.param(How(0.1, window=300, softcap=50.0), "bfloat16", 256, 1, "data", id="gemma2"),
        pytest.param(How(0.1), "float32", 24, 4, "data", id="small"),
        pytest.param(How(0.1), "float32", 128, 2, "data", id="llama_float32"),
        pytest.param(How(0.1, window=300, softcap=50.0), "float32", 256, 1, "data", id="gemma2_float32"),
    ],
)
def test_the_tpus_compiler_takes_the_kernels(topology, how, dtype, width, kv_heads, axis):
    mesh = sharding.make_mesh(**{axis: 2}, tensor=2, devices=tpu_devices(topology))

    def array(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    query = array((4, 1024, 4, width), dtype, "data", None, "tensor")
    key = array((4, kv_heads, 1024, width), dtype, "data")
    slots = Slots(*[array((4, 1024), jnp.int32, "data")] * 4)

    def total(query, key, value, slots):
        return flash_attention.flash_attention(query, key, value, slots, slots, how).astype(jnp.float32).sum()

    with jax.set_mesh(mesh):
        text = jax.jit(jax.grad(total, (0, 1, 2))).lower(query, key, key, slots).compile().as_text()
    for kernel in ("attention_mixing", "attention_for_queries", "attention_for_keys"):
        assert kernel in text
