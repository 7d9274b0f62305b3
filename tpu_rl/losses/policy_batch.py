"""The batch that policy-gradient methods learn from, and the parts that a method is made of.

A method is a baseline, a surrogate, weights and a list of parts (`algos.policy_gradient`). A `Part`
is a few optional functions: it changes the rewards, the advantages or the weights of a batch, or
adds a term to the loss, and may keep a state of its own. It knows no other part. The order of the
parts is the order of their effects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from tpu_rl.losses import masked
from tpu_rl.losses.log_probs import TokenLogProbs, token_log_probs
from tpu_rl.losses.shapes import BoolNT, FloatRS, Scalar
from tpu_rl.train import packing
from tpu_rl.types import (
    Array,
    Experience,
    Layout,
    Metrics,
    PackedRows,
    Params,
    Role,
    Rollout,
    RowSource,
    Sum,
)


@struct.dataclass
class PolicyBatch:
    """Input of the loss of a method with an importance ratio. Leaves are [M, K, R, S]; the loss
    sees [R, S]."""

    rows: PackedRows
    weights: dict[str, Array]
    """Weights of the tokens: "policy", and those of the terms of parts by their names."""
    action_mask: Array
    """Tokens that the policy chose. Metrics are about these."""
    advantages: Array
    old_log_probs: Array
    """Log-probs in the denominator of the ratio."""
    reference_log_probs: Array | None = None
    """None if nothing needs them."""
    importance: Array | None = None
    """Factor of each token's loss, which corrects for a sampling distribution other than the old
    policy; None is 1."""
    sampler_log_probs: Array | None = None
    """The sampler's log-probs if `old_log_probs` are others, for the gap between sampler and
    trainer."""
    high_entropy: Array | None = struct.field(default=None, kw_only=True)
    """1 at the tokens that the policy loss and the entropy bonus are about, 0 at others; None is
    all."""
    temperature: Array | None = struct.field(default=None, kw_only=True)
    """The temperature that the batch was sampled at, if it changes from batch to batch."""
    shares: dict[str, Array] = struct.field(default_factory=dict, kw_only=True)
    """Metric -> a number of each token. The metric is the mean over the actions."""
    extras: dict[str, Any] = struct.field(default_factory=dict, kw_only=True)
    """Arrays that a single part or method adds, by a name of its own."""

    def with_weights(self, **weights: Array) -> PolicyBatch:
        """Set weights by their names."""
        return replace(self, weights={**self.weights, **weights})


class Draft(NamedTuple):
    """A batch in the making. Arrays are [N, T] if nothing else is said."""

    rollout: Rollout
    layout: Layout
    params: Params
    policy: Role
    """The role that trains."""
    temperature: Array | float
    """The sampling temperature."""
    max_new_tokens: int
    """The length limit of a completion."""
    rewards: Array
    """The rollout's rewards with the changes of parts; returns are their sums."""
    returns: Array
    """[N]: their sums."""
    learned: Array
    """bool: the tokens that have a weight."""
    advantages: Array
    weights: Mapping[str, Array] = {}
    """Weights of further terms of the loss, by name."""
    fields: Mapping[str, Any] = {}
    """Members of `PolicyBatch` that parts have made, packed."""
    shares: Mapping[str, Array] = {}
    """Those of `PolicyBatch.shares`."""
    recomputed: TokenLogProbs | None = None
    """The policy's log-probs and entropies before the update, packed, if a part needs them."""

    def with_rewards(self, rewards: Array) -> Draft:
        """Take other rewards, and returns that are their sums."""
        returns = masked.total(rewards, self.rollout.action_mask, axis=-1)
        return self._replace(rewards=rewards, returns=returns)

    def add_at_end(self, values: Array) -> Draft:
        """Add values [N] to the rewards of the rows' last actions."""
        last = masked.last(self.rollout.action_mask)
        return self.with_rewards(self.rewards + jnp.where(last, values[:, None], 0.0))

    def with_fields(self, **fields: Any) -> Draft:
        """Set members of the batch."""
        return self._replace(fields={**self.fields, **fields})

    def recompute(self) -> Draft:
        """Compute the policy's log-probs at its actions by a forward pass, unless a part has.

        They are zero outside actions. They replace the sampler's as `old_log_probs` where the
        sampler's programs round differently.
        """
        if self.recomputed is not None:
            return self

        def of_micro_batch(rows: PackedRows) -> TokenLogProbs:
            return token_log_probs(self.policy, self.params, rows, self.temperature)

        rows = self.layout.rows(self.rollout.tokens)
        recomputed = packing.over_micro_batches(of_micro_batch, rows)
        mask = self.layout.pack(self.rollout.action_mask)
        recomputed = jax.tree.map(lambda values: jnp.where(mask, values, 0.0), recomputed)
        return self._replace(recomputed=recomputed)

    def pack(self, weights: Array) -> PolicyBatch:
        """Move advantages and weights [N, T] into packed rows, and add the log-probs."""
        rollout = self.rollout
        layout = self.layout
        sampler_log_probs = layout.pack(rollout.log_probs)
        # With recomputed old log-probs, the sampler's are kept for the gap between the two.
        sampler = {"sampler_log_probs": sampler_log_probs} if "old_log_probs" in self.fields else {}
        fields = {"old_log_probs": sampler_log_probs, **sampler, **self.fields}
        return PolicyBatch(
            rows=layout.rows(rollout.tokens),
            weights={
                name: layout.pack(values)
                for name, values in {"policy": weights, **self.weights}.items()
            },
            action_mask=layout.pack(actions_of(rollout)),
            advantages=layout.pack(self.advantages),
            shares={name: layout.pack(values) for name, values in self.shares.items()},
            **fields,
        )


