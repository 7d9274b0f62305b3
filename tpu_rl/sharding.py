"""The device mesh, and which logical axis is cut along which mesh axis: a table for learning, one for drawing.

Mesh axes: "data" (rows; weights copied), "fsdp" (rows, and weights cut along their width), "tensor" (heads, MLP width
and vocabulary), "expert" (a mixture's experts; to all else it is more of "fsdp"), "context" (the tokens of a packed
row, for rows too long for one device; to weights and to the sampler it is more of "fsdp"). A mesh that completions
alone are drawn on has "data" and "tensor" only. A dimension that the mesh does not divide is copied instead: slower,
never wrong.
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

RULES: Mapping[str, tuple[str, ...]] = {
    "rows": ("data", "fsdp", "expert"),
    "tokens": ("context",),
    "slots": ("data", "fsdp", "expert", "context"),
    "vocab": ("tensor",),
    "embed": ("fsdp", "expert", "context"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "experts": ("expert",),
    "expert_mlp": ("tensor",),
    "head_dim": (),
    "layers": (),
    "outputs": (),
    "routes": (),
    "rank": (),
}
"""Logical axis -> the mesh axes that cut it. Models name the logical axes of their leaves (`Model.axes`). Packed rows
are "rows" of "tokens"; "slots" are what the sampler decodes rows in."""

DRAWING_AXES = ("data", "tensor")
DRAWING_RULES: Mapping[str, tuple[str, ...]] = dict.fromkeys(RULES, ()) | {
    **dict.fromkeys(("rows", "slots"), ("data",)),
    **dict.fromkeys(("vocab", "heads", "kv_heads", "mlp", "expert_mlp"), ("tensor",)),
    "experts": ("data", "tensor"),
}
"""The same on a mesh for drawing: whole weights would be gathered for every token, so nothing is cut but what a device
can compute its part of. Experts are each on one device, if the devices divide them: each gathers the tokens of all,
which are few but in prefill, and gives back sums."""


def make_mesh(
    data: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    expert: int = 1,
    context: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh over `devices` (default: all there are), which the product of all axes must use up exactly.

    Slices of TPUs, which only a data center's network joins, lie along `data`. Raises InputError where the product does
    not fit, naming the nearest sizes that do, or where slices do not divide `data`.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = (data, fsdp, tensor, expert, context)
    if min(sizes) < 1 or math.prod(sizes) != len(devices):
        raise InputError(
            "mesh of " + " x ".join(f"{name} {size}" for name, size in zip(MESH_AXES, sizes, strict=True)),
            why=f"it takes {math.prod(sizes)} devices and there are {len(devices)}",
            fix=f"nearest that fit ({', '.join(MESH_AXES)}): " + ", ".join(map(str, _nearest(sizes, len(devices)))),
        )
    return Mesh(_by_links(sizes, devices), MESH_AXES, axis_types=(AxisType.Auto,) * len(sizes))


def _by_links(sizes: tuple[int, ...], devices: Sequence[Any]) -> np.ndarray:
    """The devices as a mesh of these sizes, in which neighbours are linked as far as that can be."""
    # Descriptions of the chips of one slice have no number of it.
    slices = len({getattr(device, "slice_index", 0) for device in devices}) if devices[0].platform == "tpu" else 1
    if slices == 1:
        # Not `jax.make_mesh`: but for v5e it wants each axis to be a product of whole axes of the chips' torus.
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    if sizes[0] % slices:
        raise InputError(
            f"mesh with {MESH_AXES[0]} {sizes[0]}",
            why=f"there are {slices} slices, and no other axis can cross the network between them",
            fix=f"a multiple of {slices}: --mesh.data {slices}",
        )
    within, across = (sizes[0] // slices, *sizes[1:]), (slices, *(1 for _ in sizes[1:]))
    return mesh_utils.create_hybrid_device_mesh(within, across, devices, allow_split_physical_axes=True)


def drawing_mesh(mesh: Mesh, tensor: int) -> Mesh:
    """The mesh's devices, in their order, as one for drawing. Arrays may move between the two in a jit."""
    devices = mesh.devices.reshape(-1, tensor)
    return Mesh(devices, DRAWING_AXES, axis_types=(AxisType.Auto,) * len(DRAWING_AXES))


def rules(mesh: Mesh | AbstractMesh) -> Mapping[str, tuple[str, ...]]:
    """The table of a mesh, which its axes tell: those of `drawing_mesh` or of `make_mesh`."""
    return DRAWING_RULES if mesh.axis_names == DRAWING_AXES else RULES


