"""Exact sampling: the same attention as the reference, and equal bits in cache and packed rows."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from tests.fixtures import attention_rows as here
from tests.fixtures.decoders import tiny
from tests.fixtures.topologies import needs_libtpu, tpu_devices
from tpu_rl import cost_model, models
from tpu_rl.commands import config
from tpu_rl.errors import InputError
from tpu_rl.models import exact, layers
from tpu_rl.runtime import host
from tpu_rl.sums import tree_sum
from tpu_rl.train import packing
from tpu_rl.types import Paths

TREE = {
    "parent": np.array([0, 0, 1, 0]),
    "shared": np.array([0, 5, 9, 5]),
}
"""Row 1 leaves row 0 after 5 tokens, row 2 leaves row 1 after 9, and row 3 leaves row 0 after 5."""


def tree_layout(row_length: int = 64):
    mask = np.zeros((4, 20), bool)
    for row, (start, end) in enumerate([(5, 20), (5, 14), (9, 17), (5, 6)]):
        mask[row, start:end] = True
    group = np.zeros(4, np.int32)
    return packing.assign_slots(
        mask, group, row_length=row_length, micro_batch_rows=1, paths=True, **TREE
    )


def test_paths_list_each_token_once_as_a_query_and_its_sequence_as_keys():
    layout = tree_layout()
    assert layout.paths is not None
    queries, keys = layout.paths.queries[0, 0, 0], layout.paths.keys[0, 0, 0]
    used = np.flatnonzero(layout.segment_ids[0, 0, 0])
    assert sorted(queries[queries < 64]) == used.tolist()
    positions = np.append(layout.positions[0, 0, 0], -1)
    previous = layout.previous[0, 0, 0]
    for tile_queries, tile_keys in zip(queries, keys, strict=True):
        sequence = tile_keys[tile_keys < 64]
        np.testing.assert_array_equal(positions[sequence], np.arange(len(sequence)))
        np.testing.assert_array_equal(previous[sequence[1:]], sequence[:-1])
        count = (tile_queries < 64).sum()
        np.testing.assert_array_equal(tile_queries[:count], sequence[len(sequence) - count :])


SINKS = jnp.array([0.5, -2.0, 1.0, 3.0])


@pytest.mark.nightly
@pytest.mark.parametrize(("window", "has_sinks"), [(None, False), (4, True)])
def test_attention_of_paths_is_that_of_the_reference(window, has_sinks):
    layout = tree_layout()
    row = jax.tree.map(lambda leaf: jnp.asarray(leaf)[0, 0], layout.rows(jnp.zeros((4, 20))))
    slots = layers.TokenIndex(
        jnp.arange(64)[None], row.positions, row.segment_ids, row.visible_until
    )
    noise = np.random.default_rng(0)
    query, key, value, weight = (
        jnp.asarray(noise.normal(size=(1, 64, heads, 8)), jnp.float32) for heads in (4, 2, 2, 4)
    )
    key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
    weight = weight * (row.segment_ids > 0)[..., None, None]
    settings = {"scale": 0.3, "sliding_window": window, "softcap": 5.0}

    def of_reference(query, key, value, sinks):
        rules = settings | {"sinks": sinks}
        attended = layers.dense_attention(query, key, value, slots, slots, **rules)
        return (attended * weight).sum(), attended

    def of_paths(query, key, value, sinks):
        paths: Paths = row.paths
        rules = settings | {"sinks": sinks}
        attended = exact.path_attention(query, key, value, slots, paths, **rules)
        return (attended * weight).sum(), attended

    arguments = (query, key, value, SINKS if has_sinks else None)
    operands = (0, 1, 2, 3) if has_sinks else (0, 1, 2)
    found, found_gradients = jax.value_and_grad(of_paths, operands, has_aux=True)(*arguments)
    wanted, gradients = jax.value_and_grad(of_reference, operands, has_aux=True)(*arguments)
    is_token = np.asarray(row.segment_ids[0]) > 0
    np.testing.assert_allclose(found[1][0, is_token], wanted[1][0, is_token], atol=2e-6)
    for found_gradient, gradient in zip(found_gradients, gradients, strict=True):
        np.testing.assert_allclose(found_gradient, gradient, atol=1e-5)


@pytest.mark.slow
def test_an_exact_model_has_the_hidden_states_and_gradients_of_the_plain_one():
    model = tiny("llama3").model
    here.require_same(here.of_model(models.with_exact_sampling(model)), here.of_model(model))


@pytest.mark.slow
def test_a_block_that_a_query_does_not_see_changes_no_bit():
    keys = [here.heads(seed, 2, 200, jnp.bfloat16).swapaxes(1, 2) for seed in (1, 2)]
    query = here.heads(3, 4, 200, jnp.bfloat16)

    def index(start, stop):
        slots = jnp.broadcast_to(jnp.arange(start, stop), (2, stop - start))
        return layers.TokenIndex(slots, slots, jnp.ones_like(slots), jnp.full_like(slots, 999))

    rules = {"scale": 0.4, "sinks": SINKS}
    whole = exact.attention(query, *keys, index(0, 200), index(0, 200), **rules)
    short = [part[:, :, :130] for part in keys]
    some = exact.attention(query[:, 60:130], *short, index(60, 130), index(0, 130), **rules)
    np.testing.assert_array_equal(some, whole[:, 60:130])


@pytest.mark.slow
def test_a_tree_sum_adds_halves():
    numbers = np.random.default_rng(0).normal(size=(3, 37)).astype(np.float32)
    np.testing.assert_allclose(tree_sum(jnp.asarray(numbers)), numbers.sum(1), rtol=1e-5)
    assert tree_sum(jnp.float32([1e8, 1.0, -1e8])) == 1.0
    assert jnp.float32(1e8) + 1 - jnp.float32(1e8) == 0


@pytest.mark.parametrize(
    "flags",
    [
        ["--sampling.kv-cache-dtype", "int8"],
        ["--sampling.weight-dtype", "int8"],
        ["--sampling.tensor-parallel", "2"],
        ["--mesh.context", "2", "--batch.row-length", "1024"],
        ["--model.attention", "cudnn"],
    ],
)
def test_settings_that_change_the_order_of_sums_are_refused(flags):
    with pytest.raises(InputError, match="exact.sampling and"):
        config.parse(["arithmetic_grpo", "--model.exact-sampling", *flags])


@pytest.mark.parametrize(
    ("equation", "axes", "shape"),
    [
        ("btd,hed->bthe", ("heads", "head_dim", "embed"), (2, 4, 2048)),
        ("btd,df->btf", ("embed", "mlp"), (2048, 8)),
        ("bthe,hed->btd", ("heads", "value_dim", "embed"), (32, 64, 8)),
        ("btf,fd->btd", ("mlp", "embed"), (3000, 8)),
    ],
)
def test_a_sum_in_blocks_is_the_sum(equation, axes, shape):
    generator = np.random.default_rng(0)
    weight = generator.standard_normal(shape, np.float32)
    inputs = shape[-1:] if equation.startswith("btd,h") else shape[:-1]
    x = generator.standard_normal((2, 3, *inputs), np.float32)
    blocked = exact.blocked_einsum(equation, axes, jnp.asarray(x), jnp.asarray(weight))
    expected = np.einsum(equation, x.astype(float), weight.astype(float))
    np.testing.assert_allclose(blocked, expected, atol=2e-4)
    program = jax.make_jaxpr(lambda *terms: exact.blocked_einsum(equation, axes, *terms))(x, weight)
    assert any(step.primitive.name == "scan" for step in program.eqns)


@pytest.mark.slow
def test_logits_in_blocks_are_the_logits(monkeypatch):
    """The last block of 40 ids repeats 24 of the one before."""
    monkeypatch.setattr(exact, "VOCAB_BLOCK", 40)
    monkeypatch.setattr(exact, "SUM_BLOCK", 128)
    generator = np.random.default_rng(0)
    hidden = jnp.asarray(generator.standard_normal((2, 3, 384), np.float32))
    matrix = jnp.asarray(generator.standard_normal((56, 384), np.float32))
    weight = generator.standard_normal((2, 3, 56), np.float32)

    def of(unembed):
        return jax.value_and_grad(lambda *terms: (unembed(*terms) * weight).sum(), (0, 1))

    blocked, plain = (of(unembed) for unembed in (exact.blocked_unembed, exact.unembed))
    np.testing.assert_allclose(
        exact.blocked_unembed(hidden, matrix), exact.unembed(hidden, matrix), atol=1e-4
    )
    for gradient, expected in zip(
        blocked(hidden, matrix)[1], plain(hidden, matrix)[1], strict=True
    ):
        np.testing.assert_allclose(gradient, expected, atol=1e-4)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("dtype", "families"),
    [
        pytest.param("float32", ["products"], marks=pytest.mark.slow),
        pytest.param("float32", ["qwen3"], marks=pytest.mark.nightly),
        pytest.param("bfloat16", ["products", "gemma3", "gemma4"], marks=pytest.mark.nightly),
        pytest.param("float32", ["llama3", "gemma2", "gemma4_small"], marks=pytest.mark.nightly),
    ],
)
def test_sampler_and_packed_rows_have_equal_bits(dtype, families):
    """In a process of its own, because XLA reads its flags once."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    environment.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)
    lines = subprocess.run(
        [sys.executable, "-m", "tests.fixtures.exact_bits", dtype, *families],
        env=environment | host.exact_settings(environment),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert [line.split()[0] for line in lines] == families
    for line in lines:
        _, tokens, alone, beside_a_gradient = line.split()
        assert int(tokens) > 300
        assert (alone, beside_a_gradient) == ("0", "0"), line


@needs_libtpu
@pytest.mark.nightly
@pytest.mark.parametrize("is_cached", [True, False])
def test_the_tpu_compiler_keeps_the_written_order_of_sums(is_cached):
    """It turns no tree of additions into a reduction, whose order would be its own. Sums over an
    MLP are in blocks."""
    config = tiny("qwen3").model.config
    wide = replace(config, mlp=replace(config.mlp, intermediate_size=2 * exact.SUM_BLOCK))
    model = models.with_exact_sampling(models.decoder(wide))
    device = SingleDeviceSharding(tpu_devices("v5e:2x2")[0])

    def placed(tree):
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), tree
        )

    params = placed(jax.eval_shape(model.init, jax.random.key(0)))
    if is_cached:
        cache = placed(jax.eval_shape(lambda: model.init_cache(params, 8, 256)))
        column, row = placed((jnp.zeros((8, 1), jnp.int32), jnp.zeros(8, jnp.int32)))
        program = jax.jit(model.extend).lower(params, cache, column, column, column, row)
    else:
        rows = jax.tree.map(
            lambda leaf: leaf[0, 0], tree_layout().rows(jnp.zeros((4, 20), "int32"))
        )
        role = models.role(model, lambda params: params)
        program = jax.jit(role.hidden).lower(params, placed(rows))
    text = program.compile().as_text() or ""
    assert "btzf,zfd->zbtd" in text
    assert "btf,fd->btd" not in text
    assert ("btd,zvd->btzv" in text) == is_cached
    assert "btd,vd->btv" not in text
    read = cost_model.read(text)
    sums = []
    for computation in read.computations.values():
        for instruction in computation.instructions.values():
            of_floats = instruction.opcode == "reduce" and instruction.shapes[0].dtype == "f32"
            if of_floats and not instruction.op_name.endswith("reduce_max"):
                operand = computation.instructions[instruction.operands[0]]
                sums.append(operand.shapes[0].elements / instruction.shapes[0].elements)
    # Reductions of one number each, which the compiler makes of reshapes.
    assert set(sums) <= {1.0}
    additions = [
        instruction
        for computation in read.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode == "add" and instruction.op_name.endswith("norm/add")
    ]
    assert len(additions) > 6
