"""Adapters alone, as directories that PEFT reads and writes: adapter_config.json and adapter_model.safetensors.

Such a directory names the model that it belongs to, by a path or a hub id. What is read of that model is what is read
of any (`model_files`): a stranger's adapter can name another model, not another kind of file.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tpu_rl import model_files, sharding
from tpu_rl.errors import InputError
from tpu_rl.models import families, lora, safetensors_files
from tpu_rl.models.architecture import LORA_A, LORA_B, DecoderConfig, LoraConfig
from tpu_rl.models.decoder import decoder, param_shapes
from tpu_rl.models.directories import find_directory, require_replaceable, written_whole
from tpu_rl.models.safetensors_files import Stored
from tpu_rl.models.slots import Slot, leaf_at, require_fit, tensor_of, weight_slots
from tpu_rl.types import Model, Params

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

PREFIX = "base_model.model."
"""Of every tensor's name, before the one that its module has in the base."""

IMAGES = "model.language_model."
"""What the names of a language model's modules begin with inside a Gemma 3 with images, in place of "model."."""

ENDS = {".lora_A.weight": LORA_A, ".lora_B.weight": LORA_B}
"""How the names of an adapter's matrices end, there and here."""

SCORE = families.TOP_NAMES["score"]

HARMLESS: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),  # others change the base, too
    "fan_in_fan_out": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
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
"""Settings of PEFT that change what is computed, and the values (besides null) that do not."""


# --- what a directory describes ----------------------------------------------------------------------------------


def is_adapter(directory: Path) -> bool:
    """Whether a directory holds an adapter and not a whole model."""
    return (directory / CONFIG).is_file() and not (directory / "config.json").is_file()


def base_directory(directory: Path) -> Path:
    """The directory of the model that an adapter belongs to; a relative path starts here or at the adapter.

    Raises InputError where there is none, or it is an adapter itself.
    """
    named = model_files.read_json(directory / CONFIG).get("base_model_name_or_path")
    if not isinstance(named, str) or not named or len(named) > 4096 or "\0" in named:
        fix = "name its directory or hub id in base_model_name_or_path"
        raise InputError("the adapter does not say which model it belongs to", where=str(directory / CONFIG), fix=fix)
    local = (Path(named).expanduser(), directory / named)
    try:
        base = find_directory(next((place for place in local if place.is_dir()), named))
    except InputError as error:
        fix = f"correct base_model_name_or_path in {CONFIG}"
        where = str(directory / CONFIG)
        raise InputError(f"the adapter's base is not there: {named[:200]!r}", where=where, fix=fix) from error
    if is_adapter(base):
        fix = "merge the first one: models.save(path, *models.load(adapter))"
        raise InputError("an adapter of an adapter", where=str(directory), why=f"its base is {base}", fix=fix)
    return base


def tokenizer_directory(directory: Path) -> Path:
    """Where a model's tokenizer is: of an adapter without one, at its base."""
    own = any((directory / file).is_file() for file in ("tokenizer.json", "tokenizer.model"))
    return directory if own or not is_adapter(directory) else base_directory(directory)


def adapted_model(directory: Path, base: Model) -> Model:
    """The base with the adapters, and the head if there is one, that a directory describes; from the headers alone.

    Raises InputError where they do not fit the base, or compute what is not supported.
    """
    return _described(directory, base)[0]


def _described(directory: Path, base: Model) -> tuple[Model, dict[str, Stored]]:
    """(the model with adapters, the stored tensors by the names that a text model has)."""
    settings = _settings(directory / CONFIG)
    stored = {}
    for name, tensor in safetensors_files.read_header(_weights_file(directory)).items():
        inner = name.removeprefix(PREFIX)
        stored[families.plain_name(inner) or inner] = tensor
    slots = weight_slots(base)
    stems = {name.removesuffix(end) + ".weight" for name in stored for end in ENDS if name.endswith(end)}
    targets = {slots[stem].path[-1] for stem in stems if stem in slots} & {*lora.MATRICES}
    outputs = stored[SCORE].shape[0] if SCORE in stored else base.config.outputs
    ordered = tuple(name for name in lora.MATRICES if name in targets)
    adapters = replace(settings, targets=ordered) if ordered else None
    model = decoder(replace(base.config, outputs=outputs, adapters=adapters))
    shapes = {name: shape for name, (_, shape) in _tensor_slots(model).items()}
    if base.config.outputs and SCORE not in stored:
        shapes.pop(SCORE)
    require_fit(directory, shapes, stored, CONFIG)
    return model, stored


def _settings(path: Path) -> LoraConfig:
    """Rank and scale. Raises InputError for anything else that would change what is computed."""
    source = model_files.read_json(path)
    for field, harmless in HARMLESS.items():
        if source.get(field) is not None and source[field] not in harmless:
            raise InputError(
                f"{field} = {str(source[field])[:80]} is not supported",
                where=str(path),
                fix=f"supported: {field} = {harmless[0]}; or merge the adapter with PEFT (merge_and_unload)",
            )
    rank: Any = source.get("r")
    alpha: Any = source.get("lora_alpha")
    if type(rank) is not int or not 0 < rank < 2**16 or type(alpha) not in (int, float) or not 0 < alpha < math.inf:
        raise InputError(f"r = {str(rank)[:40]}, lora_alpha = {str(alpha)[:40]}", where=str(path), why="not numbers")
    return LoraConfig(rank, float(alpha), bool(source.get("use_rslora")))


