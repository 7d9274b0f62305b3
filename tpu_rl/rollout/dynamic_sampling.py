"""The groups that a step learns from: dynamic sampling, and a filter by the variance of rewards.

Dynamic sampling replaces groups whose rewards are all equal, which teach nothing. Source: DAPO,
arXiv 2503.14476, section 3.2.

The filter keeps the groups whose rewards differ most, and gives up the others: StarPO-S of RAGEN,
arXiv 2504.20073. A step then learns from fewer completions than it sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from tpu_rl.data import Row
from tpu_rl.data.encoding import alike
from tpu_rl.plain_values import fields_of
from tpu_rl.rollout.group_selection import num_kept
from tpu_rl.rollout.scoring import (
    EpisodeOutcomes,
    Scored,
    by_episode,
    entries,
    first_of_runs,
    group_size,
    number_of_run,
    renumbered,
    with_episode_ids,
    with_parents,
    zero_variance,
)
from tpu_rl.types import Rollout, RowSource


def collect(
    next_rows: Callable[[int], list[Row]],
    roll_out: Callable[[list[Row], int], Scored],
    num_groups: int,
    max_rounds: int = 0,
    only_needed: bool = False,
) -> Scored:
    """Return one batch of scored completions.

    If `max_rounds` is 0, the batch is that of the first rows. Otherwise groups whose rewards are
    all equal are replaced by groups of up to `max_rounds` further rounds. If too few groups are
    informative even then, such groups fill the batch, so that its size never changes.

    Args:
        next_rows: next_rows(count) returns the next rows.
        roll_out: roll_out(rows, round) samples and scores completions of the rows' prompts.
        num_groups: prompts of the batch, and of the first round.
        only_needed: further rounds have `num_needed` prompts, and not as many as the first.
    """
    first = roll_out(next_rows(num_groups), 0)
    if not max_rounds:
        return first
    rounds = [first]
    informative = _informative(rounds)
    while informative.sum() < num_groups and len(rounds) <= max_rounds:
        count = num_needed(informative, num_groups) if only_needed else num_groups
        rounds.append(roll_out(next_rows(count), len(rounds)))
        informative = _informative(rounds)
    order = np.concatenate([np.flatnonzero(informative), np.flatnonzero(~informative)])
    return replace(take(rounds, order[:num_groups]), chosen_from=tuple(rounds))


def num_needed(informative: np.ndarray, num_groups: int) -> int:
    """Return the number of prompts that should give the groups that are missing.

    With n missing and the share p of groups so far that are informative, ceil(n / p) prompts give n
    in the mean (CodeV-R1, arXiv 2505.24183). It is rounded up to a quarter, half or whole batch,
    because programs are compiled for each number.

    Args:
        informative: [groups so far] bool.
    """
    missing = num_groups - int(informative.sum())
    share = max(float(informative.mean()), 1 / len(informative))
    sizes = [num_groups // part for part in (4, 2) if num_groups % part == 0]
    return next((size for size in sizes if size * share >= missing), num_groups)


def _informative(rounds: list[Scored]) -> np.ndarray:
    """Return [groups of all rounds] bool: the group has different rewards."""
    episodes = [by_episode(scored) for scored in rounds]
    return np.concatenate([~zero_variance(scored)[:: group_size(scored)] for scored in episodes])


def keep_most_varied(scored: Scored, share: float) -> Scored:
    """Return the `share` of the groups with the largest standard deviations of rewards.

    Groups keep their order; of equal ones the first are kept. With a share of 1 nothing changes.
    """
    if share == 1:
        return scored
    episodes = by_episode(scored)
    grouped = episodes.rewards.reshape(-1, group_size(episodes))
    is_scored = np.isfinite(grouped)
    counts = np.maximum(is_scored.sum(1, keepdims=True), 1)
    means = np.sum(grouped, axis=1, where=is_scored, keepdims=True) / counts
    squares = np.square(grouped - means)
    variances = np.sum(squares, axis=1, where=is_scored) / counts[:, 0]
    order = np.argsort(-variances, kind="stable")
    kept = np.sort(order[: num_kept(len(grouped), share)])
    return replace(take([scored], kept), chosen_from=scored.chosen_from or (scored,))


def take(rounds: Sequence[Scored], groups: np.ndarray) -> Scored:
    """Return some groups of several rounds as one batch; groups and episodes are renumbered.

    Groups count from 0, over all rounds.
    """
    group_id = _unique_ids(scored.rollout.group_id for scored in rounds)
    rows_of_groups = np.split(np.arange(len(group_id)), first_of_runs(group_id)[1:])
    return take_rows(rounds, np.concatenate([rows_of_groups[group] for group in groups]))


def take_rows(rounds: Sequence[Scored], rows: np.ndarray) -> Scored:
    """Return some rows of several rounds as one batch, those of a group next to each other.

    Rows count from 0, over all rounds. Groups and episodes are renumbered.
    """
    rounds = _alike(rounds)
    group_id = _unique_ids(scored.rollout.group_id for scored in rounds)
    group_of_row = number_of_run(group_id)[rows]
    data_rows = [row for scored in rounds for row in scored.rows]
    rollout = entries(_joined([scored.rollout for scored in rounds]), rows)
    changed = {"group_id": number_of_run(group_id[rows])}
    if rollout.episode_id is not None:
        episode_id = _unique_ids(scored.rollout.episode_id for scored in rounds)
        changed["episode_id"] = number_of_run(episode_id[rows])
    if rollout.parent is not None:
        offsets = np.cumsum([0, *(len(scored.rewards) for scored in rounds[:-1])])
        parents = np.concatenate(
            [scored.rollout.parent + offset for scored, offset in zip(rounds, offsets, strict=True)]
        )
        changed["parent"] = renumbered(parents, rows)
    texts = ("prompts", "completions", "faults")
    values = ("lengths", "rewards", "parts")
    sums = ("seconds", "seconds_reward", "drafts", "tokens_of_drafts")
    joined = {
        name: _joined([fields_of(scored)[name] for scored in rounds])
        for name in (*texts, *values, *sums)
    }
    episodes = _all_episodes([scored.episodes for scored in rounds])
    return Scored(
        rollout=replace(rollout, **changed),
        rows=[data_rows[group] for group in group_of_row[first_of_runs(group_of_row)]],
        episodes=None if episodes is None else episodes.take(rows),
        **entries(joined, rows),
    )


def _alike(rounds: Sequence[Scored]) -> Sequence[Scored]:
    """Return rounds whose rollouts have the same fields and as many columns: those of the widest.

    Conversations differ in their lengths, and in whether their history was rewritten.
    """
    if len({scored.rollout.parent is None for scored in rounds}) > 1:
        rounds = [replace(x, rollout=with_parents(x.rollout)) for x in rounds]
    if len({scored.rollout.episode_id is None for scored in rounds}) > 1:
        rounds = [replace(x, rollout=with_episode_ids(x.rollout)) for x in rounds]
    images = alike([scored.rollout.images for scored in rounds], [len(x.rewards) for x in rounds])
    rounds = [
        replace(scored, rollout=replace(scored.rollout, images=pixels))
        for scored, pixels in zip(rounds, images, strict=True)
    ]
    widths = [scored.rollout.tokens.shape[1] for scored in rounds]
    if len(set(widths)) == 1:
        return rounds
    widest = max(widths)

    def widen(scored: Scored, width: int) -> Scored:
        def pad(array: np.ndarray) -> np.ndarray:
            is_per_token = np.shape(array)[1:] == (width,)
            return np.pad(array, ((0, 0), (0, widest - width))) if is_per_token else array

        episodes = scored.episodes
        if episodes is not None:
            episodes = replace(episodes, turn_rewards=pad(episodes.turn_rewards))
        return replace(scored, rollout=jax.tree.map(pad, scored.rollout), episodes=episodes)

    return [widen(scored, width) for scored, width in zip(rounds, widths, strict=True)]


def _all_episodes(rounds: Sequence[EpisodeOutcomes | None]) -> EpisodeOutcomes | None:
    """Join the environment's outcomes of all rows of several rounds."""
    known = [episodes for episodes in rounds if episodes is not None]
    if not known:
        return None
    joined = _joined([fields_of(episodes) for episodes in known])
    return replace(known[0], **joined | {"is_scored": known[0].is_scored})


