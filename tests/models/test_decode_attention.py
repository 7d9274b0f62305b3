"""The TPU's decode kernel, interpreted on the CPU, against dense attention.

The interpreter fills memory that nobody wrote with NaN, and copies when a kernel waits.
"""

import functools
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from tests.fixtures import several
from tests.fixtures.decode_rows import (
    CONFIG,
    PROMPT,
    PROMPT_TOKENS,
    grouped_operands,
    operands,
    random,
    reference,
)
from tests.fixtures.decoders import tiny
from tests.fixtures.topologies import needs_libtpu, tpu_devices
from tpu_rl import models
from tpu_rl.models import kv_cache, layers
from tpu_rl.models.attention import decode, decode_kernel
from tpu_rl.models.attention.decode import SeenTokens
from tpu_rl.models.attention.decode_kernel import DecodeConfig
from tpu_rl.train import sharding
from tpu_rl.types import UNREAD

FIRST = jnp.array([0, 0, 70, 0, 130], jnp.int32)
END = jnp.array([1, 384, 200, 129, 131], jnp.int32)


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks a row, and several uses of each buffer."""
    monkeypatch.setattr(decode_kernel, "MAX_BLOCK", 128)
    monkeypatch.setattr(decode_kernel, "MAX_BUFFERS", 4)


def paired(stack):
    """Return leaves [L, B, K / 2, S, 2 E] of leaves [L, B, K, S, E]."""

    def pair(leaf):
        tokens_first = leaf.reshape(-1, *leaf.shape[2:]).swapaxes(1, 2)
        pairs = kv_cache.pair_heads(tokens_first).swapaxes(1, 2)
        return pairs.reshape(*leaf.shape[:2], *pairs.shape[1:])

    return jax.tree.map(pair, stack)


@pytest.mark.slow
@pytest.mark.parametrize(("num_heads", "kv_heads"), [(6, 3), (8, 4)])
def test_paired_heads_and_sinks_equal_dense_attention(num_heads, kv_heads, small_blocks):
    """An odd last head stands beside zeros."""
    query, stack = operands(num_heads, kv_heads)
    sinks = random(3, num_heads)
    pairs = paired(stack)
    for name, leaf in pairs.items():
        single = kv_cache.single_heads(leaf.reshape(-1, *leaf.shape[2:]), kv_heads)
        np.testing.assert_array_equal(single.reshape(stack[name].shape), stack[name])
    seen = SeenTokens(FIRST, END)
    found = jax.jit(
        lambda: decode.decode_attention(query, pairs, 1, seen, CONFIG, kv_heads, sinks)
    )()
    wanted = reference(query, stack, 1, FIRST, END, sinks=sinks)
    np.testing.assert_allclose(found, wanted, atol=1e-6, rtol=0)
    without = reference(query, stack, 1, FIRST, END)
    assert float(jnp.abs(wanted - without).max()) > 0.1


@pytest.mark.slow
def test_ragged_rows_equal_dense_attention(small_blocks):
    query, stack = operands()
    shapes = (jnp.zeros((5, 2, 2, 8)), stack["k"])
    assert decode_kernel.make_visits(*shapes).unrolled == 2
    # What the kernel must not read is NaN: all chunks of 64 tokens in which a row sees nothing.
    chunk = jnp.arange(384)[None] // 64
    is_read = (chunk >= FIRST[:, None] // 64) & (chunk <= (END[:, None] - 1) // 64)
    unread = {
        name: jnp.where(is_read[None, :, None, :, None], leaf, jnp.nan).at[0].set(jnp.nan)
        for name, leaf in stack.items()
    }
    attend = jax.jit(lambda seen: decode.decode_attention(query, unread, 1, seen, CONFIG))
    found = attend(SeenTokens(FIRST, END))
    np.testing.assert_allclose(found, reference(query, stack, 1, FIRST, END), atol=1e-6, rtol=0)
    assert decode.read_tokens(FIRST, END, *shapes).tolist() == (is_read.sum(1)).tolist()


@pytest.mark.slow
def test_int8_cache_equals_dequantized_cache(small_blocks):
    query, stack = operands()
    numbers = {name: kv_cache.quantize(leaf) for name, leaf in stack.items()}
    rounded = {name: part * scale[..., None] for name, (part, scale) in numbers.items()}
    leaves = {name: part for name, (part, _) in numbers.items()}
    leaves |= {f"{name}_scale": scale for name, (_, scale) in numbers.items()}
    found = jax.jit(
        lambda: decode.decode_attention(query, leaves, 0, SeenTokens(FIRST, END), CONFIG)
    )()
    np.testing.assert_allclose(found, reference(query, rounded, 0, FIRST, END), atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("is_int8", [False, True])
def test_a_group_reads_its_prompt_once(is_int8, small_blocks, monkeypatch):
    """Groups of 2 and 3 rows, two at once. What nobody may read is NaN: of a prompt, all copies
    but one."""
    monkeypatch.setattr(decode_kernel, "MEMBERS", 2)
    monkeypatch.setattr(decode_kernel, "MAX_MEMBERS", 4)
    query, stack, first, end = grouped_operands()
    visits = decode_kernel.make_visits(jax.ShapeDtypeStruct((12, 2, 2, 8), "float32"), stack["k"])
    assert visits.rows == 6
    sinks = random(3, 4)
    groups = decode_kernel.find_groups(visits, PROMPT, PROMPT_TOKENS, first, end)
    assert groups.size.reshape(2, 6).max(1).tolist() == [3, 3]
    block = np.arange(4)[None]
    own = np.maximum(first[:, None] // 128, groups.shared[:, None])
    is_read = (block >= own) & (block <= np.asarray(end[:, None] - 1) // 128)
    for position in np.flatnonzero(groups.size):
        leader = position // 6 * 6 + groups.member[position]
        is_read[leader, : groups.blocks[position]] = True
    leaves = stack
    if is_int8:
        numbers = {name: kv_cache.quantize(leaf) for name, leaf in stack.items()}
        stack = {name: part * scale[..., None] for name, (part, scale) in numbers.items()}
        leaves = {name: part for name, (part, _) in numbers.items()}
        leaves |= {f"{name}_scale": scale for name, (_, scale) in numbers.items()}
    may_read = jnp.asarray(np.repeat(is_read, 128, axis=1))[None, :, None, :]
    unread = {
        name: jnp.where(may_read if leaf.ndim == 4 else may_read[..., None], leaf, jnp.nan)
        if leaf.dtype != jnp.int8
        else leaf
        for name, leaf in leaves.items()
    }
    seen = SeenTokens(first, end, groups)
    found = jax.jit(lambda: decode.decode_attention(query, unread, 1, seen, CONFIG, 2, sinks))()
    wanted = reference(query, stack, 1, first, end, sinks=sinks)
    np.testing.assert_allclose(found, wanted, atol=1e-6, rtol=0)
    shape = jax.ShapeDtypeStruct((12, 2, 2, 8), "float32")
    read = decode.read_tokens(first, end, shape, leaves["k"], groups).sum()
    assert read <= 128 * is_read.sum() < decode.read_tokens(first, end, shape, leaves["k"]).sum()


def test_groups_are_rows_of_one_prompt_in_one_part(monkeypatch):
    monkeypatch.setattr(decode_kernel, "MAX_MEMBERS", 8)
    rows = 80
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 3, rows)
    tokens = np.array([128, 127, 500])[prompt]
    first = rng.integers(0, 2, rows) * rng.integers(0, 9, rows)
    # Some see nothing beyond whole blocks.
    end = tokens // 128 * 128 + rng.integers(0, 2, rows)
    query = jax.ShapeDtypeStruct((rows, 1, 4, 128), "bfloat16")
    key = jax.ShapeDtypeStruct((1, rows, 1, 640, 128), "bfloat16")
    visits = decode_kernel.make_visits(query, key)
    assert (visits.rows, visits.block) == (40, 128)
    find = jax.jit(functools.partial(decode_kernel.find_groups, visits))
    groups = decode_kernel.Groups(*map(np.asarray, find(prompt, tokens, first, end)))
    of_row = {}
    for position in np.flatnonzero(groups.size):
        size = int(groups.size[position])
        part = position // 40 * 40
        members = part + groups.member[position : position + size]
        assert 1 < size <= decode_kernel.MAX_MEMBERS
        assert position + size <= part + 40
        assert (np.diff(members) > 0).all()
        assert len(set(prompt[members])) == 1
        assert (groups.shared[members] == groups.blocks[position]).all()
        assert groups.blocks[position] == tokens[members[0]] // 128
        of_row |= dict.fromkeys(members.tolist(), position)
    alone = set(range(rows)) - set(of_row)
    assert alone == {
        row for row in range(rows) if first[row] > 0 or tokens[row] < 128 or end[row] % 128 == 0
    }
    assert not groups.shared[sorted(alone)].any()
    for part in (0, 40):
        numbers = groups.member[part : part + 40]
        assert sorted(numbers.tolist()) == list(range(40))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", pytest.param("gpt_oss", marks=pytest.mark.nightly)])
def test_a_model_with_rings_decodes_the_same_logits(family, monkeypatch):
    """Rows of three lengths; one wraps around the ring, one is a free slot that nobody reads.

    gpt-oss has sinks, and here its heads are paired.
    """
    monkeypatch.setattr(decode_kernel, "INDEPENDENT_PRODUCTS", 1)
    made = tiny(family)
    lengths = jnp.array([254, 3, 140, 254], jnp.int32)
    tokens = jax.random.randint(jax.random.key(1), (4, 254), 2, 130)
    positions = jnp.broadcast_to(jnp.arange(254), tokens.shape)

    def decoded(model):
        cache = model.init_cache(made.params, 4, 300)
        assert cache["sliding"]["v"].shape[3] == kv_cache.ring_size(5)
        _, cache = jax.jit(model.extend)(
            made.params, cache, tokens, positions, jnp.zeros_like(tokens), lengths
        )
        step = jax.jit(model.extend)
        found = []
        for number in range(4):
            live = jnp.array([1, 1, 1, 0])
            column = (tokens[:, number] * 3 % 120)[:, None]
            branch = jnp.where(live, 0, UNREAD)[:, None]
            at = cache["lengths"][:, None]
            logits, cache = step(made.params, cache, column, at, branch, live)
            found.append(logits[:3, 0])
        return jnp.stack(found)

    kernel = models.with_attention_kernel(made.model, "interpreted").config
    attention = replace(kernel.attention, pairs_heads=family == "gpt_oss")
    found = decoded(models.decoder(replace(kernel, attention=attention)))
    np.testing.assert_allclose(found, decoded(made.model), atol=3e-6, rtol=0)


ON_MESHES = """
import jax, numpy as np
from tests.models import test_decode_attention as here
from tpu_rl.models.attention import decode, decode_kernel
from tpu_rl.train import sharding

