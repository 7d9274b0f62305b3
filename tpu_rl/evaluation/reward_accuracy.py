"""Accuracy of a reward model on held-out pairs or steps, beside simple rules.

The model is read by the very function that later makes a reward of it
(`tpu_rl.rewards.reward_model`). Intervals of 95 % count problems, because several pairs or steps of
one problem are not independent.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from tpu_rl import data, models, rewards
from tpu_rl.data import Row
from tpu_rl.evaluation import intervals
from tpu_rl.evaluation.pair_accuracy import by_problem, lengths_of, longer_or_shorter, problems_of
from tpu_rl.experience.config import FLIPPED
from tpu_rl.experience.sources import pairing
from tpu_rl.rewards import reward_model
from tpu_rl.rollout.scoring import Scored
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.train import sharding
from tpu_rl.types import Model, Pairs, Params, QExamples

SIDES = ("chosen", "rejected")


Accuracies = dict[str, intervals.Estimate]
"""Line of a table -> accuracy. "" is the model on everything; others are slices or simple rules."""
Judge = Callable[[Params, bool], Accuracies]
"""(the whole params tree, True to add each slice) -> accuracies."""


def as_evaluator(judge: Judge) -> Callable[[Params, bool], dict[str, float]]:
    """Return the judge's accuracies as metrics eval/accuracy, accuracy_low, accuracy_high and n.

    Simple rules and slices have their name behind the slash.
    """

    def evaluate(params: Params, slices: bool) -> dict[str, float]:
        measured: dict[str, float] = {}
        for name, estimate in judge(params, slices).items():
            prefix = f"eval/{name}_" if name else "eval/"
            measured |= estimate.as_metrics(f"{prefix}accuracy", f"{prefix}n")
        return measured

    return evaluate


def nothing_held_out(what: str) -> Judge:
    """Say that there are no held-out pairs or steps, and return a judge of nothing."""
    print(f"note: nothing is evaluated: there are no held-out {what}", file=sys.stderr)
    return lambda params, slices: {}


# --- pairs ---


@dataclass(frozen=True)
class HeldOutPairs:
    """Held-out pairs. Lists have one entry per pair."""

    pairs: Pairs
    """Two rows per pair, the better one first."""
    problems: list[int]
    slices: list[tuple[str, ...]]
    """The slices that each pair belongs to."""
    rules: dict[str, np.ndarray]
    """Simple rules to compare with: [pairs] 1 where a rule is right, 0 where it is wrong, 0.5 where
    it cannot tell."""


def pair_judge(
    score: reward_model.Score, select: Callable[[Params], Params], held_out: HeldOutPairs | None
) -> Judge:
    """Return a function that computes the share of held-out pairs that the reward model ranks as
    their labels say.

    Args:
        select: selects the params of the model.
    """
    if held_out is None:
        return nothing_held_out("pairs")
    tokens = np.asarray(held_out.pairs.tokens)
    mask = np.asarray(held_out.pairs.action_mask)
    rules = {name: by_problem(right, held_out.problems) for name, right in held_out.rules.items()}

    def judge(params: Params, slices: bool) -> Accuracies:
        scores = reward_model.score_rows(score, select(params), tokens, mask)
        better, worse = scores.reshape(-1, 2).T
        right = (better > worse) + 0.5 * (better == worse)
        lines = {"": by_problem(right, held_out.problems), **rules}
        return lines | (by_slice(right, held_out.problems, held_out.slices) if slices else {})

    return judge


def given_pairs(
    train: Sequence[Row], held_out: Sequence[Row], tokenizer: Tokenizer, max_length: int
) -> HeldOutPairs | None:
    """Return the data's held-out pairs.

    Slices are the column `slice`, and which completion is the longer one.
    """
    if not held_out:
        return None
    train_lengths = lengths_of(train, tokenizer, max_length)[0]
    pairs = data.pairs(held_out, tokenizer, max_length)
    problems = problems_of(held_out)
    rules = {
        "length_only": longer_or_shorter(train_lengths, np.asarray(pairs.action_mask).sum(-1)),
        "majority": by_vote(held_out, problems),
    }
    return HeldOutPairs(pairs, problems, with_lengths(column_slices(held_out), pairs), rules)


def of_ratings(rows: Sequence[Row]) -> list[Row]:
    """Return pairs of the rated completions of each prompt, the one with the higher score first.

    Equal scores are no pair.
    """
    by_prompt: dict[str, list[Row]] = {}
    for row in rows:
        by_prompt.setdefault(json.dumps(row["prompt"]), []).append(row)
    return [
        better
        | {"chosen": better["completion"], "rejected": worse["completion"]}
        | {"problem": better.get("problem", group[0]["row"])}
        for group in by_prompt.values()
        for better in group
        for worse in group
        if better["score"] > worse["score"]
    ]


def sampled_pairs(
    scored: Scored, rows: list[Row], slices_of: Callable[[Row], tuple[str, ...]]
) -> HeldOutPairs | None:
    """Return a right and a wrong completion of each held-out problem that has both.

    `slices_of` names the slices of a problem.
    """
    paired, _ = pairing.pair_up(scored)
    exists = np.asarray(paired.action_mask).any(-1)
    pairs: Pairs = jax.tree.map(lambda values: np.asarray(values)[exists], paired)
    if not len(pairs.tokens):
        return None
    problems = pairs.group_id[::2].tolist()
    slices = with_lengths([slices_of(rows[problem]) for problem in problems], pairs)
    lengths = np.asarray(pairs.action_mask).sum(-1)
    # The rule learns from the held-out pairs themselves, which can only flatter it.
    rules = {"length_only": longer_or_shorter(lengths, lengths)}
    return HeldOutPairs(pairs, problems, slices, rules)


def by_vote(rows: Sequence[Row], problems: Sequence[int]) -> np.ndarray:
    """Return [pairs] how well a majority vote without any model ranks them.

    Each different completion of a problem that is in a pair votes for its last number. The rule is
    right if the better completion ends with the number that has more votes.
    """
    votes: dict[int, Counter] = {}
    for problem in set(problems):
        texts = {
            rewards.text_of(row[side])
            for row, row_problem in zip(rows, problems, strict=True)
            if row_problem == problem
            for side in SIDES
        }
        votes[problem] = Counter(last_number(text) for text in texts)
    right = []
    for row, problem in zip(rows, problems, strict=True):
        chosen, rejected = (
            votes[problem][last_number(rewards.text_of(row[side]))] for side in SIDES
        )
        right.append(float(chosen > rejected) + 0.5 * (chosen == rejected))
    return np.array(right)


def last_number(text: str) -> Any:
    """Return the last number of a text, with which answers tend to end, or None."""
    numbers = re.findall(r"-?[0-9][0-9,.]*", text)
    return rewards.read_number(numbers[-1]) if numbers else None


def column_slices(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the slices of each row: its column `slice`, if it has one, and "label_flipped"."""
    return [
        (*([str(row["slice"])] if "slice" in row else []), *[FLIPPED] * (FLIPPED in row))
        for row in rows
    ]


