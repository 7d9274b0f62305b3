"""CHORD (arXiv 2508.11408): GRPO whose groups also learn from an expert's solution.

    python launch/run.py grpo --algorithm recipes/chord.py:chord --data.path train.jsonl ...

Each row of the data has a column `solution`, which joins its group as one more row:

    loss = (1 - mu) x GRPO on the policy's rows  -  mu x mean_t phi_t log p_t on the expert's tokens

phi = p (1 - p), without a gradient: tokens that the policy knows already, and those that it finds
impossible, count little. Deviation: mu is constant, where the paper lets it fall.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from tpu_rl.algos.grpo import GrpoConfig, group_policy_gradient
from tpu_rl.experience.transforms import add_rows, row_of_column
from tpu_rl.losses import masked
from tpu_rl.losses.policy_batch import actions_of
from tpu_rl.losses.policy_gradient import LossTerm, clipped_surrogate
from tpu_rl.types import RowSource


def with_expert(tokenizer):
    """Build the transform that adds the row's `solution` to each group."""

    def add_expert(scored, step, state):
        experts = [[row_of_column(row, "solution", tokenizer)] for row in scored.rows]
        return add_rows(scored, experts, RowSource.EXPERT)

    return (add_expert,)


@dataclass(frozen=True)
class ChordConfig(GrpoConfig):
    mu: float = 0.1
    """Share of the expert's term in the loss."""

    @property
    def experience(self):
        columns = ("prompt", "solution")
        return super().experience._replace(columns=columns, transforms=with_expert, rows_added=1)


def chord(config: ChordConfig, roles, sampling):
    def weights(rollout, layout):
        learned = actions_of(rollout, RowSource.EXPERT)
        return config.mu * masked.token_mean(learned, layout.minibatch, layout.minibatches)

    def imitation(log_probs, batch):
        p = jnp.exp(jax.lax.stop_gradient(log_probs))
        return -p * (1 - p) * log_probs

    def surrogate(*arrays):
        terms = clipped_surrogate(*arrays, clip_low=config.clip_low, clip_high=config.clip_high)
        return terms._replace(losses=(1 - config.mu) * terms.losses)

    terms = {"expert": LossTerm(weights, imitation)}
    return group_policy_gradient(config, roles, sampling, surrogate, terms)
