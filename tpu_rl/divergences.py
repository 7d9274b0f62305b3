"""How far two next-token distributions are from each other, over the whole vocabulary.

Pure functions of logits [..., V], normalised inside, -> nats [...]. They hold as many numbers as their arguments: call
them within `log_probs.over_actions`, so that [R, S, V] never exists. P is the teacher (or policy), Q the student (or
reference), and differentiating any of them with respect to either side is exact.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpu_rl.types import Array


def log_softmax(logits: Array) -> Array:
    """The logarithm of the distribution that logits stand for."""
    return logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)


def kl(p_logits: Array, q_logits: Array) -> Array:
    """KL(P || Q) = sum_v P(v) ln(P(v) / Q(v))."""
    return _kl(log_softmax(p_logits), log_softmax(q_logits))


def _kl(log_p: Array, log_q: Array) -> Array:
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def jensen_shannon(student_logits: Array, teacher_logits: Array, beta: float) -> Array:
    """Generalised Jensen-Shannon divergence of teacher P and student Q (GKD, arXiv 2306.13649, eq. 1).

        M = beta P + (1 - beta) Q,    JSD = beta KL(P || M) + (1 - beta) KL(Q || M)

    Its limits are zero, so the ends have TRL's meaning: beta 0 is the forward KL(P || Q), which covers the teacher, 1
    the reverse KL(Q || P), which seeks its modes. (JSD / beta and JSD / (1 - beta) tend to them.)
    """
    student, teacher = log_softmax(student_logits), log_softmax(teacher_logits)
    if beta == 0:
        return _kl(teacher, student)
    if beta == 1:
        return _kl(student, teacher)
    mixture = jnp.logaddexp(jnp.log(beta) + teacher, jnp.log1p(-beta) + student)
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def total_variation(p_logits: Array, q_logits: Array, half: bool = True) -> Array:
    """1/2 sum_v |P(v) - Q(v)|, from 0 to 1: the most that the probability of any event differs.

    Without the `half` it is the L1 distance, from 0 to 2, which some code calls by the same name.
    """
    distance = jnp.sum(jnp.abs(jax.nn.softmax(p_logits) - jax.nn.softmax(q_logits)), axis=-1)
    return 0.5 * distance if half else distance


def renyi(p_logits: Array, q_logits: Array, order: float) -> Array:
    """Renyi divergence of order a, ln(sum_v P^a Q^(1-a)) / (a - 1); of order 1, its limit, the KL(P || Q)."""
    if order == 1:
        return kl(p_logits, q_logits)
    exponent = order * log_softmax(p_logits) + (1 - order) * log_softmax(q_logits)
    return jax.nn.logsumexp(exponent, axis=-1) / (order - 1)


def coarsen(logits: Array, tokens: Array) -> Array:
    """logits [..., V], distinct tokens [..., k] -> [..., k + 1]: their log-probabilities, and that of all others.

    A divergence of coarsened distributions is a divergence (never negative) and never above that of the whole ones:
    nothing is said of what the others are among themselves. For the k likeliest tokens of a teacher, whose other
    probabilities need not be known. At least one token must be left over.
    """
    log_p = log_softmax(logits)
    chosen = jnp.take_along_axis(log_p, tokens, axis=-1)
    others = jnp.put_along_axis(log_p, tokens, -jnp.inf, axis=-1, inplace=False)
    return jnp.concatenate([chosen, jax.nn.logsumexp(others, axis=-1, keepdims=True)], axis=-1)


def top(logits: Array, k: int) -> Array:
    """The k likeliest tokens [..., k], the likeliest first."""
    return jax.lax.top_k(logits, k)[1]
