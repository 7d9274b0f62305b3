"""The batch that policy-gradient methods learn from, and the parts it is made of.

Everything here runs once per batch and without gradients. Each part is a function of small
arguments, so that an algorithm can use one and replace another. `make_policy_batch` puts them
together for methods with a group baseline (GRPO, GSPO, CISPO).
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
from flax import struct

from tpu_rl.losses import advantages, masked
from tpu_rl.losses.log_probs import frozen_log_probs, frozen_score_norms, k1
from tpu_rl.types import Array, Experience, Layout, PackedRows, Params, Role, Rollout, RowSource

Credit = Literal["episode", "turn", "step", "token"]
"""What a group compares: episodes, their k-th turns, GiGPO's step groups, or their k-th tokens (see
`credited_advantages`)."""


@struct.dataclass
class PolicyBatch:
    """Input of the loss of a method with an importance ratio. Leaves are [M, K, R, S]; the loss
    sees [R, S]."""

    rows: PackedRows
    weights: dict[str, Array]
    """Weights of the tokens: "policy", and "kl" if the KL to the reference has other weights."""
    action_mask: Array
    """Tokens that the policy chose. Metrics are about these."""
    advantages: Array
    old_log_probs: Array
    """Log-probs in the denominator of the ratio."""
    reference_log_probs: Array | None
    """None if nothing needs them."""
    importance: Array | None
    """Factor of each token's loss, which corrects for a sampling distribution other than the old
    policy; None is 1."""
    sampler_log_probs: Array | None
    """The sampler's log-probs if `old_log_probs` are others, for the gap between sampler and
    trainer."""
    importance_cap: float | None = struct.field(default=None, kw_only=True, pytree_node=False)
    """The largest that `importance` may be, for the metric policy/importance_capped."""
    compared: Array | None = struct.field(default=None, kw_only=True)
    """1 at actions whose turn has others to be compared with, 0 at other tokens; None if a group
    compares episodes. For the metric policy/compared."""


def learned_tokens(rollout: Rollout, *, mask_truncated: bool = False) -> Array:
    """Return [N, T] bool: the actions of scored rows, except of truncated rows if those are
    masked."""
    return (
        rollout.action_mask
        & rollout.scored[:, None]
        & ~(rollout.truncated[:, None] & mask_truncated)
    )


def actions_of(rollout: Rollout, source: RowSource = RowSource.POLICY) -> Array:
    """Return [N, T] bool: the actions of the rows of one source.

    Metrics of the policy (ratio, entropy, KL, gap to the sampler) are about its own.
    """
    if rollout.source is None:
        return rollout.action_mask & (source == RowSource.POLICY)
    return rollout.action_mask & (rollout.source == source)[:, None]


def recomputed_log_probs(
    policy: Role, params: Params, rollout: Rollout, layout: Layout, temperature: float
) -> Array:
    """Return the policy's log-probs of its actions, by a forward pass of the trainer.

    Packed [M, K, R, S], zero outside actions. They replace the sampler's as `old_log_probs` where
    the sampler's programs round differently.
    """
    log_probs = frozen_log_probs(policy, params, layout.rows(rollout.tokens), temperature)
    return jnp.where(layout.pack(rollout.action_mask), log_probs, 0.0)


def completion_kl(rollout: Rollout, reference_log_probs: Array) -> Array:
    """Return [N]: each completion's KL to the reference, in nats, estimated by k1.

    `reference_log_probs` are [N, T]. Times a coefficient, this is the KL that is subtracted from
    the return.
    """
    kl = k1(rollout.log_probs, reference_log_probs)
    return masked.total(kl, rollout.action_mask, axis=-1)


def kl_penalized_rewards(
    rewards: Array, log_probs: Array, reference_log_probs: Array, coef: Array | float
) -> Array:
    """Return rewards - coef k1, all [N, T]: the KL in the reward of every token."""
    return rewards - coef * k1(log_probs, reference_log_probs)


def overlong_penalty(rollout: Rollout, max_new_tokens: int, buffer: int) -> Array:
    """Return [N]: `advantages.soft_overlong_penalty` of the number of actions of each row."""
    lengths = rollout.action_mask.sum(-1)
    return advantages.soft_overlong_penalty(lengths, max_new_tokens, buffer)


def credited_advantages(
    rollout: Rollout,
    rewards: Array,
    returns: Array,
    advantage: advantages.Advantage,
    credit: Credit,
    gamma: float,
    step_coef: float,
    score_norms: Array | None = None,
) -> Array:
    """Return the advantages of actions relative to their group, [N, T].

        episode   A_i of the whole return R_i, the same at all tokens of the episode
        turn      A_ik of the return G_ik from turn k on, among the turns k of the group
        step      A_i of R_i + step_coef x A_ik of G_ik, among the turns of the group that begin in
                  the same state (GiGPO, arXiv 2505.10978, eq. 8)
        token     A_ik of the return from the k-th action on, among the k-th actions of the group

    Args:
      rollout: the completions.
      rewards: [N, T], from which returns of turns are computed.
      returns: [N], the sums of the rows' rewards.
      advantage: a group baseline, e.g. `advantages.group_scaled`.
      credit: what is compared.
      gamma: discount per turn in G.
      step_coef: coefficient of the advantages of step groups.
      score_norms: [N, T], for credit to tokens: what each action adds to the length that
        `advantages.length_weighted` takes as weight. None: 1.
    """
    mask = rollout.action_mask
    episode_id = rollout.episode_id
    group_id = rollout.group_id
    lengths = learned_tokens(rollout).sum(-1)
    scored = lengths > 0
    if credit == "turn":
        turn_returns = advantages.turn_returns(rewards, mask, gamma, episode_id)
        return advantages.per_turn(advantage, turn_returns, mask, group_id, scored, episode_id)
    if credit == "token":
        norms = jnp.ones(mask.shape) if score_norms is None else score_norms
        to_go = advantages.returns_to_go(rewards, mask, gamma, episode_id)
        return advantages.per_token(advantage, to_go, mask, group_id, scored, norms, episode_id)
    of_episodes = advantages.per_episode(advantage, returns, group_id, lengths, episode_id)
    result = jnp.where(mask, of_episodes[:, None], 0.0)
    if credit == "step":
        turn_returns = advantages.turn_returns(rewards, mask, gamma, episode_id)
        of_steps = advantages.per_state(
            advantage, turn_returns, rollout.tokens, mask, group_id, scored
        )
        result += step_coef * of_steps
    return result


def compared_turns(rollout: Rollout, credit: Credit) -> Array | None:
    """Return 1.0 at actions whose turn is compared with others, 0.0 elsewhere, [N, T].

    None if a group compares episodes.
    """
    mask = rollout.action_mask
    group_id = rollout.group_id
    scored = learned_tokens(rollout).any(-1)
    anything = jnp.zeros(mask.shape, jnp.float32)
    count = advantages.group_count
    match credit:
        case "episode":
            return None
        case "turn":
            episode_id = rollout.episode_id
            peers = advantages.per_turn(count, anything, mask, group_id, scored, episode_id)
        case "token":
            episode_id = rollout.episode_id
            ones = jnp.ones(mask.shape)
            peers = advantages.per_token(count, anything, mask, group_id, scored, ones, episode_id)
        case "step":
            peers = advantages.per_state(count, anything, rollout.tokens, mask, group_id, scored)
    return (peers > 1).astype(jnp.float32)


def importance_weights(log_probs: Array, behaviour_log_probs: Array, cap: float) -> Array:
    """Return min(old policy / behavior, cap) of each token: truncated importance sampling (Ionides
    2008).

    The behavior is the distribution that tokens were really sampled from: with top-k and the like,
    with penalties, with a guide, or by the same weights in other programs. Without a cap, the
    expectation of the loss is the one under the old policy, wherever the behavior can sample what
    the old policy can. The cap bounds the variance and leaves a bias. With the proximal policy's
    log-probs as `log_probs`, this is the weight of the decoupled objective (AReaL, arXiv
    2505.24298, eq. 5).
    """
    return jnp.minimum(jnp.exp(log_probs - behaviour_log_probs), cap)


def pack_policy_batch(
    rollout: Rollout,
    layout: Layout,
    advantages: Array,
    weights: Array,
    reference_log_probs: Array | None,
    *,
    old_log_probs: Array | None = None,
    importance_sampling_cap: float | None = None,
) -> PolicyBatch:
    """Move advantages and weights into packed rows, and add the log-probs.

    Args:
      rollout: the completions.
      layout: their places in packed rows.
      advantages: [N, T].
      weights: [N, T], the weights of the policy loss.
      reference_log_probs: packed [M, K, R, S], or None.
      old_log_probs: packed log-probs for the ratio; None takes the sampler's.
      importance_sampling_cap: cap of `importance_weights`; None applies no such weights.
    """
    sampler_log_probs = layout.pack(rollout.log_probs)
    action_mask = layout.pack(actions_of(rollout))
    ratio_log_probs = sampler_log_probs if old_log_probs is None else old_log_probs
    importance = None
    if importance_sampling_cap is not None:
        behaviour_log_probs = layout.pack(rollout.behaviour_log_probs)
        importance = importance_weights(
            ratio_log_probs, behaviour_log_probs, importance_sampling_cap
        )
        importance = jnp.where(action_mask, importance, 1.0)
    return PolicyBatch(
        rows=layout.rows(rollout.tokens),
        weights={"policy": layout.pack(weights)},
        action_mask=action_mask,
        advantages=layout.pack(advantages),
        old_log_probs=ratio_log_probs,
        reference_log_probs=reference_log_probs,
        importance=importance,
        sampler_log_probs=None if old_log_probs is None else sampler_log_probs,
        importance_cap=importance_sampling_cap,
    )


def make_policy_batch(
    experience: Experience,
    params: Params,
    *,
    policy: Role,
    reference: Role | None,
    advantage: advantages.Advantage,
    weighting: masked.Weighting,
    temperature: float,
    max_new_tokens: int,
    kl_reward_coef: float = 0.0,
    overlong_buffer: int = 0,
    mask_truncated: bool = False,
    recompute_log_probs: bool = False,
    importance_sampling_cap: float | None = None,
    credit: Credit = "episode",
    gamma: float = 1.0,
    step_coef: float = 1.0,
) -> PolicyBatch:
    """Make the batch of a method with a group baseline, from a Rollout.

    return = sum of rewards + overlong penalty - kl_reward_coef x KL to the reference

    Args:
      experience: a Rollout with its layout.
      params: the whole params tree, which `policy` and `reference` read.
      policy: the role that trains; called only with `recompute_log_probs`.
      reference: the role of the KL terms, or None without them.
      advantage: function from returns to advantages, e.g. `advantages.group_scaled`.
      weighting: function from learned tokens to weights, e.g. `masked.token_mean`.
      temperature: sampling temperature.
      max_new_tokens: length limit of a completion.
      kl_reward_coef: coefficient of the KL in the return.
      overlong_buffer: tokens before the limit over which the overlong penalty falls; 0 is off.
      mask_truncated: whether truncated completions get no weight. They still count in baselines.
      recompute_log_probs: whether the ratio's old log-probs come from `recomputed_log_probs`.
      importance_sampling_cap: see `pack_policy_batch`.
      credit: what a group compares, see `credited_advantages`.
      gamma: discount per turn, likewise.
      step_coef: coefficient of the advantages of step groups, likewise.
    """
    rollout, layout = experience
    assert isinstance(rollout, Rollout)
    rewards = rollout.rewards
    returns = masked.total(rewards, rollout.action_mask, axis=-1)
    if overlong_buffer:
        penalty = overlong_penalty(rollout, max_new_tokens, overlong_buffer)
        returns += penalty
        rewards += jnp.where(masked.last(rollout.action_mask), penalty[:, None], 0.0)
    reference_log_probs = None
    if reference is not None:
        rows = layout.rows(rollout.tokens)
        reference_log_probs = frozen_log_probs(reference, params, rows, temperature)
        unpacked = layout.unpack(reference_log_probs)
        returns -= kl_reward_coef * completion_kl(rollout, unpacked)
        rewards = kl_penalized_rewards(rewards, rollout.log_probs, unpacked, kl_reward_coef)
    learned = learned_tokens(rollout, mask_truncated=mask_truncated)
    weights = weighting(learned, layout.minibatch, layout.minibatches)
    old_log_probs = None
    if recompute_log_probs:
        old_log_probs = recomputed_log_probs(policy, params, rollout, layout, temperature)
    score_norms = None
    if credit == "token":
        score_norms = layout.unpack(
            frozen_score_norms(policy, params, layout.rows(rollout.tokens), temperature)
        )
    batch = pack_policy_batch(
        rollout,
        layout,
        credited_advantages(
            rollout, rewards, returns, advantage, credit, gamma, step_coef, score_norms
        ),
        weights,
        reference_log_probs,
        old_log_probs=old_log_probs,
        importance_sampling_cap=importance_sampling_cap,
    )
    compared = compared_turns(rollout, credit)
    if compared is None:
        return batch
    return dataclasses.replace(batch, compared=layout.pack(compared))
