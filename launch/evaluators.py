"""Evaluations of a run: answers to held-out problems, or accuracy on held-out pairs and steps."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

from launch import compose, roles
from launch.config import FileData, Stage
from launch.roles import RunContext
from tpu_rl import data
from tpu_rl.data import Row
from tpu_rl.environments import task_of
from tpu_rl.environments.task import no_slices
from tpu_rl.experience import pair_accuracy, reward_accuracy, step_labels, tasks
from tpu_rl.experience.config import sampler_config
from tpu_rl.experience.reward_accuracy import HeldOutPairs, Judge
from tpu_rl.rewards import named, reward_model
from tpu_rl.rollout import evaluation
from tpu_rl.rollout.engine import Decoding, Engine, RolloutRequest, Scorer, make_engine
from tpu_rl.rollout.scoring import Scored
from tpu_rl.rollout.weights import RolloutPolicy
from tpu_rl.types import Algorithm, Params, Purpose

Evaluate = Callable[[Params, bool], dict[str, float]]
"""(the whole params tree, True to evaluate in full) -> metrics named eval/. In full, problems are
also answered greedily, and accuracy is also given for each slice of the data."""


def evaluator(context: RunContext, stage: Stage, algorithm: Algorithm, params: Params) -> Evaluate:
    """Return the evaluation that fits what the stage learns from.

    A reward model judges held-out pairs or steps; an algorithm that learns from given pairs ranks
    held-out pairs; every other stage answers held-out problems.
    """
    if roles.reading(stage.algorithm) is not None:
        return reward_accuracy.as_evaluator(held_out_judge(context, stage, params))
    if compose.are_given(stage):
        rank = _ranking(context, stage, algorithm, params)
        return lambda params, in_full: rank(params)
    exact = context.with_exact_cache()
    if stage.algorithm.experience.policy == "guided":
        return _answers(context, exact.guided_policy(stage.algorithm))
    return _answers(context, exact.rollout_policy("policy"))


def before_training(context: RunContext, stage: Stage, evaluate: Evaluate) -> Evaluate:
    """Return the evaluation before the first step.

    Of a guided policy it is the reference alone, because nothing has learned to guide it.
    """
    if stage.algorithm.experience.policy != "guided":
        return evaluate
    return _answers(context, context.with_exact_cache().rollout_policy("policy"))


# --- answers ---


def _answers(context: RunContext, policy: RolloutPolicy) -> Evaluate:
    config = context.config
    tokenizer = context.language.tokenizer
    rows = _evaluation_rows(context)
    name = config.evaluation_reward
    if not rows or name is None:
        print(
            "note: nothing is evaluated: there are no held-out rows, or no reward that judges them",
            file=sys.stderr,
        )
        return lambda params, in_full: {}
    if isinstance(config.data, FileData):
        rows = tasks.drop_misfits(rows, tokenizer, config.sampling.max_prompt_tokens)
    reward = named.resolve(name, config.reward_limits, config.allow_unsandboxed_code)
    scorer = Scorer(tokenizer, {named.display_name(name): reward}, config.reward_limits.fault_share)
    # Accuracy is the model's own, so nothing of its distribution is cut off.
    plain = replace(
        sampler_config(config.sampling, tokenizer, 1),
        top_k=None,
        top_p=None,
        min_p=None,
        repetition_penalty=1.0,
        logit_bias=(),
    )

    def engine(temperature: float) -> Engine:
        # The same random keys whatever the step or seed: what differs is the model.
        decoding = Decoding(
            policy._replace(drafter=None),
            replace(plain, temperature=temperature),
            config.sampling.max_prompt_tokens,
            purpose=Purpose.EVALUATION,
            stop_strings=config.sampling.stop_strings,
        )
        return make_engine(decoding, scorer)

    sampled = engine(temperature=1.0)
    greedy = engine(temperature=0.0)
    read_answer = evaluation.ANSWER_READERS.get(name)

    def evaluate(params: Params, in_full: bool) -> dict[str, float]:
        metrics = _answer_metrics("eval/", evaluation.evaluate(sampled, params, rows, read_answer))
        if in_full and config.evaluation.greedy:
            result = evaluation.evaluate(greedy, params, rows, read_answer)
            metrics |= _answer_metrics("eval/greedy_", result)
        return metrics

    return evaluate


def _answer_metrics(prefix: str, result: evaluation.Evaluation) -> dict[str, float]:
    if result.errors:
        print(
            f"note: evaluation: {len(result.errors)} completions were not judged; "
            f"the first: {result.errors[0]}",
            file=sys.stderr,
        )
    return {
        f"{prefix}accuracy": result.accuracy,
        f"{prefix}accuracy_low": result.low,
        f"{prefix}accuracy_high": result.high,
        f"{prefix}reward": result.reward.value,
        f"{prefix}reward_low": result.reward.low,
        f"{prefix}reward_high": result.reward.high,
        f"{prefix}well_formed": result.well_formed,
        f"{prefix}length_mean": result.mean_length,
        f"{prefix}n": result.n,
    }


# --- given pairs ---


def _ranking(
    context: RunContext, stage: Stage, algorithm: Algorithm, params: Params
) -> Callable[[Params], dict[str, float]]:
    given = compose.require_pairs(context.config, context.language.tokenizer)
    if not given.held_out or stage.algorithm.experience.graded:
        print("note: nothing is evaluated: there are no held-out pairs", file=sys.stderr)
        return lambda params: {}
    held_out = compose.to_pairs(context, stage, params, given.usable)(given.held_out)
    width = held_out.tokens.shape[1]
    return pair_accuracy.ranking_accuracy(
        algorithm,
        data.pairs(given.train, context.language.tokenizer, width),
        held_out,
        pair_accuracy.problems_of(given.held_out),
        context.mesh,
        context.config.mesh.context,
    )


# --- reward models ---


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
    members = ["reward", *reading.others]
    models = tuple(context.models[name] for name in members)
    return reward_accuracy.pair_judge(
        reward_model.score_function(models, reading),
        [context.params_of(name) for name in members],
        _held_out_pairs(context, stage, params),
    )


def _held_out_pairs(context: RunContext, stage: Stage, params: Params) -> HeldOutPairs | None:
    if compose.are_given(stage):
        given = compose.require_pairs(context.config, context.language.tokenizer)
        return reward_accuracy.given_pairs(
            given.train, given.held_out, context.language.tokenizer, context.max_length
        )
    rows = _evaluation_rows(context)
    if not rows:
        return None
    scored = _reference_completions(context, params, rows)
    task = task_of(context.config.data)
    return reward_accuracy.sampled_pairs(scored, rows, task.slices_of if task else no_slices)


def _held_out_steps(context: RunContext, params: Params) -> list[Row]:
    rows = _evaluation_rows(context)
    task = task_of(context.config.data)
    if task is None or task.label_steps is None or not rows:
        return rows
    scored = _reference_completions(context, params, rows)
    return step_labels.label_steps(scored, rows, task.label_steps)


def _evaluation_rows(context: RunContext) -> list[Row]:
    config = context.config
    if not config.evaluation.rows:
        return []
    return tasks.evaluation_rows(config.data, config.algorithm.experience, config.evaluation.rows)


def _reference_completions(context: RunContext, params: Params, rows: list[Row]) -> Scored:
    """Return completions of the rows' prompts by the reference, whatever the seed of the run."""
    engine = compose.rollout_engine(context, "reference", purpose=Purpose.EVALUATION, seed=0)
    return engine.roll_out(params, RolloutRequest(rows, step=0))
