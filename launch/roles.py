"""The models of a run: which there are, what each begins as, and their one tree of params."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import tpu_rl
from launch import attention_trial
from launch.config import AlgorithmConfig, ExperimentConfig
from tpu_rl import models, sampler, sharding
from tpu_rl.errors import InputError
from tpu_rl.models.architecture import DecoderConfig
from tpu_rl.models.cudnn_attention import unfit
from tpu_rl.needs import RoleSpec
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.tokenizers import load as load_tokenizer
from tpu_rl.types import Array, Model, Params, Purpose, Role, Roles

BUILTIN = "builtin:"


class Language(NamedTuple):
    """The model of --model.path and its tokenizer."""

    model: Model
    tokenizer: Tokenizer


def language(config: ExperimentConfig, mesh: Mesh) -> tuple[Language, Params]:
    """The model of --model.path, and its weights on the mesh."""
    directory = model_directory(config)
    tokenizer = load_tokenizer(models.tokenizer_directory(directory))
    if not config.model.random_init:
        model, params = load(config, str(directory), mesh)
        return Language(model, tokenizer), params
    model = models.from_config(directory, dtype=config.model.dtype, param_dtype=config.model.param_dtype)
    return Language(model, tokenizer), random_params(model, sampler.run_key(config.seed, Purpose.INIT, 0), mesh)


def model_directory(config: ExperimentConfig) -> Path:
    """Of --model.path; of a hub id without weights where none are read."""
    path = model_path(config.model.path)
    return models.find_configuration(path) if config.model.random_init else models.find_directory(path)


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

DRAFT = "draft"
"""The small model of speculative decoding: no algorithm's, and frozen."""


def specs(config: ExperimentConfig) -> dict[str, RoleSpec]:
    """Every role of every stage: the params tree is the same in all of them, only what trains differs."""
    found: dict[str, RoleSpec] = {}
    for stage in config.stages:
        for name, spec in stage.algorithm.roles.items():
            one = spec._replace(trainable=False, learning_rate_scale=1.0)
            if found.setdefault(name, one) != one:
                raise InputError(f"the run's phases want the role {name!r} to begin differently", where="--phases")
    drafter = config.sampling.speculation.model
    return found if drafter is None else found | {DRAFT: RoleSpec(trainable=False, path=drafter)}


def product(algorithm: AlgorithmConfig) -> str:
    """The role that a run is for: the first that trains."""
    return next(name for name, spec in algorithm.roles.items() if spec.trainable)


def role_model(config: ExperimentConfig, base: Model, spec: RoleSpec) -> Model:
    """The architecture of a role without adapters, and without touching weights."""
    model = base
    if spec.path is not None:
        path = models.find_configuration(model_path(spec.path))
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
    """The model of each role, those with adapters included.

    Raises InputError where LoRA is wanted and no role can have it, or its settings do not fit a model.
    """
    under, found = weights_under(config), {}
    for name, spec in specs(config).items():
        model = role_model(config, base, spec)
        found[name] = models.with_lora(model, config.model.lora) if name in under else model
    return found


def has_attention_kernel(config: ExperimentConfig, mesh: Mesh) -> bool:
    return config.model.attention == "auto" and mesh.devices.flat[0].platform == "tpu"


def fast_models(config: ExperimentConfig, base: Model, mesh: Mesh) -> dict[str, Model]:
    """`role_models`, each as `fast_model`; on GPUs their packed rows go through cuDNN where it can compute them.

    Raises InputError where cuDNN is wanted and cannot. All processes call it together.
    """
    found = {name: fast_model(config, model, mesh) for name, model in role_models(config, base).items()}
    wanted = config.model.attention
    if wanted == "tiles" or (wanted == "auto" and mesh.devices.flat[0].platform != "gpu"):
        return found
    learned = found.keys() - {DRAFT}  # which looks at a cache only
    why = {name: _not_by_cudnn(found[name].config, config.batch.row_length, mesh) for name in sorted(learned)}
    reasons = [reason for reason in dict.fromkeys(why.values()) if reason]
    if reasons and wanted == "cudnn":
        what, fix = "cuDNN cannot compute this run's attention", "--model.attention auto"
        raise InputError(what, where="--model.attention cudnn", why=reasons[0], fix=fix)
    for reason in reasons:
        print(f"note: attention is XLA's and not cuDNN's: {reason}", file=sys.stderr)
    by_cudnn = {name: models.with_attention_kernel(found[name], "cudnn") for name in learned if not why[name]}
    return found | by_cudnn


