"""From a configuration to the parts of a run. Nothing here loops."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

from tpu_rl import data, models
from tpu_rl.algorithm_spec import ExperienceSpec, Opponent, SourceName
from tpu_rl.algos import ALGORITHMS
from tpu_rl.checkpoint import digests
from tpu_rl.commands import roles
from tpu_rl.commands.config import ExperimentConfig, FileData, MeshConfig, Stage, fixed_settings
from tpu_rl.commands.roles import RunContext
from tpu_rl.data import Row
from tpu_rl.environments import named as named_environments
from tpu_rl.environments import task_of
from tpu_rl.environments.contract import Factory
from tpu_rl.environments.pool import EnvironmentLimits, EnvironmentPool
from tpu_rl.errors import InputError
from tpu_rl.experience import (
    accepted,
    completions,
    dataset_identity,
    hints,
    pairs,
    partial_rollouts,
    q_examples,
    reference_log_probs,
    refinements,
    rollouts,
    stale_rollouts,
    step_labels,
    tasks,
    text_log_probs,
    transforms,
)
from tpu_rl.experience import constraints as constrained
from tpu_rl.experience.config import CurriculumConfig, sampler_config
from tpu_rl.experience.curriculum import Curriculum
from tpu_rl.experience.likelihood import reference_likelihood
from tpu_rl.experience.replay import Replay
from tpu_rl.experience.source import Memory, Source, StepExperience, with_memories
from tpu_rl.experience.text_log_probs import TextLogProbs
from tpu_rl.experience.transforms import Transform
from tpu_rl.losses.entropy import temperature_factor
from tpu_rl.models import Select
from tpu_rl.planner.expert_axis import expert_devices
from tpu_rl.rewards import registry
from tpu_rl.rewards import terms as rewards
from tpu_rl.rollout.engine import Decoding, Engine, Scorer, make_engine
from tpu_rl.rollout.requests import Environment
from tpu_rl.rollout.sampler_thread import SamplerThread
from tpu_rl.rollout.weights import RolloutPolicy, sampling_mesh
from tpu_rl.runtime import host
from tpu_rl.sampler import Speculation
from tpu_rl.serving import agents
from tpu_rl.serving.agents import Agent
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.tokenizers.conversations import Message
from tpu_rl.train import optimizers, sharding, update_step
from tpu_rl.types import Algorithm, Model, Params, Probe, Purpose, Sampling, TrainState


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Return the mesh over `devices`, by default all devices, which are then claimed.

    If `fsdp` is -1, it takes the devices that the other axes leave. On whole cubes of a TPU, it
    leaves half of them to `data` if weights would be sharded over all: a gather over all three
    dimensions of such a slice becomes an all-reduce, which waits for nothing and hides nothing.
    """
    if devices is None:
        host.claim_devices()
        devices = jax.devices()
    data = config.data
    fsdp = config.fsdp
    expert = config.expert if config.expert > 0 else 1
    if fsdp <= 0:
        others = data * config.tensor * expert * config.context
        fsdp = max(len(devices) // max(others, 1), 1)
        if data == config.tensor == 1 and fsdp % 2 == 0 and sharding.fill_torus(devices):
            data = 2
            fsdp //= 2
    return sharding.make_mesh(data, fsdp, config.tensor, expert, config.context, devices)


class Devices(NamedTuple):
    """The devices of a run."""

    mesh: Mesh
    """The devices that learn."""
    sampler: tuple[Any, ...]
    """Devices that only sample. Without any, those of `mesh` sample too."""


def share_devices(
    config: ExperimentConfig,
    devices: Sequence[Any] | None = None,
    split: sharding.SplitDevices = sharding.split_devices,
    *,
    model: Model,
) -> Devices:
    """Return the mesh of a run over `devices`, without those of --sampling.devices.

    By default these are all devices, which are then claimed. `model` is that of the run.
    """
    if devices is None:
        host.claim_devices()
        devices = jax.devices()
    sampler: tuple[Any, ...] = ()
    if config.sampling.devices:
        devices, sampler = split(devices, config.sampling.devices)
    mesh = config.mesh
    if devices[0].platform == "tpu" and mesh == MeshConfig():
        rows = math.ceil(config.batch.rows_at_once / len(devices))
        tokens = rows * config.batch.row_length
        mesh = replace(mesh, expert=expert_devices(model.config, len(devices), tokens))
    return Devices(make_mesh(mesh, devices), sampler)


def make_context(
    config: ExperimentConfig, run_dir: Path, mesh: Mesh, sampler_devices: tuple[Any, ...] = ()
) -> tuple[RunContext, Params]:
    """Return the context that all stages of a run share, and the whole params tree before the first
    step."""
    # Its errors come before reading weights.
    sampling_mesh(config.sampling.tensor_parallel, mesh, sampler_devices)
    language, loaded = roles.language(config, mesh)
    role_models = roles.fast_models(config, language.model, mesh)
    context = RunContext(config, language, role_models, mesh, run_dir, sampler_devices)
    params = roles.first_params(config, language, loaded, mesh, roles.specs(config))
    return context, params


def reset_roles(context: RunContext, stage: Stage, params: Params) -> Params:
    """Return the params that a stage begins with: the roles that it forgets are as at first."""
    if not stage.reset_roles:
        return params
    language, loaded = roles.language(context.config, context.mesh)
    first = roles.first_params(context.config, language, loaded, context.mesh, stage.reset_roles)
    return params | {name: first[name] for name in stage.reset_roles}


def build_algorithm(context: RunContext, stage: Stage) -> Algorithm:
    """Return the stage's algorithm over the roles that it names."""
    bound = roles.bind(context.config, stage.algorithm, context.models)
    sampling = context.config.sampling
    factory = ALGORITHMS[type(stage.algorithm)]
    return factory(stage.algorithm, bound, Sampling(sampling.temperature, sampling.max_new_tokens))


# --- rollouts ---


def scorer(context: RunContext) -> Scorer:
    """Return the scorer of completions by the rewards of the run."""
    config = context.config
    total = registry.displayed(config.reward_terms)
    functions = registry.reward_functions(
        config.reward_names, config.reward_limits, config.allow_unsandboxed_code
    )
    fault_share = config.reward_limits.fault_share
    return Scorer(context.language.tokenizer, functions, fault_share, total)


def decoding(
    context: RunContext,
    role: str = "policy",
    group_size: int | None = None,
    temperature: float | None = None,
    purpose: Purpose = Purpose.ROLLOUT,
    seed: int | None = None,
    record_routing: bool = False,
) -> Decoding:
    """Return the decoding with which a role completes prompts: by the settings of the run, unless
    given here."""
    config = context.config
    settings = sampler_config(
        config.sampling, context.language.tokenizer, group_size or config.batch.group_size
    )
    settings = replace(
        settings, speculation=config.sampling.speculation, record_routing=record_routing
    )
    if temperature is not None:
        settings = replace(settings, temperature=temperature)
    return Decoding(
        context.rollout_policy(role),
        settings,
        config.sampling.max_prompt_tokens,
        config.seed if seed is None else seed,
        purpose,
        config.sampling.stop_strings,
        environment(config),
        config.sampling.thinking,
    )


def environment(config: ExperimentConfig) -> Environment | None:
    """Return the environment that answers the policy; None if completions are single turns.

    All engines of a process share its worker processes.
    """
    if not config.environment:
        return None
    given = named_environments.passed_class(config.environment)
    # A cache has no dicts as keys.
    given = tuple(given.items()) if isinstance(given, Mapping) else given
    pool = _environment_pool(given, config.environment_limits)
    sampling = config.sampling
    return Environment(
        pool,
        sampling.max_turns,
        sampling.max_observation_tokens,
        refuses_long=sampling.long_observations == "refuse",
    )


def is_judged(config: ExperimentConfig) -> bool:
    """Return True if an environment or an agent gives rewards."""
    answering = environment(config)
    return bool(config.agent) or (answering is not None and answering.is_scored)


def agent(config: ExperimentConfig) -> Agent | None:
    """Return the agent that talks to the policy, or None. All engines of a process share it.

    Raises:
        InputError: if its file does not load.
    """
    if not config.agent:
        return None
    max_calls = config.sampling.max_turns
    return _agent(config.agent, config.environment_limits, config.agent_seconds, max_calls)


@lru_cache(maxsize=1)
def _agent(path: str, limits: EnvironmentLimits, seconds: float, max_calls: int) -> Agent:
    return agents.make_agent(path, limits, seconds, max_calls)


def engine(config: ExperimentConfig, decoding: Decoding, scorer: Scorer) -> Engine:
    """Return the engine of a run: single turns, conversations or agents."""
    run_agent = agent(config)
    if run_agent is not None:
        return agents.make_agent_engine(run_agent, decoding, scorer)
    return make_engine(decoding, scorer)


@lru_cache(maxsize=1)
def _environment_pool(
    given: str | Factory | tuple[tuple[str, Factory], ...], limits: EnvironmentLimits
) -> EnvironmentPool:
    return EnvironmentPool(dict(given) if isinstance(given, tuple) else given, limits)


def rollout_engine(context: RunContext, role: str = "policy", **settings: Any) -> Engine:
    """Return the engine by which a role completes prompts; see `decoding` for the settings."""
    return engine(context.config, decoding(context, role, **settings), scorer(context))


def learned_decoding(context: RunContext, spec: ExperienceSpec, role: str = "policy") -> Decoding:
    """Return the decoding with which a role samples what the algorithm learns from."""
    plain = decoding(context, role, record_routing=context.config.rollout.replay_routing)
    if spec.adapts_temperature:
        return replace(plain, policy=context.tempered_policy())
    if spec.nucleus is not None:
        return replace(plain, policy=context.restricted_policy(spec.nucleus.top_p))
    return plain


def opponent_engine(context: RunContext, opponent: Opponent, group_size: int) -> Engine:
    """Return the engine by which the policy's opponent completes prompts."""
    of_policy = decoding(context, group_size=group_size, purpose=Purpose.BASELINE)
    plain = replace(of_policy.config, speculation=Speculation())
    policy = context.opponent_policy(opponent)
    of_opponent = replace(of_policy, policy=policy, config=plain)
    return engine(context.config, of_opponent, scorer(context))


# --- where experience comes from ---


def make_source(context: RunContext, stage: Stage, params: Params) -> Source:
    """Return the source of the experience that the stage's algorithm learns from.

    `params` is the whole tree when the stage begins. A run that is resumed inside the stage has
    other params, so whatever a source derives from them, it keeps in the run folder.
    """
    return SOURCES[stage.algorithm.experience.source](context, stage, params)


def prompt_room(config: ExperimentConfig, tokenizer: Tokenizer) -> int:
    """Return the number of tokens that a row's prompt may have, beside the tools of an
    environment."""
    room = config.sampling.max_prompt_tokens
    answering = environment(config)
    if answering is None or not tokenizer.has_chat_template:
        return room
    return room - tool_tokens(answering, tokenizer)


def tool_tokens(answering: Environment, tokenizer: Tokenizer) -> int:
    """Count the tokens that the chat template adds to a prompt to show the environment's tools."""
    message: list[Message] = [{"role": "user", "content": "a"}]
    alone = len(tokenizer.render(message))
    tools_of = [known.tools for known in answering.pool.descriptions.values() if known.tools]
    return max(
        (len(tokenizer.render(message, tools=tools)) - alone for tools in tools_of), default=0
    )


def rows_in_checkpoints(config: ExperimentConfig) -> bool:
    """Return True if checkpoints of the run contain rows."""
    rollout = config.rollout
    return bool(rollout.partial or config.batch.staleness or rollout.curriculum.hints)


def row_stream(context: RunContext, stage: Stage, batch: int | None = None) -> data.RowStream:
    """Return the stage's training rows; `batch` of them at a time, by default `batch.prompts`."""
    config = context.config
    return tasks.make_stream(
        config.data,
        stage.algorithm.experience,
        context.language.tokenizer,
        batch_size=batch or config.batch.prompts,
        seed=config.seed,
        num_held_out=config.evaluation.rows,
        max_prompt_tokens=prompt_room(config, context.language.tokenizer),
        run_dir=context.run_dir,
        accept_dataset_change=config.accept_dataset_change,
        rows_in_checkpoints=rows_in_checkpoints(config),
    )


def rows_at_once(config: ExperimentConfig) -> int:
    """Return the rows that a stream of prompts yields at once."""
    return 1 if config.rollout.dynamic_sampling_size == "needed" else config.batch.prompts


def _rollouts(context: RunContext, stage: Stage, params: Params) -> Source:
    del params
    settings = context.config.rollout
    spec = stage.algorithm.experience
    adapts = spec.adapts_temperature
    own = learned_decoding(context, spec)
    answering = engine(context.config, own, scorer(context))
    memories = _memories(context, stage)
    chain = batch_transforms(context, stage, tuple(memories.values()))
    if settings.curriculum == CurriculumConfig():
        stream = row_stream(context, stage, rows_at_once(context.config))
        source = _source_of(context, answering, stream, chain, adapts)
        return with_memories(source, memories)
    tokenizer = context.language.tokenizer
    room = prompt_room(context.config, tokenizer)
    stream = Curriculum(
        row_stream(context, stage, 1),
        context.config.batch.prompts,
        settings.curriculum,
        lambda row: tokenizer.row_length(row) <= room,
    )
    source = _source_of(context, answering, stream, [stream.observe, *chain], adapts)

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
        memories["multipliers"] = constrained.Multipliers(
            limits, rollout.constraint_rate, rollout.constraint_max
        )
    replay = stage.algorithm.experience.replay
    if replay is not None:
        memories["replay"] = Replay(context.language.tokenizer, replay.size, replay.min_reward)
    return memories


def _source_of(
    context: RunContext,
    engine: Engine,
    stream: data.RowStream,
    chain: Sequence[Transform],
    adapts_temperature: bool,
) -> Source:
    batch = context.config.batch
    settings = context.config.rollout
    if settings.partial:
        return partial_rollouts.partial_source(engine, stream, batch, settings.partial, chain)
    if batch.staleness:
        thread = _sampler_thread(context, engine)
        return stale_rollouts.stale_source(engine, stream, batch, chain, thread)
    rounds = settings.dynamic_sampling_rounds
    only_needed = settings.dynamic_sampling_size == "needed"
    source = rollouts.rollout_source(engine, stream, batch, rounds, chain, only_needed)
    if not adapts_temperature:
        return source
    return rollouts.at_temperature(source, temperature_factor)


def _sampler_thread(context: RunContext, engine: Engine) -> SamplerThread | None:
    """Return the thread that samples during updates, if it has devices for that."""
    if not context.sampler_devices:
        return None
    return SamplerThread(engine, context.rollout_policy("policy").params)


def batch_transforms(
    context: RunContext, stage: Stage, memories: Sequence[Transform] = ()
) -> list[Transform]:
    """Return the transforms of each batch: baseline, filter, scales, those with a memory, then the
    algorithm's own."""
    chain: list[Transform] = []
    spec = stage.algorithm.experience
    value = spec.prompt_value
    if value is not None:
        engine = rollout_engine(
            context,
            value.role,
            group_size=value.samples,
            temperature=0.0 if value.greedy else None,
            purpose=Purpose.BASELINE,
        )
        chain.append(transforms.prompt_baseline(engine, value))
    likelihood = context.config.rollout.likelihood
    if likelihood.coef:
        model = log_probs_of(context, likelihood.by)
        tokenizer = context.language.tokenizer
        chain.append(reference_likelihood(likelihood, model, tokenizer, context.max_length))
    if spec.hint is not None:
        temperature = context.config.sampling.temperature
        teacher = log_probs_of(context, spec.hint.role, temperature)
        tokenizer = context.language.tokenizer
        row_length = context.config.batch.row_length
        chain.append(hints.log_ratios(spec.hint, teacher, tokenizer, row_length))
    share = context.config.rollout.keep_variance_share
    if share < 1:
        chain.append(transforms.most_varied(share))
    if spec.opponent is not None:
        size = context.config.batch.group_size
        chain.append(transforms.chance_to_win(opponent_engine(context, spec.opponent, size)))
    if context.config.rollout.normalize_rewards:
        terms = registry.displayed(context.config.reward_terms)
        chain.append(transforms.normalized_rewards(terms))
    tokenizer = context.language.tokenizer
    first = list(memories)
    if spec.refinement is not None:
        engine = rollout_engine(
            context, group_size=spec.refinement.samples, purpose=Purpose.BASELINE
        )
        room = context.config.sampling.max_prompt_tokens
        first.append(refinements.best_refinement(engine, spec.refinement, tokenizer, room))
    return [*chain, *transforms.of_algorithm(spec, tokenizer, first)]


def _demonstrations(context: RunContext, stage: Stage, params: Params) -> Source:
    del params
    return completions.demonstration_source(row_stream(context, stage), _demonstrate(context))


def _demonstrate(context: RunContext) -> completions.Demonstrate:
    return partial(
        data.demonstrations, tokenizer=context.language.tokenizer, max_length=context.max_length
    )


def _completions(context: RunContext, stage: Stage, params: Params) -> Source:
    del params
    batch = context.config.batch
    spec = stage.algorithm.experience
    return completions.completion_source(
        rollout_engine(context),
        rollout_engine(context, spec.sampled_by) if spec.sampled_by else None,
        row_stream(context, stage),
        batch,
        spec.shares(batch.prompts).get("policy", 0),
        _demonstrate(context),
        spec.sampled_by,
        spec.teachers,
    )


def _accepted(context: RunContext, stage: Stage, params: Params) -> Source:
    del params
    spec = stage.algorithm.experience
    assert spec.acceptance is not None
    assert spec.sampled_by is not None
    engine = rollout_engine(context, spec.sampled_by)
    stream = row_stream(context, stage)
    return accepted.accepted_source(engine, stream, spec.acceptance, spec.sampled_by)


def _step_labels(context: RunContext, stage: Stage, params: Params) -> Source:
    del params
    algorithm: Any = stage.algorithm
    sampled_by = algorithm.experience.sampled_by
    is_judged = bool(context.config.reward_names)
    step_labels.require_steps(context.config.data, sampled_by, algorithm.steps, is_judged)
    stream = row_stream(context, stage)
    if algorithm.steps == "monte_carlo":
        engine = rollout_engine(context, "reference")
        again = _plain_decoding(
            context, context.rollout_policy("reference"), algorithm.continuations
        )
        again = replace(again, config=replace(again.config, prompt_length=context.max_length))
        return step_labels.monte_carlo_step_source(
            engine, stream, again, scorer(context), algorithm
        )
    to_examples = partial(
        data.steps, tokenizer=context.language.tokenizer, max_length=context.max_length
    )
    task = task_of(context.config.data)
    if sampled_by is None or task is None or task.label_steps is None:
        return step_labels.given_step_source(stream, to_examples)
    engine = rollout_engine(context, sampled_by)
    return step_labels.sampled_step_source(engine, stream, task.label_steps, to_examples)


def _pairs(context: RunContext, stage: Stage, params: Params) -> Source:
    config = context.config
    spec = stage.algorithm.experience
    if spec.opponent is not None:
        half = config.batch.group_size // 2
        return pairs.opposed_pair_source(
            rollout_engine(context, group_size=half),
            opponent_engine(context, spec.opponent, half),
            row_stream(context, stage),
        )
    if spec.sampled_by is not None:
        return pairs.sampled_pair_source(
            rollout_engine(context, spec.sampled_by),
            row_stream(context, stage, rows_at_once(config)),
            config.batch,
            spec.graded,
            config.rollout.dynamic_sampling_rounds,
            config.rollout.dynamic_sampling_size == "needed",
        )
    given = require_pairs(config, context.language.tokenizer)
    stream = dataset_identity.make_stream(
        given.train,
        spec,
        batch_size=config.batch.prompts,
        seed=config.seed,
        run_dir=context.run_dir,
        data_path=config.data.path,
        accept_change=config.accept_dataset_change,
        weights=config.data.weights,
    )
    return pairs.given_pair_source(stream, to_pairs(context, stage, params, given.usable))


def _scored_completions(context: RunContext, stage: Stage, params: Params) -> Source:
    del params
    algorithm: Any = stage.algorithm
    size = context.config.batch.group_size
    if size > algorithm.max_completions:
        raise InputError(
            f"a prompt has {size} completions",
            where="--batch.group-size, --algorithm.max-completions",
            why=f"at most {algorithm.max_completions} are compared",
            fix="make them equal",
        )
    sampled_by = algorithm.experience.sampled_by
    stream = row_stream(context, stage)
    if sampled_by is not None:
        return completions.sampled_scores_source(rollout_engine(context, sampled_by), stream)
    to_scored = partial(
        data.scored_completions,
        tokenizer=context.language.tokenizer,
        max_length=context.max_length,
        size=size,
    )
    return completions.given_scores_source(stream, to_scored)


def learns_from_given_pairs(stage: Stage) -> bool:
    """Return True if the stage learns from pairs that the data bring."""
    spec = stage.algorithm.experience
    return spec.source == "pairs" and spec.sampled_by is None


def given_pairs(config: ExperimentConfig, tokenizer: Tokenizer) -> pairs.GivenPairs:
    """Return the pairs of the data that can be trained on, and those that cannot.

    Raises:
        InputError: if the data hold no pairs.
    """
    if not isinstance(config.data, FileData):
        raise InputError(
            "these data hold no pairs",
            where="--algorithm.pairs",
            fix="give --data.path with columns prompt, chosen, rejected, "
            "or sample them: --algorithm.pairs reference",
        )
    train, held_out = tasks.file_rows(
        config.data, config.algorithm.experience, config.evaluation.rows
    )
    return pairs.usable_pairs(train, held_out, tokenizer, config.sampling, config.batch)


def require_pairs(config: ExperimentConfig, tokenizer: Tokenizer) -> pairs.GivenPairs:
    """Return `given_pairs`, and print how many were dropped.

    Raises:
        InputError: if no training pair is left.
    """
    given = given_pairs(config, tokenizer)
    for reason in given.reasons:
        count = sum(other == reason for _, other in given.dropped)
        print(f"warning: {count} of {given.num_given} pairs dropped: {reason}", file=sys.stderr)
    if not given.train:
        raise InputError(
            "no pair is left",
            where="--data.path, --sampling.max-new-tokens, --batch.row-length",
            why="; ".join(given.reasons),
            fix="raise these, or give other pairs",
        )
    return given


def plain_pairs(context: RunContext) -> pairs.ToPairs:
    """Return a function that makes pairs of token ids of rows, without log-probs."""
    return partial(data.pairs, tokenizer=context.language.tokenizer, max_length=context.max_length)


def to_pairs(
    context: RunContext, stage: Stage, params: Params, rows: Sequence[Row]
) -> pairs.ToPairs:
    """Return a function that makes pairs of `rows`, with the reference's log-probs if they are
    wanted.

    The reference is the role of that name, or else the policy at the beginning of the stage.
    """
    plain = plain_pairs(context)
    if not stage.algorithm.experience.reference_log_probs:
        return plain
    role = "reference" if "reference" in stage.algorithm.roles else "policy"
    reference = reference_log_probs.Reference(
        log_probs_of(context, role), params, digests.of_tree(context.params_of(role)(params))
    )
    metrics_file = context.run_dir / "metrics.jsonl"
    cache = reference_log_probs.Cache(
        reference_log_probs.path_of(context.run_dir, stage.index),
        trusts_model=stage.first > 1,
        has_begun=metrics_file.exists() and metrics_file.stat().st_size > 0,
        accept_dataset_change=context.config.accept_dataset_change,
    )
    log_probs = reference_log_probs.read_or_compute(cache, reference, rows, plain)
    return reference_log_probs.with_log_probs(plain, rows, log_probs)


def log_probs_of(context: RunContext, role: str, temperature: float = 1.0) -> TextLogProbs:
    """Return a function that computes log-probs of given completions under a role."""
    return text_log_probs.text_log_probs(
        context.role(role),
        context.config.batch,
        context.mesh,
        context.attention_index,
        context.language.tokenizer.images,
        temperature,
    )


def trained_pairs(context: RunContext, stage: Stage, rows: Sequence[Row]) -> pairs.ToPairs:
    """Return `to_pairs` of a stage that has ended, from what it kept in the run folder."""
    plain = plain_pairs(context)
    if not stage.algorithm.experience.reference_log_probs:
        return plain
    path = reference_log_probs.path_of(context.run_dir, stage.index)
    return reference_log_probs.with_log_probs(plain, rows, reference_log_probs.read(path)[1])


def _q_examples(context: RunContext, stage: Stage, params: Params) -> Source:
    config = context.config
    algorithm: Any = stage.algorithm
    number = q_round(config, stage)
    stream = row_stream(context, stage, algorithm.prompts)
    for _ in range(number - 1):
        next(stream)  # Each round has the next rows of the stream.
    rows = next(stream)[1]
    spec = q_examples.RoundSpec(
        number,
        stage.first,
        config.seed,
        config.batch.prompts * config.batch.group_size,
        algorithm.return_range,
        q_round_identity(config, rows),
        algorithm.drop_equal_returns,
        config.batch.group_size if algorithm.roll_in == "none" else 1,
    )
    continues = roll_out(context, stage)
    engine = q_examples.q_engine(roll_in(context, stage), continues, scorer(context))
    decode = context.language.tokenizer.decode
    return q_examples.q_example_source(engine, rows, params, spec, context.run_dir, decode)


def q_round_identity(config: ExperimentConfig, rows: list[Row]) -> str:
    """Return `q_examples.round_identity` of the rows and of the settings that examples depend on.

    The size of a micro-batch is not among them, because it depends on the devices.
    """
    settings = {k: v for k, v in fixed_settings(config).items() if k != "batch.micro_batch_rows"}
    return q_examples.round_identity(rows, settings, registry.files(config.reward_names))


def q_round(config: ExperimentConfig, stage: Stage) -> int:
    """Return the number of the stage's round of Q# examples, from 1."""
    earlier = config.stages[: stage.index]
    return 1 + sum(other.algorithm.experience.source == "q_examples" for other in earlier)


def roll_in(context: RunContext, stage: Stage) -> Decoding:
    """Return the decoding that samples the prefixes of Q# examples.

    They come from the guided policy; in the first round from the reference, because nothing has
    learned to guide it. With `roll_in="none"` the reference writes whole answers.
    """
    algorithm: Any = stage.algorithm
    policy = context.rollout_policy("policy")
    if algorithm.roll_in == "guided" and q_round(context.config, stage) > 1:
        policy = context.guided_policy(stage.algorithm)
    return _plain_decoding(context, policy, context.config.batch.group_size)


def roll_out(context: RunContext, stage: Stage) -> Decoding | None:
    """Return the decoding with which the reference continues prefixes of Q# examples, once each.

    None with `roll_in="none"`: nothing is continued.
    """
    algorithm: Any = stage.algorithm
    if algorithm.roll_in == "none":
        return None
    plain = _plain_decoding(context, context.rollout_policy("policy"), 1)
    return replace(plain, config=replace(plain.config, prompt_length=context.max_length))


def evaluation_decoding(context: RunContext, stage: Stage) -> Decoding:
    """Return the decoding of a stage's answers to held-out problems, once each, as shapes of
    programs see it."""
    exact = context.unrounded()
    if stage.algorithm.experience.policy == "guided":
        return _plain_decoding(exact, exact.guided_policy(stage.algorithm), 1)
    return _plain_decoding(exact, exact.rollout_policy("policy"), 1)


def _plain_decoding(context: RunContext, policy: RolloutPolicy, group_size: int) -> Decoding:
    """Return decoding without speculation and stop strings."""
    config = context.config
    return Decoding(
        policy._replace(drafter=None),
        sampler_config(config.sampling, context.language.tokenizer, group_size),
        config.sampling.max_prompt_tokens,
        config.seed,
    )


SOURCES: dict[SourceName, Callable[[RunContext, Stage, Params], Source]] = {
    "rollouts": _rollouts,
    "accepted": _accepted,
    "demonstrations": _demonstrations,
    "completions": _completions,
    "pairs": _pairs,
    "q_examples": _q_examples,
    "step_labels": _step_labels,
    "scored_completions": _scored_completions,
}


# --- training ---


class Learning(NamedTuple):
    """The optimizer of a stage, and the params that it trains."""

    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    trainable: update_step.Trainable


def optimizer_steps(config: ExperimentConfig, stage: Stage) -> int:
    """Return the number of updates of a stage."""
    steps = stage.last - stage.first + 1
    return steps * config.batch.num_minibatches * config.batch.ppo_epochs


def learning(config: ExperimentConfig, stage: Stage) -> Learning:
    """Return the optimizer of a stage and the params that it trains."""
    trained = {name: spec for name, spec in stage.algorithm.roles.items() if spec.trainable}

    frozen = tuple(f"{part}_" for part in config.model.freeze)

    def trainable(path: str) -> bool:
        name = path.rpartition("/")[2]
        is_frozen = name.startswith(frozen) or name.endswith(models.UNTRAINED)
        return path.partition("/")[0] in trained and not is_frozen

    schedule = optimizers.learning_rate(config.optimizer, optimizer_steps(config, stage))
    scales = {name: spec.learning_rate_scale for name, spec in trained.items()}
    optimizer = optimizers.by_role(config.optimizer, schedule, scales, models.matrix_axes)
    return Learning(optimizer, schedule, trainable)


def learner(
    context: RunContext, stage: Stage, algorithm: Algorithm, params: Params
) -> tuple[TrainState, update_step.UpdateStep]:
    """Return the state before the stage's first step, and the jitted step.

    The state consumes the params.
    """
    parts = learning(context.config, stage)
    state = update_step.init_train_state(params, algorithm, parts.optimizer, parts.trainable)
    state = with_moments_placed(context.config, state)
    return state, make_update_step(context, stage, algorithm, parts, state)


def with_moments_placed(config: ExperimentConfig, state: TrainState) -> TrainState:
    """Return the state, or its shapes, with the optimizer's state in host memory if configured."""
    if not config.optimizer.offload:
        return state
    return replace(state, opt_state=sharding.in_memory(state.opt_state, sharding.HOST))


def make_update_step(
    context: RunContext, stage: Stage, algorithm: Algorithm, parts: Learning, state: TrainState
) -> update_step.UpdateStep:
    """Return the jitted step for states with the shardings of this one, of arrays or of shapes."""
    return update_step.make_update_step(
        algorithm,
        parts.optimizer,
        parts.schedule,
        parts.trainable,
        jax.tree.map(lambda leaf: leaf.sharding, state),
        partial(models.cast_to_compute_dtype, dtype=context.config.model.dtype),
        router_probe(context.config, context.models, stage),
        training_options(context.config, context.mesh),
    )


def training_options(config: ExperimentConfig, mesh: Mesh) -> dict[str, Any] | None:
    """Return the compiler options of a run's training programs."""
    return update_step.compiler_options(mesh, config.batch.has_whole_products)


def router_probe(
    config: ExperimentConfig, role_models: Mapping[str, Model], stage: Stage
) -> Probe | None:
    """Return a probe that measures the routers of the models that the stage trains.

    None if none of them is a mixture of experts.
    """
    return models.probe(trained_models(role_models, stage), config.model.router_balance)


def trained_models(role_models: Mapping[str, Model], stage: Stage) -> dict[str, Model]:
    """Return the whole models that the stage trains, by role."""
    return {
        name: role_models[name]
        for name, spec in stage.algorithm.roles.items()
        if spec.trainable and spec.trunk_of is None
    }


# --- the roles that the sampler reads ---


def read_for_rollouts(context: RunContext, stage: Stage) -> list[Select]:
    """Return the roles whose weights each step's rollouts read."""
    spec = stage.algorithm.experience
    # Q# samples before the first step of its stage.
    if spec.source in ("demonstrations", "q_examples"):
        return []
    names = list(spec.shares(context.config.batch.prompts))
    if spec.prompt_value is not None:
        names.append(spec.prompt_value.role)
    if spec.opponent is not None:
        names.extend(spec.opponent.roles)
    if spec.nucleus is not None:
        names.append("mask")
    return context.selects(names)


def read_for_evaluation(context: RunContext, stage: Stage) -> list[Select]:
    """Return the roles whose weights are read when the stage is evaluated by answers."""
    config = context.config
    if roles.reading(stage.algorithm) is not None or learns_from_given_pairs(stage):
        return []
    if not config.evaluation.rows or config.evaluation_reward is None:
        return []
    guided = stage.algorithm.experience.policy == "guided"
    return context.selects(["policy", "q"] if guided else ["policy"])
