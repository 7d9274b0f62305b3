"""Usage of experts: measured while a model trains, and balanced by an auxiliary loss.

An algorithm sees neither. The params that its loss is differentiated by hold one more leaf per
role, `REPORT`, and the model adds to the loss the dot product of that leaf and the `Usage` of its
routers. The gradient of the leaf is therefore the usage, summed over micro-batches and devices as
every gradient is. The value of the leaf is the weight of each number of the usage in the loss,
which is how the balance loss enters.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tpu_rl.models.config import DecoderConfig
from tpu_rl.types import Array, Max, Metrics, Min, Model, Params, Probe, Sum

REPORT = "router_report"
"""Name of the leaf, a `Usage`, among a role's params."""


class Usage(NamedTuple):
    """Usage of experts, summed over tokens. All fields are float32, [L, ...] for L layers."""

    expert_tokens: Array
    """[L, E]: number of tokens that each expert processed. No gradient."""
    probability: Array
    """[L, E]: probability of each expert under the router."""
    entropy: Array
    """[L]: entropy of the router, in nats. No gradient."""
    tokens: Array
    """[L]: number of tokens, without padding."""


def usage(experts: Array, probabilities: Array, is_token: Array) -> Usage:
    """Return the usage in one layer, without the axis of layers.

    Args:
        experts: [B, T, k] int32, the experts that process each token.
        probabilities: [B, T, E] of all experts under the router.
        is_token: [B, T] bool, False for padding.
    """
    weight = is_token.astype(jnp.float32)
    constant = jax.lax.stop_gradient(probabilities)
    is_used = jax.nn.one_hot(experts, probabilities.shape[-1], dtype=jnp.float32).sum(-2)
    return Usage(
        expert_tokens=jnp.einsum("bt,bte->e", weight, is_used),
        probability=jnp.einsum("bt,bte->e", weight, probabilities),
        entropy=jnp.einsum("bt,bte->", weight, jax.scipy.special.entr(constant)),
        tokens=weight.sum(),
    )


def report_usage(hidden: Array, usage: Usage, report: Usage) -> Array:
    """Return `hidden` unchanged, but add the dot product of `usage` and `report` to the loss.

    The product is added to every loss that is a function of the result.
    """
    return _with_loss_term(hidden, sum(map(jnp.vdot, usage, report), jnp.zeros(())))


@jax.custom_vjp
def _with_loss_term(hidden: Array, term: Array) -> Array:
    return hidden


_with_loss_term.defvjp(
    lambda hidden, term: (hidden, None), lambda _, gradient: (gradient, jnp.ones(()))
)


def balance(usage: Usage) -> Array:
    """Return the balance loss E sum_e f_e P_e over all layers and tokens.

    f_e is the number of times that a token was routed to expert e, and P_e the mean probability of
    e, both per token. The minimum, k, is reached if all experts are used alike (Switch
    Transformers, arXiv 2101.03961, eq. 4; for several experts per token and several layers, as in
    `load_balancing_loss_func` of transformers).
    """
    tokens = jnp.maximum(usage.tokens.sum(), 1)
    frequency, probability = (
        part.sum(0) / tokens for part in (usage.expert_tokens, usage.probability)
    )
    return frequency.size * jnp.vdot(frequency, probability)


def probe(trained: Mapping[str, Model], coefficient: float) -> Probe | None:
    """Return the probe of the mixtures among the `trained` roles, or None if there is no mixture.

    With a `coefficient` above 0, the update step adds coefficient * `balance` of each role to its
    loss. The frequencies of experts depend on all tokens of the step, so a separate forward pass
    measures them first; the loss is then exact for any number of micro-batches.
    """
    mixtures = {name: model.config for name, model in trained.items() if model.config.moe}
    if not mixtures:
        return None
    zeros = {name: {REPORT: _zero_usage(config)} for name, config in mixtures.items()}
    return Probe(zeros, _metrics, partial(_balance_weights, coefficient) if coefficient else None)


def _zero_usage(config: DecoderConfig) -> Usage:
    assert config.moe is not None
    num_layers = len(config.layer_types) - config.dense_layers
    num_experts = config.moe.num_experts
    return Usage(
        expert_tokens=jnp.zeros((num_layers, num_experts)),
        probability=jnp.zeros((num_layers, num_experts)),
        entropy=jnp.zeros(num_layers),
        tokens=jnp.zeros(num_layers),
    )


def _balance_weights(coefficient: float, measured: Params) -> Params:
    """Return the reports whose dot product with the usage is coefficient * balance.

    The frequencies of experts are constants, as in the loss of Switch Transformers.
    """

    def report(usage: Usage) -> Usage:
        tokens = jnp.maximum(usage.tokens.sum(), 1)
        frequency = usage.expert_tokens.sum(0, keepdims=True) / tokens
        weight = jnp.broadcast_to(
            coefficient * frequency.size * frequency / tokens, usage.probability.shape
        )
        return Usage(*map(jnp.zeros_like, usage))._replace(probability=weight)

    return {name: {REPORT: report(leaves[REPORT])} for name, leaves in measured.items()}


def _metrics(measured: Params) -> Metrics:
    """Return the metrics router/... of the first role and router/ROLE_... of all others."""
    metrics: Metrics = {}
    for name, leaves in measured.items():
        usage: Usage = leaves[REPORT]
        prefix = f"router/{name}_" if metrics else "router/"
        frequencies = usage.expert_tokens / jnp.maximum(usage.tokens, 1)[:, None]
        metrics |= {
            prefix + "balance": Sum(balance(usage), jnp.ones(())),
            prefix + "entropy": Sum(usage.entropy.sum(), usage.tokens.sum()),
            prefix + "most_used": Max(frequencies.max()),
            prefix + "least_used": Min(frequencies.min()),
        }
    return metrics
