"""Mixtures of experts: routing, and the experts' outputs. No token is dropped.

Tokens are sorted by expert, and each of the three matrices of the experts is applied by one ragged
matrix product. If experts are spread over devices, each device computes its own experts for the
tokens of all devices that share them: it gathers these tokens, or it is sent those that need it
(`is_sent`). On TPUs, decode steps read experts in the stack of all layers (`is_read_in_place`).

Letters in array shapes: B rows, T tokens per row, N tokens on a device, D hidden size, E experts, F
intermediate size of an expert, k experts per token, I inputs and O outputs of a matrix. An
*assignment* is a token with one of its k experts; its number is token * k + choice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tpu_rl.models import quantization
from tpu_rl.models.config import EXPERT_MATRICES, LORA_A, LORA_B, SCALE, WEIGHT_AXES, MoeConfig
from tpu_rl.models.layers import PACKED, ActivationAxes
from tpu_rl.models.moe import decode_kernel
from tpu_rl.train import sharding

Array = jax.Array
Gate = Callable[[Array, Array], Array]
"""(gate, up) -> the input of the last matrix, as `config.gate_function` returns it."""

ROOM = 1.25
"""Assignments that a device processes in one pass, relative to an even share of all assignments.
Used only if experts are spread over devices; further assignments take further passes."""

ORDER = "expert_order"
"""Name, for `jax.checkpoint` policies, of the sorted order of a layer's assignments.

It is a few integers and worth saving for the backward pass, because sorting is slow, and so is
compiling a sort for TPUs (16 s of CPU time for 131,072 numbers).
"""

MOST_COMPARISONS = 1 << 22
"""Largest product of assignments and experts for which each assignment is compared with each expert
to count those of an expert. Beyond it a binary search takes less time: it has one step for each bit
of the number of assignments, and on TPUs each takes as long as 300,000 comparisons."""

TILES = (512, 512, 1024)
"""Rows, inputs and outputs per tile of the TPU kernel for gradients of matrices. In float32, twice
as many inputs do not fit in the vector memory of v5e and v5p."""


ROWS_IN_PLACE = 128
"""Rows per expert, in the mean, up to which products are bound by reading the experts."""


class Matrix(NamedTuple):
    """One matrix of all experts, or of those on a device: W, or W + A B with adapters."""

    weight: Array
    """[E, I, O]. With `layer`: [L, E, I, O], perhaps in eight bits."""
    a: Array | None = None
    """[E, I, rank]."""
    b: Array | None = None
    """[E, rank, O], scaled."""
    bias: Array | None = None
    """[E, O]."""
    scale: Array | None = None
    """[E, O] float32: factors of the outputs of W, if it is quantized."""
    layer: Array | None = None
    """[] int32: number of the layer in `weight`, which is read in place. There is no gradient."""


class Matrices(NamedTuple):
    """The matrices of experts. Each expert is a gated MLP."""

    gate: Matrix
    """I = D, O = F."""
    up: Matrix
    """I = D, O = F."""
    down: Matrix
    """I = F, O = D."""


class Routing(NamedTuple):
    """The experts of each token."""

    experts: Array
    """[B, T, k] int32."""
    weights: Array
    """[B, T, k] float32: factors of the experts' outputs."""
    probabilities: Array
    """[B, T, E] float32: probabilities of all experts."""


