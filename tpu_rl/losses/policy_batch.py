"""The batch that policy-gradient methods learn from, and the parts it is made of.

Everything here runs once per batch and without gradients. Each part is a function of small
arguments, so that an algorithm can use one and replace another. `make_policy_batch` puts them
together for methods with a group baseline (GRPO, GSPO, CISPO).
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from tpu_rl.losses import advantages, masked
from tpu_rl.losses.log_probs import (
    TokenLogProbs,
    frozen_log_probs,
    frozen_score_norms,
    token_log_probs,
)
from tpu_rl.losses.reference_kl import ReferenceKl, kl_estimate
from tpu_rl.losses.sampler_correction import Corrected, SamplerCorrection, correct
from tpu_rl.train import packing
from tpu_rl.types import Array, Experience, Layout, PackedRows, Params, Role, Rollout, RowSource

Credit = Literal["episode", "turn", "step", "token", "reward"]
"""What a group compares: episodes, their k-th turns, GiGPO's step groups, their k-th tokens, or the
rewards of all their turns (see `credited_advantages`)."""


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
    importance_capped: Array | None = struct.field(default=None, kw_only=True)
    """1 where a bound changed `importance`, for the metric policy/importance_capped."""
    high_entropy: Array | None = struct.field(default=None, kw_only=True)
    """1 at the tokens that the policy loss and the entropy bonus are about, 0 at others; None is
    all."""
    rejected: Array | None = struct.field(default=None, kw_only=True)
    """1 at tokens left out for their distance from the sampler, for policy/rejected."""
    off_policy_mask_threshold: float | None = struct.field(
        default=None, kw_only=True, pytree_node=False
    )
    """See `SamplerCorrection`; None masks nothing."""
    temperature: Array | None = struct.field(default=None, kw_only=True)
    """The temperature that the batch was sampled at, if it changes from batch to batch."""
    compared: Array | None = struct.field(default=None, kw_only=True)
    """1 at actions whose turn has others to be compared with, 0 at other tokens; None if a group
    compares episodes. For the metric policy/compared."""
    thoughts: Array | None = struct.field(default=None, kw_only=True)
    """1 at actions of thoughts, 0 at other tokens; None if phases do not differ. For the metric
    policy/thoughts."""


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
    policy: Role, params: Params, rollout: Rollout, layout: Layout, temperature: Array | float
) -> TokenLogProbs:
    """Return the policy's log-probs and entropies at its actions, by a forward pass of the trainer.

    Packed [M, K, R, S], zero outside actions. The log-probs replace the sampler's as
    `old_log_probs` where the sampler's programs round differently.
    """

    def of_micro_batch(rows: PackedRows) -> TokenLogProbs:
        return token_log_probs(policy, params, rows, temperature)

    recomputed = packing.over_micro_batches(of_micro_batch, layout.rows(rollout.tokens))
    mask = layout.pack(rollout.action_mask)
    return jax.tree.map(lambda values: jnp.where(mask, values, 0.0), recomputed)


def corrected(
    config: SamplerCorrection,
    policy: Role,
    params: Params,
    rollout: Rollout,
    layout: Layout,
    temperature: Array | float,
    with_entropy: bool = False,
) -> Corrected:
    """Return `sampler_correction.correct`, with old log-probs of the trainer if the configuration
    wants them, and with its entropies then and with `with_entropy`."""
    recomputed = None
    if config.recomputes or with_entropy:
        recomputed = recomputed_log_probs(policy, params, rollout, layout, temperature)
    return correct(config, rollout, layout, actions_of(rollout), recomputed)


def reference_penalty(
    config: ReferenceKl,
    reference: Role,
    params: Params,
    rollout: Rollout,
    layout: Layout,
    temperature: Array | float,
    scale: Array | float = 1.0,
) -> tuple[Array, Array]:
    """Return the reference's log-probs, packed [M, K, R, S], and the penalty of each token [N, T]
    that is subtracted from its reward: scale x kl_reward_coef x KL to the reference."""
    rows = layout.rows(rollout.tokens)
    log_probs = frozen_log_probs(reference, params, rows, temperature)
    unpacked = layout.unpack(log_probs)
    kl = kl_estimate(rollout.log_probs, unpacked, config.kl_reward_estimator)
    penalty = scale * config.kl_reward_coef * kl
    return log_probs, jnp.where(rollout.action_mask, penalty, 0.0)


def overlong_penalty(rollout: Rollout, max_new_tokens: int, buffer: int) -> Array:
    """Return [N]: `advantages.soft_overlong_penalty` of each episode, at the last of its rows.

    Lengths are counted as the limit counts them: all tokens after the prompt, observations too. An
    episode of several rows is as long as the longest. One that was cut at the limit has a penalty
    of 1, also if its last observation, which no row holds, took it there.
    """
    mask = rollout.action_mask
    ends = jnp.max(jnp.arange(1, mask.shape[1] + 1)[None] * mask, axis=-1)
    lengths = ends - mask.argmax(-1)
    if rollout.episode_id is not None:
        lengths = advantages.episode_lengths(mask.argmax(-1), ends, rollout.episode_id)
    lengths = jnp.where(rollout.truncated, max_new_tokens, lengths)
    penalty = advantages.soft_overlong_penalty(lengths, max_new_tokens, buffer)
    return jnp.where(_ends_episode(rollout), penalty, 0.0)


def clipped_return_change(
    rewards: Array, rollout: Rollout, clip_range: tuple[float, float]
) -> Array:
    """Return [N]: what brings each episode's sum of `rewards` [N, T] into the range, at the last of
    its rows."""
    totals = masked.total(rewards, rollout.action_mask, axis=-1)
    totals = advantages.episode_totals(totals, rollout.episode_id)
    change = jnp.clip(totals, *clip_range) - totals
    return jnp.where(_ends_episode(rollout), change, 0.0)


class RunningReturns(NamedTuple):
    """Moments of the returns of all scored episodes of a run so far, [] float32."""

    count: Array
    mean: Array
    squares: Array
    """Sum of (return - mean)^2."""


def normalized_rewards(
    rollout: Rollout, running: RunningReturns, clip: float
) -> tuple[Array, RunningReturns]:
    """Return rewards / running standard deviation of returns, clipped to +-clip, [N, T], and the
    moments with this batch (PPO-max, arXiv 2307.04964).

    The paper subtracts the running mean too, from its one reward at the end. Here rewards may stand
    at any action, and 0 stays 0. While all returns were equal, rewards are only clipped.
    """
    mask = rollout.action_mask
    row_returns = masked.total(rollout.rewards, learned_tokens(rollout), axis=-1)
    returns = advantages.episode_totals(row_returns, rollout.episode_id)
    # Chan's update of the moments, by the episodes of this batch.
    counted = _ends_episode(rollout) & rollout.scored
    count = counted.sum().astype(jnp.float32)
    mean = masked.mean(returns, counted)
    squares = masked.total(jnp.square(returns - mean), counted)
    total = running.count + count
    shift = mean - running.mean
    share = count / jnp.maximum(total, 1.0)
    running = RunningReturns(
        total,
        running.mean + shift * share,
        running.squares + squares + jnp.square(shift) * running.count * share,
    )
    deviation = jnp.sqrt(running.squares / jnp.maximum(total - 1.0, 1.0))
    scale = jnp.where(deviation > advantages.EPSILON, deviation, 1.0)
    return jnp.where(mask, jnp.clip(rollout.rewards / scale, -clip, clip), 0.0), running


def _ends_episode(rollout: Rollout) -> Array:
    """Return [N] bool: rows with actions that are the last of their episode."""
    ends = rollout.action_mask.any(-1)
    if rollout.episode_id is None:
        return ends
    continues = rollout.episode_id[1:] == rollout.episode_id[:-1]
    return ends & ~jnp.pad(continues, (0, 1))


def normalized_advantages(
    advantage: advantages.Advantage, returns: Array, group_id: Array, lengths: Array
) -> Array:
    """Return the values [N] of `advantage`, shifted and scaled to mean 0 and standard deviation 1
    over those with lengths above 0; 0 where all are equal. The deviation is the sample one."""
    values = advantage(returns, group_id, lengths)
    counted = lengths > 0
    centered = jnp.where(counted, values - masked.mean(values, counted), 0.0)
    deviation = jnp.sqrt(jnp.square(centered).sum() / jnp.maximum(counted.sum() - 1.0, 1.0))
    is_equal = deviation <= advantages.EPSILON
    return jnp.where(is_equal, 0.0, centered / (deviation + advantages.EPSILON))


def credited_advantages(
    rollout: Rollout,
    rewards: Array,
    returns: Array,
    advantage: advantages.Advantage,
    credit: Credit,
    gamma: float,
    step_coef: float,
    score_norms: Array | None = None,
    separators: tuple[int, ...] = (),
) -> Array:
    """Return the advantages of actions relative to their group, [N, T].

        episode   A_i of the whole return R_i, the same at all tokens of the episode
        turn      A_ik of the return G_ik from turn k on, among the turns k of the group
        step      A_i of R_i + step_coef x A_ik of G_ik, among the turns of the group that begin in
                  the same state (GiGPO, arXiv 2505.10978, eq. 8)
        token     A_ik of the return from the k-th action on, among the k-th actions of the group
        reward    the sum from turn k on of the advantages of rewards among all turns of the group

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
      separators: tokens that end a turn, for credit to turns and their rewards.
    """
    mask = rollout.action_mask
    episode_id = rollout.episode_id
    group_id = rollout.group_id
    lengths = learned_tokens(rollout).sum(-1)
    scored = lengths > 0
    ends = advantages.step_ends(rollout.tokens, mask, separators)
    if credit == "turn":
        turn_returns = advantages.turn_returns(rewards, mask, gamma, episode_id, ends)
        return advantages.per_turn(
            advantage, turn_returns, mask, group_id, scored, episode_id, ends
        )
    if credit == "reward":
        return advantages.of_rewards(
            advantage, rewards, mask, group_id, scored, gamma, episode_id, ends
        )
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


def compared_turns(
    rollout: Rollout, credit: Credit, separators: tuple[int, ...] = ()
) -> Array | None:
    """Return 1.0 at actions whose turn is compared with others, 0.0 elsewhere, [N, T].

    None if a group compares episodes, or all turns with each other.
    """
    mask = rollout.action_mask
    group_id = rollout.group_id
    scored = learned_tokens(rollout).any(-1)
    anything = jnp.zeros(mask.shape, jnp.float32)
    count = advantages.group_count
    match credit:
        case "episode" | "reward":
            return None
        case "turn":
            episode_id = rollout.episode_id
            ends = advantages.step_ends(rollout.tokens, mask, separators)
            peers = advantages.per_turn(count, anything, mask, group_id, scored, episode_id, ends)
        case "token":
            episode_id = rollout.episode_id
            ones = jnp.ones(mask.shape)
            peers = advantages.per_token(count, anything, mask, group_id, scored, ones, episode_id)
        case "step":
            peers = advantages.per_state(count, anything, rollout.tokens, mask, group_id, scored)
    return (peers > 1).astype(jnp.float32)


def top_entropy(entropy: Array, learned: Array, share: float) -> Array:
    """Return 1.0 at learned tokens whose entropy is among the top `share` of the batch, [N, T].

    arXiv 2506.01939, where the share is 0.2. The quantile is that of all learned tokens of the
    batch under the policy before the update, whatever the packing; TRL 1.16 takes that of each
    micro-batch under the present policy.
    """
    threshold = jnp.nanquantile(jnp.where(learned, entropy, jnp.nan), 1.0 - share)
    return (learned & (entropy >= threshold)) * 1.0


def pack_policy_batch(
    rollout: Rollout,
    layout: Layout,
    advantages: Array,
    weights: Array,
    reference_log_probs: Array | None,
    correction: Corrected = Corrected(),
) -> PolicyBatch:
    """Move advantages and weights into packed rows, and add the log-probs.

    Args:
      rollout: the completions.
      layout: their places in packed rows.
      advantages: [N, T].
      weights: [N, T], the weights of the policy loss.
      reference_log_probs: packed [M, K, R, S], or None.
      correction: from `corrected`; by default, the old log-probs are the sampler's.
    """

    def pack(array: Array | None) -> Array | None:
        return None if array is None else layout.pack(array)

    sampler_log_probs = layout.pack(rollout.log_probs)
    old_log_probs = correction.old_log_probs
    return PolicyBatch(
        rows=layout.rows(rollout.tokens),
        weights={"policy": layout.pack(weights)},
        action_mask=layout.pack(actions_of(rollout)),
        advantages=layout.pack(advantages),
        old_log_probs=sampler_log_probs if old_log_probs is None else old_log_probs,
        reference_log_probs=reference_log_probs,
        importance=pack(correction.importance),
        sampler_log_probs=None if old_log_probs is None else sampler_log_probs,
        importance_capped=pack(correction.capped),
        rejected=pack(correction.rejected),
        off_policy_mask_threshold=correction.off_policy_mask_threshold,
    )


def make_policy_batch(
    experience: Experience,
    params: Params,
    *,
    policy: Role,
    reference: Role | None,
    advantage: advantages.Advantage,
    weighting: masked.Weighting,
    temperature: Array | float,
    max_new_tokens: int,
    kl: ReferenceKl = ReferenceKl(),
    kl_scale: Array | float = 1.0,
    reward_clip_range: tuple[float, float] | None = None,
    overlong_buffer: int = 0,
    mask_truncated: bool = False,
    correction: SamplerCorrection = SamplerCorrection(),
    top_entropy_quantile: float = 1.0,
    credit: Credit = "episode",
    gamma: float = 1.0,
    step_coef: float = 1.0,
    separators: tuple[int, ...] = (),
) -> PolicyBatch:
    """Make the batch of a method with a group baseline, from a Rollout.

    return = clip(sum of rewards) + overlong penalty - kl_scale x kl_reward_coef x KL

    Args:
      experience: a Rollout with its layout.
      params: the whole params tree, which `policy` and `reference` read.
      policy: the role that trains; called only for recomputed old log-probs.
      reference: the role of the KL terms, or None without them.
      advantage: function from returns to advantages, e.g. `advantages.group_scaled`.
      weighting: function from learned tokens to weights, e.g. `masked.token_mean`.
      temperature: sampling temperature.
      max_new_tokens: length limit of a completion.
      kl: the KL in the return.
      kl_scale: factor of its coefficient.
      reward_clip_range: range of an episode's sum of rewards; None is unbounded.
      overlong_buffer: tokens before the limit over which the overlong penalty falls; 0 is off.
      mask_truncated: whether truncated completions get no weight. They still count in baselines.
      correction: what corrects for the sampler, and where old log-probs come from.
      top_entropy_quantile: see `top_entropy`.
      credit: what a group compares, see `credited_advantages`.
      gamma: discount per turn, likewise.
      step_coef: coefficient of the advantages of step groups, likewise.
      separators: tokens that end a turn, likewise.
    """
    rollout, layout = experience
    assert isinstance(rollout, Rollout)
    rewards = rollout.rewards
    at_end = jnp.zeros_like(rewards[:, 0])
    if reward_clip_range is not None:
        at_end += clipped_return_change(rewards, rollout, reward_clip_range)
    if overlong_buffer:
        at_end += overlong_penalty(rollout, max_new_tokens, overlong_buffer)
    rewards += jnp.where(masked.last(rollout.action_mask), at_end[:, None], 0.0)
    returns = masked.total(rewards, rollout.action_mask, axis=-1)
    reference_log_probs = None
    if reference is not None:
        reference_log_probs, penalty = reference_penalty(
            kl, reference, params, rollout, layout, temperature, kl_scale
        )
        returns -= penalty.sum(-1)
        rewards -= penalty
    with_entropy = top_entropy_quantile < 1
    found = corrected(correction, policy, params, rollout, layout, temperature, with_entropy)
    learned = found.keep(learned_tokens(rollout, mask_truncated=mask_truncated))
    weights = weighting(learned, layout.minibatch, layout.minibatches)
    score_norms = None
    if credit == "token":
        score_norms = layout.unpack(
            frozen_score_norms(policy, params, layout.rows(rollout.tokens), temperature)
        )
    batch = pack_policy_batch(
        rollout,
        layout,
        credited_advantages(
            rollout,
            rewards,
            returns,
            advantage,
            credit,
            gamma,
            step_coef,
            score_norms,
            separators,
        ),
        weights,
        reference_log_probs,
        found,
    )
    if found.entropy is not None and with_entropy:
        high = top_entropy(found.entropy, learned, top_entropy_quantile)
        batch = dataclasses.replace(batch, high_entropy=layout.pack(high))
    compared = compared_turns(rollout, credit, separators)
    if compared is None:
        return batch
    return dataclasses.replace(batch, compared=layout.pack(compared))
