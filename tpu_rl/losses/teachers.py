"""Teachers made of the logits of several models, and the divergence of a policy from them.

A teacher is softmax(z*) with z* on a line through the logits of two models (AlignDistil, arXiv
2503.02832):

    extrapolated   z* = z_reference + alpha (z_teacher - z_reference)      eq. 11
    contrastive    z* = z_teacher   + alpha (z_teacher - z_reverse)        eq. 14 and 17

where alpha is the paper's beta0 / beta. If the teacher comes from DPO with coefficient beta0, the
extrapolated one is, at every state, the policy that maximizes DPO's own token reward beta0
log(teacher / reference) minus beta times the KL to the reference. It is not the optimum over
sequences, because a token-level teacher does not see where a token leads. For every policy, with a
= beta0 / beta,

    J(policy) = beta E[ sum_t log Z_t - KL(policy || z*_t) ]
    log Z_t   = (a - 1) Renyi_a(teacher || reference)

and only for a = 1, or for completions of one token, is the log Z of the visited states independent
of the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tpu_rl.errors import InputError
from tpu_rl.losses import divergences
from tpu_rl.losses.log_probs import log_probs_of_logits, over_actions, tokens_at_once, vocabulary
from tpu_rl.losses.shapes import Floats, FloatsV
from tpu_rl.types import Array, PackedRows, Params, Role, Roles, Sampling

LEAST_ALPHA = 1e-3
"""The paper's epsilon. Where two models agree, the target is nearly the first of them."""
LEAST_REST = 1e-7
"""The least probability of all tokens but the top of a served teacher, whose sum is rounded."""


def require_distributions(sampling: Sampling) -> None:
    """Raise InputError if the sampler is greedy: there is no distribution to compare."""
    if sampling.temperature <= 0:
        raise InputError(
            "distributions are compared at a temperature above 0",
            where="--sampling.temperature",
            fix="use 1.0",
        )


class Target(NamedTuple):
    """A target of the policy."""

    logits: Array
    """[..., V]: z*."""
    alpha: Array
    """[...]: position of z* on its line."""


Teacher = Callable[[Mapping[str, Array]], Target]
"""Logits [..., V] by role -> Target."""


def extrapolation(teacher: FloatsV, reference: FloatsV, alpha: Floats) -> FloatsV:
    """Compute z_reference + alpha (z_teacher - z_reference) for logits [..., V] and alpha [...].

    alpha 0 is the reference, 1 the teacher.
    """
    return reference + alpha[..., None] * (teacher - reference)


def contrast(teacher: FloatsV, reverse: FloatsV, alpha: Floats) -> FloatsV:
    """Compute z_teacher + alpha (z_teacher - z_reverse) for logits [..., V] and alpha [...].

    `reverse` learned the opposite. What both learned alike, of the language and the style of the
    data, cancels.
    """
    return teacher + alpha[..., None] * (teacher - reverse)


def adaptive_alpha(teacher: FloatsV, other: FloatsV, scale: float, half: bool = True) -> Floats:
    """Compute alpha_t = scale x total variation distance_t + 0.001 (eq. 16), [..., V] -> [...].

    The more two models disagree, the further the teacher goes. The authors' code leaves out the 1/2
    of the distance (`half` False), so its scale is half of the formula's.
    """
    return scale * divergences.total_variation(teacher, other, half) + LEAST_ALPHA


COMPOSITIONS = {
    "teacher": ("teacher", lambda teacher, other, alpha: teacher),
    "extrapolated": ("reference", extrapolation),
    "contrastive": ("teacher_reverse", contrast),
}
"""Name -> (the other role that it needs, function of both roles' logits and alpha)."""


def compose(name: str, alpha: float, adaptive: bool = False, tvd_half: bool = True) -> Teacher:
    """Look up the teacher of this name in COMPOSITIONS.

    alpha is the same at every state or, if `adaptive`, the scale of `adaptive_alpha`.
    """
    other_role, combine = COMPOSITIONS[name]

    def teacher(logits: Mapping[str, Array]) -> Target:
        first = logits["teacher"]
        other = logits[other_role]
        alphas = jnp.full(first.shape[:-1], alpha, first.dtype)
        if adaptive:
            alphas = adaptive_alpha(first, other, alpha, tvd_half)
        return Target(combine(first, other, alphas), alphas)

    return teacher


