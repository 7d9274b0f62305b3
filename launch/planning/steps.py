"""The jitted steps of a run, built as the run builds them and compiled for shapes instead of arrays."""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from launch import build, model_shapes, roles, sources
from launch.config import ExperimentConfig, Stage
from launch.roles import Language
from launch.sources import Setup
from tpu_rl import models, sharding, tokenizers, training
from tpu_rl.models.decoder import axes
from tpu_rl.needs import Needs
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
    TrainState,
)


class Compiled(NamedTuple):
    program: jax.stages.Compiled | None
    refused: str
    """The compiler's message where the program does not fit the chip."""
    seconds: float
    """That compiling took."""

    @property
    def text(self) -> str:
        """XLA's, after all its passes."""
        return (self.program.as_text() or "") if self.program else ""


class Step(NamedTuple):
    """A jitted step of the run."""

    name: str
    compiled: Compiled
    own: dict[str, int]
    """Bytes a chip of what it needs beside the train state, by what they are for."""
    times: float
    """How often a step of the run does it; 0: it is planned to compare with."""
    tokens: int
    """That it computes each time, over all chips, padding included."""
    loops: int = 1
    """How often its outermost loop may run, where each is worth a line: the steps of a segment of decoding."""
    mesh: Mesh | None = None
    """Where it runs, if not on the run's."""


class Planned(NamedTuple):
    """What the steps of a stage share."""

    setup: Setup
    stage: Stage
    state: TrainState
    """Of shapes with their places."""


