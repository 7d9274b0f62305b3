"""The critic of actor-critic methods: which model it is, what it says, how it is fitted and how good it is.

V(s_t) is the value of the state *before* token t, so it is read where that token is predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct

from tpu_rl import masked
from tpu_rl.errors import InputError
from tpu_rl.log_probs import predicting
from tpu_rl.needs import RoleSpec
from tpu_rl.types import Array, Layout, Metrics, Params, Role, Rows, Sum


@dataclass(frozen=True)
class Critic:
    """The value function, whose values are in units of reward."""

    trunk: Literal["own", "shared"] = "own"
    """own: a whole model beside the policy. shared: one number from the policy's hidden states, which both losses then
    shape."""
    model: str | None = None
    """What an own trunk begins as: directory, hub id or model folder of a run (a reward model, a pretrained critic);
    the policy's first weights if it is not given."""
    gamma: float = 1.0
    """Discount of a reward for each token that the policy chose before it."""
    lam: float = 0.95
    """Lambda of the returns that values are fitted to; 1 is what was really earned."""
    clip: float | None = 0.2
    """Furthest that a value may move from its old one before its loss has no gradient."""
    coef: float = 0.5
    """Times the value loss."""
    learning_rate_scale: float = 1.0
    """Of an own trunk, or of the head alone, times the run's learning rate."""

    def __post_init__(self):
        if not (0 < self.gamma <= 1 and 0 <= self.lam <= 1):
            raise InputError(
                f"gamma {self.gamma} or lambda {self.lam} of the critic is no share", where="--algorithm.critic",
                fix="use numbers up to 1",
            )  # fmt: skip
        if min(self.coef, self.learning_rate_scale) <= 0 or (self.clip is not None and self.clip <= 0):
            raise InputError(
                "a critic's coefficient, rate or clip is not positive", where="--algorithm.critic", fix="raise it"
            )
        if self.trunk == "shared" and self.model is not None:
            raise InputError(
                "a critic on the policy's trunk begins as no other model", where="--algorithm.critic.model",
                fix="use --algorithm.critic.trunk own",
            )  # fmt: skip

    @property
    def spec(self) -> RoleSpec:
        """The role "value"."""
        trunk_of = "policy" if self.trunk == "shared" else None
        scale = self.learning_rate_scale
        return RoleSpec(True, path=self.model, outputs=1, trunk_of=trunk_of, learning_rate_scale=scale)


def values(role: Role, params: Params, rows: Rows, hidden: Array | None = None) -> Array:
    """V of the state before each token, [R, S] float32; from the hidden states of the role's trunk, where known."""
    hidden = role.hidden(params, rows) if hidden is None else hidden
    return role.logits(params, predicting(hidden, rows))[..., 0]


def clipped_value_loss(values: Array, old_values: Array, returns: Array, clip: float | None) -> Array:
    """1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), each token's (PPO, as in arXiv 1909.08593's code)."""
    loss = jnp.square(values - returns)
    if clip is not None:
        near = jnp.clip(values, old_values - clip, old_values + clip)
        loss = jnp.maximum(loss, jnp.square(near - returns))
    return 0.5 * loss


@struct.dataclass
class Targets:
    """What a critic is fitted to, and how far it was from it beforehand. Packed, [M, K, R, S]; the loss sees [R, S]."""

    returns: Array
    old_values: Array
    squares: Array
    """Of returns, from their mean."""
    residual_squares: Array
    """Of returns - old values, from their mean. One minus the quotient of the two sums is the explained variance: 1 is
    a perfect critic, 0 one as good as a constant; measured before any update has seen the returns."""


def targets(returns: Array, old_values: Array, mask: Array, layout: Layout) -> Targets:
    """From [N, T] arrays; means are over the mask's tokens of the optimizer step that a row belongs to."""

    def of_step(rows: Array) -> Array:
        return jax.ops.segment_sum(rows, layout.minibatch, num_segments=layout.minibatches + 1)

    def squares(x: Array) -> Array:
        means = of_step(masked.total(x, mask, axis=-1)) / jnp.maximum(of_step(mask.sum(-1)), 1)
        return jnp.where(mask, jnp.square(x - means[layout.minibatch][:, None]), 0.0)

    arrays = (returns, old_values, squares(returns), squares(returns - old_values))
    return Targets(*(layout.pack(jnp.where(mask, array, 0.0)) for array in arrays))


def value_loss(values: Array, targets: Targets, weights: Array, clip: float | None) -> tuple[Array, Metrics]:
    """(sum w loss, metrics of the tokens that have a weight w); all [R, S]."""
    mask = weights > 0
    losses = clipped_value_loss(values, targets.old_values, targets.returns, clip)
    value = masked.total(weights * losses, mask)
    count = mask.sum().astype(jnp.float32)
    all_squares, residual_squares = (x.sum() for x in (targets.squares, targets.residual_squares))
    metrics: Metrics = {
        "value/loss": Sum(value, weights.sum()),
        "value/mean": Sum(masked.total(values, mask), count),
        "value/explained_variance": Sum(all_squares - residual_squares, all_squares),
    }
    if clip is not None:
        clipped = jnp.abs(values - targets.old_values) > clip
        metrics["value/clip"] = Sum(masked.total(clipped.astype(jnp.float32), mask), count)
    return value, metrics
