"""What compiled programs cost: by hand, against each other, and through the TPU's compiler where it is installed."""

import math
import textwrap

import jax
import jax.numpy as jnp
import pytest

from tests.topologies import needs_libtpu, tpu_devices
from tpu_rl import compiled
from tpu_rl.compiled import CHIPS, Torus, costs, hlo
from tpu_rl.compiled.costs import Link, group_of

LAYERS, WIDTH, INNER, ROWS = 6, 64, 160, 96


def layered(scanned: bool):
    """A small residual MLP with a scalar for a result, its layers scanned or unrolled."""

    def layer(x, weights):
        into, out = weights
        return x + jnp.tanh(x @ into) @ out

    def loss(weights, x):
        if scanned:
            x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)
        else:
            for i in range(LAYERS):
                x = layer(x, jax.tree.map(lambda w, i=i: w[i], weights))
        return jnp.sum(x * x)

    return loss


def arguments():
    shapes = ((LAYERS, WIDTH, INNER), (LAYERS, INNER, WIDTH))
    return tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes), jnp.zeros((ROWS, WIDTH))


def totals(text: str, unknown_trips: int = 1) -> tuple[float, float]:
    found = compiled.operations(compiled.read(text), unknown_trips)
    return sum(one.times * one.flops for one in found), sum(one.times * one.bytes for one in found)


def both(place=lambda leaf: leaf) -> list[tuple[float, float]]:
    """(floating-point operations, bytes that products move) of the scanned program's gradient and the unrolled one's.

    Other bytes differ in truth: for the backward pass a scan also stacks what each layer leaves.
    """
    shapes = jax.tree.map(place, arguments())
    found = []
    for scanned in (True, False):
        text = jax.jit(jax.grad(layered(scanned), (0, 1))).lower(*shapes).compile().as_text()
        products = [one for one in compiled.operations(compiled.read(text)) if one.flops]
        found.append((sum(one.times * one.flops for one in products), sum(one.times * one.bytes for one in products)))
    return found


def test_scanned_layers_cost_what_unrolled_ones_do():
    scanned, unrolled = both()
    # Two products forwards, each with two of its own backwards.
    assert scanned[0] == LAYERS * 6 * 2 * ROWS * WIDTH * INNER
    assert unrolled == pytest.approx(scanned, rel=0.02)


def test_products_count_as_often_as_nested_loops_run():
    def nested(x, w):
        def inner(i, x):
            return jnp.tanh(x @ w)

        return jax.lax.while_loop(
            lambda c: c[0] < 7, lambda c: (c[0] + 1, jax.lax.fori_loop(0, 5, inner, c[1])), (0, x)
        )[1]

    x, w = jnp.ones((16, 32)), jnp.ones((32, 32))
    assert totals(jax.jit(nested).lower(x, w).compile().as_text())[0] == 7 * 5 * 2 * 16 * 32 * 32


def test_a_loop_that_may_end_early_counts_for_the_most_that_it_may_run():
    def early(x, w):
        def unfinished(carry):
            return (carry[0] < 9) & jnp.any(carry[1] > 0)

        return jax.lax.while_loop(unfinished, lambda c: (c[0] + 1, c[1] @ w), (jnp.int32(0), x))[1]

    x = jnp.ones((8, 8))
    assert totals(jax.jit(early).lower(x, x).compile().as_text())[0] == 9 * 2 * 8**3


def test_a_loop_without_a_bound_counts_as_often_as_one_says():
    def unbounded(x):
        return jax.lax.while_loop(lambda x: jnp.any(x > 0), lambda x: x @ x, x)

    text = jax.jit(unbounded).lower(jnp.ones((8, 8))).compile().as_text()
    assert totals(text)[0] == 2 * 8**3
    assert totals(text, unknown_trips=4)[0] == 4 * 2 * 8**3


