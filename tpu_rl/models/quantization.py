"""Weights in eight bits, for sampling: a matrix is stored as numbers and one scale per output.

A decode step reads every weight once, so that its time follows from their bytes. Only the storage
has eight bits: products convert the numbers to the type of the activations, and multiply their
outputs by the scales. The numbers are at most 127 (int8) or 448 (float8_e4m3fn) in size, and the
scales symmetric: there is no zero point.

qwix has the same arithmetic, around arrays with scales of many forms that it puts in place of a
module's weights. Here weights are named leaves with logical axes, and scales are leaves beside
them, like adapters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tpu_rl.models.config import QUANTIZED, SCALE, WeightDtype, matrix_axes

Array = jax.Array

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""Type -> the largest number that is used."""


class Quantized(NamedTuple):
    """A matrix, or a stack of them."""

    numbers: Any
    """Of the matrix's shape, in eight bits."""
    scale: Any
    """float32, without the axes of inputs. The matrix is numbers * scale."""


def quantize(name: str, weight: Array, dtype: WeightDtype) -> Quantized:
    """Return the weight `name`, one of `QUANTIZED`, with one scale per output.

    With int8 the error is at most half a step, where a step is 1/127 of the largest absolute value
    among the weights of an output. Leading axes, of layers and experts, count matrices.
    """
    axes = matrix_axes(name)
    assert axes is not None
    inputs, _ = axes
    exact = weight.astype(jnp.float32)
    scale = jnp.abs(exact).max(inputs, keepdims=True) / LARGEST[dtype]
    numbers = exact / jnp.where(scale > 0, scale, 1.0)
    if dtype == "int8":
        numbers = jnp.round(numbers)
    return Quantized(numbers.astype(dtype), scale.squeeze(inputs))


def scaled(outputs: Array, scale: Array) -> Array:
    """Return outputs [..., O] of a product with `Quantized.numbers`, multiplied by scale [O].

    O may be several dimensions. The product is float32, the result of the outputs' type.
    """
    factors = jnp.broadcast_to(scale, outputs.shape)
    return (outputs.astype(jnp.float32) * factors).astype(outputs.dtype)


def with_dtype(params: Any, dtype: WeightDtype) -> Any:
    """Return the shapes of a params tree with the dtype of `Quantized.numbers` in its matrices.

    Scales are not added.
    """

    def quantized(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if path[-1].key not in QUANTIZED:
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype), sharding=leaf.sharding)

    return jax.tree_util.tree_map_with_path(quantized, params)


def with_scales(params: Any) -> Any:
    """Return a params tree with numbers and scales as leaves in place of each `Quantized`."""
    if not isinstance(params, Mapping):
        return params
    leaves: dict[str, Any] = {}
    for name, part in params.items():
        if isinstance(part, Quantized):
            leaves[name], leaves[name + SCALE] = part
        else:
            leaves[name] = with_scales(part)
    return leaves
