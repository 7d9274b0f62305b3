"""Token log-probs and entropies without ever holding [R, S, V], and estimators of the KL.

Everything here is float32. Only action tokens are unembedded, one chunk at a time, and once more in
the backward pass. So a loss and its gradient need the memory of one chunk of logits, whatever the
sequence length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from tpu_rl.losses.shapes import FloatMKRS, FloatRS, FloatRSD, Floats, FloatsV, Ints, Scalar
from tpu_rl.sums import tree_sum
from tpu_rl.train import packing, sharding
from tpu_rl.types import Array, PackedRows, Params, Role

CHUNK_TOKENS = 2048
"""Largest number of tokens that a device unembeds at once.

A smaller number saves nothing on a mesh, where each chunk gathers the unembedding and adds up its
gradient over all devices. With a sixteenth of this number, that part of an 8B model's update took
18 times as long on 16 chips, and its memory was a third larger (docs/benchmarks/scaling.md).
"""

CHUNK_BYTES = 2**29
"""Largest size of float32 logits that a device holds at once if it works alone."""


class TokenLogProbs(NamedTuple):
    """Log-probs and entropies of packed rows, [R, S] float32.

    Zero at tokens that are no actions and at tokens that follow nothing.
    """

    log_probs: Array
    """Log-prob of each token given those before it."""
    entropy: Array
    """Entropy, in nats, of the distribution that the token was sampled from."""


def token_log_probs(
    role: Role,
    params: Params,
    rows: PackedRows,
    temperature: Scalar | float = 1.0,
    *,
    entropy_gradient: bool = False,
    chunk_tokens: int | None = None,
) -> TokenLogProbs:
    """Compute log-probs and entropies of packed rows under softmax(logits / temperature).

    This is the one function for policy, old policy and reference. If the hidden states serve
    something else too (a value head), compute them once and call `log_probs_of_hidden`.

    Args:
      temperature: divides the logits.
      entropy_gradient: whether gradients flow through the entropy.
      chunk_tokens: tokens whose logits a device holds at once; chosen if not given.
    """
    return log_probs_of_hidden(
        role,
        params,
        role.hidden(params, rows),
        rows,
        temperature,
        entropy_gradient=entropy_gradient,
        chunk_tokens=chunk_tokens,
    )


def frozen_log_probs(
    role: Role, params: Params, rows: PackedRows, temperature: Scalar | float = 1.0
) -> FloatMKRS:
    """Compute log-probs of a whole batch [M, K, R, S], without gradients.

    It takes one micro-batch at a time. For make_batch.
    """

    def log_probs(micro_batch: PackedRows) -> Array:
        return token_log_probs(role, params, micro_batch, temperature).log_probs

    return packing.over_micro_batches(log_probs, rows)


def frozen_score_norms(
    role: Role, params: Params, rows: PackedRows, temperature: Scalar | float = 1.0
) -> FloatMKRS:
    """Compute |d log p(token) / d logits|^2 of a whole batch [M, K, R, S], without gradients.

    It is 1 - 2 p(token) + sum_v p(v)^2, with the logits over the temperature. Zero at tokens that
    are no actions. For make_batch.
    """

    def score_norms(micro_batch: PackedRows) -> Array:
        def of_chunk(tokens: Array, states: Array) -> Array:
            probs = jax.nn.softmax(role.logits(params, states) / temperature)
            chosen = jnp.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0]
            return jnp.maximum(1.0 - 2.0 * chosen + jnp.square(probs).sum(-1), 0.0)

        hidden = role.hidden(params, micro_batch)
        chunk_tokens = tokens_at_once(vocabulary(role, params, hidden))
        return over_actions(of_chunk, micro_batch, hidden, chunk_tokens=chunk_tokens)

    return packing.over_micro_batches(score_norms, rows)


def log_probs_of_hidden(
    role: Role,
    params: Params,
    hidden: FloatRSD,
    rows: PackedRows,
    temperature: Scalar | float = 1.0,
    *,
    entropy_gradient: bool = False,
    chunk_tokens: int | None = None,
) -> TokenLogProbs:
    """Compute `token_log_probs` from hidden states [R, S, D].

    With `Role.whole_logits` there is one chunk. The compiler then keeps its logits for the backward
    pass, which would compute those of several chunks again.
    """

    def chunk_log_probs(tokens: Array, states: Array) -> tuple[Array, Array]:
        logits = role.logits(params, states) / temperature
        log_probs, entropy = log_probs_of_logits(logits, tokens, role.exact)
        return log_probs, entropy if entropy_gradient else jax.lax.stop_gradient(entropy)

    if chunk_tokens is None and role.whole_logits:
        chunk_tokens = rows.tokens.size
    chunk_tokens = chunk_tokens or tokens_at_once(vocabulary(role, params, hidden))
    log_probs, entropy = over_actions(chunk_log_probs, rows, hidden, chunk_tokens=chunk_tokens)
    predicted = (rows.positions > 0) & (rows.segment_ids > 0)
    return TokenLogProbs(jnp.where(predicted, log_probs, 0.0), jnp.where(predicted, entropy, 0.0))


def log_collision(role: Role, params: Params, hidden: FloatRSD, rows: PackedRows) -> FloatRS:
    """Compute log sum_v p(v)^2 of the distribution of each action, [R, S], without gradients.

    It is the expectation of p under p itself: the probability that two samples are equal.
    """

    def chunk_collision(tokens: Array, states: Array) -> Array:
        return jax.nn.logsumexp(2.0 * jax.nn.log_softmax(role.logits(params, states)), axis=-1)

    chunk_tokens = tokens_at_once(vocabulary(role, params, hidden))
    collision = over_actions(chunk_collision, rows, hidden, chunk_tokens=chunk_tokens)
    return jax.lax.stop_gradient(collision)


def predicting(states: FloatRSD, rows: PackedRows) -> FloatRSD:
    """Give each token the state of the token that it follows, [R, S, D] -> [R, S, D].

    The shift between tokens and the states that predict them happens here and, for actions only, in
    `over_actions`.
    """
    return following(states, rows.previous)


def following(states: Array, previous: Array) -> Array:
    """Take the states [R, S, D] at the slots `previous` [R, C] -> [R, C, D]."""
    return jnp.take_along_axis(states, previous[..., None], axis=1)


def vocabulary(role: Role, params: Params, hidden: FloatRSD) -> int:
    """Compute the number of logits that a role has per hidden state."""
    return jax.eval_shape(role.logits, params, hidden).shape[-1]


def tokens_at_once(*vocabularies: int) -> int:
    """Compute the number of tokens whose logits, of models with these vocabulary sizes, a device
    holds at once."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.size > 1:
        return max(1, CHUNK_TOKENS // len(vocabularies))
    return max(1, min(CHUNK_TOKENS // len(vocabularies), CHUNK_BYTES // (4 * sum(vocabularies))))


def over_actions(
    function: Callable[..., Any], rows: PackedRows, *hidden: Array, chunk_tokens: int
) -> Any:
    """Apply a function to the actions of packed rows, a chunk at a time.

    What the function makes in between (the logits of one model or of several) exists for one chunk
    only, in the forward pass and in the backward pass, which computes it again.

    Args:
      function: (tokens [R, C], *states [R, C, D]) -> a pytree of [R, C, ...]. The states are those
        of `hidden` that predict the tokens.
      *hidden: hidden states [R, S, D] of one model or of several.
      chunk_tokens: size of a chunk per device. Rows are spread over all devices and stay whole, so
        that their sharding does too.

    Returns:
      The outputs as a pytree of [R, S, ...], zero at tokens that are no actions.
    """
    row_count, slots = rows.tokens.shape
    actions = rows.actions
    if actions is None:
        actions = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (row_count, slots))
    # Make as few chunks as possible, all of one size.
    token_parts = sharding.spread("tokens", slots)
    devices = sharding.spread("rows", row_count) * token_parts
    most = max(1, chunk_tokens * devices // row_count)
    chunks = -(-actions.shape[1] // most)
    chunk = -(-actions.shape[1] // chunks)
    chunk += -chunk % token_parts
    actions = jnp.pad(actions, ((0, 0), (0, -actions.shape[1] % chunk)), constant_values=slots)
    columns = jnp.minimum(actions, slots - 1)

    def split(x: Array) -> Array:
        """[R, S] -> the actions as [chunks, R, C]."""
        chosen = jnp.take_along_axis(x, columns, axis=1)
        return jnp.moveaxis(chosen.reshape(row_count, -1, chunk), 1, 0)

    def join(x: Array) -> Array:
        """[chunks, R, C, ...] -> [R, S, ...]."""
        x = jnp.moveaxis(x, 0, 1).reshape(row_count, -1, *x.shape[3:])

        def scatter(row: Array, row_actions: Array) -> Array:
            zeros = jnp.zeros((slots, *x.shape[2:]), x.dtype)
            return zeros.at[row_actions].set(row, mode="drop")

        return jax.vmap(scatter)(x, actions)

    tokens = split(rows.tokens)
    previous = split(rows.previous)
    states = (jax.ShapeDtypeStruct((row_count, chunk, *h.shape[2:]), h.dtype) for h in hidden)
    # A custom gradient sees its arguments only, so the weights that the function has closed over
    # must become arguments.
    function = function if token_parts == 1 else _constrained(function)
    closed, weights = jax.closure_convert(
        function, jax.ShapeDtypeStruct((row_count, chunk), tokens.dtype), *states
    )
    return jax.tree.map(join, _over_chunks(closed, tokens, previous, tuple(weights), hidden))


def _constrained(function: Callable[..., Any]) -> Callable[..., Any]:
    """Spread the tokens and states of a function over the devices that share a row."""

    def constrained(tokens: Array, *states: Array) -> Any:
        states = tuple(
            sharding.constrain(h, ("rows", "tokens", *(None for _ in h.shape[2:]))) for h in states
        )
        return function(sharding.constrain(tokens, ("rows", "tokens")), *states)

    return constrained


def _over_chunks(
    function: Callable[..., Any],
    tokens: Array,
    previous: Array,
    weights: tuple[Array, ...],
    hidden: tuple[Array, ...],
) -> Any:
    """Apply function(tokens, *states, *weights) to each chunk.

    `tokens` and `previous` are [chunks, R, C] and the result is [chunks, R, C, ...]. A
    rematerialized scan would have the same gradient. But it would add up the gradient of weights in
    bfloat16, and that of hidden states with one array of their whole size per chunk.
    """

    @jax.custom_vjp
    def run(weights: tuple[Array, ...], hidden: tuple[Array, ...]) -> Any:
        def run_chunk(chunk: tuple[Array, Array]) -> Any:
            chunk_tokens, chunk_previous = chunk
            states = [following(h, chunk_previous) for h in hidden]
            return function(chunk_tokens, *states, *weights)

        return jax.lax.map(run_chunk, (tokens, previous))

    def forward(*arguments: Any) -> tuple[Any, Any]:
        weights, hidden = jax.tree.map(lambda x: x.value, arguments)
        # Residuals are arrays only, so their structure tells the backward pass which arguments are
        # differentiated: () is, None is not.
        learned = jax.tree.map(
            lambda x: () if x.perturbed else None, (*arguments[0], *arguments[1])
        )
        return run(weights, hidden), (weights, hidden, learned)

    def backward(residuals: Any, gradient: Any) -> Any:
        weights, hidden, learned = residuals
        return _gradients(
            function,
            (tokens, previous),
            weights,
            hidden,
            [x is not None for x in learned],
            gradient,
        )

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run(weights, hidden)


def _gradients(
    function: Callable[..., Any],
    chunks: tuple[Array, Array],
    weights: tuple[Array, ...],
    hidden: tuple[Array, ...],
    learned: list[bool],
    gradient: Any,
) -> tuple[Any, Any]:
    """Compute the gradients of `weights` and `hidden`, None for those that are not `learned`.

    `chunks` are the tokens and their previous slots, and `gradient` is that of the stacked outputs.
    """

    def materialize(x: Any) -> Array:
        if not isinstance(x, SymbolicZero):
            return x
        zero: Any = x.aval
        return jnp.zeros(zero.shape, zero.dtype)

    gradient = jax.tree.map(materialize, gradient, is_leaf=lambda x: isinstance(x, SymbolicZero))
    count = len(weights)

    def start(x: Array, is_weight: bool) -> Array:
        # Gradients of bfloat16 weights add up in float32.
        dtype: Any = jnp.promote_types(x.dtype, jnp.float32) if is_weight else x.dtype
        return jnp.zeros(x.shape, dtype)

    def add_chunk(totals: list[Array | None], chunk: Any) -> tuple[list[Array | None], None]:
        tokens, previous, chunk_gradient = chunk
        inputs = [*weights, *(following(h, previous) for h in hidden)]

        def of_learned(*learned_inputs: Array) -> Any:
            remaining = iter(learned_inputs)
            complete = [
                next(remaining) if is_learned else x
                for x, is_learned in zip(inputs, learned, strict=True)
            ]
            return function(tokens, *complete[count:], *complete[:count])

        learned_inputs = [x for x, is_learned in zip(inputs, learned, strict=True) if is_learned]
        _, pull_back = jax.vjp(of_learned, *learned_inputs)
        parts = iter(pull_back(chunk_gradient))

        def add(i: int, total: Array | None) -> Array | None:
            if total is None:
                return None
            part = next(parts)
            if i < count:
                return total + part.astype(total.dtype)
            return jax.vmap(lambda row, slots, x: row.at[slots].add(x))(total, previous, part)

        return [add(i, total) for i, total in enumerate(totals)], None

    arguments = (*weights, *hidden)
    totals = [start(x, i < count) if learned[i] else None for i, x in enumerate(arguments)]
    totals, _ = jax.lax.scan(add_chunk, totals, (*chunks, gradient))
    gradients = [
        None if total is None else total.astype(x.dtype)
        for x, total in zip(arguments, totals, strict=True)
    ]
    return tuple(gradients[:count]), tuple(gradients[count:])


def log_probs_of_logits(
    logits: FloatsV, tokens: Ints, exact: bool = False
) -> tuple[Floats, Floats]:
    """Compute log-probs and entropies [...] of tokens [...] under logits [..., V].

    It is logit - max - log(sum(exp(logits - max))), in the order of `sampler.token_sampling`. With
    `exact`, equal logits then give log-probs of equal bits. That is 1.5 times as fast as
    log_softmax followed by a gather, and keeps no second array of the size of the logits.
    """
    result: Any = _log_probs_of_logits(logits, tokens, exact)
    return result


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _log_probs_of_logits(logits: Array, tokens: Array, exact: bool) -> tuple[Array, Array]:
    return _log_probs_with_residuals(logits, tokens, exact)[0]


def _log_probs_with_residuals(
    logits: Array, tokens: Array, exact: bool
) -> tuple[tuple[Array, Array], Any]:
    # With b = z - max: log p = b - log(sum(exp b)), H = log(sum(exp b)) - sum(exp(b) b)/sum(exp b).
    # Both sums are one pass over the logits, and nothing else of their size is written.
    largest = jnp.max(logits, axis=-1)
    below_max = logits - largest[..., None]
    mass = jnp.exp(below_max)
    total = tree_sum(mass) if exact else jnp.sum(mass, axis=-1)
    log_total = jnp.log(total)
    # From the logits themselves: a gather from `below_max` would write it as an array.
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0] - largest
    if exact:
        # The sampler has no entropy: a pass of its own leaves the bits of the sum as they are.
        chosen = jnp.take_along_axis(below_max, tokens[..., None], axis=-1)[..., 0]
        probabilities = jnp.exp(below_max - log_total[..., None])
        entropy = log_total - jnp.sum(probabilities * below_max, axis=-1)
    else:
        entropy = log_total - jnp.sum(mass * below_max, axis=-1) / total
    return (chosen - log_total, entropy), (logits, tokens, largest + log_total, entropy)


def _log_probs_of_logits_gradient(
    exact: bool, residuals: Any, gradients: tuple[Any, Any]
) -> tuple[Array, None]:
    """Compute the gradient of the logits, without a scatter into the vocabulary.

    d log p(token) / d z_v = [v = token] - p(v) and d H / d z_v = -p(v) (log p(v) + H).
    """
    logits, tokens, log_normalizer, entropy = residuals
    log_prob_gradient, entropy_gradient = gradients
    log_p = logits - log_normalizer[..., None]
    gradient = jnp.zeros((), logits.dtype)
    if not isinstance(log_prob_gradient, SymbolicZero):
        ids = jax.lax.broadcasted_iota(tokens.dtype, logits.shape, logits.ndim - 1)
        chosen = ids == tokens[..., None]
        gradient += log_prob_gradient[..., None] * (chosen - jnp.exp(log_p))
    if not isinstance(entropy_gradient, SymbolicZero):
        gradient -= entropy_gradient[..., None] * jnp.exp(log_p) * (log_p + entropy[..., None])
    return jnp.broadcast_to(gradient, logits.shape), None


_log_probs_of_logits.defvjp(
    lambda logits, tokens, exact: _log_probs_with_residuals(logits.value, tokens.value, exact),
    _log_probs_of_logits_gradient,
    symbolic_zeros=True,
)


# --- estimators of KL(policy || reference) from tokens of the policy ---
#
# J. Schulman, "Approximating KL divergence". `losses.reference_kl` says which gradients they have.


def k1(log_probs: Floats, reference_log_probs: Floats) -> Floats:
    """Compute log(policy / reference): unbiased, high variance, may be negative."""
    return log_probs - reference_log_probs


def k2(log_probs: Floats, reference_log_probs: Floats) -> Floats:
    """Compute half the squared log-ratio.

    It is biased, but on policy its expected gradient is exactly that of the KL.
    """
    return 0.5 * jnp.square(log_probs - reference_log_probs)


def k3(log_probs: Floats, reference_log_probs: Floats) -> Floats:
    """Compute reference / policy - 1 - log(reference / policy): unbiased and never negative."""
    difference = reference_log_probs - log_probs
    return jnp.expm1(difference) - difference