def test_bytes_are_of_what_is_read_and_written():
    x = jnp.ones((256, 1024))
    copied = totals(jax.jit(lambda x: x * 2 + 1).lower(x).compile().as_text())[1]
    assert copied == 2 * x.nbytes
    # One row of a stack: not the stack.
    row = totals(jax.jit(lambda x, i: x[i] * 2).lower(x, 0).compile().as_text())[1]
    assert row < 4 * x.nbytes / 256


@pytest.mark.parametrize(
    ("start", "stop", "stride", "trips"), [(0, 8, 2, 4), (3, 10, 2, 4), (5, 0, -1, 5), (0, 0, 1, 0)]
)
def test_strides_of_loops(start, stop, stride, trips):
    def strided(x, w):
        def body(carry):
            return carry[0] + stride, carry[1] @ w

        return jax.lax.while_loop(lambda c: c[0] < stop if stride > 0 else c[0] > stop, body, (jnp.int32(start), x))[1]

    x = jnp.ones((8, 8))
    assert totals(jax.jit(strided).lower(x, x).compile().as_text(), 1000)[0] == trips * 2 * 8**3


# --- text written by hand, in the forms of other compilers -------------------------------------------------------

HEAD = "HloModule m, is_scheduled=true\n\n"


def module(text: str) -> hlo.Program:
    return compiled.read(HEAD + textwrap.dedent(text))


TPU_LOOP = """
    %fused (p0: bf16[64,1024], p1: bf16[1,1024,4096]) -> bf16[64,4096] {
      %p0 = bf16[64,1024]{1,0:T(8,128)(2,1)S(1)} parameter(0)
      %p1 = bf16[1,1024,4096]{2,1,0:T(8,128)(2,1)} parameter(1)
      %w = bf16[1024,4096]{1,0:T(8,128)(2,1)} bitcast(%p1)
      ROOT %c = bf16[64,4096]{1,0:T(8,128)(2,1)} convolution(%p0, %w), dim_labels=bf_io->bf
    }

    %body (s: (s32[], bf16[64,1024], bf16[4,64,4096])) -> (s32[], bf16[64,1024], bf16[4,64,4096]) {
      %s = (s32[]{:T(128)}, bf16[64,1024]{1,0:T(8,128)(2,1)S(1)}, bf16[4,64,4096]{2,1,0}) parameter(0)
      %i = s32[]{:T(128)} get-tuple-element(%s), index=0
      %x = bf16[64,1024]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%s), index=1
      %ws = bf16[4,64,4096]{2,1,0} get-tuple-element(%s), index=2
      %zero = s32[]{:T(128)} constant(0)
      %w = bf16[1,64,4096]{2,1,0:S(1)} dynamic-slice(%ws, %i, %zero, %zero), dynamic_slice_sizes={1,64,4096}
      %all-gather.1 = bf16[1,1024,4096]{2,1,0:T(8,128)(2,1)} all-gather(%w), channel_id=1, replica_groups=mesh['a'=16,'b'=1] {'a'}, dimensions={1}, frontend_attributes={async_collective_name="all-gather-start"}
      %y = bf16[64,4096]{1,0:T(8,128)(2,1)} fusion(%x, %all-gather.1), kind=kOutput, calls=%fused
      %one = s32[] constant(1)
      %next = s32[] add(%i, %one)
      ROOT %t = (s32[], bf16[64,1024]{1,0:S(1)}, bf16[4,64,4096]{2,1,0}) tuple(%next, %x, %ws)
    }

    %condition (s: (s32[], bf16[64,1024], bf16[4,64,4096])) -> pred[] {
      %s = (s32[]{:T(128)}, bf16[64,1024]{1,0:T(8,128)(2,1)S(1)}, bf16[4,64,4096]{2,1,0}) parameter(0)
      %i = s32[] get-tuple-element(%s), index=0
      %n = s32[] constant(4)
      ROOT %lt = pred[] compare(%i, %n), direction=LT
    }

    ENTRY %main (x: bf16[64,1024], ws: bf16[4,64,4096]) -> bf16[64,1024] {
      %x = bf16[64,1024]{1,0:S(1)} parameter(0)
      %ws = bf16[4,64,4096]{2,1,0} parameter(1)
      %zero = s32[] constant(0)
      %t = (s32[], bf16[64,1024]{1,0:S(1)}, bf16[4,64,4096]{2,1,0}) tuple(%zero, %x, %ws)
      %loop = (s32[], bf16[64,1024]{1,0:S(1)}, bf16[4,64,4096]{2,1,0}) while(%t), condition=%condition, body=%body
      ROOT %out = bf16[64,1024]{1,0:S(1)} get-tuple-element(%loop), index=1
    }
"""  # noqa: E501


