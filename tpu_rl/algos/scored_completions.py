"""Learning from several completions of a prompt with a score each, from the data or sampled.

With r_i the score of completion i, and s_i a function of its log-probs,

    rrhf    sum over pairs r_i < r_j of max(0, s_i - s_j) - s_best,
            s = mean_t log policy(y_t)                              arXiv 2304.05302, eq. 2 to 4
    tpo     mean over pairs without the best of -log sigmoid(beta (s_j - s_i)) - mean_t log
            policy(best), s = sum_t log policy(y_t)                 arXiv 2405.16681, eq. 8
    prdp    mean over pairs of max(d, d'),  d = (beta (s_i - s_j) - (r_i - r_j))^2,
            s = sum_t log policy(y_t) / reference(y_t); in d' each s is at most `clip` nats from
            its value before the update                             arXiv 2402.08714, eq. 9 and 12
    a_lol   sum over i with A_i > 0 of -q_i A_i clip(w_i, 1 - clip, 1 + clip) s_i,
            A_i = r_i - V(x),  q_i = A_i^priority / (sum of these),
            s = sum_t log policy(y_t), w = policy / reference of the completion, held constant
                                                                    arXiv 2305.14718, eq. 4 and 5

rrhf is also the loss of PerfRL (arXiv 2312.05657). prdp is zero if and only if policy = reference
exp(r / beta) / Z on the completions.

a_lol's V(x) is what `critic`, a model of `value_pretraining`, gives the last token of the prompt.
The paper fits it to scores of the reference's own samples, which `value_pretraining` does; if only
the data have scores, it is fitted to those (`scores` "given"). A prompt may then have a single
completion. Without a critic, V(x) is the mean score of the prompt's completions.

The authors' code draws completions with a probability proportional to A, and weighs their loss by A
as well. q with `priority` 1 is the expectation of these draws, within a step: it needs no draws,
and has the same gradient without their noise. With 0, completions with A > 0 count alike.

Deviations: rrhf's likelihood of the best is a mean over tokens, as in its code. a_lol's critic is a
model of its own, which starts as the reference, not a layer on the reference's hidden states; q
sums to 1 over a step, not over all data. tpo's gold completion is the one with the highest score,
not a column of its own; its mean over tokens is per prompt. Of equal scores the first counts as the
best.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from tpu_rl import ranges
from tpu_rl.algorithm_spec import ExperienceSpec, RoleSpec, scores_of_data
from tpu_rl.algos.roles import with_reference
from tpu_rl.losses import advantages, masked, value_loss
from tpu_rl.losses.log_probs import frozen_log_probs, token_log_probs
from tpu_rl.losses.shapes import BoolN, BoolNT, FloatN, FloatRS, IntN
from tpu_rl.ranges import In, NotNegative, Positive, ReadOnlyWith
from tpu_rl.train import packing
from tpu_rl.types import (
    Algorithm,
    Array,
    Experience,
    Layout,
    Metrics,
    PackedRows,
    Params,
    Roles,
    Sampling,
    ScoredCompletions,
    Sum,
)


@dataclass(frozen=True)
class ScoredCompletionsConfig(ranges.Checked):
    """Scores are in units of reward; log-probs are at temperature 1."""

    loss: Literal["rrhf", "tpo", "prdp", "a_lol"] = "rrhf"
    """The loss; see the head of `tpu_rl/algos/scored_completions.py`."""
    scores: Literal["given", "reference", "policy"] = "given"
    """given: rows bring completions with scores. reference, policy: completions are sampled from
    that model and scored by --reward."""
    max_completions: Annotated[int, In("[2, inf)")] = 8
    """The most completions of a prompt."""
    beta: Positive = 0.1
    """tpo: coefficient of a difference of log-probs. prdp: reward per nat."""
    clip: Positive = 0.2
    """prdp: nats that a completion's log-prob may move per batch. a_lol: range of the ratio around
    1."""
    critic: Annotated[
        str | None, ReadOnlyWith("loss", "a_lol", why="the other losses compare completions")
    ] = None
    """a_lol: the model whose value of the prompt is subtracted from scores, the model folder of a
    run of value_pretraining. By default that is the mean score of the prompt's completions."""
    priority: Annotated[
        NotNegative, ReadOnlyWith("loss", "a_lol", why="the other losses have no advantages")
    ] = 0.0
    """a_lol: power of the advantage by which completions count beside their advantage. 1 is the
    paper's priority sampling; 0 is none."""

    @property
    def experience(self) -> ExperienceSpec:
        compared = self.max_completions if self.critic is None else None
        if self.scores == "given":
            return scores_of_data(compared)
        smallest_group = 1 if compared is None else 2
        return ExperienceSpec(
            "scored_completions",
            sampled_by=self.scores,
            smallest_group=smallest_group,
            compared=compared,
        )

    @property
    def roles(self) -> dict[str, RoleSpec]:
        needed = self.loss in ("prdp", "a_lol") or self.scores == "reference"
        roles = {"policy": RoleSpec(trainable=True)}
        if self.critic is not None:
            roles["value"] = RoleSpec(trainable=False, path=self.critic, outputs=1)
        return with_reference(roles, needed)


