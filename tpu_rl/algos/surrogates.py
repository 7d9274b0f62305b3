"""GRPO with another surrogate, filters of tokens, and scales of advantages.

`surrogate` is the loss of a token. l = log policy - log old policy, r = exp(l), sg stops gradients:

    clipped           -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)             1707.06347
    stable_reinforce  the same with l clipped to +-log_ratio_bound                  2505.02835
    sapo              -4 / tau sigmoid(tau (r - 1)) A; tau_positive where A > 0,
                      tau_negative elsewhere                                        2511.20347
    gmpo              -exp(mean_t c_t) A of the completion; c is l, at most clip_high
                      where A > 0, at least -clip_low where A < 0                   2507.20673
    vespo             -sg(exp(b + k log w - b w)) A log policy; w = exp(sum_t l_t) of
                      the completion; k_positive, lambda_positive as k, b where
                      A >= 0, k_negative, lambda_negative elsewhere                 2602.10693
    dppo_tv           -sg(min(r, ratio_cap)) A log policy; 0 where policy - old policy
                      is above clip_high and A > 0, or below -clip_low and A <= 0   2602.04879
    dppo_kl           likewise; 0 where the KL of the token against all others is
                      above the bound and the policy went the way of A              2602.04879
    dro               -(A log policy - beta / 2 l^2)                                2405.19107
    gpg               -A log policy; with `advantages` "gpg"                        2504.02546
    clip_cov          clipped, without covariance_share of all tokens, drawn from
                      those with covariance_low < cov_t < covariance_high           2505.22617
    kl_cov            -r A, plus covariance_kl_coef |l| at the covariance_share of
                      tokens with the largest cov_t                                 2505.22617

cov_t = (A_t - mean A) (log old policy_t - mean log old policy) over an optimizer step's tokens.

The others act on any surrogate, in this order. p is the share of the group's completions with a
return above 0. All means are over the learned tokens of an optimizer step.

    A x (1 + difficulty_slope (1 - p))                        harder prompts count more
    A x (negative_scale + success_slope p) where A < 0        wrong answers count less, or less
                                                              where the prompt is hard
    A = 0 where |A - mean A| > outlier_sigmas deviations      StableReinforce, 2505.02835
    A = 0 where A > 0 and old policy >= mastered_probability, UloRL, 2507.19766
          while the mean of -log old policy is below mastered_entropy

The metric policy/without_advantage is the share of tokens with A = 0, for any reason.

Deviations: the default weights are "token_mean"; the papers of SAPO and GMPO take "sequence_mean".
Covariances and masteries are those of the old policy, which all micro-batches of a step share;
verl's are those of the policy, per micro-batch. At the first update of a batch these are equal.
verl draws Clip-Cov's tokens anew in each pass, among those that the ratio does not clip. UloRL's
entropy is that of the whole distribution; -log old policy is an unbiased estimate of it. With an
importance sampling cap, the weight multiplies VESPO's loss and does not enter w, and it does not
multiply KL-Cov's penalty. l is not capped at +-20 as in verl. The scales with p are our own form of
the ideas of GUI-Libra (2602.22190) and GUI-G1, which have other constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from tpu_rl.algorithm_spec import ExperienceSpec
from tpu_rl.algos.grpo import GroupPolicyConfig, group_policy_gradient
from tpu_rl.errors import InputError
from tpu_rl.losses import advantages as group_advantages
from tpu_rl.losses import masked
from tpu_rl.losses.policy_batch import PolicyBatch, learned_tokens
from tpu_rl.losses.policy_gradient import (
    LossTerm,
    Surrogate,
    clipped_surrogate,
    importance_ratio,
)
from tpu_rl.ranges import In, NotNegative, Positive
from tpu_rl.types import (
    Algorithm,
    Array,
    Experience,
    Layout,
    Metrics,
    PackedRows,
    Params,
    Roles,
    Rollout,
    Sampling,
)

stop_gradient = jax.lax.stop_gradient

SurrogateName = Literal[
    "clipped",
    "stable_reinforce",
    "sapo",
    "gmpo",
    "vespo",
    "dppo_tv",
    "dppo_kl",
    "dro",
    "gpg",
    "clip_cov",
    "kl_cov",
]


@dataclass(frozen=True)
class SurrogatesConfig(GroupPolicyConfig):
    """Lengths are tokens; coefficients multiply nats. None takes the surrogate's own default."""

    surrogate: SurrogateName = "clipped"
    """Loss of a token."""
    clip_low: float | None = None
    """Bound on the way down: of 1 - ratio (clipped, stable_reinforce, clip_cov: 0.2), of -log ratio
    (gmpo: 0.4), of the change of the probability (dppo_tv: 0.2) or of the KL (dppo_kl: 0.2)."""
    clip_high: float | None = None
    """Bound on the way up, with the same defaults."""
    log_ratio_bound: float | None = None
    """stable_reinforce: bound of |log ratio| before the exponential; ln 1000."""
    tau_positive: float | None = None
    """sapo: steepness of the gate where the advantage is positive; 1."""
    tau_negative: float | None = None
    """sapo: steepness of the gate elsewhere; 1.05."""
    k_positive: float | None = None
    """vespo: exponent of the completion's ratio where the advantage is not negative; 2."""
    k_negative: float | None = None
    """vespo: the same where the advantage is negative; 3."""
    lambda_positive: float | None = None
    """vespo: decay of the weight where the advantage is not negative; 3."""
    lambda_negative: float | None = None
    """vespo: the same where the advantage is negative; 2."""
    ratio_cap: float | None = None
    """dppo_tv, dppo_kl: cap of the ratio; 20."""
    beta: float | None = None
    """dro: coefficient of the squared log-ratio; 0.1."""
    covariance_share: float | None = None
    """clip_cov, kl_cov: share of the tokens that are dropped or penalized; 0.0002."""
    covariance_low: float | None = None
    """clip_cov: tokens are dropped above this covariance; 1."""
    covariance_high: float | None = None
    """clip_cov: tokens are dropped below this covariance; 5."""
    covariance_kl_coef: float | None = None
    """kl_cov: coefficient of |log ratio|; 0.1."""
    difficulty_slope: NotNegative = 0.0
    """Multiply advantages by 1 + this x the share of the group without success."""
    negative_scale: NotNegative = 1.0
    """Multiply negative advantages by this."""
    success_slope: NotNegative = 0.0
    """Add this x the share of the group with success to `negative_scale`."""
    outlier_sigmas: Positive | None = None
    """Drop tokens whose advantage is more standard deviations from the mean; 3 is usual."""
    mastered_entropy: Positive | None = None
    """While the entropy is below this many nats per token, do not reinforce mastered tokens."""
    mastered_probability: Annotated[float, In("(0, 1]")] = 0.99
    """A token is mastered from this probability on."""

    def __post_init__(self):
        super().__post_init__()
        row = SURROGATES[self.surrogate]
        known = {name for other in SURROGATES.values() for name in other.settings}
        unread = [name for name in known - set(row.settings) if getattr(self, name) is not None]
        if unread:
            raise InputError(
                f"surrogate {self.surrogate} does not read {', '.join(sorted(unread))}",
                where="--algorithm.surrogate",
                fix=f"leave it out; it reads: {', '.join(row.settings) or 'none'}",
            )
        for name, value in self.settings.items():
            if not value > 0:
                raise _invalid(name, f"{value} is not above 0")
        if self.settings.get("covariance_share", 0) > 1:
            raise _invalid("covariance_share", f"{self.covariance_share} is above 1")
        if row.ratio_clip and self.settings["clip_low"] >= 1:
            raise _invalid("clip_low", f"{self.settings['clip_low']} is not below 1")
        if self.settings.get("covariance_low", 0) >= self.settings.get("covariance_high", 1):
            raise _invalid("covariance_low", "it is not below covariance_high")
        if self.mastered_entropy is None and self.mastered_probability != 0.99:
            raise _invalid("mastered_probability", "it is not read without mastered_entropy")
        of_tokens = self.mastered_entropy is not None or self.top_entropy_quantile < 1
        if row.of_completions and (of_tokens or self.rejection.startswith("token")):
            raise InputError(
                "the loss of a whole completion cannot leave out single tokens",
                where="--algorithm.surrogate, with --algorithm.mastered-entropy, "
                "--algorithm.top-entropy-quantile or --algorithm.rejection",
                why="they stay in the completion's ratio, and so keep their gradient",
                fix="use another surrogate, or a rejection of sequences",
            )
        if self.credit != "episode" and row.of_completions:
            raise InputError(
                "the loss of a whole completion cannot give credit to its turns",
                where="--algorithm.credit, --algorithm.surrogate",
                why="its gradient is the same at all tokens, so their advantages would average",
                fix="use another surrogate, or --algorithm.credit episode",
            )

    @property
    def settings(self) -> dict[str, float]:
        """The numbers that the surrogate reads."""
        defaults = SURROGATES[self.surrogate].settings
        chosen = {name: getattr(self, name) for name in defaults}
        return {name: defaults[name] if chosen[name] is None else chosen[name] for name in defaults}

    @property
    def experience(self) -> ExperienceSpec:
        no_ratio = self.surrogate == "gpg"
        spec = super().experience
        reads_returns = spec.raw_returns or bool(self.difficulty_slope or self.success_slope)
        return spec._replace(latest_policy=no_ratio, raw_returns=reads_returns)


