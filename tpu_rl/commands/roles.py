"""The models of a run: its roles, what each begins as, and their one tree of params."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tpu_rl import jax_versions, models, sampler, tokenizers
from tpu_rl.algorithm_spec import Opponent, RoleSpec, ScoreReadout
from tpu_rl.checkpoint.train_state_io import BASE
from tpu_rl.commands.config import BUILTIN, PRETRAINED, AlgorithmConfig, ExperimentConfig, FileData
from tpu_rl.errors import InputError
from tpu_rl.experience.layout import AttentionIndex
from tpu_rl.models.attention import flash, gpu_decode
from tpu_rl.models.attention.cudnn import unsupported_reason
from tpu_rl.models.config import DecoderConfig, WeightDtype
from tpu_rl.models.policy import Select
from tpu_rl.rollout import image_prompts
from tpu_rl.rollout.weights import RolloutPolicy, SamplingLayout, rollout_policy, sampling_mesh
from tpu_rl.sampler import derived_policies
from tpu_rl.tokenizers import Tokenizer, require_same_tokens
from tpu_rl.train import sharding
from tpu_rl.types import Array, Model, Params, Policy, Purpose, Role, Roles

if TYPE_CHECKING:
    from tpu_rl.algos import QSharpConfig
    from tpu_rl.losses import return_distributions
    from tpu_rl.sampler import guided_policy


class Language(NamedTuple):
    """The model of --model.path and its tokenizer."""

    model: Model
    tokenizer: Tokenizer


def language(config: ExperimentConfig, mesh: Mesh) -> tuple[Language, Params]:
    """Return the model of --model.path with its tokenizer, and its weights on the mesh.

    Weights have the type that they have under adapters.
    """
    directory = model_directory(config)
    tokenizer = load_tokenizer(config, directory)
    if not config.model.random_init:
        model, params = load(config, str(directory), mesh, config.model.lora.weight_dtype)
        if model.config.vision is not None and model.config.vision.has_audio:
            print(
                "note: the model's tower for sound is not read, and a saved model has none",
                file=sys.stderr,
            )
        if model.config.weight_dtype is not None:
            model = models.variant(model, weight_dtype=None)
        return Language(model, tokenizer), params
    model = from_config(config, directory)
    key = sampler.run_key(config.seed, Purpose.INIT, 0)
    return Language(model, tokenizer), random_params(with_base_dtype(config, model), key, mesh)


def load_tokenizer(config: ExperimentConfig, directory: Path) -> Tokenizer:
    """Return the tokenizer of a model's directory, with the settings of the run.

    Raises InputError if there is none, or the settings do not fit it.
    """
    tokenizer = tokenizers.load(models.tokenizer_directory(directory))
    model = from_config(config, directory).config
    if model.vision is not None:
        file = config.data.path if isinstance(config.data, FileData) else None
        tokenizer = tokenizers.with_images(
            tokenizer,
            models.tokenizer_directory(directory),
            model.vision.image_token,
            tower=model.vision,
            around=model.vision.around,
            first_id=model.vocab.size,
            unsampled=model.vocab.unsampled,
            folder=Path(file or "").parent,
        )
    return configure_tokenizer(config, tokenizer)


def configure_tokenizer(config: ExperimentConfig, tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with the settings of the run. The tasks' own prompts stay plain text."""
    if not isinstance(config.data, FileData):
        return tokenizers.configure(tokenizer, config.tokenizer)
    files = config.data
    tokenizer = tokenizers.with_pixels(tokenizer, (files.min_pixels, files.max_pixels))
    chat = files.chat, files.system, files.assistant_turns
    return tokenizers.configure(tokenizer, config.tokenizer, *chat)


def model_directory(config: ExperimentConfig) -> Path:
    """Return the directory of --model.path. It need not have weights if they are random."""
    path = model_path(config.model.path)
    if config.model.random_init:
        return models.find_configuration(path)
    return models.find_directory(path)


def from_config(config: ExperimentConfig, directory: Path) -> Model:
    """Return the model that a directory's config.json describes, in the types of the run.

    A model that reads images never writes the tokens that stand for them.
    """
    return _without_image_tokens(
        models.from_config(
            directory,
            dtype=config.model.dtype,
            param_dtype=config.model.param_dtype,
            images=config.model.images,
        )
    )


