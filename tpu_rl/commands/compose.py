"""From a configuration to the parts of a run. Nothing here loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

from tpu_rl import data, lazy, models, wings
from tpu_rl.algorithm_spec import ExperienceSpec, Opponent
from tpu_rl.algos import factory_of
from tpu_rl.commands import roles
from tpu_rl.commands.config import ExperimentConfig, MeshConfig, Stage
from tpu_rl.commands.expert_axis import expert_devices
from tpu_rl.commands.roles import RunContext
from tpu_rl.data import Rows
from tpu_rl.environments import named as named_environments
from tpu_rl.environments import task_of
from tpu_rl.environments.contract import Factory
from tpu_rl.environments.pool import EnvironmentLimits, EnvironmentPool
from tpu_rl.errors import InputError
from tpu_rl.experience.config import sampler_config
from tpu_rl.experience.rows import dataset_identity, tasks
from tpu_rl.experience.source import Source
from tpu_rl.models import Select
from tpu_rl.rewards import registry
from tpu_rl.rollout.engine import Decoding, Engine, Scorer, make_engine
from tpu_rl.rollout.requests import Agent, Environment
from tpu_rl.rollout.weights import RolloutPolicy, sampling_mesh
from tpu_rl.runtime import host
from tpu_rl.sampler import Speculation
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.tokenizers.conversations import Message
from tpu_rl.train import optimizers, sharding, update_step
from tpu_rl.types import Algorithm, Model, Params, Probe, Purpose, Sampling, TrainState

if TYPE_CHECKING:
    from tpu_rl.experience.text_log_probs import TextLogProbs


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
    """Devices that sample during updates. Without any, those of `mesh` sample before them."""


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
    elif config.sampling.during_updates:
        sampler = sharding.only_device(devices)
    mesh = config.mesh
    if devices[0].platform == "tpu" and mesh == MeshConfig():
        rows = math.ceil(config.batch.rows_at_once / len(devices))
        tokens = rows * config.batch.row_length
        expert = expert_devices(model.config, len(devices), tokens)
        if expert > 1 and wings.MODULES["meshes"].gathers_experts(config, model, devices):
            expert = 1
        mesh = replace(mesh, expert=expert)
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
    factory = factory_of(type(stage.algorithm))
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


def without_judgment(where: str = "--reward") -> InputError:
    """Return the error of answers that nothing judges."""
    fix = "name a --reward or FILE.py:function"
    return InputError("no reward says what is correct", where=where, fix=fix)


def agent(config: ExperimentConfig) -> Agent | None:
    """Return the agent that talks to the policy, or None. All engines of a process share it.

    Raises InputError if its file does not load.
    """
    if not config.agent:
        return None
    max_calls = config.sampling.max_turns
    return _agent(config.agent, config.environment_limits, config.agent_seconds, max_calls)


@lru_cache(maxsize=1)
def _agent(path: str, limits: EnvironmentLimits, seconds: float, max_calls: int) -> Agent:
    return wings.MODULES["agents"].make_agent(path, limits, seconds, max_calls)


def engine(config: ExperimentConfig, decoding: Decoding, scorer: Scorer) -> Engine:
    """Return the engine of a run: single turns, conversations or agents."""
    run_agent = agent(config)
    if run_agent is not None:
        return wings.MODULES["agents"].make_agent_engine(run_agent, decoding, scorer)
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


def _make_source(module: ModuleType, name: str) -> Callable[[RunContext, Stage, Params], Source]:
    return vars(module)[f"make_{name}"]


SOURCES = lazy.LazyTable(
    _make_source,
    {
        "rollouts": "tpu_rl.commands.sources.of_rollouts",
        "accepted": "tpu_rl.commands.sources.of_texts",
        "demonstrations": "tpu_rl.commands.sources.of_texts",
        "completions": "tpu_rl.commands.sources.of_texts",
        "pairs": "tpu_rl.commands.sources.of_pairs",
        "q_examples": "tpu_rl.commands.sources.of_q_examples",
        "step_labels": "tpu_rl.commands.sources.of_texts",
        "scored_completions": "tpu_rl.commands.sources.of_texts",
    },
)
"""Source that an algorithm asks for -> the module with the function make_NAME of it."""


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


def usable_rows(config: ExperimentConfig, stage: Stage, tokenizer: Tokenizer) -> Rows:
    """Return the training rows of a stage, which are no pairs. Raises InputError as
    `tasks.usable_rows`."""
    return tasks.usable_rows(
        config.data,
        stage.algorithm.experience,
        tokenizer,
        seed=config.seed,
        num_held_out=config.evaluation.rows,
        max_prompt_tokens=prompt_room(config, tokenizer),
        rows_in_checkpoints=rows_in_checkpoints(config),
    )


def row_stream(
    context: RunContext, stage: Stage, batch: int | None = None, rows: Rows | None = None
) -> data.RowStream:
    """Return the stage's training rows, endlessly; `batch` of them at a time, by default
    `batch.prompts`.

    `rows` are other rows of the data than `usable_rows`. Raises InputError if the data cannot be
    used, or changed since the run began.
    """
    config = context.config
    size = batch or config.batch.prompts
    streamed: Any = usable_rows(config, stage, context.language.tokenizer) if rows is None else rows
    if task_of(config.data) is not None:
        return data.stream(streamed, config.seed, size)
    return dataset_identity.make_stream(
        streamed,
        stage.algorithm.experience,
        batch_size=size,
        seed=config.seed,
        run_dir=context.run_dir,
        data_path=config.data.path,
        accept_change=config.accept_dataset_change,
        weights=config.data.weights,
    )


def rows_at_once(config: ExperimentConfig) -> int:
    """Return the rows that a stream of prompts yields at once."""
    return 1 if config.rollout.dynamic_sampling_size == "needed" else config.batch.prompts


def log_probs_of(context: RunContext, role: str, temperature: float = 1.0) -> TextLogProbs:
    """Return a function that computes log-probs of given completions under a role."""
    from tpu_rl.experience import text_log_probs

    return text_log_probs.text_log_probs(
        context.role(role),
        context.config.batch,
        context.mesh,
        context.attention_index,
        context.language.tokenizer.images,
        temperature,
    )


def evaluation_shapes(context: RunContext, stage: Stage, problems: int) -> tuple[int, int] | None:
    """Return `SamplerConfig.shapes_of` for answers to a number of held-out problems.

    As many as one or two batches have completions run the programs of the rollouts, one batch after
    the other. More have programs of their own, which decode more at once.
    """
    shapes = context.config.batch.prompts, context.config.batch.group_size
    samples = stage.algorithm.experience.source == "rollouts"
    return shapes if samples and problems <= 2 * math.prod(shapes) else None


def evaluation_decoding(context: RunContext, stage: Stage) -> Decoding:
    """Return the decoding of a stage's answers to held-out problems, once each, as shapes of
    programs see it."""
    exact = context.unrounded()
    if stage.algorithm.experience.policy == "guided":
        return plain_decoding(exact, exact.guided_policy(stage.algorithm), 1)
    return plain_decoding(exact, exact.rollout_policy("policy"), 1)


def plain_decoding(context: RunContext, policy: RolloutPolicy, group_size: int) -> Decoding:
    """Return decoding without speculation and stop strings."""
    config = context.config
    return Decoding(
        policy._replace(drafter=None),
        sampler_config(config.sampling, context.language.tokenizer, group_size),
        config.sampling.max_prompt_tokens,
        config.seed,
    )


def learns_from_given_pairs(stage: Stage) -> bool:
    """Return True if the stage learns from pairs that the data bring."""
    spec = stage.algorithm.experience
    return spec.source == "pairs" and spec.sampled_by is None


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
