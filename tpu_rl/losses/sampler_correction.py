"""Corrections for a sampler that is not quite the policy: it rounds, has older weights, or samples
from a part of the vocabulary only.

    d_t = log old policy(y_t) - log mu(y_t),    D = sum of d_t over the actions of a completion

mu is the distribution that was sampled from. The loss of each token is multiplied by a weight:

    token_truncate      clip(exp d_t, floor, cap)           verl rollout_is=token
    token_mask          exp d_t in [floor, cap], else 0     verl with two thresholds (IcePop)
    sequence_truncate   clip(exp D, floor, cap)             verl rollout_is=sequence
    sequence_mask       exp D in [floor, cap], else 0       TRL's default, with cap 3

or a token or completion leaves the loss and its denominators, by the distance from mu:

    k1 = -d_t,    k2 = d_t^2 / 2,    k3 = exp(d_t) - 1 - d_t

of a token, or their sum, mean or largest over a completion (verl's rollout_rs). k1 stays within
log rejection_min and log rejection_max, k2 and k3 stay below rejection_max.

The modes are those of TRL 1.16 (`vllm_importance_sampling_mode`) and of verl 0.9.1
(`rollout_corr_helper.py`). Deviations: one rejection criterion at a time, where verl takes a list;
verl clips d_t and D to +-20. A completion is a row, also if an episode has several.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from tpu_rl import ranges
from tpu_rl.errors import InputError
from tpu_rl.losses import masked
from tpu_rl.losses.policy_batch import Draft, Part, PolicyBatch, actions_of
from tpu_rl.losses.shapes import BoolNT, FloatMKRS, FloatNT, FloatRS
from tpu_rl.ranges import In, Needs, Positive
from tpu_rl.types import Array, Layout, Metrics, Rollout

Mode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
Rejection = Literal[
    "none",
    "token_k1",
    "token_k2",
    "token_k3",
    "sequence_sum_k1",
    "sequence_sum_k2",
    "sequence_sum_k3",
    "sequence_mean_k1",
    "sequence_mean_k2",
    "sequence_mean_k3",
    "sequence_max_k2",
    "sequence_max_k3",
]


NEEDS_CAP = Needs("importance_sampling_cap", why="there are no importance weights without a cap")


@dataclass(frozen=True, kw_only=True)
class SamplerCorrection(ranges.Checked):
    """Settings of the correction, a base of algorithms' configurations."""

    old_log_probs: Literal["auto", "sampler", "recomputed"] = "auto"
    """Denominator of the ratio: the sampler's log-probs, at no cost, or those of another forward
    pass of the policy before its update. auto: recomputed with an importance sampling cap or a
    rejection, which compare the two, and the sampler's otherwise."""
    importance_sampling_cap: (
        Annotated[float, In("[1, inf]", "use e.g. 2; the weight of equal policies is 1")] | None
    ) = None
    """Multiply each token's loss by the importance weight old policy / sampling distribution, up to
    this cap: it corrects for a sampler that rounds, is older, or leaves tokens out. 2 is usual."""
    importance_sampling_mode: Annotated[Mode, NEEDS_CAP] = "token_truncate"
    """Weight per token, or per completion: the product over its tokens (sequence). Above the cap it
    is the cap (truncate), or 0 (mask)."""
    importance_sampling_floor: Annotated[
        float | None, In("[0, 1]", "use e.g. 0.5; the weight of equal policies is 1"), NEEDS_CAP
    ] = None
    """Weights below are raised to this number (truncate), or 0 (mask)."""
    importance_sampling_normalize: Annotated[bool, NEEDS_CAP] = False
    """Divide the weights by their mean over the batch: of tokens, or of completions in the modes of
    sequences."""
    rejection: Rejection = "none"
    """Leave out tokens or completions whose distance from the sampler, estimated by k1, k2 or k3,
    is out of range; for completions, the sum, mean or largest over their tokens."""
    rejection_max: float | None = None
    """Largest distance; for k1 the largest ratio sampling distribution / old policy."""
    rejection_min: float | None = None
    """Smallest such ratio. Only for k1."""
    off_policy_mask_threshold: Positive | None = None
    """Leave completions with a negative advantage out of the policy loss if the mean over their
    tokens of log sampler - log policy is above this number of nats (DeepSeek-V3.2, arXiv
    2512.02556, eq. 9)."""

    def __post_init__(self):
        super().__post_init__()
        needs = {"rejection_max": self.rejection != "none", "rejection_min": "k1" in self.rejection}
        for name, is_needed in needs.items():
            value = self.rejection_max if name == "rejection_max" else self.rejection_min
            if (value is not None) != is_needed or (value is not None and value <= 0):
                raise InputError(
                    f"rejection {self.rejection} with {name} {value}",
                    where=f"--algorithm.rejection, --algorithm.{name.replace('_', '-')}",
                    fix="k1 needs a positive minimum and maximum, k2 and k3 a maximum alone",
                )
        low = self.rejection_min
        high = self.rejection_max
        if low is not None and high is not None and not low <= 1 <= high:
            raise InputError(
                f"rejection from {low} to {high} leaves out equal policies",
                where="--algorithm.rejection-min, --algorithm.rejection-max",
                fix="use a minimum below 1 and a maximum above 1",
            )

    @property
    def compares(self) -> bool:
        """True if old policy and sampler are compared before the update."""
        return self.importance_sampling_cap is not None or self.rejection != "none"

    @property
    def recomputes(self) -> bool:
        """True if the old log-probs come from a forward pass of the trainer."""
        return self.old_log_probs == "recomputed" or (
            self.old_log_probs == "auto" and self.compares
        )

    def correction_parts(self) -> tuple[Part, ...]:
        """List the parts that are on."""
        is_on = self.recomputes or self.compares or self.off_policy_mask_threshold is not None
        return (correction(self),) if is_on else ()


