"""Direct preference optimization (DPO, arXiv 2305.18290) and its relatives: learn from which of two
completions is better, without a reward.

    s    = sum_t log policy(y_t | x, y_<t) - log reference(y_t | x, y_<t)     for each completion
    loss = mean over pairs of -log sigmoid(beta (s_chosen - s_rejected))

The minimum is the optimum of E[r] - beta KL(policy || reference) for the reward r that explains the
preferences. The relatives take another function of the two scores (`preference.PAIR_LOSSES`),
a weighted sum of such functions (MPO, arXiv 2411.10442), another divergence, worst-case weights of
the pairs, or a reference that follows the policy. CPO (arXiv 2401.08417) has no reference and adds
the chosen completion's likelihood: `reference_free` and `rpo_coef`. Log-probs are at temperature 1.

    WPO   x w(chosen) w(rejected),  w = exp mean_t [log policy(y_t) - log sum_v policy(v)^2]
                                                                    arXiv 2406.11827, equation 2
    XPO   + optimism_coef sum_t log policy(y_t) of the reference's completion, where each pair is a
          completion of the policy and one of the reference           arXiv 2405.21046, algorithm 1
    AOT   the k-th smallest scores of the step are compared, in place of those of a pair
                                                                    arXiv 2406.05882

Deviations: XPO's pairs whose rewards are equal are left out, its term included; TRL prefers the
policy's completion there. AOT finds the ranks, and the scores of partners, before the first update
of a batch, and over the whole optimizer step. TRL ranks the pairs of a micro-batch. Its CPO takes
the likelihood over all chosen tokens of the batch; ours is per pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from tpu_rl.algorithm_spec import ExperienceSpec, Opponent, RoleSpec, pairs_from
from tpu_rl.errors import InputError
from tpu_rl.losses import masked, preference, robust
from tpu_rl.losses.controllers import moving_reference
from tpu_rl.losses.log_probs import (
    frozen_log_probs,
    log_collision,
    log_probs_of_hidden,
    token_log_probs,
)
from tpu_rl.losses.robust import RobustSettings
from tpu_rl.losses.shapes import FloatRS
from tpu_rl.ranges import Conflicts, Count, NotNegative, Positive, ReadOnlyWith, Share
from tpu_rl.train import packing
from tpu_rl.types import (
    Algorithm,
    Array,
    Experience,
    Metrics,
    PackedRows,
    Pairs,
    Params,
    Role,
    Roles,
    Sampling,
    Sum,
)


@dataclass(frozen=True)
class DpoConfig(RobustSettings):
    """The default is DPO itself."""

    loss: preference.PairLossName = "sigmoid"
    """Loss of a pair; see `tpu_rl/losses/preference.py`."""
    loss_weight: Positive = 1.0
    """Weight of that loss in a sum with `further_losses`."""
    further_losses: tuple[str, ...] = ()
    """Losses that are added, each as WEIGHT*NAME. MPO: 0.8 sigmoid, 0.2*bco_pair, rpo_coef 1."""
    beta: Positive = 0.1
    """Reward per nat of log-ratio. For orpo, the coefficient of the odds term."""
    label_smoothing: float = 0.0
    """Probability that a label is wrong, for sigmoid (conservative DPO), sigmoid_norm, robust and
    exo."""
    reference_free: bool = False
    """Compare log-probs of the policy alone, as CPO does."""
    tail_weight: Share = 1.0
    """Weight of the tokens that a completion has beyond the length of the shorter one (LD-DPO's
    alpha)."""
    weigh_by_policy: bool = False
    """Weigh each pair by how likely the policy itself is to write it (WPO)."""
    f_divergence: Annotated[
        preference.Divergence,
        Conflicts("reference_free", why="there is no reference from which it could measure"),
    ] = "reverse_kl"
    """Divergence from the reference that the policy is penalized by."""
    rpo_coef: NotNegative = 0.0
    """Coefficient of the chosen completion's negative log-likelihood per token, added to the loss
    (RPO, arXiv 2404.19733)."""
    reverse: bool = False
    """Prefer the rejected completion: the result is the opposite policy (contrastive
    distillation)."""
    pairs: Literal["given", "reference", "policy", "policy_and_reference"] = "given"
    """given: the data file has pairs. reference, policy: completions are sampled from that model
    and compared by --reward; policy is online DPO. policy_and_reference: half of a prompt's
    completions are the policy's and half the reference's, and each is compared with one of the
    others."""
    optimism_coef: Annotated[
        NotNegative,
        ReadOnlyWith("pairs", "policy_and_reference", why="only these tell whose completion it is"),
    ] = 0.0
    """Coefficient of the log-likelihood of the reference's completions in the loss, for
    policy_and_reference: XPO's alpha. It makes the policy explore what the reference does not
    write; 1e-5 is usual."""
    reference_mix: Share = 0.0
    """Share by which the reference moves to the policy: 0 keeps it, 1 resets it (TR-DPO, arXiv
    2404.09656)."""
    reference_every: Count = 64
    """Optimizer steps between two such moves."""

    def __post_init__(self):
        super().__post_init__()
        field, problem = self._problem()
        if problem:
            flag = field.replace("_", "-")
            raise InputError(problem, where=f"--algorithm.{flag}", fix="see --help-all")

    def _problem(self) -> tuple[str, str]:
        """Find the field at fault in a conflict between settings, and the conflict, or ""."""
        if self.reference_mix > 0 and self.reference == "none":
            return "reference_mix", f"{self.loss} has no reference that could move"
        names = self.weights
        if any(not math.isfinite(weight) or weight <= 0 for weight in names.values()):
            return "further_losses", f"a weight of the losses is not above 0: {names}"
        matched = [name for name in names if preference.PAIR_LOSSES[name].matched]
        weighing = {
            "weigh_by_policy": self.weigh_by_policy,
            "robust_radius": self.robust_radius,
            "further_losses": len(names) > 1,
        }
        for field, is_set in weighing.items():
            if matched and is_set:
                no_pairs = "compares no pairs, so it has no weights of pairs and is no term"
                return field, f"{matched[0]} {no_pairs}"
        if matched and self.reference_free:
            return "reference_free", f"{matched[0]} needs a reference"
        # Label smoothing is for the losses of a sum that know it.
        knowing = [name for name in names if preference.PAIR_LOSSES[name].smooths]
        for name in names:
            smoothing = self.label_smoothing if name in knowing or not knowing else 0.0
            field, problem = preference.conflict(name, smoothing, self.f_divergence)
            if problem:
                return field, problem
        return "", ""

    @property
    def weights(self) -> dict[str, float]:
        """Weights of the losses by name.

        Raises:
          InputError: if a further loss is not WEIGHT*NAME, or is there already.
        """
        weights: dict[str, float] = {self.loss: self.loss_weight}
        for text in self.further_losses:
            weight, _, name = text.partition("*")
            if name not in preference.PAIR_LOSSES or name in weights or not _is_number(weight):
                raise InputError(
                    f"{text!r} is no further loss",
                    where="--algorithm.further-losses",
                    why="a further loss is WEIGHT*NAME, and each name stands once",
                    fix=f'as in "0.2*bco_pair"; names: {", ".join(preference.PAIR_LOSSES)}',
                )
            weights[name] = float(weight)
        return weights

    @property
    def experience(self) -> ExperienceSpec:
        if self.pairs == "policy_and_reference":
            return pairs_from("policy")._replace(opponent=Opponent(reference_share=1.0))
        return pairs_from(self.pairs, reference_log_probs=self.reference == "data")

    @property
    def reference(self) -> Literal["none", "data", "role"]:
        """Source of the reference's log-probs: the pairs, or a model that computes them for each
        batch."""
        uses = any(preference.PAIR_LOSSES[name].reference for name in self.weights)
        if self.reference_free or not uses:
            return "none"
        is_sampled = self.pairs in ("policy", "policy_and_reference")
        return "role" if is_sampled or self.reference_mix else "data"

    @property
    def roles(self) -> dict[str, RoleSpec]:
        roles = {"policy": RoleSpec(trainable=True)}
        # The reference's log-probs of pairs from a file are computed once, and it is not kept.
        if self.reference == "role" or self.pairs in ("reference", "policy_and_reference"):
            roles["reference"] = RoleSpec(trainable=False, tracks_policy=self.reference_mix)
        return roles


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@struct.dataclass
class Batch:
    """Leaves are [M, K, R, S]; the loss sees [R, S]."""

    rows: PackedRows
    weights: dict[str, Array]
    """"preference": the weight of each pair, on one of its tokens."""
    action_mask: Array
    preferred: Array
    """bool: True if the token's completion is the preferred one."""
    is_pair: Array
    """bool: True where a pair's weight is, even if the worst case took the weight away."""
    reference_log_probs: Array
    token_weights: Array | None = None
    """Weight of each token in the scores; None: all the same."""
    by_reference: Array | None = None
    """bool: True if the token's completion is the reference's; None without optimism."""
    matched: preference.Pair | None = None
    """The scores that a pair's scores are compared with, if not with each other."""