def _joined(values: Sequence[Any]) -> Any:
    """Join arrays and lists, also in dicts and pytrees, and add up numbers."""
    first = values[0]
    match first:
        case list():
            return [item for value in values for item in value]
        case np.ndarray():
            return np.concatenate(values)
        case dict():
            return {name: _joined([value[name] for value in values]) for name in first}
        case Rollout():
            return jax.tree.map(lambda *parts: np.concatenate(parts), *values)
        case int() | float():
            return sum(values)
    raise TypeError(f"rounds have no sum of {type(first).__name__}")


def _unique_ids(ids: Iterable[Any]) -> np.ndarray:
    """Return the ids of the rows of all rounds such that they differ between rounds."""
    numbered = enumerate(np.asarray(of_round, np.int64) for of_round in ids)
    return np.concatenate([values + (number << 32) for number, values in numbered])


def all_sampled(scored: Scored) -> Scored:
    """Return the completions together with those that were passed over."""
    rounds = scored.chosen_from
    if not rounds:
        return scored
    num_groups = sum(len(np.unique(part.rollout.group_id)) for part in rounds)
    return take(rounds, np.arange(num_groups))


def of_policy(scored: Scored) -> Scored:
    """Return the completions without the rows that the policy did not write."""
    source = scored.rollout.source
    if source is None:
        return scored
    return take_rows([scored], np.flatnonzero(np.asarray(source) == RowSource.POLICY))
