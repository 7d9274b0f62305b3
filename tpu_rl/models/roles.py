"""What the rest of the library makes of a model: something that continues sequences, and an algorithm's role."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from tpu_rl.models.decoder import Decoder, DecoderConfig, context, unembed
from tpu_rl.models.layers import Slots
from tpu_rl.types import Array, Model, Params, Policy, Role, Rows


def policy(model: Model) -> Policy:
    """How a decoder continues sequences (see `types.Policy`); the same functions for the same model, compiled once.

    The cache is {"lengths": [B], kind: {"k", "v": [layers of that kind, B, K, S, E]}}: rows are on axis 1 of all but
    `lengths`. A committed token's slot is its position. All of `extend`'s tokens are written behind the committed
    ones, the next call overwrites those that were only looked at, and a token beyond the cache's end is dropped and
    seen by nobody: `length` in `init_cache` must count tokens that will only be looked at, too.
    """
    return _policy(model.config)


@functools.cache
def _policy(config: DecoderConfig) -> Policy:
    module = Decoder(config)

    def init_cache(params: Params, rows: int, length: int) -> Any:
        del params
        attention = config.attention
        cache: dict[str, Any] = {"lengths": jnp.zeros(rows, jnp.int32)}
        for kind in sorted(set(config.kinds)):
            shape = (config.kinds.count(kind), rows, attention.kv_heads, length, attention.head_dim)
            cache[kind] = {name: jnp.zeros(shape, config.dtype) for name in ("k", "v")}
        return cache

    def extend(
        params: Params, cache: Any, tokens: Array, positions: Array, branch_ids: Array, commit: Array
    ) -> tuple[Array, Any]:
        lengths, stacks = cache["lengths"], {kind: stack for kind, stack in cache.items() if kind != "lengths"}
        capacity = next(iter(stacks.values()))["k"].shape[3]
        queries, keys = cache_slots(lengths, capacity, positions, branch_ids)
        hidden, stacks = module.apply({"params": params}, tokens, stacks, context(config, queries, keys))
        return unembed(config, params, hidden), {"lengths": lengths + commit, **stacks}

    return Policy(init_cache, extend)


def cache_slots(lengths: Array, capacity: int, positions: Array, branch_ids: Array) -> tuple[Slots, Slots]:
    """The new tokens [B, T] as queries, and as keys the cache [B, S] once they are written behind lengths [B]."""
    rows, width = positions.shape
    slot = jnp.broadcast_to(jnp.arange(capacity)[None, :], (rows, capacity))
    age = slot - lengths[:, None]  # 0 for the first of the new tokens, negative for what is committed

    def of_slot(committed: Array, new: Array) -> Array:
        return jnp.where(age < 0, committed, jnp.take_along_axis(new, jnp.clip(age, 0, width - 1), axis=1))

    keys = Slots(slot, of_slot(slot, positions), jnp.int32(age < width), of_slot(jnp.zeros_like(slot), branch_ids))
    index = lengths[:, None] + jnp.arange(width)[None, :]
    return Slots(index, positions, jnp.ones_like(index), branch_ids), keys


def role(model: Model, select: Callable[[Params], Params]) -> Role:
    """A model's place in the whole params tree: `select` picks its own params, `lambda params: params["policy"]`."""

    def hidden(params: Params, rows: Rows) -> Array:
        return model.hidden(select(params), rows.tokens, rows.positions, rows.segment_ids, rows.branch_ids)

    def logits(params: Params, hidden: Array) -> Array:
        return model.logits(select(params), hidden)

    return Role(hidden, logits)


def apply(model: Model, params: Params, tokens: Array) -> Array:
    """Logits [B, T, V] float32 of whole sequences tokens [B, T]; for checks, not for training."""
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)
    hidden = model.hidden(params, tokens, positions, jnp.ones_like(tokens), jnp.zeros_like(tokens))
    return model.logits(params, hidden)