class LossTerm(NamedTuple):
    """A term of the loss of a pair."""

    weight: float
    loss: preference.PairLoss
    function: Callable[[Array, Array], Array]
    """(chosen, rejected) scores -> losses, with the options of the configuration."""


def loss_terms(config: DpoConfig) -> list[LossTerm]:
    """List the terms of the loss, `config.loss` first."""
    terms = []
    for name, weight in config.weights.items():
        loss = preference.PAIR_LOSSES[name]
        options = {"label_smoothing": config.label_smoothing} if loss.smooths else {}
        function = partial(loss.function, beta=config.beta, **options)
        terms.append(LossTerm(weight, loss, function))
    return terms


def scores_of_pairs(batch: Batch, values: FloatRS, averaged: bool) -> preference.Pair:
    """Sum (or average) values of tokens [R, S] over the completions of each pair."""
    ids = batch.rows.segment_ids
    return preference.pair_scores(values, batch.action_mask, batch.preferred, ids, averaged)


def weighed(batch: Batch, values: FloatRS) -> FloatRS:
    """Multiply values of tokens [R, S] by `Batch.token_weights`."""
    return values if batch.token_weights is None else batch.token_weights * values


def compared_scores(
    matched: str | None,
    policy: Role,
    params: Params,
    batch: Batch,
    log_probs: FloatRS | None = None,
) -> preference.Pair:
    """Compute the scores that a loss compares by rank [R, S], at every token of a pair.

    They are log-ratios of the completions, or differences within the pair of policy and reference.
    """
    if log_probs is None:
        log_probs = token_log_probs(policy, params, batch.rows).log_probs
    own = scores_of_pairs(batch, weighed(batch, log_probs), averaged=False)
    reference_log_probs = weighed(batch, batch.reference_log_probs)
    reference = scores_of_pairs(batch, reference_log_probs, averaged=False)
    if matched == "completions":
        return preference.Pair(own.chosen - reference.chosen, own.rejected - reference.rejected)
    return preference.Pair(own.chosen - own.rejected, reference.chosen - reference.rejected)


