"""Directories of adapters alone, in the format of PEFT.

Such a directory has adapter_config.json and adapter_model.safetensors, and names its base model by
a path or a hub id. The base is read with the same precautions as any model (`untrusted_files`): a
stranger's adapter can name another model, but not another kind of file.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tpu_rl import untrusted_files
from tpu_rl.errors import InputError, located
from tpu_rl.models import lora
from tpu_rl.models.config import LORA_A, LORA_B, DecoderConfig, LoraConfig
from tpu_rl.models.decoder import decoder, param_shapes
from tpu_rl.models.hf import families, safetensors_files
from tpu_rl.models.hf.checks import require, require_size
from tpu_rl.models.hf.paths import atomic_directory, find_directory, require_replaceable
from tpu_rl.models.hf.safetensors_files import StoredTensor
from tpu_rl.models.hf.weight_map import (
    FileTensor,
    WeightLocation,
    gathered,
    leaf_at,
    require_fit,
    tensor_at,
    weight_locations,
)
from tpu_rl.models.vision import towers
from tpu_rl.train import sharding
from tpu_rl.types import Model, Params

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
WRONG = "the adapter would load, but its outputs would be wrong"
MERGE = "or merge it with PEFT (merge_and_unload)"

PREFIX = "base_model.model."
"""Prefix of every tensor's name, before the name of its module in the base."""

SUFFIXES = {".lora_A.weight": LORA_A, ".lora_B.weight": LORA_B}
"""PEFT's suffix of an adapter's matrix -> ours."""

SCORE = families.TOP_NAMES["score"]

SUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # Other ways to initialize also change the base.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    "fan_in_fan_out": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "layer_replication": ([],),
    "layers_to_transform": ([],),
    "target_parameters": ([],),
    "trainable_token_indices": ([],),
    "alora_invocation_tokens": ([],),
    "use_bdlora": (False,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
}
"""Settings of PEFT that change what is computed -> the values, besides null, that do not."""


# Descriptions.


def is_adapter(directory: Path) -> bool:
    """Return True if a directory holds an adapter and not a whole model.

    Some libraries write the base's config.json beside an adapter.

    Raises:
        InputError: it holds both, and transformers would put the adapter on another base.
    """
    if not (directory / CONFIG).is_file():
        return False
    others = {path.name for path in directory.glob("*.safetensors")} - {WEIGHTS}
    if (directory / "config.json").is_file() and others:
        raise InputError(
            "the directory holds a model and an adapter",
            where=str(directory),
            why=f"{min(others)} and {CONFIG}: which one is meant, or both, nobody knows",
            fix="move one of them to a directory of its own",
        )
    return True


def base_directory(directory: Path) -> Path:
    """Return the directory of an adapter's base model.

    A relative path is looked up from the working directory and from the adapter's directory.

    Raises:
        InputError: the adapter names no base, the base is missing, or it is an adapter itself.
    """
    config_path = str(directory / CONFIG)
    name = untrusted_files.read_json(directory / CONFIG).get("base_model_name_or_path")
    if not isinstance(name, str) or not name or len(name) > 4096 or "\0" in name:
        raise InputError(
            "the adapter does not say which model it belongs to",
            where=config_path,
            why="base_model_name_or_path is missing, or no path",
            fix="set base_model_name_or_path to the model's directory or hub id",
        )
    candidates = (Path(name).expanduser(), directory / name)
    try:
        base = find_directory(next((path for path in candidates if path.is_dir()), name))
    except InputError as error:
        raise InputError(
            f"the adapter's base is not there: {name[:200]!r}",
            where=config_path,
            why=error.what[:200],
            fix=f"correct base_model_name_or_path in {CONFIG}",
        ) from error
    if is_adapter(base):
        raise InputError(
            "an adapter of an adapter is not supported",
            where=str(directory),
            why=f"its base is {base}",
            fix="merge the first one: models.save(path, *models.load(adapter))",
        )
    return base


def tokenizer_directory(directory: Path) -> Path:
    """Return the directory of a model's tokenizer; that of the base for an adapter without one."""
    has_tokenizer = any(
        (directory / file).is_file() for file in ("tokenizer.json", "tokenizer.model")
    )
    return directory if has_tokenizer or not is_adapter(directory) else base_directory(directory)