def shared_vocabulary(logits: Mapping[str, Array]) -> dict[str, Array]:
    """Cut all logits to the smallest vocabulary.

    Models with the same tokenizer differ only in how far they pad the vocabulary.
    """
    size = min(role_logits.shape[-1] for role_logits in logits.values())
    return {name: role_logits[..., :size] for name, role_logits in logits.items()}


class Comparison(NamedTuple):
    """Policy and teacher at the distribution of each token. All [R, S]; nats."""

    divergence: Array
    """Divergence of policy and teacher. Gradients flow to the policy only."""
    alpha: Array
    """Alpha of the teacher."""
    log_probs: Array
    """Log-probs of the tokens under the policy, with gradients. Meaningless for a token that
    follows none."""
    entropy: Array
    """Entropy of the policy, without gradients."""


def compare(
    roles: Roles,
    params: Params,
    rows: PackedRows,
    teacher: Teacher,
    beta: float,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    chunk_tokens: int | None = None,
) -> Comparison:
    """Compute the generalized Jensen-Shannon divergence of the policy from a teacher.

    Args:
      roles: "policy" and the roles that the teacher is made of.
      teacher: function from the roles' logits to the target.
      beta: see `divergences.jensen_shannon`.
      temperature: divides all logits.
      top_k: if given, tokens other than the teacher's k likeliest are taken together.
      chunk_tokens: tokens whose logits a device holds at once.
    """

    def compare_chunk(tokens: Array, *hidden: Array) -> Comparison:
        logits = {
            name: roles[name].logits(params, states) / temperature
            for name, states in zip(roles, hidden, strict=True)
        }
        logits = shared_vocabulary(logits)
        student = logits["policy"]
        target, alpha = jax.lax.stop_gradient(teacher(logits))
        log_probs, entropy = log_probs_of_logits(student, tokens)
        if top_k is not None and top_k < target.shape[-1] - 1:
            likeliest = divergences.top(target, top_k)
            student = divergences.coarsen(student, likeliest)
            target = divergences.coarsen(target, likeliest)
        divergence = divergences.jensen_shannon(student, target, beta)
        return Comparison(divergence, alpha, log_probs, jax.lax.stop_gradient(entropy))

    hidden = {name: role.hidden(params, rows) for name, role in roles.items()}
    sizes = [vocabulary(role, params, hidden[name]) for name, role in roles.items()]
    chunk_tokens = chunk_tokens or tokens_at_once(*sizes)
    return over_actions(compare_chunk, rows, *hidden.values(), chunk_tokens=chunk_tokens)


def compare_with_top(
    policy: Role, params: Params, rows: PackedRows, ids: Array, log_probs: Array, beta: float
) -> Comparison:
    """Compute the divergence of `compare` with `top_k` at temperature 1 from a teacher's top alone.

    Args:
      ids: [R, S, k] the teacher's likeliest tokens in the place of each token.
      log_probs: [R, S, k] float32, theirs.
      beta: see `divergences.jensen_shannon`.
    """
    slots = jnp.broadcast_to(jnp.arange(rows.tokens.shape[1]), rows.tokens.shape)
    rest = jnp.log(jnp.maximum(-jnp.expm1(jax.nn.logsumexp(log_probs, axis=-1)), LEAST_REST))
    target = jnp.concatenate([log_probs, rest[..., None]], -1)

    def compare_chunk(chosen: Array, hidden: Array) -> Comparison:
        logits = policy.logits(params, hidden)
        token, top, known = (
            jnp.take_along_axis(values, chosen[..., None], axis=1)
            for values in (rows.tokens[..., None], ids, target)
        )
        values, entropy = log_probs_of_logits(logits, token[..., 0])
        divergence = divergences.jensen_shannon(divergences.coarsen(logits, top), known, beta)
        return Comparison(divergence, jnp.ones_like(values), values, jax.lax.stop_gradient(entropy))

    hidden = policy.hidden(params, rows)
    chunk = tokens_at_once(vocabulary(policy, params, hidden))
    # Everything that belongs to a token is found by its slot.
    return over_actions(compare_chunk, replace(rows, tokens=slots), hidden, chunk_tokens=chunk)
