"""Value pretraining (VC-PPO, arXiv 2503.01491, section 3.2): fit a critic before the policy moves.

    loss = sum_t w_t 1/2 (V_t - G_t)^2,    G_t = r_t + gamma G_{t+1}

G is the Monte-Carlo return (lambda = 1) of completions of the policy as it is. Value pretraining is
a phase of a run that PPO follows. It may also be a run by itself, whose critic then starts many PPO
runs (`--algorithm.critic.model`), or gives A-LoL its values (`--algorithm.critic`). The policy does
not train here: it keeps its bits and has no optimizer state, and the phase of PPO starts with a
fresh optimizer. `critic.lam`, `critic.clip` and `critic.coef` have no effect here. With `credit`
"turn", as for PPO, t counts turns.

With `scores` "given", completions and their scores are those of the data. r_t is then the score at
the last token and 0 before, and V is the value of whoever wrote them.

When to stop: when `value/explained_variance` no longer rises. It is measured on fresh completions,
before the critic has seen them. `ends_when_flat` of a phase does this.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import jax.numpy as jnp
from flax import struct

from tpu_rl import ranges
from tpu_rl.algorithm_spec import ExperienceSpec, RoleSpec, scores_of_data
from tpu_rl.errors import InputError
from tpu_rl.losses import advantages, masked, value_loss
from tpu_rl.losses.policy_batch import learned_tokens
from tpu_rl.losses.value_loss import Critic, Targets
from tpu_rl.ranges import ReadOnlyWith
from tpu_rl.train import packing
from tpu_rl.types import (
    Algorithm,
    Array,
    Experience,
    Metrics,
    PackedRows,
    Params,
    Roles,
    Sampling,
    ScoredCompletions,
)


@dataclass(frozen=True)
class ValuePretrainingConfig(ranges.Checked):
    """`lam`, `clip` and `coef` of the critic have no effect.

    Targets are Monte-Carlo returns, unclipped, and there is no other loss.
    """

    critic: Critic = Critic()
    credit: Literal["token", "turn"] = "token"
    """Unit of the critic's gamma: a token, or a turn, whose value is learned at its first token."""
    separators: Annotated[
        tuple[int, ...],
        ReadOnlyWith("credit", "turn", why="other credit has no steps: steps have none"),
    ] = ()
    """Ids of tokens that end a turn, with credit turn: the steps of a text."""
    scores: Literal["policy", "given"] = "policy"
    """policy: the policy completes the prompts, and --reward scores that. given: rows bring
    completions with scores, and G is about their author."""

    def __post_init__(self):
        super().__post_init__()
        if self.critic.trunk == "shared":
            raise InputError(
                "a critic on the policy's trunk cannot be fitted while the policy does not train",
                where="--algorithm.critic.trunk",
                fix="use own",
            )

    @property
    def experience(self) -> ExperienceSpec:
        return ExperienceSpec("rollouts") if self.scores == "policy" else scores_of_data()

    @property
    def roles(self) -> dict[str, RoleSpec]:
        return {"value": self.critic.spec, "policy": RoleSpec(trainable=False)}


@struct.dataclass
class Batch:
    """Leaves are [M, K, R, S]; the loss sees [R, S]."""

    rows: PackedRows
    weights: dict[str, Array]
    """"value": every token of the optimizer step alike."""
    targets: Targets


def value_pretraining(
    config: ValuePretrainingConfig, roles: Roles, sampling: Sampling
) -> Algorithm:
    """Build value pretraining. It learns from a Rollout or from ScoredCompletions."""
    values = partial(value_loss.values, roles["value"])

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[Batch, Any]:
        data, layout = experience
        rows = layout.rows(data.tokens)
        if isinstance(data, ScoredCompletions):
            learned = data.action_mask
            episode_id = None
            last = learned & (jnp.cumsum(learned, axis=-1) == learned.sum(-1, keepdims=True))
            rewards = jnp.where(last, data.scores[:, None], 0.0)
        else:
            learned = learned_tokens(data)
            episode_id = data.episode_id
            rewards = data.rewards
        old_values = layout.unpack(packing.over_micro_batches(partial(values, params), rows))
        by_turn = config.credit == "turn"
        ends = advantages.step_ends(data.tokens, data.action_mask, config.separators)
        by_turns = partial(advantages.turn_returns, ends=ends)
        returns_of = by_turns if by_turn else advantages.returns_to_go
        returns = returns_of(rewards, learned, config.critic.gamma, episode_id)
        valued = advantages.turn_starts(learned, ends) if by_turn else learned
        weights = masked.token_mean(valued, layout.minibatch, layout.minibatches)
        batch = Batch(
            rows=rows,
            weights={"value": layout.pack(weights)},
            targets=value_loss.targets(returns, old_values, valued, layout),
        )
        return batch, state

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        weights = batch.weights["value"]
        unclipped = replace(config.critic, clip=None)
        return value_loss.value_loss(values(params, batch.rows), batch.targets, weights, unclipped)

    return Algorithm(make_batch, loss)