def compared_pairs(
    config: DpoConfig, terms: list[LossTerm], policy: Role, params: Params, batch: Batch
) -> tuple[FloatRS, preference.Pair]:
    """Compute the losses [R, S] and the implicit rewards, at every token of a pair."""
    hidden = policy.hidden(params, batch.rows)
    log_probs = log_probs_of_hidden(policy, params, hidden, batch.rows).log_probs

    def scores_of(pair_loss: preference.PairLoss) -> preference.Pair:
        relative = pair_loss.reference and not config.reference_free
        values = log_probs - batch.reference_log_probs if relative else log_probs
        return scores_of_pairs(batch, weighed(batch, values), pair_loss.averaged)

    def divergence_score(score: Array) -> Array:
        return preference.divergence_score(score, config.f_divergence)

    # The weighted sum of the losses of a pair.
    losses = jnp.zeros_like(log_probs)
    for weight, pair_loss, function in terms:
        if batch.matched is not None:
            scores = compared_scores(pair_loss.matched, policy, params, batch, log_probs)
            losses += weight * preference.matched_loss(function, scores, batch.matched)
            continue
        scores = scores_of(pair_loss)
        chosen = divergence_score(scores.chosen)
        losses += weight * function(chosen, divergence_score(scores.rejected))
    # WPO's weight, held constant; then the likelihoods of the chosen, and of the reference's own.
    if config.weigh_by_policy:
        collision = log_collision(policy, params, hidden, batch.rows)
        likely = scores_of_pairs(batch, jax.lax.stop_gradient(log_probs) - collision, averaged=True)
        losses *= jnp.exp(likely.chosen + likely.rejected)
    losses -= config.rpo_coef * scores_of_pairs(batch, log_probs, averaged=True).chosen
    if batch.by_reference is not None:
        sums = preference.pair_scores(
            log_probs, batch.action_mask, batch.by_reference, batch.rows.segment_ids
        )
        losses += config.optimism_coef * sums.chosen
    scores = scores_of(terms[0].loss)
    return losses, preference.Pair(config.beta * scores.chosen, config.beta * scores.rejected)


def dpo(config: DpoConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build DPO. It learns from Pairs. Its state counts the updates if the reference moves."""
    terms = loss_terms(config)
    matched = terms[0].loss.matched
    scores_by_rank = partial(compared_scores, matched, roles["policy"])
    compare = partial(compared_pairs, config, terms, roles["policy"])

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
        if config.optimism_coef:
            is_second = jnp.append(False, pairs.group_id[1:] == pairs.group_id[:-1])
            by_reference = layout.pack(jnp.broadcast_to(is_second[:, None], mask.shape))
            batch = replace(batch, by_reference=by_reference)
        if config.tail_weight != 1:
            of_tokens = preference.tail_weights(mask, pairs.group_id, config.tail_weight)
            batch = replace(batch, token_weights=layout.pack(of_tokens))
        if matched:
            scores = packing.over_micro_batches(partial(scores_by_rank, params), batch)
            batch = replace(batch, matched=preference.match_by_rank(scores, batch.is_pair))
        if config.robust_radius:
            losses = packing.over_micro_batches(
                lambda micro_batch: compare(params, micro_batch)[0], batch
            )
            worst = robust.worst_case_by_step(
                losses, weights, config.robust_radius, config.robust_ball
            )
            batch = replace(batch, weights={"preference": worst})
        return batch, state

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        losses, rewards = compare(params, batch)
        weights = batch.weights["preference"]
        value = masked.total(weights * losses, weights > 0)
        metrics = preference.pair_metrics(
            rewards.chosen, rewards.rejected, batch.is_pair.astype(jnp.float32)
        )
        metrics["preference/loss"] = Sum(value, weights.sum())
        return value, metrics

    algorithm = Algorithm(make_batch, loss, stops_gradient=config.weigh_by_policy or bool(matched))
    if not config.reference_mix:
        return algorithm
    init_state, after_update = moving_reference(config.reference_every, config.reference_mix)
    return algorithm._replace(init_state=init_state, after_update=after_update)
