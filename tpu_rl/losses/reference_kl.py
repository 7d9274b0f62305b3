"""The KL to the reference, in the reward or in the loss: its settings and its estimators.

Of tokens y ~ policy, with x = log policy(y) - log reference(y), as a loss and on policy:

    estimator  value               its expectation    the expectation of its gradient
    k1         x                   KL                 0
    k2         x^2 / 2             not KL             that of KL(policy || reference)
    k3         exp(-x) - 1 + x     KL                 that of KL(reference || policy)
    abs        |x|                 not KL             that of sum |policy - reference|
    exact      policy/old x k3     KL                 that of KL(policy || reference)

Only exact keeps value and gradient off policy, where the others lack the importance ratio. The
prefixes are taken as given in all of them: for the KL of whole sequences, put k1 into the reward.
There, where nothing is differentiated, k1 and k3 are unbiased.

k1 to k3: J. Schulman, "Approximating KL divergence". TRL 1.16: exact is `use_bias_correction_kl`,
its default, and k3 without it. verl 0.9.1 (`kl_penalty`): kl, mse, low_var_kl and abs are k1, k2,
k3 and abs; it clips k3 to +-10 and its exponent to +-20, we do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from tpu_rl import ranges
from tpu_rl.losses import masked
from tpu_rl.losses.controllers import is_empty, moving_reference
from tpu_rl.losses.log_probs import frozen_log_probs, k1, k2, k3
from tpu_rl.losses.policy_batch import (
    Controller,
    Draft,
    Part,
    PolicyBatch,
    Prediction,
    learned_tokens,
)
from tpu_rl.losses.shapes import BoolRS, FloatMKRS, FloatNT, FloatRS, Floats, IntRS, Scalar
from tpu_rl.ranges import Conflicts, CountOrNone, In, Needs, NotNegative, Positive
from tpu_rl.types import Array, Layout, Metrics, Params, Role, Rollout, Sum

LossEstimator = Literal["exact", "k1", "k2", "k3", "abs"]

NEEDS_KL = Needs("kl_reward_coef", "kl_loss_coef", why="nothing else reads the reference")


@dataclass(frozen=True, kw_only=True)
class ReferenceKl(ranges.Checked):
    """Settings of the KL to the reference, a base of algorithms' configurations."""

    kl_reward_coef: NotNegative = 0.0
    """Coefficient of the KL to the reference, log policy - log reference, that is subtracted from
    each token's reward."""
    kl_loss_coef: NotNegative = 0.0
    """Coefficient of the KL of each token's distribution to the reference's in the loss."""
    kl_estimator: Annotated[LossEstimator, Needs("kl_loss_coef")] = "exact"
    """Estimator of this KL. exact has the gradient of the KL, on and off policy. k3 has that of the
    reverse KL, k2 that of the KL on policy, abs that of the L1 distance, k1 none."""
    kl_target: Annotated[Positive | None, NEEDS_KL] = None
    """Nats per completion. The KL coefficients are scaled up or down after every optimizer step to
    hold this KL to the reference."""
    kl_horizon: Annotated[Positive, Needs("kl_target")] = 100.0
    """Optimizer steps in which the scale can change by a fifth."""
    reference_reset_every: Annotated[CountOrNone, NEEDS_KL] = 0
    """Optimizer steps between two times that the reference becomes the policy (ProRL, arXiv
    2505.24864); 0 never. ProRL also begins the moments of the optimizer anew:
    --optimizer.reset-every."""
    reference_reset_share: Annotated[float, In("(0, 1]"), Needs("reference_reset_every")] = 1.0
    """Share of the way to the policy that the reference moves then. 1 makes both equal; with less,
    it is a moving average of the policy (GRPO-CARE, arXiv 2506.16141; TRL's
    `ref_model_mixup_alpha`)."""

    @property
    def has_kl(self) -> bool:
        """True with a KL to the reference."""
        return bool(self.kl_reward_coef or self.kl_loss_coef)

    @property
    def reference_tracks_policy(self) -> float:
        """Share of the way to the policy that the reference moves now and then; 0 if it stays."""
        return self.reference_reset_share if self.reference_reset_every else 0.0

    def kl_parts(self, reference: Role) -> tuple[Part, ...]:
        """List the parts of a method that reads the reference."""
        parts = (kl_to_reference(self, reference),)
        if not self.reference_reset_every:
            return parts
        controller = moving_reference(self.reference_reset_every, self.reference_reset_share)
        return *parts, Part(name="reference", controller=controller)


