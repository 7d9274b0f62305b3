"""The gated delta rule: linear attention with a recurrent state, and its short convolution.

Each head keeps a state S [E, V]. A token with query q, key k, value v, decay g <= 0 and rate b in
(0, 1) changes it and reads it (Gated DeltaNet, arXiv 2412.06464, equation 10):

    S <- exp(g) S
    S <- S + b k (v - S^T k)^T
    out = S^T q

`recurrence` is this rule for one token. `in_chunks` computes it for rows of tokens as products of
matrices, chunk by chunk (arXiv 2406.06484, section 3). The state and everything that enters it are
float32.

Letters in array shapes are those of `layers`; here H counts heads of values, each with its own
state, E is the size of a query and a key, V that of a value, W the number of taps, and C the number
of tokens in a chunk.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpu_rl.models.layers import TokenIndex

Array = jax.Array

CHUNK = 64
"""Largest number of tokens in a chunk; a power of two."""

KEY_EPS = 1e-6
"""Added to the squared length of queries and keys before they are divided by their length."""

# The state sums over all earlier tokens. The default precision of a TPU would round its factors to
# bfloat16, differently in chunks than token by token.
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class Sequences(NamedTuple):
    """The sequences that follow one another in rows of tokens."""

    number: Array
    """[B, T] int32: number of the token's sequence in its row. 0 continues the state that the row
    begins with, and every other number begins with a state of zeros."""
    is_branch: Array
    """[B, T] bool: True in sequences that would have to begin with the state at an earlier token,
    which is not kept."""
    has_past: Array | None = None
    """[B] bool: True if the row's cache has tokens. None without a cache."""
    commit: Array | None = None
    """[B] int32: the number of first tokens that stay in the cache. None without a cache."""


def packed_sequences(tokens: TokenIndex) -> Sequences:
    """Return the sequences of packed rows. A token begins one if it does not see the last token."""
    first = jnp.ones_like(tokens.index[:, :1], bool)
    return _sequences(tokens, first)


def cached_sequences(tokens: TokenIndex, lengths: Array, commit: Array) -> Sequences:
    """Return the sequences of new tokens that follow `lengths` [B] cached ones."""
    first = jnp.zeros_like(tokens.index[:, :1], bool)
    sequences = _sequences(tokens, first)
    # Whatever does not follow the last token goes back to the cache.
    is_branch = sequences.is_branch | (sequences.number > 0)
    return sequences._replace(is_branch=is_branch, has_past=lengths > 0, commit=commit)


def _sequences(tokens: TokenIndex, is_first: Array) -> Sequences:
    begins = tokens.visible_until[:, :-1] <= tokens.index[:, 1:]
    begins = jnp.concatenate([is_first, begins], axis=1)
    number = jnp.cumsum(begins, axis=1, dtype=jnp.int32)
    # Where a sequence begins although it sees an earlier token, it is a branch of that token's.
    furthest = jax.lax.cummax(tokens.visible_until, axis=1)
    furthest = jnp.pad(furthest[:, :-1], ((0, 0), (1, 0)))
    place = jnp.broadcast_to(jnp.arange(begins.shape[1])[None, :], begins.shape)
    latest = jax.lax.cummax(jnp.where(begins, 2 * place + (furthest > tokens.index), 0), axis=1)
    return Sequences(number, latest % 2 == 1)


def convolve(x: Array, taps: Array, past: Array | None, sequences: Sequences) -> Array:
    """Return the SiLU of the causal convolution of x [B, T, H, E], each element by itself.

    `taps` is [H, E, W]; the last one is that of the token itself. `past` [B, W - 1, H, E] are the
    inputs before x, and None stands for zeros. Tokens of other sequences count as zeros.
    """
    length = x.shape[1]
    width = taps.shape[-1]
    inputs = before_and(x, past, width)
    number = jnp.pad(sequences.number, ((0, 0), (width - 1, 0)))
    total = jnp.zeros(x.shape, jnp.float32)
    for tap in range(width):
        is_same = number[:, tap : tap + length] == sequences.number
        shifted = jnp.where(is_same[..., None, None], inputs[:, tap : tap + length], 0)
        tap_weights = taps[..., tap].astype(jnp.float32)[None, None]
        total += shifted.astype(jnp.float32) * tap_weights
    return jax.nn.silu(total).astype(x.dtype)


