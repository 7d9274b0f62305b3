"""Operations on the rows of any policy's cache.

A cache is a pytree of arrays. Its 1-D leaves are lengths and have rows on axis 0; all other leaves
have rows on axis 1, behind the layers (see `types.Policy`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tpu_rl.types import ROUTING, SHARED_PROMPT, Array, Params, Policy


def row_axis(leaf: Array) -> int:
    """Return the axis of a cache's leaf that counts rows."""
    return 0 if leaf.ndim == 1 else 1


def take_rows(cache: Any, rows: Array) -> Any:
    """Return a cache with the given rows of a cache, in this order."""
    return jax.tree.map(lambda leaf: jnp.take(leaf, rows, axis=row_axis(leaf)), cache)


def put_row(cache: Any, row: Array, source: Any, source_row: Array) -> Any:
    """Return the cache with a row of another cache, which is not longer, copied to one of its rows.

    Places of the row beyond the length of `source` keep what they hold.
    """

    def put(leaf: Array, source_leaf: Array) -> Array:
        axis = row_axis(leaf)
        values = jax.lax.dynamic_slice_in_dim(source_leaf, source_row, 1, axis)
        start = [row if i == axis else 0 for i in range(leaf.ndim)]
        return jax.lax.dynamic_update_slice(leaf, values, start)

    return jax.tree.map(put, cache, source)


def routing_shape(policy: Policy, params: Params) -> tuple[int, Any] | None:
    """Return the count and type of the numbers that the cache has of each token's routing; or
    None."""
    cache = jax.eval_shape(lambda: policy.init_cache(params, 1, 1))
    if not (isinstance(cache, dict) and ROUTING in cache):
        return None
    record = cache[ROUTING]
    return record.shape[0] * record.shape[2], record.dtype


def latest_routing(cache: Any, count: int) -> Array:
    """Return the routing of the `count` tokens that the latest `extend` read, [B, count, L k].

    It is as in `Rollout.routing`.
    """
    record = cache[ROUTING][..., :count]
    return record.transpose(1, 3, 0, 2).reshape(record.shape[1], count, -1)


def with_lengths(cache: Any, lengths: Array) -> Any:
    """Return the cache with only the first `lengths` [B] tokens of each row.

    Later tokens stay in memory, but are no longer seen.
    """
    return jax.tree.map(lambda leaf: lengths if leaf.ndim == 1 else leaf, cache)


def with_shared_prompts(cache: Any, prompts: Array) -> Any:
    """Return the cache with `prompts` [2, B] in all its entries `SHARED_PROMPT`, if it has any."""

    def replaced(path: tuple, leaf: Array) -> Array:
        is_entry = path[-1] == jax.tree_util.DictKey(SHARED_PROMPT)
        return prompts.astype(leaf.dtype) if is_entry else leaf

    return jax.tree_util.tree_map_with_path(replaced, cache)


def can_roll_back(policy: Policy, params: Params, length: int, tokens: int) -> bool:
    """Return True if `with_lengths` can drop the last `tokens` tokens of a cache of this length.

    If the policy does not say so itself (`Policy.max_rollback`), the shapes of its caches decide:
    every leaf must grow with the length. Then each token has a place of its own, and no later token
    overwrites it, as in a ring, or is added to it, as in a recurrent state.
    """
    if policy.max_rollback is not None:
        return tokens <= policy.max_rollback

    def cache_shapes(size: int) -> list[jax.ShapeDtypeStruct]:
        cache = jax.eval_shape(lambda: policy.init_cache(params, 1, size))
        return jax.tree.leaves(cache)

    pairs = zip(cache_shapes(length), cache_shapes(length + 1), strict=True)
    return all(leaf.ndim == 1 or leaf.shape != longer.shape for leaf, longer in pairs)


def resize(cache: Any, empty: Any) -> Any:
    """Copy a cache into an empty cache of another length and as many rows.

    Of each row, as much is copied as both have room for.
    """

    def copy(new: Array, old: Array) -> Array:
        if new.shape == old.shape:
            return old
        common = tuple(slice(min(sizes)) for sizes in zip(new.shape, old.shape, strict=True))
        return new.at[common].set(old[common])

    return jax.tree.map(copy, empty, cache)
