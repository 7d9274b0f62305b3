"""From a configuration to the parts of a run. Nothing here loops."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

from launch import ahead, carry_over, dataset, machine, pairs, q_examples, reward_runs, roles, sources, watchdog
from launch.acting import Acting, sampling_mesh
from launch.config import ExperimentConfig, FileData, MeshConfig, Stage
from launch.roles import Select
from launch.sources import Setup, Source
from tpu_rl import evaluation, models, optimizers, sampler, sharding, training
from tpu_rl.algos import ALGORITHMS, AlgorithmConfig, ProcessRewardConfig, QSharpConfig
from tpu_rl.types import (
    Algorithm,
    Demonstrations,
    Model,
    Pairs,
    Params,
    Probe,
    Purpose,
    QExamples,
    Sampling,
    TrainState,
)

Evaluate = Callable[[Params, bool], dict[str, float]]
"""(the whole params tree, also greedily?) -> metrics of the held-out problems."""


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh over `devices` (default: all there are, which are claimed); fsdp -1 is what the others leave."""
    if devices is None:
        machine.claim_devices()
    count = jax.device_count() if devices is None else len(devices)
    others = config.data * config.tensor * config.expert * config.context
    fsdp = config.fsdp if config.fsdp > 0 else max(count // max(others, 1), 1)
    return sharding.make_mesh(config.data, fsdp, config.tensor, config.expert, config.context, devices)


def make_setup(config: ExperimentConfig, run_dir: Path, mesh: Mesh) -> tuple[Setup, Params]:
    """What all stages of a run share, and the whole params tree before the first step."""
    sampling_mesh(config, mesh)  # what is wrong with it is said before weights are read
    language, loaded = roles.language(config, mesh)
    setup = Setup(config, language, roles.fast_models(config, language.model, mesh), mesh, run_dir)
    return setup, roles.first_params(config, language, loaded, mesh, roles.specs(config))


def forget(setup: Setup, stage: Stage, params: Params) -> Params:
    """The params that a stage begins with: roles that the one before it let go have their first params again."""
    if not stage.forget:
        return params
    language, loaded = roles.language(setup.config, setup.mesh)
    first = roles.first_params(setup.config, language, loaded, setup.mesh, stage.forget)
    return params | {name: first[name] for name in stage.forget}


def build_algorithm(setup: Setup, stage: Stage) -> Algorithm:
    """The stage's algorithm over the roles that it names, each a subtree of the params tree."""
    bound = roles.bind(setup.config, stage.algorithm, setup.models)
    sampling = Sampling(setup.config.sampling.temperature, setup.config.sampling.max_new_tokens)
    return ALGORITHMS[type(stage.algorithm)](stage.algorithm, bound, sampling)


def make_source(setup: Setup, stage: Stage, params: Params) -> Source:
    """Where the kind of experience comes from that the stage's algorithm learns from.

    `params` is the whole tree when the stage begins. A run that is resumed inside the stage has others by then, so
    whoever derives anything from them keeps it in the run folder.
    """
    if isinstance(stage.algorithm, ProcessRewardConfig):
        return reward_runs.step_source(setup, stage, params)
    if setup.config.batch.carry_over:
        return carry_over.partial_source(setup, stage, params)
    if setup.config.batch.ahead:
        return ahead.source_ahead(setup, stage, params)
    kinds = sources.SOURCES | {Pairs: pairs.pair_source, QExamples: q_examples.q_example_source}
    return kinds[stage.algorithm.needs.experience](setup, stage, params)


class Learning(NamedTuple):
    """How a stage's params are changed."""

    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    trainable: training.Trainable


def learning(config: ExperimentConfig, stage: Stage) -> Learning:
    trained = {name: spec for name, spec in stage.algorithm.roles.items() if spec.trainable}

    def trainable(path: str) -> bool:
        return path.partition("/")[0] in trained

    optimizer_steps = (stage.last - stage.first + 1) * config.batch.minibatches * config.batch.epochs
    schedule = optimizers.learning_rate(config.optimizer, optimizer_steps)
    scales = {name: spec.learning_rate_scale for name, spec in trained.items()}
    return Learning(optimizers.by_role(config.optimizer, schedule, scales), schedule, trainable)


def learner(setup: Setup, stage: Stage, algorithm: Algorithm, params: Params) -> tuple[TrainState, training.UpdateStep]:
    """The state before the stage's first step, which takes over the params, and the jitted step."""
    how = learning(setup.config, stage)
    state = training.init_train_state(params, algorithm, how.optimizer, how.trainable)
    state = with_moments_placed(setup.config, state)
    return state, update_step(setup, stage, algorithm, how, state)


def with_moments_placed(config: ExperimentConfig, state: TrainState) -> TrainState:
    """The state, or its shapes and places, with the optimizer's state in the memory that the configuration wants."""
    if not config.optimizer.offload:
        return state
    return replace(state, opt_state=sharding.in_memory(state.opt_state, sharding.HOST))


def update_step(
    setup: Setup, stage: Stage, algorithm: Algorithm, how: Learning, state: TrainState
) -> training.UpdateStep:
    """The jitted step for states that lie as this one, of arrays or of their shapes."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    narrow = partial(models.narrow, dtype=setup.config.model.dtype)
    probe = router_probe(setup.config, setup.models, stage)
    return training.make_update_step(
        algorithm, how.optimizer, how.schedule, how.trainable, shardings, narrow, probe,
        training.compiler_options(setup.mesh),
    )  # fmt: skip


def router_probe(config: ExperimentConfig, cast: Mapping[str, Model], stage: Stage) -> Probe | None:
    """What measures the routers of the models that the stage trains, of the roles' models `cast`; None where none of
    them is a mixture of experts."""
    return models.probe(trained(cast, stage), config.model.router_balance)


def trained(cast: Mapping[str, Model], stage: Stage) -> dict[str, Model]:
    """The whole models that the stage trains, of the roles' models `cast`."""
    roles_of = stage.algorithm.roles.items()
    return {name: cast[name] for name, spec in roles_of if spec.trainable and spec.trunk_of is None}


def acting_policy(setup: Setup, algorithm: AlgorithmConfig | None = None) -> Acting:
    """The role "policy", guided by the role "q" where the algorithm is Q#; without an algorithm, as it is alone."""
    return q_examples.guided_acting(setup, algorithm) if isinstance(algorithm, QSharpConfig) else setup.acting("policy")


def drawn_from(setup: Setup, stage: Stage) -> list[Select]:
    """Whose weights are read at each step for the stage's experience; Q#'s is drawn before its first."""
    needs = stage.algorithm.needs
    if needs.experience is Demonstrations or isinstance(stage.algorithm, QSharpConfig):
        return []
    by = [*needs.shares(setup.config.batch.prompts), needs.prompt_value and needs.prompt_value.role]
    return _read(setup, by)


def answered_from(setup: Setup, stage: Stage) -> list[Select]:
    """Whose weights are read where the stage is evaluated by answers."""
    config = setup.config
    if reward_runs.reading(stage.algorithm) is not None or pairs.are_given(stage):
        return []
    if not config.evaluation.rows or sources.judge(config) is None:
        return []
    return _read(setup, ["policy", "q" if isinstance(stage.algorithm, QSharpConfig) else None])


def _read(setup: Setup, roles_of: Sequence[str | None]) -> list[Select]:
    """What takes the params of such roles, and of what drafts for them."""
    names = dict.fromkeys(filter(None, roles_of))
    return [setup.params_of(name) for name in dict.fromkeys([*names, *filter(None, [setup.drafter])])] if names else []


# --- evaluation --------------------------------------------------------------------------------------------------


def exactly(setup: Setup) -> Setup:
    """As the run, with caches that round nothing: accuracy is the model's own."""
    sampling = replace(setup.config.sampling, cache="computed")
    return setup._replace(config=replace(setup.config, sampling=sampling))


def evaluator(setup: Setup, stage: Stage, algorithm: Algorithm, params: Params) -> Evaluate:
    """Ranks the held-out pairs where the stage learns from given ones or trains a reward model, and else answers the
    held-out problems."""
    if reward_runs.reading(stage.algorithm) is not None:
        return reward_runs.evaluator(setup, stage, params)
    if pairs.are_given(stage):
        rank = pairs.evaluator(setup, stage, algorithm, params)
        return lambda params, greedy: rank(params)
    return answering(setup, acting_policy(exactly(setup), stage.algorithm))


def before(setup: Setup, stage: Stage, evaluate: Evaluate) -> Evaluate:
    """What evaluates the run before its first step: of Q# the reference alone, which nothing has learned to guide."""
    return answering(setup, acting_policy(exactly(setup))) if isinstance(stage.algorithm, QSharpConfig) else evaluate


def answering(setup: Setup, acting: Acting) -> Evaluate:
    """Answers the held-out problems at temperature 1 and, where wanted, greedily -> metrics named eval/..."""
    config, lang = setup.config, setup.language
    rows = dataset.evaluation_rows(config) if config.evaluation.rows else []
    judge = sources.judge(config)
    if not rows or judge is None:
        print("note: nothing is evaluated: there are no held-out rows, or no reward that judges them", file=sys.stderr)
        return lambda params, greedy: {}
    if isinstance(config.data, FileData):
        rows = dataset.that_fit(config, lang, rows)
    reward = sources.resolve_reward(judge, config.reward_limits, config.allow_unsandboxed_code)
    # Accuracy is the model's own: nothing of its distribution is cut off.
    plain = replace(
        sources.sampler_config(config, lang.tokenizer, 1),
        top_k=None,
        top_p=None,
        min_p=None,
        repetition_penalty=1.0,
        logit_bias=(),
    )
    more: dict[str, Any] = {"stop_at": sources.stop_at(config, lang.tokenizer), "at_border": watchdog.beat}
    more |= {"reward_name": sources.shown(judge), "max_fault_share": config.reward_limits.fault_share}

    def evaluate(params: Params, greedy: bool) -> dict[str, float]:
        found: dict[str, float] = {}
        params = acting.params(params)
        for prefix, temperature in (("eval/", 1.0), ("eval/greedy_", 0.0))[: 1 + (greedy and config.evaluation.greedy)]:
            how = replace(plain, temperature=temperature)
            with jax.set_mesh(acting.mesh):
                # The same problems are answered with the same luck, whatever the step or seed: differences are the
                # model's.
                key = sampler.run_key(0, Purpose.EVALUATION, 0)
                result = evaluation.evaluate(
                    acting.policy, params, lang.tokenizer, rows, reward, how, key, mesh=acting.mesh, **more
                )
            if result.errors:
                few = f"{len(result.errors)} completions were not judged; the first: {result.errors[0]}"
                print(f"note: evaluation: {few}", file=sys.stderr)
            found |= {
                f"{prefix}accuracy": result.accuracy,
                f"{prefix}accuracy_low": result.low,
                f"{prefix}accuracy_high": result.high,
                f"{prefix}well_formed": result.well_formed,
                f"{prefix}length_mean": result.mean_length,
                f"{prefix}n": result.n,
            }
        return found

    return evaluate
