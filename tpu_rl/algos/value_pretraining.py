"""Value pretraining (VC-PPO, arXiv 2503.01491, section 3.2): a critic is fitted before the policy moves.

    loss = sum_t w_t 1/2 (V_t - G_t)^2,    G_t = r_t + gamma G_{t+1}: the Monte-Carlo return (lambda = 1)

over completions of the policy as it is. A phase of a run, which PPO follows; or a run of its own, whose model serves
many PPO runs as their `--algorithm.critic.model`. The policy does not train here, so it keeps its bits and has no
optimizer state, and PPO's own phase begins with a fresh optimizer.

When to stop: `value/explained_variance` of fresh completions, measured before the critic has seen them, is flat;
as a phase, `ends_when_flat` does it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from flax import struct

from tpu_rl import advantages, critics, masked, packing
from tpu_rl.critics import Critic, Targets
from tpu_rl.errors import InputError
from tpu_rl.needs import Needs, RoleSpec
from tpu_rl.types import Algorithm, Array, Experience, Metrics, Params, Roles, Rollout, Rows, Sampling


@dataclass(frozen=True)
class ValuePretrainingConfig:
    """Of the critic, `lam` and `clip` have no part in this: targets are returns as they were earned."""

    critic: Critic = Critic()

    def __post_init__(self):
        if self.critic.trunk == "shared":
            raise InputError(
                "a critic on the policy's trunk cannot be fitted while the policy stands still",
                where="--algorithm.critic.trunk",
                fix="use own",
            )

    needs: ClassVar[Needs] = Needs(Rollout)

    @property
    def roles(self) -> dict[str, RoleSpec]:
        return {"value": self.critic.spec, "policy": RoleSpec(trainable=False)}


@struct.dataclass
class Batch:
    """Leaves [M, K, R, S]; the loss sees [R, S]."""

    rows: Rows
    weights: dict[str, Array]
    """"value": every token of the optimizer step counts the same."""
    targets: Targets


def value_pretraining(config: ValuePretrainingConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Learns from a Rollout."""
    del sampling
    values = partial(critics.values, roles["value"])

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[Batch, Any]:
        rollout, layout = experience
        rows, learned = layout.rows(rollout.tokens), rollout.action_mask & rollout.scored[:, None]
        old_values = layout.unpack(packing.over_micro_batches(partial(values, params), rows))
        returns = advantages.returns_to_go(rollout.rewards, learned, config.critic.gamma)
        weights = layout.pack(masked.token_mean(learned, layout.minibatch, layout.minibatches))
        return Batch(rows, {"value": weights}, critics.targets(returns, old_values, learned, layout)), state

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        weights = batch.weights["value"]
        return critics.value_loss(values(params, batch.rows), batch.targets, weights, clip=None)

    return Algorithm(make_batch, loss)
