"""Sampled and scored completions as experience, with the transforms of each batch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from tpu_rl import data
from tpu_rl.commands import compose
from tpu_rl.commands.config import Stage
from tpu_rl.commands.roles import RunContext
from tpu_rl.experience import constraints as constrained
from tpu_rl.experience import transforms
from tpu_rl.experience.config import CurriculumConfig
from tpu_rl.experience.likelihood import reference_likelihood
from tpu_rl.experience.replay import Replay
from tpu_rl.experience.rows import hints
from tpu_rl.experience.rows.curriculum import Curriculum
from tpu_rl.experience.source import Memory, Source, StepExperience, with_memories
from tpu_rl.experience.sources import partial_rollouts, refinements, rollouts, stale_rollouts
from tpu_rl.experience.transforms import Transform
from tpu_rl.losses.entropy import temperature_factor
from tpu_rl.rewards import registry
from tpu_rl.rewards import terms as rewards
from tpu_rl.rollout import dynamic_sampling
from tpu_rl.rollout.engine import Decoding, Engine
from tpu_rl.rollout.sampler_thread import SamplerThreads
from tpu_rl.types import Params, Purpose, TrainState


def make_rollouts(context: RunContext, stage: Stage, params: Params) -> Source:
    config = context.config
    memories = _memories(context, stage)
    chain = batch_transforms(context, stage, tuple(memories.values()))
    if config.rollout.curriculum == CurriculumConfig():
        stream = compose.row_stream(context, stage, compose.rows_at_once(config))
        return with_memories(_source_of(context, stage, stream, chain), memories)
    tokenizer = context.language.tokenizer
    room = compose.prompt_room(config, tokenizer)
    stream = Curriculum(
        compose.row_stream(context, stage, 1),
        config.batch.prompts,
        config.rollout.curriculum,
        lambda row: tokenizer.row_length(row) <= room,
    )
    source = _source_of(context, stage, stream, [stream.observe, *chain])

    def draw(step: int, state: TrainState) -> StepExperience:
        experience = source.draw(step, state)
        experience.metrics.update(stream.metrics())
        return experience

    return with_memories(source._replace(draw=draw), memories)


def _memories(context: RunContext, stage: Stage) -> dict[str, Memory]:
    """Return the transforms of rollouts that remember something, by their names in checkpoints."""
    config = context.config
    rollout = config.rollout
    memories: dict[str, Memory] = {}
    names = rewards.names_of(registry.displayed(config.reward_terms))
    limits = constrained.parse_all(rollout.constraints, names)
    if limits:
        memories["multipliers"] = constrained.Multipliers(limits, rollout.constraint_rate)
    replay = stage.algorithm.experience.replay
    if replay is not None:
        memories["replay"] = Replay(context.language.tokenizer, replay.size, replay.min_reward)
    return memories


def _source_of(
    context: RunContext, stage: Stage, stream: data.RowStream, chain: Sequence[Transform]
) -> Source:
    spec = stage.algorithm.experience
    batch = context.config.batch
    settings = context.config.rollout
    engine, threads = _engine(context, compose.learned_decoding(context, spec))
    if settings.partial:
        return partial_rollouts.partial_source(engine, stream, batch, settings.partial, chain)
    if batch.staleness:
        return stale_rollouts.stale_source(engine, stream, batch, chain, threads)
    rounds = settings.dynamic_sampling_rounds
    only_needed = settings.dynamic_sampling_size == "needed"
    source = rollouts.rollout_source(engine, stream, batch, rounds, chain, only_needed)
    adapts = spec.adapts_temperature
    return rollouts.at_temperature(source, temperature_factor) if adapts else source


def _engine(context: RunContext, decoding: Decoding) -> tuple[Engine, SamplerThreads | None]:
    """Return the engine, and the threads that sample with it during updates, if any do."""
    make = functools.partial(compose.engine, context.config, scorer=compose.scorer(context))
    if not context.sampler_devices:
        return make(decoding), None
    policy = decoding.policy
    # Threads get copies that are in their places.
    engine = make(replace(decoding, policy=policy._replace(params=lambda copies: copies)))
    return engine, SamplerThreads(engine, policy.params, context.config.batches_at_once)


def batch_transforms(
    context: RunContext, stage: Stage, memories: Sequence[Transform] = ()
) -> list[Transform]:
    """Return the transforms of each batch: baseline, filter, scales, those with a memory, then the
    algorithm's own."""
    chain: list[Transform] = []
    spec = stage.algorithm.experience
    value = spec.prompt_value
    if value is not None:
        engine = compose.rollout_engine(
            context,
            value.role,
            group_size=value.samples,
            temperature=0.0 if value.greedy else None,
            purpose=Purpose.BASELINE,
        )
        chain.append(transforms.prompt_baseline(engine, value))
    likelihood = context.config.rollout.likelihood
    if likelihood.coef:
        model = compose.log_probs_of(context, likelihood.by)
        tokenizer = context.language.tokenizer
        chain.append(reference_likelihood(likelihood, model, tokenizer, context.max_length))
    if spec.hint is not None:
        temperature = context.config.sampling.temperature
        teacher = compose.log_probs_of(context, spec.hint.role, temperature)
        tokenizer = context.language.tokenizer
        row_length = context.config.batch.row_length
        chain.append(hints.log_ratios(spec.hint, teacher, tokenizer, row_length))
    share = context.config.rollout.keep_variance_share
    if share < 1:
        chain.append(lambda scored, step, state: dynamic_sampling.keep_most_varied(scored, share))
    if spec.opponent is not None:
        size = context.config.batch.group_size
        chain.append(
            transforms.chance_to_win(compose.opponent_engine(context, spec.opponent, size))
        )
    if context.config.rollout.normalize_rewards:
        terms = registry.displayed(context.config.reward_terms)
        chain.append(transforms.normalized_rewards(terms))
    tokenizer = context.language.tokenizer
    first = list(memories)
    if spec.refinement is not None:
        engine = compose.rollout_engine(context, group_size=1, purpose=Purpose.BASELINE)
        room = context.config.sampling.max_prompt_tokens
        first.append(refinements.refinement(engine, spec.refinement, tokenizer, room))
    return [*chain, *transforms.of_algorithm(spec, tokenizer, first)]