def _invalid(name: str, what: str) -> InputError:
    return InputError(what, where=f"--algorithm.{name.replace('_', '-')}", fix="see --help-all")


# --- surrogates: (log_probs, old_log_probs, advantages, rows, **settings) -> Surrogate ---


def stable_reinforce(
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    rows: PackedRows,
    *,
    log_ratio_bound: float,
    **clip: float,
) -> Surrogate:
    bounded = jnp.clip(log_probs - old_log_probs, -log_ratio_bound, log_ratio_bound)
    return clipped_surrogate(bounded, jnp.zeros_like(bounded), advantages, rows, **clip)


def sapo(
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    rows: PackedRows,
    *,
    tau_positive: float,
    tau_negative: float,
) -> Surrogate:
    ratio = importance_ratio(log_probs, old_log_probs)
    tau = jnp.where(advantages > 0, tau_positive, tau_negative)
    return Surrogate(-4.0 / tau * jax.nn.sigmoid(tau * (ratio - 1.0)) * advantages, ratio)


def gmpo(
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    rows: PackedRows,
    *,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    log_ratio = log_probs - old_log_probs
    is_good = advantages > 0
    is_bad = advantages < 0
    clipped = jnp.where(is_good, jnp.minimum(log_ratio, clip_high), log_ratio)
    clipped = jnp.where(is_bad, jnp.maximum(clipped, -clip_low), clipped)
    actions = (rows.sequence_ids > 0).astype(log_ratio.dtype)
    lengths = masked.sequence_total(actions, rows.sequence_ids)
    total = masked.sequence_total(clipped, rows.sequence_ids)
    ratio = jnp.exp(total / jnp.maximum(lengths, 1.0))
    return Surrogate(
        losses=-ratio * advantages,
        ratio=ratio,
        clipped_low=is_bad & (log_ratio < -clip_low),
        clipped_high=is_good & (log_ratio > clip_high),
    )


def vespo(
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    rows: PackedRows,
    *,
    k_positive: float,
    k_negative: float,
    lambda_positive: float,
    lambda_negative: float,
) -> Surrogate:
    # As in TRL: each token's log-ratio within +-20, the sum within log 1e-8 and 20.
    log_ratio = jnp.clip(stop_gradient(log_probs) - old_log_probs, -20.0, 20.0)
    log_w = jnp.clip(masked.sequence_total(log_ratio, rows.sequence_ids), math.log(1e-8), 20.0)
    is_good = advantages >= 0
    k = jnp.where(is_good, k_positive, k_negative)
    b = jnp.where(is_good, lambda_positive, lambda_negative)
    weight = jnp.exp(b + k * log_w - b * jnp.exp(log_w))
    return Surrogate(-weight * advantages * log_probs, jnp.exp(log_w))


def dppo(
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    rows: PackedRows,
    *,
    divergence: Literal["tv", "kl"],
    clip_low: float,
    clip_high: float,
    ratio_cap: float,
) -> Surrogate:
    current = stop_gradient(log_probs)
    ratio = jnp.exp(current - old_log_probs)
    probs, old_probs = jnp.exp(current), jnp.exp(old_log_probs)
    moved = probs - old_probs
    distance = jnp.abs(moved)
    if divergence == "kl":
        # Of the two outcomes "this token" and "another token", as in verl.
        others = jnp.log((1.0 - old_probs + 1e-8) / (1.0 - probs + 1e-8))
        distance = old_probs * (old_log_probs - current) + (1.0 - old_probs) * others
    too_low = (advantages <= 0) & (moved < 0) & (distance > clip_low)
    too_high = (advantages > 0) & (moved > 0) & (distance > clip_high)
    weight = jnp.where(too_low | too_high, 0.0, jnp.minimum(ratio, ratio_cap))
    return Surrogate(-weight * advantages * log_probs, ratio, too_low, too_high)


def dro(
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    rows: PackedRows,
    *,
    beta: float,
) -> Surrogate:
    squared = jnp.square(log_probs - old_log_probs)
    losses = 0.5 * beta * squared - log_probs * advantages
    return Surrogate(losses, importance_ratio(stop_gradient(log_probs), old_log_probs))


def gpg(log_probs: Array, old_log_probs: Array, advantages: Array, rows: PackedRows) -> Surrogate:
    ratio = importance_ratio(stop_gradient(log_probs), old_log_probs)
    return Surrogate(-log_probs * advantages, ratio)


def unclipped(
    log_probs: Array, old_log_probs: Array, advantages: Array, rows: PackedRows
) -> Surrogate:
    ratio = importance_ratio(log_probs, old_log_probs)
    return Surrogate(-ratio * advantages, ratio)


# --- covariances ---


def _per_step(function: Callable[..., Array], values: Array, mask: Array) -> Array:
    """Apply a reduction to each optimizer step of [M, K, R, S] -> [M, 1, 1, 1]."""
    return function(values, mask, axis=(1, 2, 3))[:, None, None, None]


def covariances(batch: PolicyBatch) -> Array:
    """Return (A - mean A) (log old policy - mean log old policy) of each learned token.

    [M, K, R, S]; the means are those of the optimizer step. -inf at other tokens.
    """
    learned = batch.weights["policy"] > 0
    centered = [
        values - _per_step(masked.mean, values, learned)
        for values in (batch.advantages, batch.old_log_probs)
    ]
    return jnp.where(learned, centered[0] * centered[1], -jnp.inf)


def largest(values: Array, share: float, learned: Array) -> Array:
    """Return True at the largest values of each optimizer step, [M, K, R, S] bool.

    They are `share` of the step's learned tokens, rounded down, and at least one. Only values above
    0 are among them, so none are where all are equal.
    """
    count = jnp.maximum(jnp.floor(share * learned.sum((1, 2, 3))), 1).astype(jnp.int32)
    ascending = jnp.sort(values.reshape(len(values), -1), axis=-1)
    bound = jnp.take_along_axis(ascending, ascending.shape[1] - count[:, None], axis=1)
    return (values > 0) & (values >= bound[:, :, None, None])


def drawn_by_covariance(
    batch: PolicyBatch,
    rollout: Rollout,
    layout: Layout,
    *,
    covariance_share: float,
    covariance_low: float,
    covariance_high: float,
) -> Array:
    """Return True at the tokens that Clip-Cov drops. They are drawn by the rows' own keys."""

    def draw(key: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(key), 0xC0F)
        return jax.random.uniform(key, rollout.tokens.shape[1:])

    numbers = layout.pack(jax.vmap(draw)(rollout.birth_key))
    covariance = covariances(batch)
    may_drop = (covariance > covariance_low) & (covariance < covariance_high)
    numbers = jnp.where(may_drop, numbers, -jnp.inf)
    return largest(numbers, covariance_share, batch.weights["policy"] > 0)


def with_largest_covariance(
    batch: PolicyBatch, rollout: Rollout, layout: Layout, *, covariance_share: float
) -> Array:
    """Return True at the tokens that KL-Cov penalizes."""
    del rollout, layout
    return largest(covariances(batch), covariance_share, batch.weights["policy"] > 0)


# --- the algorithm ---


class SurrogateRow(NamedTuple):
    """A surrogate, and what it reads."""

    function: Callable[..., Surrogate]
    settings: dict[str, float]
    """Fields of the configuration -> their defaults."""
    ratio_clip: bool = False
    """clip_low is a distance of a ratio from 1, so that it is below 1."""
    of_completions: bool = False
    """The loss is one of the whole completion."""
    stops_gradient: bool = False
    """See `Algorithm.stops_gradient`."""
    selected: Callable[..., Array] | None = None
    """(batch, rollout, layout, **settings) -> [M, K, R, S] bool: tokens chosen by their covariance.
    They have a penalty if there is a covariance_kl_coef, and no advantage otherwise."""


_CLIP = {"clip_low": 0.2, "clip_high": 0.2}
_VESPO = {"k_positive": 2.0, "k_negative": 3.0, "lambda_positive": 3.0, "lambda_negative": 2.0}
_CLIP_COV = {"covariance_share": 2e-4, "covariance_low": 1.0, "covariance_high": 5.0}
SURROGATES: dict[SurrogateName, SurrogateRow] = {
    "clipped": SurrogateRow(clipped_surrogate, _CLIP, ratio_clip=True),
    "stable_reinforce": SurrogateRow(
        stable_reinforce, {**_CLIP, "log_ratio_bound": math.log(1000.0)}, ratio_clip=True
    ),
    "sapo": SurrogateRow(sapo, {"tau_positive": 1.0, "tau_negative": 1.05}),
    "gmpo": SurrogateRow(gmpo, {"clip_low": 0.4, "clip_high": 0.4}, of_completions=True),
    "vespo": SurrogateRow(vespo, _VESPO, stops_gradient=True),
    "dppo_tv": SurrogateRow(
        partial(dppo, divergence="tv"), {**_CLIP, "ratio_cap": 20.0}, stops_gradient=True
    ),
    "dppo_kl": SurrogateRow(
        partial(dppo, divergence="kl"), {**_CLIP, "ratio_cap": 20.0}, stops_gradient=True
    ),
    "dro": SurrogateRow(dro, {"beta": 0.1}),
    "gpg": SurrogateRow(gpg, {}),
    "clip_cov": SurrogateRow(
        clipped_surrogate, _CLIP | _CLIP_COV, ratio_clip=True, selected=drawn_by_covariance
    ),
    "kl_cov": SurrogateRow(
        unclipped,
        {"covariance_share": 2e-4, "covariance_kl_coef": 0.1},
        selected=with_largest_covariance,
    ),
}


def scaled_and_filtered(
    config: SurrogatesConfig, batch: PolicyBatch, rollout: Rollout, layout: Layout
) -> Array:
    """Return the batch's advantages after the scales and the filters of tokens, [M, K, R, S]."""
    values = batch.advantages
    if config.difficulty_slope or config.success_slope or config.negative_scale != 1.0:
        returns = masked.total(rollout.rewards, rollout.action_mask, axis=-1)
        scored = learned_tokens(rollout).any(-1)
        share = group_advantages.per_episode(
            group_advantages.group_success, returns, rollout.group_id, scored, rollout.episode_id
        )
        p = layout.pack(jnp.where(rollout.action_mask, share[:, None], 0.0))
        values *= 1.0 + config.difficulty_slope * (1.0 - p)
        values *= jnp.where(values < 0, config.negative_scale + config.success_slope * p, 1.0)
    learned = batch.weights["policy"] > 0
    if config.outlier_sigmas is not None:
        distance = jnp.abs(values - _per_step(masked.mean, values, learned))
        deviation = jnp.sqrt(_per_step(masked.mean, jnp.square(distance), learned))
        values = jnp.where(distance > config.outlier_sigmas * deviation, 0.0, values)
    if config.mastered_entropy is not None:
        entropy = -_per_step(masked.mean, batch.old_log_probs, learned)
        is_mastered = batch.old_log_probs >= math.log(config.mastered_probability)
        drop = (entropy < config.mastered_entropy) & is_mastered & (values > 0)
        values = jnp.where(drop, 0.0, values)
    return values


def surrogates(config: SurrogatesConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build GRPO with the configured surrogate. It learns from a Rollout."""
    row = SURROGATES[config.surrogate]
    of_selection = {
        name: config.settings[name]
        for name in row.settings
        if name.startswith("covariance") and name != "covariance_kl_coef"
    }
    penalty_coef = config.settings.get("covariance_kl_coef")
    of_surrogate = {
        name: value for name, value in config.settings.items() if not name.startswith("covariance")
    }
    terms = {}
    if penalty_coef is not None:

        def penalty(log_probs: Array, batch: PolicyBatch) -> Array:
            return penalty_coef * jnp.abs(log_probs - batch.old_log_probs)

        terms["kl_cov"] = LossTerm(None, penalty)
    base = group_policy_gradient(
        config, roles, sampling, partial(row.function, **of_surrogate), terms
    )

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[PolicyBatch, Any]:
        batch, state = base.make_batch(experience, params, state)
        rollout, layout = experience
        batch = replace(batch, advantages=scaled_and_filtered(config, batch, rollout, layout))
        if row.selected is None:
            return batch, state
        selected = row.selected(batch, rollout, layout, **of_selection)
        if penalty_coef is None:
            return replace(batch, advantages=jnp.where(selected, 0.0, batch.advantages)), state
        weights = batch.weights["policy"]
        penalized = jnp.where(selected, weights, 0.0)
        return replace(batch, weights=batch.weights | {"kl_cov": penalized}), state

    def loss(params: Params, batch: PolicyBatch) -> tuple[Array, Metrics]:
        value, metrics = base.loss(params, batch)
        is_without = (batch.advantages == 0).astype(jnp.float32)
        metrics["policy/without_advantage"] = masked.average(is_without, batch.action_mask)
        return value, metrics

    return base._replace(make_batch=make_batch, loss=loss, stops_gradient=row.stops_gradient)
