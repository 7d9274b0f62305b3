"""Scales of advantages and filters of tokens, which act on any surrogate.

p is the share of the group's completions with a return above 0. All means are over the learned
tokens of an optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from tpu_rl.losses import advantages, masked
from tpu_rl.losses.policy_batch import Draft, Part, PolicyBatch, Prediction, learned_tokens
from tpu_rl.losses.shapes import BoolMKRS, FloatMKRS
from tpu_rl.types import Array, Metrics


def per_step(function: Callable[..., Array], values: FloatMKRS, mask: BoolMKRS) -> Array:
    """Apply a reduction to each optimizer step of [M, K, R, S] -> [M, 1, 1, 1]."""
    return function(values, mask, axis=(1, 2, 3))[:, None, None, None]


def scaled_by_success(slope: float) -> Part:
    """Make the part that multiplies advantages below 0 by 1 + slope x share p of successes."""

    def batch(batch: PolicyBatch, draft: Draft, state: Any) -> PolicyBatch:
        rollout = draft.rollout
        returns = masked.total(rollout.rewards, rollout.action_mask, axis=-1)
        scored = learned_tokens(rollout).any(-1)
        share = advantages.per_episode(
            advantages.group_success, returns, rollout.group_id, scored, rollout.episode_id
        )
        p = draft.layout.pack(jnp.where(rollout.action_mask, share[:, None], 0.0))
        values = batch.advantages
        values *= jnp.where(values < 0, 1.0 + slope * p, 1.0)
        return replace(batch, advantages=values)

    return Part(batch=batch)


def without_outliers(sigmas: float) -> Part:
    """Make the part that drops advantages further than so many deviations from the mean.

    StableReinforce, arXiv 2505.02835.
    """

    def batch(batch: PolicyBatch, draft: Draft, state: Any) -> PolicyBatch:
        values = batch.advantages
        learned = batch.weights["policy"] > 0
        distance = jnp.abs(values - per_step(masked.mean, values, learned))
        deviation = jnp.sqrt(per_step(masked.mean, jnp.square(distance), learned))
        values = jnp.where(distance > sigmas * deviation, 0.0, values)
        return replace(batch, advantages=values)

    return Part(batch=batch)


def without_mastered(entropy: float) -> Part:
    """Make the part that does not reinforce tokens that the old policy has mastered.

    A token is mastered from the probability 0.99 on, while the mean of -log old policy is below the
    entropy (UloRL, arXiv 2507.19766).
    """

    def batch(batch: PolicyBatch, draft: Draft, state: Any) -> PolicyBatch:
        values = batch.advantages
        learned = batch.weights["policy"] > 0
        mean = -per_step(masked.mean, batch.old_log_probs, learned)
        is_mastered = batch.old_log_probs >= math.log(0.99)
        drop = (mean < entropy) & is_mastered & (values > 0)
        return replace(batch, advantages=jnp.where(drop, 0.0, values))

    return Part(batch=batch)


def share_without_advantage() -> Part:
    """Make the part of the metric policy/without_advantage."""

    def term(prediction: Prediction, batch: PolicyBatch) -> tuple[Array, Metrics]:
        is_without = (batch.advantages == 0).astype(jnp.float32)
        mean = masked.average(is_without, batch.action_mask)
        return jnp.zeros(()), {"policy/without_advantage": mean}

    return Part(term=term)
