"""Divergences of two next-token distributions over the whole vocabulary.

All are pure functions of logits [..., V], which need not be normalized, and return nats [...]. P is
the teacher (or policy) and Q the student (or reference). Gradients with respect to either side are
exact. The functions hold arrays as large as their arguments: call them within
`log_probs.over_actions`, so that [R, S, V] never exists.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpu_rl.losses.shapes import Floats, FloatsV
from tpu_rl.types import Array


def log_softmax(logits: FloatsV) -> FloatsV:
    """Compute the log-probabilities of logits [..., V]."""
    return logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)


def kl(p_logits: FloatsV, q_logits: FloatsV) -> Floats:
    """Compute KL(P || Q) = sum_v P(v) log(P(v) / Q(v))."""
    return _kl(log_softmax(p_logits), log_softmax(q_logits))


def _kl(log_p: Array, log_q: Array) -> Array:
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def jensen_shannon(student_logits: FloatsV, teacher_logits: FloatsV, beta: float) -> Floats:
    """Compute the generalized Jensen-Shannon divergence of teacher P and student Q (GKD, arXiv
    2306.13649, eq. 1).

        M   = beta P + (1 - beta) Q
        JSD = beta KL(P || M) + (1 - beta) KL(Q || M)

    The formula is zero at both ends, so they have TRL's meaning instead, the limits of JSD / beta
    and of JSD / (1 - beta): beta 0 is the forward KL(P || Q), which covers the teacher, and beta 1
    is the reverse KL(Q || P), which seeks its modes.
    """
    student = log_softmax(student_logits)
    teacher = log_softmax(teacher_logits)
    if beta == 0:
        return _kl(teacher, student)
    if beta == 1:
        return _kl(student, teacher)
    mixture = jnp.logaddexp(jnp.log(beta) + teacher, jnp.log1p(-beta) + student)
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def total_variation(p_logits: FloatsV, q_logits: FloatsV, half: bool = True) -> Floats:
    """Compute 1/2 sum_v |P(v) - Q(v)|, from 0 to 1.

    It is the largest difference in the probability of any event.

    If `half` is False it is the L1 distance, from 0 to 2, which some code calls by the same name.
    """
    distance = jnp.sum(jnp.abs(jax.nn.softmax(p_logits) - jax.nn.softmax(q_logits)), axis=-1)
    return 0.5 * distance if half else distance


def coarsen(logits: Array, tokens: Array) -> Array:
    """Compute the log-probabilities of some tokens, and of all others together.

    A divergence of coarsened distributions is never negative, and never above that of the whole
    ones. With the k likeliest tokens of a teacher, its other probabilities need not be known.

    Args:
      logits: [..., V].
      tokens: [..., k], distinct, with k < V.

    Returns:
      [..., k + 1].
    """
    log_p = log_softmax(logits)
    chosen = jnp.take_along_axis(log_p, tokens, axis=-1)
    others = jnp.put_along_axis(log_p, tokens, -jnp.inf, axis=-1, inplace=False)
    return jnp.concatenate([chosen, jax.nn.logsumexp(others, axis=-1, keepdims=True)], axis=-1)


def top(logits: Array, k: int) -> Array:
    """Compute the k likeliest tokens [..., k], the likeliest first."""
    return jax.lax.top_k(logits, k)[1]
