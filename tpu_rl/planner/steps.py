"""The jitted steps of a run as the planner sees them: programs compiled for shapes.

No array is made. Arguments and results are trees of `jax.ShapeDtypeStruct` with shardings, so a
program for a large pod compiles on a laptop.
"""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from tpu_rl import jax_versions
from tpu_rl.train import sharding


class Compiled(NamedTuple):
    """The result of compiling a program for a chip."""

    program: jax.stages.Compiled | None
    """None if the program needs more memory than the chip has."""
    memory_error: str
    """The compiler's message if the program needs too much memory, else empty."""
    seconds: float
    """Compile time."""

    @property
    def text(self) -> str:
        """The optimized HLO, empty without a program."""
        if self.program is None:
            return ""
        return self.program.as_text() or ""


class Step(NamedTuple):
    """One jitted step of the run."""

    name: str
    compiled: Compiled
    argument_bytes: dict[str, int]
    """Bytes per chip of what the step needs besides the train state, by purpose."""
    times: float
    """Calls per step of the run. 0: the run never calls it; it is planned for comparison."""
    tokens: int
    """Tokens that one call computes, summed over all chips, padding included."""
    mesh: Mesh
    loops: int = 1
    """Iterations of the outermost loop in one call. The plan reports time per iteration: the
    decode steps of a segment."""
    offloaded_bytes: int = 0
    """Bytes per chip of optimizer state in host memory, which the step moves to the chip and back.
    """
    model_flops: float | None = None
    """FLOPs of one call that the model itself needs, summed over all chips. None: no MFU."""
    cache_fill: float = 1.0
    """Share of the cache that rows fill in the mean of a rollout's decode steps."""
    decodes: bool = False
    """True for decode steps: see `estimates.decode_seconds`."""


def compile_step(mesh: Mesh, function: Any, *arguments: Any) -> Compiled:
    """Compile a jitted function for arguments of shapes, under the mesh."""
    return compile_lowered(lower(mesh, function, *arguments))


def lower(mesh: Mesh, function: Any, *arguments: Any) -> jax.stages.Lowered:
    """Lower a jitted function for arguments of shapes, under the mesh."""
    with jax.set_mesh(mesh):
        return function.lower(*arguments)


def compile_lowered(lowered: jax.stages.Lowered) -> Compiled:
    """Compile a lowered program. One that needs too much memory is a result, not an error."""
    start = time.perf_counter()
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Compiled(None, str(error), time.perf_counter() - start)
    return Compiled(program, "", time.perf_counter() - start)


def output_shapes(mesh: Mesh, function: Any, arguments: tuple, compiled: Compiled) -> Any:
    """Return the shapes and shardings of what a compiled step returns."""
    assert compiled.program is not None
    with jax.set_mesh(mesh):
        shapes = function.eval_shape(*arguments)
    return with_shardings(shapes, compiled.program.output_shardings)


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """Return a tree of shapes with shardings.

    `shardings` is a tree of the same structure, or one sharding for all leaves.
    """
    if isinstance(shardings, NamedSharding):
        return jax.tree.map(lambda leaf: _with_sharding(leaf, shardings), shapes)
    return jax.tree.map(_with_sharding, shapes, shardings)


def _with_sharding(leaf: Any, placement: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placement)


def chip_bytes(tree: Any, *, on_host: bool = False) -> int:
    """Return the bytes of a tree of shapes in the memory of one chip, or of its host.

    The padding of tiled layouts is not counted.
    """

    def leaf_bytes(leaf: Any) -> int:
        if (leaf.sharding is not None and sharding.is_on_host(leaf.sharding)) != on_host:
            return 0
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        # Numbers of four bits share bytes in the memory of devices.
        bits = 64 if is_key else jax_versions.itemsize_bits(leaf.dtype)
        return math.prod(shape) * bits // 8

    return sum(map(leaf_bytes, jax.tree.leaves(tree)))
