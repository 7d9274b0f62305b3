"""Demonstrations, accepted and scored completions, and labels of steps as experience."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from tpu_rl import data, wings
from tpu_rl.commands import compose
from tpu_rl.commands.config import Stage
from tpu_rl.commands.roles import RunContext
from tpu_rl.environments import task_of
from tpu_rl.errors import InputError
from tpu_rl.experience.source import Source, StepExperience
from tpu_rl.experience.sources import accepted, completions, step_labels
from tpu_rl.types import Params, TrainState


def make_demonstrations(context: RunContext, stage: Stage, params: Params) -> Source:
    return completions.demonstration_source(
        compose.row_stream(context, stage), _demonstrate(context)
    )


def _demonstrate(context: RunContext) -> completions.Demonstrate:
    return partial(
        data.demonstrations, tokenizer=context.language.tokenizer, max_length=context.max_length
    )


def make_completions(context: RunContext, stage: Stage, params: Params) -> Source:
    batch = context.config.batch
    spec = stage.algorithm.experience
    source = completions.completion_source(
        compose.rollout_engine(context),
        compose.rollout_engine(context, spec.sampled_by) if spec.sampled_by else None,
        compose.row_stream(context, stage),
        batch,
        spec.shares(batch.prompts).get("policy", 0),
        _demonstrate(context),
        spec.sampled_by,
    )
    if spec.served is None:
        return source
    teach = wings.MODULES["served_teacher"].connect(*spec.served, context.language.tokenizer)

    def draw(step: int, state: TrainState) -> StepExperience:
        experience = source.draw(step, state)
        return experience._replace(data=teach(experience.data))

    return source._replace(draw=draw)


def make_accepted(context: RunContext, stage: Stage, params: Params) -> Source:
    spec = stage.algorithm.experience
    assert spec.acceptance is not None
    assert spec.sampled_by is not None
    engine = compose.rollout_engine(context, spec.sampled_by)
    stream = compose.row_stream(context, stage)
    return accepted.accepted_source(engine, stream, spec.acceptance, spec.sampled_by)


def make_step_labels(context: RunContext, stage: Stage, params: Params) -> Source:
    algorithm: Any = stage.algorithm
    sampled_by = algorithm.experience.sampled_by
    is_judged = bool(context.config.reward_names)
    step_labels.require_steps(context.config.data, sampled_by, algorithm.steps, is_judged)
    stream = compose.row_stream(context, stage)
    if algorithm.steps == "monte_carlo":
        engine = compose.rollout_engine(context, "reference")
        again = compose.plain_decoding(
            context, context.rollout_policy("reference"), algorithm.continuations
        )
        again = replace(again, config=replace(again.config, prompt_length=context.max_length))
        return step_labels.monte_carlo_step_source(
            engine, stream, again, compose.scorer(context), algorithm
        )
    to_examples = partial(
        data.steps, tokenizer=context.language.tokenizer, max_length=context.max_length
    )
    task = task_of(context.config.data)
    if sampled_by is None or task is None or task.label_steps is None:
        return step_labels.given_step_source(stream, to_examples)
    engine = compose.rollout_engine(context, sampled_by)
    return step_labels.sampled_step_source(engine, stream, task.label_steps, to_examples)


def make_scored_completions(context: RunContext, stage: Stage, params: Params) -> Source:
    spec = stage.algorithm.experience
    size = context.config.batch.group_size
    if spec.compared is not None and size > spec.compared:
        raise InputError(
            f"a prompt has {size} completions",
            where="--batch.group-size, --algorithm.max-completions",
            why=f"at most {spec.compared} are compared",
            fix="make them equal",
        )
    stream = compose.row_stream(context, stage)
    if spec.sampled_by is not None:
        return completions.sampled_scores_source(
            compose.rollout_engine(context, spec.sampled_by), stream
        )
    to_scored = partial(
        data.scored_completions,
        tokenizer=context.language.tokenizer,
        max_length=context.max_length,
        size=size,
    )
    return completions.given_scores_source(stream, to_scored)
