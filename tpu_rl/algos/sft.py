"""Supervised fine-tuning: raise the log-probability of demonstrated completions.

    loss = - sum_t w_t log policy(y_t | x, y_<t),    w_t = 1 / tokens to be learned in the optimizer step

Prompts are not learned. The base of every other method here, and its simplest example of the contract. With a teacher,
whose completions then take the place of the data's, it is sequence-level distillation (arXiv 1606.07947, section 3.2;
by sampling in place of its beam search).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flax import struct

from tpu_rl import masked
from tpu_rl.log_probs import token_log_probs
from tpu_rl.needs import Needs, RoleSpec
from tpu_rl.types import (
    Algorithm,
    Array,
    Completions,
    Demonstrations,
    Experience,
    Metrics,
    Params,
    Roles,
    Rows,
    Sampling,
    Sum,
)


@dataclass(frozen=True)
class SftConfig:
    """Completion-only loss, every token counts the same."""

    teacher: str | None = None
    """Imitate what this model samples, not the data: a directory, a hub id or the model folder of a run."""

    @property
    def needs(self) -> Needs:
        demonstrations = Needs(Demonstrations, ("messages",), sampled_by=None)
        return demonstrations if self.teacher is None else Needs(Completions, sampled_by="teacher")

    @property
    def roles(self) -> dict[str, RoleSpec]:
        policy = {"policy": RoleSpec(trainable=True)}
        return policy if self.teacher is None else policy | {"teacher": RoleSpec(trainable=False, path=self.teacher)}


@struct.dataclass
class Batch:
    rows: Rows
    weights: dict[str, Array]
    """"policy": [.., R, S]."""


def sft(config: SftConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Learns from Demonstrations or a teacher's Completions, at temperature 1 whatever completions are sampled at."""
    del config, sampling

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[Batch, Any]:
        del params
        demonstrations, layout = experience
        assert isinstance(demonstrations, Demonstrations | Completions)
        weights = masked.token_mean(demonstrations.action_mask, layout.minibatch, layout.minibatches)
        return Batch(layout.rows(demonstrations.tokens), {"policy": layout.pack(weights)}), state

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        log_probs, entropy = token_log_probs(roles["policy"], params, batch.rows)
        weights = batch.weights["policy"]
        value = -masked.total(weights * log_probs, weights > 0)
        metrics: Metrics = {
            "sft/loss": Sum(value, weights.sum()),
            "policy/entropy": Sum(masked.total(weights * entropy, weights > 0), weights.sum()),
        }
        return value, metrics

    return Algorithm(make_batch, loss)
