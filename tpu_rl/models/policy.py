"""The views of a model that the rest of the library uses: a policy, a role, variants.

`policy` makes a model a function that continues sequences, for the sampler. `role` gives a model
its place in the params tree of a run, for algorithms, and `Select` finds a role's params there. The
`with_...` functions return the same model with another cache, attention kernel or recomputation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from tpu_rl.models.attention import decode
from tpu_rl.models.config import DecoderConfig
from tpu_rl.models.decoder import decoder
from tpu_rl.models.lora import join
from tpu_rl.models.vision import towers
from tpu_rl.models.vision.features import Features
from tpu_rl.types import Array, Model, PackedRows, Params, Policy, Role


@dataclass(frozen=True)
class Select:
    """Select one role's params from the whole params tree.

    Equal selectors hash alike, so that programs compiled for one are reused for the other.
    """

    name: str
    """The role's name in the tree."""
    base: str | None = None
    """The name of the frozen weights under the role's adapters; None for a role without them."""

    def __call__(self, params: Params) -> Params:
        """Return the params that the role's model reads: its adapters joined to their base."""
        role_params = params[self.name]
        return role_params if self.base is None else join(params[self.base], role_params)


def policy(model: Model, select: Callable[[Params], Params] | None = None) -> Policy:
    """Return the policy of a model, whose params are `select(params)`, as in `role`.

    Without `select` the policy takes the model's own params. The same model and the same `select`
    give an equal policy, which the sampler compiles once. Two lambdas are never the same, so pass a
    `Select` or a named function.
    """
    whole = Policy(model.init_cache, model.extend, model.max_rollback, model.exact)
    return whole if select is None else _selecting_policy(whole, select)


@functools.cache
def _selecting_policy(policy: Policy, select: Callable[[Params], Params]) -> Policy:
    def init_cache(params: Params, rows: int, length: int) -> Any:
        return policy.init_cache(select(params), rows, length)

    def extend(params: Params, cache: Any, *arguments: Any, **named: Any) -> tuple[Array, Any]:
        return policy.extend(select(params), cache, *arguments, **named)

    return Policy(init_cache, extend, policy.max_rollback, policy.exact)


def role(model: Model, select: Callable[[Params], Params]) -> Role:
    """Return a role: a model with its place in the whole params tree.

    `select` returns the model's own params, for example `lambda params: params["policy"]`.
    """

    def hidden(params: Params, rows: PackedRows) -> Array:
        return model.hidden(
            select(params),
            rows.tokens,
            rows.positions,
            rows.segment_ids,
            rows.branch_ids,
            rows.key_tiles,
            rows.visible_until,
            rows.paths,
            rows.routing if model.config.records_routing else None,
            rows.images,
        )

    def logits(params: Params, hidden: Array) -> Array:
        return model.logits(select(params), hidden)

    return Role(hidden, logits, model.exact)


def image_features(model: Model) -> Callable[[Params, Any], Features]:
    """Return the compiled function (the model's params, pieces of images [I, ...]) -> features of a
    model that reads images (see `models.vision`)."""
    return _image_features(model.config)


@functools.cache
def _image_features(config: DecoderConfig) -> Callable[[Params, Any], Features]:
    return jax.jit(functools.partial(towers.features, config))


def variant(model: Model, attention: Mapping[str, Any] | None = None, **changes: Any) -> Model:
    """Return the model with other values of fields of `DecoderConfig`, and of its `attention`."""
    changed = replace(model.config.attention, **(attention or {}))
    return decoder(replace(model.config, attention=changed, **changes))


def with_int8_cache(model: Model) -> Model:
    """Return the model with keys and values cached in int8 (see `kv_cache.quantize`)."""
    # Scales are those of single heads.
    return variant(model, {"pairs_heads": False}, cache_dtype="int8")


def with_attention_kernel(
    model: Model, kernel: Literal["tpu", "interpreted", "cudnn"] = "tpu", tensor: int = 1
) -> Model:
    """Return the model with an attention kernel, used where it supports the shapes (see
    `AttentionConfig.kernel`).

    `tensor` devices share heads while the model decodes.
    """
    attention = model.config.attention
    pairs_heads = kernel != "cudnn" and decode.can_pair_heads(attention, tensor)
    return variant(model, {"kernel": kernel, "pairs_heads": pairs_heads})


def with_exact_sampling(model: Model) -> Model:
    """Return the model whose cached and packed tokens have logits of equal bits (see
    `DecoderConfig.exact`)."""
    plain = {"kernel": "none", "gpu_decode": "none", "cpu_cache": False, "pairs_heads": False}
    return variant(model, plain, exact=True)


def with_unsampled(model: Model, ids: Iterable[int]) -> Model:
    """Return the model that gives these tokens probability zero, sampled or in packed rows."""
    vocab = model.config.vocab
    unsampled = tuple(sorted(token_id for token_id in set(ids) if token_id < vocab.size))
    return variant(model, vocab=replace(vocab, unsampled=unsampled))


def apply(model: Model, params: Params, tokens: Array) -> Array:
    """Return logits [B, T, V] float32 of whole sequences, tokens [B, T].

    For checks, not for training: all logits are in memory at once.
    """
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)
    hidden = model.hidden(params, tokens, positions, jnp.ones_like(tokens), jnp.zeros_like(tokens))
    return model.logits(params, hidden)
