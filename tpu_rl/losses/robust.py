"""Distributional robustness: the weights of examples that make a loss largest, near the given ones.

Pairs (DPO, reward models) and prompts (policy gradients) are such examples. The ball around the
weights is of total variation, KL or chi-square; weights are constants of the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp

from tpu_rl import ranges
from tpu_rl.errors import InputError
from tpu_rl.losses import advantages, masked
from tpu_rl.losses.advantages import per_episode
from tpu_rl.losses.policy_batch import Draft, Part, PolicyBatch, learned_tokens
from tpu_rl.losses.shapes import BoolN, FloatN, Floats, IntN
from tpu_rl.ranges import Needs, NotNegative
from tpu_rl.types import Array

Ball = Literal["tv", "kl", "chi_square"]
"""The divergence that a worst case is bounded by."""


@dataclass(frozen=True, kw_only=True)
class RobustSettings(ranges.Checked):
    """Settings of a method that learns from the worst case over its prompts or pairs."""

    robust_radius: NotNegative = 0.0
    """Share of the weight that the worst case may move between the prompts (of pairs: between the
    pairs) of a step, towards those with the lowest mean returns, or the largest losses
    (distributionally robust RLHF, arXiv 2503.00539)."""
    robust_ball: Annotated[Ball, Needs("robust_radius", why="it is the coefficient")] = "tv"
    """Divergence that bounds the worst case. With kl and chi_square, robust_radius is its
    coefficient, in units of the return or loss: weights are p exp(loss / radius), or
    p max(0, 1 + (loss - mu) / radius)."""

    def __post_init__(self):
        super().__post_init__()
        if self.robust_ball == "tv" and self.robust_radius > 1:
            raise InputError(
                f"robust_radius {self.robust_radius} is not in [0, 1]",
                where="--algorithm.robust-radius",
                why="it is a share of the weight",
                fix="use at most 1, or another --algorithm.robust-ball",
            )

    def robust_parts(self) -> tuple[Part, ...]:
        """List the part of methods that learn from prompts, if it is on."""
        return (robust_prompts(self),) if self.robust_radius else ()


def robust_prompts(config: RobustSettings) -> Part:
    """Make the part that weighs prompts as in the worst case, see `worst_prompts`."""

    def batch(batch: PolicyBatch, draft: Draft, state: Any) -> PolicyBatch:
        rollout, layout = draft.rollout, draft.layout
        mask = learned_tokens(rollout)
        factors = worst_prompts(
            masked.total(rollout.rewards, mask, axis=-1),
            rollout.group_id,
            mask.any(-1),
            rollout.episode_id,
            layout.minibatch,
            layout.minibatches,
            config.robust_radius,
            config.robust_ball,
        )
        factors = layout.pack(jnp.where(mask, factors[:, None], 0.0))
        worst = batch.weights["policy"] * factors
        return batch.with_weights(policy=worst)

    return Part(batch=batch)


def worst_case_weights(losses: Floats, weights: Floats, radius: float) -> Floats:
    """Compute the weights within total variation `radius` of `weights` that make the weighted loss
    largest (distributionally robust reward learning and DPO, arXiv 2503.00539).

        max over q of sum q_i l_i
        with q >= 0, sum q = sum p and 1/2 sum |q_i - p_i| <= radius sum p_i

    The exact solution moves weight from the smallest losses to the largest one until `radius` is
    spent. Elements of weight zero stay out. Gradients treat the result as a constant (Danskin's
    theorem). Radius 0 returns `weights`. `losses` and `weights` have one shape.
    """
    flat_losses = losses.reshape(-1)
    mass = weights.reshape(-1)
    counts = mass > 0
    largest = jnp.argmax(jnp.where(counts, flat_losses, -jnp.inf))
    givers = counts.at[largest].set(False)
    order = jnp.argsort(jnp.where(givers, flat_losses, jnp.inf))
    available = jnp.where(givers, mass, 0.0)[order]
    spent_before = jnp.cumsum(available) - available
    taken = jnp.clip(radius * mass.sum() - spent_before, 0.0, available)
    moved = mass.at[order].add(-taken).at[largest].add(taken.sum())
    return jax.lax.stop_gradient(moved.reshape(weights.shape))


def tilted_weights(losses: Floats, weights: Floats, temperature: float) -> Floats:
    """Compute weights proportional to p exp(l / temperature), with the sum of p = `weights`.

    They maximize sum q_i l_i - temperature KL(q || p): the worst case in a ball of the KL (arXiv
    2503.00539, section 4, in its Lagrangian form). A small temperature is a large ball. Gradients
    treat the result as a constant.
    """
    exponents = jnp.where(weights > 0, losses / temperature, -jnp.inf)
    highest = jnp.max(exponents)
    tilted = weights * jnp.exp(exponents - jnp.where(jnp.isfinite(highest), highest, 0.0))
    total = tilted.sum()
    result = jnp.where(total > 0, tilted * weights.sum() / jnp.where(total > 0, total, 1.0), 0.0)
    return jax.lax.stop_gradient(result)


def chi_square_weights(losses: Floats, weights: Floats, scale: float) -> Floats:
    """Compute p max(0, 1 + (l - mu) / scale), with the sum of p = `weights`.

    They maximize sum q_i l_i - scale / 2 sum (q_i - p_i)^2 / p_i: the worst case in a ball of the
    chi-square divergence, in its Lagrangian form. mu makes the sums equal, and is found by
    bisection. Gradients treat the result as a constant.
    """
    counts = weights > 0
    largest = jnp.max(jnp.where(counts, losses, -jnp.inf))
    largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
    smallest = jnp.min(jnp.where(counts, losses, jnp.inf))
    smallest = jnp.where(jnp.isfinite(smallest), smallest, 0.0)

    def weigh(mu: Array) -> Array:
        return jnp.where(counts, weights * jnp.maximum(0.0, 1.0 + (losses - mu) / scale), 0.0)

    def halve(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = 0.5 * (low + high)
        too_much = weigh(middle).sum() > weights.sum()
        return jnp.where(too_much, middle, low), jnp.where(too_much, high, middle)

    # At mu = smallest every factor is at least 1, and at mu = largest at most 1.
    low, high = jax.lax.fori_loop(0, 60, halve, (smallest, largest))
    return jax.lax.stop_gradient(weigh(0.5 * (low + high)))


def worst_case_by_step(losses: Floats, weights: Floats, radius: float, ball: Ball = "tv") -> Floats:
    """Compute the worst weights of each optimizer step by itself, for arrays [M, ...].

    `radius` is that of total variation; for kl and chi_square the coefficient of the divergence.
    """
    function = {"tv": worst_case_weights, "kl": tilted_weights, "chi_square": chi_square_weights}[
        ball
    ]
    return jax.vmap(lambda loss, weight: function(loss, weight, radius))(losses, weights)


def worst_prompts(
    returns: FloatN,
    group_id: IntN,
    scored: BoolN,
    episode_id: IntN | None,
    minibatch: IntN,
    minibatches: int,
    radius: float,
    ball: Ball,
) -> FloatN:
    """Compute by how much the worst case weighs each row's prompt, [N], 1 on average over prompts.

    The loss of a prompt is minus the mean return of its completions, and its weight before is the
    same for all prompts of an optimizer step. Arrays are [N]; see `types.Layout.minibatch`.
    """
    loss = -per_episode(advantages.group_mean, returns, group_id, scored, episode_id)
    group = advantages.dense_ids(group_id)
    row = jnp.arange(len(group))
    # The first scored row of a prompt stands for it.
    candidates = jnp.where(scored, row, len(row))
    first = jax.ops.segment_min(candidates, group, num_segments=len(row))[group]
    step = jnp.arange(minibatches)[:, None]
    counts = ((row == first)[None] & (minibatch[None] == step)).astype(jnp.float32)
    before = counts / jnp.maximum(counts.sum(1, keepdims=True), 1.0)
    after = worst_case_by_step(jnp.broadcast_to(loss, before.shape), before, radius, ball)
    factor = after.sum(0) / jnp.where(before.sum(0) > 0, before.sum(0), 1.0)
    return jnp.where(first < len(row), factor[jnp.minimum(first, len(row) - 1)], 0.0)
