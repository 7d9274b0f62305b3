"""Constraints on rewards and lengths, held by Lagrange multipliers.

    maximize E[R]  subject to  E[C_k] <= limit_k                 (Altman, 1999; arXiv 1805.11074)

    return   =  R - sum_k lambda_k (C_k - limit_k)
    lambda_k <- clip(lambda_k + rate (mean C_k - limit_k), 0, most)          after each batch

C_k is the value of a reward, without its weight, or the number of sampled tokens of an episode. A
constraint from below, E[C] >= limit, has both with the other sign. All multipliers begin at 0. The
mean is over all episodes of the batch that have a value. Where an episode has none, the constraint
changes nothing. Rewards in metrics are those before the multipliers.

Deviation: many programs divide the return by 1 + sum_k lambda_k. Here its scale is left alone;
advantages over the deviation of a group do not depend on it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tpu_rl.errors import InputError

if TYPE_CHECKING:
    from tpu_rl.rollout.scoring import Scored
    from tpu_rl.types import TrainState

LENGTH = "length"
"""Name of the number of sampled tokens."""


class Constraint(NamedTuple):
    name: str
    """A reward, by the name that metrics have, or `LENGTH`."""
    sign: float
    """1 for a largest mean, -1 for a smallest one."""
    limit: float

    @property
    def label(self) -> str:
        """Its name in metrics: a reward may have a smallest and a largest mean."""
        return self.name if self.sign > 0 else f"{self.name}_least"

    def excess(self, scored: Scored) -> np.ndarray:
        """Return [N]: by how much each completion is beyond the limit; NaN without a value."""
        values = scored.lengths if self.name == LENGTH else scored.parts[self.name]
        return self.sign * (np.asarray(values, np.float64) - self.limit)


def parse(text: str, names: Sequence[str]) -> Constraint:
    """Return the constraint that a text describes, NAME<=LIMIT or NAME>=LIMIT.

    Raises InputError if it has another form, or is not about `LENGTH` or one of the `names`.
    """
    match = re.fullmatch(r"([^<>]+)([<>])=([^<>=]+)", text.strip())
    try:
        limit = float(match[3]) if match else np.nan
    except ValueError:
        limit = np.nan
    if match is None or not np.isfinite(limit):
        raise InputError(
            f"{text!r} is no constraint",
            where="--rollout.constraints",
            fix='write NAME<=LIMIT or NAME>=LIMIT, as in "length<=200"; spaces separate several',
        )
    if match[1].strip() not in (LENGTH, *names):
        raise InputError(
            f"no reward is called {match[1].strip()!r}",
            where="--rollout.constraints",
            why=f"there are {', '.join((LENGTH, *names))}",
            fix='add it to --reward, with the weight 0 ("0*NAME") to constrain it alone; '
            '"environment" is the reward of --environment itself',
        )
    return Constraint(match[1].strip(), 1.0 if match[2] == "<" else -1.0, limit)


def parse_all(texts: Sequence[str], names: Sequence[str]) -> list[Constraint]:
    """Return the constraints of several texts; see `parse`.

    Raises InputError if one cannot be parsed, or two limit the same mean from the same side.
    """
    found: dict[str, Constraint] = {}
    for text in texts:
        constraint = parse(text, names)
        if constraint.label in found:
            raise InputError(
                f"two constraints limit {constraint.name!r} from the same side",
                where="--rollout.constraints",
                why="the looser one would say nothing",
                fix="keep the tighter one",
            )
        found[constraint.label] = constraint
    return list(found.values())


class Multipliers:
    """The multipliers of constraints: a transform with a state, a `source.Memory`."""

    def __init__(self, constraints: Sequence[Constraint], rate: float):
        self._constraints = constraints
        self._rate = rate
        self._values = [0.0] * len(constraints)
        self._excess = list(self._values)

    def __call__(self, scored: Scored, step: int, state: TrainState) -> Scored:
        """Subtract the terms of the constraints from returns, then move the multipliers."""
        # The command line reads this file, and needs no engine.
        from tpu_rl.rollout.dynamic_sampling import all_sampled
        from tpu_rl.rollout.scoring import by_episode

        episodes = by_episode(scored)
        penalties = np.zeros(len(episodes.rewards))
        everything = by_episode(all_sampled(scored))
        for k, constraint in enumerate(self._constraints):
            penalties += self._values[k] * np.nan_to_num(constraint.excess(episodes))
            excess = constraint.excess(everything)
            finite = excess[np.isfinite(excess) & np.isfinite(everything.rewards)]
            self._excess[k] = float(finite.mean()) if finite.size else 0.0
            moved = self._values[k] + self._rate * self._excess[k]
            self._values[k] = float(np.clip(moved, 0.0, 100.0))
        rollout = scored.rollout
        mask = np.asarray(rollout.action_mask)
        rows = np.arange(len(mask))
        if rollout.episode_id is not None:
            # The last row of each episode; rows without actions are padding.
            rows = np.flatnonzero(mask.any(1))
            episode_id = np.asarray(rollout.episode_id)[rows]
            rows = rows[np.append(episode_id[1:] != episode_id[:-1], True)]
        last = mask.shape[1] - 1 - mask[rows, ::-1].argmax(1)
        rewards = np.array(rollout.rewards)
        judged = np.asarray(rollout.scored)[rows]
        rewards[rows, last] -= np.where(judged, penalties, 0.0).astype(rewards.dtype)
        return replace(scored, rollout=replace(rollout, rewards=rewards))

    def metrics(self) -> dict[str, float]:
        """Return the multipliers, and the mean excess over each limit."""
        names = [constraint.label for constraint in self._constraints]
        pairs = zip(names, self._values, self._excess, strict=True)
        return {
            f"rollout/{kind}_{name}": value
            for name, multiplier, excess in pairs
            for kind, value in (("multiplier", multiplier), ("excess", excess))
        }

    def get_state(self) -> list[float]:
        return list(self._values)

    def set_state(self, state: list[float]) -> None:
        self._values = list(state)