def _without_image_tokens(model: Model) -> Model:
    vision = model.config.vision
    return model if vision is None else models.with_unsampled(model, vision.tokens)


def load(
    config: ExperimentConfig, path: str, mesh: Mesh, weight_dtype: WeightDtype | None = None
) -> tuple[Model, Params]:
    """Return a model and its weights on the mesh, in the types of the run; matrices in
    `weight_dtype`, if there is one."""
    model, params = models.load(
        path,
        dtype=config.model.dtype,
        param_dtype=config.model.param_dtype,
        mesh=mesh,
        weight_dtype=weight_dtype,
        images=config.model.images,
    )
    return _without_image_tokens(model), params


def with_base_dtype(config: ExperimentConfig, model: Model) -> Model:
    """Return the model whose weights lie under adapters, in the type that they have there."""
    weight_dtype = config.model.lora.weight_dtype
    return model if weight_dtype is None else models.variant(model, weight_dtype=weight_dtype)


def random_params(model: Model, key: Array, mesh: Mesh) -> Params:
    """Return random weights on the mesh."""
    weight_dtype = model.config.weight_dtype
    whole = models.variant(model, weight_dtype=None)

    def init(key: Array) -> Params:
        params = whole.init(key)
        return params if weight_dtype is None else models.quantize_tree(params, weight_dtype)

    shapes = jax.eval_shape(init, key)
    return jax.jit(init, out_shardings=sharding.shardings(model.axes, mesh, shapes))(key)


def model_path(path: str | None) -> str:
    """Return a directory or hub id; builtin:NAME stands for a model that comes with the package.

    Raises InputError if no model is given, or there is none of that name.
    """
    if path is None:
        raise InputError(
            "no model given", where="--model.path", fix="give a Hugging Face directory or hub id"
        )
    if not path.startswith(BUILTIN):
        return path
    directory = PRETRAINED / path.removeprefix(BUILTIN)
    if not (directory / "config.json").is_file():
        names = ", ".join(f"{BUILTIN}{child.name}" for child in sorted(PRETRAINED.iterdir()))
        raise InputError(f"no shipped model {path}", where="--model.path", fix=f"there is {names}")
    return str(directory)


# --- the roles, and their models ---

DRAFT = "draft"
"""The role of the small model for speculative decoding. It is frozen, and no algorithm uses it."""


def specs(config: ExperimentConfig) -> dict[str, RoleSpec]:
    """Return every role of every stage.

    The params tree is the same in all stages. Only what trains differs, and is left out here.
    Raises InputError if two stages want a role to begin differently.
    """
    shared: dict[str, RoleSpec] = {}
    for stage in config.stages:
        for name, spec in stage.algorithm.roles.items():
            beginning = spec._replace(trainable=False, learning_rate_scale=1.0, reading=None)
            if shared.setdefault(name, beginning) != beginning:
                raise InputError(
                    f"the run's phases want the role {name!r} to begin differently",
                    where="--phases",
                )
    drafter = config.sampling.speculation.model
    if drafter is not None:
        shared[DRAFT] = RoleSpec(trainable=False, path=drafter)
    return shared


def main_role(algorithm: AlgorithmConfig) -> str:
    """Return the role that a run is for: the first that trains."""
    return next(name for name, spec in algorithm.roles.items() if spec.trainable)


def reading(algorithm: AlgorithmConfig) -> ScoreReadout | None:
    """Return the score readout of the reward model that the algorithm trains, or None."""
    readings = (spec.reading for spec in algorithm.roles.values())
    return next((reading for reading in readings if reading is not None), None)


