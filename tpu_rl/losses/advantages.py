"""Advantages of completions relative to their group, and of tokens relative to a critic.

Group baselines compare the completions of one prompt. They take returns [N] float32, group_id [N]
and lengths [N], and return [N] float32. Lengths are numbers of actions, 0 at rows that are not
scored; where only that matters, [N] bool will do. Rows that are not scored count in no mean and get
zero.

Token advantages take rewards, values and mask [N, T] and return [N, T]. Tokens that the policy did
not choose (tool output) are skipped as if they were not there: they use up neither discount nor
trace.

A turn is a maximal run of actions: what the policy says between two observations. Turn advantages
discount per turn. They are computed at the first action of each turn, whose state is the one that
the turn answers, and every token of the turn gets them. With `ends` [N, T], True at actions that
end a step, each step within a turn is a turn of its own.

`episode_id` [N] numbers episodes that have several rows (see `Rollout.episode_id`). Their rows are
neighbors in the order of time. None: each row is an episode.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from tpu_rl.losses import masked
from tpu_rl.losses.shapes import (
    BoolN,
    BoolNT,
    BoolsV,
    FloatN,
    FloatNT,
    Floats,
    FloatsV,
    IntN,
    IntNT,
    NumberN,
    NumberNT,
)
from tpu_rl.types import Array

EPSILON = 1e-6
"""Standard deviations up to this count as zero."""

Advantage = Callable[[Array, Array, Array], Array]
"""(returns [N], group_id [N], lengths [N]) -> advantages [N]: a group baseline."""


def dense_ids(ids: IntN) -> IntN:
    """Make numbers below N that are equal where `ids` [N] are."""
    return jnp.searchsorted(jnp.sort(ids), ids)


def _group_total(values: Array, group_id: Array) -> Array:
    """Compute the sum over each row's group, [N]."""
    # Group ids may be of any size; segments are below N.
    segment = dense_ids(group_id)
    return jax.ops.segment_sum(values, segment, num_segments=len(segment))[segment]


def _group_max(values: Array, group_id: Array) -> Array:
    """Compute the largest value of each row's group, [N]."""
    segment = dense_ids(group_id)
    return jax.ops.segment_max(values, segment, num_segments=len(segment))[segment]


def _group_moments(returns: Array, group_id: Array, lengths: Array) -> tuple[Array, Array, Array]:
    """Compute the count of each row's group, the return minus the group's mean, and the group's
    standard deviation, each [N]."""
    scored = lengths > 0
    # Subtract the group's lowest return first, so that equal returns are exactly zero. The float32
    # mean of three 100.1 is not 100.1, and dividing that rounding error by itself would give an
    # advantage near one.
    lowest = -_group_max(jnp.where(scored, -returns, -jnp.inf), group_id)
    above = jnp.where(scored, returns - lowest, 0.0)
    count = _group_total(scored.astype(jnp.float32), group_id)
    mean = _group_total(above, group_id) / jnp.maximum(count, 1.0)
    centered = jnp.where(scored, above - mean, 0.0)
    variance = _group_total(jnp.square(centered), group_id) / jnp.maximum(count - 1.0, 1.0)
    return count, centered, jnp.sqrt(variance)


def group_centered(returns: FloatN, group_id: IntN, lengths: NumberN) -> FloatN:
    """Subtract the group's mean, without scaling (Dr. GRPO, arXiv 2503.20783)."""
    return _group_moments(returns, group_id, lengths)[1]


def group_scaled(returns: FloatN, group_id: IntN, lengths: NumberN) -> FloatN:
    """Compute (return - group mean) / group standard deviation (GRPO, arXiv 2402.03300, section
    4.1.2).

    The deviation is the sample one (n - 1), as in TRL and verl. A group whose returns are all equal
    gets zero.
    """
    _, centered, deviation = _group_moments(returns, group_id, lengths)
    return _scaled(centered, deviation)


