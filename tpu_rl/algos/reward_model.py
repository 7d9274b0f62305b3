"""Reward models: learn from comparisons which of two completions is better (Bradley and Terry,
Biometrika 39, 1952).

The reward r of a completion is the output of a head at its last token, which is the end-of-sequence
token if it has one. With K members of an ensemble,

    loss = sum_pairs w 1/K sum_k [ -log sigmoid(r_chosen,k - r_rejected,k - margin)
                                   + centering_coef (r_chosen,k + r_rejected,k)^2 ]

Members are `heads` on one trunk, which start at random. The prediction of the ensemble is mean -
penalty x standard deviation, and `worst_share` puts the smallest member in place of that share of
the mean. With `robust_radius`, the weights w are the worst ones within that total variation of
equal weights, for each member separately (arXiv 2503.00539).

With `deviations` each head k says how sure it is: a reward is drawn from N(m_k, s_k^2), and

    loss_k = -log sigmoid((m_chosen - m_rejected - margin) / sqrt(1 + pi/8 (s_chosen^2 +
                                                                           s_rejected^2)))

which is the chance that the chosen one wins, averaged over both rewards (D. MacKay, Neural
Computation 4, 1992). The prediction is (1 - worst_share) m of the surest head + worst_share
min_k m_k (BRME, arXiv 2409.15360). Ratings have log s + (m - score)^2 / (2 s^2).

Ratings, completions with a score each (HelpSteer2, arXiv 2406.08673; UltraFeedback), take a
regression in place of the comparison:

    loss = sum_completions w 1/K sum_k (r_k - score)^2

Deviations: BRME draws rewards in place of the average. HelpSteer2 has a head for each attribute.
The weighted sum of such heads is one head that learns the weighted sum of the attributes, which
`--data.columns` computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from tpu_rl.algorithm_spec import ExperienceSpec, RoleSpec, ScoreReadout, pairs_from
from tpu_rl.algos.roles import with_reference
from tpu_rl.errors import InputError
from tpu_rl.losses import masked, reward_score
from tpu_rl.losses.preference import Pair, bradley_terry, pair_metrics, pair_scores, pair_weights
from tpu_rl.losses.robust import RobustSettings, worst_case_by_step
from tpu_rl.losses.shapes import FloatRSV
from tpu_rl.ranges import Count, NotNegative, Share
from tpu_rl.train import packing
from tpu_rl.types import (
    Algorithm,
    Array,
    Experience,
    Metrics,
    PackedRows,
    Pairs,
    Params,
    Roles,
    Sampling,
    Sum,
)


@dataclass(frozen=True)
class RewardModelConfig(RobustSettings):
    """Rewards are in nats: a margin of 1 wins with probability sigmoid(1)."""

    pairs: Literal["given", "reference", "rated"] = "given"
    """given: the data file has pairs. reference: completions are sampled from the model as it
    starts and compared by --reward. rated: rows have a prompt, a completion and a score."""
    heads: Count = 1
    """Members of the ensemble on one trunk."""
    penalty: NotNegative = 0.0
    """Multiple of the members' standard deviation that is subtracted from their mean, in metrics
    and wherever the model is used."""
    deviations: bool = False
    """Each head predicts a deviation of its own beside the reward, which `penalty` counts, too."""
    margin_coef: NotNegative = 1.0
    """Coefficient of the margin that the data give a pair (sampled pairs: the difference of
    --reward). Ratings are multiplied by it."""
    centering_coef: NotNegative = 0.0
    """Coefficient of the squared sum of a pair's rewards; 0.01 holds them around zero. Ratings need
    none, and have none."""
    worst_share: Share = 0.0
    """Share of the smallest member in the ensemble's score; the mean has the rest (BRME, arXiv
    2409.15360). 1 is the smallest member alone."""

    def __post_init__(self):
        super().__post_init__()
        if self.pairs == "rated" and (self.centering_coef or not self.margin_coef):
            raise InputError(
                "ratings are learned as they are",
                where="--algorithm.centering-coef, --algorithm.margin-coef",
                why="they need no centering, and multiplied by 0 all of them are equal",
                fix="leave both out",
            )

    @property
    def experience(self) -> ExperienceSpec:
        if self.pairs == "rated":
            columns = ("prompt", "completion", "score")
            return ExperienceSpec("pairs", columns, sampled_by=None, graded=True)
        return pairs_from(self.pairs)

    @property
    def roles(self) -> dict[str, RoleSpec]:
        outputs = 2 * self.heads if self.deviations else self.heads
        reading = ScoreReadout(
            penalty=self.penalty, worst_share=self.worst_share, deviations=self.deviations
        )
        trained = {"reward": RoleSpec(trainable=True, outputs=outputs, reading=reading)}
        return with_reference(trained, needed=self.pairs == "reference")


@struct.dataclass
class Batch:
    """Leaves are [M, K, R, S]; the loss sees [R, S]."""

    rows: PackedRows
    weights: dict[str, Array]
    """"member_k": the weight of each pair for member k, at the first token of the better
    completion; of each rating, at its end."""
    pairs: Array
    """1 / number of pairs, or ratings, of the optimizer step, at the same tokens: the weights of
    metrics."""
    ends: Array
    """bool: True where rewards are read."""
    preferred: Array
    """bool: True if the token's completion is the better one."""
    margin: Array