def begin(
    experience: Experience,
    params: Params,
    policy: Role,
    temperature: Scalar | float,
    max_new_tokens: int = 0,
) -> Draft:
    """Begin a batch: rewards as they are, and all actions of scored rows learned."""
    rollout, layout = experience
    assert isinstance(rollout, Rollout)
    learned = learned_tokens(rollout)
    nothing = jnp.zeros_like(rollout.rewards)
    draft = Draft(
        rollout,
        layout,
        params,
        policy,
        temperature,
        max_new_tokens,
        rewards=rollout.rewards,
        returns=nothing[:, 0],
        learned=learned,
        advantages=nothing,
    )
    return draft.with_rewards(rollout.rewards)


InitState = Callable[[Params], Any]
AfterUpdate = Callable[[Params, Any, dict[str, Array]], tuple[Params, Any]]
Controller = tuple[InitState, AfterUpdate]
"""(init_state, after_update) as in `types.Algorithm`."""


class Prediction(NamedTuple):
    """Log-probs and hidden states of a micro-batch, for terms of the loss."""

    tokens: TokenLogProbs
    log_probs: Array
    """[R, S]: the log-probs of the actions; elsewhere 0, without a gradient."""
    params: Params = {}
    hidden: Array | None = None
    """[R, S, D]: the policy's hidden states."""


class Part(NamedTuple):
    """A part of a policy-gradient method: functions, each of which may be left out."""

    draft: Callable[[Draft, Any], tuple[Draft, Any]] | None = None
    """(draft, the part's state) -> both, before advantages and weights are computed."""
    batch: Callable[[PolicyBatch, Draft, Any], PolicyBatch] | None = None
    """(batch, draft, the part's state) -> batch with other advantages, weights or extras."""
    losses: Callable[[Array, Array, PolicyBatch], tuple[Array, Metrics]] | None = None
    """(losses [R, S], log-probs of the actions [R, S], batch) -> losses before weights, metrics."""
    weighted: Callable[[Array, Prediction, PolicyBatch], tuple[Array, Metrics]] | None = None
    """(losses times weights [R, S], prediction, batch) -> other such values, metrics."""
    term: Callable[[Prediction, PolicyBatch], tuple[Array, Metrics]] | None = None
    """(prediction, batch) -> what is added to the loss of a micro-batch, and metrics."""
    name: str = ""
    """Name of the part's state in that of the algorithm."""
    controller: Controller | None = None
    """The state and how it follows the metrics of a step; None: the part has none, and its
    functions get None."""
    entropy_gradient: bool = False
    """The term reads the gradient of the entropy."""
    stops_gradient: bool = False
    """See `types.Algorithm.stops_gradient`."""


def weighted_term(
    name: str,
    weights: Callable[[Rollout, Layout], Array],
    losses: Callable[[Array, PolicyBatch], Array],
) -> Part:
    """Make the part that adds sum_t w_t losses_t to the loss, with the metric policy/NAME_loss.

    Args:
      name: key of the weights in the batch.
      weights: (rollout, layout) -> [N, T], which sum to the weight of the term in each optimizer
        step, e.g. by `masked.token_mean`.
      losses: (log-probs under the params being trained, batch) -> losses, all [R, S].
    """

    def batch(batch: PolicyBatch, draft: Draft, state: Any) -> PolicyBatch:
        packed = draft.layout.pack(weights(draft.rollout, draft.layout))
        return batch.with_weights(**{name: packed})

    def term(prediction: Prediction, batch: PolicyBatch) -> tuple[Array, Metrics]:
        return term_of(name, losses(prediction.tokens.log_probs, batch), batch)

    return Part(batch=batch, term=term)


def term_of(name: str, losses: FloatRS, batch: PolicyBatch) -> tuple[Scalar, Metrics]:
    """Compute the sum over tokens [R, S] of the weights `name` times the losses, and its metric."""
    weights = batch.weights[name]
    value = masked.total(weights * losses, weights > 0)
    return value, {f"policy/{name}_loss": Sum(value, weights.sum())}


def learned_tokens(rollout: Rollout) -> BoolNT:
    """Mark the actions of scored rows, [N, T] bool."""
    return rollout.action_mask & rollout.scored[:, None]


def actions_of(rollout: Rollout, source: RowSource = RowSource.POLICY) -> BoolNT:
    """Mark the actions of the rows of one source, [N, T] bool.

    Metrics of the policy (ratio, entropy, KL, gap to the sampler) are about its own.
    """
    if rollout.source is None:
        return rollout.action_mask & (source == RowSource.POLICY)
    return rollout.action_mask & (rollout.source == source)[:, None]
