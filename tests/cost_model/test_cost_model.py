"""Costs of compiled programs: counted by hand, compared with each other, and read from the TPU
compiler where it is installed."""

import math
import textwrap

import jax
import jax.numpy as jnp
import pytest

from tests.fixtures.topologies import needs_libtpu, tpu_devices
from tpu_rl import cost_model
from tpu_rl.cost_model import CHIPS, GPUS, Torus, costs, hlo, topologies
from tpu_rl.cost_model.costs import Link, group_of
from tpu_rl.errors import InputError

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
    return tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes), jnp.zeros(
        (ROWS, WIDTH)
    )


def total_bytes(operations) -> float:
    return sum(operation.times * operation.bytes for operation in operations)


def flops_and_bytes(text: str, unknown_trips: int = 1) -> tuple[float, float]:
    operations = cost_model.operations(cost_model.read(text), unknown_trips)
    return cost_model.total_flops(operations), total_bytes(operations)


def flops_of(function, *arguments, unknown_trips: int = 1) -> float:
    text = jax.jit(function).lower(*arguments).compile().as_text()
    return flops_and_bytes(text, unknown_trips)[0]


def scanned_and_unrolled(place=lambda leaf: leaf) -> list[tuple[float, float]]:
    """Return (FLOPs, bytes that matrix products move) of the gradients of both programs.

    The other bytes really differ: for the backward pass a scan also stacks what each layer keeps.
    """
    shapes = jax.tree.map(place, arguments())
    results = []
    for scanned in (True, False):
        text = jax.jit(jax.grad(layered(scanned), (0, 1))).lower(*shapes).compile().as_text()
        operations = cost_model.operations(cost_model.read(text))
        products = [operation for operation in operations if operation.flops]
        results.append((cost_model.total_flops(products), total_bytes(products)))
    return results


def test_scanned_layers_cost_as_much_as_unrolled_layers():
    scanned, unrolled = scanned_and_unrolled()
    # Two products forward, each with two backward.
    assert scanned[0] == LAYERS * 6 * 2 * ROWS * WIDTH * INNER
    assert unrolled == pytest.approx(scanned, rel=0.02)


def test_flops_in_nested_loops_count_once_per_iteration():
    def nested(x, w):
        def inner(i, x):
            return jnp.tanh(x @ w)

        return jax.lax.while_loop(
            lambda c: c[0] < 7, lambda c: (c[0] + 1, jax.lax.fori_loop(0, 5, inner, c[1])), (0, x)
        )[1]

    x, w = jnp.ones((16, 32)), jnp.ones((32, 32))
    assert flops_of(nested, x, w) == 7 * 5 * 2 * 16 * 32 * 32


def test_a_loop_that_may_end_early_counts_its_maximum():
    def early(x, w):
        def unfinished(carry):
            return (carry[0] < 9) & jnp.any(carry[1] > 0)

        return jax.lax.while_loop(unfinished, lambda c: (c[0] + 1, c[1] @ w), (jnp.int32(0), x))[1]

    x = jnp.ones((8, 8))
    assert flops_of(early, x, x) == 9 * 2 * 8**3


def test_a_loop_without_a_bound_runs_unknown_trips():
    def unbounded(x):
        return jax.lax.while_loop(lambda x: jnp.any(x > 0), lambda x: x @ x, x)

    x = jnp.ones((8, 8))
    assert flops_of(unbounded, x) == 2 * 8**3
    assert flops_of(unbounded, x, unknown_trips=4) == 4 * 2 * 8**3


def test_bytes_are_those_read_and_written():
    x = jnp.ones((256, 1024))
    copied = flops_and_bytes(jax.jit(lambda x: x * 2 + 1).lower(x).compile().as_text())[1]
    assert copied == 2 * x.nbytes
    # Reading one row of an array does not read the array.
    row = flops_and_bytes(jax.jit(lambda x, i: x[i] * 2).lower(x, 0).compile().as_text())[1]
    assert row < 4 * x.nbytes / 256


