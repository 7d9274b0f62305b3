"""The copy of the weights that the sampler reads.

Training and sampling want different layouts. The optimizer wants float32 masters, sharded over all
devices. A decode step reads every weight once, so gathering sharded weights for every token would
take most of its time. Completions are therefore sampled with a copy of the weights wherever it
differs from the masters: in the type that the model computes in and, with
`--sampling.tensor-parallel N`, on another mesh over the same devices. On that mesh N devices share
heads and widths, the other axis spreads rows, and the experts of a mixture are spread over all
devices that divide their number.

The copy is made leaf by leaf when a rollout begins and freed when it ends; the masters keep their
bits. With `--sampling.weight-dtype` the matrices of the copy have eight bits: the program that
moves a matrix quantizes it before (see `models.quantization`). Where nothing differs, the masters
themselves are read. Where only the placement differs, no copy is made: the run moves the weights
there (`reshard_for_sampling`) and back (`reshard_back`), so that memory never holds more than one
layout and the largest leaf.

With `--sampling.devices N` the sampler has devices of its own, and always reads copies, as it does
with `--sampling.during-updates`. The
training devices gather a leaf until each part that a sampling device wants is whole on one of them.
Then parts go from device to device, and never through the host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_rl import models
from tpu_rl.errors import InputError
from tpu_rl.models import Select, quantization
from tpu_rl.models.config import QUANTIZED, SCALE, WeightDtype
from tpu_rl.models.quantization import Quantized
from tpu_rl.sampler.config import TensorParallel
from tpu_rl.train import sharding
from tpu_rl.types import Array, Params, Policy


class RolloutPolicy(NamedTuple):
    """A policy as the sampler uses it."""

    policy: Policy
    params: Callable[[Params], Params]
    """The whole params tree -> the tree that the policy reads, placed on `mesh`."""
    mesh: Mesh
    """The sampling mesh: to be set with `jax.set_mesh`, and passed to the sampler."""
    drafter: Policy | None = None
    """The small model of speculative decoding. It reads the same params tree."""
    device: Any = None
    """The device that computes random keys and the like, if the sampler has devices of its own:
    jax's default is busy with updates."""
    with_images: Any = None
    """`image_prompts.ImageFeatures` of that tree. None: the policy reads texts only."""


class SamplingLayout(NamedTuple):
    """The layout of weights during sampling."""

    mesh: Mesh
    dtype: str
    """The type that the model computes in."""
    training_mesh: Mesh | None = None
    """The mesh of the weights, if they are on other devices."""
    weight_dtype: WeightDtype | None = None
    """The type of quantized matrices; None if none are."""


def require_tensor_parallel(tensor_parallel: TensorParallel | None, num_devices: int) -> None:
    """Check --sampling.tensor-parallel for sampling on a number of devices.

    Raises InputError if it does not divide the number.
    """
    if not isinstance(tensor_parallel, int):
        return
    if tensor_parallel >= 1 and num_devices % tensor_parallel == 0:
        return
    divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    nearest = sorted(divisors, key=lambda n: abs(n - tensor_parallel))[:3]
    raise InputError(
        f"{num_devices} devices cannot be cut into groups of {tensor_parallel}",
        where="--sampling.tensor-parallel",
        fix=f"nearest that fit: {', '.join(map(str, nearest))}",
    )


def sampling_mesh(
    tensor_parallel: TensorParallel | None, mesh: Mesh, devices: Sequence[Any] = ()
) -> Mesh:
    """Return the mesh for sampling: over `devices`, if the sampler has its own, with a tensor
    parallelism of 1 by default; otherwise over those of the run's mesh, by default that mesh.

    Raises InputError if `tensor_parallel` does not divide the devices.
    """
    require_tensor_parallel(tensor_parallel, len(devices) or mesh.size)
    size = tensor_parallel if isinstance(tensor_parallel, int) else None
    if devices:
        return sharding.sampling_mesh(sharding.make_mesh(len(devices), devices=devices), size or 1)
    return mesh if size is None else sharding.sampling_mesh(mesh, size)


def rollout_policy(
    policy: Policy, reads: Iterable[Select], layout: SamplingLayout, drafter: Policy | None = None
) -> RolloutPolicy:
    """Return a policy with the copy of the weights that it samples with.

    `reads` selects the roles whose params the policy and the drafter read.
    """
    selects = list(reads)

    def sampling_params(params: Params) -> Params:
        chosen, target, placements = _targets(params, selects, layout)
        copy = functools.partial(_copy_leaf, layout)
        if layout.training_mesh is None:
            copied = jax.tree.map_with_path(copy, chosen, target, placements)
            return params | quantization.with_scales(copied)
        # Nothing else: a program cannot read from other devices.
        with jax.set_mesh(layout.training_mesh):
            sent = jax.tree.map_with_path(copy, chosen, target, placements)
        return quantization.with_scales(sent)

    device = None if layout.training_mesh is None else layout.mesh.devices.flat[0]
    return RolloutPolicy(policy, sampling_params, layout.mesh, drafter, device)