def correction(config: SamplerCorrection) -> Part:
    """Make the part that corrects the losses for the sampler, or leaves tokens out."""

    def draft(draft: Draft, state: Any) -> tuple[Draft, Any]:
        draft = draft.recompute() if config.recomputes else draft
        recomputed = draft.recomputed if config.recomputes else None
        old = None if recomputed is None else recomputed.log_probs
        rollout = draft.rollout
        layout = draft.layout
        weights = correct(config, rollout, layout, actions_of(rollout), old)
        fields = {} if old is None else {"old_log_probs": old}
        if weights.importance is not None:
            fields["importance"] = layout.pack(weights.importance)
        shares = {"policy/importance_capped": weights.capped, "policy/rejected": weights.rejected}
        shares = {name: values for name, values in shares.items() if values is not None}
        draft = draft._replace(
            learned=weights.keep(draft.learned), shares={**draft.shares, **shares}
        )
        return draft.with_fields(**fields), state

    def losses(losses: Array, log_probs: Array, batch: PolicyBatch) -> tuple[Array, Metrics]:
        return corrected_losses(losses, log_probs, batch, config.off_policy_mask_threshold)

    return Part(draft, losses=losses)


def corrected_losses(
    losses: FloatRS,
    log_probs: FloatRS,
    batch: PolicyBatch,
    off_policy_threshold: float | None = None,
) -> tuple[FloatRS, Metrics]:
    """Apply the correction for the sampler to the policy losses [R, S], and return its metrics.

    The losses are multiplied by the batch's importance weights. With an off-policy threshold, a
    completion with a negative advantage has none if the mean over its tokens of log sampler - log
    policy is above the threshold (arXiv 2512.02556, eq. 9). The policy is the present one, so later
    optimizer steps of a batch mask more. `log_probs` are zero outside the mask.
    """
    mask = batch.action_mask
    metrics: Metrics = {}
    if batch.importance is not None:
        losses *= batch.importance
        metrics["policy/importance"] = masked.average(batch.importance, mask)
    if off_policy_threshold is not None:
        sampler = batch.sampler_log_probs
        gap = (batch.old_log_probs if sampler is None else sampler) - log_probs
        ids = jnp.where(mask, batch.rows.sequence_ids, 0)
        lengths = masked.sequence_total(mask.astype(gap.dtype), ids)
        mean_gap = masked.sequence_total(jax.lax.stop_gradient(gap), ids) / jnp.maximum(lengths, 1)
        is_off = (batch.advantages < 0) & (mean_gap > off_policy_threshold)
        losses = jnp.where(is_off, 0.0, losses)
        metrics["policy/off_policy_masked"] = masked.average(is_off.astype(jnp.float32), mask)
    return losses, metrics