def route(
    config: MoeConfig,
    logits: Array,
    correction: Array | None = None,
    replayed: Array | None = None,
    gain: Array | None = None,
) -> Routing:
    """Return the most probable experts under the router's logits [B, T, E] float32.

    Of experts with equal logits, the first ones are used. `correction` [E] is added to the
    probabilities for the choice, but not in the weights. With groups, see
    `MoeConfig.groups_per_token`.

    `replayed` [B, T, k] int32 replaces the choice, and nothing else: it holds numbers of experts
    plus 1, and where it is 0 the choice stays. The weights of replayed experts are computed from
    the logits as those of chosen ones are, so the router has gradients (R3, arXiv 2510.11370).
    `gain` [E] multiplies the weights at last.
    """
    if config.scoring == "softmax":
        scores = probabilities = jax.nn.softmax(logits, axis=-1)
    else:
        scores = jax.nn.sigmoid(logits)
        probabilities = scores / scores.sum(-1, keepdims=True)
    choice = scores
    if correction is not None:
        choice = scores + jax.lax.stop_gradient(correction)[None, None, :]
    if config.num_groups > 1:
        choice = _in_best_groups(config, choice)
    weights, experts = jax.lax.top_k(choice, config.experts_per_token)
    if replayed is not None:
        experts = jnp.where(replayed > 0, replayed - 1, experts)
    if choice is not scores or replayed is not None:
        weights = jnp.take_along_axis(scores, experts, axis=-1)
    if config.normalize_weights:
        weights /= weights.sum(-1, keepdims=True)
    weights *= config.weight_scale
    if gain is not None:
        weights *= jnp.take(gain.astype(jnp.float32), experts)
    return Routing(experts, weights, probabilities)


def _in_best_groups(config: MoeConfig, choice: Array) -> Array:
    """Return `choice` [B, T, E] with -inf for the experts of all but the best groups."""
    groups = choice.reshape(*choice.shape[:2], config.num_groups, -1)
    group_scores = jax.lax.top_k(groups, 2)[0].sum(-1)
    _, best = jax.lax.top_k(group_scores, config.groups_per_token)
    is_best = jax.nn.one_hot(best, config.num_groups, dtype=bool).any(-2)
    return jnp.where(is_best[..., None], groups, -jnp.inf).reshape(choice.shape)


def is_read_in_place(config: MoeConfig, num_tokens: int, name: str, stack: Any, dtype: Any) -> bool:
    """Return True if the TPU's kernel for few tokens can read the matrix `name` of a mixture where
    it lies (see `decode_kernel`).

    It can unless tokens are many, the kernel's pieces do not fit, or each device must gather or
    convert the matrix anyway.

    Args:
        num_tokens: tokens of all devices.
        name: one of `EXPERT_MATRICES`.
        stack: [L, E, I, O], the matrices of all layers as stored, or their shape and dtype.
        dtype: the type of activations.
    """
    num_rows = num_tokens * config.experts_per_token
    names = ("layers", *WEIGHT_AXES[name])
    mesh = jax.sharding.get_abstract_mesh()
    shape = stack.shape
    if not mesh.empty:
        placement = sharding.spec(names, shape, mesh)
        shape = jax.NamedSharding(mesh, placement).shard_shape(shape)
        embed = names.index("embed")
        if shape[embed] != stack.shape[embed]:
            return False
    stored = jnp.dtype(stack.dtype)
    rows = jax.ShapeDtypeStruct((num_rows, shape[2]), dtype)
    return (
        num_rows <= ROWS_IN_PLACE * config.num_experts
        and (stored == jnp.dtype(dtype) or stored.itemsize == 1)
        and decode_kernel.make_tiles(rows, jax.ShapeDtypeStruct(shape, stored)) is not None
    )


def is_sent(num_tokens: int, experts_per_token: int, num_devices: int, num_shards: int) -> bool:
    """Return True if each token is sent to the devices of its experts, and False if devices gather
    the tokens of all others.

    It is sent if that takes at most half as many rows, because a row that is sent takes longer: it
    crosses the links of all devices between, while gathered rows cross each link once. With equal
    shares that is the case from 2.5 devices per expert of a token on.

    Args:
        num_tokens: tokens of one device.
        experts_per_token: k.
        num_devices: devices that hold different tokens and different experts.
        num_shards: devices that hold different experts.
    """
    room = _room_per_pair(num_tokens * experts_per_token, num_shards)
    return num_devices > 1 and 2 * room <= num_tokens