def before_and(x: Array, past: Array | None, width: int) -> Array:
    """Return x [B, T, H, E] after the `width` - 1 inputs before it, [B, T + W - 1, H, E]."""
    if past is None:
        return jnp.pad(x, ((0, 0), (width - 1, 0), (0, 0), (0, 0)))
    return jnp.concatenate([past.astype(x.dtype), x], axis=1)


def latest_inputs(x: Array, past: Array, commit: Array) -> Array:
    """Return the last W - 1 inputs [B, W - 1, H, E] after the first `commit` tokens of x."""
    num_inputs = past.shape[1]
    inputs = before_and(x, past, num_inputs + 1)
    places = commit[:, None] + jnp.arange(num_inputs)[None, :]
    return jnp.take_along_axis(inputs, places[:, :, None, None], axis=1).astype(past.dtype)


def normalized(x: Array) -> Array:
    """Return x [..., E] divided by its length, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + KEY_EPS)


def recurrence(
    query: Array, key: Array, value: Array, decay: Array, rate: Array, state: Array
) -> tuple[Array, Array]:
    """Return the output of one token, [B, H, V], and the state [B, H, E, V] after it.

    Args:
        query, key: [B, H, E] float32.
        value: [B, H, V] float32.
        decay, rate: g and b of the rule, [B, H] float32.
        state: the state before the token.
    """
    state = state * jnp.exp(decay)[..., None, None]
    error = value - _einsum("bhev,bhe->bhv", state, key)
    state = state + _einsum("bhe,bhv->bhev", key, rate[..., None] * error)
    return _einsum("bhev,bhe->bhv", state, query), state


class _Carry(NamedTuple):
    """The values that one chunk passes to the next."""

    state: Array
    """[B, H, E, V]."""
    number: Array
    """[B]: number of the last token's sequence."""
    committed: Array | None
    """[B, H, E, V]: the state after the committed tokens; None without a cache."""


class _Chunk(NamedTuple):
    """Tokens [B, C] with their queries, keys, values, decays and rates, heads first."""

    query: Array
    key: Array
    value: Array
    decay: Array
    rate: Array
    number: Array
    """[B, C]: see `Sequences`."""
    start: Array
    """[]: number of tokens in earlier chunks."""


def in_chunks(
    query: Array,
    key: Array,
    value: Array,
    decay: Array,
    rate: Array,
    state: Array | None,
    sequences: Sequences,
    chunk: int = CHUNK,
) -> tuple[Array, Array | None]:
    """Return the outputs of tokens [B, T], [B, T, H, V], and the state after the committed ones.

    Args:
        query, key: [B, T, H, E] float32.
        value: [B, T, H, V] float32.
        decay, rate: g and b of the rule, [B, T, H] float32.
        state: [B, H, E, V] float32, that of sequence 0. None: zeros, and there is no cache.
        sequences: where the state begins anew.
        chunk: the largest number of tokens in a chunk, a power of two.
    """
    rows, length, heads, key_dim = query.shape
    chunk = min(chunk, 1 << max(length - 1, 0).bit_length())
    missing = -length % chunk
    num_chunks = (length + missing) // chunk

    def cut(x: Array, mode: str = "constant") -> Array:
        """[B, T, ...] -> [N, B, C, ...]. Padding does not change the state."""
        padded = jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2), mode)
        return padded.reshape(rows, num_chunks, chunk, *x.shape[2:]).swapaxes(0, 1)

    def heads_first(x: Array) -> Array:
        """[B, T, H, ...] -> [N, B, H, C, ...]."""
        return cut(x).swapaxes(2, 3)

    chunks = _Chunk(
        query=heads_first(query),
        key=heads_first(key),
        value=heads_first(value),
        decay=heads_first(decay),
        rate=heads_first(rate),
        number=cut(sequences.number, "edge"),
        start=chunk * jnp.arange(num_chunks),
    )
    begin = state
    if begin is None:
        begin = jnp.zeros((rows, heads, key_dim, value.shape[-1]), jnp.float32)
    committed = None if sequences.commit is None else begin
    carry = _Carry(begin, jnp.zeros(rows, jnp.int32), committed)

    # The backward pass computes each chunk again: only the states between chunks are kept.
    step = jax.checkpoint(functools.partial(_step, sequences.commit), prevent_cse=False)
    carry, read = jax.lax.scan(step, carry, chunks)
    read = read.transpose(1, 0, 3, 2, 4).reshape(rows, length + missing, heads, -1)
    return read[:, :length], carry.committed


