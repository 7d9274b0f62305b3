"""Sentence-level reward model (arXiv 2503.04793): comparisons of completions teach what each sentence is worth.

A head of two outputs, a level h and an attention logit a, is read where sentences end. Sentence i is worth r_i = h(its
end) - h(its start), and a completion sum_i softmax_i(a) r_i, or sum_i r_i = h(end) - h(prompt); pairs of completions
are learned from as in `reward_model`:

    loss = sum_pairs w [ -log sigmoid(score_w - score_l - margin) + centring_coef (score_w + score_l)^2 ]

Deviations: sentences end at separator tokens, where the paper segments texts with a model; how the attention over
sentences is parametrised is our reading (`scores.of_sentences`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from flax import struct

from tpu_rl import masked, scores
from tpu_rl.errors import InputError
from tpu_rl.needs import Needs, RoleSpec, pairs_from
from tpu_rl.preferences import bradley_terry, of_pairs, pair_weights
from tpu_rl.types import Algorithm, Array, Experience, Metrics, Pairs, Params, Roles, Rows, Sampling, Sum


@dataclass(frozen=True)
class SentenceRewardConfig:
    separators: tuple[int, ...] = ()
    """Ids of the tokens that end a sentence; a completion's last token always does."""
    aggregate: scores.Aggregate = "attention"
    """How sentences make a completion: a learned weighted mean of their worths, or the sum."""
    margin_coef: float = 1.0
    """Times the margin that the data give a pair is what it is to be won by."""
    centring_coef: float = 0.0
    """Of the squared sum of a pair's scores."""
    pairs: Literal["given", "reference"] = "given"
    """By the data file, or sampled from the model as it begins and told apart by --reward."""

    def __post_init__(self):
        if min(self.margin_coef, self.centring_coef) < 0:
            raise InputError("a coefficient is negative", where="--algorithm", fix="use 0 or more")

    @property
    def needs(self) -> Needs:
        return pairs_from(self.pairs)

    @property
    def roles(self) -> dict[str, RoleSpec]:
        trained = {"reward": RoleSpec(trainable=True, outputs=2)}
        return trained if self.pairs == "given" else trained | {"reference": RoleSpec(trainable=False)}


@struct.dataclass
class Batch:
    """Leaves [M, K, R, S]; the loss sees [R, S]."""

    rows: Rows
    weights: dict[str, Array]
    """"preference": 1 / pairs of the optimizer step, at the first token of the better completion."""
    ends: Array
    """bool: the last token of a sentence."""
    starts: Array
    """Slot, in this row, where the token's sentence starts: the end before it, or the prompt's last token."""
    last: Array
    """bool: the last token of a completion."""
    preferred: Array
    """bool: the token's completion is the better one."""
    margin: Array


def sentence_reward(config: SentenceRewardConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Learns from Pairs."""
    del sampling

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[Batch, Any]:
        del params
        pairs, layout = experience
        assert isinstance(pairs, Pairs)
        mask = pairs.action_mask
        ends = scores.separated(pairs.tokens, mask, config.separators)
        columns = scores.starts(ends, mask)
        row_slots = jnp.maximum(jnp.take_along_axis(layout.slot, columns, axis=1), 0) % layout.source.shape[-1]
        weights = pair_weights(mask, pairs.preferred, pairs.group_id, layout.minibatch, layout.minibatches)
        batch = Batch(
            rows=layout.rows(pairs.tokens),
            weights={"preference": layout.pack(weights)},
            ends=layout.pack(ends, False),
            starts=layout.pack(row_slots),
            last=layout.pack(scores.last_actions(mask), False),
            preferred=layout.pack(pairs.preferred[:, None] & mask, False),
            margin=layout.pack(jnp.where(mask, config.margin_coef * pairs.margin[:, None], 0.0)),
        )
        return batch, state

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        reward, rows, weights = roles["reward"], batch.rows, batch.weights["preference"]
        outputs = reward.logits(params, reward.hidden(params, rows))
        score = scores.of_sentences(outputs, batch.ends, batch.starts, rows.sequence_ids, config.aggregate)
        better, worse = of_pairs(score, batch.last, batch.preferred, rows.segment_ids)
        losses = bradley_terry(better, worse, batch.margin, config.centring_coef)
        value = masked.total(weights * losses, weights > 0)

        def over_pairs(values: Array) -> Sum:
            return Sum(masked.total(weights * values, weights > 0), weights.sum())

        sentences = jnp.sum(batch.ends).astype(jnp.float32)
        metrics: Metrics = {
            "preference/loss": over_pairs(losses),
            "preference/accuracy": over_pairs((better > worse) + 0.5 * (better == worse)),
            "preference/margin": over_pairs(better - worse),
            "preference/chosen": over_pairs(better),
            "preference/rejected": over_pairs(worse),
            "preference/sentences": Sum(sentences, jnp.sum(batch.last).astype(jnp.float32)),
        }
        return value, metrics

    return Algorithm(make_batch, loss)
