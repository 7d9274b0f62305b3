"""What the rest of the library makes of a model: something that continues sequences, and an algorithm's role."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import jax.numpy as jnp

from tpu_rl.models.decoder import decoder
from tpu_rl.types import Array, Model, Params, Policy, Role, Rows


def policy(model: Model, select: Callable[[Params], Params] | None = None) -> Policy:
    """How a model continues sequences, with `select` in its place in the whole params tree, as in `role`.

    The same model and the same `select` give an equal policy, which the sampler compiles once; a new lambda is another
    `select`, so name the function.
    """
    own = Policy(model.init_cache, model.extend, model.forgets)
    return own if select is None else _selecting(own, select)


@functools.cache
def _selecting(policy: Policy, select: Callable[[Params], Params]) -> Policy:
    def init_cache(params: Params, rows: int, length: int) -> Any:
        return policy.init_cache(select(params), rows, length)

    def extend(
        params: Params, cache: Any, tokens: Array, positions: Array, branch_ids: Array, commit: Array
    ) -> tuple[Array, Any]:
        return policy.extend(select(params), cache, tokens, positions, branch_ids, commit)

    return Policy(init_cache, extend, policy.forgets)


def with_int8_cache(model: Model) -> Model:
    """The same model, whose caches keep keys and values in int8 (`caches.quantise`)."""
    return decoder(replace(model.config, cache_dtype="int8"))


def with_attention_kernel(model: Model, kernel: Literal["tpu", "interpreted", "cudnn"] = "tpu") -> Model:
    """The same model, which attends by a kernel wherever that takes its rows (`AttentionConfig.kernel`)."""
    return decoder(replace(model.config, attention=replace(model.config.attention, kernel=kernel)))


def with_cache_for_cpus(model: Model) -> Model:
    """The same model with caches as CPUs are fastest with (`AttentionConfig.cache_for_cpus`): decoding 64 rows of a
    small model takes a fifth less time."""
    return decoder(replace(model.config, attention=replace(model.config.attention, cache_for_cpus=True)))


def with_remat(model: Model, remat: Literal["full", "products", "none"]) -> Model:
    """The same model, of whose layers so much is computed again in the backward pass (`DecoderConfig.remat`)."""
    return decoder(replace(model.config, remat=remat))


def role(model: Model, select: Callable[[Params], Params]) -> Role:
    """A model's place in the whole params tree: `select` picks its own params, `lambda params: params["policy"]`."""

    def hidden(params: Params, rows: Rows) -> Array:
        seen = (rows.positions, rows.segment_ids, rows.branch_ids, rows.key_tiles)
        return model.hidden(select(params), rows.tokens, *seen)

    def logits(params: Params, hidden: Array) -> Array:
        return model.logits(select(params), hidden)

    return Role(hidden, logits)


def apply(model: Model, params: Params, tokens: Array) -> Array:
    """Logits [B, T, V] float32 of whole sequences tokens [B, T]; for checks, not for training."""
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)
    hidden = model.hidden(params, tokens, positions, jnp.ones_like(tokens), jnp.zeros_like(tokens))
    return model.logits(params, hidden)
