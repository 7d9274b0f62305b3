"""GRPO with another surrogate, filters of tokens, and scales of advantages.

`surrogate` is the loss of a token. l = log policy - log old policy, r = exp(l), sg stops gradients:

    clipped           -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)             1707.06347
    stable_reinforce  the same with l clipped to +-ln 1000                          2505.02835
    sapo              -4 / tau sigmoid(tau (r - 1)) A; tau_positive where A > 0,
                      tau_negative elsewhere                                        2511.20347
    gmpo              -exp(mean_t c_t) A of the completion; c is l, at most clip_high
                      where A > 0, at least -clip_low where A < 0                   2507.20673
    vespo             -sg(exp(b + k log w - b w)) A log policy; w = exp(sum_t l_t) of
                      the completion; k 2 and b 3 where A >= 0, k 3 and b 2
                      elsewhere                                                     2602.10693
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

    A x (1 + success_slope p) where A < 0                     wrong answers count more where the
                                                              prompt is easy
    A = 0 where |A - mean A| > outlier_sigmas deviations      StableReinforce, 2505.02835
    A = 0 where A > 0 and old policy >= 0.99,                 UloRL, 2507.19766
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

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, NamedTuple

from tpu_rl.algorithm_spec import ExperienceSpec
from tpu_rl.algos.grpo import GroupPolicyConfig, group_policy_gradient
from tpu_rl.algos.surrogates import filters
from tpu_rl.algos.surrogates.covariance import clip_cov, kl_cov
from tpu_rl.algos.surrogates.dppo import dppo
from tpu_rl.algos.surrogates.dro import dro
from tpu_rl.algos.surrogates.gmpo import gmpo
from tpu_rl.algos.surrogates.gpg import gpg
from tpu_rl.algos.surrogates.sapo import sapo
from tpu_rl.algos.surrogates.stable_reinforce import stable_reinforce
from tpu_rl.algos.surrogates.vespo import vespo
from tpu_rl.errors import InputError
from tpu_rl.losses.policy_batch import Part
from tpu_rl.losses.policy_gradient import Surrogate, clipped_surrogate, unclipped
from tpu_rl.ranges import In, NotNegative, Positive, ReadOnlyWith
from tpu_rl.types import Algorithm, Roles, Sampling

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


HAS_CLIP = ReadOnlyWith(
    "surrogate", "clipped", "stable_reinforce", "clip_cov", "gmpo", "dppo_tv", "dppo_kl"
)


@dataclass(frozen=True)
class SurrogatesConfig(GroupPolicyConfig):
    """Lengths are tokens; coefficients multiply nats. None takes the surrogate's own default."""

    surrogate: SurrogateName = "clipped"
    """Loss of a token."""
    clip_low: Annotated[Positive | None, HAS_CLIP] = None
    """Bound on the way down: of 1 - ratio (clipped, stable_reinforce, clip_cov: 0.2), of -log ratio
    (gmpo: 0.4), of the change of the probability (dppo_tv: 0.2) or of the KL (dppo_kl: 0.2)."""
    clip_high: Annotated[Positive | None, HAS_CLIP] = None
    """Bound on the way up, with the same defaults."""
    tau_positive: Annotated[Positive | None, ReadOnlyWith("surrogate", "sapo")] = None
    """sapo: steepness of the gate where the advantage is positive; 1."""
    tau_negative: Annotated[Positive | None, ReadOnlyWith("surrogate", "sapo")] = None
    """sapo: steepness of the gate elsewhere; 1.05."""
    ratio_cap: Annotated[Positive | None, ReadOnlyWith("surrogate", "dppo_tv", "dppo_kl")] = None
    """dppo_tv, dppo_kl: cap of the ratio; 20."""
    beta: Annotated[Positive | None, ReadOnlyWith("surrogate", "dro")] = None
    """dro: coefficient of the squared log-ratio; 0.1."""
    covariance_share: Annotated[
        Annotated[float, In("(0, 1]")] | None, ReadOnlyWith("surrogate", "clip_cov", "kl_cov")
    ] = None
    """clip_cov, kl_cov: share of the tokens that are dropped or penalized; 0.0002."""
    covariance_low: Annotated[Positive | None, ReadOnlyWith("surrogate", "clip_cov")] = None
    """clip_cov: tokens are dropped above this covariance; 1."""
    covariance_high: Annotated[Positive | None, ReadOnlyWith("surrogate", "clip_cov")] = None
    """clip_cov: tokens are dropped below this covariance; 5."""
    covariance_kl_coef: Annotated[Positive | None, ReadOnlyWith("surrogate", "kl_cov")] = None
    """kl_cov: coefficient of |log ratio|; 0.1."""
    success_slope: NotNegative = 0.0
    """Multiply negative advantages by 1 + this x the share of the group with success."""
    outlier_sigmas: Positive | None = None
    """Drop tokens whose advantage is more standard deviations from the mean; 3 is usual."""
    mastered_entropy: Positive | None = None
    """While the entropy is below this many nats per token, do not reinforce mastered tokens,
    which have a probability of at least 0.99."""

    def __post_init__(self):
        super().__post_init__()
        row = SURROGATES[self.surrogate]
        if row.ratio_clip and self.settings["clip_low"] >= 1:
            raise _invalid("clip_low", f"{self.settings['clip_low']} is not below 1")
        if self.settings.get("covariance_low", 0) >= self.settings.get("covariance_high", 1):
            raise _invalid("covariance_low", "it is not below covariance_high")
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
        chosen = dataclasses.asdict(self)
        defaults = SURROGATES[self.surrogate].settings
        return {
            name: default if chosen[name] is None else chosen[name]
            for name, default in defaults.items()
        }

    def parts(self, roles: Roles) -> tuple[Part, ...]:
        """List the parts that are on, in the order of their effects."""
        parts = [*super().parts(roles)]
        if self.success_slope:
            parts.append(filters.scaled_by_success(self.success_slope))
        if self.outlier_sigmas is not None:
            parts.append(filters.without_outliers(self.outlier_sigmas))
        if self.mastered_entropy is not None:
            parts.append(filters.without_mastered(self.mastered_entropy))
        part = SURROGATES[self.surrogate].part
        if part is not None:
            settings = self.settings
            parts.append(part(**{name: settings[name] for name in settings if "cov" in name}))
        return *parts, filters.share_without_advantage()

    @property
    def experience(self) -> ExperienceSpec:
        no_ratio = self.surrogate == "gpg"
        spec = super().experience
        return spec._replace(latest_policy=no_ratio, raw_returns=bool(self.success_slope))


