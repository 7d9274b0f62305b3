"""Reward models: which of two completions is better, learned from comparisons (Bradley and Terry, Biometrika 39, 1952).

The reward r of a completion is a head's output at its last token (its end, where it has one), and for K members:

    loss = sum_pairs w 1/K sum_k [ -log sigmoid(r_w,k - r_l,k - margin) + centring_coef (r_w,k + r_l,k)^2 ]

Members are `heads` on one trunk or `trunks` of their own, begun at random; with `bootstrap` each learns from its own
resample of the pairs. What the ensemble predicts is mean - penalty x standard deviation. With `robust_radius` the
weights w are the worst within that total variation of equal ones, each member's its own (arXiv 2503.00539).

Deviations: the resample is drawn as Poisson(1) counts from the pair's own tokens (the online bootstrap), so that a pair
counts the same in every epoch and after a resume.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from tpu_rl import masked, packing, scores
from tpu_rl.errors import InputError
from tpu_rl.needs import Needs, RoleSpec, pairs_from
from tpu_rl.preferences import bootstrap_counts, bradley_terry, of_pairs, pair_weights, worst_case_weights
from tpu_rl.types import Algorithm, Array, Experience, Metrics, Pairs, Params, Roles, Rows, Sampling, Sum


@dataclass(frozen=True)
class RewardModelConfig:
    """Rewards are in nats: a margin of 1 wins with probability sigmoid(1)."""

    pairs: Literal["given", "reference"] = "given"
    """By the data file, or sampled from the model as it begins and told apart by --reward."""
    heads: int = 1
    """Members of the ensemble on one trunk."""
    trunks: int = 1
    """Members with models of their own, each with `heads` heads; saved as model, reward_1, reward_2."""
    penalty: float = 0.0
    """Times the members' standard deviation is taken off their mean, in metrics and wherever the model is used."""
    bootstrap: bool = False
    """Each member learns from its own resample of the pairs."""
    margin_coef: float = 1.0
    """Times the margin that the data give a pair (sampled: the difference of --reward) is what it is to be won by."""
    centring_coef: float = 0.0
    """Of the squared sum of a pair's rewards; 0.01 holds them around zero."""
    robust_radius: float = 0.0
    """Total variation within which the worst weighting of an optimizer step's pairs is learned from."""

    def __post_init__(self):
        coefficients = min(self.penalty, self.margin_coef, self.centring_coef)
        if min(self.heads, self.trunks) < 1 or coefficients < 0 or not 0 <= self.robust_radius < 1:
            raise InputError(
                "a setting of the reward model is out of range",
                where="--algorithm",
                fix="heads and trunks are 1 or more, the radius is below 1, and nothing is negative",
            )

    @property
    def needs(self) -> Needs:
        return pairs_from(self.pairs)

    @property
    def members(self) -> tuple[str, ...]:
        return ("reward", *(f"reward_{i}" for i in range(1, self.trunks)))

    @property
    def roles(self) -> dict[str, RoleSpec]:
        trained = {name: RoleSpec(trainable=True, outputs=self.heads) for name in self.members}
        return trained if self.pairs == "given" else trained | {"reference": RoleSpec(trainable=False)}


@struct.dataclass
class Batch:
    """Leaves [M, K, R, S]; the loss sees [R, S]."""

    rows: Rows
    weights: dict[str, Array]
    """"member_k": what a pair counts for it, at the first token of the better completion."""
    pairs: Array
    """1 / pairs of the optimizer step there: what metrics are about."""
    ends: Array
    """bool: where rewards are read."""
    preferred: Array
    """bool: the token's completion is the better one."""
    margin: Array


def reward_model(config: RewardModelConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Learns from Pairs; completions judged alone are no pairs and count nothing."""
    del sampling

    def losses(params: Params, batch: Batch) -> tuple[Array, Array, Array]:
        """(losses, rewards of the better, of the worse completion), each [R, S, members] at the pair's tokens."""
        members = map(roles.__getitem__, config.members)
        rewards = jnp.concatenate([role.logits(params, role.hidden(params, batch.rows)) for role in members], axis=-1)
        compare = jax.vmap(of_pairs, in_axes=(-1, None, None, None), out_axes=-1)
        chosen, rejected = compare(rewards, batch.ends, batch.preferred, batch.rows.segment_ids)
        return bradley_terry(chosen, rejected, batch.margin[..., None], config.centring_coef), chosen, rejected

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[Batch, Any]:
        pairs, layout = experience
        assert isinstance(pairs, Pairs)
        equal = pair_weights(pairs.action_mask, pairs.preferred, pairs.group_id, layout.minibatch, layout.minibatches)
        members = [f"member_{k}" for k in range(config.heads * config.trunks)]
        counts = jnp.ones((len(pairs.tokens), len(members)))
        if config.bootstrap:
            counts = bootstrap_counts(pairs.tokens, pairs.action_mask, pairs.group_id, len(members))
        weights = {name: layout.pack(equal * counts[:, k, None]) for k, name in enumerate(members)}
        batch = Batch(
            rows=layout.rows(pairs.tokens),
            weights=weights,
            pairs=layout.pack(equal),
            ends=layout.pack(scores.last_actions(pairs.action_mask), False),
            preferred=layout.pack(pairs.preferred[:, None] & pairs.action_mask, False),
            margin=layout.pack(jnp.where(pairs.action_mask, config.margin_coef * pairs.margin[:, None], 0.0)),
        )
        if config.robust_radius:
            found = packing.over_micro_batches(lambda micro_batch: losses(params, micro_batch)[0], batch)
            worst = jax.vmap(lambda loss, weight: worst_case_weights(loss, weight, config.robust_radius))
            weights = {name: worst(found[..., k], batch.weights[name]) for k, name in enumerate(members)}
            batch = replace(batch, weights=weights)
        return batch, state

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        found, chosen, rejected = losses(params, batch)
        weights = jnp.stack(list(batch.weights.values()), axis=-1) / len(batch.weights)
        value = masked.total(weights * found, weights > 0)
        better, worse = (scores.pessimistic(side, config.penalty) for side in (chosen, rejected))

        def over_pairs(values: Array) -> Sum:
            return Sum(masked.total(batch.pairs * values, batch.pairs > 0), batch.pairs.sum())

        metrics: Metrics = {
            "preference/loss": Sum(value, weights.sum()),
            "preference/accuracy": over_pairs((better > worse) + 0.5 * (better == worse)),
            "preference/margin": over_pairs(better - worse),
            "preference/chosen": over_pairs(better),
            "preference/rejected": over_pairs(worse),
            "preference/spread": over_pairs(0.5 * (chosen.std(-1) + rejected.std(-1))),
        }
        return value, metrics

    return Algorithm(make_batch, loss)
