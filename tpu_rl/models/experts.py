"""Mixtures of experts: which experts see a token, and what they make of it. No token is dropped.

Tokens are sorted by expert and multiplied by one ragged matrix product a matrix. Letters: B rows, T tokens of each, N
tokens of a device, D model width, E experts, F width of an expert, k experts that see a token. An assignment is a token
with one of its k experts, numbered token * k + choice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tpu_rl import sharding
from tpu_rl.models.architecture import EXPERT_MATRICES, LORA_A, LORA_B, WEIGHTS, Experts
from tpu_rl.models.layers import PACKED, Cut

Array = jax.Array
Activation = Callable[[Array], Array]

ROOM = 1.25
"""Where experts are spread over devices: assignments that a device takes at once, of an even share of them. What is
beyond that takes it further passes."""

ORDER = "expert_order"
"""Name, for `jax.checkpoint` policies, of a layer's assignments in order: a few integers, worth keeping for the
backward pass, as sorting takes long, and the TPU's compiler longer (16 s of a CPU for a sort of 131,072)."""

TILES = (512, 512, 1024)
"""Rows, inputs and outputs that the TPU's kernel for weights' gradients takes at once. Twice as many inputs do not fit
the VMEM of v5e and v5p in float32."""


class Matrix(NamedTuple):
    """Of all experts, or of those that a device holds, with its adapters where it has some: W + A B of each."""

    weight: Array
    """[E, I, O]."""
    a: Array | None = None
    """[E, I, rank]."""
    b: Array | None = None
    """[E, rank, O], scaled."""


class Matrices(NamedTuple):
    gate: Matrix
    """Of D inputs and F outputs, as `up`."""
    up: Matrix
    down: Matrix
    """Of F inputs and D outputs."""


class Routing(NamedTuple):
    chosen: Array
    """[B, T, k] int32: experts."""
    weights: Array
    """[B, T, k] float32: what their outputs are multiplied by."""
    probabilities: Array
    """[B, T, E] float32, of all experts."""


def route(config: Experts, logits: Array) -> Routing:
    """The likeliest experts under the router's logits [B, T, E], float32; of equal ones the first."""
    probabilities = jax.nn.softmax(logits, axis=-1)
    weights, chosen = jax.lax.top_k(probabilities, config.chosen)
    if config.renormalised:
        weights /= weights.sum(-1, keepdims=True)
    return Routing(chosen, weights, probabilities)


def mixture(x: Array, routing: Routing, matrices: Matrices, activation: Activation, cut: Cut = PACKED) -> Array:
    """[B, T, D]: of each token x [B, T, D] the weighted sum of what its experts make of it.

    Inside `jax.set_mesh` each device computes the part of the experts that it holds, for the tokens of all devices with
    which it shares them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    arguments = (x, routing.chosen, routing.weights, matrices)
    if mesh.empty or mesh.size == 1:
        return _of_tokens(activation, _Share(), *arguments)
    axes = (*((*cut, None),) * 3, _axes(matrices))
    specs = jax.tree.map(lambda part, names: sharding.spec(names, part.shape, mesh), arguments, axes)
    function = functools.partial(_on_a_device, activation, specs)
    return jax.shard_map(function, in_specs=specs, out_specs=specs[0], check_vma=False)(*arguments)


def _axes(matrices: Matrices) -> Any:
    """A tree like it, of the logical axes of its parts."""

    def of(name: str, matrix: Matrix) -> Any:
        names = {"weight": name, "a": name + LORA_A, "b": name + LORA_B}
        return matrix._replace(
            **{part: WEIGHTS[names[part]] for part, it in matrix._asdict().items() if it is not None}
        )

    return Matrices(*(of(name, matrix) for name, matrix in zip(EXPERT_MATRICES, matrices, strict=True)))


def _on_a_device(
    activation: Activation, specs: Any, x: Array, chosen: Array, weights: Array, matrices: Matrices
) -> Array:
    """`mixture` of a device's parts, cut over the mesh as `specs` say."""
    rows, of_gate = sharding.mesh_axes(specs[0][0]), specs[3].gate.weight
    experts, inner = sharding.mesh_axes(of_gate[0]), sharding.mesh_axes(of_gate[2])

    def with_whole_width(part: Array, names: tuple[str, ...], spec: Any) -> Array:
        at = names.index("embed") if "embed" in names else None
        return part if at is None else _gathered(part, sharding.mesh_axes(spec[at]), at)

    matrices = jax.tree.map(with_whole_width, matrices, _axes(matrices), specs[3])
    between = tuple(name for name in rows if name in experts)
    x, chosen, weights = (_gathered(part, between, 0) for part in (x, chosen, weights))
    parts = math.prod(jax.lax.axis_size(name) for name in experts)
    first = jax.lax.axis_index(experts) * len(matrices.gate.weight) if experts else 0
    y = _of_tokens(activation, _Share(first, parts), x, chosen, weights, matrices)
    y = jax.lax.psum(y, tuple(name for name in (*experts, *inner) if name not in between))
    return jax.lax.psum_scatter(y, between, tiled=True) if between else y


