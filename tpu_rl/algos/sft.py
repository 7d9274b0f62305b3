"""Supervised fine-tuning: raise the log-probability of demonstrated completions.

    loss = -sum_t w_t log policy(y_t | x, y_<t),    w_t = 1 / learned tokens of the optimizer step

If demonstrations have weights, w_t is the token's weight over the sum of all in the step. Prompts
are not learned. This file is the shortest example of an algorithm. With a teacher, whose
completions replace those of the data, it is sequence-level distillation (arXiv 1606.07947, section
3.2, by sampling instead of beam search).

    dft   w_t x stop_gradient(policy(y_t)): the gradient is that of the token's probability, so that
          tokens that the policy considers unlikely count less      arXiv 2508.05629, equation 9
    ift   inputs that are moved to what the policy would write, and tokens that count by the losses
          after them; see losses/intuitive.py                       arXiv 2405.11870
    pear  w_t x min(2, prod_{j >= t} (policy(y_j) / author(y_j))^(0.999^(j - t))), of the policy
          before the batch: what it would write itself counts more, as a start for RL. The variant
          of tokens of PEAR, arXiv 2602.01058; weights are not divided by their mean
    + kl_coef sum_t w_t KL(first policy || policy) at token t        SuperHF, arXiv 2310.16763
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from tpu_rl import ranges
from tpu_rl.algorithm_spec import ExperienceSpec, RoleSpec
from tpu_rl.algos.roles import with_reference
from tpu_rl.losses import advantages, intuitive, masked, teachers
from tpu_rl.losses.log_probs import frozen_log_probs, token_log_probs
from tpu_rl.ranges import Conflicts, NotNegative
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
class SftConfig(ranges.Checked):
    """Only completions are learned. Every token counts the same unless the data have weights."""

    teacher: str | None = None
    """Imitate completions that this model samples, instead of the data's: a directory, a hub id or
    the model folder of a run."""
    loss: Annotated[
        Literal["nll", "dft", "ift"],
        Conflicts(
            "kl_coef",
            "author",
            when="ift",
            why="ift weighs tokens by its own losses, of mixed inputs",
        ),
    ] = "nll"
    """Loss of a token: its negative log-likelihood, or dynamic fine-tuning's, which weighs that by
    the token's probability, or intuitive fine-tuning's, with mixed inputs and later losses."""
    kl_coef: NotNegative = 0.0
    """Coefficient of the KL, in nats per token, from the policy before training."""

    author: str | None = None
    """The model that wrote the data, for PEAR's importance weights: a directory, a hub id or the
    model folder of a run."""

    @property
    def experience(self) -> ExperienceSpec:
        if self.teacher is None:
            return ExperienceSpec("demonstrations", ("messages",), sampled_by=None, imitates="data")
        return ExperienceSpec("completions", sampled_by="teacher", imitates="teacher")

    @property
    def roles(self) -> dict[str, RoleSpec]:
        roles = with_reference({"policy": RoleSpec(trainable=True)}, needed=self.kl_coef > 0)
        if self.author is not None:
            roles |= {"author": RoleSpec(trainable=False, path=self.author)}
        if self.teacher is None:
            return roles
        return roles | {"teacher": RoleSpec(trainable=False, path=self.teacher)}


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

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[Batch, Any]:
        texts, layout = experience
        assert isinstance(texts, Demonstrations | Completions)
        rows = layout.rows(texts.tokens)
        of_data = texts.weights if isinstance(texts, Demonstrations) else None
        counts = texts.action_mask if of_data is None else of_data
        weights = masked.token_mean(counts, layout.minibatch, layout.minibatches)
        if config.author is not None:
            policy, author = (
                layout.unpack(frozen_log_probs(roles[name], params, rows))
                for name in ("policy", "author")
            )
            # sum_{j >= t} 0.999^(j - t) log(policy / author) is a return of log-ratios.
            log_weights = advantages.returns_to_go(policy - author, texts.action_mask, 0.999)
            weights *= jnp.exp(jnp.minimum(log_weights, math.log(2.0)))
        packed = {"policy": layout.pack(weights)}
        if config.loss == "ift":
            by_text = masked.sequence_mean(counts != 0, layout.minibatch, layout.minibatches)
            packed["completion"] = layout.pack(by_text)
        return Batch(rows, packed), state

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        weights = batch.weights["policy"]
        divergence = None
        if config.loss == "ift":
            mask = weights > 0
            log_probs = intuitive.mixed_log_probs(roles["policy"], params, batch.rows, mask)
            losses = jnp.where(mask, -log_probs, 0.0)
            sequence_ids = batch.rows.sequence_ids
            of_texts = intuitive.propagated(losses, weights, sequence_ids)
            by_text = batch.weights["completion"]
            value = masked.total(by_text * of_texts, by_text > 0)
            return value, {
                "sft/loss": Sum(value, by_text.sum()),
                "sft/mixed_nll": masked.weighted_average(losses, weights),
            }
        if config.kl_coef:
            models = {name: roles[name] for name in ("policy", "reference")}
            compared = teachers.compare(models, params, batch.rows, _reference, beta=0.0)
            divergence, _, log_probs, entropy = compared
        else:
            log_probs, entropy = token_log_probs(roles["policy"], params, batch.rows)
        losses = -log_probs
        if config.loss == "dft":
            losses *= jax.lax.stop_gradient(jnp.exp(log_probs))
        value = masked.total(weights * losses, weights > 0)
        metrics: Metrics = {
            "sft/loss": Sum(value, weights.sum()),
            "policy/entropy": masked.weighted_average(entropy, weights),
        }
        if divergence is not None:
            value += config.kl_coef * masked.total(weights * divergence, weights > 0)
            metrics["policy/kl_reference"] = masked.weighted_average(divergence, weights)
        return value, metrics

    return Algorithm(make_batch, loss, stops_gradient=config.loss == "dft")


def _reference(logits: Mapping[str, Array]) -> teachers.Target:
    first = logits["reference"]
    return teachers.Target(first, jnp.ones(first.shape[:-1]))
