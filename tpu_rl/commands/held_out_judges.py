"""Evaluations that judge given texts: rankings of pairs, and the accuracy of reward models."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tpu_rl import data
from tpu_rl.commands import compose, held_out_rows, roles
from tpu_rl.commands.config import Stage
from tpu_rl.commands.roles import RunContext
from tpu_rl.commands.sources import of_pairs
from tpu_rl.data import Row
from tpu_rl.environments import task_of
from tpu_rl.environments.task import no_slices
from tpu_rl.evaluation import pair_accuracy, reward_accuracy
from tpu_rl.evaluation.reward_accuracy import HeldOutPairs, Judge
from tpu_rl.experience.sources import step_labels
from tpu_rl.experience.sources.pairs import GivenPairs, ToPairs
from tpu_rl.rewards import reward_model
from tpu_rl.rollout.engine import RolloutRequest
from tpu_rl.rollout.scoring import Scored
from tpu_rl.types import Algorithm, Params, Purpose


def of_stage(
    context: RunContext, stage: Stage, algorithm: Algorithm, params: Params
) -> Callable[[Params, bool], dict[str, float]] | None:
    """Return the evaluation of a stage that trains a reward model or learns from given pairs.

    A reward model judges held-out pairs or steps; a policy ranks held-out pairs. None without any.
    """
    if roles.reading(stage.algorithm) is not None:
        return reward_accuracy.as_evaluator(held_out_judge(context, stage, params))
    given = of_pairs.require_pairs(context.config, context.language.tokenizer)
    if not given.held_out:
        return None
    to_pairs = of_pairs.to_pairs(context, stage, params, given.held_out)
    rank = ranking(context, stage, algorithm, given, to_pairs)
    return lambda params, in_full: rank(params)


def ranking(
    context: RunContext, stage: Stage, algorithm: Algorithm, given: GivenPairs, to_pairs: ToPairs
) -> Callable[[Params], dict[str, float]]:
    """Return a function that measures the policy's ranking of held-out pairs, or of judged
    completions.

    There is at least one of them.
    """
    tokenizer = context.language.tokenizer
    held_out_rows.require_same_rows(given.held_out)
    train_lengths, train_good = pair_accuracy.lengths_of(given.train, tokenizer, context.max_length)
    if stage.algorithm.experience.graded:
        labels = [bool(row["label"]) for row in given.held_out]
        if len(set(labels)) < 2:
            print(
                "note: nothing is evaluated: held-out completions are not of both labels",
                file=sys.stderr,
            )
            return lambda params: {}
        log_probs = compose.log_probs_of(context, "policy")
        return pair_accuracy.graded_accuracy(
            log_probs, train_lengths, train_good, given.held_out, to_pairs
        )
    held_out = to_pairs(given.held_out)
    return pair_accuracy.ranking_accuracy(
        algorithm,
        train_lengths,
        held_out,
        pair_accuracy.problems_of(given.held_out),
        context.mesh,
        context.config.mesh.context,
        context.config.batch.share_prefixes,
    )


def held_out_judge(context: RunContext, stage: Stage, params: Params) -> Judge:
    """Return the accuracy of the stage's reward model on held-out pairs or steps.

    `params` is the tree that the run, or the stage, began with.
    """
    if stage.algorithm.experience.source == "step_labels":
        return reward_accuracy.step_judge(
            context.models["reward"],
            context.params_of("reward"),
            _held_out_steps(context, params),
            context.language.tokenizer,
            context.max_length,
        )
    reading = roles.reading(stage.algorithm)
    assert reading is not None
    return reward_accuracy.pair_judge(
        reward_model.score_functions(context.models["reward"], reading)[0],
        context.params_of("reward"),
        _held_out_pairs(context, stage, params),
    )


def _held_out_pairs(context: RunContext, stage: Stage, params: Params) -> HeldOutPairs | None:
    if compose.learns_from_given_pairs(stage):
        given = of_pairs.require_pairs(context.config, context.language.tokenizer)
        held_out_rows.require_same_rows(given.held_out)
        rows = [given.train, given.held_out]
        if stage.algorithm.experience.graded:
            rows = [reward_accuracy.of_ratings(data.sample(ratings)) for ratings in rows]
        return reward_accuracy.given_pairs(*rows, context.language.tokenizer, context.max_length)
    rows = held_out_rows.evaluation_rows(context)
    if not rows:
        return None
    scored = _reference_completions(context, params, rows)
    task = task_of(context.config.data)
    return reward_accuracy.sampled_pairs(scored, rows, task.slices_of if task else no_slices)


def _held_out_steps(context: RunContext, params: Params) -> list[Row]:
    rows = held_out_rows.evaluation_rows(context)
    task = task_of(context.config.data)
    has_labels = context.config.algorithm.experience.sampled_by is None
    if task is None or task.label_steps is None or not rows:
        return rows if has_labels else []
    scored = _reference_completions(context, params, rows)
    return step_labels.label_steps(scored, task.label_steps)


def _reference_completions(context: RunContext, params: Params, rows: list[Row]) -> Scored:
    """Return completions of the rows' prompts by the reference, whatever the seed of the run."""
    engine = compose.rollout_engine(context, "reference", purpose=Purpose.EVALUATION, seed=0)
    return engine.roll_out(params, RolloutRequest(rows, step=0))