def _invalid(name: str, what: str) -> InputError:
    return InputError(what, where=f"--algorithm.{name.replace('_', '-')}", fix="see --help-all")


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
    part: Callable[..., Part] | None = None
    """(**settings of the covariance) -> a part beside the surrogate."""


_CLIP = {"clip_low": 0.2, "clip_high": 0.2}
_CLIP_COV = {"covariance_share": 2e-4, "covariance_low": 1.0, "covariance_high": 5.0}
SURROGATES: dict[SurrogateName, SurrogateRow] = {
    "clipped": SurrogateRow(clipped_surrogate, _CLIP, ratio_clip=True),
    "stable_reinforce": SurrogateRow(stable_reinforce, _CLIP, ratio_clip=True),
    "sapo": SurrogateRow(sapo, {"tau_positive": 1.0, "tau_negative": 1.05}),
    "gmpo": SurrogateRow(gmpo, {"clip_low": 0.4, "clip_high": 0.4}, of_completions=True),
    "vespo": SurrogateRow(vespo, {}, stops_gradient=True),
    "dppo_tv": SurrogateRow(
        partial(dppo, divergence="tv"), {**_CLIP, "ratio_cap": 20.0}, stops_gradient=True
    ),
    "dppo_kl": SurrogateRow(
        partial(dppo, divergence="kl"), {**_CLIP, "ratio_cap": 20.0}, stops_gradient=True
    ),
    "dro": SurrogateRow(dro, {"beta": 0.1}),
    "gpg": SurrogateRow(gpg, {}),
    "clip_cov": SurrogateRow(clipped_surrogate, _CLIP | _CLIP_COV, ratio_clip=True, part=clip_cov),
    "kl_cov": SurrogateRow(
        unclipped, {"covariance_share": 2e-4, "covariance_kl_coef": 0.1}, part=kl_cov
    ),
}


def surrogates(config: SurrogatesConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build GRPO with the configured surrogate. It learns from a Rollout."""
    row = SURROGATES[config.surrogate]
    settings = {name: value for name, value in config.settings.items() if "cov" not in name}
    surrogate = partial(row.function, **settings)
    algorithm = group_policy_gradient(config, roles, sampling, surrogate)
    stops_gradient = algorithm.stops_gradient or row.stops_gradient
    return algorithm._replace(stops_gradient=stops_gradient)
