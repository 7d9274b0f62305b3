"""Direct preference optimisation and its relatives: learn from which of two completions is better, without a reward.

    s = sum_t log policy(y_t | x, y_<t) - log reference(y_t | x, y_<t)          of a completion
    loss = mean over pairs of  - log sigmoid(beta (s_chosen - s_rejected))      DPO, arXiv 2305.18290

At its minimum is the optimum of E[r] - beta KL(policy || reference) for the reward that explains the preferences.
Relatives take another function of the same two numbers (`preferences.PAIR_LOSSES`), another divergence, worst-case
weights of the pairs, or a reference that follows the policy. Log-probs are at temperature 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from tpu_rl import masked, packing, preferences
from tpu_rl.errors import InputError
from tpu_rl.log_probs import of_frozen, token_log_probs
from tpu_rl.needs import Needs, RoleSpec, pairs_from
from tpu_rl.types import Algorithm, Array, Experience, Metrics, Pairs, Params, Roles, Rows, Sampling, Sum


@dataclass(frozen=True)
class DpoConfig:
    loss: preferences.PairLossName = "sigmoid"
    beta: float = 0.1
    """What a nat of log-ratio is worth in reward; of orpo, the weight of its odds term."""
    label_smoothing: float = 0.0
    """Probability that a label is wrong: sigmoid (conservative DPO), sigmoid_norm, robust and exo."""
    simpo_margin: float = 0.5
    f_divergence: preferences.Divergence = "reverse_kl"
    f_alpha: float = 0.5
    """Of the divergence "alpha": 1 would be reverse KL, 0 forward KL."""
    rpo_coef: float = 0.0
    """Times the chosen completion's negative log-likelihood a token, added to the loss (RPO, arXiv 2404.19733)."""
    robust_radius: float = 0.0
    """Share of the weight that the worst case may move between the pairs of a step, judged before the batch's first."""
    reverse: bool = False
    """Prefer what was rejected: the policy that stands as far on the other side (contrastive distillation)."""
    pairs: Literal["given", "reference", "policy"] = "given"
    """By the data file, or sampled from the reference or (online DPO) the policy and told apart by --reward."""
    reference_mix: float = 0.0
    """Share of the policy that the reference takes over; 0: it stays, 1: it is reset (TR-DPO, arXiv 2404.09656)."""
    reference_every: int = 64
    """Optimizer steps between two such moves."""

    def __post_init__(self):
        misfit = preferences.misfit(self.loss, self.label_smoothing, self.f_divergence, self.f_alpha)
        reasons = {
            f"beta {self.beta} is not above 0": self.beta <= 0,
            f"robust radius {self.robust_radius} is not in [0, 1]": not 0 <= self.robust_radius <= 1,
            f"rpo_coef {self.rpo_coef} is negative": self.rpo_coef < 0,
            f"reference mix {self.reference_mix} is not in [0, 1]": not 0 <= self.reference_mix <= 1,
            f"reference_every {self.reference_every} is below 1": self.reference_every < 1,
            f"{self.loss} has no reference to move": self.reference_mix > 0 and self.reference == "none",
            misfit: bool(misfit),
        }
        if any(reasons.values()):
            raise InputError(next(reason for reason, holds in reasons.items() if holds), where="--algorithm")

    @property
    def needs(self) -> Needs:
        return pairs_from(self.pairs, reference_log_probs=self.reference == "data")

    @property
    def reference(self) -> Literal["none", "data", "role"]:
        """Where the reference's log-probs come from: the data bring them, or a model computes them for each batch."""
        source = "role" if self.pairs == "policy" or self.reference_mix else "data"
        return source if preferences.PAIR_LOSSES[self.loss].reference else "none"

    @property
    def roles(self) -> dict[str, RoleSpec]:
        """Pairs from a file bring the reference's log-probs along, and it is not kept."""
        policy = {"policy": RoleSpec(trainable=True)}
        reference = {"reference": RoleSpec(trainable=False, follows=self.reference_mix)}
        return policy | reference if self.reference == "role" or self.pairs == "reference" else policy


@struct.dataclass
class Batch:
    """Leaves [M, K, R, S]; the loss sees [R, S]."""

    rows: Rows
    weights: dict[str, Array]
    """"preference": what a pair counts, on one of its tokens; `is_pair` says where, even if the worst case took it."""
    action_mask: Array
    preferred: Array
    is_pair: Array
    reference_log_probs: Array


def dpo(config: DpoConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Learns from Pairs of two."""
    del sampling
    kind = preferences.PAIR_LOSSES[config.loss]
    options = {"label_smoothing": config.label_smoothing, "margin": config.simpo_margin}
    loss_of = partial(kind.function, beta=config.beta, **{name: options[name] for name in kind.options})

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[Batch, Any]:
        pairs, layout = experience
        assert isinstance(pairs, Pairs)
        mask, rows = pairs.action_mask, layout.rows(pairs.tokens)
        weights = layout.pack(
            preferences.pair_weights(mask, pairs.preferred, pairs.group_id, layout.minibatch, layout.minibatches)
        )
        reference = layout.pack(pairs.reference_log_probs)
        if config.reference == "role":
            reference = of_frozen(roles["reference"], params, rows)
        preferred = layout.pack(jnp.broadcast_to((pairs.preferred ^ config.reverse)[:, None], mask.shape))
        batch = Batch(rows, {"preference": weights}, layout.pack(mask), preferred, weights > 0, reference)
        if config.robust_radius:
            losses = packing.over_micro_batches(lambda micro_batch: compare(params, micro_batch)[0], batch)
            worst = partial(preferences.worst_case_weights, radius=config.robust_radius)
            batch = replace(batch, weights={"preference": jax.vmap(worst)(losses, weights)})
        return batch, state

    def compare(params: Params, batch: Batch) -> tuple[Array, preferences.Pair]:
        """([R, S] losses, the implicit rewards of the pair), at every token of a pair."""
        log_probs = token_log_probs(roles["policy"], params, batch.rows).log_probs

        def of_pairs(values: Array, averaged: bool) -> preferences.Pair:
            return preferences.of_pairs(values, batch.action_mask, batch.preferred, batch.rows.segment_ids, averaged)

        s = of_pairs(log_probs - batch.reference_log_probs if kind.reference else log_probs, kind.averaged)
        losses = loss_of(*(preferences.divergence_score(x, config.f_divergence, config.f_alpha) for x in s))
        losses -= config.rpo_coef * of_pairs(log_probs, averaged=True).chosen
        return losses, preferences.Pair(config.beta * s.chosen, config.beta * s.rejected)

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        losses, rewards = compare(params, batch)
        weights = batch.weights["preference"]
        value = masked.total(weights * losses, weights > 0)
        return value, {"preference/loss": Sum(value, weights.sum())} | preferences.metrics(*rewards, batch.is_pair)

    def after_update(params: Params, state: Array, metrics: dict[str, Array]) -> tuple[Params, Array]:
        del metrics
        mix = jnp.where((state + 1) % config.reference_every == 0, config.reference_mix, 0.0)
        moved = jax.tree.map(lambda old, new: (1 - mix) * old + mix * new, params["reference"], params["policy"])
        return params | {"reference": moved}, state + 1

    if not config.reference_mix:
        return Algorithm(make_batch, loss)
    return Algorithm(make_batch, loss, lambda params: jnp.zeros((), jnp.int32), after_update)