def test_a_tpu_program_by_hand():
    found = compiled.operations(module(TPU_LOOP))
    assert sum(one.times * one.flops for one in found) == 4 * 2 * 64 * 1024 * 4096
    # A weight's slice is read into VMEM; gathered, it is read from the main memory, and the product written there.
    gathered, product, shard = 1024 * 4096 * 2, 64 * 4096 * 2, 64 * 4096 * 2
    assert sum(one.times * one.bytes for one in found if one.flops) == 4 * (gathered + product)
    assert sum(one.times * one.bytes for one in found if not one.flops and one.link is None) >= 4 * shard
    links = [(one.times, one.link) for one in found if one.link is not None]
    assert links == [(4, Link("all-gather", shard, tuple(range(16)), True))]


def test_a_batch_of_products_is_a_convolution_that_is_mostly_padding():
    program = module("""
        ENTRY %main (a: f32[32,8,16], b: f32[32,16,24]) -> f32[32,8,24] {
          %a = f32[32,8,16]{2,1,0} parameter(0)
          %b = f32[32,16,24]{2,1,0} parameter(1)
          ROOT %c = f32[32,8,24]{2,1,0} convolution(%a, %b), window={size=32 stride=31 pad=0_0 lhs_dilate=32}, dim_labels=0bf_0io->0bf
        }
    """)  # noqa: E501
    assert sum(one.flops for one in compiled.operations(program)) == 2 * 32 * 8 * 16 * 24


def test_a_window_counts_only_what_meets_the_input():
    padded = costs._Window(stride=1, low=1)
    assert costs._valid_positions(5, 3, 5, padded) == 4 + 5 + 4
    assert costs._valid_positions(8, 2, 4, costs._Window(stride=2)) == 8


@pytest.mark.parametrize(
    ("attributes", "group"),
    [
        (", replica_groups={{0,2},{1,3}}, dimensions={0}", (0, 2)),
        (", replica_groups=[2,4]<=[8], dimensions={0}", (0, 1, 2, 3)),
        (", replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}", (0, 4)),
        (", replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, use_global_device_ids=true", (0, 1, 2, 3)),
        (", replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}, use_global_device_ids=true", (0, 4)),
        (", source_target_pairs={{0,1},{1,2},{2,0}}", (0, 1)),
    ],
)
def test_groups_in_every_form_that_xla_writes(attributes, group):
    assert group_of(attributes) == group


def test_one_collective_cut_into_several_fusions_counts_once():
    piece = """
        %part{n} (p: bf16[64]) -> bf16[1024] {{
          %p = bf16[64]{{0}} parameter(0)
          ROOT %g = bf16[1024]{{0}} all-gather(%p), channel_id=3, replica_groups=[1,16]<=[16], dimensions={{0}}, frontend_attributes={{chain_id="0"}}
        }}
    """  # noqa: E501
    program = module(
        "".join(textwrap.dedent(piece.format(n=n)) for n in range(2))
        + """
ENTRY %main (x: bf16[64]) -> bf16[1024] {
  %x = bf16[64]{0} parameter(0)
  %a = bf16[1024]{0} fusion(%x), kind=kCustom, calls=%part0
  ROOT %b = bf16[1024]{0} fusion(%x), kind=kCustom, calls=%part1
}
"""
    )
    links = [one.link for one in compiled.operations(program) if one.link]
    assert links == [Link("all-gather", 128, tuple(range(16)), True)]


