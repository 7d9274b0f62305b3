"""Attention as a Pallas kernel for TPUs: scores stay in the chip's vector memory, block by block.

The same function as `layers.dense_attention` over packed rows, gradients included, for any `Slots`: shared prompts,
branches and sliding windows are one rule (`layers.sees`), which the kernels apply to the slots of a block's queries
and keys. Blocks in which nobody sees anybody are neither loaded nor multiplied. Softmax without all scores at hand:
Milakov and Gimelshein, arXiv 1805.02867; gradients from the saved log-sum-exp: Dao et al., arXiv 2205.14135.

Letters as in layers.py.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from tpu_rl import sharding
from tpu_rl.models import flash_kernels
from tpu_rl.models.flash_kernels import LANES, How
from tpu_rl.models.layers import Slots

Array = jax.Array

HEADS = ("rows", "heads", None, None)
ROWS = ("rows",)
"""Logical axes of queries, [B, H, T, E], and of slots."""


def fits(*lengths: int) -> bool:
    """Whether rows of so many queries, or keys, can be cut into blocks."""
    return all(length % LANES == 0 for length in lengths)


def flash_attention(query: Array, key: Array, value: Array, queries: Slots, keys: Slots, how: How) -> Array:
    """query [B, T, H, E], key and value [B, K, S, E] -> [B, T, H, E]; `fits(T, S)` must hold, and every query must see
    a key.

    Inside `jax.set_mesh` each device computes its rows and heads. Heads of keys are copied as often as it takes for the
    mesh to cut them as it cuts those of queries.
    """
    query = query.swapaxes(1, 2)
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        parts = math.prod(mesh.shape[name] for name in sharding.mesh_axes(sharding.spec(HEADS, query.shape, mesh)[1]))
        copies = math.lcm(key.shape[1], parts) // key.shape[1]
        key, value = (jnp.repeat(part, copies, axis=1) if copies > 1 else part for part in (key, value))
    mixed: Any = _attend(how, query, key, value, queries, keys)
    return mixed.swapaxes(1, 2)


def _on_devices(function: Any, how: How, results: int, heads: tuple[Array, ...], slots: tuple[Slots, ...]) -> Any:
    """function(how, *heads, *slots) -> `results` arrays, of each device's part of `heads` [B, heads, ...] and `slots`.

    Inside the gradient's rule and not around it: jax's own rule would add up what devices hold alike.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function(how, *heads, *slots)
    of_heads, of_rows = sharding.spec(HEADS, heads[0].shape, mesh), sharding.spec(ROWS, heads[0].shape[:1], mesh)
    specs = (*(of_heads for _ in heads), *(of_rows for _ in slots))
    out_specs = (of_heads,) * results if results > 1 else of_heads
    part = functools.partial(function, how)
    return jax.shard_map(part, in_specs=specs, out_specs=out_specs, check_vma=False)(*heads, *slots)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how: How, query: Array, key: Array, value: Array, queries: Slots, keys: Slots) -> Array:
    """query [B, H, T, E], key and value [B, K, S, E] -> [B, H, T, E]."""
    return _attend_forward(how, query, key, value, queries, keys)[0]


def _attend_forward(how: How, query: Array, key: Array, value: Array, queries: Slots, keys: Slots) -> tuple[Array, Any]:
    mixed, total = _on_devices(flash_kernels.mixed, how, 2, (query, key, value), (queries, keys))
    return mixed, (query, key, value, queries, keys, mixed, total)


def _attend_backward(how: How, kept: Any, gradient: Array) -> tuple[Any, ...]:
    query, key, value, queries, keys, mixed, total = kept
    # What the softmax's normalisation takes from the gradient of every score, [B, H, 1, T].
    share = jnp.sum(mixed.astype(jnp.float32) * gradient.astype(jnp.float32), axis=-1)[:, :, None, :]
    heads = (query, key, value, gradient, total, share)
    of_query = _on_devices(flash_kernels.gradient_of_queries, how, 1, heads, (queries, keys))
    of_key, of_value = _on_devices(flash_kernels.gradients_of_keys, how, 2, heads, (queries, keys))
    return of_query, of_key, of_value, None, None


_attend.defvjp(_attend_forward, _attend_backward)
