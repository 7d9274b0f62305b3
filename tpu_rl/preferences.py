"""Losses of preferences: which of two completions is better, or whether one is good. For DPO's relatives and rewards.

Letters. s is what a model thinks of a completion. For DPO and its relatives it is a sum over the completion's tokens,
log policy(y|x) - log reference(y|x), whose beta-fold is the implicit reward (arXiv 2305.18290, section 4); "averaged"
means divided by the completion's length in tokens; "without a reference" means log policy(y|x). For a reward model it
is the reward. `chosen` and `rejected` are the s of the two completions of a pair, arrays of one shape [...]; every
loss has that shape too. Smallest loss: chosen far above rejected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from tpu_rl import masked
from tpu_rl.types import Array, Metrics, Sum

Divergence = Literal["reverse_kl", "forward_kl", "js", "alpha"]

LARGEST_EXPONENT = 80.0
"""exp of more is no float32."""


# --- pairs in packed rows ----------------------------------------------------------------------------------------


class Pair(NamedTuple):
    chosen: Array
    rejected: Array


def of_pairs(values: Array, action_mask: Array, preferred: Array, segment_ids: Array, averaged: bool = False) -> Pair:
    """Sums, or means, over the chosen and the rejected completion of each token's own pair: [R, S] -> two [R, S].

    `preferred` [R, S] bool says of each token whether its completion is; a pair stands in one segment, whole
    (`packing.lay_out` with whole_groups). Zero in padding.
    """

    def total(values: Array | float, side: Array) -> Array:
        return masked.sequence_total(jnp.where(action_mask & side, values, 0.0), segment_ids)

    def of(side: Array) -> Array:
        return total(values, side) / jnp.maximum(total(1.0, side), 1.0) if averaged else total(values, side)

    return Pair(of(preferred), of(~preferred))


def pair_weights(action_mask: Array, preferred: Array, group_id: Array, minibatch: Array, minibatches: int) -> Array:
    """[N, T] weights: 1 / pairs of the optimizer step on the first action of each pair's preferred completion.

    A group that lacks its better or its worse completion, or in which one of them is empty, is no pair and counts
    nothing. action_mask [N, T] bool, preferred [N] bool, group_id [N], minibatch [N] as in `types.Layout`.
    """
    exists = action_mask.any(-1)
    # Group ids may be of any size; segments are below N.
    segment = jnp.searchsorted(jnp.sort(group_id), group_id)

    def in_group(rows: Array) -> Array:
        return jax.ops.segment_max(rows.astype(jnp.int32), segment, num_segments=len(segment))[segment] > 0

    is_pair = in_group(exists & preferred) & in_group(exists & ~preferred)
    return masked.token_mean(_first_action(action_mask) & (preferred & is_pair)[:, None], minibatch, minibatches)


def completion_weights(action_mask: Array, minibatch: Array, minibatches: int) -> Array:
    """[N, T] weights: 1 / completions of the optimizer step on the first action of each: judged ones, not compared."""
    return masked.token_mean(_first_action(action_mask), minibatch, minibatches)


def bootstrap_counts(tokens: Array, action_mask: Array, group_id: Array, members: int) -> Array:
    """[N, members] float32: how often a pair stands in each member's resample of the pairs, alike for its two rows.

    Poisson(1), the online bootstrap, drawn from a number made of the pair's own tokens [N, T]: a pair counts the same
    in every epoch and after a resume.
    """
    seen = jnp.flip(jax.lax.cummax(jnp.flip(action_mask.astype(jnp.int32), 1), axis=1), 1) > 0
    columns = jnp.arange(1, tokens.shape[1] + 1, dtype=jnp.uint32)[None]
    mixed = (tokens.astype(jnp.uint32) + jnp.uint32(1)) * (columns * jnp.uint32(2654435761) ^ (columns << 7))
    own = jnp.where(seen, mixed, jnp.uint32(0)).sum(-1, dtype=jnp.uint32)
    same_pair = group_id[:, None] == group_id[None]
    of_pair = jnp.where(same_pair, own[None], jnp.uint32(0)).sum(-1, dtype=jnp.uint32)

    def draw(number: Array) -> Array:
        return jax.random.poisson(jax.random.fold_in(jax.random.key(0), number), 1.0, (members,))

    return jax.vmap(draw)(of_pair).astype(jnp.float32)


def _first_action(action_mask: Array) -> Array:
    return action_mask & (jnp.cumsum(action_mask, axis=-1) == 1)


def metrics(chosen: Array, rejected: Array, counted: Array) -> Metrics:
    """How pairs stand, from their rewards, where `counted`; a tie is half right. All [R, S]."""
    pairs = counted.sum().astype(jnp.float32)
    right = (chosen > rejected) + 0.5 * (chosen == rejected)
    return {
        f"preference/{name}": Sum(masked.total(values, counted), pairs)
        for name, values in (
            ("accuracy", right),
            ("margin", chosen - rejected),
            ("chosen", chosen),
            ("rejected", rejected),
        )
    }


# --- a pair compared ---------------------------------------------------------------------------------------------


def sigmoid(chosen: Array, rejected: Array, beta: float, label_smoothing: float = 0.0) -> Array:
    """-(1 - e) log sigmoid(beta (chosen - rejected)) - e log sigmoid(-beta (chosen - rejected)).

    DPO (arXiv 2305.18290, equation 7); with e > 0 conservative DPO (E. Mitchell, 2023), for labels wrong with
    probability e. Of averaged s it is the length-normalised DPO of Tulu 3 (arXiv 2411.15124).
    """
    logits = beta * (chosen - rejected)
    return -(1 - label_smoothing) * jax.nn.log_sigmoid(logits) - label_smoothing * jax.nn.log_sigmoid(-logits)


def robust(chosen: Array, rejected: Array, beta: float, label_smoothing: float) -> Array:
    """[-(1 - e) log sigmoid(d) + e log sigmoid(-d)] / (1 - 2 e), d = beta (chosen - rejected).

    Unbiased for the loss of clean labels where a share e < 1/2 of them is flipped (robust DPO, arXiv 2403.00409).
    """
    logits = beta * (chosen - rejected)
    right, flipped = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
    return (-(1 - label_smoothing) * right + label_smoothing * flipped) / (1 - 2 * label_smoothing)


def ipo(chosen: Array, rejected: Array, beta: float) -> Array:
    """(chosen - rejected - 1 / (2 beta))^2 of averaged s (arXiv 2310.12036, equation 17; averaging as its authors
    confirmed to implementers): the margin has a goal and does not grow for ever."""
    return jnp.square(chosen - rejected - 1 / (2 * beta))


def hinge(chosen: Array, rejected: Array, beta: float) -> Array:
    """max(0, 1 - beta (chosen - rejected)) (SLiC, arXiv 2305.10425, in DPO's parametrisation)."""
    return jax.nn.relu(1 - beta * (chosen - rejected))


def simpo(chosen: Array, rejected: Array, beta: float, margin: float) -> Array:
    """-log sigmoid(beta (chosen - rejected) - margin) of averaged s without a reference (arXiv 2405.14734, equation
    6)."""
    return -jax.nn.log_sigmoid(beta * (chosen - rejected) - margin)


def exo(chosen: Array, rejected: Array, beta: float, label_smoothing: float) -> Array:
    """KL(model || labels) over the two answers, where labels say (1 - e, e): the reverse of DPO's direction.

    q log(q / (1 - e)) + (1 - q) log((1 - q) / e), q = sigmoid(beta (chosen - rejected)) (EXO, arXiv
    2402.00856). e must be above zero.
    """
    logits = beta * (chosen - rejected)
    log_q, log_not_q = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
    first = jnp.exp(log_q) * (log_q - jnp.log1p(-label_smoothing))
    return first + jnp.exp(log_not_q) * (log_not_q - jnp.log(label_smoothing))


def apo_zero(chosen: Array, rejected: Array, beta: float) -> Array:
    """1 - sigmoid(beta chosen) + sigmoid(beta rejected): chosen up, rejected down (arXiv 2408.06266)."""
    return jax.nn.sigmoid(-beta * chosen) + jax.nn.sigmoid(beta * rejected)


def apo_down(chosen: Array, rejected: Array, beta: float) -> Array:
    """sigmoid(beta chosen) + 1 - sigmoid(beta (chosen - rejected)): both down, rejected more (arXiv 2408.06266): for a
    policy better than the chosen answers."""
    return jax.nn.sigmoid(beta * chosen) + jax.nn.sigmoid(-beta * (chosen - rejected))


def nca(chosen: Array, rejected: Array, beta: float) -> Array:
    """-log sigmoid(beta chosen) - 1/2 log sigmoid(-beta chosen) - 1/2 log sigmoid(-beta rejected).

    Noise-contrastive alignment with two answers (NCA, arXiv 2402.05369): the chosen one's likelihood does not
    fall, as it may under DPO.
    """
    away = jax.nn.log_sigmoid(-beta * chosen) + jax.nn.log_sigmoid(-beta * rejected)
    return -jax.nn.log_sigmoid(beta * chosen) - 0.5 * away


def sppo(chosen: Array, rejected: Array, beta: float) -> Array:
    """(chosen - 1/(2 beta))^2 + (rejected + 1/(2 beta))^2 (SPPO, arXiv 2405.00675, with hard labels)."""
    return jnp.square(chosen - 0.5 / beta) + jnp.square(rejected + 0.5 / beta)


def discopop(chosen: Array, rejected: Array, beta: float, temperature: float = 0.05) -> Array:
    """(1 - g) log(1 + e^-d) + g e^-d, g = sigmoid(d / temperature), d = beta (chosen - rejected).

    Log-ratio modulated loss, found by search (DiscoPOP, arXiv 2406.08414): logistic where the pair is
    wrong, exponential where it is right.
    """
    logits = beta * (chosen - rejected)
    gate = jax.nn.sigmoid(logits / temperature)
    # Where the gate is shut the exponential may be infinite, and zero times it no number.
    exponential = jnp.exp(-jnp.maximum(logits, -LARGEST_EXPONENT))
    return -(1 - gate) * jax.nn.log_sigmoid(logits) + gate * exponential


def orpo(chosen: Array, rejected: Array, beta: float) -> Array:
    """-chosen - beta log sigmoid(log odds(chosen) - log odds(rejected)) of averaged s without a reference.

    odds = p / (1 - p), p = e^s, the geometric mean of a token's probabilities; the first term is the chosen answer's
    negative log-likelihood, so no other training is needed first (ORPO, arXiv 2403.07691, equation 6).
    """
    log_odds = chosen - rejected - (_log1mexp(chosen) - _log1mexp(rejected))
    return -chosen - beta * jax.nn.log_sigmoid(log_odds)


def _log1mexp(x: Array) -> Array:
    """log(1 - e^x) for x < 0, without loss of digits near either end (M. Maechler, "Accurately computing log(1 -
    exp(-|a|))", 2012); x is kept a little below zero, where odds would be infinite."""
    x = jnp.minimum(x, -1e-6)
    near_zero = x > -0.6931472
    return jnp.where(
        near_zero,
        jnp.log(-jnp.expm1(jnp.where(near_zero, x, -1.0))),
        jnp.log1p(-jnp.exp(jnp.where(near_zero, -1.0, x))),
    )


def bradley_terry(chosen: Array, rejected: Array, margin: Array | float = 0.0, centring: float = 0.0) -> Array:
    """-log sigmoid(chosen - rejected - margin) + centring (chosen + rejected)^2, for rewards.

    The likelihood that chosen wins (Bradley and Terry, Biometrika 39, 1952), by a margin that the data name (Llama 2,
    arXiv 2307.09288, equation 2); comparisons leave a constant free, which centring holds near zero (arXiv 2312.09244,
    equation 2).
    """
    return -jax.nn.log_sigmoid(chosen - rejected - margin) + centring * jnp.square(chosen + rejected)


class PairLoss(NamedTuple):
    """A loss of a pair, and which s it is about."""

    function: Callable[..., Array]
    """(chosen, rejected, beta=, and the options) -> losses."""
    options: tuple[str, ...] = ()
    averaged: bool = False
    """s is divided by the completion's length."""
    reference: bool = True
    difference: bool = False
    """It depends on chosen - rejected of sums alone, so that `divergence_score` may take the place of s."""


PairLossName = Literal[
    "sigmoid", "sigmoid_norm", "robust", "exo", "hinge", "discopop", "ipo", "apo_zero", "apo_down", "nca", "sppo",
    "simpo", "orpo",
]  # fmt: skip
PAIR_LOSSES: dict[PairLossName, PairLoss] = {
    "sigmoid": PairLoss(sigmoid, ("label_smoothing",), difference=True),
    "sigmoid_norm": PairLoss(sigmoid, ("label_smoothing",), averaged=True),
    "robust": PairLoss(robust, ("label_smoothing",), difference=True),
    "exo": PairLoss(exo, ("label_smoothing",), difference=True),
    "hinge": PairLoss(hinge, difference=True),
    "discopop": PairLoss(discopop, difference=True),
    "ipo": PairLoss(ipo, averaged=True),
    "apo_zero": PairLoss(apo_zero),
    "apo_down": PairLoss(apo_down),
    "nca": PairLoss(nca),
    "sppo": PairLoss(sppo),
    "simpo": PairLoss(simpo, ("margin",), averaged=True, reference=False),
    "orpo": PairLoss(orpo, averaged=True, reference=False),
}


def misfit(name: PairLossName, label_smoothing: float, divergence: Divergence, alpha: float) -> str:
    """Why these settings do not go together; "" if they do."""
    loss = PAIR_LOSSES[name]
    reasons = {
        f"label smoothing {label_smoothing} is not in [0, 0.5)": not 0 <= label_smoothing < 0.5,
        f"{name} smooths no labels": label_smoothing > 0 and "label_smoothing" not in loss.options,
        f"{name} needs labels that may be wrong, label smoothing above 0": name == "exo" and label_smoothing == 0,
        f"{name} knows reverse KL only": divergence != "reverse_kl" and not loss.difference,
        "alpha 1 is reverse_kl": divergence == "alpha" and alpha == 1,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


# --- one completion judged ---------------------------------------------------------------------------------------
# `preferred` [...] bool: it was judged good. `baseline`: the s of a completion that is neither good nor bad.


def kto(score: Array, preferred: Array, baseline: Array | float, beta: float) -> Array:
    """1 - sigmoid(beta (s - baseline)) of a good completion, 1 - sigmoid(beta (baseline - s)) of a bad one.

    The baseline is KL(policy || reference), estimated on completions of other prompts and never below zero; no
    gradient passes it (KTO, arXiv 2402.01306).
    """
    return jax.nn.sigmoid(-_towards(score, preferred, baseline, beta))


def bco(score: Array, preferred: Array, baseline: Array | float, beta: float) -> Array:
    """-log sigmoid(beta (s - baseline)) of a good completion, -log sigmoid(beta (baseline - s)) of a bad one.

    A binary classifier whose logit is the reward; the baseline is the running mean of s over good and bad, delta /
    beta of the paper (BCO, arXiv 2404.04656).
    """
    return -jax.nn.log_sigmoid(_towards(score, preferred, baseline, beta))


def _towards(score: Array, preferred: Array, baseline: Array | float, beta: float) -> Array:
    return beta * (score - baseline) * jnp.where(preferred, 1.0, -1.0)


def mismatched(tokens: Array, action_mask: Array, group_id: Array, length: int) -> tuple[Array, Array]:
    """Each row's prompt with the completion of the next group's first row: [N, length] tokens and action mask.

    Groups follow each other by their ids, the first after the last, so that the order of rows does not matter; rows
    without actions stay so. What exceeds `length` is cut off. For KTO's baseline.
    """
    exists = action_mask.any(-1)
    key = jnp.where(exists, group_id, jnp.iinfo(jnp.int32).max)
    order = jnp.argsort(key)
    next_group = jnp.searchsorted(key[order], key, side="right") % jnp.maximum(exists.sum(), 1)
    partner = order[next_group]
    start = jnp.argmax(action_mask, axis=-1)
    after = jnp.arange(length)[None, :] - start[:, None]
    # Where a token comes from: before the completion the row itself, from there on its partner.
    row = jnp.where(after < 0, jnp.arange(len(tokens))[:, None], partner[:, None])
    column = jnp.where(after < 0, after + start[:, None], after + start[partner][:, None])
    inside = (column < tokens.shape[1]) & exists[:, None]
    column = jnp.minimum(column, tokens.shape[1] - 1)
    return jnp.where(inside, tokens[row, column], 0), inside & (after >= 0) & action_mask[row, column]


# --- other divergences than KL -----------------------------------------------------------------------------------


def divergence_score(log_ratio: Array, divergence: Divergence, alpha: float = 0.5) -> Array:
    """f'(u), u = policy / reference of a completion, from its log: s in the losses above, up to a constant.

    With a penalty of divergence f in place of the reverse KL, the reward that a policy is optimal for is beta f'(u) +
    constant (f-DPO, arXiv 2309.16240, theorem 1), so only losses of the difference may use it.
        reverse_kl  log u          forward_kl  1 - 1/u
        js          log(2u/(1+u))  alpha       (u^(alpha-1) - 1) / (alpha - 1): alpha 1 is reverse, 0 forward KL
    """
    match divergence:
        case "reverse_kl":
            return log_ratio
        case "forward_kl":
            return 1 - jnp.exp(jnp.minimum(-log_ratio, LARGEST_EXPONENT))
        case "js":
            return jnp.log(2.0) + jax.nn.log_sigmoid(log_ratio)
        case "alpha":
            return jnp.expm1(jnp.minimum((alpha - 1) * log_ratio, LARGEST_EXPONENT)) / (alpha - 1)


# --- distributional robustness -----------------------------------------------------------------------------------


def worst_case_weights(losses: Array, weights: Array, radius: float) -> Array:
    """The weights within total variation `radius` of `weights` that make the weighted loss largest, of one shape.

    max over q of sum q_i l_i, with 1/2 sum |q_i - p_i| <= radius sum p_i, sum q = sum p, q >= 0. The exact solution
    takes mass from the smallest losses until `radius` is spent, and gives all of it to the largest (distributionally
    robust reward learning and DPO, arXiv 2503.00539). What has weight zero stays out. Differentiate the loss under
    these weights as constants (Danskin); radius 0 returns `weights`.
    """
    flat, mass = losses.reshape(-1), weights.reshape(-1)
    counts = mass > 0
    largest = jnp.argmax(jnp.where(counts, flat, -jnp.inf))
    givers = counts.at[largest].set(False)
    order = jnp.argsort(jnp.where(givers, flat, jnp.inf))
    available = jnp.where(givers, mass, 0.0)[order]
    spent_before = jnp.cumsum(available) - available
    taken = jnp.clip(radius * mass.sum() - spent_before, 0.0, available)
    moved = mass.at[order].add(-taken).at[largest].add(taken.sum())
    return jax.lax.stop_gradient(moved.reshape(weights.shape))