@dataclass(frozen=True, kw_only=True)
class StagnationReset(ReferenceKl):
    """Setting of methods that reset the reference when returns no longer rise."""

    reference_reset_patience: Annotated[
        CountOrNone, NEEDS_KL, Conflicts("reference_reset_every")
    ] = 0
    """Reset the reference to the policy when the mean return of so many batches was not above the
    best one before (ProRL, arXiv 2505.24864); 0 never. The moments of the optimizer stay."""

    @property
    def reference_tracks_policy(self) -> float:
        """Share of the way to the policy that the reference moves now and then; 0 if it stays."""
        return 1.0 if self.reference_reset_patience else super().reference_tracks_policy

    def kl_parts(self, reference: Role) -> tuple[Part, ...]:
        """List the parts of a method that reads the reference."""
        parts = super().kl_parts(reference)
        patience = self.reference_reset_patience
        return (*parts, reset_when_stagnant(patience)) if patience else parts


def kl_to_reference(config: ReferenceKl, reference: Role) -> Part:
    """Make the part of the KL in the rewards and in the loss, and of its metrics.

    With a target, its state "kl_scale" is the scale of the coefficients, 1 at first. It follows the
    metric "policy/kl_completion".
    """
    adapts = config.kl_target is not None

    def draft(draft: Draft, state: Any) -> tuple[Draft, Any]:
        log_probs, penalty = reference_penalty(
            config,
            reference,
            draft.params,
            draft.rollout,
            draft.layout,
            draft.temperature,
            state if adapts else 1.0,
        )
        draft = draft._replace(
            rewards=draft.rewards - penalty, returns=draft.returns - penalty.sum(-1)
        )
        return draft.with_fields(reference_log_probs=log_probs), state

    def batch(batch: PolicyBatch, draft: Draft, state: Any) -> PolicyBatch:
        if not adapts:
            return batch
        return batch.with_weights(kl=batch.weights["policy"] * state)

    def term(prediction: Prediction, batch: PolicyBatch) -> tuple[Array, Metrics]:
        log_probs, reference_log_probs = prediction.log_probs, batch.reference_log_probs
        assert reference_log_probs is not None
        weights = batch.weights["policy"]
        kl = kl_loss(log_probs, batch.old_log_probs, reference_log_probs, config.kl_estimator)
        if batch.importance is not None:
            kl *= batch.importance
        kl_weights = batch.weights.get("kl", weights)
        value = config.kl_loss_coef * masked.total(kl_weights * kl, weights > 0)
        metrics = reference_metrics(
            log_probs, reference_log_probs, batch.action_mask, batch.rows.sequence_ids
        )
        if "kl" in batch.weights:
            metrics["policy/kl_scale"] = Sum(kl_weights.sum(), weights.sum())
        return value, metrics

    part = Part(draft, batch, term=term)
    if config.kl_target is None:
        return part
    controller = kl_scale_controller(config.kl_target, config.kl_horizon)
    return part._replace(name="kl_scale", controller=controller)


def reset_when_stagnant(patience: int) -> Part:
    """Make the part "stagnation", see `stagnation_controller`."""

    def draft(draft: Draft, state: Stagnation) -> tuple[Draft, Stagnation]:
        return draft, with_return(state, draft.rollout)

    return Part(draft, name="stagnation", controller=stagnation_controller(patience))


def kl_loss(
    log_probs: Floats,
    old_log_probs: Floats,
    reference_log_probs: Floats,
    estimator: LossEstimator = "exact",
) -> Floats:
    """Compute the term of each token whose weighted sum is the KL in the loss, see the table above.

    exact is ratio x k3, differentiated through both factors. E_old[ratio k3] = E_policy[k3] = KL
    for every policy, so the gradients agree too. The gradient of k3 alone misses that the
    distribution of the tokens changes.
    """
    match estimator:
        case "exact":
            ratio = jnp.exp(log_probs - old_log_probs)
            return ratio * k3(log_probs, reference_log_probs)
        case "k1":
            return k1(log_probs, reference_log_probs)
        case "k2":
            return k2(log_probs, reference_log_probs)
        case "k3":
            return k3(log_probs, reference_log_probs)
        case "abs":
            return jnp.abs(k1(log_probs, reference_log_probs))


