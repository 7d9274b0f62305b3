"""Cross-entropy on observations: the policy also learns to predict what the environment answers.

    loss  =  the method's  -  observation_coef mean_t log p(x_t)

The mean is over the observations of the optimizer step: the tokens between the first and the last
action of a scored row that the policy did not choose, with those that a chat template writes around
an answer of a tool. Nothing is learned of prompts. prime-rl names such a loss "echo".

Deviation: log-probs are at the sampling temperature, as those of the policy's own tokens are. The
log-probs of all tokens of the packed rows are computed, and not of the actions alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from tpu_rl import ranges
from tpu_rl.errors import InputError
from tpu_rl.losses import masked
from tpu_rl.losses.policy_batch import Draft, Part, PolicyBatch, actions_of, weighted_term
from tpu_rl.losses.shapes import BoolNT
from tpu_rl.ranges import NotNegative
from tpu_rl.types import Array, Layout, Rollout


@dataclass(frozen=True, kw_only=True)
class ObservationLoss(ranges.Checked):
    """Setting of every method that can learn to predict observations."""

    observation_coef: NotNegative = 0.0
    """Coefficient of the negative log-likelihood per token of what the environment answers. It
    needs --environment or --agent."""

    def observation_parts(self) -> tuple[Part, ...]:
        """List the part, if it is on."""
        return (observation_loss(self.observation_coef),) if self.observation_coef else ()


def observed(rollout: Rollout) -> BoolNT:
    """Mark the observations of scored rows of the policy, each token once, [N, T] bool."""
    actions = actions_of(rollout)
    begun = jnp.cumsum(actions, axis=1) > 0
    continues = jnp.cumsum(actions[:, ::-1], axis=1)[:, ::-1] > 0
    mask = begun & continues & ~rollout.action_mask & rollout.scored[:, None]
    if rollout.shared is None:
        return mask
    # A row that repeats tokens of an earlier one leaves them to that one.
    return mask & (jnp.arange(mask.shape[1])[None] >= rollout.shared[:, None])


def observation_loss(coef: float) -> Part:
    """Make the part "observation", which learns to predict observations."""

    def weights(rollout: Rollout, layout: Layout) -> Array:
        if layout.images is not None:
            raise InputError(
                "images cannot be predicted",
                where="--algorithm.observation-coef",
                why="tokens of images are no words of the vocabulary",
                fix="leave the coefficient out for rows with images",
            )
        mean = masked.token_mean(observed(rollout), layout.minibatch, layout.minibatches)
        return coef * mean

    def losses(log_probs: Array, batch: PolicyBatch) -> Array:
        return -log_probs

    part = weighted_term("observation", weights, losses)

    def batch(batch: PolicyBatch, draft: Draft, state: Any) -> PolicyBatch:
        assert part.batch is not None
        batch = part.batch(batch, draft, state)
        # Log-probs of all tokens are read, and not of the actions alone.
        return replace(batch, rows=replace(batch.rows, actions=None))

    return part._replace(batch=batch)
