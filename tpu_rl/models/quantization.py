"""Weights in eight or four bits: a matrix is stored as numbers and scales.

A decode step reads every weight once, so that its time follows from their bytes. Frozen weights
under adapters need no more bits either (QLoRA, arXiv 2305.14314). Only the storage is narrow. In
eight bits there is one scale per output: products convert the numbers to the type of the
activations, and multiply their outputs by the scales. The numbers are at most 127 (int8) or 448
(float8_e4m3fn) in size, and the scales symmetric: there is no zero point. In four bits (NF4) a
number is an index of `NF4`, and there is one scale, in bfloat16, per output and block of at most 64
inputs; products convert the matrix before.

qwix has the same arithmetic, around arrays with scales of many forms that it puts in place of a
module's weights. Here weights are named leaves with logical axes, and scales are leaves beside
them, like adapters.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tpu_rl.models.config import BLOCK_SCALE, QUANTIZED, SCALE, WeightDtype, matrix_axes, nf4_block

Array = jax.Array

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""Type of eight bits -> the largest number that is used."""

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The 16 values of NF4 (arXiv 2305.14314, appendix E): quantiles of a normal distribution, of which
0 is one, divided by the largest."""


class Quantized(NamedTuple):
    """A matrix, or a stack of them."""

    numbers: Any
    """Of the matrix's shape, in eight or four bits."""
    scale: Any
    """In eight bits: float32, without the axes of inputs; the matrix is numbers * scale. In four:
    bfloat16, of the matrix's shape with blocks in place of the last axis of inputs; the matrix is
    NF4[numbers] * scale."""


def quantize(name: str, weight: Array, dtype: WeightDtype) -> Quantized:
    """Return the weight `name`, one of `QUANTIZED`, as numbers and scales.

    With int8 the error is at most half a step, where a step is 1/127 of the largest absolute value
    among the weights of an output. Leading axes, of layers and experts, count matrices.
    """
    axes = matrix_axes(name)
    assert axes is not None
    inputs, _ = axes
    exact = weight.astype(jnp.float32)
    if dtype == "nf4":
        return _in_nf4(exact, inputs[-1])
    scale = jnp.abs(exact).max(inputs, keepdims=True) / LARGEST[dtype]
    numbers = exact / jnp.where(scale > 0, scale, 1.0)
    if dtype == "int8":
        numbers = jnp.round(numbers)
    return Quantized(numbers.astype(dtype), scale.squeeze(inputs))


def scale_name(name: str, dtype: WeightDtype) -> str:
    """Return the name of the leaf with the scales of the matrix `name`."""
    return name + (BLOCK_SCALE if dtype == "nf4" else SCALE)


def _in_nf4(weight: Array, axis: int) -> Quantized:
    """Return the nearest values of NF4, whose blocks lie along `axis`, counted from the last."""
    block = nf4_block(weight.shape[axis])
    axis += weight.ndim
    dims = weight.shape
    blocks = weight.reshape(*dims[:axis], dims[axis] // block, block, *dims[axis + 1 :])
    scale = jnp.abs(blocks).max(axis + 1, keepdims=True).astype(jnp.bfloat16)
    sizes = jnp.where(scale > 0, scale, 1).astype(jnp.float32)
    # A number counts the middles between neighboring values that are below the weight.
    numbers = jnp.zeros(blocks.shape, jnp.int8)
    for low, high in itertools.pairwise(NF4):
        numbers += blocks / sizes > (low + high) / 2
    return Quantized(numbers.reshape(dims).astype(jnp.uint4), scale.squeeze(axis + 1))


def dequantize(name: str, quantized: Quantized, dtype: Any) -> Array:
    """Return the matrix `name` that numbers and scales stand for, in `dtype`.

    In eight bits it is rounded once. In NF4 the value and the product are rounded to `dtype`.
    """
    axes = matrix_axes(name)
    assert axes is not None
    inputs, _ = axes
    if quantized.numbers.dtype == jnp.uint4:
        return from_nf4(name, quantized, dtype).reshape(quantized.numbers.shape)
    values = quantized.numbers.astype(jnp.float32)
    return (values * jnp.expand_dims(quantized.scale, inputs)).astype(dtype)


def from_nf4(name: str, quantized: Quantized, dtype: Any) -> Array:
    """Return the matrix `name` in `dtype`, its last axis of inputs as [..., blocks, block, ...]."""
    axes = matrix_axes(name)
    assert axes is not None
    numbers, scale = quantized
    axis = numbers.ndim + axes[0][-1]
    # A gather of single values is slow on TPUs; 15 comparisons are elementwise.
    values = jnp.full(numbers.shape, NF4[0], dtype)
    for number, value in enumerate(NF4[1:], start=1):
        values = jnp.where(numbers.astype(jnp.int32) >= number, jnp.asarray(value, dtype), values)
    block = nf4_block(numbers.shape[axis])
    values = values.reshape(*scale.shape[: axis + 1], block, *scale.shape[axis + 1 :])
    factors = jnp.expand_dims(scale.astype(dtype), axis + 1)
    return values * jnp.broadcast_to(factors, values.shape)


def block_equation(equation: str) -> str:
    """Return the einsum of x and a matrix, both with the last input cut into blocks (`from_nf4`).

    The last input is the last dimension of x: "btd,hed->bthe" becomes "btdz,hedz->bthe".
    """
    operands, result = equation.split("->")
    last = operands.split(",")[0][-1]
    return f"{operands.replace(last, last + 'z')}->{result}"


def quantize_tree(params: Any, dtype: WeightDtype) -> Any:
    """Return a params tree with numbers and scales in place of its matrices in `QUANTIZED`."""

    def quantized(path: tuple, leaf: Array) -> Array | Quantized:
        name = path[-1].key
        return quantize(name, leaf, dtype) if name in QUANTIZED else leaf

    return with_scales(jax.tree_util.tree_map_with_path(quantized, params))


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
            suffix = BLOCK_SCALE if part.numbers.dtype == jnp.uint4 else SCALE
            leaves[name], leaves[name + suffix] = part
        else:
            leaves[name] = with_scales(part)
    return leaves
