"""What a reward model says of a whole completion: its head's outputs read at some tokens, and put together.

Shared by the algorithms that train reward models and by `reward_models`, which uses them, so that a completion has one
score. All in packed rows: outputs [R, S, K] are a head's, `ends` [R, S] bool marks the tokens they are read at.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from tpu_rl import masked
from tpu_rl.types import Array

Aggregate = Literal["attention", "sum"]
"""How sentences make a completion: a learned weighted mean, or the sum."""

StepAggregate = Literal["min", "product"]
"""How the probabilities of steps make a completion's: the weakest, or all of them right."""


def last_actions(action_mask: Array) -> Array:
    """[N, T] bool -> [N, T]: True on the last action of each row."""
    return action_mask & (jnp.cumsum(action_mask[:, ::-1], axis=-1)[:, ::-1] == 1)


def separated(tokens: Array, action_mask: Array, separators: tuple[int, ...]) -> Array:
    """[N, T] bool: the actions at which a sentence, or step, ends: a separator token, or the completion's last."""
    if not separators:
        return last_actions(action_mask)
    is_separator = jnp.isin(tokens, jnp.asarray(separators, tokens.dtype))
    return (is_separator & action_mask) | last_actions(action_mask)


def starts(ends: Array, action_mask: Array) -> Array:
    """[N, T] int32: of each token the column where its sentence starts: of the end before it, or of the prompt's last
    token. Column 0 where there is no prompt."""
    columns = jnp.arange(ends.shape[1])[None]
    first_action = jnp.argmax(action_mask, axis=1)[:, None]
    latest = jax.lax.cummax(jnp.where(ends, columns, -1), axis=1)
    before = jnp.pad(latest[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    return jnp.maximum(jnp.maximum(before, first_action - 1), 0).astype(jnp.int32)


def pessimistic(outputs: Array, penalty: float) -> Array:
    """An ensemble's prediction: [..., K] -> [...]: mean - penalty x standard deviation over its K members.

    Where the members disagree the data said little, and there a policy is not to be led (arXiv 2310.02743,
    "uncertainty-weighted optimisation", with the deviation in place of the variance).
    """
    return outputs.mean(-1) - penalty * outputs.std(-1)


def of_sentences(outputs: Array, ends: Array, starts: Array, sequence_ids: Array, aggregate: Aggregate) -> Array:
    """Completions' scores [R, S], at each of their tokens, from outputs [R, S, 2]: a level h and an attention logit a.

    Sentence i is worth r_i = h(its end) - h(its start), starts [R, S] being slots, so that all together they are worth
    h(end) - h(prompt). "attention": sum_i softmax_i(a(its end)) r_i; "sum": sum_i r_i. Sentence-level reward model
    (arXiv 2503.04793); how its attention is parametrised is our reading: one more output of the head.
    """
    level, attention = outputs[..., 0], outputs[..., 1]
    worth = level - jnp.take_along_axis(level, starts, axis=1)
    if aggregate == "sum":
        return masked.sequence_total(jnp.where(ends, worth, 0.0), sequence_ids)
    highest = jax.lax.stop_gradient(sequence_max(jnp.where(ends, attention, -jnp.inf), sequence_ids))
    weight = jnp.where(ends, jnp.exp(jnp.where(ends, attention - highest, 0.0)), 0.0)
    normalizer = masked.sequence_total(weight, sequence_ids)
    return masked.sequence_total(weight * worth, sequence_ids) / jnp.where(normalizer > 0, normalizer, 1.0)


def of_steps(logits: Array, ends: Array, sequence_ids: Array, aggregate: StepAggregate) -> Array:
    """Completions' scores [R, S], at each of their tokens: log-probability that the steps are right, logits [R, S].

    "min": of the weakest step; "product": of all, as if steps were independent (both of arXiv 2305.20050).
    """
    log_probability = jnp.where(ends, jax.nn.log_sigmoid(logits), 0.0)
    if aggregate == "product":
        return masked.sequence_total(log_probability, sequence_ids)
    return -sequence_max(-log_probability, sequence_ids)


def sequence_max(values: Array, sequence_ids: Array) -> Array:
    """Each token's own sequence's largest value, in packed rows: [R, S] -> [R, S]; zero at prompt and padding."""

    def one_row(row: Array, ids: Array) -> Array:
        return jnp.where(ids > 0, jax.ops.segment_max(row, ids, num_segments=row.shape[0] + 1)[ids], 0.0)

    return jax.vmap(one_row)(values, sequence_ids)
