"""The jitted steps of a run, built as the run builds them, for `launch/plan.py`.

`plan_stage` composes a stage from its configuration without reading weights. `sampler_calls` and
`learning_steps` then give `tpu_rl.planner` what it compiles: the calls of the sampler, and the
make_batch and update steps.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_rl import models, tokenizers
from tpu_rl.algorithm_spec import ExperienceSpec
from tpu_rl.commands import compose, roles
from tpu_rl.commands.config import ExperimentConfig, Stage
from tpu_rl.commands.plan import known_models
from tpu_rl.commands.roles import Language, RunContext
from tpu_rl.commands.sources import of_q_examples
from tpu_rl.data.encoding import bucket
from tpu_rl.errors import InputError
from tpu_rl.experience.config import BatchConfig, SamplingConfig
from tpu_rl.experience.layout import experience_sharding, layout_of
from tpu_rl.models.decoder import axes
from tpu_rl.models.policy import Select
from tpu_rl.plain_values import replace_strings
from tpu_rl.planner import memory
from tpu_rl.planner.estimates import Line, Target, estimate_step, model_flops
from tpu_rl.planner.sampling import SamplerCall, sampling_steps
from tpu_rl.planner.steps import (
    Step,
    chip_bytes,
    compile_step,
    output_shapes,
    with_shardings,
)
from tpu_rl.rollout.engine import Decoding
from tpu_rl.rollout.group_selection import num_kept
from tpu_rl.rollout.weights import reshard_for_sampling
from tpu_rl.sampler import Speculation
from tpu_rl.train import sharding, update_step
from tpu_rl.types import (
    Completions,
    Demonstrations,
    Experience,
    Layout,
    Model,
    Pairs,
    Params,
    QExamples,
    Rollout,
    ScoredCompletions,
    TrainState,
)

READS_STATE = frozenset(("jit(init_optimizer)", "jit(all_finite)", "jit(_all_finite)"))
"""Programs of a run that are not planned although they take whole trees: they make a part of the
train state, or return a flag for it. All others that are not planned take single arrays."""


class StagePlan(NamedTuple):
    """The parts that the steps of a stage share."""

    context: RunContext
    stage: Stage
    state: TrainState
    """Shapes with shardings."""


@contextmanager
def known_by_name(config: ExperimentConfig) -> Iterator[ExperimentConfig]:
    """Give the configuration with a directory in place of each well-known model's name.

    The name may be --model.path or the model of a role: a teacher, a critic, a drafter. The
    directories hold a config.json, which is all that a plan reads of a model. They exist inside the
    `with` block only.
    """
    paths = [config.model.path, *(spec.path for spec in roles.specs(config).values())]
    names = [
        path
        for path in dict.fromkeys(paths)
        if path is not None and not Path(path).expanduser().is_dir()
    ]
    with tempfile.TemporaryDirectory() as folder:
        directories: dict[str, str] = {}
        for number, name in enumerate(names):
            if (shape := known_models.find(name)) is not None:
                directory = Path(folder) / str(number) / name.rpartition("/")[2]
                directory.mkdir(parents=True)
                (directory / "config.json").write_text(json.dumps(shape), encoding="utf-8")
                directories[name] = str(directory)
        yield replace_strings(config, directories)


def read_model(config: ExperimentConfig) -> Model:
    """Return the model of --model.path without weights: a directory, hub id or builtin:NAME.

    Raises InputError if there is no such model. It names the well-known models most like it.
    """
    try:
        directory = models.find_directory(roles.model_path(config.model.path))
    except InputError as error:
        names = known_models.nearest(str(config.model.path))
        known = f"known by name: {', '.join(names or known_models.SHAPES)}"
        fix = f"{error.fix}; {known}" if error.fix else known
        raise InputError(error.what, where=error.where, why=error.why, fix=fix) from error
    return roles.from_config(config, directory)


def plan_stage(
    config: ExperimentConfig,
    stage: Stage,
    mesh: Mesh,
    model: Model,
    sampler_devices: tuple[Any, ...] = (),
) -> StagePlan:
    """Compose a stage from shapes.

    Neither weights nor the tokenizer are read: which tokens are sampled does not change the costs.
    """
    context = RunContext(
        config,
        Language(model, tokenizers.characters("0")),
        roles.fast_models(config, model, mesh),
        mesh,
        Path(config.run_dir),
        sampler_devices,
    )
    learning = compose.learning(config, stage)
    algorithm = compose.build_algorithm(context, stage)
    params = first_params(config, model, mesh)
    state = update_step.abstract_train_state(
        params, algorithm, learning.optimizer, learning.trainable
    )
    state = compose.with_moments_placed(config, state)
    return StagePlan(context, stage, state)


def first_params(config: ExperimentConfig, model: Model, mesh: Mesh) -> Params:
    """Return the shapes, dtypes and shardings of the result of `roles.first_params`."""
    shapes = roles.param_shapes(config, model)
    return with_shardings(shapes, sharding.shardings(axes(shapes), mesh, shapes))


def state_bytes(planned: StagePlan) -> dict[str, int]:
    """Return the bytes of the stage's train state on one chip, by purpose."""
    learning = compose.learning(planned.context.config, planned.stage)
    return memory.state_bytes(planned.state, learning.trainable)


