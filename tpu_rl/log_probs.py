"""Token log-probabilities and entropy without ever holding [R, S, V], and estimators of the KL divergence.

Everything here is float32. Only actions are unembedded, a chunk of them at a time and once more in the backward pass,
so the memory of a loss and its gradient is that of one chunk of logits, whatever the sequence length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from tpu_rl import packing, sharding
from tpu_rl.types import Array, Params, Role, Rows

CHUNK_TOKENS = 2048
"""Tokens that a device unembeds at once, at most. Fewer save nothing on a mesh, where each chunk gathers the
unembedding and adds up its gradient over all devices: a sixteenth of it made the part of an 8B model's update on 16
chips 18 times as long, by docs/scaling.md, and its memory a third larger."""

CHUNK_BYTES = 2**28
"""Of logits, float32, that a device makes at once where it works alone."""


class TokenLogProbs(NamedTuple):
    log_probs: Array
    """[R, S] float32: of each action given what it follows; zero elsewhere, and for a token that follows nothing."""
    entropy: Array
    """[R, S] float32, nats: of the distribution that the token was drawn from; zero likewise."""


def token_log_probs(
    role: Role,
    params: Params,
    rows: Rows,
    temperature: float = 1.0,
    *,
    entropy_gradient: bool = False,
    chunk_tokens: int | None = None,
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


def of_frozen(role: Role, params: Params, rows: Rows, temperature: float = 1.0) -> Array:
    """Log-probabilities of a whole batch [M, K, R, S], without gradients, one micro-batch at a time: for make_batch."""

    def one(micro_batch: Rows) -> Array:
        return token_log_probs(role, params, micro_batch, temperature).log_probs

    return packing.over_micro_batches(one, rows)


def of_hidden(
    role: Role,
    params: Params,
    hidden: Array,
    rows: Rows,
    temperature: float = 1.0,
    *,
    entropy_gradient: bool = False,
    chunk_tokens: int | None = None,
) -> TokenLogProbs:
    """The same from hidden states [R, S, D]. The entropy is a constant to gradients unless `entropy_gradient`."""

    def one_chunk(tokens: Array, h: Array) -> tuple[Array, Array]:
        log_probs, entropy = of_logits(role.logits(params, h) / temperature, tokens)
        return log_probs, entropy if entropy_gradient else jax.lax.stop_gradient(entropy)

    chunk_tokens = chunk_tokens or tokens_at_once(vocabulary(role, params, hidden))
    log_probs, entropy = over_actions(one_chunk, rows, hidden, chunk_tokens=chunk_tokens)
    predicted = (rows.positions > 0) & (rows.segment_ids > 0)
    return TokenLogProbs(jnp.where(predicted, log_probs, 0.0), jnp.where(predicted, entropy, 0.0))


def predicting(states: Array, rows: Rows) -> Array:
    """[R, S, D] aligned to tokens -> [R, S, D] where each token has the state of the token that it follows.

    Here, and for actions alone in `over_actions`, tokens and predictions are shifted against each other.
    """
    return following(states, rows.previous)


def following(states: Array, previous: Array) -> Array:
    """states [R, S, D] at the slots previous [R, C] -> [R, C, D]."""
    return jnp.take_along_axis(states, previous[..., None], axis=1)


def vocabulary(role: Role, params: Params, hidden: Array) -> int:
    """How many logits a role has for each hidden state."""
    return jax.eval_shape(role.logits, params, hidden).shape[-1]


def tokens_at_once(*vocabularies: int) -> int:
    """Of how many tokens a device makes the logits of models with these vocabularies at once."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.size > 1:
        return max(1, CHUNK_TOKENS // len(vocabularies))
    return max(1, min(CHUNK_TOKENS // len(vocabularies), CHUNK_BYTES // (4 * sum(vocabularies))))


def over_actions(function: Callable[..., Any], rows: Rows, *hidden: Array, chunk_tokens: int) -> Any:
    """`function` of the rows' actions, a few at a time -> its outputs as a pytree of [R, S, ...], else zero.

    function(tokens [R, C], *states [R, C, D]) -> a pytree of [R, C, ...]; the states of `hidden` [R, S, D] that
    predict these tokens. What it makes in between (logits of one model or of several) exists for one chunk only,
    forwards and backwards, where it is computed anew. `chunk_tokens` are those of one device, over all of which rows
    are spread; rows stay whole, so that their sharding does too.
    """
    row_count, slots = rows.tokens.shape
    every = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (row_count, slots))
    actions = every if rows.actions is None else rows.actions
    parts = sharding.spread("tokens", slots)
    most = max(1, chunk_tokens * sharding.spread("rows", row_count) * parts // row_count)
    chunk = -(-actions.shape[1] // -(-actions.shape[1] // most))  # as few as need be, of one size, without a rest
    chunk += -chunk % parts
    actions = jnp.pad(actions, ((0, 0), (0, -actions.shape[1] % chunk)), constant_values=slots)
    at = jnp.minimum(actions, slots - 1)

    def cut(x: Array) -> Array:
        chosen = jnp.take_along_axis(x, at, axis=1)
        return jnp.moveaxis(chosen.reshape(row_count, -1, chunk), 1, 0)

    def put_back(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 1).reshape(row_count, -1, *x.shape[3:])
        return jax.vmap(lambda row, at: jnp.zeros((slots, *x.shape[2:]), x.dtype).at[at].set(row, mode="drop"))(
            x, actions
        )

    tokens, previous = cut(rows.tokens), cut(rows.previous)
    states = (jax.ShapeDtypeStruct((row_count, chunk, *h.shape[2:]), h.dtype) for h in hidden)
    # What the function has closed over and is differentiated (weights) must be an argument of a custom gradient.
    function = function if parts == 1 else _shared(function)
    closed, weights = jax.closure_convert(function, jax.ShapeDtypeStruct((row_count, chunk), tokens.dtype), *states)
    return jax.tree.map(put_back, _over_chunks(closed, tokens, previous, tuple(weights), hidden))


def _shared(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of tokens and states, of which each device that a row is spread over takes its part."""

    def apart(tokens: Array, *states: Array) -> Any:
        states = tuple(sharding.constrain(h, ("rows", "tokens", *(None for _ in h.shape[2:]))) for h in states)
        return function(sharding.constrain(tokens, ("rows", "tokens")), *states)

    return apart


def _over_chunks(
    function: Callable[..., Any], tokens: Array, previous: Array, weights: tuple[Array, ...], hidden: tuple[Array, ...]
) -> Any:
    """function(tokens, *states, *weights) of each chunk: tokens and previous [chunks, R, C] -> [chunks, R, C, ...].

    A rematerialised scan would give the same gradient, but of weights it would add up bfloat16 and of hidden states
    it would add an array of their whole size for each chunk.
    """

    @jax.custom_vjp
    def run(weights: tuple[Array, ...], hidden: tuple[Array, ...]) -> Any:
        def one(chunk: tuple[Array, Array]) -> Any:
            return function(chunk[0], *(following(h, chunk[1]) for h in hidden), *weights)

        return jax.lax.map(one, (tokens, previous))

    def forward(*arguments: Any) -> tuple[Any, Any]:
        weights, hidden = jax.tree.map(lambda x: x.value, arguments)
        # The backward pass is told by the structure of what is saved which of them are differentiated.
        learned = jax.tree.map(lambda x: () if x.perturbed else None, (*arguments[0], *arguments[1]))
        return run(weights, hidden), (weights, hidden, learned)

    def backward(saved: Any, gradient: Any) -> Any:
        weights, hidden, learned = saved
        return _gradients(function, (tokens, previous), weights, hidden, [x is not None for x in learned], gradient)

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run(weights, hidden)


def _gradients(
    function: Callable[..., Any],
    at: tuple[Array, Array],
    weights: tuple[Array, ...],
    hidden: tuple[Array, ...],
    learned: list[bool],
    gradient: Any,
) -> tuple[Any, Any]:
    """Of `weights` and `hidden`, None for those that are not `learned`; gradient: of what function gives, stacked."""

    def number(x: Any) -> Array:
        if not isinstance(x, SymbolicZero):
            return x
        zero: Any = x.aval
        return jnp.zeros(zero.shape, zero.dtype)

    gradient = jax.tree.map(number, gradient, is_leaf=lambda x: isinstance(x, SymbolicZero))
    count = len(weights)

    def start(x: Array, is_weight: bool) -> Array:
        dtype: Any = jnp.promote_types(x.dtype, jnp.float32) if is_weight else x.dtype
        return jnp.zeros(x.shape, dtype)

    def one(totals: list[Array | None], chunk: Any) -> tuple[list[Array | None], None]:
        tokens, previous, gradient = chunk
        inputs = [*weights, *(following(h, previous) for h in hidden)]

        def of_learned(*chosen: Array) -> Any:
            rest = iter(chosen)
            every = [next(rest) if is_learned else x for x, is_learned in zip(inputs, learned, strict=True)]
            return function(tokens, *every[count:], *every[:count])

        _, pull = jax.vjp(of_learned, *(x for x, is_learned in zip(inputs, learned, strict=True) if is_learned))
        parts = iter(pull(gradient))

        def add(i: int, total: Array | None) -> Array | None:
            if total is None:
                return None
            part = next(parts)
            if i < count:
                return total + part.astype(total.dtype)
            return jax.vmap(lambda row, at, part: row.at[at].add(part))(total, previous, part)

        return [add(i, total) for i, total in enumerate(totals)], None

    every = (*weights, *hidden)
    totals = [start(x, i < count) if learned[i] else None for i, x in enumerate(every)]
    totals, _ = jax.lax.scan(one, totals, (*at, gradient))
    found = [None if total is None else total.astype(x.dtype) for x, total in zip(every, totals, strict=True)]
    return tuple(found[:count]), tuple(found[count:])


@jax.custom_vjp
def of_logits(logits: Array, tokens: Array) -> tuple[Array, Array]:
    """logits [..., V], tokens [...] -> (log-probabilities, entropies), both [...].

    logit - logsumexp, never log_softmax then gather: 1.5 x faster, and no second array of the logits' size is kept.
    """
    return _of_logits(logits, tokens)[0]


def _of_logits(logits: Array, tokens: Array) -> tuple[tuple[Array, Array], Any]:
    log_normalizer = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    probabilities = jnp.exp(logits - log_normalizer[..., None])
    entropy = log_normalizer - jnp.sum(probabilities * logits, axis=-1)
    return (chosen - log_normalizer, entropy), (logits, tokens, log_normalizer, entropy)


def _of_logits_gradient(saved: Any, gradients: tuple[Any, Any]) -> tuple[Array, None]:
    """d ln p(token) = [v = token] - p(v) and dH = -p(v) (ln p(v) + H), in one pass: no scatter into the vocabulary."""
    logits, tokens, log_normalizer, entropy = saved
    of_log_prob, of_entropy = gradients
    log_p = logits - log_normalizer[..., None]
    gradient = jnp.zeros((), logits.dtype)
    if not isinstance(of_log_prob, SymbolicZero):
        chosen = jax.lax.broadcasted_iota(tokens.dtype, logits.shape, logits.ndim - 1) == tokens[..., None]
        gradient += of_log_prob[..., None] * (chosen - jnp.exp(log_p))
    if not isinstance(of_entropy, SymbolicZero):
        gradient -= of_entropy[..., None] * jnp.exp(log_p) * (log_p + entropy[..., None])
    return jnp.broadcast_to(gradient, logits.shape), None


of_logits.defvjp(
    lambda logits, tokens: _of_logits(logits.value, tokens.value), _of_logits_gradient, symbolic_zeros=True
)


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
