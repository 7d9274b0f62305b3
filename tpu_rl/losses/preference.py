"""Losses of preferences: two completions that were compared, or one that was judged good or bad.

Every loss is a function of scores s. For DPO and its relatives, s is the sum over the completion's
tokens of log policy(y|x) - log reference(y|x), and beta s is the implicit reward (arXiv 2305.18290,
section 4). "Averaged" means divided by the completion's length in tokens; "without a reference"
means log policy(y|x) only. For a reward model, s is the reward. `chosen` and `rejected` are the
scores of the two completions of a pair, arrays of one shape [...], and every loss has that shape
too. It is smallest where chosen is far above rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from tpu_rl.losses import masked
from tpu_rl.losses.advantages import dense_ids
from tpu_rl.losses.shapes import (
    BoolN,
    BoolNT,
    BoolRS,
    Bools,
    FloatNT,
    FloatRS,
    Floats,
    IntN,
    IntNT,
    IntRS,
)
from tpu_rl.types import Array, Metrics

Divergence = Literal["reverse_kl", "forward_kl", "js", "alpha"]

LARGEST_EXPONENT = 80.0
"""exp of more than this overflows float32."""


# --- pairs in packed rows ---


class Pair(NamedTuple):
    """A quantity of the two completions of a pair."""

    chosen: Array
    rejected: Array


def pair_scores(
    values: FloatRS,
    action_mask: BoolRS,
    preferred: BoolRS,
    segment_ids: IntRS,
    averaged: bool = False,
) -> Pair:
    """Sum or average `values` over the chosen and over the rejected completion of each pair.

    A pair stands in one segment as a whole (`packing.assign_slots` with whole groups).

    Args:
      action_mask: [R, S] bool, the tokens to sum over.
      preferred: [R, S] bool, True if the token's completion is the preferred one.
      segment_ids: [R, S], as in `types.PackedRows`.
      averaged: whether to divide by the number of tokens.

    Returns:
      Two arrays [R, S]. Every token of a pair holds the pair's scores; padding holds zero.
    """

    def total(values: Array | float, side: Array) -> Array:
        return masked.sequence_total(jnp.where(action_mask & side, values, 0.0), segment_ids)

    def score(side: Array) -> Array:
        if not averaged:
            return total(values, side)
        return total(values, side) / jnp.maximum(total(1.0, side), 1.0)

    return Pair(score(preferred), score(~preferred))


def pair_weights(
    action_mask: BoolNT, preferred: BoolN, group_id: IntN, minibatch: IntN, minibatches: int
) -> FloatNT:
    """Weigh every pair alike: 1 / number of pairs of the optimizer step.

    A group that lacks its better or its worse completion, or in which one of them is empty, is no
    pair and counts nothing.

    Args:
      minibatch: [N], as in `types.Layout`.
      minibatches: number of optimizer steps.

    Returns:
      [N, T], zero except on the first action of each pair's preferred completion.
    """
    exists = action_mask.any(-1)
    # Group ids may be of any size; segments are below N.
    segment = dense_ids(group_id)

    def in_group(rows: Array) -> Array:
        counts = jax.ops.segment_max(rows.astype(jnp.int32), segment, num_segments=len(segment))
        return counts[segment] > 0

    is_pair = in_group(exists & preferred) & in_group(exists & ~preferred)
    first = _first_action(action_mask) & (preferred & is_pair)[:, None]
    return masked.token_mean(first, minibatch, minibatches)


def completion_weights(action_mask: BoolNT, minibatch: IntN, minibatches: int) -> FloatNT:
    """Weigh every completion alike: 1 / number of completions of the optimizer step.

    Returns [N, T], zero except on the first action of each completion. For completions that are
    judged one by one.
    """
    return masked.token_mean(_first_action(action_mask), minibatch, minibatches)


def _first_action(action_mask: Array) -> Array:
    return action_mask & (jnp.cumsum(action_mask, axis=-1) == 1)


def pair_metrics(chosen: Floats, rejected: Floats, weights: Floats) -> Metrics:
    """Compute the metrics of pairs with these rewards; a tie is half right. All arrays are [R, S].

    Slots with weight zero count nothing.
    """
    right = (chosen > rejected) + 0.5 * (chosen == rejected)
    return {
        "preference/accuracy": masked.weighted_average(right, weights),
        "preference/margin": masked.weighted_average(chosen - rejected, weights),
        "preference/chosen": masked.weighted_average(chosen, weights),
        "preference/rejected": masked.weighted_average(rejected, weights),
    }


# --- losses of a pair ---


def sigmoid(chosen: Floats, rejected: Floats, beta: float, label_smoothing: float = 0.0) -> Floats:
    """Compute -(1 - e) log sigmoid(d) - e log sigmoid(-d) with d = beta (chosen - rejected).

    DPO (arXiv 2305.18290, equation 7). With e > 0 it is conservative DPO (E. Mitchell, 2023), for
    labels that are wrong with probability e. With averaged s it is the length-normalized DPO of
    Tulu 3 (arXiv 2411.15124).
    """
    logits = beta * (chosen - rejected)
    right = jax.nn.log_sigmoid(logits)
    flipped = jax.nn.log_sigmoid(-logits)
    return -(1 - label_smoothing) * right - label_smoothing * flipped


def robust(chosen: Floats, rejected: Floats, beta: float, label_smoothing: float) -> Floats:
    """Compute [-(1 - e) log sigmoid(d) + e log sigmoid(-d)] / (1 - 2 e) with d = beta (chosen -
    rejected).

    If a share e < 1/2 of the labels is flipped, its expectation is the DPO loss of the clean labels
    (robust DPO, arXiv 2403.00409).
    """
    logits = beta * (chosen - rejected)
    right = jax.nn.log_sigmoid(logits)
    flipped = jax.nn.log_sigmoid(-logits)
    return (-(1 - label_smoothing) * right + label_smoothing * flipped) / (1 - 2 * label_smoothing)


def ipo(chosen: Floats, rejected: Floats, beta: float) -> Floats:
    """Compute (chosen - rejected - 1 / (2 beta))^2, for averaged s (IPO, arXiv 2310.12036, eq. 17).

    The margin has a target and does not grow without bound. The paper's authors confirmed to
    implementers that s is averaged.
    """
    return jnp.square(chosen - rejected - 1 / (2 * beta))


def hinge(chosen: Floats, rejected: Floats, beta: float) -> Floats:
    """Compute max(0, 1 - beta (chosen - rejected)) (SLiC, arXiv 2305.10425, with DPO's s)."""
    return jax.nn.relu(1 - beta * (chosen - rejected))


def simpo(chosen: Floats, rejected: Floats, beta: float) -> Floats:
    """Compute -log sigmoid(beta (chosen - rejected) - 0.5), for averaged s without a reference
    (SimPO, arXiv 2405.14734, equation 6)."""
    return -jax.nn.log_sigmoid(beta * (chosen - rejected) - 0.5)


def alphapo(chosen: Floats, rejected: Floats, beta: float) -> Floats:
    """Compute `simpo` of the rewards (1 - p^-1/4) / (1/4) in place of log p, where p = e^s, so that
    a small p costs more (AlphaPO, arXiv 2501.03884, equation 7)."""

    def reward(score: Array) -> Array:
        return -jnp.expm1(jnp.minimum(-0.25 * score, LARGEST_EXPONENT)) / 0.25

    return simpo(reward(chosen), reward(rejected), beta)


def exo(chosen: Floats, rejected: Floats, beta: float, label_smoothing: float) -> Floats:
    """Compute q log(q / (1 - e)) + (1 - q) log((1 - q) / e) with q = sigmoid(beta (chosen -
    rejected)).

    This is KL(model || labels) over the two completions, where the labels are (1 - e, e): the
    reverse of DPO's direction (EXO, arXiv 2402.00856). e must be above zero.
    """
    logits = beta * (chosen - rejected)
    log_q = jax.nn.log_sigmoid(logits)
    log_not_q = jax.nn.log_sigmoid(-logits)
    first = jnp.exp(log_q) * (log_q - jnp.log1p(-label_smoothing))
    return first + jnp.exp(log_not_q) * (log_not_q - jnp.log(label_smoothing))


def apo_zero(chosen: Floats, rejected: Floats, beta: float) -> Floats:
    """Compute 1 - sigmoid(beta chosen) + sigmoid(beta rejected) (APO-zero, arXiv 2408.06266).

    It raises chosen and lowers rejected.
    """
    return jax.nn.sigmoid(-beta * chosen) + jax.nn.sigmoid(beta * rejected)


def apo_down(chosen: Floats, rejected: Floats, beta: float) -> Floats:
    """Compute sigmoid(beta chosen) + 1 - sigmoid(beta (chosen - rejected)) (APO-down, arXiv
    2408.06266).

    It lowers both, and rejected more: for a policy that is better than the chosen completions.
    """
    return jax.nn.sigmoid(beta * chosen) + jax.nn.sigmoid(-beta * (chosen - rejected))


def nca(chosen: Floats, rejected: Floats, beta: float) -> Floats:
    """Compute -log sigmoid(beta chosen) - 1/2 log sigmoid(-beta chosen) - 1/2 log sigmoid(-beta
    rejected).

    Noise-contrastive alignment with two completions (NCA, arXiv 2402.05369). The likelihood of the
    chosen one does not fall, as it may under DPO.
    """
    away = jax.nn.log_sigmoid(-beta * chosen) + jax.nn.log_sigmoid(-beta * rejected)
    return -jax.nn.log_sigmoid(beta * chosen) - 0.5 * away


def sppo(chosen: Floats, rejected: Floats, beta: float) -> Floats:
    """Compute (chosen - 1 / (2 beta))^2 + (rejected + 1 / (2 beta))^2 (SPPO with hard labels, arXiv
    2405.00675)."""
    return jnp.square(chosen - 0.5 / beta) + jnp.square(rejected + 0.5 / beta)


def bco_pair(chosen: Floats, rejected: Floats, beta: float) -> Floats:
    """Compute -log sigmoid(beta chosen) - log sigmoid(-beta rejected).

    The pair as two judged completions of BCO (arXiv 2404.04656), without its baseline: TRL's
    bco_pair, and the quality term of MPO (arXiv 2411.10442).
    """
    return -jax.nn.log_sigmoid(beta * chosen) - jax.nn.log_sigmoid(-beta * rejected)


def discopop(chosen: Floats, rejected: Floats, beta: float, temperature: float = 0.05) -> Floats:
    """Compute (1 - g) log(1 + e^-d) + g e^-d with d = beta (chosen - rejected) and g = sigmoid(d /
    temperature).

    The log-ratio modulated loss, which was found by search (DiscoPOP, arXiv 2406.08414). It is
    logistic where the pair is wrong and exponential where it is right.
    """
    logits = beta * (chosen - rejected)
    gate = jax.nn.sigmoid(logits / temperature)
    # Where the gate is zero, the exponential may be infinite, and their product would be NaN.
    exponential = jnp.exp(-jnp.maximum(logits, -LARGEST_EXPONENT))
    return -(1 - gate) * jax.nn.log_sigmoid(logits) + gate * exponential


def orpo(chosen: Floats, rejected: Floats, beta: float) -> Floats:
    """Compute -chosen - beta log sigmoid(log odds(chosen) - log odds(rejected)), for averaged s
    without a reference (ORPO, arXiv 2403.07691, equation 6).

    odds = p / (1 - p), where p = e^s is the geometric mean of the token probabilities. The first
    term is the negative log-likelihood of the chosen completion, so no supervised training is
    needed first.
    """
    log_odds = chosen - rejected - (_log1mexp(chosen) - _log1mexp(rejected))
    return -chosen - beta * jax.nn.log_sigmoid(log_odds)


def _log1mexp(x: Array) -> Array:
    """Compute log(1 - e^x) for x < 0, without loss of digits near either end.

    M. Maechler, "Accurately computing log(1 - exp(-|a|))", 2012. x is kept a little below zero,
    where the odds would be infinite.
    """
    x = jnp.minimum(x, -1e-6)
    near_zero = x > -0.6931472
    return jnp.where(
        near_zero,
        jnp.log(-jnp.expm1(jnp.where(near_zero, x, -1.0))),
        jnp.log1p(-jnp.exp(jnp.where(near_zero, -1.0, x))),
    )


def bradley_terry(
    chosen: Floats, rejected: Floats, margin: Array | float = 0.0, centering: float = 0.0
) -> Floats:
    """Compute -log sigmoid(chosen - rejected - margin) + centering (chosen + rejected)^2.

    The scores are rewards. The first term is the negative log-likelihood that chosen wins (Bradley
    and Terry, Biometrika 39, 1952) by a margin that the data give (Llama 2, arXiv 2307.09288,
    equation 2). Comparisons leave a constant free; the second term holds it near zero (arXiv
    2312.09244, equation 2).
    """
    comparison = -jax.nn.log_sigmoid(chosen - rejected - margin)
    return comparison + centering * jnp.square(chosen + rejected)


class PairLoss(NamedTuple):
    """A loss of a pair, and the scores that it takes."""

    function: Callable[..., Array]
    """(chosen, rejected, beta=) -> losses."""
    smooths: bool = False
    """The function has an argument `label_smoothing`, too."""
    averaged: bool = False
    """s is divided by the completion's length."""
    reference: bool = True
    """s is relative to a reference."""
    difference: bool = False
    """The loss depends on chosen - rejected of sums only, so `divergence_score` may replace s."""
    matched: Literal["", "differences", "completions"] = ""
    """Scores that the loss compares by rank and not within a pair (`match_by_rank`): the policy's
    differences chosen - rejected with the reference's, or chosen with rejected completions."""


PairLossName = Literal[
    "sigmoid",
    "sigmoid_norm",
    "robust",
    "exo",
    "hinge",
    "discopop",
    "ipo",
    "apo_zero",
    "apo_down",
    "nca",
    "sppo",
    "simpo",
    "alphapo",
    "orpo",
    "bco_pair",
    "aot",
    "aot_unpaired",
]
PAIR_LOSSES: Mapping[str, PairLoss] = {
    "sigmoid": PairLoss(sigmoid, smooths=True, difference=True),
    "sigmoid_norm": PairLoss(sigmoid, smooths=True, averaged=True),
    "robust": PairLoss(robust, smooths=True, difference=True),
    "exo": PairLoss(exo, smooths=True, difference=True),
    "hinge": PairLoss(hinge, difference=True),
    "discopop": PairLoss(discopop, difference=True),
    "ipo": PairLoss(ipo, averaged=True),
    "apo_zero": PairLoss(apo_zero),
    "apo_down": PairLoss(apo_down),
    "nca": PairLoss(nca),
    "sppo": PairLoss(sppo),
    "simpo": PairLoss(simpo, averaged=True, reference=False),
    "alphapo": PairLoss(alphapo, averaged=True, reference=False),
    "orpo": PairLoss(orpo, averaged=True, reference=False),
    "bco_pair": PairLoss(bco_pair),
    "aot": PairLoss(sigmoid, smooths=True, matched="differences"),
    "aot_unpaired": PairLoss(sigmoid, smooths=True, matched="completions"),
}


def conflict(name: str, label_smoothing: float, divergence: Divergence) -> tuple[str, str]:
    """Find the setting at fault and why the settings do not go together; ("", "") if they do."""
    loss = PAIR_LOSSES[name]
    if not 0 <= label_smoothing < 0.5:
        return "label_smoothing", f"label smoothing {label_smoothing} is not in [0, 0.5)"
    if label_smoothing > 0 and not loss.smooths:
        return "label_smoothing", f"{name} has no label smoothing"
    if name == "exo" and label_smoothing == 0:
        return "label_smoothing", f"{name} needs label smoothing above 0"
    if divergence != "reverse_kl" and not loss.difference:
        return "f_divergence", f"{name} is defined for the reverse KL only"
    return "", ""


# --- pairs across a step ---


def match_by_rank(scores: Pair, is_pair: Bools) -> Pair:
    """Match the k-th smallest chosen score of each optimizer step with its k-th smallest rejected
    one (alignment by optimal transport, AOT, arXiv 2406.05882).

    Args:
      scores: two arrays [M, ...].
      is_pair: bool [M, ...], True at one token of each pair.

    Returns:
      Constants [M, ...]: for each pair the chosen score that its rejected one is compared with, and
      the rejected score that its chosen one is compared with. Zero where `is_pair` is False.
    """

    def partners(values: Array, others: Array, exists: Array) -> Array:
        exists = exists.reshape(-1)
        rank = jnp.argsort(jnp.argsort(jnp.where(exists, values.reshape(-1), jnp.inf)))
        in_order = jnp.sort(jnp.where(exists, others.reshape(-1), jnp.inf))
        return jnp.where(exists, in_order[rank], 0.0).reshape(values.shape)

    by_step = jax.vmap(partners)
    matched = Pair(
        by_step(scores.rejected, scores.chosen, is_pair),
        by_step(scores.chosen, scores.rejected, is_pair),
    )
    return jax.lax.stop_gradient(matched)


def matched_loss(function: Callable[[Array, Array], Array], scores: Pair, matched: Pair) -> Array:
    """Compute the loss of matched scores, shared between the pairs that they come from.

    Its sum over the pairs is that of function(k-th chosen, k-th rejected), and so is its gradient.
    Each pair reads the other's score as a constant, so pairs may be in any micro-batch.
    """
    losses = function(scores.chosen, matched.rejected) + function(matched.chosen, scores.rejected)
    return losses - 0.5 * jax.lax.stop_gradient(losses)


def tail_weights(action_mask: BoolNT, group_id: IntN, tail_weight: float) -> FloatNT:
    """Weigh the tokens that a completion has beyond the length of the pair's shorter one, [N, T].

    The others count 1 (length-desensitized DPO, arXiv 2409.06411, equation 8; TRL's `ld_alpha`).

    Args:
      tail_weight: weight of the further tokens, from 0 to 1; 1 is DPO.
    """
    lengths = action_mask.sum(-1)
    segment = dense_ids(group_id)
    shorter = jax.ops.segment_min(lengths, segment, num_segments=len(segment))[segment]
    is_tail = jnp.cumsum(action_mask, axis=-1) > shorter[:, None]
    return jnp.where(is_tail, tail_weight, 1.0)


# --- losses of one completion ---
#
# `preferred` [...] bool: the completion was judged good. `baseline`: the score of a completion that
# is neither good nor bad.


def kto(score: Floats, preferred: Bools, baseline: Floats | float, beta: float) -> Floats:
    """Compute 1 - sigmoid(beta (s - baseline)) for a good completion and 1 - sigmoid(beta (baseline
    - s)) for a bad one (KTO, arXiv 2402.01306).

    The baseline is KL(policy || reference), estimated on completions of other prompts, never below
    zero, and a constant to gradients.
    """
    return jax.nn.sigmoid(-_signed_reward(score, preferred, baseline, beta))


def bco(score: Floats, preferred: Bools, baseline: Floats | float, beta: float) -> Floats:
    """Compute -log sigmoid(beta (s - baseline)) for a good completion and -log sigmoid(beta
    (baseline - s)) for a bad one (BCO, arXiv 2404.04656).

    This is a binary classifier whose logit is the reward. The baseline is the running mean of s
    over good and bad completions, delta / beta of the paper.
    """
    return -jax.nn.log_sigmoid(_signed_reward(score, preferred, baseline, beta))


def _signed_reward(score: Array, preferred: Array, baseline: Array | float, beta: float) -> Array:
    """Compute the reward relative to the baseline, negated for a bad completion."""
    return beta * (score - baseline) * jnp.where(preferred, 1.0, -1.0)


def mismatched_completions(
    tokens: IntNT, action_mask: BoolNT, group_id: IntN, length: int
) -> tuple[Array, Array]:
    """Join each row's prompt with the completion of the next group's first row.

    The next group is the one with the next larger id, and the first after the last, so the order of
    rows does not matter. Rows without actions stay without. KTO's baseline is estimated on these.

    Returns:
      Tokens and action mask, both [N, length]. What does not fit is cut off.
    """
    exists = action_mask.any(-1)
    key = jnp.where(exists, group_id, jnp.iinfo(jnp.int32).max)
    order = jnp.argsort(key)
    next_group = jnp.searchsorted(key[order], key, side="right") % jnp.maximum(exists.sum(), 1)
    partner = order[next_group]
    start = jnp.argmax(action_mask, axis=-1)
    # Tokens before the completion come from the row itself, the others from its partner.
    after = jnp.arange(length)[None, :] - start[:, None]
    row = jnp.where(after < 0, jnp.arange(len(tokens))[:, None], partner[:, None])
    column = jnp.where(after < 0, after + start[:, None], after + start[partner][:, None])
    inside = (column < tokens.shape[1]) & exists[:, None]
    column = jnp.minimum(column, tokens.shape[1] - 1)
    mixed_tokens = jnp.where(inside, tokens[row, column], 0)
    mixed_mask = inside & (after >= 0) & action_mask[row, column]
    return mixed_tokens, mixed_mask


# --- other divergences than the KL ---


def divergence_score(log_ratio: Floats, divergence: Divergence) -> Floats:
    """Compute f'(u) of the divergence f, up to a constant, given log u of u = policy / reference.

    With f in place of the reverse KL as the penalty, a policy is optimal for the reward beta f'(u)
    + constant (f-DPO, arXiv 2309.16240, theorem 1). f'(u) then replaces s in the losses above that
    depend on differences only.

        reverse_kl   log u
        forward_kl   1 - 1/u
        js           log(2u / (1 + u))
        alpha        2 - 2 / sqrt(u)                    half way between reverse and forward KL
    """
    match divergence:
        case "reverse_kl":
            return log_ratio
        case "forward_kl":
            return 1 - jnp.exp(jnp.minimum(-log_ratio, LARGEST_EXPONENT))
        case "js":
            return jnp.log(2.0) + jax.nn.log_sigmoid(log_ratio)
        case "alpha":
            return jnp.expm1(jnp.minimum(-0.5 * log_ratio, LARGEST_EXPONENT)) / -0.5
