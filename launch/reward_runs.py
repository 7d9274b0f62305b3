"""Runs that train a reward model: its steps' labels, its held-out accuracy, and what its directory says of its scores.

What is held out is judged with the very function that makes a reward of the model later (`tpu_rl.reward_models`).
Intervals are of 95 % and count problems, as several pairs or steps of one are not independent.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from launch import dataset, pairs, sources
from launch.config import ArithmeticData, FileData, Stage
from launch.sources import Drawn, Setup, Source
from tpu_rl import comparisons, data, environments, evaluation, models, reward_models, rewards, rollouts, sharding
from tpu_rl.algos import AlgorithmConfig, ProcessRewardConfig, RewardModelConfig, SentenceRewardConfig
from tpu_rl.errors import InputError
from tpu_rl.reward_models import Reading
from tpu_rl.types import Pairs, Params, Purpose, QExamples, TrainState


def reading(algorithm: AlgorithmConfig) -> Reading | None:
    """How the scores of the model that the algorithm trains are read; None where it trains no reward model."""
    match algorithm:
        case RewardModelConfig():
            return Reading(penalty=algorithm.penalty, others=algorithm.members[1:])
        case SentenceRewardConfig():
            return Reading("sentences", algorithm.separators, algorithm.aggregate)
        case ProcessRewardConfig():
            return Reading("steps", algorithm.separators, algorithm.aggregate)
    return None


class Accuracy(NamedTuple):
    """A line of the table."""

    name: str
    estimate: evaluation.Estimate


Judge = Callable[[Params, bool], list[Accuracy]]
"""(the whole params tree, slice by slice too?) -> accuracies: "" is the model's on everything."""


def evaluator(setup: Setup, stage: Stage, params: Params) -> Callable[[Params, bool], dict[str, float]]:
    """Metrics eval/accuracy, accuracy_low, accuracy_high and n, the same of what knows lengths or labels only, and,
    before and after the run, of each slice."""
    judge = held_out_judge(setup, stage, params)

    def evaluate(params: Params, last: bool) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, estimate in judge(params, last):
            found |= pairs.named(f"eval/{name}_" if name else "eval/", estimate)
        return found

    return evaluate


def held_out_judge(setup: Setup, stage: Stage, params: Params) -> Judge:
    """What judges the model on held-out pairs or steps; `params` is the tree that the run, or the stage, began with."""
    if isinstance(stage.algorithm, ProcessRewardConfig):
        return step_judge(setup, stage, params)
    return pair_judge(setup, stage, params)


def completions_of(setup: Setup, params: Params, rows: list[data.Row]) -> rollouts.Scored:
    """A group of completions of each row's prompt by the reference, with the same luck whatever the run's seed."""
    same_luck = setup._replace(config=replace(setup.config, seed=0))
    roll_out = sources.roller(same_luck, "reference", purpose=Purpose.EVALUATION)
    return roll_out(0, TrainState(jnp.zeros((), jnp.int32), params, (), ()), rows, 0)


def nothing_held_out(params: Params, slices: bool) -> list[Accuracy]:
    del params, slices
    return []


# --- pairs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeldOutPairs:
    """Lists have one entry a pair."""

    pairs: Pairs
    """Two rows a pair, the better first."""
    problems: list[int]
    slices: list[tuple[str, ...]]
    """The slices that a pair belongs to."""
    rules: dict[str, np.ndarray]
    """Simple rules to compare with: [pairs] 1 where one is right, 0 where it is wrong, 0.5 where it cannot tell."""


def pair_judge(setup: Setup, stage: Stage, params: Params) -> Judge:
    """How many held-out pairs the model ranks rightly."""
    held_out = (given if pairs.are_given(stage) else sampled)(setup, params)
    if held_out is None:
        print("note: nothing is evaluated: there are no held-out pairs", file=sys.stderr)
        return nothing_held_out
    score, members = scorer(setup, stage)
    mask = np.asarray(held_out.pairs.action_mask)
    rules = [Accuracy(name, pairs.by_problem(found, held_out.problems)) for name, found in held_out.rules.items()]

    def judge(params: Params, slices: bool) -> list[Accuracy]:
        own = [setup.params_of(name)(params) for name in members]
        found = reward_models.score_rows(score, own, np.asarray(held_out.pairs.tokens), mask)
        better, worse = found.reshape(-1, 2).T
        right = (better > worse) + 0.5 * (better == worse)
        lines = [Accuracy("", pairs.by_problem(right, held_out.problems)), *rules]
        return lines + (by_slice(right, held_out.problems, held_out.slices) if slices else [])

    return judge