def _gathered(x: Array, axes: tuple[str, ...], dimension: int) -> Array:
    return jax.lax.all_gather(x, axes, axis=dimension, tiled=True) if axes else x


# --- one device --------------------------------------------------------------------------------------------------


class _Share(NamedTuple):
    """Which experts a device holds."""

    first: Array | int = 0
    parts: int = 1
    """How many devices share the experts evenly."""


class _Order(NamedTuple):
    """Assignments of a device, sorted by expert; those to experts that it does not hold come last."""

    sorted: Array
    """[N k] int32: assignments in that order."""
    place: Array
    """[N, k] int32: where in it an assignment is."""
    ends: Array
    """[E] int32: where in it each of the device's experts ends."""


def _of_tokens(
    activation: Activation, share: _Share, x: Array, chosen: Array, weights: Array, matrices: Matrices
) -> Array:
    """[B, T, D]: the part of the device's experts."""
    tokens, choices = x.shape[0] * x.shape[1], chosen.shape[-1]
    order = checkpoint_name(_order(chosen.reshape(tokens, choices), share, len(matrices.gate.weight)), ORDER)
    most = tokens * choices
    at_once = min(most, max(128, 8 * math.ceil(ROOM * most / share.parts / 8)))
    inputs = (x.reshape(tokens, -1), weights.reshape(tokens, choices).astype(x.dtype), matrices)
    whole = at_once == most
    y: Any = _pass(activation, most, order, 0, *inputs) if whole else _passes(activation, at_once, order, *inputs)
    return y.reshape(x.shape)


def _order(chosen: Array, share: _Share, held: int) -> _Order:
    """Of the assignments of chosen [N, k], for a device that holds so many experts."""
    expert = (chosen.reshape(-1) - share.first) % (held * share.parts)
    by_expert = jnp.argsort(expert).astype(jnp.int32)
    place = jnp.argsort(by_expert).astype(jnp.int32).reshape(chosen.shape)
    ends = jnp.searchsorted(expert[by_expert], jnp.arange(held), side="right").astype(jnp.int32)
    return _Order(by_expert, place, ends)


class _Block(NamedTuple):
    """Some of the sorted assignments, those that one pass takes."""

    token: Array
    """[n] int32."""
    place: Array
    """[N, k] int32: where in the block an assignment is; n where it is not, or not to an expert of the device."""


def _pass(
    activation: Activation, size: int, order: _Order, index: Array | int, x: Array, weights: Array, matrices: Matrices
) -> Array:
    """[N, D]: what comes of the assignments index * size, ... in their order, `size` of them."""
    start = index * size
    padded = jnp.pad(order.sorted, (0, -len(order.sorted) % size))
    assignments = jax.lax.dynamic_slice_in_dim(padded, start, size)
    ends = jnp.clip(order.ends - start, 0, size)
    sizes = jnp.diff(ends, prepend=0)
    place = jnp.where((order.place >= start) & (order.place < start + ends[-1]), order.place - start, size)
    block = _Block(assignments // weights.shape[1], place)
    inputs, scales = _dispatch(x, weights, assignments, block)
    inner = activation(_product(inputs, matrices.gate, sizes)) * _product(inputs, matrices.up, sizes)
    # Scaled here, where it is narrower than behind the last product.
    return _collect(_product(inner * scales[:, None], matrices.down, sizes), block)


def _product(x: Array, matrix: Matrix, sizes: Array) -> Array:
    """As `ragged`, with adapters, of which A B is never made."""
    y = ragged(x, matrix.weight, sizes)
    if matrix.a is None or matrix.b is None:
        return y
    return y + ragged(ragged(x, matrix.a, sizes), matrix.b, sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _passes(activation: Activation, size: int, order: _Order, x: Array, weights: Array, matrices: Matrices) -> Array:
    """[N, D]: the sum of as many passes as the device's assignments take. Memory is that of one."""
    count = -(-order.ends[-1] // size)

    def one(index: Array, total: Array) -> Array:
        return total + _pass(activation, size, order, index, x, weights, matrices)

    return jax.lax.fori_loop(0, count, one, jnp.zeros_like(x))


def _passes_forward(activation: Activation, size: int, order: _Order, *inputs: Any) -> tuple[Array, Any]:
    return _passes(activation, size, order, *inputs), (order, inputs)


def _passes_backward(activation: Activation, size: int, saved: Any, gradient: Array) -> tuple[Any, ...]:
    order, inputs = saved

    def one(index: Array, totals: Any) -> Any:
        _, pull = jax.vjp(functools.partial(_pass, activation, size, order, index), *inputs)
        return jax.tree.map(lambda total, part: total + part.astype(total.dtype), totals, pull(gradient))

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)), inputs)
    totals = jax.lax.fori_loop(0, -(-order.ends[-1] // size), one, zeros)
    return None, *jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), totals, inputs)