@pytest.mark.parametrize(
    ("start", "stop", "stride", "trips"), [(0, 8, 2, 4), (3, 10, 2, 4), (5, 0, -1, 5), (0, 0, 1, 0)]
)
def test_trip_counts_respect_strides(start, stop, stride, trips):
    def strided(x, w):
        def body(carry):
            return carry[0] + stride, carry[1] @ w

        return jax.lax.while_loop(
            lambda c: c[0] < stop if stride > 0 else c[0] > stop, body, (jnp.int32(start), x)
        )[1]

    x = jnp.ones((8, 8))
    assert flops_of(strided, x, x, unknown_trips=1000) == trips * 2 * 8**3


# --- HLO written by hand, in the forms of other compilers ---

HEAD = "HloModule m, is_scheduled=true\n\n"


def module(text: str) -> hlo.Program:
    return cost_model.read(HEAD + textwrap.dedent(text))


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


def test_costs_of_a_tpu_loop_counted_by_hand():
    operations = cost_model.operations(module(TPU_LOOP))
    assert cost_model.total_flops(operations) == 4 * 2 * 64 * 1024 * 4096
    # The shard of a weight is read into VMEM. The gathered weight is read from main memory, and the
    # product is written there.
    gathered = 1024 * 4096 * 2
    product = 64 * 4096 * 2
    shard = 64 * 4096 * 2
    products = [operation for operation in operations if operation.flops]
    assert total_bytes(products) == 4 * (gathered + product)
    others = [op for op in operations if not op.flops and op.link is None]
    assert total_bytes(others) >= 4 * shard
    links = [(operation.times, operation.link) for operation in operations if operation.link]
    assert links == [(4, Link("all-gather", shard, tuple(range(16)), True))]


def test_padding_of_a_batched_convolution_costs_no_flops():
    program = module("""
        ENTRY %main (a: f32[32,8,16], b: f32[32,16,24]) -> f32[32,8,24] {
          %a = f32[32,8,16]{2,1,0} parameter(0)
          %b = f32[32,16,24]{2,1,0} parameter(1)
          ROOT %c = f32[32,8,24]{2,1,0} convolution(%a, %b), window={size=32 stride=31 pad=0_0 lhs_dilate=32}, dim_labels=0bf_0io->0bf
        }
    """)  # noqa: E501
    assert cost_model.total_flops(cost_model.operations(program)) == 2 * 32 * 8 * 16 * 24


def test_windows_count_only_positions_inside_the_input():
    padded = costs._Window(stride=1, low_padding=1)
    assert costs._valid_positions(5, 3, 5, padded) == 4 + 5 + 4
    assert costs._valid_positions(8, 2, 4, costs._Window(stride=2)) == 8


@pytest.mark.parametrize(
    ("attributes", "group"),
    [
        (", replica_groups={{0,2},{1,3}}, dimensions={0}", (0, 2)),
        (", replica_groups=[2,4]<=[8], dimensions={0}", (0, 1, 2, 3)),
        (", replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}", (0, 4)),
        (
            ", replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, use_global_device_ids=true",
            (0, 1, 2, 3),
        ),
        (
            ", replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}, use_global_device_ids=true",
            (0, 4),
        ),
        (", source_target_pairs={{0,1},{1,2},{2,0}}", (0, 1)),
    ],
)
def test_replica_groups_are_parsed_in_every_form(attributes, group):
    assert group_of(attributes) == group


def test_a_collective_split_into_fusions_counts_once():
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
    links = [op.link for op in cost_model.operations(program) if op.link]
    assert links == [Link("all-gather", 128, tuple(range(16)), True)]


def test_kernels_count_their_own_estimate_or_are_uncounted():
    program = module("""
        ENTRY %main (x: bf16[64]) -> bf16[64] {
          %x = bf16[64]{0} parameter(0)
          %k = bf16[64]{0} custom-call(%x), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/known"}, backend_config={"custom_call_config":{"cost_estimate":{"flops":"4096","bytes_accessed":"10"}}}
          ROOT %u = bf16[64]{0} custom-call(%k), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/silent"}
        }
    """)  # noqa: E501
    by_name = {operation.name: operation for operation in cost_model.operations(program)}
    assert by_name["jit(f)/known"].flops == 4096
    assert not by_name["jit(f)/known"].uncounted
    assert by_name["jit(f)/silent"].uncounted