def exchanged_rows(num_tokens: int, experts_per_token: int, num_shards: int) -> int:
    """Return the rows that a device gets from others before its experts compute, as `is_sent`
    chooses. As many go back."""
    per_pair = num_tokens
    if is_sent(num_tokens, experts_per_token, num_shards, num_shards):
        per_pair = _room_per_pair(num_tokens * experts_per_token, num_shards)
    return per_pair * (num_shards - 1)


def mixture(
    x: Array, routing: Routing, matrices: Matrices, combine: Gate, axes: ActivationAxes = PACKED
) -> Array:
    """Return the weighted sum [B, T, D] of the outputs of each token's experts, for x [B, T, D].

    `combine` is the gate of each expert, and `axes` are the logical axes of x. Inside
    `jax.set_mesh`, each device computes the experts that it holds, for the tokens of all devices
    that share them. No token is dropped.
    """
    mesh = jax.sharding.get_abstract_mesh()
    operands = (x, routing.experts, routing.weights, matrices)
    if mesh.empty or mesh.size == 1:
        return _local_mixture(combine, _ExpertShard(), *operands)
    operand_axes = (*((*axes, None),) * 3, _matrix_axes(matrices))
    specs = jax.tree.map(
        lambda operand, names: sharding.spec(names, operand.shape, mesh), operands, operand_axes
    )
    per_device = functools.partial(_device_mixture, combine, specs)
    return jax.shard_map(per_device, in_specs=specs, out_specs=specs[0], check_vma=False)(*operands)


def _matrix_axes(matrices: Matrices) -> Any:
    """Return the logical axes of the leaves of `matrices`, as a tree of the same structure."""

    def leaf_axes(name: str, matrix: Matrix) -> Any:
        names = {
            "weight": name,
            "a": name + LORA_A,
            "b": name + LORA_B,
            "bias": name + "_bias",
            "scale": name + SCALE,
        }
        axes: dict[str, tuple[str, ...]] = {
            field: WEIGHT_AXES[names[field]]
            for field, leaf in matrix._asdict().items()
            if leaf is not None and field in names
        }
        if matrix.layer is not None:
            axes |= {"weight": ("layers", *axes["weight"]), "layer": ()}
        return matrix._replace(**axes)

    return Matrices(
        *(leaf_axes(name, matrix) for name, matrix in zip(EXPERT_MATRICES, matrices, strict=True))
    )


