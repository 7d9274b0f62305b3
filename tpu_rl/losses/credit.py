"""Credit: what the completions of a group are compared by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax.numpy as jnp

from tpu_rl import ranges
from tpu_rl.errors import InputError
from tpu_rl.losses import advantages
from tpu_rl.losses.log_probs import frozen_score_norms
from tpu_rl.losses.policy_batch import Draft, learned_tokens
from tpu_rl.losses.shapes import FloatN, FloatNT
from tpu_rl.ranges import In, NotNegative, ReadOnlyWith
from tpu_rl.types import Rollout

Credit = Literal["episode", "turn", "step", "token", "reward"]
"""Things that a group compares: episodes, their k-th turns, GiGPO's step groups, their k-th tokens,
or the rewards of all their turns (see `credited_advantages`)."""


@dataclass(frozen=True, kw_only=True)
class CreditSettings(ranges.Checked):
    """Settings of the credit of turns."""

    credit: Credit = "episode"
    """The returns that a group compares. episode: of whole episodes. turn: from a turn on, among
    turns with the same number. step: of episodes and, among turns that answer the same observation,
    from a turn on (GiGPO). reward: the rewards of all turns of the group are compared, and a turn
    has the sum of the results from it on. token: from a token on, among tokens with the same
    number; with --algorithm.advantages opo this is the optimal token baseline."""
    separators: Annotated[
        tuple[int, ...],
        ReadOnlyWith(
            "credit", "turn", "reward", why="credit to others has no steps: steps have none"
        ),
    ] = ()
    """Ids of tokens that end a turn, with credit turn or reward: the steps of a text."""
    gamma: Annotated[
        float,
        In("[-1, 1]"),
        ReadOnlyWith("credit", "turn", "step", "reward", why="it discounts turns"),
    ] = 1.0
    """Discount per turn of the returns from a turn on; 0: a turn has its own reward alone. -1: two
    sides move in turn, and one wins what the other loses, as in self-play."""
    step_coef: Annotated[NotNegative, ReadOnlyWith("credit", "step")] = 1.0
    """Coefficient of the advantages among turns that answer the same observation; GiGPO's omega."""

    def __post_init__(self):
        super().__post_init__()
        if self.gamma < 0 and self.credit == "step":
            raise InputError(
                f"gamma {self.gamma} is for two sides, and the return of an episode mixes them",
                where="--algorithm.gamma, --algorithm.credit",
                why="credit step adds the advantage of the whole episode",
                fix="use --algorithm.credit turn or reward",
            )

    def compared(self, baseline: advantages.Advantage) -> Callable[[Draft], Draft]:
        """Make the function that gives a batch its advantages."""
        return of_groups(
            baseline,
            credit=self.credit,
            gamma=self.gamma,
            step_coef=self.step_coef,
            separators=self.separators,
        )


def of_groups(
    baseline: advantages.Advantage, credit: Credit = "episode", **settings: Any
) -> Callable[[Draft], Draft]:
    """Make the function that compares the completions of a group, see `credited_advantages`.

    Args:
      baseline: function from returns to advantages, e.g. `advantages.group_scaled`.
      credit: what is compared.
      settings: gamma, step_coef and separators, if they are not the defaults.
    """

    def compare(draft: Draft) -> Draft:
        rollout = draft.rollout
        if credit == "token":
            rows = draft.layout.rows(rollout.tokens)
            norms = frozen_score_norms(draft.policy, draft.params, rows, draft.temperature)
            norms = draft.layout.unpack(norms)
        else:
            norms = None
        values = credited_advantages(
            rollout, draft.rewards, draft.returns, baseline, credit, score_norms=norms, **settings
        )
        compared = compared_turns(rollout, credit, settings.get("separators", ()))
        shares = {} if compared is None else {"policy/compared": compared}
        return draft._replace(advantages=values, shares={**draft.shares, **shares})

    return compare


def credited_advantages(
    rollout: Rollout,
    rewards: FloatNT,
    returns: FloatN,
    advantage: advantages.Advantage,
    credit: Credit = "episode",
    gamma: float = 1.0,
    step_coef: float = 1.0,
    score_norms: FloatNT | None = None,
    separators: tuple[int, ...] = (),
) -> FloatNT:
    """Compute the advantages of actions relative to their group, [N, T].

        episode   A_i of the whole return R_i, the same at all tokens of the episode
        turn      A_ik of the return G_ik from turn k on, among the turns k of the group
        step      A_i of R_i + step_coef x A_ik of G_ik, among the turns of the group that begin in
                  the same state (GiGPO, arXiv 2505.10978, eq. 8)
        token     A_ik of the return from the k-th action on, among the k-th actions of the group
        reward    the sum from turn k on of the advantages of rewards among all turns of the group

    Args:
      rewards: [N, T], from which returns of turns are computed.
      returns: [N], the sums of the rows' rewards.
      advantage: a group baseline, e.g. `advantages.group_scaled`.
      credit: what is compared.
      gamma: discount per turn in G.
      step_coef: coefficient of the advantages of step groups.
      score_norms: [N, T], for credit to tokens: what each action adds to the length that
        `advantages.length_weighted` takes as weight. None: 1.
      separators: tokens that end a turn, for credit to turns and their rewards.
    """
    mask = rollout.action_mask
    episode_id = rollout.episode_id
    group_id = rollout.group_id
    lengths = learned_tokens(rollout).sum(-1)
    scored = lengths > 0
    ends = advantages.step_ends(rollout.tokens, mask, separators)
    if credit == "turn":
        turn_returns = advantages.turn_returns(rewards, mask, gamma, episode_id, ends)
        return advantages.per_turn(
            advantage, turn_returns, mask, group_id, scored, episode_id, ends
        )
    if credit == "reward":
        return advantages.of_rewards(
            advantage, rewards, mask, group_id, scored, gamma, episode_id, ends
        )
    if credit == "token":
        norms = jnp.ones(mask.shape) if score_norms is None else score_norms
        to_go = advantages.returns_to_go(rewards, mask, gamma, episode_id)
        return advantages.per_token(advantage, to_go, mask, group_id, scored, norms, episode_id)
    of_episodes = advantages.per_episode(advantage, returns, group_id, lengths, episode_id)
    result = jnp.where(mask, of_episodes[:, None], 0.0)
    if credit == "step":
        turn_returns = advantages.turn_returns(rewards, mask, gamma, episode_id)
        of_steps = advantages.per_state(
            advantage, turn_returns, rollout.tokens, mask, group_id, scored
        )
        result += step_coef * of_steps
    return result


def compared_turns(
    rollout: Rollout, credit: Credit, separators: tuple[int, ...] = ()
) -> FloatNT | None:
    """Give 1.0 at actions whose turn is compared with others, 0.0 elsewhere, [N, T].

    None if a group compares episodes, or all turns with each other.
    """
    mask = rollout.action_mask
    group_id = rollout.group_id
    scored = learned_tokens(rollout).any(-1)
    anything = jnp.zeros(mask.shape, jnp.float32)
    count = advantages.group_count
    match credit:
        case "episode" | "reward":
            return None
        case "turn":
            episode_id = rollout.episode_id
            ends = advantages.step_ends(rollout.tokens, mask, separators)
            peers = advantages.per_turn(count, anything, mask, group_id, scored, episode_id, ends)
        case "token":
            episode_id = rollout.episode_id
            ones = jnp.ones(mask.shape)
            peers = advantages.per_token(count, anything, mask, group_id, scored, ones, episode_id)
        case "step":
            peers = advantages.per_state(count, anything, rollout.tokens, mask, group_id, scored)
    return (peers > 1).astype(jnp.float32)
