"""Direct preference optimization (DPO, arXiv 2305.18290) and its relatives: learn from which of two
completions is better, without a reward.

    s    = sum_t log policy(y_t | x, y_<t) - log reference(y_t | x, y_<t)     for each completion
    loss = mean over pairs of -log sigmoid(beta (s_chosen - s_rejected))

The minimum is the optimum of E[r] - beta KL(policy || reference) for the reward r that explains the
preferences. The relatives take another function of the two scores (`preference.PAIR_LOSSES`),
another divergence, worst-case weights of the pairs, or a reference that follows the policy.
Log-probs are at temperature 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax.numpy as jnp
from flax import struct

from tpu_rl.algorithm_spec import ExperienceSpec, RoleSpec, pairs_from
from tpu_rl.algos.roles import moving_reference
from tpu_rl.errors import InputError
from tpu_rl.losses import masked, preference
from tpu_rl.losses.log_probs import frozen_log_probs, token_log_probs
from tpu_rl.train import packing
from tpu_rl.types import (
    Algorithm,
    Array,
    Experience,
    Metrics,
    Pairs,
    Params,
    Roles,
    Rows,
    Sampling,
    Sum,
)


@dataclass(frozen=True)
class DpoConfig:
    """The default is DPO itself."""

    loss: preference.PairLossName = "sigmoid"
    """Loss of a pair; see `tpu_rl/losses/preference.py`."""
    beta: float = 0.1
    """Reward per nat of log-ratio. For orpo, the coefficient of the odds term."""
    label_smoothing: float = 0.0
    """Probability that a label is wrong, for sigmoid (conservative DPO), sigmoid_norm, robust and
    exo."""
    simpo_margin: float = 0.5
    """Margin of simpo."""
    f_divergence: preference.Divergence = "reverse_kl"
    """Divergence from the reference that the policy is penalized by."""
    f_alpha: float = 0.5
    """Parameter of the divergence "alpha": 1 would be the reverse KL, 0 the forward KL."""
    rpo_coef: float = 0.0
    """Coefficient of the chosen completion's negative log-likelihood per token, added to the loss
    (RPO, arXiv 2404.19733)."""
    robust_radius: float = 0.0
    """Share of the weight that the worst case may move between the pairs of a step. It is decided
    before the first update of the batch."""
    reverse: bool = False
    """Prefer the rejected completion: the result is the opposite policy (contrastive
    distillation)."""
    pairs: Literal["given", "reference", "policy"] = "given"
    """given: the data file has pairs. reference, policy: completions are sampled from that model
    and compared by --reward; policy is online DPO."""
    reference_mix: float = 0.0
    """Share by which the reference moves to the policy: 0 keeps it, 1 resets it (TR-DPO, arXiv
    2404.09656)."""
    reference_every: int = 64
    """Optimizer steps between two such moves."""

    def __post_init__(self):
        problem = self._problem()
        if problem:
            raise InputError(problem, where="--algorithm", fix="see --help-all")

    def _problem(self) -> str:
        """Describe a conflict between settings, or return ""."""
        if self.beta <= 0:
            return f"beta {self.beta} is not above 0"
        if not 0 <= self.robust_radius <= 1:
            return f"robust_radius {self.robust_radius} is not in [0, 1]"
        if self.rpo_coef < 0:
            return f"rpo_coef {self.rpo_coef} is negative"
        if not 0 <= self.reference_mix <= 1:
            return f"reference_mix {self.reference_mix} is not in [0, 1]"
        if self.reference_every < 1:
            return f"reference_every {self.reference_every} is below 1"
        if self.reference_mix > 0 and self.reference == "none":
            return f"{self.loss} has no reference that could move"
        return preference.conflict(self.loss, self.label_smoothing, self.f_divergence, self.f_alpha)

    @property
    def experience(self) -> ExperienceSpec:
        return pairs_from(self.pairs, reference_log_probs=self.reference == "data")

    @property
    def reference(self) -> Literal["none", "data", "role"]:
        """Source of the reference's log-probs: the pairs, or a model that computes them for each
        batch."""
        if not preference.PAIR_LOSSES[self.loss].reference:
            return "none"
        return "role" if self.pairs == "policy" or self.reference_mix else "data"

    @property
    def roles(self) -> dict[str, RoleSpec]:
        roles = {"policy": RoleSpec(trainable=True)}
        # The reference's log-probs of pairs from a file are computed once, and it is not kept.
        if self.reference == "role" or self.pairs == "reference":
            roles["reference"] = RoleSpec(trainable=False, tracks_policy=self.reference_mix)
        return roles


@struct.dataclass
class Batch:
    """Leaves are [M, K, R, S]; the loss sees [R, S]."""

    rows: Rows
    weights: dict[str, Array]
    """"preference": the weight of each pair, on one of its tokens."""
    action_mask: Array
    preferred: Array
    """bool: True if the token's completion is the preferred one."""
    is_pair: Array
    """bool: True where a pair's weight is, even if the worst case took the weight away."""
    reference_log_probs: Array