def role_model(
    config: ExperimentConfig, base: Model, spec: RoleSpec, is_frozen: bool = False
) -> Model:
    """Return the architecture of a role, without adapters. No weights are read.

    Raises InputError if the model has no head of its own for a role that never learns one.
    """
    model = base
    if spec.path is not None:
        model = from_config(config, models.find_configuration(model_path(spec.path)))
        # Distributions of two roles are compared, so that one token is impossible in both.
        model = models.with_unsampled(model, base.config.vocab.unsampled)
    if spec.layers is not None:
        model = models.first_layers(model, spec.layers)
    outputs = head_outputs(model, spec)
    if outputs is None:
        return models.require_writer(model, str(spec.path or config.model.path))
    if is_frozen and spec.path is not None and model.config.num_outputs != outputs:
        raise InputError(
            f"the model has no head of {outputs} number",
            where=f"{spec.path}: config.json, architectures",
            why="a new head would be random, and this role never learns",
            fix="give the model folder of a run of value_pretraining",
        )
    return models.variant(model, num_outputs=outputs)


def head_outputs(model: Model, spec: RoleSpec) -> int | None:
    """Return the number of outputs of the role's head; None if it keeps the vocabulary."""
    if spec.outputs_per_token is not None:
        return spec.outputs_per_token * model.config.vocab.size
    return spec.outputs


def role_models(config: ExperimentConfig, base: Model) -> dict[str, Model]:
    """Return the model of each role, with its adapters.

    Raises InputError if LoRA is wanted and no role can have it, or its settings do not fit a model;
    if parts for images are to be frozen and there are none; if routing is to be replayed and the
    policy is no mixture; or if a setting does not fit a model with a recurrent state.
    """
    bases = adapter_bases(config)
    if base.config.vision is None:
        config.require_fit("a model of texts alone")
    elif base.config.vision.is_two_way:
        config.require_fit("a model whose images see later tokens")
    result = {}
    for name, spec in specs(config).items():
        model = role_model(config, base, spec, is_frozen=not changes(config, name))
        if config.rollout.replay_routing and name == "policy":
            if model.config.moe is None:
                config.require_fit("a dense model")
            model = models.variant(model, records_routing=True)
        select = place(config, name)
        if select.base is not None or select.name == BASE:
            model = with_base_dtype(config, model)
        result[name] = models.with_lora(model, config.model.lora) if name in bases else model
    if any(model.config.is_recurrent for model in result.values()):
        config.require_fit("a model with linear attention")
    return result


def has_attention_kernel(config: ExperimentConfig, mesh: Mesh) -> bool:
    """Return True if attention uses the kernel for TPUs."""
    on_tpu = mesh.devices.flat[0].platform == "tpu"
    return on_tpu and config.model.attention == "auto" and jax_versions.can_compile_kernels()


def fast_models(config: ExperimentConfig, base: Model, mesh: Mesh) -> dict[str, Model]:
    """Return `role_models`, each as `fast_model`; on GPUs with kernels of attention if they work.

    All processes call it together. Raises InputError if --model.attention demands cuDNN and it
    cannot be used.
    """
    result = {
        name: fast_model(config, model, mesh) for name, model in role_models(config, base).items()
    }
    wanted = config.model.attention
    if (
        config.model.exact_sampling
        or wanted == "xla"
        or (wanted == "auto" and mesh.devices.flat[0].platform != "gpu")
    ):
        return result
    # The drafter never sees packed rows, only a cache.
    obstacles = {
        name: _cudnn_obstacle(result[name].config, config.batch.row_length, mesh)
        for name in sorted(result.keys() - {DRAFT})
    }
    reasons = [reason for reason in dict.fromkeys(obstacles.values()) if reason]
    if reasons and wanted == "cudnn":
        raise InputError(
            "cuDNN cannot compute this run's attention",
            where="--model.attention cudnn",
            why=reasons[0],
            fix="--model.attention auto",
        )
    for reason in reasons:
        print(f"note: attention is XLA's and not cuDNN's: {reason}", file=sys.stderr)
    for name, obstacle in obstacles.items():
        if not obstacle:
            result[name] = models.with_attention_kernel(result[name], "cudnn")
    int8_cache = config.sampling.kv_cache_dtype == "int8"
    obstacles = {
        name: _decode_obstacle(result[name].config, mesh, int8_cache) for name in sorted(result)
    }
    for reason in filter(None, dict.fromkeys(obstacles.values())):
        print(f"note: decode steps have XLA's attention and no kernel: {reason}", file=sys.stderr)
    return {
        name: model
        if obstacles[name]
        else models.variant(model, attention={"gpu_decode": "triton"})
        for name, model in result.items()
    }


