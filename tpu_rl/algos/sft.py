"""Supervised fine-tuning: raise the log-probability of demonstrated completions.

    loss = -sum_t w_t log policy(y_t | x, y_<t),    w_t = 1 / learned tokens of the optimizer step

If demonstrations have weights, w_t is the token's weight over the sum of all in the step. Prompts
are not learned. This file is the shortest example of an algorithm. With a teacher, whose
completions replace those of the data, it is sequence-level distillation (arXiv 1606.07947, section
3.2, by sampling instead of beam search).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flax import struct

from tpu_rl.algorithm_spec import ExperienceSpec, RoleSpec
from tpu_rl.losses import masked
from tpu_rl.losses.log_probs import token_log_probs
from tpu_rl.types import (
    Algorithm,
    Array,
    Completions,
    Demonstrations,
    Experience,
    Metrics,
    PackedRows,
    Params,
    Roles,
    Sampling,
    Sum,
)


@dataclass(frozen=True)
class SftConfig:
    """Only completions are learned. Every token counts the same unless the data have weights."""

    teacher: str | None = None
    """Imitate completions that this model samples, instead of the data's: a directory, a hub id or
    the model folder of a run."""

    @property
    def experience(self) -> ExperienceSpec:
        if self.teacher is None:
            return ExperienceSpec("demonstrations", ("messages",), sampled_by=None, imitates="data")
        return ExperienceSpec("completions", sampled_by="teacher", imitates="teacher")

    @property
    def roles(self) -> dict[str, RoleSpec]:
        policy = {"policy": RoleSpec(trainable=True)}
        if self.teacher is None:
            return policy
        return policy | {"teacher": RoleSpec(trainable=False, path=self.teacher)}


@struct.dataclass
class Batch:
    """Leaves are [M, K, R, S]; the loss sees [R, S]."""

    rows: PackedRows
    weights: dict[str, Array]
    """"policy": the weights of the tokens."""


def sft(config: SftConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build SFT. It learns from Demonstrations, or from the Completions of a teacher.

    Log-probs are at temperature 1, whatever the sampling temperature is.
    """
    del config, sampling

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[Batch, Any]:
        del params
        texts, layout = experience
        assert isinstance(texts, Demonstrations | Completions)
        given = texts.weights if isinstance(texts, Demonstrations) else None
        counts = texts.action_mask if given is None else given
        weights = masked.token_mean(counts, layout.minibatch, layout.minibatches)
        return Batch(layout.rows(texts.tokens), {"policy": layout.pack(weights)}), state

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        log_probs, entropy = token_log_probs(roles["policy"], params, batch.rows)
        weights = batch.weights["policy"]
        value = -masked.total(weights * log_probs, weights > 0)
        return value, {
            "sft/loss": Sum(value, weights.sum()),
            "policy/entropy": masked.weighted_average(entropy, weights),
        }

    return Algorithm(make_batch, loss)