def _nearest(sizes: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    """The three ways to write `count` as a product that change `sizes` least, in factors; a size of 1 stays."""
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    ways = [
        (count // math.prod(rest), *rest)
        for rest in itertools.product(divisors, divisors, *([1] if size == 1 else divisors for size in sizes[3:]))
        if count % math.prod(rest) == 0
    ]

    def distance(way: tuple[int, ...]) -> float:
        return sum(abs(math.log(new / max(old, 1))) for new, old in zip(way, sizes, strict=True))

    return sorted(ways, key=distance)[:3]


def spec(axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """How an array of `shape` with logical `axes` (None: never cut) is cut over the mesh.

    Of the mesh axes that the mesh's `rules` give a dimension and that cut none before it, the longest prefix that
    divides it is used.
    """
    parts: list[tuple[str, ...] | None] = []
    used: set[str] = set()
    for axis, size in zip(axes, shape, strict=True):
        mesh_axes = tuple(name for name in (rules(mesh)[axis] if axis is not None else ()) if name not in used)
        while mesh_axes and size % math.prod(mesh.shape[name] for name in mesh_axes):
            mesh_axes = mesh_axes[:-1]
        used |= {*mesh_axes}
        parts.append(mesh_axes or None)
    return PartitionSpec(*parts)


def mesh_axes(part: Any) -> tuple[str, ...]:
    """Of one dimension of a PartitionSpec: the mesh axes that cut it."""
    return (part,) if isinstance(part, str) else tuple(part or ())


def shardings(axes: Any, mesh: Mesh, shapes: Any) -> Any:
    """A tree of NamedSharding for a tree of logical axes and a like tree of arrays (or of their shapes and dtypes)."""
    return jax.tree.map(lambda leaf, names: NamedSharding(mesh, spec(names, leaf.shape, mesh)), shapes, axes)


def constrain(x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
    """`x` inside jit, cut as its logical `axes` say over the mesh of `jax.set_mesh`; untouched where none is set.

    Models call it on activations, which the compiler would else be free to gather whole.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(axes, x.shape, mesh)))


def place(params: Any, axes: Any, mesh: Mesh) -> Any:
    """`params` cut over the mesh as their logical `axes` say. May share memory with the argument: do not donate."""
    return put(params, shardings(axes, mesh, params))


# --- a device's memory and its host's ----------------------------------------------------------------------------

HOST, DEVICE = "pinned_host", "device"
"""Kinds of memory, as jax names them: of the machine that a device is in, where its copies are asynchronous, and its
own."""


def in_memory(tree: Any, kind: str) -> Any:
    """The arrays of a tree, or their shapes and places, in one kind of memory. Numbers stay where they are."""

    def one(leaf: Any) -> Any:
        if not leaf.ndim or leaf.sharding.memory_kind == kind:
            return leaf
        place = leaf.sharding.with_memory_kind(kind)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
        return jax.device_put(leaf, place)

    return jax.tree.map(one, tree)


def in_device_memory(tree: Any) -> Any:
    """The arrays of a tree, of which those in the hosts' memory are copied to their devices'."""
    return jax.tree.map(lambda leaf: in_memory(leaf, DEVICE) if is_on_host(leaf.sharding) else leaf, tree)


def is_on_host(place: Sharding) -> bool:
    return place.memory_kind == HOST


# --- between hosts and the mesh ----------------------------------------------------------------------------------


def put(tree: Any, places: Any) -> Any:
    """Arrays that every process has whole and alike -> arrays of the mesh, of which each holds its devices' parts.

    `places`: one sharding, or a tree of them. May share memory with the argument: do not donate.
    """

    def one(array: Any, place: Sharding) -> jax.Array:
        if place.is_fully_addressable:
            return jax.device_put(array, place)
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(one(jax.random.key_data(array), place), impl=jax.random.key_impl(array))
        # jax.device_put would compare the processes' arrays first, each time.
        whole = np.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype))
        return jax.make_array_from_callback(whole.shape, place, lambda part: whole[part])

    if isinstance(places, Sharding):
        return jax.tree.map(lambda array: one(array, places), tree)
    return jax.tree.map(one, tree, places)


def to_host(tree: Any) -> Any:
    """Arrays of the mesh -> numpy, whole, on every process. All processes call it together."""

    def whole(array: jax.Array) -> jax.Array:
        place = array.sharding
        if array.is_fully_addressable or array.is_fully_replicated or not isinstance(place, NamedSharding):
            return array
        return _replicate(NamedSharding(place.mesh, PartitionSpec()))(array)

    return jax.tree.map(np.asarray, jax.tree.map(whole, tree))


@functools.cache
def _replicate(everywhere: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """A jitted identity."""
    return jax.jit(lambda array: array, out_shardings=everywhere)


def batch_sharding(mesh: Mesh, shape: Sequence[int], rows: int) -> NamedSharding:
    """Of an array of `shape` whose dimension `rows` counts rows, as dimension 1 of a micro-batched [K, R, S]."""
    axes = ["rows" if i == rows % len(shape) else None for i in range(len(shape))]
    return NamedSharding(mesh, spec(axes, shape, mesh))


def spread(axis: str | None, size: int) -> int:
    """Over how many devices of the mesh of `jax.set_mesh` a dimension of `size` with a logical axis is cut; 1 where
    none is set."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return 1
    cut = spec((axis,), (size,), mesh)[0]
    return math.prod(mesh.shape[name] for name in ((cut,) if isinstance(cut, str) else cut or ()))
