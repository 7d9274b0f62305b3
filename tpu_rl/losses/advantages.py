"""Advantages of completions relative to their group, and of tokens relative to a critic.

Group baselines compare the completions of one prompt. They take returns [N] float32, group_id [N]
and scored [N] bool, and return [N] float32. Rows that are not scored count in no mean and get zero.

Token advantages take rewards, values and mask [N, T] and return [N, T]. Tokens that the policy did
not choose (tool output) are skipped as if they were not there: they use up neither discount nor
trace.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpu_rl.losses import masked
from tpu_rl.types import Array

EPSILON = 1e-6
"""Standard deviations up to this count as zero."""


def _group_moments(returns: Array, group_id: Array, scored: Array) -> tuple[Array, Array, Array]:
    """Return the count of each row's group, the return minus the group's mean, and the group's
    standard deviation, each [N]."""
    size = group_id.shape[0]
    # Group ids may be of any size; segments are below N.
    segment = jnp.searchsorted(jnp.sort(group_id), group_id)

    def group_total(values: Array) -> Array:
        return jax.ops.segment_sum(values, segment, num_segments=size)[segment]

    # Subtract the group's lowest return first, so that equal returns are exactly zero. The float32
    # mean of three 100.1 is not 100.1, and dividing that rounding error by itself would give an
    # advantage near one.
    scored_returns = jnp.where(scored, returns, jnp.inf)
    lowest = jax.ops.segment_min(scored_returns, segment, num_segments=size)[segment]
    above = jnp.where(scored, returns - lowest, 0.0)
    count = group_total(scored.astype(jnp.float32))
    centered = jnp.where(scored, above - group_total(above) / jnp.maximum(count, 1.0), 0.0)
    variance = group_total(jnp.square(centered)) / jnp.maximum(count - 1.0, 1.0)
    return count, centered, jnp.sqrt(variance)


def group_centered(returns: Array, group_id: Array, scored: Array) -> Array:
    """Subtract the group's mean, without scaling (Dr. GRPO, arXiv 2503.20783)."""
    return _group_moments(returns, group_id, scored)[1]


def group_scaled(returns: Array, group_id: Array, scored: Array) -> Array:
    """Compute (return - group mean) / group standard deviation (GRPO, arXiv 2402.03300, section
    4.1.2).

    The deviation is the sample one (n - 1), as in TRL and verl. A group whose returns are all equal
    gets zero.
    """
    _, centered, deviation = _group_moments(returns, group_id, scored)
    return jnp.where(deviation > EPSILON, centered / (deviation + EPSILON), 0.0)


def batch_scaled(returns: Array, group_id: Array, scored: Array) -> Array:
    """Compute (return - group mean) / standard deviation of all returns of the batch.

    arXiv 2508.08221.
    """
    centered = group_centered(returns, group_id, scored)
    squared = jnp.square(returns - masked.mean(returns, scored))
    deviation = jnp.sqrt(masked.total(squared, scored) / jnp.maximum(scored.sum() - 1.0, 1.0))
    return jnp.where(deviation > EPSILON, centered / (deviation + EPSILON), 0.0)


def leave_one_out(returns: Array, group_id: Array, scored: Array) -> Array:
    """Subtract the mean of the *other* completions of the group (RLOO, arXiv 2402.14740)."""
    count, centered, _ = _group_moments(returns, group_id, scored)
    return centered * count / jnp.maximum(count - 1.0, 1.0)


def zero_variance_groups(returns: Array, group_id: Array, scored: Array) -> Array:
    """Return True for rows whose group has equal scored returns, and so teaches nothing, [N]."""
    return _group_moments(returns, group_id, scored)[2] <= EPSILON


def soft_overlong_penalty(lengths: Array, limit: int, buffer: int) -> Array:
    """Return a penalty that falls linearly over the last `buffer` tokens before the limit, [N].

    It is 0 up to limit - buffer tokens and -1 at `limit` (DAPO, arXiv 2503.14476, eq. 13).
    """
    return jnp.clip((limit - buffer - lengths) / buffer, -1.0, 0.0)


# --- tokens ---


def gae(rewards: Array, values: Array, mask: Array, gamma: float, lam: float | Array) -> Array:
    """Compute generalized advantage estimates (arXiv 1506.02438, eq. 16), [N, T].

        delta_t = r_t + gamma V_{t+1} - V_t,    A_t = delta_t + gamma lam A_{t+1}

    A row ends with its last token, also if it ran into its length limit: nothing is bootstrapped.
    TRL, verl and OpenRLHF do the same; the limit is part of the task that the reward judges.

    Args:
      rewards: [N, T].
      values: [N, T]; values[n, t] is V of the state *before* token t.
      mask: [N, T] bool; the sums are over these tokens, and the result is zero at others.
      gamma: discount.
      lam: lambda, a number or [N].
    """
    lam = jnp.broadcast_to(jnp.asarray(lam, values.dtype), values.shape[:1])

    def step(
        carry: tuple[Array, Array], token: tuple[Array, Array, Array]
    ) -> tuple[tuple[Array, Array], Array]:
        next_value, next_advantage = carry
        reward, value, chosen = token
        advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
        carry = (
            jnp.where(chosen, value, next_value),
            jnp.where(chosen, advantage, next_advantage),
        )
        return carry, jnp.where(chosen, advantage, 0.0)

    end = jnp.zeros_like(values[:, 0])
    rewards = jnp.where(mask, rewards, 0.0).astype(values.dtype)
    columns = (rewards.T, values.T, mask.T)
    return jax.lax.scan(step, (end, end), columns, reverse=True)[1].T


def returns_to_go(rewards: Array, mask: Array, gamma: float = 1.0) -> Array:
    """Compute G_t = r_t + gamma G_{t+1}, [N, T]: `gae` without a critic."""
    return gae(rewards, jnp.zeros_like(rewards), mask, gamma, 1.0)


def length_adaptive_lambda(lengths: Array, alpha: float) -> Array:
    """Return 1 - 1 / (alpha l) for lengths l [N] in tokens (VAPO, arXiv 2504.05118, section 4.2).

    The weights lam^t of a trace then add up to alpha l. Below 1 / alpha tokens the formula is
    negative, which the paper does not mention; the result there is 0.
    """
    return jnp.clip(1.0 - 1.0 / (alpha * jnp.maximum(lengths, 1)), 0.0, 1.0)


def optimal_value(returns: Array, scored: Array, beta: float) -> Array:
    """Return beta log mean exp(return / beta) over the last axis, [..., n] -> [...].

    This estimates V*(x) of the KL-regularized problem from n completions of the reference (A*-PO,
    arXiv 2505.20686, eq. 4). NaN if none of them is scored.
    """
    exponents = jnp.where(scored, returns / beta, -jnp.inf)
    return beta * (jax.nn.logsumexp(exponents, axis=-1) - jnp.log(scored.sum(-1)))