@contextmanager
def known_by_name(config: ExperimentConfig) -> Iterator[ExperimentConfig]:
    """The same, for the while, with a directory in place of each model that is the name of a well-known one, be it
    --model.path or a role's (a teacher, a critic, a drafter): a config.json is all that a plan reads of a model."""
    paths = [config.model.path, *(spec.path for spec in roles.specs(config).values())]
    names = [path for path in dict.fromkeys(paths) if path is not None and not Path(path).expanduser().is_dir()]
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, str] = {}
        for number, name in enumerate(names):
            if (shape := model_shapes.find(name)) is not None:
                directory = Path(folder) / str(number) / name.rpartition("/")[2]
                directory.mkdir(parents=True)
                (directory / "config.json").write_text(json.dumps(shape), encoding="utf-8")
                found[name] = str(directory)
        yield _renamed(config, found)


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """A configuration with other strings in place of those in `names`, wherever they stand."""
    if isinstance(value, tuple):
        return tuple(_renamed(one, names) for one in value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return names.get(value, value) if isinstance(value, str) else value
    old = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    new = {name: _renamed(one, names) for name, one in old.items()}
    return value if new == old else dataclasses.replace(value, **new)


def read_model(config: ExperimentConfig) -> Model:
    """The architecture of --model.path: a directory, hub id or builtin:NAME."""
    directory = models.find_directory(roles.model_path(config.model.path))
    return models.from_config(directory, dtype=config.model.dtype, param_dtype=config.model.param_dtype)


def plan_stage(config: ExperimentConfig, stage: Stage, mesh: Mesh, model: Model) -> Planned:
    """What a stage's steps share. No weight and no tokenizer is read: which tokens are drawn does not change costs."""
    language = Language(model, tokenizers.characters("0"))
    setup = Setup(config, language, roles.fast_models(config, model, mesh), mesh, Path(config.run_dir))
    how = build.learning(config, stage)
    algorithm = build.build_algorithm(setup, stage)
    params = first_params(config, model, mesh)
    state = training.abstract_train_state(params, algorithm, how.optimizer, how.trainable)
    state = build.with_moments_placed(config, state)
    return Planned(setup, stage, state)


def first_params(config: ExperimentConfig, model: Model, mesh: Mesh) -> Params:
    """Shapes, dtypes and places of `roles.first_params`'s result."""
    shapes = roles.param_shapes(config, model)
    return placed(shapes, sharding.shardings(axes(shapes), mesh, shapes))


def placed(shapes: Any, places: Any) -> Any:
    """A tree of shapes with a like tree of shardings, or one for all."""
    each = jax.tree.map(lambda _: places, shapes) if isinstance(places, NamedSharding) else places

    def one(leaf: Any, place: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    return jax.tree.map(one, shapes, each)


def chip_bytes(tree: Any, *, on_host: bool = False) -> int:
    """Of a tree of shapes with places, in one chip's memory, without the padding of tiled layouts; or of those that lie
    in its host's memory."""

    def one(leaf: Any) -> int:
        if (leaf.sharding is not None and sharding.is_on_host(leaf.sharding)) != on_host:
            return 0
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return math.prod(shape) * (8 if is_key else jnp.dtype(leaf.dtype).itemsize)

    return sum(map(one, jax.tree.leaves(tree)))


def compile_step(mesh: Mesh, function: Any, *arguments: Any) -> Compiled:
    """A jitted function compiled for arguments of shapes; without a program where it exceeds the chip's memory."""
    return compile_lowered(lower(mesh, function, *arguments))


def lower(mesh: Mesh, function: Any, *arguments: Any) -> jax.stages.Lowered:
    with jax.set_mesh(mesh):
        return function.lower(*arguments)


def compile_lowered(lowered: jax.stages.Lowered) -> Compiled:
    began = time.perf_counter()
    try:
        return Compiled(lowered.compile(), "", time.perf_counter() - began)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Compiled(None, str(error), time.perf_counter() - began)


def results(mesh: Mesh, function: Any, arguments: tuple, made: Compiled) -> Any:
    """Shapes and places of what a compiled step returns."""
    assert made.program is not None
    with jax.set_mesh(mesh):
        shapes = function.eval_shape(*arguments)
    return placed(shapes, made.program.output_shardings)


Compile = Callable[..., Compiled]
"""`compile_step`, or what stands in for it."""


# --- learning ----------------------------------------------------------------------------------------------------


def learning_steps(planned: Planned, compile_with: Compile = compile_step) -> Iterator[Step]:
    """make_batch (advantages, the reference's log-probs) and the update."""
    setup, stage, state = planned.setup, planned.stage, planned.state
    config, mesh = setup.config, setup.mesh
    algorithm, how = build.build_algorithm(setup, stage), build.learning(config, stage)
    experience = full_experience(planned)
    arguments = (experience, state.params, state.algorithm_state)
    make_batch = training.make_batch_step(algorithm, training.compiler_options(mesh))
    made = compile_with(mesh, make_batch, *arguments)
    slots = math.prod(experience.layout.source.shape)
    own = {"batch": chip_bytes(experience)}
    if made.program is None:
        yield Step("make_batch", made, own, 1, slots)
        return
    batch = results(mesh, make_batch, arguments, made)[0]
    own = {"batch": own["batch"] + chip_bytes(batch)}
    yield Step("make_batch", made, own, 1, slots)

    part = jax.tree.map(_first_of, batch)
    made = compile_with(mesh, build.update_step(setup, stage, algorithm, how, state), state, part)
    updates = config.batch.minibatches * config.batch.epochs
    own = {"batch": own["batch"] + chip_bytes(part)}
    yield Step("update", made, own, updates, slots // config.batch.minibatches)


def _first_of(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """What `training.minibatch` makes of an array [M, K, R, S]: rows keep their places."""
    place = leaf.sharding
    if isinstance(place, NamedSharding):
        place = NamedSharding(place.mesh, PartitionSpec(*place.spec[1:]))
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=place)


def full_layout(planned: Planned) -> tuple[Any, Layout]:
    """(experience on the host in which all texts are as long as they may be, where it stands in packed rows)."""
    config = planned.setup.config
    data = longest_texts(config, planned.stage.algorithm.needs)
    return data, sources.layout_of(config, data)


def full_experience(planned: Planned) -> Experience:
    """Shapes and places of `full_layout`'s arrays."""
    mesh = planned.setup.mesh

    def shape_of(array: np.ndarray) -> jax.ShapeDtypeStruct:
        place = sources.experience_sharding(mesh, array.shape)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place)

    return jax.tree.map(shape_of, Experience(*full_layout(planned)))


def longest_texts(config: ExperimentConfig, needs: Needs) -> Any:
    """What an algorithm learns from, on the host, every text of full length; pairs are cut to what a row holds."""
    kind = needs.experience
    prompt, new = config.sampling.max_prompt_tokens, config.sampling.max_new_tokens
    members = {Demonstrations: 1, Pairs: 2}.get(kind, config.batch.completions)
    if kind is Pairs:
        new = min(new, (config.batch.row_length - prompt) // 2)
    shape = (config.batch.prompts * members, prompt + config.sampling.max_new_tokens)
    tokens, floats, mask = (np.zeros(shape, dtype) for dtype in (np.int32, np.float32, bool))
    mask[:, prompt : prompt + new] = True
    group = np.repeat(np.arange(config.batch.prompts, dtype=np.int32), members)
    flags, numbers, keys = np.zeros(len(group), bool), np.zeros_like(group), np.zeros((len(group), 2), np.uint32)
    value = None if needs.prompt_value is None else floats[:, 0]
    fields: dict[type, tuple[Any, ...]] = {
        Rollout: (tokens, mask, floats, floats, floats, group, numbers, keys, flags, flags, value),
        Demonstrations: (tokens, mask, group),
        Completions: (tokens, mask, group, flags),
        Pairs: (tokens, mask, group, flags, floats[:, 0], floats),
        QExamples: (tokens, mask, group, floats),
    }
    return kind(*fields[kind])