def _targets(
    params: Params, reads: Iterable[Select], layout: SamplingLayout
) -> tuple[Any, Any, Any]:
    """Return the params that the roles read, as shapes and types, and their shardings in
    sampling."""
    names = {name for select in reads for name in (select.name, select.base) if name is not None}
    chosen = {name: params[name] for name in sorted(names)}
    target = jax.eval_shape(
        lambda weights: models.cast_to_compute_dtype(weights, layout.dtype), chosen
    )
    if layout.weight_dtype is not None:
        target = quantization.with_dtype(target, layout.weight_dtype)
    return chosen, target, sharding.shardings(models.axes(chosen), layout.mesh, chosen)


def _copy_leaf(
    layout: SamplingLayout,
    path: Any,
    weight: Any,
    target: jax.ShapeDtypeStruct,
    placement: NamedSharding,
) -> Any:
    """Return a weight as the sampler reads it."""
    name = path[-1].key
    if layout.weight_dtype is not None and name in QUANTIZED:
        return _copy_quantized(layout, name, weight, placement)
    if layout.training_mesh is not None:
        return _copy_apart(layout.training_mesh, weight, target, placement)
    return _copy(weight, target, placement)


def _copy_quantized(
    layout: SamplingLayout, name: str, weight: Any, placement: NamedSharding
) -> Quantized:
    """Return the weight `name` quantized, with a placement for its numbers.

    A shape is converted like an array.
    """
    assert layout.weight_dtype is not None
    quantize = _quantize(name, layout.dtype, layout.weight_dtype)
    shapes = jax.eval_shape(quantize, weight)
    axes = models.axes({name + SCALE: shapes.scale})[name + SCALE]
    scale_spec = sharding.spec(axes, shapes.scale.shape, placement.mesh)
    placements = Quantized(placement, NamedSharding(placement.mesh, scale_spec))
    if isinstance(weight, jax.ShapeDtypeStruct):
        return jax.tree.map(
            lambda shape, to: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=to),
            shapes,
            placements,
        )
    training_mesh = layout.training_mesh
    if training_mesh is None:
        return _quantize_and_move(quantize, weight.sharding, weight.shape, placements)(weight)
    gathered = jax.tree.map(lambda to: gathered_sharding(to, training_mesh), placements)
    quantized = _quantize_and_move(quantize, weight.sharding, weight.shape, gathered)(weight)
    return jax.tree.map(_send, quantized, placements)


@functools.cache
def _quantize(name: str, dtype: str, weight_dtype: WeightDtype) -> Callable[[Array], Quantized]:
    def quantize(weight: Array) -> Quantized:
        # What is quantized are the weights that the trainer's model computes with.
        rounded = models.cast_to_compute_dtype({name: weight}, dtype)[name]
        return quantization.quantize(name, rounded, weight_dtype)

    return quantize


@functools.cache
def _quantize_and_move(
    quantize: Callable[[Array], Quantized],
    source: NamedSharding,
    shape: tuple[int, ...],
    placements: Quantized,
) -> Callable[[Array], Quantized]:
    """Return one jitted program. Links carry numbers of eight bits."""
    transit = transit_sharding(source, placements.numbers, shape)

    def convert(weight: Array) -> Quantized:
        numbers, scale = quantize(weight)
        numbers = jax.lax.with_sharding_constraint(numbers, source)
        return Quantized(jax.lax.with_sharding_constraint(numbers, transit), scale)

    return jax.jit(convert, out_shardings=placements)