# --- sampling ---


def samples(stage: Stage) -> bool:
    """Return True if the stage samples completions to learn from."""
    spec = stage.algorithm.experience
    return (spec.sampled_by is not None or spec.on_policy > 0) and spec.kind is not Demonstrations


def answers(context: RunContext, stage: Stage) -> bool:
    """Return True if the stage is evaluated by its answers to held-out problems."""
    return bool(compose.read_for_evaluation(context, stage))


def sampling_lines(planned: StagePlan, target: Target) -> Iterator[Line]:
    """Compile the stage's sampler calls, with the weights placed as the run places them."""
    context = planned.context
    stage = planned.stage
    for_rollouts = compose.read_for_rollouts(context, stage)
    for_evaluation = compose.read_for_evaluation(context, stage)
    unrounded = context.unrounded()
    if context.sampling_layout == unrounded.sampling_layout:
        moved, sizes = _moved_for(planned, for_rollouts + for_evaluation)
        phases = [(moved, sizes, sampler_calls(moved))]
    else:
        # The weights that rollouts quantize do not move for them, but they do for evaluations.
        moved, sizes = _moved_for(planned, for_rollouts)
        phases = [(moved, sizes, _calls_to_learn_from(moved) if samples(stage) else [])]
        moved, sizes = _moved_for(planned._replace(context=unrounded), for_evaluation)
        phases.append((moved, sizes, _calls_to_evaluate(moved)))
    for moved, sizes, calls in phases:
        for step in sampling_steps(calls, moved.state.params):
            yield estimate_step(step, sizes, target)


def _moved_for(planned: StagePlan, reads: list[Select]) -> tuple[StagePlan, dict[str, int]]:
    """Return the stage while it samples from these roles, and the bytes of its train state."""
    context, state = planned.context, planned.state
    if context.config.sampling.during_updates:
        return planned, state_bytes(planned)
    if context.sampler_devices:  # They hold no train state.
        return planned, {}
    params = reshard_for_sampling(state.params, reads, context.sampling_layout)
    moved = planned._replace(state=dataclasses.replace(state, params=params))
    return moved, state_bytes(moved)


def sampler_calls(planned: StagePlan) -> list[SamplerCall]:
    """Return the stage's calls of the sampler.

    They sample the completions of each step or, for Q#, roll-ins and roll-outs once for all steps
    of the stage, and then answers to held-out problems.
    """
    calls = _calls_to_learn_from(planned) if samples(planned.stage) else []
    return calls + _calls_to_evaluate(planned)


def _calls_to_evaluate(planned: StagePlan) -> list[SamplerCall]:
    """Return the stage's calls that answer held-out problems: one, or none."""
    context = planned.context
    stage = planned.stage
    if not answers(context, stage):
        return []
    decoding = compose.evaluation_decoding(context, stage)
    problems = context.config.evaluation.rows
    shapes = compose.evaluation_shapes(context, stage, problems)
    if shapes is not None:
        problems, group_size = shapes
        sampler_config = replace(decoding.config, samples_per_prompt=group_size)
        decoding = replace(decoding, config=sampler_config)
    return [_call(planned, " of evaluations", decoding, problems, 0)]


def _call(
    planned: StagePlan,
    label: str,
    decoding: Decoding,
    prompts: int,
    times: float,
    partial_prompts: int = 0,
    mean_new_tokens: float | None = None,
) -> SamplerCall:
    config = replace(decoding.config, speculation=Speculation())
    assert config.prompt_length is not None
    params, tower = _with_images(planned, decoding, prompts)
    return SamplerCall(
        label,
        decoding.policy.policy,
        params,
        decoding.policy.mesh,
        config,
        prompts,
        config.prompt_length,
        partial_prompts,
        config.max_new_tokens if mean_new_tokens is None else mean_new_tokens,
        times,
        tower,
    )


