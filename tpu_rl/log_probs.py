"""Token log-probabilities and entropy without ever holding [R, S, V], and estimators of the KL divergence.

Everything here is float32. The unembedding happens inside a rematerialised scan over chunks of slots, so the memory
of a loss and its gradient is that of one chunk of logits, whatever the sequence length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tpu_rl import sharding
from tpu_rl.types import Array, Params, Role, Rows

CHUNK_TOKENS = 2048
"""Tokens that a device unembeds at once: 2048 x 152k x 4 bytes = 1.2 GB of logits. Fewer save nothing on a mesh, where
each chunk gathers the unembedding and adds up its gradient over all devices: a sixteenth of it made the part of an 8B
model's update on 16 chips 18 times as long, by docs/scaling.md, and its memory a third larger."""


class TokenLogProbs(NamedTuple):
    log_probs: Array
    """[R, S] float32: of each token given what it follows; zero for a token that follows nothing, and in padding."""
    entropy: Array
    """[R, S] float32, nats: of the distribution that the token was drawn from; zero likewise."""


def token_log_probs(
    role: Role,
    params: Params,
    rows: Rows,
    temperature: float = 1.0,
    *,
    entropy_gradient: bool = False,
    chunk_tokens: int = CHUNK_TOKENS,
) -> TokenLogProbs:
    """Log-probabilities and entropies of packed rows under softmax(logits / temperature).

    The one function for policy, old policy and reference. Whoever needs the trunk's hidden states for something else
    too (a value head) computes them once and calls `of_hidden`.
    """
    return of_hidden(
        role,
        params,
        role.hidden(params, rows),
        rows,
        temperature,
        entropy_gradient=entropy_gradient,
        chunk_tokens=chunk_tokens,
    )


def of_hidden(
    role: Role,
    params: Params,
    hidden: Array,
    rows: Rows,
    temperature: float = 1.0,
    *,
    entropy_gradient: bool = False,
    chunk_tokens: int = CHUNK_TOKENS,
) -> TokenLogProbs:
    """The same from hidden states [R, S, D]. The entropy is a constant to gradients unless `entropy_gradient`."""

    def one_chunk(h: Array, tokens: Array) -> tuple[Array, Array]:
        log_probs, entropy = of_logits(role.logits(params, h) / temperature, tokens)
        return log_probs, entropy if entropy_gradient else jax.lax.stop_gradient(entropy)

    log_probs, entropy = over_chunks(one_chunk, predicting(hidden, rows), rows.tokens, chunk_tokens=chunk_tokens)
    predicted = (rows.positions > 0) & (rows.segment_ids > 0)
    return TokenLogProbs(jnp.where(predicted, log_probs, 0.0), jnp.where(predicted, entropy, 0.0))


def predicting(states: Array, rows: Rows) -> Array:
    """[R, S, D] aligned to tokens -> [R, S, D] where each token has the state of the token that it follows.

    The one place where tokens and predictions are shifted against each other.
    """
    return jnp.take_along_axis(states, rows.previous[..., None], axis=1)


def over_chunks(function: Callable[..., Any], *arrays: Array, chunk_tokens: int = CHUNK_TOKENS) -> Any:
    """`function` of arrays [R, S, ...] a few slots at a time -> its outputs, a pytree of [R, S, ...].

    `chunk_tokens` are those of one device, over all of which rows are spread. Rematerialised: what it makes in between
    (logits of one model or of several) exists for one chunk only, forwards and backwards. Rows stay whole, so that
    their sharding does too.
    """
    row_count, slots = arrays[0].shape[:2]
    chunk = max(1, min(slots, chunk_tokens * sharding.spread("rows", row_count) // row_count))
    padding = -slots % chunk

    def cut(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(row_count, -1, chunk, *x.shape[2:]), 1, 0)

    def rejoin(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(row_count, -1, *x.shape[3:])[:, :slots]

    chunks = tuple(cut(x) for x in arrays)
    return jax.tree.map(rejoin, jax.lax.map(jax.checkpoint(lambda chunk: function(*chunk)), chunks))


def of_logits(logits: Array, tokens: Array) -> tuple[Array, Array]:
    """logits [..., V], tokens [...] -> (log-probabilities, entropies), both [...].

    logit - logsumexp, never log_softmax then gather: 1.5 x faster, and no second array of the logits' size is kept.
    """
    log_normalizer = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    probabilities = jnp.exp(logits - log_normalizer[..., None])
    entropy = log_normalizer - jnp.sum(probabilities * logits, axis=-1)
    return chosen - log_normalizer, entropy


# --- estimators of KL(policy || reference) from tokens of the policy (J. Schulman, "Approximating KL divergence") ---
# As a *reward*, use k1. As a *loss* k1 has zero expected gradient and k3 that of another divergence: to descend the
# KL itself, differentiate `policy_gradients.kl_loss`.


def k1(log_probs: Array, reference_log_probs: Array) -> Array:
    """log(policy / reference): unbiased, high variance, may be negative."""
    return log_probs - reference_log_probs


def k2(log_probs: Array, reference_log_probs: Array) -> Array:
    """Half the squared log-ratio: biased, but on policy its expected gradient is exactly the KL's."""
    return 0.5 * jnp.square(log_probs - reference_log_probs)


def k3(log_probs: Array, reference_log_probs: Array) -> Array:
    """reference / policy - 1 - log(reference / policy): unbiased and never negative."""
    difference = reference_log_probs - log_probs
    return jnp.expm1(difference) - difference
