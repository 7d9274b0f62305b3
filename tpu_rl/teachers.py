"""Token-level teachers made of the logits of several models, and how far a policy is from them.

A teacher's policy is softmax(z*), with z* on a line through two models' logits (AlignDistil, arXiv 2503.02832):

    extrapolated   z* = z_reference + alpha (z_teacher - z_reference)      eq. 11; alpha = beta0 / beta
    contrastive    z* = z_teacher   + alpha (z_teacher - z_reverse)        eq. 14, 17

With a teacher from DPO (coefficient beta0), the first is, state by state, the policy that maximises DPO's own token
reward beta0 ln(teacher / reference) less beta times the KL to the reference. It is not the optimum over sequences: a
token teacher cannot see where a token leads. For every policy, with a = beta0 / beta,

    J(policy) = beta E[ sum_t ln Z_t - KL(policy || z*_t) ],    ln Z_t = (a - 1) Renyi_a(teacher || reference)

and only for a = 1 (or answers of one token) does the ln Z of the visited states not depend on the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tpu_rl import divergences
from tpu_rl.log_probs import of_logits, over_actions, tokens_at_once, vocabulary
from tpu_rl.types import Array, Params, Roles, Rows

LEAST_ALPHA = 1e-3
"""The paper's epsilon: where two models agree, the teacher is very nearly the first of them."""


class Target(NamedTuple):
    logits: Array
    """[..., V]: z*."""
    alpha: Array
    """[...]: how far z* lies on its line."""


Teacher = Callable[[Mapping[str, Array]], Target]
"""Logits [..., V] of roles, by name -> what the policy is drawn to."""


def extrapolation(teacher: Array, reference: Array, alpha: Array) -> Array:
    """z_reference + alpha (z_teacher - z_reference), logits [..., V]; alpha [...]: 0 the reference, 1 the teacher."""
    return reference + alpha[..., None] * (teacher - reference)


def contrast(teacher: Array, reverse: Array, alpha: Array) -> Array:
    """z_teacher + alpha (z_teacher - z_reverse), logits [..., V]; alpha [...].

    `reverse` learned the opposite: what both say alike, of language and the data's style, cancels.
    """
    return teacher + alpha[..., None] * (teacher - reverse)


def adaptive_alpha(teacher: Array, other: Array, scale: float, half: bool = True) -> Array:
    """alpha_t = scale x TVD_t + 1e-3 (eq. 16), [...]: the more two models disagree, the further the teacher goes.

    The authors' code leaves out the 1/2 of the total variation distance: its scale is half the formula's.
    """
    return scale * divergences.total_variation(teacher, other, half) + LEAST_ALPHA


COMPOSITIONS = {
    "teacher": ("teacher", lambda teacher, other, alpha: teacher),
    "extrapolated": ("reference", extrapolation),
    "contrastive": ("teacher_reverse", contrast),
}
"""Name -> (the role beside "teacher" that it needs, function of both roles' logits and alpha)."""


def compose(name: str, alpha: float, adaptive: bool = False, tvd_half: bool = True) -> Teacher:
    """One of COMPOSITIONS, alpha the same for every state or `adaptive`, with that scale."""
    other_role, combine = COMPOSITIONS[name]

    def teacher(logits: Mapping[str, Array]) -> Target:
        first, other = logits["teacher"], logits[other_role]
        alphas = jnp.full(first.shape[:-1], alpha, first.dtype)
        if adaptive:
            alphas = adaptive_alpha(first, other, alpha, tvd_half)
        return Target(combine(first, other, alphas), alphas)

    return teacher


def shared_vocabulary(logits: Mapping[str, Array]) -> dict[str, Array]:
    """All cut to the shortest vocabulary: of one tokenizer, models differ in padding only."""
    size = min(z.shape[-1] for z in logits.values())
    return {name: z[..., :size] for name, z in logits.items()}


class Compared(NamedTuple):
    """Of the distribution that each token was, or could have been, drawn from; all [R, S], nats."""

    divergence: Array
    """Of policy and teacher, with its gradient to the policy alone."""
    alpha: Array
    log_probs: Array
    """The policy's, of the tokens, with their gradient; they mean nothing where a token follows none."""
    entropy: Array
    """Of the policy."""


def compare(
    roles: Roles,
    params: Params,
    rows: Rows,
    teacher: Teacher,
    beta: float,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    chunk_tokens: int | None = None,
) -> Compared:
    """The generalised Jensen-Shannon divergence of role "policy" and a teacher made of the other `roles`.

    All logits are divided by `temperature` first. With `top_k`, tokens other than the teacher's k likeliest are one.
    """

    def one_chunk(tokens: Array, *hidden: Array) -> Compared:
        logits = {name: roles[name].logits(params, h) / temperature for name, h in zip(roles, hidden, strict=True)}
        logits = shared_vocabulary(logits)
        student, (target, alpha) = logits["policy"], jax.lax.stop_gradient(teacher(logits))
        log_probs, entropy = of_logits(student, tokens)
        if top_k is not None and top_k < target.shape[-1] - 1:
            likeliest = divergences.top(target, top_k)
            student, target = (divergences.coarsen(z, likeliest) for z in (student, target))
        divergence = divergences.jensen_shannon(student, target, beta)
        return Compared(divergence, alpha, log_probs, jax.lax.stop_gradient(entropy))

    hidden = {name: role.hidden(params, rows) for name, role in roles.items()}
    sizes = (vocabulary(role, params, hidden[name]) for name, role in roles.items())
    return over_actions(one_chunk, rows, *hidden.values(), chunk_tokens=chunk_tokens or tokens_at_once(*sizes))
