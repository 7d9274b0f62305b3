"""Dynamic sampling: replace groups whose rewards are all equal, which teach nothing.

Source: DAPO, arXiv 2503.14476, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import numpy as np

from tpu_rl.data import Row
from tpu_rl.rollout.scoring import Scored, group_size, zero_variance


def collect(
    next_rows: Callable[[], list[Row]],
    roll_out: Callable[[list[Row], int], Scored],
    max_rounds: int = 0,
) -> Scored:
    """Return one batch of scored completions.

    `roll_out(rows, round)` samples and scores completions of the rows' prompts. If `max_rounds` is
    0, the batch is that of the first rows. Otherwise groups whose rewards are all equal are
    replaced by groups of up to `max_rounds` further batches. If too few groups are informative even
    then, such groups fill the batch, so that its size never changes.
    """
    first = roll_out(next_rows(), 0)
    if not max_rounds:
        return first
    rounds = [first]
    batch_size = len(first.rewards)
    while _informative(rounds).sum() < batch_size and len(rounds) <= max_rounds:
        rounds.append(roll_out(next_rows(), len(rounds)))
    informative = _informative(rounds)
    order = np.concatenate([np.flatnonzero(informative), np.flatnonzero(~informative)])
    return replace(take(rounds, order[:batch_size]), chosen_from=tuple(rounds))


def _informative(rounds: list[Scored]) -> np.ndarray:
    """Return [completions of all rounds] bool: the row's group has different rewards."""
    return np.concatenate([~zero_variance(scored) for scored in rounds])


def take(rounds: Sequence[Scored], rows: np.ndarray) -> Scored:
    """Return some rows, in whole groups, of several rounds as one; groups are renumbered."""
    rollout = jax.tree.map(
        lambda *parts: np.concatenate(parts)[rows], *[scored.rollout for scored in rounds]
    )
    size = group_size(rounds[0])
    group_id = np.repeat(np.arange(len(rows) // size, dtype=np.int32), size)

    def texts(select: Callable[[Scored], list[str]]) -> list[str]:
        all_texts = [text for scored in rounds for text in select(scored)]
        return [all_texts[row] for row in rows]

    return Scored(
        rollout=replace(rollout, group_id=group_id),
        prompts=texts(lambda scored: scored.prompts),
        completions=texts(lambda scored: scored.completions),
        lengths=np.concatenate([scored.lengths for scored in rounds])[rows],
        rewards=np.concatenate([scored.rewards for scored in rounds])[rows],
        parts={
            name: np.concatenate([scored.parts[name] for scored in rounds])[rows]
            for name in rounds[0].parts
        },
        faults=texts(lambda scored: scored.faults),
        seconds_rollout=sum(scored.seconds_rollout for scored in rounds),
        seconds_reward=sum(scored.seconds_reward for scored in rounds),
        drafts=sum(scored.drafts for scored in rounds),
        tokens_of_drafts=sum(scored.tokens_of_drafts for scored in rounds),
    )


def all_sampled(scored: Scored) -> Scored:
    """Return the completions together with those that dynamic sampling passed over."""
    rounds = scored.chosen_from
    if not rounds:
        return scored
    return take(rounds, np.arange(sum(len(part.rewards) for part in rounds)))