def compare(
    config: RewardModelConfig, roles: Roles, params: Params, batch: Batch
) -> tuple[FloatRSV, Pair]:
    """Compute the losses and the rewards of both completions, [R, S, members], at every token of
    a pair; of ratings, the rewards and the scores at each end."""
    reward = roles["reward"]
    rewards = reward.logits(params, reward.hidden(params, batch.rows))
    if config.pairs == "rated":
        pair = Pair(rewards, jnp.broadcast_to(batch.margin[..., None], rewards.shape))
        losses = jnp.square(pair.chosen - pair.rejected)
        if config.deviations:
            means, own = reward_score.means_and_deviations(pair.chosen)
            errors = jnp.square(means - batch.margin[..., None])
            losses = jnp.log(own) + errors / (2 * jnp.square(own))
        return jnp.where(batch.ends[..., None], losses, 0), pair
    # Of pairs: Bradley-Terry on the lead of the chosen one.
    scores_of_members = jax.vmap(pair_scores, in_axes=(-1, None, None, None), out_axes=-1)
    pair = scores_of_members(rewards, batch.ends, batch.preferred, batch.rows.segment_ids)
    margin = batch.margin[..., None]
    if not config.deviations:
        losses = bradley_terry(pair.chosen, pair.rejected, margin, config.centering_coef)
        return losses, pair
    # With deviations the lead is normal, of variance v: the mean of sigmoid is close to
    # sigmoid(lead / sqrt(1 + pi/8 v)).
    chosen, chosen_spread = reward_score.means_and_deviations(pair.chosen)
    rejected, rejected_spread = reward_score.means_and_deviations(pair.rejected)
    variance = jnp.square(chosen_spread) + jnp.square(rejected_spread)
    lead = (chosen - rejected - margin) / jnp.sqrt(1 + jnp.pi / 8 * variance)
    center = config.centering_coef * jnp.square(chosen + rejected)
    return bradley_terry(lead, jnp.zeros_like(lead)) + center, pair


def reward_model(config: RewardModelConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build a reward model. It learns from Pairs.

    Completions that were judged alone count nothing, unless they have ratings.
    """
    is_rated = config.pairs == "rated"

    def spread_of(outputs: Array) -> Array:
        return reward_score.deviation(outputs, config.deviations)

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[Batch, Any]:
        pairs, layout = experience
        assert isinstance(pairs, Pairs)
        mask = pairs.action_mask
        last = reward_score.last_actions(mask)
        if is_rated:
            equal = masked.token_mean(last, layout.minibatch, layout.minibatches)
        else:
            equal = pair_weights(
                mask, pairs.preferred, pairs.group_id, layout.minibatch, layout.minibatches
            )
        weights = {f"member_{k}": layout.pack(equal) for k in range(config.heads)}
        batch = Batch(
            rows=layout.rows(pairs.tokens),
            weights=weights,
            pairs=layout.pack(equal),
            ends=layout.pack(last, False),
            preferred=layout.pack(pairs.preferred[:, None] & mask, False),
            margin=layout.pack(jnp.where(mask, config.margin_coef * pairs.margin[:, None], 0.0)),
        )
        if config.robust_radius:
            losses = packing.over_micro_batches(
                lambda micro_batch: compare(config, roles, params, micro_batch)[0], batch
            )
            weights = {
                name: worst_case_by_step(
                    losses[..., k], weights[name], config.robust_radius, config.robust_ball
                )
                for k, name in enumerate(weights)
            }
            batch = replace(batch, weights=weights)
        return batch, state

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        losses, pair = compare(config, roles, params, batch)
        weights = jnp.stack(list(batch.weights.values()), axis=-1) / len(batch.weights)
        value = masked.total(weights * losses, weights > 0)
        better, worse = (
            reward_score.pessimistic(scores, config.penalty, config.worst_share, config.deviations)
            for scores in (pair.chosen, pair.rejected)
        )
        if is_rated:
            metrics: Metrics = {
                "preference/squared_error": masked.weighted_average(
                    jnp.square(better - batch.margin), batch.pairs
                ),
                "preference/predicted": masked.weighted_average(better, batch.pairs),
                "preference/rating": masked.weighted_average(batch.margin, batch.pairs),
                "preference/spread": masked.weighted_average(spread_of(pair.chosen), batch.pairs),
                "preference/loss": Sum(value, weights.sum()),
            }
            return value, metrics
        spread = 0.5 * (spread_of(pair.chosen) + spread_of(pair.rejected))
        metrics = pair_metrics(better, worse, batch.pairs)
        metrics["preference/loss"] = Sum(value, weights.sum())
        metrics["preference/spread"] = masked.weighted_average(spread, batch.pairs)
        return value, metrics

    return Algorithm(make_batch, loss)
