"""What completes prompts, where, and with which copy of the weights.

Learning and sampling want different things. The optimizer wants float32 masters, cut over all devices; a decode step
reads every weight once, so that gathering them for every token would take most of its time. Completions are therefore
drawn with a copy of the weights wherever it differs from the masters: in the type that the model computes in, and with
`--sampling.tensor N` on a mesh of its own over the same devices, where heads and widths are cut N ways and rows over
the rest, and the experts of a mixture over all that divide them. It is made leaf by leaf when a rollout begins and goes
when the rollout ends: memory holds one layout more than learning needs, and the masters keep their bits. Where nothing
differs, they themselves are read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

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


def sampling_mesh(config: ExperimentConfig, mesh: Mesh) -> Mesh:
    """The mesh that completions are drawn on, over the devices of the run's mesh."""
    tensor = config.sampling.tensor
    if tensor is None:
        return mesh
    if tensor < 1 or mesh.size % tensor:
        divisors = [n for n in range(1, mesh.size + 1) if mesh.size % n == 0]
        raise InputError(
            f"{mesh.size} devices cannot be cut into groups of {tensor}", where="--sampling.tensor",
            fix=f"nearest that fit: {', '.join(map(str, sorted(divisors, key=lambda n: abs(n - tensor))[:3]))}",
        )  # fmt: skip
    return sharding.drawing_mesh(mesh, tensor)


def acting(config: ExperimentConfig, policy: Policy, reads: Iterable[Select], mesh: Mesh) -> Acting:
    """A policy that reads the params of such roles, where the run's settings want it; `mesh` is the run's."""
    here = sampling_mesh(config, mesh)
    names = sorted({name for select in reads for name in (select.name, select.under) if name is not None})

    def lay_out(params: Params) -> Params:
        chosen = {name: params[name] for name in names}
        places = sharding.shardings(models.axes(chosen), here, chosen)
        wanted = jax.eval_shape(lambda weights: models.narrow(weights, config.model.dtype), chosen)
        return params | jax.tree.map(_copy, chosen, wanted, places)

    return Acting(policy, lay_out, here)


def _copy(weight: Any, wanted: jax.ShapeDtypeStruct, place: NamedSharding) -> Any:
    """The weight itself where it is as wanted; of a mere shape, the shape that is wanted."""
    if weight.dtype == wanted.dtype and weight.sharding.is_equivalent_to(place, weight.ndim):
        return weight
    if isinstance(weight, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(wanted.shape, wanted.dtype, sharding=place)
    return _converted(wanted.dtype, place)(weight)


@functools.cache
def _converted(dtype: Any, place: NamedSharding) -> Callable[[Array], Array]:
    return jax.jit(lambda weight: weight.astype(dtype), out_shardings=place)