def _decode_obstacle(config: DecoderConfig, mesh: Mesh, int8_cache: bool) -> str:
    """Return why the kernel for GPUs cannot compute a model's decode steps; "" if it can.

    With `int8_cache` it must also read such a cache; evaluations have the plain one.
    """
    from tpu_rl.models.attention import gpu_trials

    reason = gpu_decode.unsupported_reason(config.attention, mesh.devices.flat[0])
    if reason:
        return reason
    caches = (False, True) if int8_cache else (False,)
    errors = [gpu_trials.gpu_decode_error(config.dtype, int8_cache=cache) for cache in caches]
    reasons = (gpu_trials.failure_reason(config.attention, mesh, error_of) for error_of in errors)
    return next(filter(None, reasons), "")


def _cudnn_obstacle(config: DecoderConfig, row_length: int, mesh: Mesh) -> str:
    """Return why cuDNN cannot compute a model's attention; "" if it can."""
    from tpu_rl.models.attention import gpu_trials

    reason = unsupported_reason(config, row_length, mesh)
    return reason or gpu_trials.failure_reason(config.attention, mesh, gpu_trials.cudnn_error)


def fast_model(config: ExperimentConfig, model: Model, mesh: Mesh) -> Model:
    """Return the model with what is fastest on the mesh's devices, or what was asked for."""
    model = models.variant(
        model, remat=config.model.remat, gradient_barrier=config.model.gradient_barrier
    )
    if model.config.moe is not None:
        config.require_fit("a mixture of experts")
    if config.model.exact_sampling:
        return models.with_exact_sampling(model)
    if config.model.float32_sums:
        model = models.variant(model, float32_sums=True)
    if mesh.devices.flat[0].platform == "cpu":
        model = models.variant(model, attention={"cpu_cache": True})
    if not has_attention_kernel(config, mesh):
        return model
    tensor = config.sampling.tensor_parallel
    tensor = tensor if isinstance(tensor, int) else mesh.shape["tensor"]
    return models.with_attention_kernel(model, tensor=tensor)


# --- the place of each role in the params tree ---


def adaptable(config: ExperimentConfig) -> set[str]:
    """Return the roles that get adapters if a rank is given; see `adapter_bases`."""
    all_specs = specs(config)
    changing = {
        name
        for stage in config.stages
        for name, spec in stage.algorithm.roles.items()
        if spec.trainable
    }
    changing |= {name for name, spec in all_specs.items() if spec.tracks_policy == 1}

    def is_whole_model(spec: RoleSpec) -> bool:
        return not (spec.random or spec.layers or spec.trunk_of)

    return {name for name in changing if is_whole_model(all_specs[name])}


def adapter_bases(config: ExperimentConfig) -> dict[str, str]:
    """Return role with adapters -> where in the params tree the frozen weights under them are.

    It is empty without LoRA. Roles that train get adapters, unless they are random, a part of a
    model, or a head on another role's trunk: these train whole. A role that is now and then set
    equal to one that trains has adapters of its own, which do not train. Raises InputError if LoRA
    is wanted and no role can have it, or a role follows in small steps.
    """
    if not config.model.lora.rank:
        return {}
    all_specs = specs(config)
    can_adapt = adaptable(config)
    bases = {
        name: BASE if spec.path is None else f"{name}_{BASE}"
        for name, spec in all_specs.items()
        if name in can_adapt
    }
    averaged = [name for name, spec in all_specs.items() if 0 < spec.tracks_policy < 1]
    if averaged:
        raise InputError(
            f"{averaged[0]} is moved a part of the way to what trains, which adapters cannot do",
            where="--model.lora.rank, --algorithm.reference-mix",
            why="the mean of two products A B is not the product of the means",
            fix="move it all the way (--algorithm.reference-mix 1), "
            "or train all weights (--model.lora.rank 0)",
        )
    whole = [
        name
        for name, spec in all_specs.items()
        if name not in bases
        and spec != RoleSpec(trainable=False)
        and not (spec.path or spec.random or spec.trunk_of)
    ]
    if whole and config.model.lora.weight_dtype is not None:
        raise InputError(
            f"{whole[0]} begins as the model of --model.path and has no adapters",
            where="--model.lora.base-dtype",
            why="it would begin as rounded weights",
            fix="use --model.lora.base-dtype unquantized",
        )
    if not bases:
        raise InputError(
            "no model of this run can have adapters",
            where="--model.lora.rank",
            why="what trains is random, a part of a model or a head alone",
            fix="use --model.lora.rank 0",
        )
    return bases