def adapted_model(directory: Path, base: Model) -> Model:
    """Return the base with the adapters, and the head if there is one, of a directory.

    Only headers are read.

    Raises:
        InputError: they do not fit the base, or compute something that is not supported.
    """
    return _describe(directory, base)[0]


def _describe(directory: Path, base: Model) -> tuple[Model, dict[str, StoredTensor], bool]:
    """Return the model with adapters, the stored tensors by the names of a text model, and
    `_is_shared`."""
    with located(str(directory / CONFIG)):
        lora_config = _read_settings(directory / CONFIG)
    stored = {}
    for name, tensor in safetensors_files.read_header(_weights_file(directory)).items():
        inner = name.removeprefix(PREFIX)
        stored[families.plain_name(inner) or inner] = tensor
    file_tensors = weight_locations(base)
    adapted_names = {
        name.removesuffix(suffix) + ".weight"
        for name in stored
        for suffix in SUFFIXES
        if name.endswith(suffix)
    }
    adapted = {
        location.path[-1]
        for name in adapted_names & file_tensors.keys()
        for location in file_tensors[name].locations
    }
    targets = tuple(name for name in lora.ADAPTABLE if name in adapted)
    num_outputs = stored[SCORE].shape[0] if SCORE in stored else base.config.num_outputs
    adapters = replace(lora_config, targets=targets) if targets else None
    model = decoder(replace(base.config, num_outputs=num_outputs, adapters=adapters))
    with located(str(directory / CONFIG)):
        is_shared = _is_shared(directory / CONFIG, model)
    shapes = {name: tensor.shape for name, tensor in _adapter_tensors(model, is_shared).items()}
    if base.config.num_outputs and SCORE not in stored:
        shapes.pop(SCORE)
    remedy = (
        "; an adapter of some layers only, or one that trained other weights, too "
        "(modules_to_save), has to be merged with PEFT (merge_and_unload)"
    )
    require_fit(directory, shapes, stored, CONFIG, remedy)
    return model, stored, is_shared


def _is_shared(path: Path, model: Model) -> bool:
    """Return True if the parts of fused tensors share their A (see `_adapter_tensors`).

    Raises:
        InputError: modules have ranks or scales of their own that `save_adapters` does not write.
    """
    source = untrusted_files.read_json(path)
    stated = {name: source.get(name) or {} for name in ("rank_pattern", "alpha_pattern")}
    if not any(stated.values()):
        return True
    fix = f"use an adapter with one rank, {MERGE}"
    require("rank_pattern, alpha_pattern", stated, stated == _patterns(model), WRONG, fix)
    return False


def _patterns(model: Model) -> dict[str, dict[str, float]]:
    """Return PEFT's rank and alpha of modules that hold several of our weights."""
    adapters = model.config.adapters
    patterns: dict[str, dict[str, float]] = {"rank_pattern": {}, "alpha_pattern": {}}
    for name, (_, locations) in weight_locations(model).items():
        count = len(locations)
        is_adapted = adapters and {part.path[-1] for part in locations} & {*adapters.targets}
        if count > 1 and adapters and is_adapted:
            # The scale stays the same: alpha / rank, or alpha / sqrt(rank).
            factor = math.sqrt(count) if adapters.rslora else count
            module = name.split(".")[-2]
            patterns["rank_pattern"][module] = count * adapters.rank
            patterns["alpha_pattern"][module] = factor * adapters.alpha
    return patterns


def _read_settings(path: Path) -> LoraConfig:
    """Return rank and scale of an adapter.

    Raises:
        InputError: another setting would change what is computed.
    """
    source = untrusted_files.read_json(path)
    for field, supported in SUPPORTED.items():
        value = source.get(field)
        fix = f"use an adapter with {field} = {supported[0]}, {MERGE}"
        require(field, value, value is None or value in supported, WRONG, fix)
    rank: Any = source.get("r")
    alpha: Any = source.get("lora_alpha")
    require_size("r", rank, 2**16 - 1)
    is_alpha = type(alpha) in (int, float) and 0 < alpha < math.inf
    require("lora_alpha", alpha, is_alpha, "it must be a number above 0", "download it again")
    return LoraConfig(rank, float(alpha), bool(source.get("use_rslora")))