def batch_scaled(returns: FloatN, group_id: IntN, lengths: NumberN) -> FloatN:
    """Compute (return - group mean) / standard deviation of all returns of the batch.

    arXiv 2508.08221.
    """
    scored = lengths > 0
    squared = jnp.square(returns - masked.mean(returns, scored))
    deviation = jnp.sqrt(masked.total(squared, scored) / jnp.maximum(scored.sum() - 1.0, 1.0))
    return _scaled(group_centered(returns, group_id, lengths), deviation)


def _scaled(values: Array, scale: Array) -> Array:
    """Divide by a scale, such as a standard deviation; zero where that is zero."""
    return jnp.where(scale > EPSILON, values / (scale + EPSILON), 0.0)


def leave_one_out(returns: FloatN, group_id: IntN, lengths: NumberN) -> FloatN:
    """Subtract the mean of the *other* completions of the group (RLOO, arXiv 2402.14740)."""
    count, centered, _ = _group_moments(returns, group_id, lengths)
    return centered * count / jnp.maximum(count - 1.0, 1.0)


def length_weighted(returns: FloatN, group_id: IntN, lengths: NumberN) -> FloatN:
    """Subtract the group's mean under weights that are the lengths (OPO, arXiv 2505.23585, eq. 8).

    It is the baseline of least variance if the squared norm of a completion's score grows with its
    length.
    """
    centered = group_centered(returns, group_id, lengths)
    weights = lengths.astype(returns.dtype)
    weighted = _group_total(weights * centered, group_id)
    total = _group_total(weights, group_id)
    return jnp.where(lengths > 0, centered - weighted / jnp.where(total > 0, total, 1.0), 0.0)


def best_minus_second(returns: FloatN, group_id: IntN, lengths: NumberN) -> FloatN:
    """Give the best completion of a group its lead over the second best, and zero to all others.

    This is max_j R_j - max_{j != i} R_j, an unbiased gradient of the best of n: of pass@n if
    returns are 0 or 1 (arXiv 2503.19595, and verl's grpo_passk).
    """
    scored_returns = jnp.where(lengths > 0, returns, -jnp.inf)
    best = _group_max(scored_returns, group_id)
    is_best = (scored_returns == best) & (lengths > 0)
    is_alone = _group_total(is_best.astype(jnp.float32), group_id) == 1
    second = _group_max(jnp.where(is_best, -jnp.inf, scored_returns), group_id)
    return jnp.where(is_best & is_alone & jnp.isfinite(second), best - second, 0.0)


def best_minus_second_scaled(returns: FloatN, group_id: IntN, lengths: NumberN) -> FloatN:
    """Divide `best_minus_second` by the group's standard deviation (verl's default)."""
    _, _, deviation = _group_moments(returns, group_id, lengths)
    return _scaled(best_minus_second(returns, group_id, lengths), deviation)


def mean_scaled(returns: FloatN, group_id: IntN, lengths: NumberN) -> FloatN:
    """Compute (return - group mean) / group mean, for returns of at least 0 (MaxRL, arXiv
    2602.02710).

    With returns of 0 or 1 and n completions, this is an unbiased gradient of the sum of
    -(1 - p)^k / k over k below n, the start of the series of log p. Groups whose mean is not above
    0 get zero. (The paper's sum goes to n: there, failures count in a group without success too.)
    """
    count, centered, _ = _group_moments(returns, group_id, lengths)
    total = _group_total(jnp.where(lengths > 0, returns, 0.0), group_id)
    return _scaled(centered, total / jnp.maximum(count, 1.0))


def unequal_groups(returns: FloatN, group_id: IntN, lengths: NumberN) -> FloatN:
    """Subtract the group's mean, and multiply by N / (completions in groups of unequal returns).

    GPG, arXiv 2504.02546, eq. 5, with f_norm 1. verl counts the completions whose return is not 0
    instead, which is the same where the groups of equal returns are those with zeros alone.
    """
    _, centered, deviation = _group_moments(returns, group_id, lengths)
    scored = lengths > 0
    unequal = jnp.sum(scored & (deviation > EPSILON))
    return centered * scored.sum() / jnp.maximum(unequal, 1)