def changes(config: ExperimentConfig, name: str) -> bool:
    """Return True if a role's weights change in the run.

    Weights that never change are kept in the type that their model computes with. That gives the
    same bits, and takes half the memory of float32 masters.
    """
    for stage in config.stages:
        spec = stage.algorithm.roles.get(name)
        if spec is not None and spec.trainable:
            return True
    return bool(specs(config)[name].tracks_policy)


def place(config: ExperimentConfig, name: str) -> Select:
    """Return a selector of a role's params: by its name, except for params that roles share."""
    bases = adapter_bases(config)
    if name in bases:
        return Select(name, bases[name])
    is_base = specs(config)[name] == RoleSpec(trainable=False) and BASE in bases.values()
    return Select(BASE if is_base else name)


def adapter_base(config: ExperimentConfig, name: str) -> str | None:
    """Return the directory or hub id of the model under a role's adapters.

    None if the role has no adapters, or if no directory is that model: its weights were random, or
    other adapters are merged into it.
    """
    path = specs(config)[name].path
    if name not in adapter_bases(config) or (path is None and config.model.random_init):
        return None
    path = model_path(path or config.model.path)
    return None if models.is_adapter(models.find_directory(path)) else path


def param_shapes(config: ExperimentConfig, base: Model) -> dict[str, Params]:
    """Return the whole params tree as shapes and types."""
    bases = adapter_bases(config)
    shapes: dict[str, Params] = {}
    for name, model in role_models(config, base).items():
        whole = init_shapes(model)
        weights, adapters = models.split(whole)
        head = {"score": weights.pop("score")} if model.config.num_outputs else {}
        if name in bases:
            if bases[name] != BASE:
                shapes[bases[name]] = weights
            shapes[name] = adapters | head
        elif place(config, name).name == name:
            is_head = specs(config)[name].trunk_of is not None
            shapes[name] = head if is_head else whole
        if name in shapes and not changes(config, name):
            shapes[name] = models.cast_to_compute_dtype(shapes[name], config.model.dtype)
    shared = {BASE: init_shapes(with_base_dtype(config, base))} if BASE in bases.values() else {}
    return shared | shapes


def init_shapes(model: Model) -> Params:
    """Return the shapes of a model's params. A key made outside would claim a device."""
    return jax.eval_shape(lambda: model.init(jax.random.key(0)))


# --- the params that roles begin with ---


def first_params(
    config: ExperimentConfig, lang: Language, loaded: Params, mesh: Mesh, names: Iterable[str]
) -> Params:
    """Return the params of the named roles before the first step, and the weights under adapters.

    Each role has buffers of its own. The first one that begins as the loaded model takes over its
    buffers.
    """
    taken: set[int] = set()

    def unique(leaf: Array) -> Array:
        if id(leaf) in taken:
            return jnp.copy(leaf)
        taken.add(id(leaf))
        return leaf

    all_models = role_models(config, lang.model)
    bases = adapter_bases(config)
    params: dict[str, Params] = {}
    if BASE in bases.values():
        params[BASE] = jax.tree.map(unique, loaded)
    for name in names:
        if place(config, name).name != name:
            continue  # The role is BASE itself.
        model = all_models[name]
        beginning = _beginning(config, lang, loaded, mesh, name)
        if name in bases:
            weights = dict(beginning)
            head = {"score": weights.pop("score")} if model.config.num_outputs else {}
            if bases[name] != BASE:
                params[bases[name]] = jax.tree.map(unique, weights)
            key = jax.random.fold_in(_role_key(config, name), 1)
            beginning = models.random_adapters(model, key, mesh) | head
        if not changes(config, name):
            beginning = models.cast_to_compute_dtype(beginning, config.model.dtype)
        params[name] = jax.tree.map(unique, beginning)
    return params