@pytest.mark.parametrize(
    ("name", "filled"),
    [("decode_attention", 25), ("decode_attention_window", 100), ("decode_experts", 100)],
)
def test_a_decode_kernel_reads_what_it_states_and_less_of_emptier_caches(name, filled):
    cost = '{"cost_estimate":{"flops":"400","bytes_accessed":"100"}}'
    attributes = (
        'custom_call_target="tpu_custom_call", '
        f'metadata={{op_name="jit(f)/{name}/pallas_call"}}, '
        f'backend_config={{"custom_call_config":{cost}}}'
    )
    program = module(f"""
        ENTRY %main (cache: bf16[64,64]) -> bf16[8] {{
          %cache = bf16[64,64]{{1,0}} parameter(0)
          ROOT %k = bf16[8]{{0}} custom-call(%cache), {attributes}
        }}
    """)
    operations = cost_model.operations(program)
    assert total_bytes(operations) == 100
    quarter = cost_model.with_cache_fill(operations, 0.25)
    assert (total_bytes(quarter), cost_model.total_flops(quarter)) == (filled, 4 * filled)


@pytest.mark.parametrize(("file", "read"), [("decode_kernel.py", 100), ("other.py", 8208)])
def test_a_decode_kernel_without_its_name_is_known_by_its_file(file, read):
    """As jax 0.7.2 writes it."""
    attributes = (
        'custom_call_target="tpu_custom_call", '
        f'metadata={{op_name="jit(f)/attend/pallas_call" source_file="models/attention/{file}"}}, '
        'backend_config={"custom_call_config":{"cost_estimate":{"bytes_accessed":"100"}}}'
    )
    program = module(f"""
        ENTRY %main (cache: bf16[64,64]) -> bf16[8] {{
          %cache = bf16[64,64]{{1,0}} parameter(0)
          ROOT %k = bf16[8]{{0}} custom-call(%cache), {attributes}
        }}
    """)
    assert total_bytes(cost_model.operations(program)) == read


def test_bytes_are_followed_through_nested_fusions():
    """A nested fusion that only renames a parameter: who reads its result reads the parameter."""
    program = module("""
        %renamed (p: bf16[8,256]) -> bf16[2048] {
          %p = bf16[8,256]{1,0} parameter(0)
          ROOT %b = bf16[2048]{0} bitcast(%p)
        }

        %outer (p: bf16[8,256], x: bf16[2048]) -> bf16[2048] {
          %p = bf16[8,256]{1,0} parameter(0)
          %x = bf16[2048]{0} parameter(1)
          %weights = bf16[2048]{0} fusion(%p), kind=kLoop, calls=%renamed
          ROOT %sum = bf16[2048]{0} add(%weights, %x)
        }

        ENTRY %main (p: bf16[8,256], x: bf16[2048]) -> bf16[2048] {
          %p = bf16[8,256]{1,0} parameter(0)
          %x = bf16[2048]{0:S(1)} parameter(1)
          ROOT %y = bf16[2048]{0:S(1)} fusion(%p, %x), kind=kLoop, calls=%outer
        }
    """)
    assert total_bytes(cost_model.operations(program)) == 2 * 2048


def test_a_copy_that_aliases_its_operand_reads_nothing():
    """The TPU's compiler gives stacked int8 weights another tiling so, and then slices them."""

    def read(attributes):
        return total_bytes(
            cost_model.operations(
                module(f"""
        %tiled (p: s8[8,32,256]) -> s8[8,32,256] {{
          %p = s8[8,32,256]{{2,1,0}} parameter(0)
          ROOT %copy = s8[8,32,256]{{2,1,0}} copy(%p)
        }}

        %outer (p: s8[8,32,256], layer: s32[]) -> s8[1,32,256] {{
          %p = s8[8,32,256]{{2,1,0}} parameter(0)
          %layer = s32[] parameter(1)
          %zero = s32[] constant(0)
          %stack = s8[8,32,256]{{2,1,0}} fusion(%p), kind=kLoop{attributes}, calls=%tiled
          ROOT %one = s8[1,32,256]{{2,1,0}} dynamic-slice(%stack, %layer, %zero, %zero)
        }}

        ENTRY %main (p: s8[8,32,256], layer: s32[]) -> s8[1,32,256] {{
          %p = s8[8,32,256]{{2,1,0}} parameter(0)
          %layer = s32[]{{:S(1)}} parameter(1)
          ROOT %y = s8[1,32,256]{{2,1,0:S(1)}} fusion(%p, %layer), kind=kLoop, calls=%outer
        }}
    """)
            )
        )

    layer = 32 * 256
    assert read("") == 8 * layer
    assert read(", output_to_operand_aliasing={{}: (0, {})}") == layer


