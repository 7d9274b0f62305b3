"""The device mesh and the sharding rules: one table for training and one for sampling.

Axes of a training mesh:

    data      rows; weights are replicated
    fsdp      rows, and weights along their width
    tensor    attention heads, MLP width and vocabulary
    expert    the experts of a mixture; for everything else it acts like "fsdp"
    context   the tokens of a packed row, for rows too long for one device; for weights and for the
              sampler it acts like "fsdp"

A mesh that only samples completions has the axes "data" and "tensor". If a mesh axis does not
divide a dimension, the dimension is replicated instead, which is slower but never wrong.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from tpu_rl.errors import InputError

MESH_AXES = ("data", "fsdp", "tensor", "expert", "context")

OVER_TENSOR = (
    *("vocab", "heads", "kv_heads", "mlp", "expert_mlp", "shared_mlp"),
    *("delta_key_heads", "delta_value_heads"),
    *("vision_heads", "vision_kv_heads", "vision_mlp", "projector"),
)
"""Logical axes that are sharded over "tensor", on every mesh."""

WIDTHS = ("embed", "query_latent", "latent", "layer_inputs", "vision_embed", "merged")
"""Logical axes of weights that are sharded over the devices that share rows, in training."""

WHOLE = (
    *("latent_and_rope", "key_and_value", "head_dim", "value_dim", "query_and_gate"),
    *("delta_key_dim", "delta_value_dim", "taps", "layers", "outputs", "routes", "shared_routes"),
    *("scalar", "layer_input", "rank", "vision_head_dim", "vision_axes", "vision_position"),
    *("pixels", "channel", "patch_row", "patch_column", "patch_time", "images", "merged_patches"),
)
"""Logical axes that are never sharded."""

RULES: Mapping[str, tuple[str, ...]] = {
    "rows": ("data", "fsdp", "expert"),
    "tokens": ("context",),
    "slots": ("data", "fsdp", "expert", "context"),
    "experts": ("expert",),
    **dict.fromkeys(OVER_TENSOR, ("tensor",)),
    **dict.fromkeys(WIDTHS, ("fsdp", "expert", "context")),
    **dict.fromkeys(WHOLE, ()),
}
"""Logical axis -> the mesh axes that it is sharded over, on a training mesh.

Models name the logical axes of their leaves (`Model.axes`). Packed rows have the axes "rows" and
"tokens"; "slots" is the axis of the rows that the sampler decodes at once.
"""

SAMPLING_AXES = ("data", "tensor")

SAMPLING_RULES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(RULES, ()),
    **dict.fromkeys(("rows", "slots"), ("data",)),
    **dict.fromkeys(OVER_TENSOR, ("tensor",)),
    "experts": ("data", "tensor"),
}
"""Logical axis -> the mesh axes that it is sharded over, on a sampling mesh.