def adapted_kl_scale(scale: Scalar, kl: Scalar, target: float, horizon: float) -> Scalar:
    """Compute scale x (1 + clip(kl / target - 1, +-0.2) / horizon): an adaptive KL coefficient
    (arXiv 1909.08593, eq. 4).

    `kl` and `target` are nats per completion. `horizon` is in optimizer steps: the paper's horizon,
    in completions, divided by the completions of one step.
    """
    return scale * (1.0 + jnp.clip(kl / target - 1.0, -0.2, 0.2) / horizon)


def reference_penalty(
    config: ReferenceKl,
    reference: Role,
    params: Params,
    rollout: Rollout,
    layout: Layout,
    temperature: Scalar | float,
    scale: Scalar | float = 1.0,
) -> tuple[FloatMKRS, FloatNT]:
    """Compute the reference's log-probs, packed [M, K, R, S], and the penalty of each token [N, T]
    that is subtracted from its reward: scale x kl_reward_coef x KL to the reference."""
    rows = layout.rows(rollout.tokens)
    log_probs = frozen_log_probs(reference, params, rows, temperature)
    unpacked = layout.unpack(log_probs)
    kl = k1(rollout.log_probs, unpacked)
    penalty = scale * config.kl_reward_coef * kl
    return log_probs, jnp.where(rollout.action_mask, penalty, 0.0)


def reference_metrics(
    log_probs: FloatRS, reference_log_probs: FloatRS, mask: BoolRS, sequence_ids: IntRS
) -> Metrics:
    """Measure the distance from policy to reference: per token by k3, and per completion, in nats,
    by k1. All arrays are [R, S]."""
    completions = masked.sequence_count(mask, sequence_ids)
    completion_kl = masked.total(k1(log_probs, reference_log_probs), mask)
    return {
        "policy/kl_reference": masked.average(k3(log_probs, reference_log_probs), mask),
        "policy/kl_completion": Sum(completion_kl, completions.astype(jnp.float32)),
    }


def kl_scale_controller(target: float, horizon: float) -> Controller:
    """Make the controller of the scale of the KL coefficients, see `adapted_kl_scale`."""

    def init_state(params: Params) -> Array:
        return jnp.ones((), jnp.float32)

    def after_update(
        params: Params, scale: Array, metrics: dict[str, Array]
    ) -> tuple[Params, Array]:
        kl = metrics["policy/kl_completion"]
        moved = adapted_kl_scale(scale, kl, target, horizon)
        return params, jnp.where(is_empty(metrics), scale, moved)

    return init_state, after_update


class Stagnation(NamedTuple):
    """Progress since the last reset of the reference, [] float32."""

    best: Array
    """The largest mean return of a batch."""
    batches: Array
    """Batches since then."""


def stagnation_controller(patience: int) -> Controller:
    """Make the controller that resets the reference to the policy when the mean return of
    `patience` batches was not above the best one before (ProRL, arXiv 2505.24864, section 2.3).

    `with_return` tells it of each batch. The paper watches a validation score, and resets the
    moments of the optimizer too; here they stay.
    """

    def init_state(params: Params) -> Stagnation:
        return Stagnation(jnp.asarray(-jnp.inf, jnp.float32), jnp.zeros((), jnp.float32))

    def after_update(
        params: Params, state: Stagnation, metrics: dict[str, Array]
    ) -> tuple[Params, Stagnation]:
        is_due = state.batches >= patience
        moved = jax.tree.map(
            lambda old, new: jnp.where(is_due, new, old), params["reference"], params["policy"]
        )
        begun = init_state(params)
        state = Stagnation(
            *(jnp.where(is_due, new, old) for new, old in zip(begun, state, strict=True))
        )
        return params | {"reference": moved}, state

    return init_state, after_update


def with_return(state: Stagnation, rollout: Rollout) -> Stagnation:
    """Compute the state after a batch; one without scored episodes changes nothing."""
    learned = learned_tokens(rollout)
    scored = learned.any(-1)
    mean = masked.mean(masked.total(rollout.rewards, learned, axis=-1), scored)
    is_better = mean > state.best
    moved = Stagnation(
        jnp.where(is_better, mean, state.best), jnp.where(is_better, 0.0, state.batches + 1)
    )
    return Stagnation(
        *(jnp.where(scored.any(), new, old) for new, old in zip(moved, state, strict=True))
    )
