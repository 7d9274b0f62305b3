"""A sum whose order is written out."""

from __future__ import annotations

import jax.numpy as jnp

from tpu_rl.types import Array


def tree_sum(x: Array) -> Array:
    """Return the sum of x [..., n] over its last dimension, by halves: [...].

    Compilers choose the order of a reduction by its shape and by what surrounds it. Here it depends
    on n alone.
    """
    while x.shape[-1] > 1:
        x = jnp.pad(x, (*((0, 0),) * (x.ndim - 1), (0, x.shape[-1] % 2)))
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]