_passes.defvjp(_passes_forward, _passes_backward)


# To take rows by a permutation is undone by taking rows by its inverse. The compiler cannot know it and would add up
# row by row, which a TPU does one after the other: hence gradients by hand.


@jax.custom_vjp
def _dispatch(x: Array, weights: Array, assignments: Array, block: _Block) -> tuple[Array, Array]:
    """x [N, D] and weights [N, k] of a block's assignments: [n, D] and [n]. Of those without a place, anything."""
    return _taken(x, block.token), _taken(weights.reshape(-1), assignments)


def _dispatch_backward(block: _Block, gradients: tuple[Array, Array]) -> tuple[Array, Array, None, None]:
    of_inputs, of_scales = gradients
    return _collect(of_inputs, block), _found(of_scales, block.place), None, None


_dispatch.defvjp(
    lambda x, weights, assignments, block: (_dispatch(x, weights, assignments, block), block), _dispatch_backward
)


@jax.custom_vjp
def _collect(rows: Array, block: _Block) -> Array:
    """[N, D]: of each token the sum of its assignments' rows [n, D] in the block."""
    places = block.place.T
    return sum((_found(rows, place) for place in places[1:]), _found(rows, places[0]))


def _collect_backward(block: _Block, gradient: Array) -> tuple[Array, None]:
    return _taken(gradient, block.token), None


_collect.defvjp(lambda rows, block: (_collect(rows, block), block), _collect_backward)


def _taken(rows: Array, at: Array) -> Array:
    """The rows there, none of which is beyond the last: the compiler need not look."""
    return rows.at[at].get(mode="promise_in_bounds")


def _found(rows: Array, place: Array) -> Array:
    """The rows at these places, zero behind the last."""
    return rows.at[place].get(mode="fill", fill_value=0)


# --- the ragged product ------------------------------------------------------------------------------------------


@jax.custom_vjp
def ragged(x: Array, matrices: Array, sizes: Array) -> Array:
    """x [n, I], whose first sizes[0] rows go through matrices[0] [I, O], the next sizes[1] through the next: [n, O].

    What becomes of rows behind the last group depends on the platform, their gradient too.
    """
    return jax.lax.ragged_dot(x, matrices, sizes)


def _ragged_backward(saved: tuple[Array, Array, Array], gradient: Array) -> tuple[Array, Array, None]:
    x, matrices, sizes = saved
    (of_x,) = jax.vjp(lambda x: jax.lax.ragged_dot(x, matrices, sizes), x)[1](gradient)

    def of_matrices(x: Array, gradient: Array, sizes: Array) -> Array:
        _, pull = jax.vjp(lambda matrices: jax.lax.ragged_dot(x, matrices, sizes), matrices)
        return pull(gradient)[0]

    by_platform = jax.lax.platform_dependent(x, gradient, sizes, tpu=_matrices_gradient_kernel, default=of_matrices)
    return of_x, by_platform.astype(matrices.dtype), None


ragged.defvjp(lambda x, matrices, sizes: (ragged(x, matrices, sizes), (x, matrices, sizes)), _ragged_backward)


def _matrices_gradient_kernel(x: Array, gradient: Array, sizes: Array) -> Array:
    """[E, I, O] by a Pallas kernel: XLA has none, and multiplies all rows with each group, E times the work."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    rows = math.gcd(len(x), TILES[0])
    if rows < 128:
        x, gradient = (jnp.pad(part, ((0, -len(part) % 128), (0, 0))) for part in (x, gradient))
        rows = math.gcd(len(x), TILES[0])
    tiles = (rows, min(TILES[1], x.shape[1]), min(TILES[2], gradient.shape[1]))
    return tgmm(x.T, gradient, sizes, x.dtype, tiles)
