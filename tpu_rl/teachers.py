"""Token-level teachers made of the logits of several models: functions of logits [..., V], within one chunk.

A teacher's policy is softmax(z*), with z* a line through two models' logits (AlignDistil, arXiv 2503.02832):

    extrapolation   z* = z_reference + alpha (z_teacher - z_reference)      eq. 11; alpha = beta0 / beta
    contrast        z* = z_teacher   + alpha (z_teacher - z_reverse)        eq. 14, 17

With a teacher from DPO (coefficient beta0), the first is, state by state, the policy that maximises DPO's own token
reward beta0 ln(teacher / reference) less beta times the KL to the reference. It is not the optimum over sequences: a
token teacher cannot see where a token leads. For every policy, with a = beta0 / beta,

    J(policy) = beta E[ sum_t ln Z_t - KL(policy || z*_t) ],    ln Z_t = (a - 1) Renyi_a(teacher || reference)

and only for a = 1 (or single-token answers) does the ln Z of the visited states not depend on the policy.
"""

from __future__ import annotations

import jax.numpy as jnp

from tpu_rl import divergences
from tpu_rl.types import Array

LEAST_ALPHA = 1e-3
"""The paper's epsilon: where two models agree, the teacher is very nearly the first of them."""


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


def shared_vocabulary(*logits: Array) -> tuple[Array, ...]:
    """All cut to the shortest vocabulary: of one tokenizer, models differ in padding only."""
    size = min(z.shape[-1] for z in logits)
    return tuple(z[..., :size] for z in logits)


def constant_alpha(like: Array, alpha: float) -> Array:
    """alpha for every state of logits [..., V]: [...]."""
    return jnp.full(like.shape[:-1], alpha, like.dtype)
