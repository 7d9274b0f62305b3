"""Digests of arrays, computed on their devices.

A digest does not depend on how the array is sharded, and it detects flipped bits and swapped or
shifted elements. It tells accidents apart, not forgeries.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_rl import run_files

_SEEDS = np.array([0x243F6A88, 0x85A308D3], np.uint32)
"""One 32-bit sum for each."""
SMALL = 2**18
"""Arrays of at most so many elements are summed by one program, in which all hashes are in memory.
Larger ones have a program for each shape and sum."""


def of_tree(tree: Any) -> str:
    """Return a hex digest of the paths, dtypes, shapes and bits of a pytree's arrays.

    Each array enters with 64 bits of a position-mixed sum.
    """
    return run_files.checksum(describe(flatten(tree)))


def flatten(tree: Any) -> dict[str, Any]:
    """Return path -> leaf, in the tree's order; holes (None) have no leaf."""
    leaves = jax.tree.leaves_with_path(tree)
    flat = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if len(flat) != len(leaves):
        raise ValueError("two leaves have the same path: a key contains a dot")
    return flat


def shape_and_dtype(leaf: Any) -> dict[str, Any]:
    """Return the shape and the dtype of an array as JSON values."""
    return {"dtype": str(leaf.dtype), "shape": list(leaf.shape)}


def describe(arrays: dict[str, jax.Array]) -> dict[str, dict[str, Any]]:
    """Return path -> dtype, shape and digest (16 hex digits) of each array."""
    large = {path: array for path, array in arrays.items() if array.size > SMALL}
    small = {path: array for path, array in arrays.items() if path not in large}
    sums = _sums(small) | _sums_of(large)
    return {
        path: {**shape_and_dtype(arrays[path]), "digest": "".join(f"{half:08x}" for half in halves)}
        for path, halves in jax.device_get(sums).items()
    }


@jax.jit
def all_finite(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return path -> [] bool: True if no element is NaN or infinite."""
    return {path: jnp.all(jnp.isfinite(array)) for path, array in arrays.items()}


def _sums_of(arrays: dict[str, jax.Array]) -> dict[str, list[jax.Array]]:
    """Return path -> the sums."""
    return {
        path: [_position_mixed_sum(array, seed) for seed in _SEEDS]
        for path, array in arrays.items()
    }


_sums = jax.jit(_sums_of)


@jax.jit
def _position_mixed_sum(array: jax.Array, seed: np.uint32) -> jax.Array:
    """Return the sum modulo 2**32, [] uint32, of hashes of each element's bits and position.

    Integer sums do not depend on the order of addition, hence not on sharding. A flipped bit or a
    swapped or shifted element changes the sum except with probability 2**-32. Each program computes
    one sum: two would keep the hashes in memory.
    """
    bits = _bits(array)
    position = jnp.zeros(bits.shape, jnp.uint32)
    for axis in range(bits.ndim):
        stride = math.prod(bits.shape[axis + 1 :]) % 2**32
        position += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * np.uint32(stride)
    return jnp.sum(_avalanche((bits ^ (position * np.uint32(0x9E3779B1))) + seed), dtype=jnp.uint32)


def _bits(array: jax.Array) -> jax.Array:
    """Return the bit patterns of a real or boolean array, or of numbers of four bits, as uint32.

    64-bit elements give a new last axis of size two.
    """
    if array.dtype in (jnp.bool_, jnp.uint4):
        return array.astype(jnp.uint32)
    width = min(array.dtype.itemsize * 8, 32)
    return jax.lax.bitcast_convert_type(array, f"uint{width}").astype(jnp.uint32)


def _avalanche(x: jax.Array) -> jax.Array:
    """Mix bits: each input bit flips each output bit with probability of about one half.

    This is the finalizer of MurmurHash3 (Appleby).
    """
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