def _with_images(planned: StagePlan, decoding: Decoding, prompts: int) -> tuple[Params, Any]:
    """Return the params that a call of the sampler reads, with the features of images that all
    prompts may have, and the tower that computes these (`SamplerCall.tower`)."""
    params = decoding.policy.params(planned.state.params)
    made = decoding.policy.with_images
    vision = planned.context.language.model.config.vision
    if made is None or vision is None:
        return params, None
    whole = NamedSharding(decoding.policy.mesh, PartitionSpec())
    max_prompt_tokens = planned.context.config.sampling.max_prompt_tokens
    count = bucket(prompts * vision.pieces_of_prompt(max_prompt_tokens))
    images = jax.ShapeDtypeStruct((count, *vision.piece_shape), np.float32, sharding=whole)
    features = with_shardings(jax.eval_shape(made.compute, params, images), whole)
    tower = (jax.jit(made.compute), params, images, count * vision.features_per_piece)
    return made.insert(params, features), tower


def _calls_to_learn_from(planned: StagePlan) -> list[SamplerCall]:
    context, stage = planned.context, planned.stage
    algorithm: Any = stage.algorithm
    batch = context.config.batch

    if algorithm.experience.source == "q_examples":
        times = 1 / (stage.last - stage.first + 1)
        roll_ins = _call(
            planned, " of roll-ins", of_q_examples.roll_in(context, stage), algorithm.prompts, times
        )
        continues = of_q_examples.roll_out(context, stage)
        if continues is None:
            return [roll_ins]
        roll_outs = _call(
            planned,
            " of roll-outs",
            continues,
            algorithm.prompts * batch.group_size,
            times,
            # A roll-in is cut at any of its tokens with the same probability.
            mean_new_tokens=context.config.sampling.max_new_tokens / 2,
        )
        return [roll_ins, roll_outs]

    partial_prompts = context.config.rollout.partial
    shares = algorithm.experience.shares(batch.prompts + partial_prompts)
    return [
        _call(
            planned,
            f" by {role}" if len(shares) > 1 else "",
            compose.learned_decoding(context, algorithm.experience, role),
            prompts,
            1,
            partial_prompts,
        )
        for role, prompts in shares.items()
    ]


# --- learning ---


def learning_lines(planned: StagePlan, target: Target) -> Iterator[Line]:
    """Compile the stage's learning steps."""
    sizes = state_bytes(planned)
    for step in learning_steps(planned):
        yield estimate_step(step, sizes, target)


def learning_steps(planned: StagePlan) -> Iterator[Step]:
    """Compile make_batch (advantages, reference log-probs) and the update."""
    context, stage, state = planned.context, planned.stage, planned.state
    config, mesh = context.config, context.mesh
    algorithm = compose.build_algorithm(context, stage)
    learning = compose.learning(config, stage)
    layout, experience = full_experience(planned)
    tokens = math.prod(experience.layout.source.shape)

    make_batch = update_step.make_batch_step(algorithm, compose.training_options(config, mesh))
    arguments = (experience, state.params, state.algorithm_state)
    compiled = compile_step(mesh, make_batch, *arguments)
    batch_bytes = chip_bytes(experience)
    if compiled.program is None:
        yield Step("make_batch", compiled, {"batch": batch_bytes}, 1, tokens, mesh)
        return
    batch = output_shapes(mesh, make_batch, arguments, compiled)[0]
    batch_bytes += chip_bytes(batch)
    yield Step("make_batch", compiled, {"batch": batch_bytes}, 1, tokens, mesh)

    minibatch = jax.tree.map(_first_minibatch, batch)
    update = compose.make_update_step(context, stage, algorithm, learning, state)
    yield Step(
        "update",
        compile_step(mesh, update, state, minibatch),
        {"batch": batch_bytes + chip_bytes(minibatch)},
        config.batch.num_minibatches * config.batch.ppo_epochs,
        tokens // config.batch.num_minibatches,
        mesh,
        offloaded_bytes=chip_bytes(state.opt_state, on_host=True),
        model_flops=update_model_flops(planned, layout),
    )


