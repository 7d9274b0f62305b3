"""Whether cuDNN's attention computes what the reference does, tried on the devices of a run before it begins.

Which kernels there are, and whether they are right, depends on the GPU, on cuDNN and on the driver: none of them is
known when a run is configured, and a run that learns from wrong gradients looks like any other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tpu_rl import processes, sharding
from tpu_rl.models import layers
from tpu_rl.models.architecture import AttentionConfig
from tpu_rl.models.cudnn_attention import cudnn_attention
from tpu_rl.models.layers import Slots
from tpu_rl.types import Array

T = TypeVar("T")

PARTS = ((100, 1, 0), (60, 1, 1), (50, 1, 2), (30, 2, 0), (16, 0, 0))
"""Of the row that is tried: (tokens, segment, branch), padding behind all."""
NEAREST = 40
"""Positions that it looks back, of a model with windows."""
TOLERANCE = 1 / 32
"""Of the largest element: eight roundings to bfloat16. One hidden key that is seen, or the other way round, is more."""


@functools.cache
def fault(config: AttentionConfig, mesh: Mesh) -> str:
    """What is wrong with it on the mesh's devices: what the compiler or cuDNN says, or that values or gradients are not
    the reference's; empty where all is well. All processes call it together."""
    seed = np.uint32(0)
    with jax.set_mesh(mesh):
        program, refused = _tried(lambda: jax.jit(functools.partial(worst_error, config)).lower(seed).compile())
        if program is None:
            return f"it does not compile: {refused}"
        worst, refused = _tried(lambda: float(program(seed)))
    if worst is None:
        return f"it does not run: {refused}"
    # So that NaN is wrong, too.
    return "" if worst <= TOLERANCE else f"a trial of it differs from the reference by {worst:.2g} of the largest"


def _tried(attempt: Callable[[], T]) -> tuple[T | None, str]:
    """(what comes of it, ""), or, where it fails on one of the run's processes, (None, why)."""
    result, refused = None, ""
    try:
        result = attempt()
    except (RuntimeError, ValueError) as error:  # no cuDNN, an old one, or shapes that it has no kernel for
        refused = f"{str(error).strip():.200}"
    return (None, refused or "on another host") if processes.any_of(result is None) else (result, "")


def worst_error(config: AttentionConfig, seed: Array) -> Array:
    """How far outputs and gradients of a row on each device are from the reference's in float32, of the largest of
    each."""
    mesh = jax.sharding.get_abstract_mesh()
    rows = math.prod(mesh.shape[axis] for axis in sharding.RULES["rows"])
    lengths, segments, branches = np.array(PARTS).T
    starts = np.where(branches > 0, lengths[0], 0)
    places = np.concatenate([start + np.arange(length) for start, length in zip(starts, lengths, strict=True)])
    columns = (np.arange(lengths.sum()), places, np.repeat(segments, lengths), np.repeat(branches, lengths))
    slots = Slots(*(jnp.tile(jnp.asarray(column, jnp.int32), (rows, 1)) for column in columns))
    tiles = jnp.tile(jnp.array([[0, -1], [0, 1]], jnp.int32), (rows, 1, 1))
    is_token = (slots.segment_ids > 0)[..., None, None]

    def random(number: int, *axes: str) -> Array:
        sizes = {"rows": rows, "tokens": lengths.sum(), "heads": config.heads, "kv_heads": config.kv_heads}
        shape = [*(sizes[axis] for axis in axes), config.head_dim]
        values = jax.random.normal(jax.random.fold_in(jax.random.key(seed), number), shape, jnp.bfloat16)
        return sharding.constrain(values, (*axes, None))

    keys, of_output = ("rows", "kv_heads", "tokens"), random(3, "rows", "tokens", "heads") * is_token
    operands = (random(0, "rows", "tokens", "heads"), random(1, *keys), random(2, *keys))

    def found(by: Callable[..., Array], dtype: Any, window: int | None) -> list[Array]:
        def total(operands: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            query, key, value = (part.astype(dtype) for part in operands)
            how: dict[str, Any] = {"scale": config.scale, "window": window, "key_tiles": tiles, "scores_by": by}
            mixed = layers.attention(query, key, value, slots, slots, **how) * is_token
            return (mixed * of_output).astype(jnp.float32).sum(), mixed

        gradients, mixed = jax.grad(total, has_aux=True)(operands)
        return [part.astype(jnp.float32) for part in (mixed, *gradients)]

    def error(window: int | None) -> Array:
        wanted = found(layers.dense_attention, jnp.float32, window)
        pairs = zip(found(cudnn_attention, jnp.bfloat16, window), wanted, strict=True)
        return jnp.stack([jnp.abs(one - other).max() / jnp.abs(other).max() for one, other in pairs]).max()

    windows = [None] if config.window is None else [None, NEAREST]
    return jnp.stack([error(window) for window in windows]).max()