def group_count(returns: FloatN, group_id: IntN, lengths: NumberN) -> FloatN:
    """Compute the number of scored completions in each row's group, [N]."""
    return _group_moments(returns, group_id, lengths)[0]


def group_success(returns: FloatN, group_id: IntN, lengths: NumberN) -> FloatN:
    """Compute the share of the scored completions of each row's group whose return is above 0, [N].

    Zero for rows that are not scored.
    """
    return group_mean(jnp.where(returns > 0, 1.0, 0.0), group_id, lengths)


def group_mean(returns: FloatN, group_id: IntN, lengths: NumberN) -> FloatN:
    """Compute the mean over the scored completions of each row's group, [N].

    Zero for rows that are not scored.
    """
    centered = group_centered(returns, group_id, lengths)
    return jnp.where(lengths > 0, returns - centered, 0.0)


def soft_overlong_penalty(lengths: IntN, limit: int, buffer: int) -> FloatN:
    """Compute a penalty that falls linearly over the last `buffer` tokens before the limit, [N].

    It is 0 up to limit - buffer tokens and -1 at `limit` (DAPO, arXiv 2503.14476, eq. 13).
    """
    return jnp.clip((limit - buffer - lengths) / buffer, -1.0, 0.0)


# --- tokens ---


def gae(
    rewards: FloatNT,
    values: FloatNT,
    mask: BoolNT,
    gamma: float,
    lam: float | FloatN,
    episode_id: IntN | None = None,
) -> FloatNT:
    """Compute generalized advantage estimates (arXiv 1506.02438, eq. 16), [N, T].

        delta_t = r_t + gamma V_{t+1} - V_t,    A_t = delta_t + gamma lam A_{t+1}

    An episode ends with its last token, also if it ran into its length limit: nothing is
    bootstrapped. TRL, verl and OpenRLHF do the same; the limit is part of the task that the reward
    judges. After a row of an episode comes the first action of its next row.

    Args:
      values: values[n, t] is V of the state *before* token t.
      mask: the sums are over these tokens, and the result is zero at others.
      gamma: discount.
      lam: lambda, a number or [N].
    """
    lam = jnp.broadcast_to(jnp.asarray(lam, values.dtype), values.shape[:1])
    last_values = jnp.zeros_like(values[:, 0])
    if episode_id is not None:
        is_empty = ~mask.any(-1)
        last_values = _of_next_row(_at_first(values, mask), is_empty * 1.0, episode_id)

    def step(
        carry: tuple[Array, Array], token: tuple[Array, Array, Array]
    ) -> tuple[tuple[Array, Array], Array]:
        next_value, next_advantage = carry
        reward, value, chosen = token
        advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
        carry = (jnp.where(chosen, value, next_value), jnp.where(chosen, advantage, next_advantage))
        return carry, jnp.where(chosen, advantage, 0.0)

    start = (last_values, jnp.zeros_like(last_values))
    rewards = jnp.where(mask, rewards, 0.0).astype(values.dtype)
    columns = (rewards.T, values.T, mask.T)
    advantage = jax.lax.scan(step, start, columns, reverse=True)[1].T
    if episode_id is None:
        return advantage
    # The recursion is linear: what follows a row reaches its token t with the weight
    # (gamma lam)^(number of actions from t on).
    num_actions = jnp.cumsum(mask[:, ::-1], axis=1)[:, ::-1]
    decay = (gamma * lam)[:, None] ** num_actions
    following = _of_next_row(_at_first(advantage, mask), decay[:, 0], episode_id)
    return jnp.where(mask, advantage + decay * following[:, None], 0.0)


