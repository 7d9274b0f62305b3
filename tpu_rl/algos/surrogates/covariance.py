"""Clip-Cov and KL-Cov (arXiv 2505.22617): tokens are chosen by their covariance.

cov_t = (A_t - mean A) (log old policy_t - mean log old policy)

clip_cov   the clipped ratio, without covariance_share of all tokens, drawn from those with
           covariance_low < cov_t < covariance_high
kl_cov     -r A, plus covariance_kl_coef |log-ratio| at the covariance_share of tokens with the
           largest cov_t
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from tpu_rl.algos.surrogates.filters import per_step
from tpu_rl.losses import masked
from tpu_rl.losses.policy_batch import Draft, Part, PolicyBatch, Prediction, term_of
from tpu_rl.losses.shapes import BoolMKRS, FloatMKRS
from tpu_rl.types import Array, Layout, Metrics, Rollout


def clip_cov(**settings: float) -> Part:
    """Make the part that takes the advantages of the tokens of `drawn_by_covariance`."""

    def batch(batch: PolicyBatch, draft: Draft, state: Any) -> PolicyBatch:
        selected = drawn_by_covariance(batch, draft.rollout, draft.layout, **settings)
        return replace(batch, advantages=jnp.where(selected, 0.0, batch.advantages))

    return Part(batch=batch)


def kl_cov(covariance_share: float, covariance_kl_coef: float) -> Part:
    """Make the part that penalizes the log-ratio of the tokens with the largest covariance."""

    def batch(batch: PolicyBatch, draft: Draft, state: Any) -> PolicyBatch:
        weights = batch.weights["policy"]
        selected = largest(covariances(batch), covariance_share, weights > 0)
        penalized = jnp.where(selected, weights, 0.0)
        return batch.with_weights(kl_cov=penalized)

    def term(prediction: Prediction, batch: PolicyBatch) -> tuple[Array, Metrics]:
        distance = jnp.abs(prediction.tokens.log_probs - batch.old_log_probs)
        return term_of("kl_cov", covariance_kl_coef * distance, batch)

    return Part(batch=batch, term=term)


def covariances(batch: PolicyBatch) -> FloatMKRS:
    """Compute (A - mean A) (log old policy - mean log old policy) of each learned token.

    [M, K, R, S]; the means are those of the optimizer step. -inf at other tokens.
    """
    learned = batch.weights["policy"] > 0
    centered = [
        values - per_step(masked.mean, values, learned)
        for values in (batch.advantages, batch.old_log_probs)
    ]
    return jnp.where(learned, centered[0] * centered[1], -jnp.inf)


def largest(values: FloatMKRS, share: float, learned: BoolMKRS) -> BoolMKRS:
    """Mark the largest values of each optimizer step, [M, K, R, S] bool.

    They are `share` of the step's learned tokens, rounded down, and at least one. Only values above
    0 are among them, so none are where all are equal.
    """
    count = jnp.maximum(jnp.floor(share * learned.sum((1, 2, 3))), 1).astype(jnp.int32)
    ascending = jnp.sort(values.reshape(len(values), -1), axis=-1)
    bound = jnp.take_along_axis(ascending, ascending.shape[1] - count[:, None], axis=1)
    return (values > 0) & (values >= bound[:, :, None, None])


def drawn_by_covariance(
    batch: PolicyBatch,
    rollout: Rollout,
    layout: Layout,
    *,
    covariance_share: float,
    covariance_low: float,
    covariance_high: float,
) -> BoolMKRS:
    """Mark the tokens that Clip-Cov drops. They are drawn by the rows' own keys."""

    def draw(key: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(key), 0xC0F)
        return jax.random.uniform(key, rollout.tokens.shape[1:])

    numbers = layout.pack(jax.vmap(draw)(rollout.birth_key))
    covariance = covariances(batch)
    may_drop = (covariance > covariance_low) & (covariance < covariance_high)
    numbers = jnp.where(may_drop, numbers, -jnp.inf)
    return largest(numbers, covariance_share, batch.weights["policy"] > 0)
