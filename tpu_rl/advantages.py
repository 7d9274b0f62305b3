"""How much better a completion, or one token of it, did than expected.

Group baselines: completions of one prompt are compared with each other. All take returns [N] float32, group_id [N]
and scored [N] bool (rows without a reward count in no mean) and give [N] float32, zero for rows not scored.

Tokens against a critic: rewards, values and mask [N, T] -> [N, T]. Tokens that the policy did not choose (tool output)
are passed over as if they were not there: neither discount nor trace is spent on them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpu_rl import masked
from tpu_rl.types import Array

EPSILON = 1e-6


def _group_moments(returns: Array, group_id: Array, scored: Array) -> tuple[Array, Array, Array]:
    """(count, return minus its group's mean, the group's standard deviation), each [N]."""
    size = group_id.shape[0]
    # Group ids may be of any size; segments are below N.
    segment = jnp.searchsorted(jnp.sort(group_id), group_id)

    def of_group(values: Array) -> Array:
        return jax.ops.segment_sum(values, segment, num_segments=size)[segment]

    # Relative to the group's lowest return, so that equal returns are exactly zero: the float32 mean of three 100.1
    # is not 100.1, and that last place divided by itself would be an advantage near one.
    lowest = jax.ops.segment_min(jnp.where(scored, returns, jnp.inf), segment, num_segments=size)[segment]
    above = jnp.where(scored, returns - lowest, 0.0)
    count = of_group(scored.astype(jnp.float32))
    centred = jnp.where(scored, above - of_group(above) / jnp.maximum(count, 1.0), 0.0)
    variance = of_group(jnp.square(centred)) / jnp.maximum(count - 1.0, 1.0)
    return count, centred, jnp.sqrt(variance)


def group_centred(returns: Array, group_id: Array, scored: Array) -> Array:
    """Return minus the group's mean, unscaled (Dr. GRPO, arXiv 2503.20783)."""
    return _group_moments(returns, group_id, scored)[1]


def group_scaled(returns: Array, group_id: Array, scored: Array) -> Array:
    """(return - group mean) / group standard deviation (GRPO, arXiv 2402.03300, section 4.1.2).

    The deviation is the sample one (n - 1), as in TRL and verl. A group whose returns are all equal gets zero.
    """
    _, centred, deviation = _group_moments(returns, group_id, scored)
    return jnp.where(deviation > EPSILON, centred / (deviation + EPSILON), 0.0)


def batch_scaled(returns: Array, group_id: Array, scored: Array) -> Array:
    """(return - group mean) / standard deviation of all returns of the batch (arXiv 2508.08221)."""
    centred = group_centred(returns, group_id, scored)
    squared = jnp.square(returns - masked.mean(returns, scored))
    deviation = jnp.sqrt(masked.total(squared, scored) / jnp.maximum(scored.sum() - 1.0, 1.0))
    return jnp.where(deviation > EPSILON, centred / (deviation + EPSILON), 0.0)


def leave_one_out(returns: Array, group_id: Array, scored: Array) -> Array:
    """Return minus the mean of the *other* completions of the group (RLOO, arXiv 2402.14740)."""
    count, centred, _ = _group_moments(returns, group_id, scored)
    return centred * count / jnp.maximum(count - 1.0, 1.0)


def zero_variance_groups(returns: Array, group_id: Array, scored: Array) -> Array:
    """[N] bool: rows whose group's scored returns are all equal, so that the group teaches nothing."""
    return _group_moments(returns, group_id, scored)[2] <= EPSILON


def soft_overlong_penalty(lengths: Array, limit: int, buffer: int) -> Array:
    """0 up to limit - buffer tokens, then falling linearly to -1 at `limit` (DAPO, arXiv 2503.14476, eq. 13). [N]."""
    return jnp.clip((limit - buffer - lengths) / buffer, -1.0, 0.0)


# --- tokens ------------------------------------------------------------------------------------------------------


def gae(rewards: Array, values: Array, mask: Array, gamma: float, lam: float | Array) -> Array:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16); zero outside the mask.

        delta_t = r_t + gamma V_{t+1} - V_t,    A_t = delta_t + gamma lam A_{t+1}

    over the tokens in `mask` alone; `lam` is a number or [N]. values[n, t] is V of the state *before* token t. A row
    ends with its last token, also where it ran into its limit: what it earned is all that it will earn, and nothing is
    bootstrapped (as in TRL, verl and OpenRLHF; the limit is part of the task that the reward judges).
    """
    lam = jnp.broadcast_to(jnp.asarray(lam, values.dtype), values.shape[:1])

    def back(carry: tuple[Array, Array], token: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], Array]:
        next_value, next_advantage = carry
        reward, value, chosen = token
        advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
        kept = jnp.where(chosen, value, next_value), jnp.where(chosen, advantage, next_advantage)
        return kept, jnp.where(chosen, advantage, 0.0)

    end = jnp.zeros_like(values[:, 0])
    rewards = jnp.where(mask, rewards, 0.0).astype(values.dtype)
    return jax.lax.scan(back, (end, end), (rewards.T, values.T, mask.T), reverse=True)[1].T


def returns_to_go(rewards: Array, mask: Array, gamma: float = 1.0) -> Array:
    """G_t = r_t + gamma G_{t+1}: what a token and those after it earned; `gae` without a critic."""
    return gae(rewards, jnp.zeros_like(rewards), mask, gamma, 1.0)


def length_adaptive_lambda(lengths: Array, alpha: float) -> Array:
    """1 - 1 / (alpha l), so that the weights lam^t of a trace add up to alpha l (VAPO, arXiv 2504.05118, section 4.2).

    lengths [N] in tokens. Below 1 / alpha tokens the formula is negative and the paper silent: 0 is used.
    """
    return jnp.clip(1.0 - 1.0 / (alpha * jnp.maximum(lengths, 1)), 0.0, 1.0)


def optimal_value(returns: Array, scored: Array, beta: float) -> Array:
    """beta log mean exp(return / beta) over the last axis, [..., n] -> [...]; NaN where nothing is scored.

    V*(x) of the KL-regularised problem, estimated from n completions of the reference (A*-PO, arXiv 2505.20686, eq. 4).
    """
    exponents = jnp.where(scored, returns / beta, -jnp.inf)
    return beta * (jax.nn.logsumexp(exponents, axis=-1) - jnp.log(scored.sum(-1)))
