"""The models of a run: which there are, what each begins as, and their one tree of params."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import tpu_rl
from launch.config import AlgorithmConfig, ExperimentConfig
from tpu_rl import models, sampler, sharding
from tpu_rl.errors import InputError
from tpu_rl.needs import RoleSpec
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.tokenizers import load as load_tokenizer
from tpu_rl.types import Array, Model, Params, Purpose, Roles

BUILTIN = "builtin:"


class Language(NamedTuple):
    """The model of --model.path and its tokenizer."""

    model: Model
    tokenizer: Tokenizer


def language(config: ExperimentConfig, mesh: Mesh) -> tuple[Language, Params]:
    """The model of --model.path, and its weights on the mesh."""
    path = model_path(config.model.path)
    tokenizer = load_tokenizer(path)
    if not config.model.random_init:
        model, params = load(config, path, mesh)
        return Language(model, tokenizer), params
    model = models.from_config(path, dtype=config.model.dtype, param_dtype=config.model.param_dtype)
    return Language(model, tokenizer), random_params(model, sampler.run_key(config.seed, Purpose.INIT, 0), mesh)


def load(config: ExperimentConfig, path: str, mesh: Mesh) -> tuple[Model, Params]:
    return models.load(path, dtype=config.model.dtype, param_dtype=config.model.param_dtype, mesh=mesh)


def random_params(model: Model, key: Array, mesh: Mesh) -> Params:
    places = sharding.shardings(model.axes, mesh, jax.eval_shape(model.init, key))
    return jax.jit(model.init, out_shardings=places)(key)


def model_path(path: str | None) -> str:
    """Where a model is: a directory or hub id; builtin:NAME is one that ships with the package."""
    if path is None:
        raise InputError("no model given", where="--model.path", fix="give a Hugging Face directory or hub id")
    if not path.startswith(BUILTIN):
        return path
    name, shipped = path.removeprefix(BUILTIN), Path(tpu_rl.__file__).parent / "pretrained"
    if not (shipped / name / "config.json").is_file():
        names = ", ".join(f"{BUILTIN}{child.name}" for child in sorted(shipped.iterdir()))
        raise InputError(f"no shipped model {path}", where="--model.path", fix=f"there is {names}")
    return str(shipped / name)


# --- the cast ----------------------------------------------------------------------------------------------------


def specs(config: ExperimentConfig) -> dict[str, RoleSpec]:
    """Every role of every stage: the params tree is the same in all of them, only what trains differs."""
    found: dict[str, RoleSpec] = {}
    for stage in config.stages:
        for name, spec in stage.algorithm.roles.items():
            one = spec._replace(trainable=False, learning_rate_scale=1.0)
            if found.setdefault(name, one) != one:
                raise InputError(f"the run's phases want the role {name!r} to begin differently", where="--phases")
    return found


def product(algorithm: AlgorithmConfig) -> str:
    """The role that a run is for: the first that trains."""
    return next(name for name, spec in algorithm.roles.items() if spec.trainable)


def role_model(config: ExperimentConfig, base: Model, spec: RoleSpec) -> Model:
    """The architecture of a role, without touching weights."""
    model = base
    if spec.path is not None:
        path = models.find_directory(model_path(spec.path))
        model = models.from_config(path, dtype=config.model.dtype, param_dtype=config.model.param_dtype)
    if spec.layers is not None:
        model = models.first_layers(model, spec.layers)
    outputs = head_outputs(model, spec)
    return model if outputs is None else models.with_head(model, outputs)


def head_outputs(model: Model, spec: RoleSpec) -> int | None:
    """How many numbers the role's head gives in place of the model's vocabulary; None where that stays."""
    if spec.outputs_per_token is not None:
        return spec.outputs_per_token * model.config.vocab.size
    return spec.outputs


def role_models(config: ExperimentConfig, base: Model) -> dict[str, Model]:
    return {name: role_model(config, base, spec) for name, spec in specs(config).items()}


def first_params(
    config: ExperimentConfig, lang: Language, loaded: Params, mesh: Mesh, names: Mapping[str, RoleSpec]
) -> Params:
    """The params of the roles in `names` before the first step, each in buffers of its own.

    The first role that begins as the loaded model takes its buffers over.
    """
    taken: set[int] = set()

    def own(leaf: Array) -> Array:
        if id(leaf) in taken:
            return jnp.copy(leaf)
        taken.add(id(leaf))
        return leaf

    return {name: jax.tree.map(own, _begin(config, lang, loaded, mesh, name, spec)) for name, spec in names.items()}


def _begin(config: ExperimentConfig, lang: Language, loaded: Params, mesh: Mesh, name: str, spec: RoleSpec) -> Params:
    # A role's key depends on its name alone, not on which other roles there are.
    key = sampler.run_key(config.seed, Purpose.INIT, 1 + zlib.crc32(name.encode()) % 2**31)
    model, params = lang.model, loaded
    if spec.path is not None:
        require_same_tokens(lang.tokenizer, name, model_path(spec.path))
        model, params = load(config, model_path(spec.path), mesh)
    if spec.trunk_of is not None:
        return models.random_head(model, spec.outputs or 1, key)
    if spec.random:
        return random_params(role_model(config, lang.model, spec), key, mesh)
    if spec.layers is not None:
        params, model = models.first_layers_params(model, params, spec.layers), models.first_layers(model, spec.layers)
    outputs = head_outputs(model, spec)
    if outputs is not None and model.config.outputs != outputs:
        params = models.head_params(model, params, outputs, key)
    return params


def require_same_tokens(ours: Tokenizer, role: str, path: str) -> None:
    """Raises InputError where a role's model came with a tokenizer that is not the run's: it would read other texts."""
    if not any((models.find_directory(path) / file).exists() for file in ("tokenizer.json", "tokenizer.model")):
        return
    theirs = load_tokenizer(path)
    probe = "".join(map(chr, range(32, 127)))
    same = theirs.control == ours.control and theirs.vocab_size == ours.vocab_size
    if not same or theirs.encode(probe) != ours.encode(probe):
        raise InputError(
            f"the model of role {role!r} has another tokenizer than the run's",
            where=path,
            why=f"{theirs.vocab_size} tokens against {ours.vocab_size}: all models of a run read the same token ids",
            fix="use a model of the same tokenizer",
        )


def bind(algorithm: AlgorithmConfig, role_models: Mapping[str, Model]) -> Roles:
    """The roles that an algorithm asks for, each reading its subtree of the params tree."""

    def role(name: str):
        spec, select = algorithm.roles[name], operator.itemgetter(name)
        if spec.trunk_of is not None:
            return models.head_role(role(spec.trunk_of), select)
        return models.role(role_models[name], select)

    return {name: role(name) for name in algorithm.roles}
