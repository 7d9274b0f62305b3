"""The KL to the reference, in the reward or in the loss: its settings and its estimators.

Of tokens y ~ policy, with x = log policy(y) - log reference(y), as a loss and on policy:

    estimator  value               its expectation    the expectation of its gradient
    k1         x                   KL                 0
    k2         x^2 / 2             not KL             that of KL(policy || reference)
    k3         exp(-x) - 1 + x     KL                 that of KL(reference || policy)
    abs        |x|                 not KL             that of sum |policy - reference|
    k1+, k3+, abs+                 as above           that of k2, put in place of its own
    exact      policy/old x k3     KL                 that of KL(policy || reference)

Only exact keeps value and gradient off policy, where the others lack the importance ratio. The
prefixes are taken as given in all of them: for the KL of whole sequences, put k1 into the reward.
There, where nothing is differentiated, k1 and k3 are unbiased.

k1 to k3: J. Schulman, "Approximating KL divergence". TRL 1.16: exact is `use_bias_correction_kl`,
its default, and k3 without it. verl 0.9.1 (`kl_penalty`): kl, mse, low_var_kl, abs and "+" are k1,
k2, k3, abs and +; it clips k3 to +-10 and its exponent to +-20, we do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from tpu_rl import ranges
from tpu_rl.errors import InputError
from tpu_rl.losses.log_probs import k1, k2, k3
from tpu_rl.ranges import CountOrNone, NotNegative, Positive
from tpu_rl.types import Array

RewardEstimator = Literal["k1", "k2", "k3", "abs"]
LossEstimator = Literal["exact", "k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"]


@dataclass(frozen=True, kw_only=True)
class ReferenceKl:
    """Settings of the KL to the reference, a base of algorithms' configurations."""

    kl_reward_coef: NotNegative = 0.0
    """Coefficient of the KL to the reference that is subtracted from each token's reward."""
    kl_reward_estimator: RewardEstimator = "k1"
    """Estimator of this KL: k1, log policy - log reference, is unbiased and what returns of whole
    completions need; k2, k3 and abs are verl's others."""
    kl_loss_coef: NotNegative = 0.0
    """Coefficient of the KL of each token's distribution to the reference's in the loss."""
    kl_estimator: LossEstimator = "exact"
    """Estimator of this KL. exact has the gradient of the KL, on and off policy. k3 has that of the
    reverse KL, k2 and those with + that of the KL on policy, abs that of the L1 distance, k1
    none."""
    kl_target: Positive | None = None
    """Nats per completion. The KL coefficients are scaled up or down after every optimizer step to
    hold this KL to the reference."""
    kl_horizon: Positive = 100.0
    """Optimizer steps in which the scale can change by a fifth."""
    reference_reset_every: CountOrNone = 0
    """Optimizer steps between two times that the reference becomes the policy (ProRL, arXiv
    2505.24864); 0 never. The moments of the optimizer stay."""

    def __post_init__(self):
        ranges.check(self)
        if self.kl_target is None and self.kl_horizon != ReferenceKl.kl_horizon:
            raise InputError(
                "a horizon without a KL target",
                where="--algorithm.kl-horizon",
                fix="give --algorithm.kl-target, too",
            )
        if self.kl_target is not None and not self.has_kl:
            raise InputError(
                "a KL target without a KL coefficient",
                where="--algorithm.kl-target",
                fix="give a KL coefficient, too",
            )
        if self.reference_reset_every < 0 or (self.reference_reset_every and not self.has_kl):
            raise InputError(
                "the steps between resets of the reference are negative, or nothing reads it",
                where="--algorithm.reference-reset-every",
                fix="give a KL coefficient, too",
            )
        for estimator, name in (
            ("kl_reward_estimator", "kl_reward_coef"),
            ("kl_estimator", "kl_loss_coef"),
        ):
            coefficient = getattr(self, name)
            if not coefficient and getattr(self, estimator) != getattr(ReferenceKl, estimator):
                flag = f"--algorithm.{estimator.replace('_', '-')}"
                raise InputError(
                    "an estimator of a KL whose coefficient is 0",
                    where=flag,
                    fix=f"give --algorithm.{name.replace('_', '-')}, too",
                )

    @property
    def has_kl(self) -> bool:
        """True with a KL to the reference."""
        return bool(self.kl_reward_coef or self.kl_loss_coef)


def kl_estimate(
    log_probs: Array, reference_log_probs: Array, estimator: RewardEstimator = "k1"
) -> Array:
    """Return the estimate of each token's KL to the reference, of the shape of the log-probs."""
    match estimator:
        case "k1":
            return k1(log_probs, reference_log_probs)
        case "k2":
            return k2(log_probs, reference_log_probs)
        case "k3":
            return k3(log_probs, reference_log_probs)
        case "abs":
            return jnp.abs(k1(log_probs, reference_log_probs))


def kl_loss(
    log_probs: Array,
    old_log_probs: Array,
    reference_log_probs: Array,
    estimator: LossEstimator = "exact",
) -> Array:
    """Return the term of each token whose weighted sum is the KL in the loss, see the table above.

    exact is ratio x k3, differentiated through both factors. E_old[ratio k3] = E_policy[k3] = KL
    for every policy, so the gradients agree too. The gradient of k3 alone misses that the
    distribution of the tokens changes.
    """
    value_estimator: RewardEstimator
    match estimator:
        case "exact":
            ratio = jnp.exp(log_probs - old_log_probs)
            return ratio * k3(log_probs, reference_log_probs)
        case "k1" | "k2" | "k3" | "abs":
            return kl_estimate(log_probs, reference_log_probs, estimator)
        case "k1+":
            value_estimator = "k1"
        case "k3+":
            value_estimator = "k3"
        case "abs+":
            value_estimator = "abs"
    value = kl_estimate(log_probs, reference_log_probs, value_estimator)
    gradient = k2(log_probs, reference_log_probs)
    return gradient + jax.lax.stop_gradient(value - gradient)


def adapted_kl_scale(scale: Array, kl: Array, target: float, horizon: float) -> Array:
    """Return scale x (1 + clip(kl / target - 1, +-0.2) / horizon): an adaptive KL coefficient
    (arXiv 1909.08593, eq. 4).

    `kl` and `target` are nats per completion. `horizon` is in optimizer steps: the paper's horizon,
    in completions, divided by the completions of one step.
    """
    return scale * (1.0 + jnp.clip(kl / target - 1.0, -0.2, 0.2) / horizon)