def returns_to_go(
    rewards: FloatNT, mask: BoolNT, gamma: float = 1.0, episode_id: IntN | None = None
) -> FloatNT:
    """Compute G_t = r_t + gamma G_{t+1}, [N, T]: `gae` without a critic."""
    return gae(rewards, jnp.zeros_like(rewards), mask, gamma, 1.0, episode_id)


def length_adaptive_lambda(lengths: IntN, alpha: float) -> FloatN:
    """Compute 1 - 1 / (alpha l) for lengths l [N] in tokens (VAPO, arXiv 2504.05118, section 4.2).

    The weights lam^t of a trace then add up to alpha l. Below 1 / alpha tokens the formula is
    negative, which the paper does not mention; the result there is 0.
    """
    return jnp.clip(1.0 - 1.0 / (alpha * jnp.maximum(lengths, 1)), 0.0, 1.0)


def optimal_value(returns: FloatsV, scored: BoolsV, beta: float) -> Floats:
    """Compute beta log mean exp(return / beta) over the last axis, [..., n] -> [...].

    This estimates V*(x) of the KL-regularized problem from n completions of the reference (A*-PO,
    arXiv 2505.20686, eq. 4). NaN if none of them is scored.
    """
    exponents = jnp.where(scored, returns / beta, -jnp.inf)
    return beta * (jax.nn.logsumexp(exponents, axis=-1) - jnp.log(scored.sum(-1)))


# --- turns ---


def step_ends(tokens: IntNT, action_mask: BoolNT, separators: tuple[int, ...]) -> BoolNT | None:
    """Mark actions that are one of these tokens, [N, T]; None without separators."""
    if not separators:
        return None
    return action_mask & jnp.isin(tokens, jnp.asarray(separators, tokens.dtype))


def thoughts(tokens: IntNT, action_mask: BoolNT, end: tuple[int, ...]) -> BoolNT:
    """Mark the actions of thoughts, [N, T]: those up to the first `end` of a row.

    `end` are the ids of the tokens that end a thought, in their order; they are of the thought,
    too. They count behind the prompt, also where they were forced and are no actions. A completion
    without them is all thought.
    """
    columns = jnp.arange(tokens.shape[1])[None]
    padded = jnp.pad(tokens, ((0, 0), (0, len(end) - 1)), constant_values=-1)
    is_end = columns >= action_mask.argmax(-1)[:, None]
    for place, token_id in enumerate(end):
        is_end &= padded[:, place : place + tokens.shape[1]] == token_id
    # From the first token of `end` on, the thought has its last token `len(end) - 1` later.
    begun = jnp.cumsum(is_end, axis=1) > 0
    is_over = jnp.pad(begun, ((0, 0), (len(end), 0)))[:, : tokens.shape[1]]
    return action_mask & ~is_over


def turn_starts(action_mask: BoolNT, ends: BoolNT | None = None) -> BoolNT:
    """Mark the first action of each turn, [N, T]."""
    continues = action_mask if ends is None else action_mask & ~ends
    return action_mask & ~jnp.pad(continues, ((0, 0), (1, 0)))[:, :-1]


def turn_ids(
    action_mask: BoolNT, episode_id: IntN | None = None, ends: BoolNT | None = None
) -> IntNT:
    """Compute the number of each action's turn within its episode, from 1; 0 elsewhere, [N, T]."""
    return jnp.where(action_mask, _so_far(turn_starts(action_mask, ends), episode_id), 0)


def _so_far(values: Array, episode_id: Array | None) -> Array:
    """Compute the sum of `values` up to each token of its episode, [N, T]."""
    sums = jnp.cumsum(values, axis=1)
    if episode_id is None:
        return sums
    before_row = jnp.cumsum(sums[:, -1]) - sums[:, -1]
    segment = _episode_segments(episode_id)
    before_episode = jax.ops.segment_min(before_row, segment, num_segments=len(segment))
    return sums + (before_row - before_episode[segment])[:, None]


