"""Process reward models: learn whether each step of a solution is right (PRM, arXiv 2305.20050;
GraphPRM, arXiv 2503.00845).

The output z of a head at the token that ends a step is the logit that the step is right. With a
label y in [0, 1],

    loss = -sum_t w_t [ y_t log sigmoid(z_t) + (1 - y_t) log sigmoid(-z_t) ]

The score of a completion is that of its weakest step, or the product or the mean of its steps
(`reward_score.step_scores`).

With `steps` monte_carlo nobody labels steps (Math-Shepherd, arXiv 2312.08935; its equations 3 and
4): the reference completes each prompt, one of the ends of the completion's steps is drawn, and the
reference continues from there `continuations` times. The label is the share of continuations with a
reward of at least `min_reward` (y = V, soft estimation). The label of the last end is the
completion's own.

Deviations: the two classes are one logit of a head instead of two tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from tpu_rl import ranges
from tpu_rl.algorithm_spec import ExperienceSpec, RoleSpec, ScoreReadout
from tpu_rl.algos.roles import with_reference
from tpu_rl.losses import masked, reward_score
from tpu_rl.ranges import Count, ReadOnlyWith
from tpu_rl.types import (
    Algorithm,
    Array,
    Experience,
    Metrics,
    PackedRows,
    Params,
    QExamples,
    Roles,
    Sampling,
)


@dataclass(frozen=True)
class ProcessRewardConfig(ranges.Checked):
    """Steps are labeled right or wrong."""

    steps: Literal["given", "reference", "monte_carlo"] = "given"
    """given: the data file has labeled steps. reference (arithmetic only): the model as it starts
    writes the steps, and they are compared with the true calculation. monte_carlo: it writes the
    steps, and continues from one end of a step of each completion; --reward judges what follows."""
    continuations: Annotated[
        Count,
        ReadOnlyWith("steps", "monte_carlo", why="there are no continuations to label steps with"),
    ] = 4
    """monte_carlo: continuations from an end of a step."""
    min_reward: Annotated[float, ReadOnlyWith("steps", "monte_carlo")] = 0.5
    """monte_carlo: a continuation with at least this reward is right."""
    separators: tuple[int, ...] = ()
    """Ids of the tokens that end a step, for scoring completions with the model. The last token of
    a completion always ends one."""
    aggregate: reward_score.StepAggregate = "min"
    """Score of a completion from those of its steps, where the model is used: the log of the
    smallest probability or of the product, or the mean probability."""
    loss_aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Weights: every step alike, or every completion alike."""

    @property
    def experience(self) -> ExperienceSpec:
        if self.steps == "given":
            columns = ("prompt", "completions", "labels")
            return ExperienceSpec("step_labels", columns, sampled_by=None)
        return ExperienceSpec("step_labels", sampled_by="reference")

    @property
    def roles(self) -> dict[str, RoleSpec]:
        reading = ScoreReadout("steps", self.separators, self.aggregate)
        trained = {"reward": RoleSpec(trainable=True, outputs=1, reading=reading)}
        return with_reference(trained, needed=self.steps != "given")


@struct.dataclass
class Batch:
    """Leaves are [M, K, R, S]; the loss sees [R, S]."""

    rows: PackedRows
    weights: dict[str, Array]
    """"step": the weights of the labeled tokens."""
    labels: Array
    """Label, in [0, 1], of the step that ends here."""


def process_reward(config: ProcessRewardConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build a process reward model.

    It learns from QExamples whose actions are the ends of steps and whose returns are the labels.
    """
    weighting = masked.weighting(config.loss_aggregation)

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[Batch, Any]:
        examples, layout = experience
        assert isinstance(examples, QExamples)
        weights = weighting(examples.action_mask, layout.minibatch, layout.minibatches)
        labels = jnp.where(examples.action_mask, examples.returns, 0.0)
        batch = Batch(
            rows=layout.rows(examples.tokens),
            weights={"step": layout.pack(weights)},
            labels=layout.pack(labels),
        )
        return batch, state

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        reward = roles["reward"]
        weights = batch.weights["step"]
        labels = batch.labels
        logits = reward.logits(params, reward.hidden(params, batch.rows))[..., 0]
        losses = -labels * jax.nn.log_sigmoid(logits) - (1 - labels) * jax.nn.log_sigmoid(-logits)
        value = masked.total(weights * losses, weights > 0)
        right = ((logits > 0) == (labels > 0.5)).astype(jnp.float32)
        return value, {
            "process/loss": masked.weighted_average(losses, weights),
            "process/accuracy": masked.weighted_average(right, weights),
            "process/right": masked.weighted_average(labels, weights),
        }

    return Algorithm(make_batch, loss)