def _first_minibatch(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the shape of a minibatch of an array [M, K, R, S], with its rows placed as before."""
    placement = leaf.sharding
    if isinstance(placement, NamedSharding):
        placement = NamedSharding(placement.mesh, PartitionSpec(*placement.spec[1:]))
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=placement)


def update_model_flops(planned: StagePlan, layout: Layout) -> float:
    """Return the model FLOPs of one optimizer step, summed over all chips (see `model_flops`)."""
    context, stage = planned.context, planned.stage
    positions = np.asarray(layout.positions)[np.asarray(layout.source) >= 0]
    total = sum(
        model_flops(context.models[name].config, positions)
        for name, spec in stage.algorithm.roles.items()
        if spec.trainable and spec.trunk_of is None
    )
    return total / context.config.batch.num_minibatches


def full_experience(planned: StagePlan) -> tuple[Layout, Experience]:
    """Return the batch in which every text has full length: its layout, and its shapes.

    The layout holds arrays on the host; the experience holds shapes with shardings.
    """
    config, mesh = planned.context.config, planned.context.mesh
    batch = replace(
        config.batch, prompts=num_kept(config.batch.prompts, config.rollout.keep_variance_share)
    )
    data = longest_texts(batch, config.sampling, planned.stage.algorithm.experience)
    layout = layout_of(batch, data, paths=config.model.exact_sampling, with_room=False)
    if config.rollout.replay_routing:
        policy = planned.context.models["policy"].config
        size = policy.mixture_layers * policy.moe.experts_per_token
        routing: Any = np.zeros((*layout.source.shape, size), policy.moe.routing_dtype)
        layout = replace(layout, routing=routing)
    vision = planned.context.language.model.config.vision
    if vision is not None:
        # One image for each prompt, or as many patches as it has room for.
        minibatches, micro_batches = layout.source.shape[:2]
        num_groups = len(np.unique(data.group_id))
        of_prompt = vision.pieces_of_prompt(config.sampling.max_prompt_tokens)
        count = bucket(math.ceil(num_groups / (minibatches * micro_batches)) * of_prompt)
        shape = (minibatches, micro_batches, count, *vision.piece_shape)
        images: Any = np.zeros(shape, np.float32)
        layout = replace(layout, images=images)

    def shape_of(array: np.ndarray) -> jax.ShapeDtypeStruct:
        placement = experience_sharding(mesh, array.shape)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=placement)

    return layout, jax.tree.map(shape_of, Experience(data, layout))


def longest_texts(batch: BatchConfig, sampling: SamplingConfig, spec: ExperienceSpec) -> Any:
    """Return host arrays of a batch in which every text has full length.

    Completions that are compared are cut to what a packed row holds.
    """
    kind = spec.kind
    prompt_tokens = sampling.max_prompt_tokens
    new_tokens = sampling.max_new_tokens
    members = {Demonstrations: 1, Pairs: 2}.get(kind, batch.group_size + spec.rows_added)
    if kind in (Pairs, ScoredCompletions):
        prompts = 1 if batch.share_prefixes else members
        new_tokens = min(new_tokens, (batch.row_length - prompts * prompt_tokens) // members)
    shape = (batch.prompts * members, prompt_tokens + sampling.max_new_tokens)
    tokens = np.zeros(shape, np.int32)
    floats = np.zeros(shape, np.float32)
    mask = np.zeros(shape, bool)
    mask[:, prompt_tokens : prompt_tokens + new_tokens] = True
    group = np.repeat(np.arange(batch.prompts, dtype=np.int32), members)
    flags = np.zeros(len(group), bool)
    steps = np.zeros_like(group)
    keys = np.zeros((len(group), 2), np.uint32)
    value = None if spec.prompt_value is None else floats[:, 0]
    rollout = (tokens, mask, floats, floats, floats, group, steps, keys, flags, flags)
    source = np.zeros(len(group), np.int8) if spec.rows_added else None
    tree = (np.arange(len(group), dtype=np.int32), steps) if spec.texts else (None, None)
    top = (*shape, spec.served[1]) if spec.served else ()
    served = (np.zeros(top, np.int32), np.zeros(top, np.float32)) if top else ()
    fields: dict[type, tuple[Any, ...]] = {
        Rollout: (*rollout, *tree, None, value, source),
        Demonstrations: (tokens, mask, group, floats),
        Completions: (tokens, mask, group, flags, None, *served),
        Pairs: (tokens, mask, group, flags, floats[:, 0], floats),
        ScoredCompletions: (tokens, mask, group, floats[:, 0]),
        QExamples: (tokens, mask, group, floats),
    }
    return kind(*fields[kind])