def _role_key(config: ExperimentConfig, name: str) -> Array:
    """Return a role's key. It depends on the name alone, not on which other roles there are."""
    return sampler.run_key(config.seed, Purpose.INIT, 1 + zlib.crc32(name.encode()) % 2**31)


def _beginning(
    config: ExperimentConfig, lang: Language, loaded: Params, mesh: Mesh, name: str
) -> Params:
    """Return the params that a role begins with, without adapters."""
    spec = specs(config)[name]
    key = _role_key(config, name)
    model = lang.model
    params = loaded
    if spec.path is not None:
        directory = models.find_directory(model_path(spec.path))
        require_same_tokens(lang.tokenizer, directory, name)
        under_adapters = place(config, name).base is not None
        weight_dtype = config.model.lora.weight_dtype if under_adapters else None
        model, params = load(config, model_path(spec.path), mesh, weight_dtype)
    if spec.trunk_of is not None:
        return models.random_head(model, head_outputs(model, spec) or 1, key)
    if spec.random:
        return random_params(role_model(config, lang.model, spec), key, mesh)
    if spec.layers is not None:
        params = models.first_layers_params(model, params, spec.layers)
        model = models.first_layers(model, spec.layers)
    outputs = head_outputs(model, spec)
    if outputs is not None and model.config.num_outputs != outputs:
        params = models.head_params(model, params, outputs, key)
    return params


def bind(
    config: ExperimentConfig, algorithm: AlgorithmConfig, role_models: Mapping[str, Model]
) -> Roles:
    """Return the roles of an algorithm, each of which reads its part of the params tree."""

    def role(name: str) -> Role:
        trunk = algorithm.roles[name].trunk_of
        select = place(config, name)
        if trunk is not None:
            return models.head_role(role(trunk), select)
        whole_logits = config.batch.whole_logits == "on"
        return models.role(role_models[name], select)._replace(whole_logits=whole_logits)

    return {name: role(name) for name in algorithm.roles}


# --- a run ---