decode_kernel.INDEPENDENT_PRODUCTS = 1
query, stack = here.operands(rows=4)
seen = here.SeenTokens(here.FIRST[:4], here.END[:4])
wanted = here.reference(query, stack, 1, seen.first, seen.end)
mesh = sharding.make_mesh(2, 1, 2)
# Heads and their keys on one device; and more devices than KV heads.
for mesh in (mesh, sharding.sampling_mesh(mesh, 4)):
    with jax.set_mesh(mesh):
        found = jax.jit(
            lambda: decode.decode_attention(query, stack, 1, seen, here.CONFIG)
        )()
        np.testing.assert_allclose(found, wanted, atol=1e-6, rtol=0)

# Pairs of heads with sinks.
query, stack = here.operands(8, 4, rows=4)
sinks, pairs = here.random(3, 8), here.paired(stack)
wanted = here.reference(query, stack, 1, seen.first, seen.end, sinks=sinks)
mesh = sharding.make_mesh(2, 1, 2)
with jax.set_mesh(mesh):
    found = jax.jit(
        lambda: decode.decode_attention(query, pairs, 1, seen, here.CONFIG, 4, sinks)
    )()
    np.testing.assert_allclose(found, wanted, atol=1e-6, rtol=0)
"""


@pytest.mark.nightly
def test_result_is_the_same_on_every_mesh():
    command, env = [sys.executable, "-c", ON_MESHES], several.virtual_devices(4)
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("places", [None, 384])
@pytest.mark.parametrize("window", [None, 100])
def test_what_a_row_sees_is_what_the_mask_says(window, places):
    lengths = jnp.array([0, 7, 99, 100, 250, 383], jnp.int32)
    positions = lengths.at[2].add(30)  # Positions need not be places.
    queries = kv_cache.query_index(lengths, positions[:, None], jnp.zeros((6, 1), jnp.int32))
    keys = kv_cache.linear_view(lengths, 384, queries).keys
    mask = np.asarray(layers.attention_mask(queries, keys, window))[:, 0]
    seen = decode.seen_tokens(lengths, positions, jnp.ones(6, bool), places, window)
    number = np.arange(384)[None]
    assert (mask == ((number >= seen.first[:, None]) & (number < seen.end[:, None]))).all()


@pytest.mark.parametrize(("longest", "rows"), [(2048, 256), (8192, 256)])
def test_long_tailed_rows_read_little_more_than_they_need(longest, rows):
    """Lengths are exponential, so few rows are long; their mean is half of the longest."""
    sample = np.random.default_rng(0).exponential(size=rows)
    lengths = np.clip(sample * longest / 2, 1, longest)
    while lengths.mean() < longest / 2:
        lengths = np.clip(lengths * 1.01, 1, longest)
    end = jnp.asarray(lengths, jnp.int32)
    query = jax.ShapeDtypeStruct((rows, 1, 4, 128), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((1, rows, 1, longest, 128), jnp.bfloat16)
    read = int(decode.read_tokens(jnp.zeros_like(end), end, query, key).sum())
    assert end.sum() < read <= 1.1 * end.sum()


@pytest.mark.parametrize(
    ("tokens", "places", "width", "sinks", "supported"),
    [
        (1, 256, 128, False, True),
        (1, 256, 256, False, True),
        (1, 256, 64, False, True),
        (1, 256, 32, False, False),
        (1, 256, 128, True, True),
        (2, 256, 128, False, False),
        (1, 200, 128, False, False),
    ],
)
def test_the_kernel_is_used_where_it_copies_nothing(tokens, places, width, sinks, supported):
    """The TPU's compiler stores narrow heads in another layout than the kernel reads, unless they
    are paired."""
    model = tiny("llama3").model
    attention = replace(
        model.config.attention, num_heads=4, num_kv_heads=2, head_dim=width, sinks=sinks
    )
    model = models.decoder(replace(model.config, attention=attention))
    config = models.with_attention_kernel(model).config
    query = jnp.zeros((1, tokens, 4, width))
    stack = kv_cache.init_cache(config, 1, places)["full"]
    stack = {"k": stack["k"][..., :places, :]}
    config = config.attention
    assert config.pairs_heads == (width == 64)
    assert decode.is_supported(config, query, stack) == supported
    assert not decode.is_supported(replace(config, kernel="none"), query, stack)


@pytest.mark.parametrize(
    ("kv_heads", "tensor", "paired"), [(8, 4, True), (8, 8, False), (3, 1, True), (3, 3, False)]
)
def test_heads_are_paired_where_a_device_holds_whole_pairs(kv_heads, tensor, paired):
    config = replace(
        tiny("llama3").model.config.attention, head_dim=64, num_heads=24, num_kv_heads=kv_heads
    )
    assert decode.can_pair_heads(config, tensor) == paired
    model = tiny("llama3").model
    model = models.decoder(replace(model.config, attention=config))
    model = models.with_attention_kernel(model, tensor=tensor)
    assert decode.has_kernel(model.config.attention) == paired
    # An int8 cache has scales of single heads.
    assert not decode.has_kernel(models.with_int8_cache(model).config.attention)


def test_an_exact_model_has_no_kernel():
    model = models.with_attention_kernel(tiny("llama3").model, "interpreted")
    assert models.with_exact_sampling(model).config.attention.kernel == "none"


def test_caches_of_the_kernel_have_whole_blocks():
    config = tiny("llama3").model.config
    config = replace(config, attention=replace(config.attention, kernel="interpreted"))
    assert kv_cache.init_cache(config, 2, 130)["full"]["k"].shape[3] == 256


@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize(
    ("group", "kv_heads", "width", "places", "dtype"),
    [
        pytest.param(7, 2, 128, 640, "bfloat16", id="qwen"),
        pytest.param(2, 4, 256, 1024, "int8", id="gemma_int8"),
        pytest.param(4, 8, 64, 640, "bfloat16", id="llama_1b_with_sinks"),
    ],
)
def test_tpu_compiler_accepts_the_kernel(topology, group, kv_heads, width, places, dtype):
    mesh = sharding.sampling_mesh(sharding.make_mesh(fsdp=4, devices=tpu_devices(topology)), 2)

    def array(shape, dtype, *axes):
        spec = sharding.spec(axes, shape, mesh)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    query = array((16, 1, group * kv_heads, width), "bfloat16", "slots", None, "heads", None)
    is_paired = width == 64
    leaf = (3, 16, kv_heads // 2 if is_paired else kv_heads, places, max(width, 128))
    sinks = array((group * kv_heads,), "bfloat16", "heads") if is_paired else None
    stack = {name: array(leaf, dtype, *decode.LEAF_AXES) for name in ("k", "v")}
    if dtype == "int8":
        for name in ("k_scale", "v_scale"):
            stack[name] = array(leaf[:-1], "float32", *decode.LEAF_AXES[:-1])
    row = array((16,), "int32", "slots")
    attention = replace(
        tiny("llama3").model.config.attention,
        num_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        pairs_heads=is_paired,
    )

    def attend(query, stack, first, end, sinks, prompt, tokens):
        how = DecodeConfig(0.1, softcap=50.0)
        seen = SeenTokens(first, end)
        seen = decode.with_groups(attention, query.dtype, stack["k"], seen, prompt, tokens)
        assert seen.groups is not None
        return decode.decode_attention(query, stack, 1, seen, how, kv_heads, sinks)

    with jax.set_mesh(mesh):
        program = jax.jit(attend).lower(query, stack, row, row, sinks, row, row).compile()
    text = program.as_text() or ""
    assert "decode_attention" in text
    # Each device computes what it holds.
    assert "all-" not in text
    assert "collective" not in text
    stats = program.memory_analysis()
    assert stats is not None
    assert stats.temp_size_in_bytes < 1 << 20