def test_the_condition_of_a_loop_runs_once_more_than_its_body():
    text = TPU_LOOP.replace(
        "%n = s32[] constant(4)",
        "%n = s32[] constant(4)\n"
        "      %any = s32[] all-reduce(%n), channel_id=9, replica_groups={{0,1}}, to_apply=%or",
    )
    links = [(op.times, op.link.kind) for op in cost_model.operations(module(text)) if op.link]
    assert links == [(4, "all-gather"), (5, "all-reduce")]


def test_tiles_pad_the_arrays_that_do_not_fill_them():
    shapes = hlo._shapes(
        "(bf16[2,3,5,64]{2,1,3,0:T(8,128)(2,1)}, bf16[16,8,2048,64]{3,2,1,0:T(8,128)},"
        " s32[300]{0:T(128)}, f32[5,7]{1,0}, pred[]{:T(128)})"
    )
    # The fastest dimension of the first has 5 elements in 128 lanes, the next 3 in 8 sublanes.
    sizes = [2 * 2 * 64 * 8 * 128, 2 * 16 * 8 * 2048 * 128, 4 * 384, 4 * 35, 1]
    assert [shape.bytes for shape in shapes] == sizes
    assert shapes[1].logical_bytes == sizes[1] // 2
    # A part has its share of the padding, but does not fill tiles of its own.
    row = hlo._shapes("bf16[1,8,1,64]{3,2,1,0:T(8,128)}")
    assert costs._part_bytes(row, shapes[1:2]) == 2 * 8 * 128


def test_the_expected_time_is_the_compilers_cycles_and_at_least_that_of_the_bytes():
    program = module("""
        %doubled (p: bf16[4096]) -> bf16[4096] {
          %p = bf16[4096]{0} parameter(0)
          ROOT %d = bf16[4096]{0} add(%p, %p)
        }

        ENTRY %main (x: bf16[4096]) -> bf16[4096] {
          %x = bf16[4096]{0} parameter(0)
          %a = bf16[4096]{0} fusion(%x), kind=kLoop, calls=%doubled, backend_config={"window_config":{"estimated_cycles":"3000"}}
          ROOT %k = bf16[4096]{0:S(1)} custom-call(%a), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"cost_estimate":{"flops":"197000000","bytes_accessed":"10"}}}
        }
    """)  # noqa: E501
    operations = cost_model.operations(program)
    estimate = cost_model.estimate(operations, grid(1, 1))
    # 3000 cycles at 1.5 GHz, and a kernel whose products take a microsecond.
    assert estimate.expected_seconds == pytest.approx(3e-6)
    assert estimate.seconds < estimate.expected_seconds
    silent = [operation._replace(cycles=None) for operation in operations]
    assert cost_model.estimate(silent, grid(1, 1)).expected_seconds is None
    hasty = [operation._replace(flops=0, cycles=1.0) for operation in operations]
    moved = total_bytes(operations) / CHIPS["v5e"].memory_rate
    assert cost_model.estimate(hasty, grid(1, 1)).expected_seconds == pytest.approx(moved)


def test_a_kernel_is_expected_to_take_the_cycles_that_it_states():
    program = module("""
        ENTRY %main (x: bf16[4096]) -> bf16[4096] {
          %x = bf16[4096]{0} parameter(0)
          %k = bf16[4096]{0} custom-call(%x), custom_call_target="tpu_custom_call", \
            frontend_attributes={kernel_metadata={
        "author":"me",
        "cycles":"3000"
        }}, metadata={op_name="jit(f)/kernel"}, backend_config={"custom_call_config":\
            {"cost_estimate":{"flops":"197000000","bytes_accessed":"10"}}}
          ROOT %r = bf16[4096]{0} negate(%k)
        }
    """)
    kernel, _ = operations = cost_model.operations(program)
    assert (kernel.name, kernel.flops, kernel.cycles) == ("jit(f)/kernel", 197e6, 3000)
    assert cost_model.estimate(operations[:1], grid(1, 1)).expected_seconds == pytest.approx(2e-6)
    assert cost_model.estimate(operations[:1], grid(1, 1)).seconds == pytest.approx(1e-6)