def _step(commit: Array | None, carry: _Carry, chunk: _Chunk) -> tuple[_Carry, Array]:
    """Return the carry after a chunk, and the outputs of its tokens, [B, H, C, V]."""
    size = chunk.number.shape[1]
    later = np.arange(size)[:, None]
    earlier = np.arange(size)[None, :]
    # Decays from token j to token i, j <= i: those of the tokens after j. Each sum has only its own
    # terms, because a difference of two long sums would be less exact. Sums are products with ones,
    # because TPUs have no fast running sum.
    running = (later >= earlier).astype(np.float32)
    terms = jnp.where(later > earlier, chunk.decay[..., :, None], 0.0)
    is_same = chunk.number[:, :, None] == chunk.number[:, None, :]
    reaches = (is_same & (later >= earlier)[None])[:, None]
    between = jnp.where(reaches, jnp.exp(_einsum("il,bhlj->bhij", running, terms)), 0.0)
    continues = (chunk.number == carry.number[:, None])[:, None]
    since_start = jnp.where(continues, jnp.exp(_einsum("il,bhl->bhi", running, chunk.decay)), 0.0)

    # `written` [B, H, C, V] is b (v - S^T k) of each token: what the rule adds to the state along
    # the key. The S of a token has what the tokens before it wrote: the system is triangular.
    overlap = _einsum("bhie,bhje->bhij", chunk.key, chunk.key) * between
    system = jnp.where(later > earlier, chunk.rate[..., None] * overlap, 0.0)
    remembered = since_start[..., None] * _einsum("bhie,bhev->bhiv", chunk.key, carry.state)
    error = chunk.rate[..., None] * (chunk.value - remembered)
    written = _einsum("bhij,bhjv->bhiv", _inverse(system), error)

    scores = _einsum("bhie,bhje->bhij", chunk.query, chunk.key) * between
    read = since_start[..., None] * _einsum("bhie,bhev->bhiv", chunk.query, carry.state)
    read = read + _einsum("bhij,bhjv->bhiv", scores, written)

    def state_after(place: Array) -> Array:
        """Return the state [B, H, E, V] after the token at `place` [B] of the chunk."""
        index = place[:, None, None]
        carry_decay = jnp.take_along_axis(since_start, index, axis=2)
        weights = jnp.take_along_axis(between, index[..., None], axis=2)[:, :, 0]
        added = _einsum("bhje,bhjv->bhev", weights[..., None] * chunk.key, written)
        return carry_decay[..., None] * carry.state + added

    last = jnp.full(len(chunk.number), size - 1)
    state = state_after(last)
    committed = carry.committed
    if commit is not None and committed is not None:
        count = jnp.minimum(commit - chunk.start, size)
        at_commit = state_after(jnp.maximum(count - 1, 0))
        committed = jnp.where((count > 0)[:, None, None, None], at_commit, committed)
    return _Carry(state, chunk.number[:, -1], committed), read


@jax.custom_vjp
def _inverse(lower: Array) -> Array:
    """Return the inverse of 1 + lower, for strictly lower triangular matrices [..., C, C].

    It doubles the size of the blocks on the diagonal that are inverted, as substitution by blocks
    does. C is a power of two.
    """
    size = lower.shape[-1]
    row = jnp.arange(size)[:, None]
    column = jnp.arange(size)[None, :]

    def double(level: Array, inverse: Array) -> Array:
        block = row >> level
        is_corner = (block % 2 == 1) & (block - 1 == column >> level)
        corner = jnp.where(is_corner, lower, 0.0)
        change = _einsum("...ij,...jk->...ik", corner, inverse)
        return inverse - _einsum("...ij,...jk->...ik", inverse, change)

    # A loop, because the compiler of TPUs takes seconds for each product.
    identity = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    return jax.lax.fori_loop(0, size.bit_length() - 1, double, identity)


def _inverse_forward(lower: Array) -> tuple[Array, Array]:
    inverse: Any = _inverse(lower)
    return inverse, inverse


def _inverse_backward(inverse: Array, gradient: Array) -> tuple[Array]:
    inner = _einsum("...ij,...kj->...ik", gradient, inverse)
    return (-_einsum("...ji,...jk->...ik", inverse, inner),)


_inverse.defvjp(_inverse_forward, _inverse_backward)