def _not_by_cudnn(config: DecoderConfig, row_length: int, mesh: Mesh) -> str:
    return unfit(config, row_length, mesh) or attention_trial.fault(config.attention, mesh)


def fast_model(config: ExperimentConfig, model: Model, mesh: Mesh) -> Model:
    """The same model with what is fastest on the mesh's devices, or wanted, whatever it reads."""
    model = models.with_remat(model, config.model.remat)
    if mesh.devices.flat[0].platform == "cpu":
        model = models.with_cache_for_cpus(model)
    return models.with_attention_kernel(model) if has_attention_kernel(config, mesh) else model


# --- where each role is in the params tree -----------------------------------------------------------------------


BASE = "base"
"""The frozen weights of --model.path, once for all roles that are those weights, or adapters over them."""


@dataclass(frozen=True)
class Select:
    """Takes a role's params out of the whole tree. Equal ones are one to those who compile for them."""

    name: str
    under: str | None = None
    """Where the weights under the role's adapters are."""

    def __call__(self, params: Params) -> Params:
        own = params[self.name]
        return own if self.under is None else models.join(params[self.under], own)


def adaptable(config: ExperimentConfig) -> set[str]:
    """The roles that have adapters where a rank is given (see `weights_under`)."""
    cast = specs(config)
    moves = {name for stage in config.stages for name, spec in stage.algorithm.roles.items() if spec.trainable}
    moves |= {name for name, spec in cast.items() if spec.follows == 1}
    return {name for name in moves if not (cast[name].random or cast[name].layers or cast[name].trunk_of)}


def weights_under(config: ExperimentConfig) -> dict[str, str]:
    """Role with adapters -> where in the params tree the frozen weights under them are; empty without LoRA.

    Roles that train have adapters, unless they are random, a part of a model or a head on another role's trunk: these
    train whole. A role that now and then becomes the same as one that trains has adapters of its own, which do not.
    """
    if not config.model.lora.rank:
        return {}
    cast, can = specs(config), adaptable(config)
    found = {name: BASE if cast[name].path is None else f"{name}_{BASE}" for name in cast if name in can}
    between = [name for name, spec in cast.items() if 0 < spec.follows < 1]
    if between:
        raise InputError(
            f"{between[0]} is moved a part of the way to what trains, which adapters cannot do",
            where="--model.lora.rank, --algorithm.reference-mix",
            why="the mean of two products A B is not the product of the means",
            fix="move it all the way (--algorithm.reference-mix 1), or train all weights (--model.lora.rank 0)",
        )
    if not found:
        raise InputError(
            "no model of this run can have adapters", where="--model.lora.rank",
            why="what trains is random, a part of a model or a head alone", fix="use --model.lora.rank 0",
        )  # fmt: skip
    return found


def moves(config: ExperimentConfig, name: str) -> bool:
    """Whether a role's weights change in the run. Those of one that stays are kept as its model computes with them,
    which gives the same bits and takes half the memory of float32 masters that nobody needs."""
    trains = any(name in roles and roles[name].trainable for roles in (s.algorithm.roles for s in config.stages))
    return trains or bool(specs(config)[name].follows)