def _weights_file(directory: Path) -> Path:
    path = directory / WEIGHTS
    if not path.is_file():
        pickled = (directory / "adapter_model.bin").exists()
        raise InputError(
            f"no {WEIGHTS} in the adapter's directory",
            where=str(directory),
            why="it has only pickled weights, which can run code when read" if pickled else "",
            fix="with peft: PeftModel.from_pretrained(model, path).save_pretrained(new_path)" if pickled else "",
        )
    return path


def _tensor_slots(model: Model) -> dict[str, tuple[Slot, tuple[int, ...]]]:
    """Name without PREFIX -> (place in the params, shape in the file) of each tensor, the head's included."""
    config: DecoderConfig = model.config
    found = {}
    for name, slot in weight_slots(model).items():
        if name == SCORE:
            found[name] = (slot, slot.shape)
        if config.adapters is None or slot.path[-1] not in config.adapters.targets:
            continue
        outputs, inputs = slot.shape  # the unembedding is kept with its outputs first there and here
        for end, ours in ENDS.items():
            shape = (config.adapters.rank, inputs) if ours == LORA_A else (outputs, config.adapters.rank)
            place = slot._replace(path=(*slot.path[:-1], slot.path[-1] + ours))
            found[name.removesuffix(".weight") + end] = (place, shape)
    return found


# --- reading -----------------------------------------------------------------------------------------------------


def load_adapters(path: str | Path, base: Model, mesh: Mesh | None = None) -> tuple[Model, Params]:
    """(the base with adapters, their params), for `join` to put over the base's.

    Raises InputError for anything wrong in the directory.
    """
    directory = find_directory(path)
    model_files.require_safe(directory)
    model, stored = _described(directory, base)
    parts: dict[tuple[str, ...], list[np.ndarray]] = {}
    for name, (slot, _) in _tensor_slots(model).items():
        if name in stored:
            tensor = np.array(stored[name].read(), np.float32)
            if not np.isfinite(tensor).all():
                raise InputError(f"{name} holds NaN or infinity", where=str(directory))
            parts.setdefault(slot.path, []).append(tensor if name == SCORE else tensor.T)
    adapters: dict[str, Any] = {}
    for keys, rows in parts.items():
        shape, axes = leaf_at(param_shapes(model.config), keys), leaf_at(model.axes, keys)
        whole = np.stack(rows).reshape(shape.shape).astype(shape.dtype)
        inner = adapters
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = jnp.array(whole) if mesh is None else sharding.place(whole, axes, mesh)
    return model, adapters


# --- writing -----------------------------------------------------------------------------------------------------


def save_adapters(path: str | Path, model: Model, params: Params, base: str, tokenizer: Any = None) -> None:
    """Writes the adapters of a model, and its head if it has one, as a directory that PEFT loads; `base` is the
    directory or hub id of the model without them.

    As `save` does, it writes wholly or not at all, and all processes call it together.
    Raises InputError where `path` is something else than such a directory.
    """
    require_replaceable(path, CONFIG)
    slots = _tensor_slots(model)
    tensors = {
        PREFIX + _module(model.config, name): _tensor(params, slot, shape) for name, (slot, shape) in slots.items()
    }
    if jax.process_index() != 0:
        return
    with written_whole(path) as whole:
        layout = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        safetensors_files.write_file(whole / WEIGHTS, layout, tensors.values())
        (whole / CONFIG).write_text(json.dumps(_peft_config(model, base), indent=2, sort_keys=True) + "\n")
        if tokenizer is not None:
            tokenizer.save_pretrained(str(whole))


def _tensor(params: Params, slot: Slot, shape: tuple[int, ...]) -> np.ndarray:
    """In PEFT's layout: A is [rank, inputs] and B [outputs, rank]."""
    row = np.asarray(sharding.to_host(tensor_of(params, slot)))
    return row if slot.path[-1] == "score" else row.reshape(shape[::-1]).T


def _module(config: DecoderConfig, name: str) -> str:
    """What the base calls what a text model calls `name`."""
    return name.replace("model.", IMAGES, 1) if config.inside_gemma3 and name.startswith("model.") else name


def _targets(config: DecoderConfig, names: list[str]) -> list[str] | str:
    """The adapted modules in PEFT's form; beside images a pattern, as the vision tower has modules of such names."""
    if not config.inside_gemma3:
        return names
    return rf"({re.escape(IMAGES)}.*\.)?({'|'.join(names)})"


def _peft_config(model: Model, base: str) -> Mapping[str, Any]:
    config: DecoderConfig = model.config
    adapters = config.adapters
    assert adapters is not None
    modules = {slot.path[-1]: name.split(".")[-2] for name, slot in weight_slots(model).items() if "." in name}
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if config.outputs else "CAUSAL_LM",
        "base_model_name_or_path": str(Path(base).resolve()) if Path(base).is_dir() else base,
        "r": adapters.rank,
        "lora_alpha": int(adapters.alpha) if adapters.alpha == int(adapters.alpha) else adapters.alpha,
        "use_rslora": adapters.rank_stabilised,
        "target_modules": _targets(config, [modules[name] for name in adapters.targets]),
        "modules_to_save": ["score"] if config.outputs else None,
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
