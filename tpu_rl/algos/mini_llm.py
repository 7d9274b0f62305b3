"""MiniLLM (arXiv 2306.08543): the reverse KL of whole completions, descended as a policy gradient.

    KL(policy || teacher) = -E sum_t r_t,    r_t = ln teacher(y_t|s_t) - ln policy(y_t|s_t)
    its gradient          = -E sum_t (r_t + R_{t+1}) grad ln policy(y_t|s_t),    R_{t+1} = sum_{i>t} r_i

Unlike `distill`, a token also answers for where it leads, R_{t+1}. The single-step part, r_t, is taken exactly, as the
KL of each token's distribution (equation 4); the rest goes through PPO's clipped ratio with advantage

    A_t = sum_{i>t} discount^(i-t) r_i,   length-normalised: over sum_{i>t} discount^(i-t)    (equation 6)

    loss = sum_t w_t [ KL(policy(.|s_t) || teacher(.|s_t)) - clip(ratio_t) A_t ]

Without `single_step`, A_t holds r_t too and is all that there is: on-policy distillation as reinforcement learning, at
discount 0 the gradient of the tokens' KLs by sampling.

Deviations: completions are the policy's own, not of a mixture with the teacher (section 2.2); there is no loss on
pre-training texts; the exact part has no importance weight, as its states are those of the latest policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import struct

from tpu_rl import advantages, masked, teachers
from tpu_rl.errors import InputError
from tpu_rl.log_probs import k1, of_frozen
from tpu_rl.needs import Needs, RoleSpec
from tpu_rl.policy_gradients import clipped_surrogate, importance_ratio, policy_metrics
from tpu_rl.types import Algorithm, Array, Experience, Metrics, Params, Roles, Rollout, Rows, Sampling, Sum


@dataclass(frozen=True)
class MiniLlmConfig:
    teacher: str
    """A model with the policy's tokenizer, of any size: a directory, a hub id or the model folder of a run."""
    discount: float = 1.0
    """Of the log-ratios of later tokens, a token."""
    length_normalised: bool = True
    """Their mean in place of their sum: long completions get no larger advantages."""
    single_step: bool = True
    """A token's own log-ratio is averaged over the vocabulary in place of sampled."""
    clip: float = 0.2

    needs: ClassVar[Needs] = Needs(Rollout, latest_policy=True)

    def __post_init__(self):
        if not 0 <= self.discount <= 1 or not 0 < self.clip < 1:
            found = f"discount {self.discount} or clip {self.clip} is out of range"
            raise InputError(found, where="--algorithm.discount, --algorithm.clip", fix="use 1.0 and 0.2")

    @property
    def roles(self) -> dict[str, RoleSpec]:
        return {"policy": RoleSpec(trainable=True), "teacher": RoleSpec(trainable=False, path=self.teacher)}


@struct.dataclass
class Batch:
    """Leaves [M, K, R, S]; the loss sees [R, S]."""

    rows: Rows
    weights: dict[str, Array]
    """"policy": what a token counts."""
    advantages: Array
    old_log_probs: Array


def later_log_ratios(log_ratios: Array, mask: Array, config: MiniLlmConfig) -> Array:
    """The advantages A_t [N, T] of log-ratios r_t [N, T]."""
    ones = jnp.ones_like(log_ratios)
    total, count = (advantages.returns_to_go(x, mask, config.discount) for x in (log_ratios, ones))
    if config.single_step:
        total, count = total - log_ratios, count - 1
    if config.length_normalised:
        total = total / jnp.where(count > 0, count, 1.0)
    return jnp.where(mask, total, 0.0)


def mini_llm(config: MiniLlmConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Learns from a Rollout, whose rewards it does not read."""
    if sampling.temperature <= 0:
        raise InputError(
            "distributions are compared at a temperature above 0", where="--sampling.temperature", fix="use 1.0"
        )
    clip = (config.clip, config.clip)

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[Batch, Any]:
        rollout, layout = experience
        assert isinstance(rollout, Rollout)
        rows, mask = layout.rows(rollout.tokens), rollout.action_mask
        teacher = layout.unpack(of_frozen(roles["teacher"], params, rows, sampling.temperature))
        log_ratios = jnp.where(mask, -k1(rollout.log_probs, teacher), 0.0)
        batch = Batch(
            rows=rows,
            weights={"policy": layout.pack(masked.sequence_mean(mask, layout.minibatch, layout.minibatches))},
            advantages=layout.pack(later_log_ratios(log_ratios, mask, config)),
            old_log_probs=layout.pack(jnp.where(mask, rollout.log_probs, 0.0)),
        )
        return batch, state

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        weights, mask = batch.weights["policy"], batch.weights["policy"] > 0
        teacher = teachers.compose("teacher", 1.0)
        found = teachers.compare(roles, params, batch.rows, teacher, beta=1.0, temperature=sampling.temperature)
        log_probs = jnp.where(mask, found.log_probs, 0.0)
        losses = clipped_surrogate(importance_ratio(log_probs, batch.old_log_probs), batch.advantages, *clip)
        if config.single_step:
            losses += found.divergence
        value = masked.total(weights * losses, mask)
        count = mask.sum().astype(jnp.float32)
        metrics = policy_metrics(mask, log_probs, batch.old_log_probs, batch.advantages, *clip) | {
            "distill/loss": Sum(value, weights.sum()),
            "distill/divergence": Sum(masked.total(found.divergence, mask), count),
            "policy/entropy": Sum(masked.total(found.entropy, mask), count),
        }
        return value, metrics

    return Algorithm(make_batch, loss)