def scorer(setup: Setup, stage: Stage) -> tuple[reward_models.Score, list[str]]:
    """(the scores of the model that the stage trains, the roles whose params they take)."""
    how = reading(stage.algorithm)
    assert how is not None
    members = ["reward", *how.others]
    return reward_models.score_function(tuple(setup.models[name] for name in members), how), members


def given(setup: Setup, params: Params) -> HeldOutPairs | None:
    """The data's held-out pairs; slices are a column `slice`, and whether the better completion is the longer one."""
    del params
    train, rows = pairs.rows_that_fit(setup)
    if not rows:
        return None
    longest = setup.config.sampling.max_prompt_tokens + setup.config.sampling.max_new_tokens
    both = [data.pairs(part, setup.language.tokenizer, longest) for part in (train, rows)]
    named = [(str(row["slice"]),) if "slice" in row else () for row in rows]
    problems = [row.get("problem", row["row"]) for row in rows]
    rules = {"length_only": pairs.by_length(*both), "majority": by_vote(rows, problems)}
    return HeldOutPairs(both[1], problems, with_lengths(named, both[1]), rules)


def by_vote(rows: Sequence[data.Row], problems: Sequence[int]) -> np.ndarray:
    """[pairs] whether the better completion's last number is the one that more of its problem's completions end with.

    Without any model: each different completion of the problem that stands in a pair has one vote.
    """
    votes: dict[int, Counter] = {}
    for problem in set(problems):
        sides = [row[side] for row, own in zip(rows, problems, strict=True) if own == problem for side in SIDES]
        texts = {rewards.text_of(completion) for completion in sides}
        votes[problem] = Counter(last_number(text) for text in texts)
    found = []
    for row, problem in zip(rows, problems, strict=True):
        chosen, rejected = (votes[problem][last_number(rewards.text_of(row[side]))] for side in SIDES)
        found.append(float(chosen > rejected) + 0.5 * (chosen == rejected))
    return np.array(found)


SIDES = ("chosen", "rejected")


def last_number(text: str) -> Any:
    """The last number of a text, which answers tend to end with; None where there is none."""
    numbers = re.findall(r"-?[0-9][0-9,.]*", text)
    return rewards.read_number(numbers[-1]) if numbers else None


def sampled(setup: Setup, params: Params) -> HeldOutPairs | None:
    """A right against a wrong completion of each held-out problem that has both; slices are the numbers of terms."""
    rows = dataset.evaluation_rows(setup.config)
    if not rows:
        return None
    found, _ = comparisons.pair_up(completions_of(setup, params, rows))
    kept = np.asarray(found.action_mask).any(-1)
    arrays: dict[str, Any] = {name: np.asarray(x)[kept] for name, x in vars(found).items()}
    found = Pairs(**arrays)
    if not len(found.tokens):
        return None
    problems = found.group_id[::2].tolist()
    named = [slice_of(setup, rows[problem]) for problem in problems]
    # The rule may look at the held-out pairs themselves: at best it is flattered.
    return HeldOutPairs(found, problems, with_lengths(named, found), {"length_only": pairs.by_length(found, found)})


def slice_of(setup: Setup, row: data.Row) -> tuple[str, ...]:
    if not isinstance(setup.config.data, ArithmeticData):
        return ()
    return (f"{1 + sum(row['prompt'].count(operator) for operator in '+-*')}_terms",)


def with_lengths(named: Sequence[tuple[str, ...]], of: Pairs) -> list[tuple[str, ...]]:
    chosen, rejected = np.asarray(of.action_mask).sum(-1).reshape(-1, 2).T
    shorter = np.where(chosen < rejected, "shorter_is_better", "same_length")
    words = np.where(chosen > rejected, "longer_is_better", shorter)
    return [(*names, str(word)) for names, word in zip(named, words, strict=True)]


def by_slice(right: np.ndarray, problems: Sequence[int], slices: Sequence[tuple[str, ...]]) -> list[Accuracy]:
    lines = []
    for name in sorted({name for names in slices for name in names}):
        chosen = [i for i, names in enumerate(slices) if name in names]
        lines.append(Accuracy(name, pairs.by_problem(right[chosen], [problems[i] for i in chosen])))
    return lines


# --- steps -------------------------------------------------------------------------------------------------------


