"""Attention as a Pallas kernel for TPUs: scores stay in the chip's vector memory, block by block.

The same function as `layers.dense_attention` over packed rows, gradients included, for any `Slots`: shared prompts,
branches and sliding windows are one rule (`layers.sees`), which the kernels apply to the slots of a block's queries
and keys. Blocks in which nobody sees anybody are neither loaded nor multiplied. Softmax without all scores at hand:
Milakov and Gimelshein, arXiv 1805.02867; gradients from the saved log-sum-exp: Dao et al., arXiv 2205.14135.

Where the tokens of a row lie on several devices, each gathers the keys of the whole row, and sends the gradients of
those that are not its own to where they belong. Around a ring they would travel as far, but under the products of the
keys before them; what that could save is in docs/scaling.md.

Letters as in layers.py.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, PartitionSpec

from tpu_rl import sharding
from tpu_rl.models import flash_kernels
from tpu_rl.models.architecture import PRODUCT
from tpu_rl.models.flash_kernels import LANES, How
from tpu_rl.models.layers import PACKED, Cut, Slots

Array = jax.Array


def fits(*lengths: int) -> bool:
    """Whether rows of so many queries, or keys, can be cut into blocks."""
    return all(length % LANES == 0 for length in lengths)


def flash_attention(
    query: Array, key: Array, value: Array, queries: Slots, keys: Slots, how: How, cut: Cut = PACKED
) -> Array:
    """query [B, T, H, E], key and value [B, K, S, E] -> [B, T, H, E]; `fits(T, S)` must hold, of a device's T where
    they are `cut`, and every query must see a key.

    Inside `jax.set_mesh` each device computes its rows, tokens and heads. Heads of keys are copied as often as it takes
    for the mesh to cut them as it cuts those of queries.
    """
    query = query.swapaxes(1, 2)
    copies = math.lcm(key.shape[1], sharding.spread("heads", query.shape[1])) // key.shape[1]
    key, value = (jnp.repeat(part, copies, axis=1) if copies > 1 else part for part in (key, value))
    mixed: Any = _attend(how, cut, query, key, value, queries, keys)
    return mixed.swapaxes(1, 2)


class _Places(NamedTuple):
    """How operands lie on the mesh; in the order in which kernels take them, but for `slots`."""

    query: PartitionSpec
    """[B, H, T, E]; also of gradients of keys, of a device's own tokens."""
    key: PartitionSpec
    """[B, K, S, E], of whole rows."""
    total: PartitionSpec
    """[B, H, 1, T]."""
    slots: tuple[PartitionSpec, PartitionSpec]
    """Of queries [B, T], and of keys [B, S]."""


def _places(cut: Cut, query: Array) -> _Places:
    mesh, at = jax.sharding.get_abstract_mesh(), PartitionSpec
    axes = (cut.rows, "heads", cut.tokens)
    row, head, token = sharding.spec(axes, query.shape[:3], mesh) if _is_shared(mesh) else (None,) * 3
    slots = at(row, token), at(row, None)
    return _Places(at(row, head, token, None), at(row, head, None, None), at(row, head, None, token), slots)


def _is_shared(mesh: AbstractMesh) -> bool:
    return not mesh.empty and mesh.size > 1


def _on_devices(function: Any, how: How, operands: tuple[Any, ...], places: Any, of_results: Any) -> Any:
    """function(how, *operands), of each device's part of them.

    Inside the gradient's rule and not around it: jax's own rule would add up what devices hold alike.
    """
    if not _is_shared(jax.sharding.get_abstract_mesh()):
        return function(how, *operands)
    part = functools.partial(function, how)
    return jax.shard_map(part, in_specs=places, out_specs=of_results, check_vma=False)(*operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(how: How, cut: Cut, query: Array, key: Array, value: Array, queries: Slots, keys: Slots) -> Array:
    """query [B, H, T, E], key and value [B, K, S, E] -> [B, H, T, E]."""
    return _attend_forward(how, cut, query, key, value, queries, keys)[0]


def _attend_forward(how: How, cut: Cut, *operands: Any) -> tuple[Array, Any]:
    at = _places(cut, operands[0])
    places = (at.query, at.key, at.key, *at.slots)
    results = _on_devices(flash_kernels.mixed, how, operands, places, (at.query, at.total))
    mixed, total = (checkpoint_name(part, PRODUCT) for part in results)
    return mixed, (*operands, mixed, total)


def _attend_backward(how: How, cut: Cut, kept: Any, gradient: Array) -> tuple[Any, ...]:
    query, key, value, queries, keys, mixed, total = kept
    at = _places(cut, query)
    # What the softmax's normalisation takes from the gradient of every score, [B, H, 1, T].
    share = jnp.sum(mixed.astype(jnp.float32) * gradient.astype(jnp.float32), axis=-1)[:, :, None, :]
    operands = (query, key, value, gradient, total, share, queries, keys)
    places = (at.query, at.key, at.key, at.query, at.total, at.total, *at.slots)
    of_query = _on_devices(flash_kernels.gradient_of_queries, how, operands, places, at.query)
    of_keys = functools.partial(_of_own_keys, sharding.mesh_axes(at.query[2]))
    of_key, of_value = _on_devices(of_keys, how, operands, places, (at.query, at.query))
    return of_query, of_key, of_value, None, None


def _of_own_keys(axes: tuple[str, ...], how: How, *operands: Any) -> tuple[Array, ...]:
    """The gradients of the keys and values of a device's own tokens, which it and its neighbours along `axes` have
    parts of."""
    if not axes:
        return flash_kernels.gradients_of_keys(how, *operands)
    parts = flash_kernels.gradients_of_keys(how, *operands, dtype=jnp.float32)
    sums = (jax.lax.psum_scatter(part, axes, scatter_dimension=2, tiled=True) for part in parts)
    return tuple(total.astype(operands[1].dtype) for total in sums)


_attend.defvjp(_attend_forward, _attend_backward)
