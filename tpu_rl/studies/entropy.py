"""The temperature at which sampled tokens have a chosen entropy (AceReason-Nemotron 1.1, arXiv
2506.13284: about 0.3 in RL).

    H(T) = mean over tokens of the entropy of softmax(z / T)

rises with T, so bisection finds the T of a target. The tokens were sampled at another temperature:
sample again with the new one to see how close it is.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from tpu_rl import models
from tpu_rl.errors import InputError
from tpu_rl.types import Array, Model, Params, Rollout

ROWS = 8
"""Completions whose logits are in memory at once."""
RANGE = (0.05, 5.0)
"""The temperatures that are looked at."""


def mean_entropy(logits: Array, mask: Array, temperature: Array | float) -> tuple[Array, Array]:
    """Return (sum of entropies in nats, number of tokens) of logits [B, T, V] where mask [B, T]."""
    log_probs = jax.nn.log_softmax(logits / temperature, axis=-1)
    entropies = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
    return jnp.sum(jnp.where(mask, entropies, 0)), jnp.sum(mask)


def entropy_of(model: Model, params: Params, rollout: Rollout) -> Callable[[float], float]:
    """Return the function temperature -> mean entropy of the sampled tokens of a rollout."""

    @jax.jit
    def of_rows(params: Params, tokens: Array, mask: Array, temperature: Array) -> tuple:
        logits = models.apply(model, params, tokens)
        # The logits before a token are those that it was sampled from.
        return mean_entropy(logits[:, :-1], mask[:, 1:], temperature)

    tokens = np.asarray(rollout.tokens)
    mask = np.asarray(rollout.action_mask)
    padding = [(0, -len(tokens) % ROWS), (0, 0)]
    tokens = np.pad(tokens, padding).reshape(-1, ROWS, tokens.shape[1])
    mask = np.pad(mask, padding).reshape(tokens.shape)

    def entropy(temperature: float) -> float:
        parts = [
            of_rows(params, *rows, jnp.float32(temperature))
            for rows in zip(tokens, mask, strict=True)
        ]
        return float(sum(total for total, _ in parts)) / int(sum(count for _, count in parts))

    return entropy


def temperature_for(entropy: Callable[[float], float], target: float) -> float:
    """Return the temperature at which a rising function has a value, within 0.001.

    Raises InputError if no temperature of `RANGE` has it.
    """
    low, high = RANGE
    if not entropy(low) <= target <= entropy(high):
        raise InputError(
            f"no temperature from {low:g} to {high:g} has an entropy of {target:g}",
            where="--target-entropy",
            why=f"it is {entropy(low):.3g} to {entropy(high):.3g} there",
            fix="use a number between",
        )
    while high - low > 0.001:
        middle = (low + high) / 2
        low, high = (middle, high) if entropy(middle) < target else (low, middle)
    return (low + high) / 2
