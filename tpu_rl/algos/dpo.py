"""Direct preference optimisation and its relatives: learn from which of two completions is better, without a reward.

    s = sum_t log policy(y_t | x, y_<t) - log reference(y_t | x, y_<t)          of a completion
    loss = mean over pairs of  - log sigmoid(beta (s_chosen - s_rejected))      DPO, arXiv 2305.18290

The policy that minimises it is the optimum of E[r] - beta KL(policy || reference) for the reward that explains the
preferences. Relatives take another function of the same two numbers (`preferences.PAIR_LOSSES`), another divergence,
worst-case weights of the pairs, or a reference that follows the policy. Log-probs are at temperature 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import struct

from tpu_rl import masked, packing, preferences
from tpu_rl.errors import InputError
from tpu_rl.log_probs import token_log_probs
from tpu_rl.types import Algorithm, Array, Experience, Metrics, Pairs, Params, Roles, RoleSpec, Rows, Sampling, Sum


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
        loss, smoothing = preferences.PAIR_LOSSES[self.loss], self.label_smoothing
        wrong = {
            f"beta {self.beta} is not above 0": self.beta <= 0,
            f"label smoothing {smoothing} is not in [0, 0.5)": not 0 <= smoothing < 0.5,
            f"{self.loss} smooths no labels": smoothing and "label_smoothing" not in loss.options,
            "exo needs labels that may be wrong, label_smoothing above 0": self.loss == "exo" and not smoothing,
            f"{self.loss} knows reverse KL only": self.f_divergence != "reverse_kl" and not loss.difference,
            "f_alpha 1 is reverse_kl": self.f_divergence == "alpha" and self.f_alpha == 1,
            f"robust radius {self.robust_radius} is not in [0, 1]": not 0 <= self.robust_radius <= 1,
            f"rpo_coef {self.rpo_coef} is negative": self.rpo_coef < 0,
            f"reference mix {self.reference_mix} is not in [0, 1]": not 0 <= self.reference_mix <= 1,
            f"reference_every {self.reference_every} is below 1": self.reference_every < 1,
            f"{self.loss} has no reference to move": self.reference_mix and not loss.reference,
        }
        for what in (what for what, is_so in wrong.items() if is_so):
            raise InputError(what, where="--algorithm")

    experience: ClassVar[type] = Pairs
    judged: ClassVar[bool] = False
    """Learns from pairs, not from completions judged one by one."""

    @property
    def smallest_group(self) -> int:
        return 1 if self.pairs == "given" else 2

    @property
    def compares_with_reference(self) -> bool:
        return preferences.PAIR_LOSSES[self.loss].reference

    @property
    def fresh_reference(self) -> bool:
        """The reference's log-probs are computed for each batch: the data do not bring them."""
        return self.compares_with_reference and (self.pairs == "policy" or self.reference_mix > 0)

    @property
    def roles(self) -> dict[str, RoleSpec]:
        """Pairs from a file bring the reference's log-probs along, and it is not kept."""
        policy, reference = {"policy": RoleSpec(trainable=True)}, {"reference": RoleSpec(trainable=False)}
        return policy | reference if self.fresh_reference or self.pairs == "reference" else policy


@struct.dataclass
class Batch:
    """Leaves [M, K, R, S]; the loss sees [R, S]."""

    rows: Rows
    weights: dict[str, Array]
    """"preference": what a pair counts, on the first action of its preferred completion."""
    action_mask: Array
    preferred: Array
    is_pair: Array
    """Where a pair's weight stands, also if the worst case took all of it: what metrics are about."""
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
        reference_log_probs = layout.pack(pairs.reference_log_probs)
        if config.fresh_reference:
            frozen = partial(token_log_probs, roles["reference"], params)
            reference_log_probs = packing.over_micro_batches(lambda micro_batch: frozen(micro_batch).log_probs, rows)
        preferred = jnp.broadcast_to((pairs.preferred ^ config.reverse)[:, None], mask.shape)
        sides = layout.pack(mask), layout.pack(preferred), weights > 0
        batch = Batch(rows, {"preference": weights}, *sides, reference_log_probs)
        if config.robust_radius:
            losses = packing.over_micro_batches(lambda micro_batch: compare(params, micro_batch)[0], batch)
            worst = partial(preferences.worst_case_weights, radius=config.robust_radius)
            batch = replace(batch, weights={"preference": jax.vmap(worst)(losses, weights)})
        return batch, state

    def compare(params: Params, batch: Batch) -> tuple[Array, preferences.Pair]:
        """([R, S] losses, the implicit rewards of the pair), at every token of a pair."""
        log_probs = token_log_probs(roles["policy"], params, batch.rows).log_probs

        def of_pairs(values: Array) -> preferences.Pair:
            return preferences.of_pairs(values, batch.action_mask, batch.preferred, batch.rows.segment_ids)

        pair = of_pairs(log_probs - batch.reference_log_probs if kind.reference else log_probs)
        lengths = of_pairs(jnp.ones_like(log_probs))
        if kind.averaged:
            pair = preferences.Pair(*(s / jnp.maximum(n, 1.0) for s, n in zip(pair, lengths, strict=True)))
        scores = (preferences.divergence_score(s, config.f_divergence, config.f_alpha) for s in pair)
        losses = loss_of(*scores)
        losses -= config.rpo_coef * of_pairs(log_probs).chosen / jnp.maximum(lengths.chosen, 1.0)
        return losses, preferences.Pair(config.beta * pair.chosen, config.beta * pair.rejected)

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        losses, rewards = compare(params, batch)
        weights = batch.weights["preference"]
        value = masked.total(weights * losses, weights > 0)
        return value, {"preference/loss": Sum(value, weights.sum())} | preferences.metrics(*rewards, batch.is_pair)

    def init_state(params: Params) -> Array:
        del params
        return jnp.zeros((), jnp.int32)

    def after_update(params: Params, state: Array, metrics: dict[str, Array]) -> tuple[Params, Array]:
        del metrics
        due = (state + 1) % config.reference_every == 0
        mix = jnp.where(due, config.reference_mix, 0.0)
        moved = jax.tree.map(lambda old, new: (1 - mix) * old + mix * new, params["reference"], params["policy"])
        return params | {"reference": moved}, state + 1

    return (
        Algorithm(make_batch, loss, init_state, after_update) if config.reference_mix else Algorithm(make_batch, loss)
    )