Weights that are sharded along their width would have to be gathered for every decoded token, so an
axis is sharded only if each device can compute with its own shard. Experts are on one device each,
if the devices divide them: each device gathers the tokens of all devices, which are few, and
returns sums. In prefill it may be sent those for its experts (`moe.experts.is_sent`).
"""


# Meshes.


def make_mesh(
    data: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    expert: int = 1,
    context: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Return a training mesh over `devices` (default: all devices).

    The product of the axis sizes must be the number of devices. TPU slices, which are connected
    only by the network of the data center, lie along `data`.

    Raises:
        InputError: the product does not fit (the message names the nearest sizes that do), or
            `data` is not a multiple of the number of slices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = (data, fsdp, tensor, expert, context)
    if min(sizes) < 1 or math.prod(sizes) != len(devices):
        described = " x ".join(
            f"{name} {size}" for name, size in zip(MESH_AXES, sizes, strict=True)
        )
        nearest = ", ".join(map(str, _nearest_sizes(sizes, len(devices))))
        raise InputError(
            f"mesh of {described}",
            why=f"it takes {math.prod(sizes)} devices and there are {len(devices)}",
            fix=f"nearest that fit ({', '.join(MESH_AXES)}): {nearest}",
        )
    return Mesh(
        _arrange_devices(sizes, devices), MESH_AXES, axis_types=(AxisType.Auto,) * len(sizes)
    )


def _arrange_devices(sizes: tuple[int, ...], devices: Sequence[Any]) -> np.ndarray:
    """Return the devices as an array of `sizes`.

    Neighbors in the array are physically linked where possible.
    """
    slices = 1
    if devices[0].platform == "tpu":
        slices = _num_slices(devices)
    if slices == 1:
        # Not `jax.make_mesh`: except on v5e, it requires each mesh axis to be a product of entire
        # axes of the chips' torus.
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    if sizes[0] % slices:
        raise InputError(
            f"mesh with {MESH_AXES[0]} {sizes[0]}",
            why=f"there are {slices} slices, and no other axis can cross the network between them",
            fix=f"a multiple of {slices}: --mesh.data {slices}",
        )
    within_slice = (sizes[0] // slices, *sizes[1:])
    across_slices = (slices, *(1 for _ in sizes[1:]))
    return mesh_utils.create_hybrid_device_mesh(
        within_slice, across_slices, devices, allow_split_physical_axes=True
    )


SplitDevices = Callable[[Sequence[Any], int], tuple[tuple[Any, ...], tuple[Any, ...]]]
"""See `split_devices`."""


def only_device(devices: Sequence[Any]) -> tuple[Any, ...]:
    """Return the one device, or raise InputError: programs of two threads that exchange data over
    several devices may wait for each other forever."""
    if len(devices) > 1:
        raise InputError(
            f"{len(devices)} devices cannot sample and learn at the same time",
            where="--sampling.during-updates",
            fix="set some apart: --sampling.devices N",
        )
    return tuple(devices)


def split_devices(devices: Sequence[Any], count: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the devices without the last `count`, and these.

    The chips of a TPU slice are cut between two planes, so that both parts are cuboids. Raises
    InputError if nothing would be left, or a slice cannot be cut so.
    """
    where = "--sampling.devices"
    if not 0 < count < len(devices):
        raise InputError(
            f"{count} of {len(devices)} devices cannot be set apart for sampling",
            where=where,
            why="others have to learn",
            fix=f"use at most {len(devices) - 1}" if len(devices) > 1 else "leave it out",
        )
    if devices[0].platform != "tpu":
        return tuple(devices[:-count]), tuple(devices[-count:])
    if _num_slices(devices) > 1:
        raise InputError(
            "the sampler cannot have devices of its own on several slices",
            where=where,
            why="a part of a slice has no links to another slice",
            fix="leave it out, or use one slice",
        )
    planes = [sorted(set(values)) for values in zip(*(d.coords for d in devices), strict=True)]
    # Cut the longest dimension that can be cut.
    for axis in sorted(range(len(planes)), key=lambda axis: -len(planes[axis])):
        chips = len(devices) // len(planes[axis])
        if count % chips == 0:
            last = planes[axis][-count // chips :]
            parts = ([], [])
            for device in devices:
                parts[device.coords[axis] in last].append(device)
            return tuple(parts[0]), tuple(parts[1])
    sizes = sorted({len(devices) // len(values) for values in planes if len(values) > 1})
    raise InputError(
        f"{count} of {len(devices)} chips are not whole planes of the slice",
        where=where,
        fix=f"use a multiple of {' or '.join(map(str, sizes))}",
    )


def fill_torus(devices: Sequence[Any]) -> bool:
    """Return True if the devices are all chips of a TPU slice that closes to rings in three
    dimensions: cubes of 4 x 4 x 4 chips, on v4 and v5p."""
    if devices[0].platform != "tpu":
        return False
    extents = [len(set(values)) for values in zip(*(d.coords for d in devices), strict=True)]
    return math.prod(extents) == len(devices) and all(n % 4 == 0 for n in extents)


def _nearest_sizes(sizes: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    """Return the three factorizations of `count` that are nearest to `sizes`.

    The distance is the sum over axes of the absolute log ratio of sizes. An expert or context axis
    of size 1 stays 1.
    """
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    later_choices = [[1] if size == 1 else divisors for size in sizes[3:]]
    candidates: list[tuple[int, ...]] = []
    for later_sizes in itertools.product(divisors, divisors, *later_choices):
        if count % math.prod(later_sizes) == 0:
            candidates.append((count // math.prod(later_sizes), *later_sizes))

    def distance(candidate: tuple[int, ...]) -> float:
        return sum(
            abs(math.log(new / max(old, 1))) for new, old in zip(candidate, sizes, strict=True)
        )

    return sorted(candidates, key=distance)[:3]


def sampling_mesh(mesh: Mesh, tensor: int) -> Mesh:
    """Return a sampling mesh over the devices of a training mesh, in the same order.

    Inside one jit, arrays can move between two meshes only if their devices have the same order.
    """
    devices = mesh.devices.reshape(-1, tensor)
    return Mesh(devices, SAMPLING_AXES, axis_types=(AxisType.Auto,) * len(SAMPLING_AXES))


# Partition specs.


def rules(mesh: Mesh | AbstractMesh) -> Mapping[str, tuple[str, ...]]:
    """Return the table of a mesh: SAMPLING_RULES or RULES, told apart by the names of its axes."""
    return SAMPLING_RULES if mesh.axis_names == SAMPLING_AXES else RULES


def spec(
    axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh | AbstractMesh
) -> PartitionSpec:
    """Return the PartitionSpec of an array of `shape` with logical `axes` (None: never sharded).

    For each dimension, the mesh axes are those of the mesh's `rules` that no earlier dimension
    uses. The dimension is sharded over the longest prefix of them that divides its size.
    """
    parts: list[tuple[str, ...] | None] = []
    used: set[str] = set()
    for axis, size in zip(axes, shape, strict=True):
        allowed = () if axis is None else rules(mesh)[axis]
        names = tuple(name for name in allowed if name not in used)
        while names and size % math.prod(mesh.shape[name] for name in names):
            names = names[:-1]
        used.update(names)
        parts.append(names or None)
    return PartitionSpec(*parts)


def mesh_axes(part: Any) -> tuple[str, ...]:
    """Return the mesh axes in one entry of a PartitionSpec, which is None, a name or a tuple."""
    return (part,) if isinstance(part, str) else tuple(part or ())


def shardings(axes: Any, mesh: Mesh, shapes: Any) -> Any:
    """Return a tree of NamedSharding.

    `axes` is a tree of tuples of logical axes; `shapes` is a tree of arrays, or of shapes and
    dtypes, of the same structure.
    """
    return jax.tree.map(
        lambda leaf, names: NamedSharding(mesh, spec(names, leaf.shape, mesh)), shapes, axes
    )


def constrain(x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
    """Constrain `x`, inside jit, to the sharding of its logical `axes`.

    The mesh is that of `jax.set_mesh`; without one, `x` is returned as it is. Models call this on
    activations, because the compiler might otherwise gather them on every device.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(axes, x.shape, mesh)))


def spread(axis: str | None, size: int) -> int:
    """Return the number of shards of a dimension of `size` with a logical axis.

    The mesh is that of `jax.set_mesh`; without one, the number is 1.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return 1
    part = spec((axis,), (size,), mesh)[0]
    return math.prod(mesh.shape[name] for name in mesh_axes(part))


def batch_sharding(mesh: Mesh, shape: Sequence[int], rows: int) -> NamedSharding:
    """Return the sharding of an array of `shape` whose dimension `rows` counts rows.

    For a micro-batched [K, R, S] array, `rows` is 1.
    """
    axes = ["rows" if i == rows % len(shape) else None for i in range(len(shape))]
    return NamedSharding(mesh, spec(axes, shape, mesh))


# Device memory and host memory.

HOST = "pinned_host"
"""The memory kind, as jax names it, of the host that a device belongs to. Copies between it and the
device are asynchronous."""

DEVICE = "device"
"""The memory kind, as jax names it, of a device's own memory."""


def in_memory(tree: Any, kind: str) -> Any:
    """Move the arrays of a tree to one kind of memory. Scalars stay where they are.

    The leaves may also be jax.ShapeDtypeStruct with shardings.
    """

    def move(leaf: Any) -> Any:
        if not leaf.ndim or leaf.sharding.memory_kind == kind:
            return leaf
        sharding = leaf.sharding.with_memory_kind(kind)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return jax.device_put(leaf, sharding)

    return jax.tree.map(move, tree)


def in_device_memory(tree: Any) -> Any:
    """Copy those arrays of a tree that are in host memory to their devices' memory."""
    return jax.tree.map(
        lambda leaf: in_memory(leaf, DEVICE) if is_on_host(leaf.sharding) else leaf, tree
    )


def is_on_host(sharding: Sharding) -> bool:
    """Return True if arrays with this sharding are in host memory."""
    return sharding.memory_kind == HOST


# Transfers between hosts and the mesh.


def put(tree: Any, shardings: Any) -> Any:
    """Place host arrays, which are complete and equal on every process, on the mesh.

    Every process passes its devices the shards that they hold. `shardings` is one sharding, or a
    tree of them. The result may share memory with the argument, so do not donate it.
    """

    def put_array(array: Any, sharding: Sharding) -> jax.Array:
        if sharding.is_fully_addressable:
            return jax.device_put(array, sharding)
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(
                put_array(jax.random.key_data(array), sharding), impl=jax.random.key_impl(array)
            )
        # Not jax.device_put: it would first compare the arrays of all processes, every time.
        host_array = np.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype))
        return jax.make_array_from_callback(
            host_array.shape, sharding, lambda index: host_array[index]
        )

    if isinstance(shardings, Sharding):
        return jax.tree.map(lambda array: put_array(array, shardings), tree)
    return jax.tree.map(put_array, tree, shardings)


def place(params: Any, axes: Any, mesh: Mesh) -> Any:
    """Place `params` on the mesh, sharded according to their logical `axes`.

    The result may share memory with the argument, so do not donate it.
    """
    return put(params, shardings(axes, mesh, params))


def to_host(tree: Any) -> Any:
    """Return the arrays of a tree as complete numpy arrays on every process.

    A collective operation: all processes must call it together.
    """

    def gather(array: jax.Array) -> jax.Array:
        sharding = array.sharding
        if (
            array.is_fully_addressable
            or array.is_fully_replicated
            or not isinstance(sharding, NamedSharding)
        ):
            return array
        return _replicate(NamedSharding(sharding.mesh, PartitionSpec()))(array)

    return jax.tree.map(np.asarray, jax.tree.map(gather, tree))


@functools.cache
def _replicate(replicated: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """Return a jitted identity whose result has the given sharding.

    Cached, because a new jitted function would be compiled again at every call.
    """
    return jax.jit(lambda array: array, out_shardings=replicated)


def _num_slices(devices: Sequence[Any]) -> int:
    """Count the TPU slices that the devices are on."""
    # The devices of a topology description of one slice have no slice_index.
    return len({getattr(device, "slice_index", 0) for device in devices})