def test_a_kernel_counts_what_it_says_of_itself_or_is_named():
    program = module("""
        ENTRY %main (x: bf16[64]) -> bf16[64] {
          %x = bf16[64]{0} parameter(0)
          %k = bf16[64]{0} custom-call(%x), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/known"}, backend_config={"custom_call_config":{"cost_estimate":{"flops":"4096","bytes_accessed":"10"}}}
          ROOT %u = bf16[64]{0} custom-call(%k), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/silent"}
        }
    """)  # noqa: E501
    found = {one.name: one for one in compiled.operations(program)}
    assert found["jit(f)/known"].flops == 4096
    assert not found["jit(f)/known"].uncounted
    assert found["jit(f)/silent"].uncounted


# --- time --------------------------------------------------------------------------------------------------------


def grid(x: int, y: int, kind: str = "v5e") -> Torus:
    return Torus([(i, j, 0) for i in range(x) for j in range(y)], CHIPS[kind])


def test_a_collective_uses_the_links_of_its_box():
    rate, size = CHIPS["v5e"].link_rate, 1e9
    row = Link("all-gather", int(size), tuple(range(4)), False)
    assert compiled.link_seconds(row, grid(4, 4)) == pytest.approx(3 * size / rate, rel=1e-3)
    whole = Link("all-gather", int(size), tuple(range(16)), False)
    assert compiled.link_seconds(whole, grid(4, 4)) == pytest.approx(15 * size / (2 * rate), rel=1e-3)
    # Sixteen in a line are a ring, which has a link both ways; a reduction goes round twice.
    ring = Link("all-reduce", int(size), tuple(range(16)), False)
    assert compiled.link_seconds(ring, grid(16, 16)) == pytest.approx(2 * 15 / 16 * size / (2 * rate), rel=1e-3)


def test_cubes_wrap_in_all_dimensions():
    cube = Torus([(i, j, k) for i in range(4) for j in range(4) for k in range(4)], CHIPS["v5p"])
    all_of_it = Link("reduce-scatter", 10**9, tuple(range(64)), False)
    assert compiled.link_seconds(all_of_it, cube) == pytest.approx(63 / 64 * 1e9 / (6 * 100e9), rel=1e-2)


def test_only_what_computation_does_not_hide_is_exposed():
    chip = CHIPS["v5e"]
    work = costs.Operation(10, chip.peak * 1e-3, 0, None, "body", "dot")
    link = Link("all-gather", int(1e-3 * chip.link_rate / 3), (0, 1, 2, 3), True)
    other = costs.Operation(10, 0, 0, link, "body", "gather")
    found = compiled.estimate([work, other], grid(4, 1))
    assert found.exposed_seconds == pytest.approx(0, abs=1e-4)
    assert found.seconds == pytest.approx(10e-3, rel=0.01)
    waiting = other._replace(link=link._replace(overlaps=False))
    assert compiled.estimate([work, waiting], grid(4, 1)).seconds == pytest.approx(20e-3, rel=0.01)


# --- the TPU's compiler ------------------------------------------------------------------------------------------


@needs_libtpu
@pytest.mark.timeout(900)  # three minutes of the compiler's, and nobody else's, time
def test_scanned_layers_cost_what_unrolled_ones_do_on_a_tpu():
    mesh = jax.sharding.Mesh(tpu_devices("v5e:2x2"), ("x",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def place(leaf):
        shape = (*leaf.shape[:-2], 8 * leaf.shape[-2], 8 * leaf.shape[-1])
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=everywhere)

    scanned, unrolled = both(place)
    assert scanned[0] == LAYERS * 6 * 2 * ROWS * WIDTH * INNER * math.prod([8, 8, 8])
    assert unrolled[0] == pytest.approx(scanned[0], rel=0.02)