def test_collectives_between_slices_go_over_the_network():
    program = module("""
        ENTRY %main (x: f32[256,1024]) -> f32[256,1024] {
          %x = f32[256,1024]{1,0:T(8,128)} parameter(0)
          %token = token[] after-all()
          %sent = (f32[256,1024]{1,0:T(8,128)}, u32[], token[]) send(%x, %token), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
          %done = token[] send-done(%sent), channel_id=2
          ROOT %y = f32[256,1024]{1,0:T(8,128)} copy(%x)
        }
    """)  # noqa: E501
    (link,) = (op.link for op in cost_model.operations(program) if op.link)
    assert link == Link("all-reduce", 2**20, (0, 1), True, slices=2)
    seconds = cost_model.link_seconds(link, grid(2, 2))
    assert seconds == pytest.approx(2**20 / CHIPS["v5e"].network_rate, rel=0.05)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("v5e:4x4", "v5e:4x4"),
        ("v5litepod-16", "v5e:4x4"),
        ("V6E-8", "v6e:2x4"),
        ("v5p-8", "v5p:2x2x1"),
        ("v5p-512", "v5p:4x8x8"),
        ("v4-384", "v4:4x4x12"),
        ("2*v5p-128", "2*v5p:4x4x4"),
        ("v7x:2x2x1", "tpu7x:2x2x1"),
    ],
)
def test_topologies_have_the_names_of_the_cloud(text, name):
    assert str(topologies.parse(text)) == name


@pytest.mark.parametrize("text", ["v5e-12", "v5p-6", "v9:2x2", "v5e", "tpu7x-128", "0*v5e:2x2"])
def test_names_of_no_topology_are_refused(text):
    with pytest.raises(InputError) as error:
        topologies.parse(text)
    assert error.value.fix


def test_a_number_of_slices_may_be_given_apart():
    assert str(topologies.parse("v5e-4", slices=3)) == "3*v5e:2x2"
    with pytest.raises(InputError, match="contradict"):
        topologies.parse("2*v5e:2x2", slices=3)


# --- time ---


def grid(x: int, y: int, kind: str = "v5e") -> Torus:
    return Torus([(i, j, 0) for i in range(x) for j in range(y)], CHIPS[kind])


def test_a_collective_uses_the_links_of_its_box():
    rate = CHIPS["v5e"].link_rate
    size = 1e9
    row = Link("all-gather", int(size), tuple(range(4)), False)
    assert cost_model.link_seconds(row, grid(4, 4)) == pytest.approx(3 * size / rate, rel=1e-3)
    whole = Link("all-gather", int(size), tuple(range(16)), False)
    assert cost_model.link_seconds(whole, grid(4, 4)) == pytest.approx(
        15 * size / (2 * rate), rel=1e-3
    )
    # Sixteen chips in a line are a ring, with links in both directions. An all-reduce goes around
    # twice.
    ring = Link("all-reduce", int(size), tuple(range(16)), False)
    assert cost_model.link_seconds(ring, grid(16, 16)) == pytest.approx(
        2 * 15 / 16 * size / (2 * rate), rel=1e-3
    )


def test_collectives_of_one_channel_count_each():
    """jax gives all collectives that a `shard_map` names one channel."""
    program = module("""
        ENTRY %main (a: f32[8,128]) -> f32[8,128] {
          %a = f32[8,128]{1,0} parameter(0)
          %b = f32[8,128]{1,0} all-to-all(%a), channel_id=1, \
            replica_groups={{0,1,2,3}}, dimensions={0}
          ROOT %c = f32[8,128]{1,0} all-to-all(%b), channel_id=1, \
            replica_groups={{0,1,2,3}}, dimensions={0}
        }
    """)
    links = [operation.link for operation in cost_model.operations(program) if operation.link]
    assert links == [Link("all-to-all", 4096, (0, 1, 2, 3), False)] * 2