@struct.dataclass
class Batch:
    """Leaves are [M, K, R, S]; the loss sees [R, S]."""

    rows: PackedRows
    weights: dict[str, Array]
    """"pairs": at the first token of each completion, the number of pairs with later ones of its
    prompt, over the number of all (rrhf: of all prompts). "best": 1 / their number, at the first
    token of each. "completion": q, at the same places."""
    action_mask: Array
    lengths: Array
    peers: dict[str, Array]
    """"d": int32, the slot of the first token of the d-th next completion of the prompt."""
    is_pair: dict[str, Array]
    """"d": bool, at the first token of a completion that is compared with that one."""
    differences: dict[str, Array]
    """"d": the completion's score minus that one's."""
    advantages: Array
    reference_log_probs: Array | None
    old_log_probs: Array | None


def compared_pairs(
    config: ScoredCompletionsConfig, data: ScoredCompletions, layout: Layout, compared: BoolN
) -> tuple[dict[str, Array], dict[str, Array], dict[str, Array], Array]:
    """Find the pairs of completions of a prompt: each with the d-th next one.

    Returns:
      `Batch.peers`, `Batch.is_pair` and `Batch.differences`, packed, and the number of pairs of
      each completion, [N].
    """
    mask = data.action_mask
    first = mask & (jnp.cumsum(mask, axis=-1) == 1)
    # The slot of each completion's first token, within its packed row.
    slots = jnp.take_along_axis(layout.slot, mask.argmax(-1)[:, None], axis=1)[:, 0]
    slots = jnp.maximum(slots, 0) % layout.source.shape[-1]
    peers, pairs, differences = {}, {}, {}
    num_pairs = jnp.zeros(len(mask))
    for d in range(1, 1 if config.loss == "a_lol" else config.max_completions):
        is_pair = compared & jnp.roll(compared, -d) & (jnp.arange(len(mask)) < len(mask) - d)
        is_pair &= data.group_id == jnp.roll(data.group_id, -d)
        difference = jnp.where(is_pair, data.scores - jnp.roll(data.scores, -d), 0.0)
        if config.loss != "prdp":
            # Equal scores say nothing, except to a regression on their difference.
            is_pair &= difference != 0
        num_pairs += is_pair
        peers[f"{d}"] = layout.pack(jnp.where(first, jnp.roll(slots, -d)[:, None], 0))
        pairs[f"{d}"] = layout.pack(first & is_pair[:, None], False)
        differences[f"{d}"] = layout.pack(first * difference[:, None])
    return peers, pairs, differences, num_pairs


def total(values: FloatRS, batch: Batch) -> FloatRS:
    """Sum values over the completion of each token, [R, S]."""
    return masked.sequence_total(jnp.where(batch.action_mask, values, 0.0), batch.rows.sequence_ids)


def pair_losses(
    config: ScoredCompletionsConfig, scores: FloatRS, batch: Batch, old: FloatRS | None
) -> FloatRS:
    """Average the losses over the later completions of a prompt, at each first token [R, S]."""
    losses = jnp.zeros_like(scores)
    counts = jnp.zeros_like(scores)
    for d, peer in batch.peers.items():
        is_pair = batch.is_pair[d]
        difference = batch.differences[d]
        lead = scores - jnp.take_along_axis(scores, peer, axis=1)
        if config.loss == "prdp":
            assert old is not None
            near = old + jnp.clip(scores - old, -config.clip, config.clip)
            near_lead = near - jnp.take_along_axis(near, peer, axis=1)
            value = jnp.maximum(
                jnp.square(config.beta * lead - difference),
                jnp.square(config.beta * near_lead - difference),
            )
        else:
            lead *= jnp.sign(difference)
            logistic = -jax.nn.log_sigmoid(config.beta * lead)
            value = jnp.maximum(0.0, -lead) if config.loss == "rrhf" else logistic
        losses += jnp.where(is_pair, value, 0.0)
        counts += is_pair
    return losses / jnp.maximum(counts, 1.0)


