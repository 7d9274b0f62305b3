"""What routers of mixtures do: measured while a model learns, and held in balance where that is wanted.

An algorithm sees neither. The params that its loss is differentiated for hold one more leaf a role, `REPORT`, and the
model adds to that loss the product of the leaf with its routers' `Usage`. So the leaf's gradient is the usage, added up
over micro-batches and devices as every gradient is; and what the leaf holds is the weight of each number of it in the
loss, which is how the balance enters.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tpu_rl.models.architecture import DecoderConfig
from tpu_rl.types import Array, Max, Metrics, Min, Model, Params, Probe, Sum

REPORT = "router_report"
"""Name of the leaf, a `Usage`, among a role's params."""


class Usage(NamedTuple):
    """Of each layer, summed over tokens. Float32; layers come first where it is of several."""

    chosen: Array
    """[L, E]: tokens that each expert saw. No gradient."""
    probability: Array
    """[L, E]: what the router gave each expert."""
    entropy: Array
    """[L]: of the router, nats. No gradient."""
    tokens: Array
    """[L]: those that are not padding."""


def usage(chosen: Array, probabilities: Array, real: Array) -> Usage:
    """Of one layer: chosen [B, T, k] experts, their probabilities [B, T, E], real [B, T] (padding is not)."""
    weight = real.astype(jnp.float32)
    constant = jax.lax.stop_gradient(probabilities)
    seen = jax.nn.one_hot(chosen, probabilities.shape[-1], dtype=jnp.float32).sum(-2)
    return Usage(
        chosen=jnp.einsum("bt,bte->e", weight, seen),
        probability=jnp.einsum("bt,bte->e", weight, probabilities),
        entropy=jnp.einsum("bt,bte->", weight, jax.scipy.special.entr(constant)),
        tokens=weight.sum(),
    )


def reported(hidden: Array, found: Usage, report: Usage) -> Array:
    """Hidden states that are the same; a loss that is made of them grows by the product of `found` and `report`."""
    return _with_term(hidden, sum(map(jnp.vdot, found, report), jnp.zeros(())))


@jax.custom_vjp
def _with_term(hidden: Array, term: Array) -> Array:
    del term
    return hidden


_with_term.defvjp(lambda hidden, term: (hidden, None), lambda _, gradient: (gradient, jnp.ones(())))


# --- what is made of it ------------------------------------------------------------------------------------------


def balance(found: Usage) -> Array:
    """E sum_e f_e P_e over all layers and tokens: f_e tokens that e saw a token, P_e its mean probability.

    Least, k, where all experts are used alike (Switch Transformers, arXiv 2101.03961, eq. 4; for k experts a token and
    several layers as `load_balancing_loss_func` of transformers has it).
    """
    tokens = jnp.maximum(found.tokens.sum(), 1)
    f, p = (part.sum(0) / tokens for part in (found.chosen, found.probability))
    return f.size * jnp.vdot(f, p)


def probe(trained: Mapping[str, Model], coefficient: float) -> Probe | None:
    """Of the roles that train and their models; None where none is a mixture.

    With a `coefficient` the step adds that much of each role's `balance` to its loss. How often experts are chosen,
    which couples all tokens of the step, is found by a forward pass of its own: so it is exact whatever the
    micro-batches.
    """
    mixtures = {name: model.config for name, model in trained.items() if model.config.experts}
    if not mixtures:
        return None
    zeros = {name: {REPORT: _zeros(config)} for name, config in mixtures.items()}
    return Probe(zeros, _metrics, partial(_weights, coefficient) if coefficient else None)


def _zeros(config: DecoderConfig) -> Usage:
    assert config.experts is not None
    layers, experts = len(config.kinds), config.experts.count
    return Usage(jnp.zeros((layers, experts)), jnp.zeros((layers, experts)), jnp.zeros(layers), jnp.zeros(layers))


def _weights(coefficient: float, measured: Params) -> Params:
    """Those with which a step's usage adds up to coefficient * balance, where the shares of experts are constants."""

    def one(found: Usage) -> Usage:
        tokens = jnp.maximum(found.tokens.sum(), 1)
        share = found.chosen.sum(0, keepdims=True) / tokens
        weight = jnp.broadcast_to(coefficient * share.size * share / tokens, found.probability.shape)
        return Usage(*map(jnp.zeros_like, found))._replace(probability=weight)

    return {name: {REPORT: one(inner[REPORT])} for name, inner in measured.items()}


def _metrics(measured: Params) -> Metrics:
    """router/..., and router/ROLE_... of all roles but the first."""
    found: Metrics = {}
    for name, inner in measured.items():
        used: Usage = inner[REPORT]
        prefix = f"router/{name}_" if found else "router/"
        shares = used.chosen / jnp.maximum(used.tokens, 1)[:, None]
        found |= {
            prefix + "balance": Sum(balance(used), jnp.ones(())),
            prefix + "entropy": Sum(used.entropy.sum(), used.tokens.sum()),
            prefix + "most_used": Max(shares.max()),
            prefix + "least_used": Min(shares.min()),
        }
    return found