def _device_mixture(
    combine: Gate, specs: Any, x: Array, experts: Array, weights: Array, matrices: Matrices
) -> Array:
    """Return `mixture` for one device's shards of the operands, which are sharded by `specs`."""
    row_axes = sharding.mesh_axes(specs[0][0])
    gate_spec = specs[3].gate.weight[-3:]
    expert_axes = sharding.mesh_axes(gate_spec[0])
    mlp_axes = sharding.mesh_axes(gate_spec[2])

    def with_full_width(leaf: Array, names: tuple[str, ...], spec: Any) -> Array:
        if "embed" not in names or "layers" in names:
            return leaf  # What is read in place has its full width.
        dimension = names.index("embed")
        return _all_gather(leaf, sharding.mesh_axes(spec[dimension]), dimension)

    matrices = jax.tree.map(with_full_width, matrices, _matrix_axes(matrices), specs[3])
    if matrices.down.bias is not None and mlp_axes:
        # The outputs of devices that share an expert are added up, and its bias must count once.
        bias = jnp.where(jax.lax.axis_index(mlp_axes) == 0, matrices.down.bias, 0)
        matrices = matrices._replace(down=matrices.down._replace(bias=bias))
    # Devices along these axes hold different tokens and different experts.
    shared_axes = tuple(name for name in expert_axes if name in row_axes)
    num_devices = math.prod(map(jax.lax.axis_size, shared_axes))
    num_shards = math.prod(map(jax.lax.axis_size, expert_axes))
    partial_sums = (*(name for name in expert_axes if name not in shared_axes), *mlp_axes)
    rows, length, experts_per_token = experts.shape
    is_in_place = matrices.gate.layer is not None
    if not is_in_place and is_sent(rows * length, experts_per_token, num_devices, num_shards):
        shard = _ExpertShard(0, num_shards // num_devices)
        relative = _relative_experts(experts, _num_experts(matrices), expert_axes, shared_axes)
        y = _exchanged_mixture(combine, shared_axes, shard, x, relative, weights, matrices)
        return jax.lax.psum(y, partial_sums)
    x, experts, weights = (_all_gather(part, shared_axes, 0) for part in (x, experts, weights))
    first = jax.lax.axis_index(expert_axes) * _num_experts(matrices) if expert_axes else 0
    shard = _ExpertShard(first, num_shards)
    y = _local_mixture(combine, shard, x, experts, weights, matrices)
    y = jax.lax.psum(y, partial_sums)
    return jax.lax.psum_scatter(y, shared_axes, tiled=True) if shared_axes else y


def _num_experts(matrices: Matrices) -> int:
    return matrices.gate.weight.shape[-3]


def _all_gather(x: Array, axes: tuple[str, ...], dimension: int) -> Array:
    return jax.lax.all_gather(x, axes, axis=dimension, tiled=True) if axes else x


# One device.


class _ExpertShard(NamedTuple):
    """The experts that a device holds: a contiguous and equal share of all experts."""

    first: Array | int = 0
    """Number of the first one."""
    num_shards: int = 1


class _Order(NamedTuple):
    """A device's assignments, sorted by expert. Those to experts of other devices come last."""

    assignments: Array
    """[N k] int32: numbers of the assignments, sorted."""
    place: Array
    """[N, k] int32: place of each assignment in the sorted order."""
    ends: Array
    """[E] int32: end, in the sorted order, of the assignments of each of the device's experts."""


def _local_mixture(
    combine: Gate, shard: _ExpertShard, x: Array, experts: Array, weights: Array, matrices: Matrices
) -> Array:
    """Return the part of a device's experts in `mixture`, [B, T, D]."""
    num_tokens = x.shape[0] * x.shape[1]
    experts_per_token = experts.shape[-1]
    order = _sort_by_expert(
        experts.reshape(num_tokens, experts_per_token), shard, _num_experts(matrices)
    )
    order = checkpoint_name(order, ORDER)
    num_assignments = num_tokens * experts_per_token
    size = min(num_assignments, max(128, _room(num_assignments, shard.num_shards)))
    flat_x = x.reshape(num_tokens, -1)
    flat_weights = weights.reshape(num_tokens, experts_per_token).astype(x.dtype)
    operands = (flat_x, flat_weights, matrices)
    if size == num_assignments:
        y: Any = _pass(combine, size, order, 0, *operands)
    else:
        one_pass = functools.partial(_pass, combine, size)
        y = _passes(one_pass, -(-order.ends[-1] // size), order, *operands)
    return y.reshape(x.shape)


def _room(num_assignments: int, num_shards: int) -> int:
    """Return the assignments, of this many, for which one pass has room in each shard."""
    return min(num_assignments, 8 * math.ceil(ROOM * num_assignments / num_shards / 8))


def _sort_by_expert(experts: Array, shard: _ExpertShard, num_local: int) -> _Order:
    """Sort the assignments of experts [N, k] for a device that holds `num_local` experts."""
    # Numbers relative to the first local expert, so that local experts come first.
    relative = (experts.reshape(-1) - shard.first) % (num_local * shard.num_shards)
    assignments = jnp.argsort(relative).astype(jnp.int32)
    place = jnp.argsort(assignments).astype(jnp.int32).reshape(experts.shape)
    if len(relative) * num_local <= MOST_COMPARISONS:
        is_before_end = relative[:, None] <= jnp.arange(num_local)[None, :]
        ends = is_before_end.sum(0, dtype=jnp.int32)
    else:
        ends = jnp.searchsorted(relative[assignments], jnp.arange(num_local), side="right")
    return _Order(assignments, place, ends.astype(jnp.int32))


class _Block(NamedTuple):
    """Consecutive sorted assignments that are processed in one pass."""

    token: Array
    """[n] int32: token of each assignment in the block."""
    place: Array
    """[N, k] int32: place of each assignment in the block; n if it is not in the block or its
    expert is on another device."""


def _pass(
    combine: Gate,
    size: int,
    order: _Order,
    index: Array | int,
    x: Array,
    weights: Array,
    matrices: Matrices,
) -> Array:
    """Return the part [N, D] of block `index` of the sorted assignments, `size` of them."""
    start = index * size
    padded = jnp.pad(order.assignments, (0, -len(order.assignments) % size))
    assignments = jax.lax.dynamic_slice_in_dim(padded, start, size)
    ends = jnp.clip(order.ends - start, 0, size)
    is_in_block = (order.place >= start) & (order.place < start + ends[-1])
    place = jnp.where(is_in_block, order.place - start, size)
    block = _Block(assignments // weights.shape[1], place)
    inputs, scales = _dispatch(x, weights, assignments, block)
    gate = _expert_product(inputs, matrices.gate, ends)
    inner = combine(gate, _expert_product(inputs, matrices.up, ends))
    # The weights are applied here, where rows are narrower than after the last product.
    outputs = _expert_product(inner * scales[:, None], matrices.down, ends, scales)
    return _combine(outputs, block)


def _expert_product(x: Array, matrix: Matrix, ends: Array, scales: Array | None = None) -> Array:
    """Return the product of rows x [n, I] with W + A B, plus the bias, of each row's expert.

    The rows of an expert end at `ends` [E]. The product A B is never formed. The biases are
    multiplied by `scales` [n].
    """
    group_sizes = jnp.diff(ends, prepend=0)
    if matrix.layer is not None:
        y = decode_kernel.product(x, matrix.weight, matrix.layer, ends, matrix.scale)
    else:
        y = ragged_product(x, matrix.weight, group_sizes)
        if matrix.scale is not None:
            expert = jnp.searchsorted(ends, jnp.arange(len(x)), side="right")
            expert = jnp.minimum(expert, len(matrix.scale) - 1)
            y = quantization.scaled(y, _take(matrix.scale, expert))
    if matrix.a is not None and matrix.b is not None:
        y = y + ragged_product(ragged_product(x, matrix.a, group_sizes), matrix.b, group_sizes)
    if matrix.bias is None:
        return y
    # A product, whose gradient is one, too: sums over rows of an expert would be slow on TPUs.
    row = jnp.arange(len(x))[:, None]
    starts = ends - group_sizes
    is_expert = ((row >= starts[None, :]) & (row < ends[None, :])).astype(x.dtype)
    if scales is not None:
        is_expert = is_expert * scales[:, None]
    return y + jnp.einsum("ne,eo->no", is_expert, matrix.bias)


Pass = Callable[..., Array]
"""(order, index, x, weights, matrices) -> part [N, D] of the sum, of the pass with this index."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _passes(
    one_pass: Pass, count: Array, order: Any, x: Array, weights: Array, matrices: Matrices
) -> Array:
    """Return the sum [N, D] of the first `count` passes.

    It needs the memory of one pass.
    """

    def add_pass(index: Array, total: Array) -> Array:
        return total + one_pass(order, index, x, weights, matrices)

    return jax.lax.fori_loop(0, count, add_pass, jnp.zeros_like(x))


def _passes_backward(one_pass: Pass, residuals: Any, gradient: Array) -> tuple[Any, ...]:
    count, order, operands = residuals

    def add_pass(index: Array, totals: Any) -> Any:
        _, pull_back = jax.vjp(functools.partial(one_pass, order, index), *operands)
        return jax.tree.map(
            lambda total, part: total + part.astype(total.dtype), totals, pull_back(gradient)
        )

    # Sums over passes are float32 or wider.
    zeros = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)), operands
    )
    totals = jax.lax.fori_loop(0, count, add_pass, zeros)
    gradients = jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), totals, operands)
    return None, None, *gradients


_passes.defvjp(
    lambda one_pass, count, order, *x: (_passes(one_pass, count, order, *x), (count, order, x)),
    _passes_backward,
)


# Sending tokens to the devices of their experts, and the experts' outputs back.


def _room_per_pair(num_assignments: int, num_shards: int) -> int:
    """Return the assignments, of this many, that a device may send to another in one pass.

    With few of them, chance alone exceeds an even share by more than ROOM. Four standard deviations
    are rarely exceeded by any pair, if all experts are equally likely.
    """
    share = num_assignments / num_shards
    by_chance = 8 * math.ceil((share + 4 * math.sqrt(share)) / 8)
    return max(_room(num_assignments, num_shards), min(num_assignments, by_chance))


def _relative_experts(
    experts: Array, num_local: int, expert_axes: tuple[str, ...], shared_axes: tuple[str, ...]
) -> Array:
    """Return the numbers [B, T, k] of experts among those that a device sends tokens to.

    These are on the devices along `shared_axes`, `num_local` on each, in the order of the devices.
    The numbers of experts that other devices with the same tokens serve follow after them.
    """
    owner = experts // num_local
    relative = experts % num_local
    count = num_local
    is_served: Array | bool = True
    for name in reversed(expert_axes):
        size = jax.lax.axis_size(name)
        if name in shared_axes:
            relative += owner % size * count
            count *= size
        else:
            is_served &= owner % size == jax.lax.axis_index(name)
        owner //= size
    return jnp.where(is_served, relative, count)


class _Traffic(NamedTuple):
    """The assignments that a device sends to n devices, and those that it receives from them."""

    order: _Order
    """The order of its own: by expert, and so by device."""
    received: Array
    """[n, E] int32: of the assignments from each device, sorted by expert, the end of those of each
    of this device's experts."""

    @property
    def sent(self) -> Array:
        """[n] int32: end, in the order, of the assignments for each device."""
        return self.order.ends.reshape(self.received.shape)[:, -1]


def _exchanged_mixture(
    combine: Gate,
    axes: tuple[str, ...],
    shard: _ExpertShard,
    x: Array,
    experts: Array,
    weights: Array,
    matrices: Matrices,
) -> Array:
    """Return the part in `mixture`, [B, T, D], of the experts of all devices along `axes`.

    `experts` are numbers as `_relative_experts` returns them, and `shard` is the share of all
    experts that these devices hold. In a pass each device sends the same number of assignments to
    each, so that passes suffice for any routing: `ragged_all_to_all`, which would send what there
    is, has no implementation on CPUs.
    """
    num_tokens = x.shape[0] * x.shape[1]
    experts_per_token = experts.shape[-1]
    num_devices = math.prod(map(jax.lax.axis_size, axes))
    num_local = _num_experts(matrices)
    room = _room_per_pair(num_tokens * experts_per_token, num_devices * shard.num_shards)
    order = _sort_by_expert(
        experts.reshape(num_tokens, experts_per_token), shard, num_devices * num_local
    )
    ends = order.ends.reshape(num_devices, num_local)
    starts = _starts(ends[:, -1])
    received = _all_to_all(ends - starts[:, None], axes)
    traffic = checkpoint_name(_Traffic(order, received), ORDER)
    # Every pass of one device is one of all devices.
    most = jnp.max(ends[:, -1] - starts)
    count = jax.lax.pmax(-(-most // room), jax.sharding.get_abstract_mesh().axis_names)
    one_pass = functools.partial(_exchanged_pass, combine, axes, room)
    flat_x = x.reshape(num_tokens, -1)
    flat_weights = weights.reshape(num_tokens, experts_per_token).astype(x.dtype)
    y: Any = _passes(one_pass, count, traffic, flat_x, flat_weights, matrices)
    return y.reshape(x.shape)


def _exchanged_pass(
    combine: Gate,
    axes: tuple[str, ...],
    room: int,
    traffic: _Traffic,
    index: Array,
    x: Array,
    weights: Array,
    matrices: Matrices,
) -> Array:
    """Return the part [N, D] of the assignments that are sent in pass `index`."""
    order, received = traffic
    num_devices = len(received)
    size = num_devices * room
    done = index * room
    ends = traffic.sent
    starts = _starts(ends)
    # Assignments for which there is room. Those after the last one for a device are not computed.
    padded = jnp.pad(order.assignments, (0, room))
    assignments = jax.vmap(lambda start: jax.lax.dynamic_slice_in_dim(padded, start, room))(
        starts + done
    ).reshape(size)
    device = _lookup(ends, jnp.arange(num_devices), order.place)
    rank = order.place - _lookup(ends, starts, order.place) - done
    is_in_pass = (rank >= 0) & (rank < room) & (order.place < ends[-1])
    place = jnp.where(is_in_pass, device * room + rank, size)
    block = _Block(assignments // weights.shape[1], place)
    sent = _dispatch(x, weights, assignments, block)
    inputs, scales = (_all_to_all(part, axes) for part in sent)
    received_order = _received_order(jnp.clip(received - done, 0, room), room)
    outputs = _pass(combine, size, received_order, 0, inputs, scales[:, None], matrices)
    return _combine(_all_to_all(outputs, axes), block)


def _received_order(ends: Array, room: int) -> _Order:
    """Sort the assignments [n room] that a device received by expert.

    Those from each of n devices are sorted: those of each expert end at ends [n, E].
    """
    num_devices, num_local = ends.shape
    size = num_devices * room
    starts = jnp.pad(ends[:, :-1], ((0, 0), (1, 0)))
    # The assignments of an expert from a device are a stretch, where they came and when sorted.
    stretch_ends = jnp.cumsum((ends - starts).T.reshape(-1))
    stretch_starts = _starts(stretch_ends)
    first_rows = (starts + jnp.arange(num_devices)[:, None] * room).T.reshape(-1)
    sorted_places = jnp.arange(size)
    assignments = sorted_places + _lookup(stretch_ends, first_rows - stretch_starts, sorted_places)
    assignments = jnp.where(sorted_places < stretch_ends[-1], assignments, 0)
    # And back: stretches in the order of the rows.
    offsets = (stretch_starts - first_rows).reshape(num_local, num_devices).T
    column = jnp.arange(room)
    place = jax.vmap(lambda ends, offsets: column + _lookup(ends, offsets, column))(ends, offsets)
    place += jnp.arange(num_devices)[:, None] * room
    place = jnp.where(column[None, :] < ends[:, -1:], place, size)
    expert_ends = stretch_ends.reshape(num_local, num_devices)[:, -1]
    return _Order(assignments, place.reshape(size, 1), expert_ends)


def _starts(ends: Array) -> Array:
    """Return the starts [n] of consecutive stretches with these ends [n]. The first one is 0."""
    return jnp.pad(ends[:-1], (1, 0))


def _lookup(ends: Array, values: Array, places: Array) -> Array:
    """Return the value, of values [n], of the stretch that each place is in.

    Consecutive stretches end at ends [n]. Places after the last one get its value. Nothing is
    gathered: TPUs compare faster than they look up numbers one by one.
    """
    steps = jnp.diff(values)
    shape = (-1, *(1,) * places.ndim)
    is_after = places[None] >= ends[:-1].reshape(shape)
    return values[0] + jnp.where(is_after, steps.reshape(shape), 0).sum(0, dtype=values.dtype)


def _all_to_all(x: Array, axes: tuple[str, ...]) -> Array:
    """Send each device along `axes` its part of x, and return what they sent, in their order."""
    return jax.lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)


# Taking rows by a permutation is undone by taking rows by its inverse. The compiler does not know
# that these are permutations. For the gradient it would add rows one at a time, which TPUs do one
# after the other. So `_dispatch` and `_combine` have gradients written by hand.


@jax.custom_vjp
def _dispatch(x: Array, weights: Array, assignments: Array, block: _Block) -> tuple[Array, Array]:
    """Return the rows [n, D] of x [N, D] and the weights [n] of weights [N, k] in a block.

    Rows after the last assignment of the device hold arbitrary values.
    """
    return _take(x, block.token), _take(weights.reshape(-1), assignments)


def _dispatch_backward(
    block: _Block, gradients: tuple[Array, Array]
) -> tuple[Array, Array, None, None]:
    input_gradients, scale_gradients = gradients
    x_gradient = _combine(input_gradients, block)
    return x_gradient, _take_or_zero(scale_gradients, block.place), None, None


_dispatch.defvjp(
    lambda x, weights, assignments, block: (_dispatch(x, weights, assignments, block), block),
    _dispatch_backward,
)


@jax.custom_vjp
def _combine(rows: Array, block: _Block) -> Array:
    """Return for each token the sum [N, D] of the rows [n, D] of its assignments in the block."""
    places = block.place.T
    return sum((_take_or_zero(rows, place) for place in places[1:]), _take_or_zero(rows, places[0]))


_combine.defvjp(
    lambda rows, block: (_combine(rows, block), block),
    lambda block, gradient: (_take(gradient, block.token), None),
)


def _take(rows: Array, indices: Array) -> Array:
    """Return the rows at `indices`, all of which must be valid: the compiler adds no checks."""
    return rows.at[indices].get(mode="promise_in_bounds")


def _take_or_zero(rows: Array, indices: Array) -> Array:
    """Return the rows at `indices`, and zero for indices after the last row."""
    return rows.at[indices].get(mode="fill", fill_value=0)


# The ragged product.


@jax.custom_vjp
def ragged_product(x: Array, matrices: Array, group_sizes: Array) -> Array:
    """Multiply the rows of x [n, I], in groups, by matrices [E, I, O]; the result is [n, O].

    The first group_sizes[0] rows are multiplied by matrices[0], the next group_sizes[1] rows by
    matrices[1], and so on. Values of rows after the last group depend on the platform, and so do
    their gradients.
    """
    return jax.lax.ragged_dot(x, matrices, group_sizes)


def _ragged_product_backward(
    residuals: tuple[Array, Array, Array], gradient: Array
) -> tuple[Array, Array, None]:
    x, matrices, group_sizes = residuals
    _, pull_back_x = jax.vjp(lambda x: jax.lax.ragged_dot(x, matrices, group_sizes), x)
    (x_gradient,) = pull_back_x(gradient)

    def xla_gradient(x: Array, gradient: Array, group_sizes: Array) -> Array:
        _, pull_back = jax.vjp(
            lambda matrices: jax.lax.ragged_dot(x, matrices, group_sizes), matrices
        )
        return pull_back(gradient)[0]

    matrices_gradient = jax.lax.platform_dependent(
        x, gradient, group_sizes, tpu=_matrices_gradient_kernel, default=xla_gradient
    )
    return x_gradient, matrices_gradient.astype(matrices.dtype), None


ragged_product.defvjp(
    lambda x, matrices, group_sizes: (
        ragged_product(x, matrices, group_sizes),
        (x, matrices, group_sizes),
    ),
    _ragged_product_backward,
)


def _matrices_gradient_kernel(x: Array, gradient: Array, group_sizes: Array) -> Array:
    """Return the gradient [E, I, O] of the matrices, by a Pallas kernel.

    XLA for TPUs has no such kernel: it multiplies all rows for each group, which is E times the
    work.
    """
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    tile_rows = math.gcd(len(x), TILES[0])
    if tile_rows < 128:
        x, gradient = (jnp.pad(part, ((0, -len(part) % 128), (0, 0))) for part in (x, gradient))
        tile_rows = math.gcd(len(x), TILES[0])
    tiles = (tile_rows, min(TILES[1], x.shape[1]), min(TILES[2], gradient.shape[1]))
    return tgmm(x.T, gradient, group_sizes, x.dtype, tiles)
