"""What completes prompts, where, and with which copy of the weights.

Learning and sampling want different things. The optimizer wants float32 masters, cut over all devices; a decode step
reads every weight once, so that gathering them for every token would take most of its time. Completions are therefore
drawn with a copy of the weights wherever it differs from the masters: in the type that the model computes in, and with
`--sampling.tensor N` on a mesh of its own over the same devices, where heads and widths are cut N ways and rows over
the rest, and the experts of a mixture over all that divide them. It is made leaf by leaf when a rollout begins and goes
when the rollout ends, and the masters keep their bits. Where nothing differs, they themselves are read; and where only
their places do, there is no copy: a run moves them there and back (`lent`, `relaid`), so that memory never holds more
than one layout and the largest leaf.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from launch.config import ExperimentConfig
from launch.roles import Select
from tpu_rl import models, sharding
from tpu_rl.errors import InputError
from tpu_rl.types import Array, Params, Policy


class Acting(NamedTuple):
    """What answers."""

    policy: Policy
    params: Callable[[Params], Params]
    """The whole params tree -> what the policy reads."""
    mesh: Mesh
    """Where it does: to be set with `jax.set_mesh`, and given to the sampler."""


def require_groups(config: ExperimentConfig, mesh: Mesh | AbstractMesh) -> None:
    """Raises InputError where the devices cannot be cut as --sampling.tensor says."""
    tensor = config.sampling.tensor
    if tensor is not None and (tensor < 1 or mesh.size % tensor):
        divisors = [n for n in range(1, mesh.size + 1) if mesh.size % n == 0]
        raise InputError(
            f"{mesh.size} devices cannot be cut into groups of {tensor}", where="--sampling.tensor",
            fix=f"nearest that fit: {', '.join(map(str, sorted(divisors, key=lambda n: abs(n - tensor))[:3]))}",
        )  # fmt: skip


def sampling_mesh(config: ExperimentConfig, mesh: Mesh) -> Mesh:
    """The mesh that completions are drawn on, over the devices of the run's mesh."""
    require_groups(config, mesh)
    return mesh if config.sampling.tensor is None else sharding.drawing_mesh(mesh, config.sampling.tensor)


def acting(config: ExperimentConfig, policy: Policy, reads: Iterable[Select], mesh: Mesh) -> Acting:
    """A policy that reads the params of such roles, where the run's settings want it; `mesh` is the run's."""
    here, reads = sampling_mesh(config, mesh), list(reads)

    def lay_out(params: Params) -> Params:
        return params | jax.tree.map(_copy, *_as_read(config, reads, params, here))

    return Acting(policy, lay_out, here)


def _as_read(config: ExperimentConfig, reads: Iterable[Select], params: Params, here: Mesh) -> tuple[Any, Any, Any]:
    """(what such roles read of the params tree, the shapes and types that it is drawn with, its places)."""
    names = sorted({name for select in reads for name in (select.name, select.under) if name is not None})
    chosen = {name: params[name] for name in names}
    wanted = jax.eval_shape(lambda weights: models.narrow(weights, config.model.dtype), chosen)
    return chosen, wanted, sharding.shardings(models.axes(chosen), here, chosen)


def _copy(weight: Any, wanted: jax.ShapeDtypeStruct, place: NamedSharding) -> Any:
    """The weight itself where it is as wanted; of a mere shape, the shape that is wanted."""
    if weight.dtype == wanted.dtype and weight.sharding.is_equivalent_to(place, weight.ndim):
        return weight
    if isinstance(weight, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(wanted.shape, wanted.dtype, sharding=place)
    return _converted(wanted.dtype, on_the_way(weight.sharding, place, weight.shape), place)(weight)


@functools.cache
def _converted(dtype: Any, way: NamedSharding, place: NamedSharding) -> Callable[[Array], Array]:
    def convert(weight: Array) -> Array:
        return jax.lax.with_sharding_constraint(weight.astype(dtype), way)

    return jax.jit(convert, out_shardings=place)


def on_the_way(source: Any, place: NamedSharding, shape: Sequence[int]) -> NamedSharding:
    """Where an array passes through: cut as in its new place, and by the axes that copy it there along the first
    dimension that only the old place cuts.

    So devices exchange parts, and what is copied is copied last. Straight from one to the other the compiler gathers
    the whole array on every device: 3.5 GiB of a v5e for the MLPs of Llama-3.1-8B in bfloat16.
    """
    parts, mesh = [*place.spec, *(None,) * (len(shape) - len(place.spec))], place.mesh
    used = {axis for part in parts for axis in sharding.mesh_axes(part)}
    idle = tuple(axis for axis in mesh.axis_names if axis not in used)
    for i, part in enumerate(source.spec):
        if part and not parts[i] and shape[i] % math.prod(mesh.shape[axis] for axis in idle) == 0:
            parts[i] = idle
            break
    return NamedSharding(mesh, PartitionSpec(*parts))


# --- weights that move -------------------------------------------------------------------------------------------


def lent(config: ExperimentConfig, reads: Iterable[Select], params: Params, mesh: Mesh) -> Params:
    """The whole params tree for drawing completions with such roles: what they read in the type that it has lies where
    it is read. Takes the argument over, as `relaid`, which brings it back."""
    chosen, wanted, places = _as_read(config, reads, params, sampling_mesh(config, mesh))

    def place(weight: Any, wanted: jax.ShapeDtypeStruct, there: NamedSharding) -> Any:
        return there if weight.dtype == wanted.dtype else weight.sharding

    return relaid(params, places_of(params) | jax.tree.map(place, chosen, wanted, places))


def relaid(params: Params, places: Any) -> Params:
    """The params in such places, bit by bit; each leaf is freed where it was before the next one moves, so that the
    argument must not be used any more."""
    moved: dict[int, Any] = {}  # what stands in two places of the tree moves once

    def one(weight: Any, place: NamedSharding) -> Any:
        if id(weight) not in moved:
            moved[id(weight)] = _move(weight, place)
        return moved[id(weight)]

    return jax.tree.map(one, params, places)


def places_of(params: Params) -> Any:
    return jax.tree.map(lambda weight: weight.sharding, params)


def _move(weight: Any, place: NamedSharding) -> Any:
    there = _copy(weight, jax.ShapeDtypeStruct(weight.shape, weight.dtype), place)
    if there is not weight and not isinstance(weight, jax.ShapeDtypeStruct):
        there.block_until_ready()
        weight.delete()
    return there
