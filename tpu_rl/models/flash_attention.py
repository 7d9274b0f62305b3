"""Attention as a Pallas kernel for TPUs: scores stay in the chip's vector memory, block by block.

The same function as `layers.dense_attention` over packed rows, gradients included, for any `Slots`: shared prompts,
branches and sliding windows are one rule (`layers.visible`), which the kernels apply to the slots of a block's queries
and keys. Blocks in which nobody sees anybody are neither loaded nor multiplied. Softmax without all scores at hand:
Milakov and Gimelshein, arXiv 1805.02867; gradients from the saved log-sum-exp: Dao et al., arXiv 2205.14135.

Letters as in layers.py.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from tpu_rl import sharding
from tpu_rl.models import flash_kernels
from tpu_rl.models.flash_kernels import LANES, How, Saved
from tpu_rl.models.layers import Slots

Array = jax.Array

HEADS = ("rows", "heads", None, None)
ROWS = ("rows",)
"""Logical axes of queries, [B, H, T, E], and of slots."""


def fits(tokens: int, slots: int) -> bool:
    """Whether so many queries and keys can be cut into blocks."""
    return tokens % LANES == 0 and slots % LANES == 0


def flash_attention(query: Array, key: Array, value: Array, queries: Slots, keys: Slots, how: How) -> Array:
    """query [B, T, H, E], key and value [B, K, S, E] -> [B, T, H, E]; `fits(T, S)` must hold, and every query must see
    a key.

    Inside `jax.set_mesh` each device computes its rows and heads. Where the mesh cuts heads but not those of keys,
    every head gets a copy of its keys.
    """
    query = query.swapaxes(1, 2)
    arguments: tuple[Any, ...] = (query, key, value, queries, keys)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        alone: Any = _attend(how, *arguments)
        return alone.swapaxes(1, 2)
    of_heads, of_rows = (sharding.spec(axes, query.shape[: len(axes)], mesh) for axes in (HEADS, ROWS))
    if sharding.spec(HEADS, key.shape, mesh) != of_heads:
        key, value = (jnp.repeat(part, query.shape[1] // part.shape[1], axis=1) for part in (key, value))
        arguments = (query, key, value, queries, keys)
    specs = (of_heads, of_heads, of_heads, of_rows, of_rows)
    on_device: Any = jax.shard_map(functools.partial(_attend, how), in_specs=specs, out_specs=of_heads, check_vma=False)
    return on_device(*arguments).swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how: How, query: Array, key: Array, value: Array, queries: Slots, keys: Slots) -> Any:
    """query [B, H, T, E], key and value [B, K, S, E] -> [B, H, T, E]."""
    return flash_kernels.mixed(how, query, key, value, queries, keys)[0]


def _attend_forward(how: How, *inputs: Any) -> tuple[Array, Any]:
    mixed, total = flash_kernels.mixed(how, *inputs)
    return mixed, (inputs, mixed, total)


def _attend_backward(how: How, kept: Any, gradient: Array) -> tuple[Any, ...]:
    inputs, mixed, total = kept
    # What the softmax's normalisation takes from the gradient of every score, [B, H, 1, T].
    share = jnp.sum(mixed.astype(jnp.float32) * gradient.astype(jnp.float32), axis=-1)[:, :, None, :]
    saved = Saved(gradient, total, share)
    of_query = flash_kernels.gradient_of_queries(how, inputs, saved)
    return of_query, *flash_kernels.gradients_of_keys(how, inputs, saved), None, None


_attend.defvjp(_attend_forward, _attend_backward)