def dpo(config: DpoConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build DPO. It learns from Pairs. Its state counts the updates if the reference moves."""
    del sampling
    pair_loss = preference.PAIR_LOSSES[config.loss]
    options = {"label_smoothing": config.label_smoothing, "margin": config.simpo_margin}
    loss_of_scores = partial(
        pair_loss.function, beta=config.beta, **{name: options[name] for name in pair_loss.options}
    )

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[Batch, Any]:
        pairs, layout = experience
        assert isinstance(pairs, Pairs)
        mask = pairs.action_mask
        rows = layout.rows(pairs.tokens)
        weights = layout.pack(
            preference.pair_weights(
                mask, pairs.preferred, pairs.group_id, layout.minibatch, layout.minibatches
            )
        )
        if config.reference == "role":
            reference_log_probs = frozen_log_probs(roles["reference"], params, rows)
        else:
            reference_log_probs = layout.pack(pairs.reference_log_probs)
        preferred = pairs.preferred ^ config.reverse
        batch = Batch(
            rows=rows,
            weights={"preference": weights},
            action_mask=layout.pack(mask),
            preferred=layout.pack(jnp.broadcast_to(preferred[:, None], mask.shape)),
            is_pair=weights > 0,
            reference_log_probs=reference_log_probs,
        )
        if config.robust_radius:
            losses = packing.over_micro_batches(
                lambda micro_batch: compare(params, micro_batch)[0], batch
            )
            worst = preference.worst_case_by_step(losses, weights, config.robust_radius)
            batch = replace(batch, weights={"preference": worst})
        return batch, state

    def compare(params: Params, batch: Batch) -> tuple[Array, preference.Pair]:
        """Return the losses [R, S] and the implicit rewards, at every token of a pair."""
        log_probs = token_log_probs(roles["policy"], params, batch.rows).log_probs

        def pair_scores(values: Array, averaged: bool) -> preference.Pair:
            return preference.pair_scores(
                values, batch.action_mask, batch.preferred, batch.rows.segment_ids, averaged
            )

        def divergence_score(score: Array) -> Array:
            return preference.divergence_score(score, config.f_divergence, config.f_alpha)

        log_ratio = log_probs - batch.reference_log_probs if pair_loss.reference else log_probs
        scores = pair_scores(log_ratio, pair_loss.averaged)
        losses = loss_of_scores(divergence_score(scores.chosen), divergence_score(scores.rejected))
        losses -= config.rpo_coef * pair_scores(log_probs, averaged=True).chosen
        rewards = preference.Pair(config.beta * scores.chosen, config.beta * scores.rejected)
        return losses, rewards

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        losses, rewards = compare(params, batch)
        weights = batch.weights["preference"]
        value = masked.total(weights * losses, weights > 0)
        metrics = preference.pair_metrics(
            rewards.chosen, rewards.rejected, batch.is_pair.astype(jnp.float32)
        )
        metrics["preference/loss"] = Sum(value, weights.sum())
        return value, metrics

    if not config.reference_mix:
        return Algorithm(make_batch, loss)
    return Algorithm(
        make_batch, loss, *moving_reference(config.reference_every, config.reference_mix)
    )
