"""The critic of actor-critic methods: its settings, its values, its loss and its metrics.

V(s_t) is the value of the state *before* token t, so it is read where that token is predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from flax import struct

from tpu_rl import ranges
from tpu_rl.algorithm_spec import RoleSpec
from tpu_rl.losses import masked
from tpu_rl.losses.log_probs import predicting
from tpu_rl.losses.shapes import BoolNT, FloatNT, FloatRS, FloatRSD, Scalar
from tpu_rl.ranges import Conflicts, In, Positive, Share
from tpu_rl.types import Array, Layout, Metrics, PackedRows, Params, Role, Sum


@dataclass(frozen=True)
class Critic:
    """The value function. Values are in units of reward."""

    trunk: Annotated[
        Literal["own", "shared"],
        Conflicts("model", when="shared", why="the policy's trunk starts as the policy"),
    ] = "own"
    """own: a whole model beside the policy. shared: a head on the policy's hidden states, which
    then learn from both losses."""
    model: str | None = None
    """Start an own trunk as this model (a reward model, a pretrained critic): a directory, a hub id
    or the model folder of a run. By default it starts as the policy does."""
    gamma: Annotated[float, In("(0, 1]")] = 1.0
    """Discount per token that the policy chose."""
    lam: Share = 0.95
    """Lambda of the returns that values are fitted to; 1 takes the Monte-Carlo returns."""
    clip: Positive | None = 0.2
    """Distance from its old value beyond which a value has no gradient."""
    huber: Positive | None = None
    """Distance of value and return beyond which the loss grows linearly (Huber), so that outliers
    and corrupted rewards pull less; none is the squared loss. With --reward of 0 and 1, below 1."""
    quantile: Annotated[float, In("(0, 1)")] = 0.5
    """Weight of returns above the value against those below, quantile to 1 - quantile. 0.5 is the
    mean; others are expectiles and, with a small Huber distance, quantiles of the return."""
    coef: Positive = 0.5
    """Coefficient of the value loss."""
    learning_rate_scale: Positive = 1.0
    """Learning rate of an own trunk, or of the head alone, as a multiple of the run's."""

    def __post_init__(self):
        ranges.check(self, "--algorithm.critic")

    @property
    def spec(self) -> RoleSpec:
        """Spec of the role "value"."""
        return RoleSpec(
            trainable=True,
            path=self.model,
            outputs=1,
            trunk_of="policy" if self.trunk == "shared" else None,
            learning_rate_scale=self.learning_rate_scale,
        )


def values(role: Role, params: Params, rows: PackedRows, hidden: FloatRSD | None = None) -> FloatRS:
    """Compute V of the state before each token, [R, S] float32.

    `hidden` are the hidden states of the role's trunk, if they are already computed.
    """
    if hidden is None:
        hidden = role.hidden(params, rows)
    return role.logits(params, predicting(hidden, rows))[..., 0]


def clipped_value_loss(
    values: Array,
    old_values: Array,
    returns: Array,
    clip: float | None,
    huber: float | None = None,
    quantile: float = 0.5,
) -> Array:
    """Compute max(l(R - V), l(R - clip(V, V_old - c, V_old + c))) of each token.

        l(u) = 2 |quantile - 1[u < 0]| h(u)
        h(u) = 1/2 u^2, and with a Huber distance d: d (|u| - d / 2) where |u| > d

    With the squares alone this is PPO's value loss, as in the code of arXiv 1909.08593. Huber's
    loss is that of RIQL (arXiv 2310.12955), both together are the quantile Huber loss of arXiv
    1710.10044, up to the factor 2, and a quantile of squares is an expectile (arXiv 2110.06169).
    """

    def loss(error: Array) -> Array:
        losses = 0.5 * jnp.square(error)
        if huber is not None:
            size = jnp.abs(error)
            losses = jnp.where(size > huber, huber * (size - 0.5 * huber), losses)
        if quantile != 0.5:
            losses *= 2.0 * jnp.where(error < 0, 1.0 - quantile, quantile)
        return losses

    losses = loss(returns - values)
    if clip is not None:
        clipped = jnp.clip(values, old_values - clip, old_values + clip)
        losses = jnp.maximum(losses, loss(returns - clipped))
    return losses


@struct.dataclass
class Targets:
    """Targets of a critic, and squares for its explained variance before the update.

    Leaves are [M, K, R, S]; the loss sees [R, S]. The explained variance is one minus the quotient
    of the two sums of squares. It is 1 for a perfect critic and 0 for one as good as a constant.
    """

    returns: Array
    old_values: Array
    squares: Array
    """(returns - mean)^2."""
    residual_squares: Array
    """(returns - old values - mean)^2."""


def targets(returns: FloatNT, old_values: FloatNT, mask: BoolNT, layout: Layout) -> Targets:
    """Pack Targets from [N, T] arrays.

    Means are over the tokens in `mask` of the row's optimizer step.
    """

    def step_totals(row_values: Array) -> Array:
        return jax.ops.segment_sum(
            row_values, layout.minibatch, num_segments=layout.minibatches + 1
        )

    def centered_squares(x: Array) -> Array:
        counts = jnp.maximum(step_totals(mask.sum(-1)), 1)
        means = step_totals(masked.total(x, mask, axis=-1)) / counts
        return jnp.where(mask, jnp.square(x - means[layout.minibatch][:, None]), 0.0)

    def pack(array: Array) -> Array:
        return layout.pack(jnp.where(mask, array, 0.0))

    return Targets(
        returns=pack(returns),
        old_values=pack(old_values),
        squares=pack(centered_squares(returns)),
        residual_squares=pack(centered_squares(returns - old_values)),
    )


def value_loss(
    values: FloatRS, targets: Targets, weights: FloatRS, critic: Critic
) -> tuple[Scalar, Metrics]:
    """Compute the weighted sum of `clipped_value_loss`, and metrics of the tokens with a weight.

    All arrays are [R, S].
    """
    mask = weights > 0
    clip = critic.clip
    losses = clipped_value_loss(
        values, targets.old_values, targets.returns, clip, critic.huber, critic.quantile
    )
    value = masked.total(weights * losses, mask)
    all_squares = targets.squares.sum()
    explained_squares = all_squares - targets.residual_squares.sum()
    metrics: Metrics = {
        "value/loss": Sum(value, weights.sum()),
        "value/mean": masked.average(values, mask),
        "value/explained_variance": Sum(explained_squares, all_squares),
    }
    if clip is not None:
        clipped = jnp.abs(values - targets.old_values) > clip
        metrics["value/clip"] = masked.average(clipped.astype(jnp.float32), mask)
    return value, metrics