def _weights_file(directory: Path) -> Path:
    path = directory / WEIGHTS
    if path.is_file():
        return path
    if (directory / "adapter_model.bin").exists():
        raise InputError(
            f"no {WEIGHTS} in the adapter's directory",
            where=str(directory),
            why="it has only pickled weights, which can run code when read",
            fix="convert them with peft: "
            "PeftModel.from_pretrained(model, path).save_pretrained(new_path)",
        )
    raise InputError(
        f"no {WEIGHTS} in the adapter's directory",
        where=str(directory),
        fix="download the adapter again, with its weights",
    )


def _adapter_tensors(model: Model, is_shared: bool = False) -> dict[str, FileTensor]:
    """Return the tensors of an adapter's file, the head's included, by name without PREFIX.

    Several of our weights may be one tensor in the base. Each has an adapter of its own, and the
    file has one for all of them: the sum of the ranks, with B block by block. If `is_shared`, as in
    adapters that PEFT trained, it has the rank of one, A is the same for all, and B has their rows.
    """
    config: DecoderConfig = model.config
    tensors = {}
    for name, file_tensor in weight_locations(model).items():
        if name == SCORE:
            tensors[name] = file_tensor
        adapters = config.adapters
        names = [location.path[-1] for location in file_tensor.locations]
        if adapters is None or not {*names} & {*adapters.targets}:
            continue
        count = 1 if is_shared else len(names)
        # All adapted matrices are [outputs, inputs] in files, the unembedding included.
        outputs, inputs = file_tensor.shape
        shapes = {LORA_A: (count * adapters.rank, inputs), LORA_B: (outputs, count * adapters.rank)}
        for suffix, our_suffix in SUFFIXES.items():
            locations = []
            for i, location in enumerate(file_tensor.locations):
                first = 0 if is_shared else i * adapters.rank
                ranks = slice(first, first + adapters.rank)
                rows = location.part or (slice(None),)
                weight = location.path[-1]
                if weight in adapters.targets:
                    part = (ranks,) if our_suffix == LORA_A else (*rows, ranks)
                    path = (*location.path[:-1], weight + our_suffix)
                    size = (location.shape[0], adapters.rank)
                    shape = (adapters.rank, inputs) if our_suffix == LORA_A else size
                    locations.append(WeightLocation(path, location.index, shape, True, part))
            file_name = name.removesuffix(".weight") + suffix
            tensors[file_name] = FileTensor(shapes[our_suffix], tuple(locations))
    return tensors


# Reading.


def load_adapters(path: str | Path, base: Model, mesh: Mesh | None = None) -> tuple[Model, Params]:
    """Return the base with adapters, and their params, for `join` to put over the base's.

    Raises:
        InputError: the directory is missing, damaged, not safe to read, or does not fit the base.
    """
    directory = find_directory(path)
    untrusted_files.require_safe(directory)
    model, stored, is_shared = _describe(directory, base)
    tensors_of_leaf: dict[tuple[str, ...], list[np.ndarray]] = {}
    for name, (shape, locations) in _adapter_tensors(model, is_shared).items():
        if name not in stored:
            continue
        tensor = np.array(stored[name].read(), np.float32)
        if not np.isfinite(tensor).all():
            raise InputError(
                f"{name} holds NaN or infinity",
                where=str(directory),
                fix="use an adapter from before its training diverged",
            )
        rest = np.ones(shape, bool)
        for location in locations:
            part = tensor[location.part]
            rest[location.part] = False
            part = part.T if location.is_transposed else part
            tensors_of_leaf.setdefault(location.path, []).append(part)
        if tensor[rest].any():
            raise InputError(
                f"{name} is not the adapter of several matrices side by side",
                where=str(directory),
                why=f"it has the rank of rank_pattern in {CONFIG}, but mixes their parts",
                fix="merge it with PEFT (merge_and_unload)",
            )
    adapters: dict[str, Any] = {}
    for keys, tensors in tensors_of_leaf.items():
        shape = leaf_at(param_shapes(model.config), keys)
        axes = leaf_at(model.axes, keys)
        leaf = np.stack(tensors).reshape(shape.shape).astype(shape.dtype)
        subtree = adapters
        for key in keys[:-1]:
            subtree = subtree.setdefault(key, {})
        subtree[keys[-1]] = jnp.array(leaf) if mesh is None else sharding.place(leaf, axes, mesh)
    return model, adapters