def scored_completions(
    config: ScoredCompletionsConfig, roles: Roles, sampling: Sampling
) -> Algorithm:
    """Build a method that learns from ScoredCompletions."""

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[Batch, Any]:
        data, layout = experience
        assert isinstance(data, ScoredCompletions)
        mask = data.action_mask
        rows = layout.rows(data.tokens)
        exists = mask.any(-1)
        first = mask & (jnp.cumsum(mask, axis=-1) == 1)
        best = is_best(data.scores, data.group_id, exists)
        compared = exists & ~best if config.loss == "tpo" else exists
        peers, pairs, differences, num_pairs = compared_pairs(config, data, layout, compared)
        if config.critic is None:
            gain = advantages.group_centered(data.scores, data.group_id, exists)
        else:
            # V before the first token of each completion, which is V(x) of its prompt.
            value_of = partial(value_loss.values, roles["value"], params)
            values = layout.unpack(packing.over_micro_batches(value_of, rows))
            gain = data.scores - masked.total(values, first, axis=-1)
        weights = loss_weights(config, layout, first, best, num_pairs, gain)
        return Batch(
            rows=rows,
            weights={name: layout.pack(values) for name, values in weights.items()},
            action_mask=layout.pack(mask, False),
            lengths=layout.pack(mask * mask.sum(-1, keepdims=True)),
            peers=peers,
            is_pair=pairs,
            differences=differences,
            advantages=layout.pack(mask * gain[:, None]),
            reference_log_probs=frozen_log_probs(roles["reference"], params, rows)
            if config.loss in ("prdp", "a_lol")
            else None,
            old_log_probs=frozen_log_probs(roles["policy"], params, rows)
            if config.loss == "prdp"
            else None,
        ), state

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        log_probs = token_log_probs(roles["policy"], params, batch.rows).log_probs
        sums = total(log_probs, batch)
        means = sums / jnp.maximum(batch.lengths, 1)
        losses: dict[str, Array] = {}
        reference = batch.reference_log_probs
        if config.loss == "a_lol":
            assert reference is not None
            ratio = jnp.exp(total(jax.lax.stop_gradient(log_probs) - reference, batch))
            ratio = jnp.clip(ratio, 1 - config.clip, 1 + config.clip)
            losses["completion"] = -batch.advantages * ratio * sums
        elif config.loss == "prdp":
            assert reference is not None
            assert batch.old_log_probs is not None
            old = total(batch.old_log_probs - reference, batch)
            losses["pairs"] = pair_losses(config, total(log_probs - reference, batch), batch, old)
        else:
            scores = means if config.loss == "rrhf" else sums
            losses["pairs"] = pair_losses(config, scores, batch, None)
            losses["best"] = -means
        parts = {
            name: masked.total(batch.weights[name] * values, batch.weights[name] > 0)
            for name, values in losses.items()
        }
        value = jnp.sum(jnp.stack(list(parts.values())))
        first = jnp.any(jnp.stack([weights > 0 for weights in batch.weights.values()]), axis=0)
        metrics: Metrics = {
            f"preference/{name}_loss": Sum(part, batch.weights[name].sum())
            for name, part in parts.items()
        }
        # The last term is the one whose weights sum to 1 over the optimizer step.
        metrics["preference/loss"] = Sum(value, batch.weights[list(parts)[-1]].sum())
        metrics["preference/log_prob_mean"] = masked.average(means, first)
        return value, metrics

    return Algorithm(make_batch, loss, stops_gradient=config.loss == "a_lol")


def loss_weights(
    config: ScoredCompletionsConfig,
    layout: Layout,
    first: BoolNT,
    best: BoolN,
    num_pairs: FloatN,
    gain: FloatN,
) -> dict[str, Array]:
    """Weigh the first token of each completion in each term of the loss.

    Args:
        config: names the loss, and so its terms.
        layout: the minibatch of each completion.
        first: [N, T] bool, the first token of each completion.
        best: [N] bool, the best completion of each prompt.
        num_pairs: [N], the pairs that each completion is in.
        gain: [N], the score minus the value of the prompt.

    Returns:
        name of the term -> [N, T], 0 but at first tokens.
    """

    def mean(selected: Array) -> Array:
        return masked.token_mean(selected, layout.minibatch, layout.minibatches)

    if config.loss == "a_lol":
        priorities = jnp.where(gain > 0, gain**config.priority, 0.0)
        return {"completion": mean(first * priorities[:, None])}
    if config.loss == "prdp":
        return {"pairs": mean(first * num_pairs[:, None])}
    of_best = mean(first & best[:, None])
    if config.loss == "tpo":
        return {"best": of_best, "pairs": mean(first * num_pairs[:, None])}
    # rrhf sums over the pairs of a prompt: 1 / prompts each, as the best of each has.
    share = jax.ops.segment_max(
        of_best.max(-1), layout.minibatch, num_segments=layout.minibatches + 1
    )[layout.minibatch]
    return {"best": of_best, "pairs": first * (share * num_pairs)[:, None]}


def is_best(scores: FloatN, group_id: IntN, exists: BoolN) -> BoolN:
    """Mark the first completion with the highest score of each group, [N]."""
    segment = jnp.searchsorted(jnp.sort(group_id), group_id)
    known = jnp.where(exists, scores, -jnp.inf)
    highest = jax.ops.segment_max(known, segment, num_segments=len(segment))[segment]
    rows = jnp.arange(len(scores))
    candidates = jnp.where(exists & (known == highest), rows, len(scores))
    return rows == jax.ops.segment_min(candidates, segment, num_segments=len(segment))[segment]