def _copy(weight: Any, target: jax.ShapeDtypeStruct, placement: NamedSharding) -> Any:
    """Return the weight with the target's type and placement: itself, if it has both already.

    A shape is converted like an array.
    """
    if weight.dtype == target.dtype and weight.sharding.is_equivalent_to(placement, weight.ndim):
        return weight
    if isinstance(weight, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(target.shape, target.dtype, sharding=placement)
    transit = transit_sharding(weight.sharding, placement, weight.shape)
    return _convert(target.dtype, transit, placement)(weight)


def _copy_apart(
    training_mesh: Mesh, weight: Any, target: jax.ShapeDtypeStruct, placement: NamedSharding
) -> Any:
    """Return a copy with the target's type and a placement on the devices that sample."""
    if isinstance(weight, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(target.shape, target.dtype, sharding=placement)
    if weight.dtype == target.dtype and weight.sharding.is_equivalent_to(placement, weight.ndim):
        return weight.copy()  # The same device learns, and will donate the weight.
    return _send(_copy(weight, target, gathered_sharding(placement, training_mesh)), placement)


def gathered_sharding(placement: NamedSharding, training_mesh: Mesh) -> NamedSharding:
    """Return a sharding over the training devices of which each shard of the placement is a part of
    one shard."""
    tensor = math.gcd(training_mesh.size, placement.mesh.shape["tensor"])
    parts = ["tensor" if "tensor" in sharding.mesh_axes(part) else None for part in placement.spec]
    mesh = sharding.sampling_mesh(training_mesh, tensor)
    return NamedSharding(mesh, PartitionSpec(*parts))


def _send(weight: Array, placement: NamedSharding) -> Array:
    """Copy an array to other devices; each of their shards is a part of one of the array's."""
    pieces = []
    indices = placement.addressable_devices_indices_map(weight.shape)
    for number, (device, index) in enumerate(indices.items()):
        ranges = _ranges(index, weight.shape)
        holders = [
            shard
            for shard in weight.addressable_shards
            if _contains(_ranges(shard.index, weight.shape), ranges)
        ]
        shard = holders[number % len(holders)]  # All of them send.
        starts = [start for start, _ in _ranges(shard.index, weight.shape)]
        part = tuple(
            slice(begin - start, end - start)
            for start, (begin, end) in zip(starts, ranges, strict=True)
        )
        piece = shard.data
        if piece.shape != tuple(end - begin for begin, end in ranges):
            with jax.set_mesh(Mesh([shard.device], ["device"])):
                piece = piece[part]
        pieces.append(jax.device_put(piece, device))
    return jax.make_array_from_single_device_arrays(weight.shape, placement, pieces)


def _ranges(index: Any, shape: Sequence[int]) -> list[tuple[int, int]]:
    """Return the begin and the end of a shard in each dimension."""
    return [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]


def _contains(outer: Sequence[tuple[int, int]], inner: Sequence[tuple[int, int]]) -> bool:
    return all(
        first <= begin and end <= last
        for (first, last), (begin, end) in zip(outer, inner, strict=True)
    )


@functools.cache
def _convert(
    dtype: Any, transit: NamedSharding, placement: NamedSharding
) -> Callable[[Array], Array]:
    def convert(weight: Array) -> Array:
        return jax.lax.with_sharding_constraint(weight.astype(dtype), transit)

    return jax.jit(convert, out_shardings=placement)


def transit_sharding(source: Any, placement: NamedSharding, shape: Sequence[int]) -> NamedSharding:
    """Return a sharding for an array on its way from one placement to another.

    It is cut as in its new placement and, along the first dimension that only the old placement
    cuts, by the axes over which the new placement replicates. So devices exchange parts first, and
    replicate last. Without this step the compiler gathers the whole array on every device: 3.5 GiB
    of a v5e for the MLPs of Llama-3.1-8B in bfloat16.
    """
    mesh = placement.mesh
    parts = [*placement.spec, *(None,) * (len(shape) - len(placement.spec))]
    used = {axis for part in parts for axis in sharding.mesh_axes(part)}
    replicating = tuple(axis for axis in mesh.axis_names if axis not in used)
    size = math.prod(mesh.shape[axis] for axis in replicating)
    for dimension, part in enumerate(source.spec):
        if part and not parts[dimension] and shape[dimension] % size == 0:
            parts[dimension] = replicating
            break
    return NamedSharding(mesh, PartitionSpec(*parts))


# --- weights that move ---


def reshard_for_sampling(params: Params, reads: Iterable[Select], layout: SamplingLayout) -> Params:
    """Return the params with everything that the roles read placed for sampling.

    Only leaves move whose type is that of sampling already. The argument is consumed, as by
    `reshard_back`, which brings the weights back.
    """
    chosen, target, placements = _targets(params, reads, layout)

    def destination(weight: Any, wanted: jax.ShapeDtypeStruct, placement: NamedSharding) -> Any:
        return placement if weight.dtype == wanted.dtype else weight.sharding

    moved = jax.tree.map(destination, chosen, target, placements)
    return reshard_back(params, placements_of(params) | moved)


def reshard_back(params: Params, placements: Any) -> Params:
    """Return the params in these placements, bit by bit.

    Each leaf is freed in its old placement before the next one moves. The argument is consumed: do
    not use it afterwards.
    """
    moved: dict[int, Any] = {}  # A leaf that is in two places of the tree moves once.

    def move_once(weight: Any, placement: NamedSharding) -> Any:
        if id(weight) not in moved:
            moved[id(weight)] = _move(weight, placement)
        return moved[id(weight)]

    return jax.tree.map(move_once, params, placements)


def placements_of(params: Params) -> Any:
    """Return the sharding of each leaf."""
    return jax.tree.map(lambda weight: weight.sharding, params)


def _move(weight: Any, placement: NamedSharding) -> Any:
    copy = _copy(weight, jax.ShapeDtypeStruct(weight.shape, weight.dtype), placement)
    if copy is not weight and not isinstance(weight, jax.ShapeDtypeStruct):
        copy.block_until_ready()
        weight.delete()
    return copy