# Writing.


def save_adapters(
    path: str | Path,
    model: Model,
    params: Params,
    base: str,
    tokenizer: Any = None,
    card: str | None = None,
) -> None:
    """Write the adapters of a model, and its head if it has one, as a directory that PEFT loads.

    `base` is the directory or hub id of the model without adapters. README.md gets the text
    `card`. As with `save`, `path` is never
    incomplete, and all processes must call this together.

    Raises:
        InputError: `path` exists and is not the directory of an adapter.
    """
    require_replaceable(path, CONFIG)
    tensors = {
        PREFIX + _module_name(model.config, name): gathered(tensor, partial(tensor_at, params))
        for name, tensor in _adapter_tensors(model).items()
    }
    if jax.process_index() != 0:
        return
    with atomic_directory(path) as directory:
        layout = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        safetensors_files.write_file(directory / WEIGHTS, layout, tensors.values())
        settings = json.dumps(_peft_config(model, base), indent=2, sort_keys=True)
        (directory / CONFIG).write_text(settings + "\n")
        if tokenizer is not None:
            tokenizer.save_pretrained(str(directory))
        if card is not None:
            (directory / "README.md").write_text(card, encoding="utf-8")


def _module_name(config: DecoderConfig, name: str) -> str:
    """Return the base's name for what a text model calls `name`."""
    if config.multimodal and name.startswith("model."):
        return name.replace("model.", towers.text_prefix(config.vision), 1)
    return name


def _target_modules(config: DecoderConfig, names: list[str]) -> list[str] | str:
    """Return the adapted modules for PEFT.

    In a model with images this is a pattern, because the vision tower has modules of the same
    names.
    """
    if not config.multimodal:
        return names
    prefix = towers.text_prefix(config.vision)
    return rf"({re.escape(prefix)}.*\.)?({'|'.join(names)})"


def _module_suffixes(model: Model) -> list[str]:
    """Return suffixes that the names of the adapted modules have, and no others.

    PEFT adapts every module whose name ends in one of these, after a dot. The last part of the name
    is enough, unless modules that are not adapted have it too.
    """
    config: DecoderConfig = model.config
    assert config.adapters is not None
    modules_of: dict[str, list[str]] = {}
    for name, file_tensor in weight_locations(model).items():
        for location in file_tensor.locations:
            modules_of.setdefault(location.path[-1], []).append(name.removesuffix(".weight"))
    adapted = {module for weight in config.adapters.targets for module in modules_of[weight]}
    others = {module for modules in modules_of.values() for module in modules} - adapted
    last_parts = {module.rpartition(".")[2] for module in others}
    suffixes = []
    for weight in config.adapters.targets:
        parts = modules_of[weight][0].split(".")
        suffixes.append(".".join(parts[-2:] if parts[-1] in last_parts else parts[-1:]))
    return [*dict.fromkeys(suffixes)]


def _peft_config(model: Model, base: str) -> Mapping[str, Any]:
    """Return the content of adapter_config.json."""
    config: DecoderConfig = model.config
    adapters = config.adapters
    assert adapters is not None
    targets = _module_suffixes(model)
    alpha = adapters.alpha
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if config.num_outputs else "CAUSAL_LM",
        "base_model_name_or_path": str(Path(base).resolve()) if Path(base).is_dir() else base,
        "r": adapters.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "use_rslora": adapters.rslora,
        "target_modules": _target_modules(config, targets),
        **_patterns(model),
        "modules_to_save": ["score"] if config.num_outputs else None,
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