def step_source(setup: Setup, stage: Stage, params: Params) -> Source:
    """Steps with their labels: the data's, or of the arithmetic task's prompts, completed by the reference."""
    del params
    config, longest = setup.config, longest_of(setup)
    require_steps(setup, stage)
    stream = dataset.make_stream(config, stage, setup.language)
    if stage.algorithm.needs.sampled_by is None:
        return Source(
            lambda step, state: Drawn(data.steps(next(stream)[1], setup.language.tokenizer, longest), {}, [], []),
            stream.get_state,
            stream.set_state,
        )
    roll_out = sources.roller(setup, "reference")

    def draw(step: int, state: TrainState) -> Drawn:
        rows = next(stream)[1]
        scored = roll_out(step, state, rows, 0)
        examples = data.steps(labelled(scored, rows), setup.language.tokenizer, longest)
        return Drawn(examples, rollouts.metrics(scored), rollouts.records(scored, step), rollouts.warnings(scored))

    return Source(draw, stream.get_state, stream.set_state)


def longest_of(setup: Setup) -> int:
    return setup.config.sampling.max_prompt_tokens + setup.config.sampling.max_new_tokens


def require_steps(setup: Setup, stage: Stage) -> None:
    """Raises InputError where neither the data nor their task says which steps are right."""
    task = setup.config.data
    brings_steps = isinstance(task, FileData) and task.format == "plain"
    if not (brings_steps if stage.algorithm.needs.sampled_by is None else isinstance(task, ArithmeticData)):
        raise InputError(
            "nothing says which steps are right",
            where="--algorithm.steps",
            why="a file has columns prompt, completions (the steps) and labels; of tasks only arithmetic knows them",
            fix="give such a --data.path with --algorithm.steps given, or arithmetic with --algorithm.steps reference",
        )


def labelled(scored: rollouts.Scored, rows: Sequence[data.Row]) -> list[data.Row]:
    """The completions as rows of steps; one without text is left out."""
    group = len(scored.completions) // len(rows)
    found = []
    for i, completion in enumerate(scored.completions):
        row = rows[i // group]
        steps = environments.labelled_steps(row["prompt"], completion)
        if steps:
            texts, labels = zip(*steps, strict=True)
            ended = not bool(scored.rollout.truncated[i])
            found.append(
                {"prompt": row["prompt"], "completions": texts, "labels": labels, "ended": ended, "problem": i // group}
            )
    return found


def step_judge(setup: Setup, stage: Stage, params: Params) -> Judge:
    """How many held-out steps the model judges rightly; slices are the steps' places."""
    if isinstance(setup.config.data, FileData):
        rows: list[data.Row] = dataset.evaluation_rows(setup.config)
    else:
        problems = dataset.evaluation_rows(setup.config)
        rows = labelled(completions_of(setup, params, problems), problems) if problems else []
    if not rows:
        print("note: nothing is evaluated: there are no held-out steps", file=sys.stderr)
        return nothing_held_out
    examples = data.steps(rows, setup.language.tokenizer, longest_of(setup))
    at = np.argwhere(np.asarray(examples.action_mask))
    labels = np.asarray(examples.returns)[tuple(at.T)] > 0.5
    owners = [rows[row].get("problem", int(row)) for row in at[:, 0]]
    places = np.concatenate([np.arange(1, count + 1) for count in np.asarray(examples.action_mask).sum(-1)])
    majority = pairs.by_problem(np.asarray(labels == (labels.mean() > 0.5), float), owners)
    slices = [(f"step_{place}",) for place in places]

    apply = jax.jit(partial(models.apply, setup.models["reward"]))

    def judge(params: Params, by_place: bool) -> list[Accuracy]:
        logits = step_logits(apply, setup.params_of("reward")(params), examples)[tuple(at.T)]
        right = np.asarray((logits > 0) == labels, float)
        lines = [Accuracy("", pairs.by_problem(right, owners)), Accuracy("majority", majority)]
        return lines + (by_slice(right, owners, slices) if by_place else [])

    return judge


def step_logits(apply: Any, params: Params, examples: QExamples, rows: int = 64) -> np.ndarray:
    """[N, T] logits that a step which ends at the token is right."""
    tokens = np.asarray(examples.tokens)
    padded = np.pad(tokens, ((0, -len(tokens) % rows), (0, 0)))
    found = [sharding.to_host(apply(params, batch))[..., 0] for batch in np.split(padded, len(padded) // rows)]
    return np.concatenate(found)[: len(tokens)]
