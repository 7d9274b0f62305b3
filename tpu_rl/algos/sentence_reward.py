"""Sentence-level reward models (arXiv 2503.04793): learn from comparisons of completions what each
sentence is worth.

A head with two outputs, a level h and an attention logit a, is read where sentences end. The worth
of sentence i is r_i = h(its end) - h(its start). The score of a completion is sum_i softmax_i(a)
r_i, or sum_i r_i = h(end) - h(prompt). Pairs of completions are learned from as in `reward_model`:

    loss = sum_pairs w [ -log sigmoid(score_chosen - score_rejected - margin)
                         + centering_coef (score_chosen + score_rejected)^2 ]

Deviations: sentences end at separator tokens; the paper splits texts with a model. The paper does
not say how the attention over sentences is parametrized; ours is `reward_score.sentence_scores`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from flax import struct

from tpu_rl import ranges
from tpu_rl.algorithm_spec import ExperienceSpec, RoleSpec, ScoreReadout, pairs_from
from tpu_rl.algos.roles import with_reference
from tpu_rl.losses import masked, reward_score
from tpu_rl.losses.preference import bradley_terry, pair_metrics, pair_scores, pair_weights
from tpu_rl.ranges import NotNegative
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
class SentenceRewardConfig(ranges.Checked):
    """Scores are in nats."""

    separators: tuple[int, ...] = ()
    """Ids of the tokens that end a sentence. The last token of a completion always ends one."""
    aggregate: reward_score.Aggregate = "attention"
    """Score of a completion from the worths of its sentences: a learned weighted mean, or the sum.
    """
    margin_coef: NotNegative = 1.0
    """Coefficient of the margin that the data give a pair."""
    centering_coef: NotNegative = 0.0
    """Coefficient of the squared sum of a pair's scores."""
    pairs: Literal["given", "reference"] = "given"
    """given: the data file has pairs. reference: completions are sampled from the model as it
    starts and compared by --reward."""

    @property
    def experience(self) -> ExperienceSpec:
        return pairs_from(self.pairs)

    @property
    def roles(self) -> dict[str, RoleSpec]:
        reading = ScoreReadout("sentences", self.separators, self.aggregate)
        trained = {"reward": RoleSpec(trainable=True, outputs=2, reading=reading)}
        return with_reference(trained, needed=self.pairs != "given")


@struct.dataclass
class Batch:
    """Leaves are [M, K, R, S]; the loss sees [R, S]."""

    rows: PackedRows
    weights: dict[str, Array]
    """"preference": 1 / number of pairs of the optimizer step, at the first token of the better
    completion."""
    ends: Array
    """bool: True on the last token of a sentence."""
    starts: Array
    """Slot, in the same row, of the start of the token's sentence: the end before it, or the last
    token of the prompt."""
    last: Array
    """bool: True on the last token of a completion."""
    preferred: Array
    """bool: True if the token's completion is the better one."""
    margin: Array


def sentence_reward(config: SentenceRewardConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build a sentence-level reward model. It learns from Pairs."""

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[Batch, Any]:
        pairs, layout = experience
        assert isinstance(pairs, Pairs)
        mask = pairs.action_mask
        ends = reward_score.sentence_ends(pairs.tokens, mask, config.separators)
        columns = reward_score.sentence_starts(ends, mask)
        # The slot of the column [N, T] within its packed row.
        slots = jnp.maximum(jnp.take_along_axis(layout.slot, columns, axis=1), 0)
        slots = slots % layout.source.shape[-1]
        weights = pair_weights(
            mask, pairs.preferred, pairs.group_id, layout.minibatch, layout.minibatches
        )
        batch = Batch(
            rows=layout.rows(pairs.tokens),
            weights={"preference": layout.pack(weights)},
            ends=layout.pack(ends, False),
            starts=layout.pack(slots),
            last=layout.pack(reward_score.last_actions(mask), False),
            preferred=layout.pack(pairs.preferred[:, None] & mask, False),
            margin=layout.pack(jnp.where(mask, config.margin_coef * pairs.margin[:, None], 0.0)),
        )
        return batch, state

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        reward = roles["reward"]
        rows = batch.rows
        weights = batch.weights["preference"]
        outputs = reward.logits(params, reward.hidden(params, rows))
        scores = reward_score.sentence_scores(
            outputs, batch.ends, batch.starts, rows.sequence_ids, config.aggregate
        )
        pair = pair_scores(scores, batch.last, batch.preferred, rows.segment_ids)
        losses = bradley_terry(pair.chosen, pair.rejected, batch.margin, config.centering_coef)
        value = masked.total(weights * losses, weights > 0)
        sentences = jnp.sum(batch.ends).astype(jnp.float32)
        completions = jnp.sum(batch.last).astype(jnp.float32)
        metrics = pair_metrics(pair.chosen, pair.rejected, weights)
        metrics["preference/loss"] = masked.weighted_average(losses, weights)
        metrics["preference/sentences"] = Sum(sentences, completions)
        return value, metrics

    return Algorithm(make_batch, loss)
