"""Unlearning: lower the probability of the demonstrations that are marked, and learn the others.

    loss = mean over kept tokens of -log p(y_t)  +  mean over forgotten tokens of L_t

    ce_u              L_t = -sum_{k != y} q_k log p_k,   q = softmax of the logits with z_y = -inf,
                      held constant                                         arXiv 2503.01224
    gradient_ascent   L_t = log p(y_t)

CE-U distills the model's own distribution without the true token. Its gradient with respect to the
logits is p_y at y and -p_k p_y / (1 - p_y) elsewhere: it fades as the token is forgotten. That of
gradient ascent grows instead, and damages everything else; it is the control.

A row has a column `forget`, true or false. Both means are over the optimizer step.

Deviation: open implementations of CE-U leave out the first token of an answer; ours learns it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from tpu_rl import ranges
from tpu_rl.algorithm_spec import ExperienceSpec, RoleSpec
from tpu_rl.algos.sft import Batch
from tpu_rl.losses import divergences, masked
from tpu_rl.losses.log_probs import log_probs_of_logits, over_actions, tokens_at_once, vocabulary
from tpu_rl.losses.shapes import Floats, FloatsV, Ints
from tpu_rl.types import (
    Algorithm,
    Array,
    Demonstrations,
    Experience,
    Metrics,
    Params,
    Roles,
    Sampling,
    Sum,
)


@dataclass(frozen=True)
class UnlearnConfig(ranges.Checked):
    """Rows have a column `forget`: true for those to be forgotten."""

    loss: Literal["ce_u", "gradient_ascent"] = "ce_u"
    """Loss of the tokens to be forgotten; gradient_ascent is the control that blows up."""

    @property
    def experience(self) -> ExperienceSpec:
        return ExperienceSpec(
            "demonstrations", ("messages", "forget"), sampled_by=None, imitates="data"
        )

    @property
    def roles(self) -> dict[str, RoleSpec]:
        return {"policy": RoleSpec(trainable=True)}


def ce_u(logits: FloatsV, tokens: Ints) -> Floats:
    """Compute -sum_{k != y} q_k log p_k for logits [..., V] and tokens y [...]."""
    is_token = jax.lax.broadcasted_iota(tokens.dtype, logits.shape, logits.ndim - 1)
    without = jnp.where(is_token == tokens[..., None], -jnp.inf, logits)
    target = jax.lax.stop_gradient(jax.nn.softmax(without))
    return -jnp.sum(target * divergences.log_softmax(logits), axis=-1)


def unlearn(config: UnlearnConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build unlearning. It learns from Demonstrations, and forgets those of negative weight."""
    policy = roles["policy"]

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[Batch, Any]:
        texts, layout = experience
        assert isinstance(texts, Demonstrations)
        weights = 1.0 if texts.weights is None else texts.weights
        signed = jnp.where(texts.action_mask, weights, 0.0)
        weights_by_name = {
            name: layout.pack(masked.token_mean(counts, layout.minibatch, layout.minibatches))
            for name, counts in (
                ("policy", jnp.maximum(signed, 0.0)),
                ("forget", jnp.maximum(-signed, 0.0)),
            )
        }
        return Batch(layout.rows(texts.tokens), weights_by_name), state

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        def chunk_losses(tokens: Array, states: Array) -> tuple[Array, Array]:
            logits = policy.logits(params, states)
            log_probs = log_probs_of_logits(logits, tokens, policy.exact)[0]
            return log_probs, ce_u(logits, tokens) if config.loss == "ce_u" else log_probs

        hidden = policy.hidden(params, batch.rows)
        chunk_tokens = tokens_at_once(vocabulary(policy, params, hidden))
        log_probs, forget_losses = over_actions(
            chunk_losses, batch.rows, hidden, chunk_tokens=chunk_tokens
        )
        keep = batch.weights["policy"]
        forget = batch.weights["forget"]
        keep_loss = -masked.total(keep * log_probs, keep > 0)
        forget_loss = masked.total(forget * forget_losses, forget > 0)
        return keep_loss + forget_loss, {
            "sft/loss": Sum(keep_loss, keep.sum()),
            "unlearn/loss": Sum(forget_loss, forget.sum()),
            "unlearn/log_prob": masked.weighted_average(log_probs, forget),
        }

    return Algorithm(make_batch, loss, stops_gradient=config.loss == "ce_u")
