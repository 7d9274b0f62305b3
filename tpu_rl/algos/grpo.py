"""Group relative policy optimisation (DeepSeekMath, arXiv 2402.03300) and its relatives.

Several completions of one prompt are their own baseline: a completion's advantage A is its return against its
group's, and every token of it is pushed by A through PPO's clipped ratio:

    loss = sum_t w_t [ -min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A) + kl_loss_coef KL_t - entropy_coef H_t ]

The variants differ in functions, chosen by name: which baseline and scale (ADVANTAGES), what a token counts
(WEIGHTS), where the KL to the reference goes (k1 in the reward, or in the loss with its exact gradient).

    GRPO       advantages "group",  weights "sequence_mean"
    Dr. GRPO   advantages "centred", weights "constant_length"                       arXiv 2503.20783
    RLOO       advantages "leave_one_out", kl_reward_coef > 0                        arXiv 2402.14740
    decoupled  old_log_probs "recomputed", importance_cap 2: the ratio to the proximal policy, a weight for what sampled
               (AReaL, arXiv 2505.24298)
    DAPO       weights "token_mean", clip_high 0.28, overlong_buffer, and dynamic sampling in `rollouts`  2503.14476

Deviations: `weights` is token_mean unless chosen, as in TRL and verl, and so it is in the presets named after GRPO. The
group deviation is the sample one (n - 1), as there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import jax.numpy as jnp

from tpu_rl import advantages, masked
from tpu_rl.errors import InputError
from tpu_rl.log_probs import k1, of_frozen, token_log_probs
from tpu_rl.needs import Needs, RoleSpec
from tpu_rl.policy_gradients import PolicyBatch, policy_batch, proximal_loss
from tpu_rl.types import Algorithm, Array, Experience, Metrics, Params, Roles, Rollout, Sampling

ADVANTAGES = {
    "group": advantages.group_scaled,
    "batch": advantages.batch_scaled,
    "centred": advantages.group_centred,
    "leave_one_out": advantages.leave_one_out,
}
WEIGHTS = {
    "token_mean": masked.token_mean,
    "sequence_mean": masked.sequence_mean,
    "constant_length": masked.constant_length,
}


@dataclass(frozen=True)
class GrpoConfig:
    """Lengths are tokens; coefficients multiply nats."""

    advantages: Literal["group", "batch", "centred", "leave_one_out"] = "group"
    weights: Literal["token_mean", "sequence_mean", "constant_length"] = "token_mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    """Cap on a bad action's loss, in units of |A|; 3 is usual."""
    kl_reward_coef: float = 0.0
    """KL to the reference, estimated by k1, subtracted from the reward of every token."""
    kl_loss_coef: float = 0.0
    """KL to the reference of each token's distribution, added to the loss with its exact gradient."""
    entropy_coef: float = 0.0
    importance_cap: float | None = None
    """Weigh each token's loss by min(old policy / what it was sampled from, cap): for top-k and the like, penalties,
    and, with recomputed log-probs, a sampler that rounds otherwise; 2 is usual."""
    old_log_probs: Literal["sampler", "recomputed"] = "sampler"
    """Whose the ratio's are: the sampler's, at no cost, or another forward pass of the policy, before its update."""
    overlong_buffer: int = 0
    """Soft overlong penalty over the last so many tokens before the limit; 0 is off."""
    mask_truncated: bool = False
    """Completions that ran into the limit stay in their group's baseline but are not learned from."""

    def __post_init__(self):
        coefficients = (self.kl_reward_coef, self.kl_loss_coef, self.entropy_coef, self.overlong_buffer)
        wrong = {
            "a coefficient or the overlong buffer is negative": min(coefficients) < 0,
            f"dual clip {self.dual_clip} is not above 1": self.dual_clip is not None and self.dual_clip <= 1,
            f"clip_low {self.clip_low} is not between 0 and 1": not 0 < self.clip_low < 1,
            f"clip_high {self.clip_high} is not above 0": self.clip_high <= 0,
            "the importance cap is not above 0": self.importance_cap is not None and self.importance_cap <= 0,
        }
        for what in (what for what, is_so in wrong.items() if is_so):
            raise InputError(what, where="--algorithm", fix="see --help")

    needs: ClassVar[Needs] = Needs(Rollout, smallest_group=2)
    """Completions of a prompt are compared with each other: the advantage of one alone is always 0."""

    @property
    def roles(self) -> dict[str, RoleSpec]:
        """Without a KL term no reference model is kept and no reference pass is made."""
        policy, reference = {"policy": RoleSpec(trainable=True)}, {"reference": RoleSpec(trainable=False)}
        return policy | reference if self.kl_reward_coef or self.kl_loss_coef else policy


def grpo(config: GrpoConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Learns from a Rollout."""
    policy, reference = roles["policy"], roles["reference"] if "reference" in config.roles else None
    length = {"length": sampling.max_new_tokens} if config.weights == "constant_length" else {}
    weigh = partial(WEIGHTS[config.weights], **length)

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[PolicyBatch, Any]:
        rollout, layout = experience
        assert isinstance(rollout, Rollout)
        returns = masked.total(rollout.rewards, rollout.action_mask, axis=-1)
        if config.overlong_buffer:
            lengths = rollout.action_mask.sum(-1)
            returns += advantages.soft_overlong_penalty(lengths, sampling.max_new_tokens, config.overlong_buffer)
        reference_log_probs = None
        if reference is not None:
            reference_log_probs = of_frozen(reference, params, layout.rows(rollout.tokens), sampling.temperature)
            kl = k1(rollout.log_probs, layout.unpack(reference_log_probs))
            returns -= config.kl_reward_coef * masked.total(kl, rollout.action_mask, axis=-1)
        advantage = ADVANTAGES[config.advantages](returns, rollout.group_id, rollout.scored)
        learned = rollout.action_mask & rollout.scored[:, None] & ~(rollout.truncated[:, None] & config.mask_truncated)
        weights = weigh(learned, layout.minibatch, layout.minibatches)
        old_log_probs = None
        if config.old_log_probs == "recomputed":
            old_log_probs = of_frozen(policy, params, layout.rows(rollout.tokens), sampling.temperature)
            old_log_probs = jnp.where(layout.pack(rollout.action_mask), old_log_probs, 0.0)
        batch = policy_batch(
            rollout,
            layout,
            jnp.where(rollout.action_mask, advantage[:, None], 0.0),
            weights,
            reference_log_probs,
            old_log_probs=old_log_probs,
            importance_cap=config.importance_cap,
        )
        return batch, state

    def loss(params: Params, batch: PolicyBatch) -> tuple[Array, Metrics]:
        found = token_log_probs(
            policy, params, batch.rows, sampling.temperature, entropy_gradient=config.entropy_coef > 0
        )
        clip = (config.clip_low, config.clip_high)
        how = {"entropy_coef": config.entropy_coef, "kl_coef": config.kl_loss_coef, "bound": config.dual_clip}
        return proximal_loss(found, batch, clip, **how)

    return Algorithm(make_batch, loss)
