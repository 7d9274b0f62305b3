"""GRPO that is told wrong log-probs of its own tokens:

    python launch/run.py arithmetic_grpo --algorithm bench/noisy_grpo.py:noisy_grpo \
        --algorithm.noise 0.02

The completions are the policy's own. Only the log-probs that the sampler records get independent
normal errors, whose absolute value is `noise` nats in the mean: what a sampler that rounds does to
ratios, without what it does to completions. The errors of a batch depend on its tokens alone.
"""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from tpu_rl.algos.grpo import GrpoConfig, grpo
from tpu_rl.types import Algorithm, Experience, Params, Roles, Rollout, Sampling


@dataclass(frozen=True)
class NoisyGrpoConfig(GrpoConfig):
    """GRPO's settings, and the errors."""

    noise: float = 0.0
    """Mean absolute error of a recorded log-prob, nats."""


def with_errors(rollout: Rollout, noise: float) -> Rollout:
    """Return the rollout with wrong log-probs [N, T]."""
    places = jnp.arange(1, rollout.tokens.size + 1, dtype=jnp.uint32).reshape(rollout.tokens.shape)
    digest = jnp.sum(rollout.tokens.astype(jnp.uint32) * places, dtype=jnp.uint32)
    key = jax.random.fold_in(jax.random.key(0), digest)
    errors = noise * math.sqrt(math.pi / 2) * jax.random.normal(key, rollout.log_probs.shape)
    errors *= rollout.action_mask
    # Ratios read the one, importance weights the other; at temperature 1 they are the same.
    return replace(
        rollout,
        log_probs=rollout.log_probs + errors,
        behaviour_log_probs=rollout.behaviour_log_probs + errors,
    )


def noisy_grpo(config: NoisyGrpoConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build GRPO on wrong log-probs. It learns from a Rollout."""
    algorithm = grpo(config, roles, sampling)

    def make_batch(experience: Experience, params: Params, state: object) -> tuple[object, object]:
        data = with_errors(experience.data, config.noise)
        return algorithm.make_batch(experience._replace(data=data), params, state)

    return algorithm._replace(make_batch=make_batch)