def turn_sums(values: FloatNT, action_mask: BoolNT, ends: BoolNT | None = None) -> FloatNT:
    """Compute, at the first action of each turn, the sum over the turn; 0 elsewhere, [N, T]."""

    def step(following: Array, token: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        value, chosen, starts = token
        rest_of_turn = jnp.where(chosen, value + following, 0.0)
        return jnp.where(starts, 0.0, rest_of_turn), rest_of_turn

    starts = turn_starts(action_mask, ends)
    columns = (values.T, action_mask.T, starts.T)
    sums = jax.lax.scan(step, jnp.zeros_like(values[:, 0]), columns, reverse=True)[1].T
    return jnp.where(starts, sums, 0.0)


def over_turns(values: NumberNT, action_mask: BoolNT, ends: BoolNT | None = None) -> NumberNT:
    """Give every token of a turn the value at the turn's first action; 0 elsewhere, [N, T]."""
    columns = jnp.arange(action_mask.shape[1])[None]
    start = jax.lax.cummax(jnp.where(turn_starts(action_mask, ends), columns, 0), axis=1)
    return jnp.where(action_mask, jnp.take_along_axis(values, start, axis=1), 0.0)


def turn_gae(
    rewards: FloatNT,
    values: FloatNT,
    mask: BoolNT,
    gamma: float,
    lam: float | FloatN,
    episode_id: IntN | None = None,
    ends: BoolNT | None = None,
) -> FloatNT:
    """Compute `gae` with turns in place of tokens, [N, T].

        delta_k = R_k + gamma V_{k+1} - V_k,    A_k = delta_k + gamma lam A_{k+1}

    R_k is the sum of the rewards in turn k, and V_k the value of the state before its first action.
    Every token of the turn gets A_k.
    """
    starts = turn_starts(mask, ends)
    advantage = gae(turn_sums(rewards, mask, ends), values, starts, gamma, lam, episode_id)
    return over_turns(advantage, mask, ends)


def turn_returns(
    rewards: FloatNT,
    mask: BoolNT,
    gamma: float = 1.0,
    episode_id: IntN | None = None,
    ends: BoolNT | None = None,
) -> FloatNT:
    """Compute G_k = R_k + gamma G_{k+1} of turns k, at every token of the turn, [N, T]."""
    return turn_gae(rewards, jnp.zeros_like(rewards), mask, gamma, 1.0, episode_id, ends)


def of_rewards(
    advantage: Advantage,
    rewards: FloatNT,
    mask: BoolNT,
    group_id: IntN,
    scored: BoolN,
    gamma: float = 1.0,
    episode_id: IntN | None = None,
    ends: BoolNT | None = None,
) -> FloatNT:
    """Compare the rewards of all turns of a group, and add up those from each turn on, [N, T].

        A_ik = r_ik + gamma A_i(k+1),  r_ik = (R_ik - mean R) / std R over the turns of the group

    Process supervision of GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.3), with any group
    baseline in place of the scaling. The arguments are those of `per_turn`.
    """
    starts = turn_starts(mask, ends) & scored[:, None]
    sums = turn_sums(rewards, mask, ends)
    groups = jnp.broadcast_to(group_id[:, None], mask.shape)
    compared = advantage(sums.reshape(-1), groups.reshape(-1), starts.reshape(-1))
    counted = mask & scored[:, None]
    of_turns = jnp.where(starts, compared.reshape(mask.shape), 0.0)
    return jnp.where(counted, turn_returns(of_turns, mask, gamma, episode_id, ends), 0.0)


def per_turn(
    advantage: Advantage,
    returns: FloatNT,
    mask: BoolNT,
    group_id: IntN,
    scored: BoolN,
    episode_id: IntN | None = None,
    ends: BoolNT | None = None,
) -> FloatNT:
    """Compare the returns of turn k with those of the group's other turns k, [N, T].

    Episodes without a turn k are no part of the comparison. A turn that only one episode of its
    group reached has advantage 0.

    Args:
      advantage: a group baseline, such as `group_scaled`.
      returns: [N, T]; the one at a turn's first action counts.
      mask: [N, T] bool, the actions.
    """
    turns = turn_ids(mask, episode_id, ends)
    compared = dense_ids(group_id)[:, None] * (turns.max() + 1) + turns
    return _compare_turns(advantage, returns, mask, compared, scored, ends)


def per_token(
    advantage: Advantage,
    returns: FloatNT,
    mask: BoolNT,
    group_id: IntN,
    scored: BoolN,
    score_norms: FloatNT,
    episode_id: IntN | None = None,
) -> FloatNT:
    """Compare the returns from the k-th action on with those of the group's other k-th actions,
    [N, T].

    The length of an action, which `length_weighted` takes as its weight, is the sum of
    `score_norms` up to it. With the squared norms of the tokens' scores, this is the optimal token
    baseline B_k = sum_i G_ik W_ik / sum_i W_ik (see `policy_batch.credited_advantages`). An action
    that only one episode of its group reached has advantage 0.

    The arguments are those of `per_turn`, and score_norms [N, T].
    """
    counted = mask & scored[:, None]
    number = _so_far(mask, episode_id)
    compared = dense_ids(group_id)[:, None] * (number.max() + 1) + number
    lengths = jnp.where(counted, _so_far(jnp.where(mask, score_norms, 0.0), episode_id), 0.0)
    values = advantage(returns.reshape(-1), compared.reshape(-1), lengths.reshape(-1))
    return jnp.where(counted, values.reshape(mask.shape), 0.0)


def per_state(
    advantage: Advantage,
    returns: FloatNT,
    tokens: IntNT,
    mask: BoolNT,
    group_id: IntN,
    scored: BoolN,
) -> FloatNT:
    """Compare the returns of turns that answer the same observation, within a group, [N, T].

    These are the step groups of GiGPO (arXiv 2505.10978): an episode that comes to a state twice is
    in the state's step group twice. The observation is the run of tokens before the
    turn that are no actions; before the first turn it is the prompt. A turn whose observation is
    the only one of its kind has advantage 0.

    The arguments are those of `per_turn`, and tokens [N, T].
    """
    states = jnp.where(turn_starts(mask), observation_ids(tokens, mask, group_id), -1)
    return _compare_turns(advantage, returns, mask, states, scored)


def _compare_turns(
    advantage: Advantage,
    returns: Array,
    mask: Array,
    compared: Array,
    scored: Array,
    ends: Array | None = None,
) -> Array:
    """Compute `advantage` of turns among those with the same number in `compared` [N, T]."""
    # What counts are the first actions of turns, with the lengths of their turns.
    counted = jnp.where(scored[:, None], turn_sums(mask.astype(jnp.float32), mask, ends), 0.0)
    values = advantage(returns.reshape(-1), compared.reshape(-1), counted.reshape(-1))
    return over_turns(values.reshape(mask.shape), mask, ends)


def observation_ids(tokens: IntNT, mask: BoolNT, group_id: IntN) -> IntNT:
    """Make numbers that are equal where the same observation precedes a turn of a group, [N, T].

    Only those at the first actions of turns have a meaning. Observations are compared by two hashes
    of 32 bits each.
    """
    seeds = jnp.array([0x811C9DC5, 0x9747B28C], jnp.uint32)[:, None]
    factors = jnp.array([0x01000193, 0x85EBCA6B], jnp.uint32)[:, None]

    def step(hashes: Array, column: tuple[Array, Array]) -> tuple[Array, Array]:
        token, chosen = column
        mixed = (hashes ^ token.astype(jnp.uint32)[None]) * factors
        mixed ^= mixed >> 15
        return jnp.where(chosen[None], seeds, mixed), hashes

    start = jnp.broadcast_to(seeds, (2, len(tokens)))
    hashes = jax.lax.scan(step, start, (tokens.T, mask.T))[1]  # [T, 2, N]
    group = jnp.broadcast_to(dense_ids(group_id)[:, None], tokens.shape).reshape(-1)
    keys = (hashes[:, 0].T.reshape(-1), hashes[:, 1].T.reshape(-1), group)
    order = jnp.lexsort(keys)
    differs = [key[order][1:] != key[order][:-1] for key in keys]
    is_new = jnp.pad(differs[0] | differs[1] | differs[2], (1, 0))
    ids = jnp.zeros(len(order), jnp.int32).at[order].set(jnp.cumsum(is_new, dtype=jnp.int32))
    return ids.reshape(tokens.shape)


# --- episodes of several rows ---


def per_episode(
    advantage: Advantage,
    returns: FloatN,
    group_id: IntN,
    lengths: NumberN,
    episode_id: IntN | None = None,
) -> FloatN:
    """Compare the returns of episodes with those of their group, [N].

    The return of an episode is the sum over its scored rows. It counts once, and each of these rows
    gets its advantage. A row that is not scored counts nothing, whatever its episode.
    """
    if episode_id is None:
        return advantage(returns, group_id, lengths)
    scored = lengths > 0
    size = len(returns)
    totals = episode_totals(jnp.where(scored, returns, 0.0), episode_id)
    rows = jnp.arange(size)
    segment = _episode_segments(episode_id)
    scored_rows = jnp.where(scored, rows, size)
    first = jax.ops.segment_min(scored_rows, segment, num_segments=size)[segment]
    episode_lengths = episode_totals(lengths.astype(jnp.float32), episode_id)
    values = advantage(totals, group_id, jnp.where(rows == first, episode_lengths, 0.0))
    return jnp.where(scored, values[jnp.minimum(first, size - 1)], 0.0)


def episode_totals(values: NumberN, episode_id: IntN | None) -> NumberN:
    """Compute the sum of `values` [N] over the rows of each row's episode, [N]."""
    if episode_id is None:
        return values
    segment = _episode_segments(episode_id)
    return jax.ops.segment_sum(values, segment, num_segments=len(segment))[segment]


def episode_lengths(starts: IntN, ends: IntN, episode_id: IntN) -> IntN:
    """Compute the largest end of the rows of an episode minus the start of its first, [N]."""
    size = len(ends)
    segment = _episode_segments(episode_id)
    first = jax.ops.segment_min(jnp.arange(size), segment, num_segments=size)[segment]
    return jax.ops.segment_max(ends, segment, num_segments=size)[segment] - starts[first]


def _episode_segments(episode_id: Array) -> Array:
    """Compute the number of each row's episode in the order of rows, from 0, [N].

    Padding rows at the end may have any id: rows that are no neighbors are no episode.
    """
    return jnp.cumsum(jnp.pad(episode_id[1:] != episode_id[:-1], (1, 0)))


def _of_next_row(values: Array, decay: Array, episode_id: Array) -> Array:
    """Compute x of the row after each row of an episode, 0 after its last, [N].

    x is values + decay x of the next row. All arrays are [N].
    """
    continues = jnp.pad(episode_id[1:] == episode_id[:-1], (0, 1))

    def step(following: Array, row: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        value, weight, has_next = row
        following = jnp.where(has_next, following, 0.0)
        return value + weight * following, following

    decay = decay.astype(values.dtype)
    start = jnp.zeros((), values.dtype)
    return jax.lax.scan(step, start, (values, decay, continues), reverse=True)[1]


def _at_first(values: Array, mask: Array) -> Array:
    """Compute the value at the first token of each row's mask, 0 if it is empty, [N]."""
    first = jnp.take_along_axis(values, mask.argmax(-1)[:, None], axis=1)[:, 0]
    return jnp.where(mask.any(-1), first, 0.0)
