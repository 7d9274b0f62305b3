"""Demonstrations, accepted and scored completions, and labels of steps as experience."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from tpu_rl import data, wings
from tpu_rl.commands import compose
from tpu_rl.commands.config import Stage
from tpu_rl.commands.roles import RunContext
from tpu_rl.environments import task_of
from tpu_rl.errors import InputError
from tpu_rl.experience import source
from tpu_rl.experience.source import Source, StepExperience, from_scored
from tpu_rl.experience.sources import accepted, completions, step_labels
from tpu_rl.rollout.scoring import Scored
from tpu_rl.types import Params, TrainState


def make_demonstrations(context: RunContext, stage: Stage, params: Params) -> Source:
    return source.of_data(
        compose.row_stream(context, stage), _encoder(context, data.demonstrations)
    )


def _encoder(context: RunContext, encode: Callable[..., Any], **settings: int) -> Any:
    """Return a function of `data` from rows to arrays with the run's tokenizer and lengths."""
    tokenizer = context.language.tokenizer
    max_length = context.max_length
    return partial(encode, tokenizer=tokenizer, max_length=max_length, **settings)


def make_completions(context: RunContext, stage: Stage, params: Params) -> Source:
    batch = context.config.batch
    spec = stage.algorithm.experience
    from_roles = completions.completion_source(
        compose.rollout_engine(context),
        compose.rollout_engine(context, spec.sampled_by) if spec.sampled_by else None,
        compose.row_stream(context, stage),
        batch,
        spec.shares(batch.prompts).get("policy", 0),
        _encoder(context, data.demonstrations),
        spec.sampled_by,
    )
    if spec.served is None:
        return from_roles
    teach = wings.MODULES["served_teacher"].Teacher(*spec.served, context.language.tokenizer)

    def draw(step: int, state: TrainState) -> StepExperience:
        experience = from_roles.draw(step, state)
        return experience._replace(data=teach(experience.data))

    return from_roles._replace(draw=draw)


def make_accepted(context: RunContext, stage: Stage, params: Params) -> Source:
    spec = stage.algorithm.experience
    assert spec.acceptance is not None
    assert spec.sampled_by is not None
    engine = compose.rollout_engine(context, spec.sampled_by)
    keep = partial(accepted.accept, rule=spec.acceptance, on_policy=spec.sampled_by == "policy")
    stream = compose.row_stream(context, stage)
    return source.of_engine(stream, engine, lambda scored, step, state: keep(scored, step))


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
        scorer = compose.scorer(context)

        def label(scored: Scored, step: int, state: TrainState) -> StepExperience:
            examples = step_labels.monte_carlo_labels(
                scored, again, scorer, state.params, step, algorithm
            )
            return from_scored(scored, step, examples)

        return source.of_engine(stream, engine, label)
    to_examples = _encoder(context, data.steps)
    task = task_of(context.config.data)
    if sampled_by is None or task is None or task.label_steps is None:
        return source.of_data(stream, to_examples)
    label_steps = task.label_steps

    def label_by_task(scored: Scored, step: int, state: TrainState) -> StepExperience:
        rows = step_labels.label_steps(scored, label_steps)
        return from_scored(scored, step, to_examples(rows))

    engine = compose.rollout_engine(context, sampled_by)
    return source.of_engine(stream, engine, label_by_task)


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
        engine = compose.rollout_engine(context, spec.sampled_by)

        def score(scored: Scored, step: int, state: TrainState) -> StepExperience:
            return from_scored(scored, step, completions.with_scores(scored))

        return source.of_engine(stream, engine, score)
    return source.of_data(stream, _encoder(context, data.scored_completions, size=size))