class RunContext(NamedTuple):
    """The parts that all stages of a run share."""

    config: ExperimentConfig
    language: Language
    models: dict[str, Model]
    """The model of each role."""
    mesh: Mesh
    run_dir: Path
    sampler_devices: tuple[Any, ...] = ()
    """Devices that only sample. Without any, those of `mesh` sample."""

    @property
    def max_length(self) -> int:
        """Tokens of a prompt with its completion."""
        return self.config.sampling.max_prompt_tokens + self.config.sampling.max_new_tokens

    @property
    def attention_index(self) -> AttentionIndex:
        """The part of a layout that attention reads."""
        if self.config.model.exact_sampling:
            return "paths"
        by_kernel = has_attention_kernel(self.config, self.mesh)
        if by_kernel and flash.is_supported(self.config.batch.row_length):
            return "none"
        return "tiles" if self.config.mesh.context <= 1 else "none"

    def params_of(self, role: str) -> Select:
        """Return a selector of a role's params from the whole tree."""
        return place(self.config, role)

    def role(self, role: str) -> Role:
        """Return the role as algorithms see it."""
        return models.role(self.models[role], self.params_of(role))

    def policy(self, role: str) -> Policy:
        """Return the role as the sampler sees it."""
        return models.policy(self.sampling_model(role), self.params_of(role))

    def sampling_model(self, role: str) -> Model:
        """Return the role's model with the cache and the weights that the run's settings want."""
        model = self.models[role]
        if self.config.sampling.kv_cache_dtype == "int8":
            model = models.with_int8_cache(model)
        if self.weight_dtype is not None:
            model = models.variant(model, weight_dtype=self.weight_dtype)
        return model

    def selects(self, names: Iterable[str]) -> list[Select]:
        """Return selectors of the params of roles and, if there are any, of their drafter."""
        unique = dict.fromkeys(names)
        if unique and self.drafter is not None:
            unique[self.drafter] = None
        return [self.params_of(name) for name in unique]

    @property
    def drafter(self) -> str | None:
        """The role of the small model for speculative decoding; None if there is none."""
        return DRAFT if self.config.sampling.speculation.model else None

    @property
    def sampling_layout(self) -> SamplingLayout:
        """The layout of weights that are sampled with."""
        devices = self.sampler_devices
        mesh = sampling_mesh(self.config.sampling.tensor_parallel, self.mesh, devices)
        training_mesh = self.mesh if devices else None
        return SamplingLayout(mesh, self.config.model.dtype, training_mesh, self.weight_dtype)

    @property
    def weight_dtype(self) -> WeightDtype | None:
        """The type of the matrices that are sampled with, if they are quantized."""
        dtype = self.config.sampling.weight_dtype
        return None if dtype == "computed" else dtype

    def rollout_policy(self, role: str) -> RolloutPolicy:
        """Return the role as it completes prompts, with its drafter."""
        drafter = self.policy(self.drafter) if self.drafter else None
        reads = self.selects([role])
        sampled = rollout_policy(self.policy(role), reads, self.sampling_layout, drafter)
        images = image_prompts.with_images(self.sampling_model(role), self.params_of(role))
        return sampled._replace(with_images=images)

    def guided_policy(self, algorithm: Any) -> RolloutPolicy:
        """Return the role "policy" guided by the role "q", for a configuration of Q#."""
        from tpu_rl.sampler import guided_policy

        policy = guide(self.policy("policy"), self.policy("q"), algorithm)
        reads = [self.params_of("policy"), self.params_of("q")]
        unguided = rollout_policy(policy, reads, self.sampling_layout)

        def params(tree: Params) -> Params:
            return guided_policy.with_kl_coef(unguided.params(tree), algorithm.kl_coef)

        return unguided._replace(params=params)

    def opponent_policy(self, opponent: Opponent) -> RolloutPolicy:
        """Return the sampler whose completions the policy's are compared with."""
        if len(opponent.roles) == 1:
            return self.rollout_policy(opponent.roles[0])
        policy, reference = map(self.policy, opponent.roles)
        mixed = derived_policies.mix(policy, reference, opponent.reference_share)
        return self._rollout_policy_of_two(mixed, opponent.roles, "--algorithm.opponent-mix")

    def restricted_policy(self, top_p: float) -> RolloutPolicy:
        """Return the policy in the nucleus of the role "mask"."""
        temperature = self.config.sampling.temperature
        policy = derived_policies.restrict(
            self.policy("policy"), self.policy("mask"), top_p, temperature
        )
        return self._rollout_policy_of_two(policy, ("policy", "mask"), "--algorithm.mask-top-p")

    def tempered_policy(self) -> RolloutPolicy:
        """Return the policy at a temperature that is in the whole params tree; 1 without one."""
        plain = self.rollout_policy("policy")

        def params(tree: Params) -> Params:
            return plain.params({derived_policies.TEMPERATURE: jnp.float32(1.0)} | tree)

        return plain._replace(policy=derived_policies.tempered(plain.policy), params=params)

    def _rollout_policy_of_two(
        self, policy: Policy, names: Iterable[str], flag: str
    ) -> RolloutPolicy:
        if self.models["policy"].config.vision is not None:
            raise InputError(
                "two models that sample together read no images",
                where=flag,
                why="each of them would have image features of its own",
                fix=f"leave {flag} out",
            )
        drafter = self.policy(self.drafter) if self.drafter else None
        return rollout_policy(policy, self.selects(names), self.sampling_layout, drafter)

    def unrounded(self) -> RunContext:
        """Return the same with caches and weights as they are computed, so that accuracy is the
        model's own."""
        sampling = replace(self.config.sampling, kv_cache_dtype="computed", weight_dtype="computed")
        return self._replace(config=replace(self.config, sampling=sampling))


def guide(
    reference: Policy,
    q: Policy,
    algorithm: QSharpConfig,
    method: return_distributions.Method = "q_sharp",
) -> Policy:
    """Return the reference guided by q; its params are `with_kl_coef` of the whole tree."""
    from tpu_rl.losses import return_distributions
    from tpu_rl.sampler import guided_policy

    return guided_policy.guide(
        reference,
        q,
        return_distributions.offset(method, algorithm.histogram),
        algorithm.candidates,
        q_reads(algorithm),
        algorithm.candidate_mass,
    )


def q_reads(algorithm: QSharpConfig) -> guided_policy.Reads:
    """Return the hidden state at which q scores a token."""
    return "own" if algorithm.q_type == "v" else "previous"