def with_lengths(slices: Sequence[tuple[str, ...]], pairs: Pairs) -> list[tuple[str, ...]]:
    """Return each pair's slices, and one that says which of its completions is longer."""
    chosen, rejected = np.asarray(pairs.action_mask).sum(-1).reshape(-1, 2).T
    not_longer = np.where(chosen < rejected, "shorter_is_better", "same_length")
    names = np.where(chosen > rejected, "longer_is_better", not_longer)
    return [(*others, str(name)) for others, name in zip(slices, names, strict=True)]


def by_slice(
    right: np.ndarray, problems: Sequence[int], slices: Sequence[tuple[str, ...]]
) -> Accuracies:
    """Return the accuracy within each slice."""
    lines = {}
    for name in sorted({name for names in slices for name in names}):
        members = [index for index, names in enumerate(slices) if name in names]
        member_problems = [problems[index] for index in members]
        lines[name] = by_problem(right[members], member_problems)
    return lines


# --- steps ---


def step_judge(
    model: Model,
    select: Callable[[Params], Params],
    rows: list[Row],
    tokenizer: Tokenizer,
    max_length: int,
) -> Judge:
    """Return a function that computes the share of held-out steps that the model judges rightly.

    Slices are the places of steps in their solution.

    Args:
        select: selects its params from the whole tree.
    """
    if not rows:
        return nothing_held_out("steps")
    examples = data.steps(rows, tokenizer, max_length)
    mask = np.asarray(examples.action_mask)
    at = tuple(np.argwhere(mask).T)
    labels = np.asarray(examples.returns)[at] > 0.5
    problems = [rows[row].get("problem", int(row)) for row in at[0]]
    places = np.concatenate([np.arange(1, count + 1) for count in mask.sum(-1)])
    slices = [(f"step_{place}",) for place in places]
    majority_right = np.asarray(labels == (labels.mean() > 0.5), float)
    majority = by_problem(majority_right, problems)
    apply = jax.jit(partial(models.apply, model))

    def judge(params: Params, by_place: bool) -> Accuracies:
        logits = step_logits(apply, select(params), examples)[at]
        right = np.asarray((logits > 0) == labels, float)
        lines = {"": by_problem(right, problems), "majority": majority}
        return lines | (by_slice(right, problems, slices) if by_place else {})

    return judge


def step_logits(apply: Any, params: Params, examples: QExamples, rows: int = 64) -> np.ndarray:
    """Return [N, T] logits that a step which ends at the token is right, `rows` rows at a time."""
    tokens = np.asarray(examples.tokens)
    padded = np.pad(tokens, ((0, -len(tokens) % rows), (0, 0)))
    logits = [
        sharding.to_host(apply(params, batch))[..., 0]
        for batch in np.split(padded, len(padded) // rows)
    ]
    return np.concatenate(logits)[: len(tokens)]
