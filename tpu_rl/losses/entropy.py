"""The entropy of the policy: a bonus, a target of the sampling temperature, and the tokens with the
highest entropy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import jax.numpy as jnp

from tpu_rl import ranges
from tpu_rl.losses import masked
from tpu_rl.losses.controllers import is_empty
from tpu_rl.losses.policy_batch import Controller, Draft, Part, PolicyBatch, Prediction
from tpu_rl.losses.shapes import BoolNT, FloatNT
from tpu_rl.ranges import In, NotNegative, Positive
from tpu_rl.types import Array, Metrics, Params


@dataclass(frozen=True, kw_only=True)
class EntropySettings(ranges.Checked):
    """Settings of the entropy. Coefficients multiply nats."""

    entropy_coef: NotNegative = 0.0
    """Coefficient of the entropy bonus."""
    sampled_entropy: Positive | None = None
    """Nats per token. The sampling temperature rises while the entropy of the distributions sampled
    from is below this, and falls while it is above; 0.3 is usual (AceReason-Nemotron 1.1)."""
    top_entropy_quantile: Annotated[float, In("(0, 1]")] = 1.0
    """Learn only from this share of the batch's tokens, those with the highest entropy before the
    update (arXiv 2506.01939); 0.2 is usual. The KL in the loss is about all tokens."""

    def temperature_parts(self) -> tuple[Part, ...]:
        """List the part of the sampling temperature, which stands before those that read it."""
        if self.sampled_entropy is None:
            return ()
        return (sampled_entropy(self.sampled_entropy),)

    def entropy_parts(self) -> tuple[Part, ...]:
        """List the other parts that are on."""
        parts = []
        if self.top_entropy_quantile < 1:
            parts.append(top_entropy_tokens(self.top_entropy_quantile))
        if self.entropy_coef:
            parts.append(entropy_bonus(self.entropy_coef))
        return tuple(parts)


def entropy_bonus(coef: float) -> Part:
    """Make the part that subtracts coef x entropy from the loss of each token."""

    def weighted(
        values: Array, prediction: Prediction, batch: PolicyBatch
    ) -> tuple[Array, Metrics]:
        bonus = coef * batch.weights["policy"]
        if batch.high_entropy is not None:
            bonus = bonus * batch.high_entropy
        return values - bonus * prediction.tokens.entropy, {}

    return Part(weighted=weighted, entropy_gradient=True)


def sampled_entropy(target: float) -> Part:
    """Make the part "temperature": batches have the temperature of `temperature_controller`."""

    def draft(draft: Draft, state: Array) -> tuple[Draft, Array]:
        temperature = draft.temperature * state
        packed = jnp.broadcast_to(temperature, draft.layout.source.shape)
        draft = draft._replace(temperature=temperature).with_fields(temperature=packed)
        return draft, state

    return Part(draft, name="temperature", controller=temperature_controller(target))


def top_entropy_tokens(share: float) -> Part:
    """Make the part that learns from the tokens of `top_entropy` alone."""

    def draft(draft: Draft, state: Any) -> tuple[Draft, Any]:
        draft = draft.recompute()
        assert draft.recomputed is not None
        entropy = draft.layout.unpack(draft.recomputed.entropy)
        high = top_entropy(entropy, draft.learned, share)
        return draft.with_fields(high_entropy=draft.layout.pack(high)), state

    def losses(losses: Array, log_probs: Array, batch: PolicyBatch) -> tuple[Array, Metrics]:
        high = batch.high_entropy
        assert high is not None
        share = masked.average(high, batch.weights["policy"] > 0)
        return jnp.where(high > 0, losses, 0.0), {"policy/high_entropy": share}

    return Part(draft, losses=losses)


def top_entropy(entropy: FloatNT, learned: BoolNT, share: float) -> FloatNT:
    """Give 1.0 at learned tokens whose entropy is among the top `share` of the batch, [N, T].

    arXiv 2506.01939, where the share is 0.2. The quantile is that of all learned tokens of the
    batch under the policy before the update, whatever the packing; TRL 1.16 takes that of each
    micro-batch under the present policy.
    """
    threshold = jnp.nanquantile(jnp.where(learned, entropy, jnp.nan), 1.0 - share)
    return (learned & (entropy >= threshold)) * 1.0


TEMPERATURES = (0.1, 10.0)
"""The smallest and the largest factor of the sampling temperature."""


def temperature_controller(target: float) -> Controller:
    """Make the controller of the sampling temperature that keeps the policy's entropy at the
    target, in nats per token.

        ln T <- ln T + 0.1 (target - H),    |target - H| at most 1

    H is the mean entropy of the distributions that tokens were sampled from, "policy/entropy". The
    state is the factor of the run's temperature, 1 at first. AceReason-Nemotron 1.1 (arXiv
    2506.13284) solves for T before a stage; here it follows the policy.
    """

    def init_state(params: Params) -> Array:
        return jnp.ones((), jnp.float32)

    def after_update(
        params: Params, factor: Array, metrics: dict[str, Array]
    ) -> tuple[Params, Array]:
        missing = jnp.clip(target - metrics["policy/entropy"], -1.0, 1.0)
        moved = jnp.clip(factor * jnp.exp(0.1 * missing), *TEMPERATURES)
        stays = is_empty(metrics)
        return params, jnp.where(stays, factor, moved).astype(jnp.float32)

    return init_state, after_update


def temperature_factor(state: Mapping[str, Any]) -> Array:
    """Read the factor of the sampling temperature in an algorithm's state."""
    return state["temperature"]
