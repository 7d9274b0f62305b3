"""The loss of intuitive fine-tuning (IFT, arXiv 2405.11870), as in the authors' program.

    e'_t = 0.8 e(y_t) + 0.2 e(y^_t),         y^_t the policy's likeliest token after y_<t
    l_t  = -log policy(y_t | e'_<t)
    c_t  = sum_{j >= t} 0.95^(j - t) l_j
    loss = mean over completions of  sum_t l_t c_t / sum_t c_t

The input of a learned token is moved to what the policy would have written, and a token counts the
more, the larger the losses after it are. Gradients flow through the weights c. The numbers are
those of the program's `ift.yaml`: propagation of the loss to the left, norm L1.

Deviation: the program keeps a frozen copy of the first embeddings for the inputs; here they are the
policy's own and learn.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpu_rl.losses import masked
from tpu_rl.losses.log_probs import over_actions, token_log_probs, tokens_at_once, vocabulary
from tpu_rl.losses.shapes import BoolRS, FloatRS, IntRS
from tpu_rl.types import MIXED_INPUTS, Array, PackedRows, Params, Role

MIX = 0.2
"""Share of the likeliest tokens in the inputs."""
GAMMA = 0.95
"""Discount per token of the losses after a token."""


def likeliest_tokens(role: Role, params: Params, rows: PackedRows, mask: BoolRS) -> IntRS:
    """Compute the policy's likeliest token at the place of each token in `mask`, and the token
    itself elsewhere, [R, S] int32, without gradients."""

    def likeliest(tokens: Array, states: Array) -> Array:
        return jnp.argmax(role.logits(params, states), axis=-1).astype(jnp.int32)

    hidden = jax.lax.stop_gradient(role.hidden(params, rows))
    chunk_tokens = tokens_at_once(vocabulary(role, params, hidden))
    tokens = over_actions(likeliest, rows, hidden, chunk_tokens=chunk_tokens)
    return jnp.where(mask & (rows.positions > 0), tokens, rows.tokens)


def mixed_log_probs(
    role: Role, params: Params, rows: PackedRows, mask: BoolRS, name: str = "policy"
) -> FloatRS:
    """Compute the log-probs of tokens after mixed inputs, [R, S].

    Args:
      params: the whole params tree, of which `name` is the role's entry.
      mask: [R, S] bool, the learned tokens.
      name: of the role's entry.
    """
    others = likeliest_tokens(role, params, rows, mask)
    entry = {MIXED_INPUTS: {"tokens": others, "share": jnp.float32(MIX)}}
    params = params | {name: params[name] | entry}
    return token_log_probs(role, params, rows).log_probs


def propagated(losses: FloatRS, weights: FloatRS, sequence_ids: IntRS) -> FloatRS:
    """Compute sum_t l_t c_t / sum_t c_t of each token's own sequence, [R, S].

    Args:
      losses: [R, S], l.
      weights: [R, S], of the tokens within their sequence; 0 at those that are not learned.
      sequence_ids: [R, S], as in `types.PackedRows`.
    """
    counted = weights * losses

    def add(carry: tuple[Array, Array], slot: tuple[Array, Array]) -> tuple:
        value, number = slot
        total = value + GAMMA * jnp.where(number == carry[1], carry[0], 0.0)
        return (total, number), total

    start = (jnp.zeros_like(counted[:, 0]), jnp.zeros_like(sequence_ids[:, 0]))
    _, to_go = jax.lax.scan(add, start, (counted.T, sequence_ids.T), reverse=True)
    propagation = jnp.where(weights > 0, weights * to_go.T, 0.0)
    sums = masked.sequence_total(propagation * losses, sequence_ids)
    return sums / _not_zero(masked.sequence_total(propagation, sequence_ids))


def _not_zero(values: Array) -> Array:
    return jnp.where(values > 0, values, 1.0)