class Corrected(NamedTuple):
    """Results of a comparison with the sampler, [N, T]."""

    importance: Array | None = None
    """Weights of the losses, 1 outside actions."""
    capped: Array | None = None
    """1.0 where cap or floor changed the weight."""
    rejected: Array | None = None
    """1.0 at tokens that leave the loss."""

    def keep(self, learned: Array) -> Array:
        """Take the rejected tokens from `learned` [N, T] bool."""
        return learned if self.rejected is None else learned & (self.rejected == 0)


def correct(
    config: SamplerCorrection,
    rollout: Rollout,
    layout: Layout,
    actions: BoolNT,
    old: FloatMKRS | None,
) -> Corrected:
    """Compare the old policy with the sampler.

    Args:
      config: what to compute.
      layout: their places in packed rows.
      actions: [N, T] bool, the actions of the policy's own rows.
      old: packed log-probs of the old policy; None: the sampler's.
    """
    importance = capped = rejected = None
    if config.compares:
        old_log_probs = rollout.log_probs if old is None else layout.unpack(old)
        log_ratio = jnp.where(actions, old_log_probs - rollout.behaviour_log_probs, 0.0)
        if config.importance_sampling_cap is not None:
            importance, capped = importance_weights(config, log_ratio, actions)
        if config.rejection != "none":
            rejected = jnp.where(actions, ~is_near(config, log_ratio, actions), False) * 1.0
    return Corrected(importance, capped, rejected)


def importance_weights(
    config: SamplerCorrection, log_ratio: FloatNT, actions: BoolNT
) -> tuple[FloatNT, FloatNT]:
    """Compute the weights, and 1.0 where the bounds changed them, [N, T].

    `log_ratio` [N, T] is log old policy - log sampling distribution, and zero outside `actions`.
    Without bounds, the expectation of the loss is the one under the old policy, wherever the
    sampler can choose what the old policy can; with a token's weight, given the prefix. The bounds
    limit the variance and leave a bias. With a recomputed old policy this is the weight of the
    decoupled objective (AReaL, arXiv 2505.24298, eq. 5).
    """
    cap = config.importance_sampling_cap
    floor = config.importance_sampling_floor
    of_sequence = config.importance_sampling_mode.startswith("sequence")
    if of_sequence:
        # sum_t d_t, at every token of the completion.
        log_ratio = jnp.broadcast_to(log_ratio.sum(-1, keepdims=True), log_ratio.shape)
    ratio = jnp.exp(log_ratio)
    weights = jnp.clip(ratio, floor, cap)
    is_bounded = (weights != ratio) & actions
    if config.importance_sampling_mode.endswith("mask"):
        weights = jnp.where(is_bounded, 0.0, weights)
    if config.importance_sampling_normalize:
        # Tokens count alike; in the modes of sequences, completions do.
        shares = actions / jnp.maximum(actions.sum(-1, keepdims=True), 1)
        shares = shares if of_sequence else actions * 1.0
        mean = masked.total(weights * shares, actions) / jnp.maximum(shares.sum(), 1.0)
        weights /= jnp.where(mean > 1e-8, mean, 1.0)
    return jnp.where(actions, weights, 1.0), is_bounded * 1.0


def is_near(config: SamplerCorrection, log_ratio: FloatNT, actions: BoolNT) -> BoolNT:
    """Say where the distance from the sampler is in range, [N, T] bool.

    `log_ratio` is that of `importance_weights`.
    """
    level, estimator = config.rejection.rsplit("_", 1)
    distance = {
        "k1": -log_ratio,
        "k2": 0.5 * jnp.square(log_ratio),
        "k3": jnp.expm1(log_ratio) - log_ratio,
    }[estimator]
    match level:
        case "sequence_sum":
            distance = masked.total(distance, actions, axis=-1)[:, None]
        case "sequence_mean":
            distance = masked.mean(distance, actions, axis=-1)[:, None]
        case "sequence_max":
            distance = jnp.max(distance, axis=-1, initial=0.0, where=actions)[:, None]
    lowest, highest = config.rejection_min or 1.0, config.rejection_max or 1.0
    if estimator == "k1":
        near = (distance >= math.log(lowest)) & (distance <= math.log(highest))
    else:
        near = distance <= highest
    return jnp.broadcast_to(near, actions.shape)
