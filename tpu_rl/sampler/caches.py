"""Rows of any policy's cache: a tree of arrays. 1-D ones (lengths) have rows in front, others behind the layer axis."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tpu_rl.types import Array, Params, Policy


def take_rows(cache: Any, rows: Array) -> Any:
    """Gathers rows of any policy's cache: 1-D leaves (lengths) have rows in front, all others behind the layer axis."""
    return jax.tree.map(lambda leaf: jnp.take(leaf, rows, axis=row_axis(leaf)), cache)


def put_row(cache: Any, slot: Array, pool: Any, row: Array) -> Any:
    """The cache with one row of a pool of shorter ones in one of its slots; what lies behind that row stays."""

    def put(leaf: Array, source: Array) -> Array:
        axis = row_axis(leaf)
        one = jax.lax.dynamic_slice_in_dim(source, row, 1, axis)
        start = [slot if i == axis else 0 for i in range(leaf.ndim)]
        return jax.lax.dynamic_update_slice(leaf, one, start)

    return jax.tree.map(put, cache, pool)


def with_lengths(cache: Any, lengths: Array) -> Any:
    """The cache with only the first tokens of each row, so many [B]: what it holds behind them is nobody's."""
    return jax.tree.map(lambda leaf: lengths if leaf.ndim == 1 else leaf, cache)


def forgets(policy: Policy, params: Params, length: int, tokens: int) -> bool:
    """Whether `with_lengths` can drop so many tokens of any cache of so great a length.

    Where the policy does not say: if there is a place for each token, none is overwritten by one that comes later (as
    in a ring) and nothing sums them up (as a recurrent state does).
    """
    if policy.forgets is not None:
        return tokens <= policy.forgets
    now, longer = (
        jax.eval_shape(lambda size=size: policy.init_cache(params, 1, size)) for size in (length, length + 1)
    )
    pairs = zip(jax.tree.leaves(now), jax.tree.leaves(longer), strict=True)
    return all(one.ndim == 1 or one.shape != other.shape for one, other in pairs)


def row_axis(leaf: Array) -> int:
    """Which axis of a cache's leaf counts rows."""
    return 0 if leaf.ndim == 1 else 1


def resize(cache: Any, fresh: Any) -> Any:
    """`fresh`, an empty cache of as many rows, with as much of each row of the cache as both have room for."""

    def fit(new: Array, old: Array) -> Array:
        if new.shape == old.shape:
            return old
        common = tuple(slice(min(sizes)) for sizes in zip(new.shape, old.shape, strict=True))
        return new.at[common].set(old[common])

    return jax.tree.map(fit, fresh, cache)
