"""Process reward model: whether each step of a solution is right (PRM, arXiv 2305.20050; GraphPRM, 2503.00845).

A head's output z at the token that ends a step is the logit that the step is right, label y in [0, 1]:

    loss = - sum_t w_t [ y_t log sigmoid(z_t) + (1 - y_t) log sigmoid(-z_t) ]

A completion's reward is made of its steps', by the weakest or by their product (`scores.of_steps`).

Deviations: the two classes are one logit of a head instead of two tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from tpu_rl import masked, scores
from tpu_rl.needs import Needs, RoleSpec
from tpu_rl.types import Algorithm, Array, Experience, Metrics, Params, QExamples, Roles, Rows, Sampling, Sum

WEIGHTS = {"token_mean": masked.token_mean, "sequence_mean": masked.sequence_mean}


@dataclass(frozen=True)
class ProcessRewardConfig:
    steps: Literal["given", "reference"] = "given"
    """By the data file, or (arithmetic) written by the model as it begins and compared with the true calculation."""
    separators: tuple[int, ...] = ()
    """Ids of the tokens that end a step, for whoever scores completions with the model; the last token always does."""
    aggregate: scores.StepAggregate = "min"
    """How a completion's reward is made of its steps' where the model is used."""
    weights: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Every step counts the same, or every completion."""

    @property
    def needs(self) -> Needs:
        if self.steps == "given":
            return Needs(QExamples, ("prompt", "completions", "labels"), sampled_by=None)
        return Needs(QExamples, sampled_by=self.steps)

    @property
    def roles(self) -> dict[str, RoleSpec]:
        trained = {"reward": RoleSpec(trainable=True, outputs=1)}
        return trained if self.steps == "given" else trained | {"reference": RoleSpec(trainable=False)}


@struct.dataclass
class Batch:
    """Leaves [M, K, R, S]; the loss sees [R, S]."""

    rows: Rows
    weights: dict[str, Array]
    """"step": what a labelled token counts."""
    labels: Array
    """How right the step is that ends here, in [0, 1]."""


def process_reward(config: ProcessRewardConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Learns from QExamples whose actions are the ends of steps, and whose returns say whether they are right."""
    del sampling

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[Batch, Any]:
        del params
        examples, layout = experience
        assert isinstance(examples, QExamples)
        weights = WEIGHTS[config.weights](examples.action_mask, layout.minibatch, layout.minibatches)
        labels = jnp.where(examples.action_mask, examples.returns, 0.0)
        return Batch(layout.rows(examples.tokens), {"step": layout.pack(weights)}, layout.pack(labels)), state

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        reward, weights, labels = roles["reward"], batch.weights["step"], batch.labels
        logits = reward.logits(params, reward.hidden(params, batch.rows))[..., 0]
        losses = -labels * jax.nn.log_sigmoid(logits) - (1 - labels) * jax.nn.log_sigmoid(-logits)
        value = masked.total(weights * losses, weights > 0)

        def over_steps(values: Array) -> Sum:
            return Sum(masked.total(weights * values, weights > 0), weights.sum())

        metrics: Metrics = {
            "process/loss": over_steps(losses),
            "process/accuracy": over_steps(((logits > 0) == (labels > 0.5)).astype(jnp.float32)),
            "process/right": over_steps(labels),
        }
        return value, metrics

    return Algorithm(make_batch, loss)