def place(config: ExperimentConfig, name: str) -> Select:
    """Where a role is in the params tree: by its name, but for what is shared."""
    under, spec = weights_under(config), specs(config)[name]
    if name in under:
        return Select(name, under[name])
    plain = spec == RoleSpec(trainable=False)
    return Select(BASE if plain and BASE in under.values() else name)


def adapter_base(config: ExperimentConfig, name: str) -> str | None:
    """The directory or hub id of the model under a role's adapters; None where it has none, or no directory is that
    model: where its weights were random, or an adapter's merged into another."""
    own = specs(config)[name].path
    if name not in weights_under(config) or (own is None and config.model.random_init):
        return None
    path = model_path(own or config.model.path)
    return None if models.is_adapter(models.find_directory(path)) else path


def param_shapes(config: ExperimentConfig, base: Model) -> dict[str, Params]:
    """The whole params tree, of shapes and dtypes."""
    under, found = weights_under(config), {}
    cast = role_models(config, base)
    for name, spec in specs(config).items():
        whole = init_shapes(cast[name])
        weights, adapters = models.split(whole)
        head = {"score": weights.pop("score")} if cast[name].config.outputs else {}
        if name in under:
            found |= {} if under[name] == BASE else {under[name]: weights}
            found[name] = adapters | head
        elif place(config, name).name == name:
            found[name] = whole if spec.trunk_of is None else head
        if name in found and not moves(config, name):
            found[name] = models.narrow(found[name], config.model.dtype)
    shared = {BASE: init_shapes(base)} if BASE in under.values() else {}
    return shared | found


def init_shapes(model: Model) -> Params:
    """Without a key, which would claim a device."""
    return jax.eval_shape(lambda: model.init(jax.random.key(0)))


# --- how they begin ----------------------------------------------------------------------------------------------


def first_params(config: ExperimentConfig, lang: Language, loaded: Params, mesh: Mesh, names: Iterable[str]) -> Params:
    """The params of the roles in `names` before the first step, each in buffers of its own, and what is under them.

    The first role that begins as the loaded model takes its buffers over.
    """
    taken: set[int] = set()

    def own(leaf: Array) -> Array:
        if id(leaf) in taken:
            return jnp.copy(leaf)
        taken.add(id(leaf))
        return leaf

    cast, under, found = role_models(config, lang.model), weights_under(config), {}
    if BASE in under.values():
        found[BASE] = jax.tree.map(own, loaded)
    for name in names:
        if place(config, name).name != name:
            continue  # it is BASE itself
        begun = _begin(config, lang, loaded, mesh, name, specs(config)[name])
        if name in under:
            key = jax.random.fold_in(_key(config, name), 1)
            weights = dict(begun)
            head = {"score": weights.pop("score")} if cast[name].config.outputs else {}
            found |= {} if under[name] == BASE else {under[name]: jax.tree.map(own, weights)}
            begun = models.random_adapters(cast[name], key, mesh) | head
        if not moves(config, name):
            begun = models.narrow(begun, config.model.dtype)
        found[name] = jax.tree.map(own, begun)
    return found


def _key(config: ExperimentConfig, name: str) -> Array:
    """A role's, which depends on its name alone, not on which other roles there are."""
    return sampler.run_key(config.seed, Purpose.INIT, 1 + zlib.crc32(name.encode()) % 2**31)


def _begin(config: ExperimentConfig, lang: Language, loaded: Params, mesh: Mesh, name: str, spec: RoleSpec) -> Params:
    key, model, params = _key(config, name), lang.model, loaded
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


def bind(config: ExperimentConfig, algorithm: AlgorithmConfig, role_models: Mapping[str, Model]) -> Roles:
    """The roles that an algorithm asks for, each reading its part of the params tree."""

    def role(name: str) -> Role:
        spec, select = algorithm.roles[name], place(config, name)
        if spec.trunk_of is not None:
            return models.head_role(role(spec.trunk_of), select)
        return models.role(role_models[name], select)

    return {name: role(name) for name in algorithm.roles}