def test_an_all_to_all_is_bound_by_the_middle_of_the_longest_dimension():
    """Worked out by hand: chips 0 to 3 of a line send half of their bytes over one link to chips 4
    to 7. A ring has two such links. A second dimension halves what crosses each of them."""
    size, rate = 10**9, CHIPS["v5e"].link_rate

    def seconds(torus, chips):
        return cost_model.link_seconds(Link("all-to-all", size, tuple(chips), False), torus)

    line = seconds(grid(8, 1), range(8))
    assert line == pytest.approx(4 * size / 2 / rate, rel=1e-3)
    assert seconds(grid(8, 4), range(32)) == pytest.approx(16 * size / 2 / 4 / rate, rel=1e-3)
    assert seconds(grid(16, 1), range(16)) == pytest.approx(8 * size / 2 / 2 / rate, rel=1e-3)
    # The line of 12 is slower than the ring of 16.
    assert seconds(grid(12, 16), range(192)) == pytest.approx(96 * size / 2 / 16 / rate, rel=1e-3)
    gpu = GPUS["NVIDIA H100 80GB HBM3"]
    switched = seconds(Torus([(i,) for i in range(8)], gpu), range(8))
    assert switched == pytest.approx(7 / 8 * size / gpu.link_rate, rel=1e-2)


def test_a_library_product_on_a_gpu_has_a_roofline_and_no_expectation():
    program = module("""
        ENTRY %main (a: bf16[4096,4096], b: bf16[4096,4096]) -> bf16[4096,4096] {
          %a = bf16[4096,4096]{1,0} parameter(0)
          %b = bf16[4096,4096]{1,0} parameter(1)
          ROOT %c = bf16[4096,4096]{1,0} custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
        }
    """)  # noqa: E501
    gpu = GPUS["NVIDIA H100 80GB HBM3"]
    row = Torus([(i,) for i in range(16)], gpu)
    estimate = cost_model.estimate(cost_model.operations(program), row)
    assert estimate.seconds == pytest.approx(2 * 4096**3 / gpu.peak)
    assert estimate.expected_seconds is None
    gathered = Link("all-gather", 10**9, tuple(range(16)), False)
    assert cost_model.link_seconds(gathered, row) == pytest.approx(15e9 / gpu.link_rate, rel=1e-2)


def test_cubes_are_rings_in_all_dimensions():
    cube = Torus([(i, j, k) for i in range(4) for j in range(4) for k in range(4)], CHIPS["v5p"])
    whole = Link("reduce-scatter", 10**9, tuple(range(64)), False)
    assert cost_model.link_seconds(whole, cube) == pytest.approx(
        63 / 64 * 1e9 / (6 * 100e9), rel=1e-2
    )


def test_computation_hides_collectives_that_overlap():
    chip = CHIPS["v5e"]
    product = costs.Operation(10, chip.peak * 1e-3, 0, None, "body", "dot")
    link = Link("all-gather", int(1e-3 * chip.link_rate / 3), (0, 1, 2, 3), True)
    gather = costs.Operation(10, 0, 0, link, "body", "gather")
    estimate = cost_model.estimate([product, gather], grid(4, 1))
    assert estimate.exposed_seconds == pytest.approx(0, abs=1e-4)
    assert estimate.seconds == pytest.approx(10e-3, rel=0.01)
    waiting = gather._replace(link=link._replace(overlaps=False))
    estimate = cost_model.estimate([product, waiting], grid(4, 1))
    assert estimate.seconds == pytest.approx(20e-3, rel=0.01)


# --- the TPU compiler ---


@needs_libtpu
@pytest.mark.nightly
@pytest.mark.timeout(900)  # The compiler takes three minutes.
def test_scanned_layers_cost_as_much_as_unrolled_layers_on_a_tpu():
    mesh = jax.sharding.Mesh(tpu_devices("v5e:2x2"), ("x",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def place(leaf):
        shape = (*leaf.shape[:-2], 8 * leaf.shape[-2], 8 * leaf.shape[-1])
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=everywhere)

    scanned, unrolled = scanned_and_unrolled(place)
    assert scanned[0] == LAYERS * 6 * 2 * ROWS * WIDTH * INNER * math.prod([8, 8, 8])
    assert unrolled[0] == pytest.approx(scanned[0], rel=0.02)
