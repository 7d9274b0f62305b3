"""A policy restricted to the nucleus of another model (NLPO, arXiv 2210.01241).

    z'(a) = z(a)         if a is among the likeliest tokens of the other model that together have
                         the probability top_p
    z'(a) = z(a) - drop  otherwise

Sampler and trainer restrict the same logits. The sampler's drop leaves no probability. The
trainer's is 20 nats: where rounding moves a sampled token out of the nucleus, its ratio is clipped
and nothing overflows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpu_rl.losses.shapes import BoolsV, FloatsV
from tpu_rl.types import Array, PackedRows, Params, Role

SAMPLED_DROP = 1e9
"""Nats by which the sampler drops a token."""

LEARNED_DROP = 20.0
"""Nats by which the trainer drops a token."""


def is_inside(logits: FloatsV, top_p: float) -> BoolsV:
    """Say whether each token is in the nucleus of softmax(logits [..., V]), [..., V] bool.

    Tokens as likely as the last one that is needed are inside, too.
    """
    probs = jax.nn.softmax(logits.astype(jnp.float32))
    in_order = jnp.flip(jnp.sort(probs, axis=-1), axis=-1)
    before = jnp.cumsum(in_order, axis=-1) - in_order
    least = jnp.min(jnp.where(before < top_p, in_order, jnp.inf), axis=-1, keepdims=True)
    return probs >= least


def restrict(logits: FloatsV, others: FloatsV, top_p: float, drop: float) -> FloatsV:
    """Compute logits [..., V], less `drop` outside of the nucleus of the others [..., V]."""
    return jnp.where(is_inside(jax.lax.stop_gradient(others), top_p), logits, logits - drop)


def restricted_role(policy: Role, mask: Role, top_p: float, temperature: float) -> Role:
    """Restrict the policy to the nucleus of `mask` at the sampling temperature, as a role.

    Its hidden states are those of both, side by side.
    """

    def hidden(params: Params, rows: PackedRows) -> Array:
        states = (policy.hidden(params, rows), mask.hidden(params, rows))
        return jnp.concatenate([states[0], jax.lax.stop_gradient(states[1])], axis=-1)

    def logits(params: Params, hidden: Array) -> Array:
        own, other = jnp.split(hidden, 2, axis=-1)
        others = mask.logits(params, other) / temperature
        # The drop is in nats after the division by the temperature.
        drop = LEARNED_DROP * temperature
        return restrict(policy.logits(params, own), others, top_p, drop)

    return Role(hidden, logits)
