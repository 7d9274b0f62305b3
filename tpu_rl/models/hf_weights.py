"""Hugging Face model directories, read and written tensor by tensor: host memory holds one of them at a time."""

from __future__ import annotations

import functools
import json
import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from tpu_rl import model_files, sharding
from tpu_rl.errors import InputError
from tpu_rl.models import families, safetensors_files
from tpu_rl.models.decoder import WEIGHTS, DecoderConfig, decoder, param_shapes
from tpu_rl.types import Array, Model, Params

SHARD_BYTES = 5_000_000_000
"""Largest file that `save` writes, unless a single tensor is larger."""

OUTPUTS = {"query": 2, "key": 2, "value": 2, "output": 1, "gate": 1, "up": 1, "down": 1}
"""How many of a matrix's last dimensions are outputs. Hugging Face keeps matrices [outputs, inputs], flattened."""


# --- configurations ----------------------------------------------------------------------------------------------


def from_config(
    config: Mapping[str, Any] | str | Path, dtype: str = "float32", param_dtype: str | None = None
) -> Model:
    """The model that a Hugging Face configuration describes: a dict, or a directory with config.json. No weights.

    `dtype` is what it computes in, `param_dtype` what its weights are kept in (None: the same).
    Raises InputError where the architecture is not supported, the directory has no readable config.json, or its files
    are not safe to read (`model_files`).
    """
    if isinstance(config, Mapping):
        return decoder(families.read_config(config, dtype, param_dtype or dtype))
    directory = Path(config)
    model_files.require_safe(directory)
    path = directory / "config.json"
    source = model_files.read_json(path)
    _refuse_remote_code(source, path)
    try:
        read = families.read_config(source, dtype, param_dtype or dtype, str(path))
    # A stranger's file: any value may be of any type. What is wrong with values of the right type, it says itself.
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise InputError("config.json does not describe a model", where=str(path), why=repr(error)[:200]) from error
    valid = min(_known_tokens(directory, read.vocab.size), read.vocab.size)
    return decoder(replace(read, vocab=replace(read.vocab, valid=valid)))


def _refuse_remote_code(source: Mapping[str, Any], path: Path) -> None:
    """Raises InputError where the author's own code would compute something else than the `model_type` says."""
    names = source.get("auto_map")
    models = [name for name in names if str(name).startswith("AutoModel")] if isinstance(names, Mapping) else []
    if isinstance(names, Mapping) and models:
        raise InputError(
            "the checkpoint brings its own code, which is never run",
            where=str(path),
            why=f"auto_map: {names[models[0]]}"[:200],
            fix="use a checkpoint of a supported family; if this is one, remove auto_map from config.json",
        )


def _known_tokens(directory: Path, size: int) -> int:
    """How many ids tokenizer.json knows, added tokens included; `size` without that file or a vocabulary in it.

    Raises InputError where ordinary text has ids beyond `size`, the rows of the embedding: to read them would give
    another token's row. Added tokens may lie beyond, as the image token of Gemma 3 does: text never becomes one.
    """
    path = directory / "tokenizer.json"
    if not path.exists():
        return size
    tokenizer = model_files.read_json(path)
    try:
        vocab = tokenizer.get("model", {}).get("vocab")
        if not vocab:
            return size
        added = {token["id"] for token in tokenizer.get("added_tokens", [])}
        # Of a unigram model the vocabulary is a list of [text, score].
        ids = set(vocab.values() if isinstance(vocab, dict) else range(len(vocab)))
        known, ordinary = 1 + max(ids | added), 1 + max(ids - added, default=0)
    except (TypeError, KeyError, AttributeError) as error:
        raise InputError("tokenizer.json has no vocabulary", where=str(path), why=repr(error)[:200]) from error
    if ordinary > size:
        raise InputError(
            f"the tokenizer knows {ordinary:,} ids and the model's embedding {size:,}",
            where=str(directory),
            why="tokenizer.json and vocab_size in config.json do not belong together",
            fix="use the tokenizer that the model was trained with",
        )
    return known


def find_directory(path: str | Path) -> Path:
    """The directory of a model: `path` itself, or that of a hub id, from the local cache first, then the network.

    Raises InputError where it is neither.
    """
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if directory.exists() or not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", str(path)):
        raise InputError("no such model directory", where=str(path), fix="give a directory or a hub id (owner/name)")
    from huggingface_hub import snapshot_download

    download = functools.partial(
        snapshot_download, str(path), allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    )
    try:
        cached = Path(download(local_files_only=True))
        if any(cached.glob("*.safetensors")):
            return cached
    except OSError:
        pass  # not in the cache: ask the hub
    try:
        return Path(download())
    except OSError as error:
        raise InputError(
            f"{path} is neither a directory nor a model in the local cache, and the hub did not give it",
            why=str(error).splitlines()[0],
            fix="check the name, your network and (for gated models) your login; or give a directory",
        ) from error


# --- where each tensor belongs -----------------------------------------------------------------------------------


class Slot(NamedTuple):
    """One Hugging Face tensor's place in the params."""

    path: tuple[str, ...]
    """Keys of the leaf."""
    row: int | None
    """Of a stacked leaf: which."""
    shape: tuple[int, ...]
    """In the Hugging Face file."""


def weight_slots(model: Model) -> dict[str, Slot]:
    """Hugging Face name -> place in the params, in the order of the layers."""
    config: DecoderConfig = model.config
    family = families.FAMILIES[json.loads(config.source)["model_type"]]
    shapes = param_shapes(model.config)
    slots = {}
    for name in WEIGHTS:
        if name in shapes:
            slots[families.weight_name(family, name, None)] = Slot((name,), None, _hf_shape(config, name))
    for layer in range(len(config.kinds)):
        repetition, place = divmod(layer, config.period)
        stacked = repetition < config.repetitions
        path = ("layers" if stacked else "tail", f"layer_{place}")
        for name in shapes[path[0]][path[1]]:
            slot = Slot((*path, name), repetition if stacked else None, _hf_shape(config, name))
            slots[families.weight_name(family, name, layer)] = slot
    return slots


def _split(config: DecoderConfig, name: str) -> tuple[int, int]:
    """(inputs, outputs) of a matrix, flattened."""
    shape = config.shape(name)
    return math.prod(shape[: -OUTPUTS[name]]), math.prod(shape[-OUTPUTS[name] :])


def _hf_shape(config: DecoderConfig, name: str) -> tuple[int, ...]:
    if name in OUTPUTS:
        return _split(config, name)[::-1]
    return (math.prod(config.shape(name)),) if name.endswith("_bias") else config.shape(name)


def _leaf(params: Params, path: tuple[str, ...]) -> Any:
    return functools.reduce(lambda tree, key: tree[key], path, params)


# --- reading -----------------------------------------------------------------------------------------------------


def load(
    path: str | Path, dtype: str = "float32", mesh: Mesh | None = None, param_dtype: str | None = None
) -> tuple[Model, Params]:
    """A model directory (or hub id) as a model that computes in `dtype`, and its weights, cut over `mesh`.

    `param_dtype` is what the weights are kept in (None: `dtype`). Each tensor goes straight to its place, so the host
    holds one tensor beside what the system maps from the files. Raises InputError for anything wrong in the directory.
    """
    directory = find_directory(path)
    model = from_config(directory, dtype, param_dtype)
    stored = check(directory, model)
    shapes = param_shapes(model.config)
    places = jax.tree.map(lambda _: SingleDeviceSharding(jax.local_devices()[0]), shapes)
    if mesh is not None:
        places = sharding.shardings(model.axes, mesh, shapes)
    members: dict[tuple[str, ...], list[safetensors_files.Stored]] = {}
    for name, slot in weight_slots(model).items():
        members.setdefault(slot.path, []).append(stored[name])

    def assemble(path, shape: jax.ShapeDtypeStruct, place: Sharding) -> Array:
        keys = tuple(key.key for key in path)
        tensors = members[keys]
        if keys[0] != "layers":
            return _place(tensors[0], model.config, keys[-1], place)
        stack = jnp.zeros(shape.shape, shape.dtype, device=place)
        for row, tensor in enumerate(tensors):
            stack = _fill(stack, _place(tensor, model.config, keys[-1], _without_layers(place)), row)
        return stack

    params = jax.tree_util.tree_map_with_path(assemble, shapes, places)
    _require_finite(directory, weight_slots(model), params)
    return model, params


@jax.jit
def _all_finite(params: Params) -> Array:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)]).all()


def _require_finite(directory: Path, slots: Mapping[str, Slot], params: Params) -> None:
    """Raises InputError naming the first tensors with NaN or infinity: a run would only say so after its first step."""
    if _all_finite(params):
        return

    def is_finite(slot: Slot) -> bool:
        leaf = _leaf(params, slot.path)
        return bool(jnp.isfinite(leaf if slot.row is None else leaf[slot.row]).all())

    names = [name for name, slot in slots.items() if not is_finite(slot)]
    raise InputError(
        f"{len(names)} of {len(slots)} tensors hold NaN or infinity",
        where=str(directory),
        why=", ".join(names[:5]),
        fix="use a checkpoint from before its training diverged",
    )


def check(directory: Path, model: Model) -> dict[str, safetensors_files.Stored]:
    """The stored tensor of each of the model's slots, from the headers alone.

    Raises InputError naming tensors missing, left over or of another shape.
    """
    slots = weight_slots(model)
    stored = {}
    for name, tensor in safetensors_files.find_tensors(directory).items():
        plain = families.plain_name(name)
        if plain is not None:
            stored[plain] = tensor
    if families.TOP_NAMES["unembedding"] not in slots:
        stored.pop(families.TOP_NAMES["unembedding"], None)  # a tied model needs none; some files have a copy
    faults = {
        "missing": [name for name in slots if name not in stored],
        "not part of the model": [name for name in stored if name not in slots],
        "of another shape": [
            f"{name} {stored[name].shape} instead of {slot.shape}"
            for name, slot in slots.items()
            if name in stored and stored[name].shape != slot.shape
        ],
    }
    if any(faults.values()):
        raise InputError(
            "the weights do not fit config.json",
            where=str(directory),
            why="; ".join(f"{len(names)} {fault}: {', '.join(names[:5])}" for fault, names in faults.items() if names),
            fix="config.json and weights must come from one model",
        )
    return stored


def _place(tensor: safetensors_files.Stored, config: DecoderConfig, name: str, place: Sharding) -> Array:
    """A stored tensor as our weight `name` on its devices; only what this process holds of it is read."""
    mapped, shape = tensor.read(), config.shape(name)
    view = (mapped.T if name in OUTPUTS else mapped).reshape(shape)
    # A copy, never the mapped file itself: arrays on the CPU may alias what they are given.
    array = jax.make_array_from_callback(shape, place, lambda part: np.array(view[part], config.param_dtype, order="C"))
    return array.block_until_ready()  # else many tensors could wait on the host at once


@functools.partial(jax.jit, donate_argnums=0)
def _fill(stack: Array, tensor: Array, row: int) -> Array:
    return jax.lax.dynamic_update_index_in_dim(stack, tensor, row, 0)


def _without_layers(place: Sharding) -> Sharding:
    """Of one layer of a stack that lies at `place`."""
    if isinstance(place, jax.NamedSharding):
        return jax.NamedSharding(place.mesh, jax.P(*place.spec[1:]))
    return place


# --- writing -----------------------------------------------------------------------------------------------------


def save(path: str | Path, model: Model, params: Params, tokenizer: Any = None) -> None:
    """Writes a model directory that transformers loads: config.json, safetensors in the params' own dtype, tokenizer.

    It is written beside `path` and renamed when whole, so `path` never holds half a model; a model directory that was
    there before is replaced. Several processes call it together and the first one writes.
    Raises InputError where `path` is something else than a model directory.
    """
    target = Path(path)
    if target.exists() and not (target / "config.json").exists() and (target.is_file() or any(target.iterdir())):
        raise InputError("will not overwrite what is not a model directory", where=str(path), fix="give a new path")
    slots = weight_slots(model)
    files = _files(slots, params)
    if jax.process_index() != 0:
        for names in files.values():  # takes part in gathering
            for _ in _tensors(model.config, slots, names, params):
                pass
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        whole = Path(scratch) / "whole"
        whole.mkdir()
        for file, names in files.items():
            layout = {name: (_dtype(params, slots[name]), slots[name].shape) for name in names}
            safetensors_files.write_file(whole / file, layout, _tensors(model.config, slots, names, params))
        if len(files) > 1:
            _write_index(whole / safetensors_files.INDEX, files, slots, params)
        _write_config(whole / "config.json", model.config)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(whole))
        if target.exists():
            target.rename(Path(scratch) / "old")
        whole.rename(target)


def _dtype(params: Params, slot: Slot) -> np.dtype:
    return np.dtype(_leaf(params, slot.path).dtype)


def _bytes(params: Params, slot: Slot) -> int:
    return math.prod(slot.shape) * _dtype(params, slot).itemsize


def _files(slots: Mapping[str, Slot], params: Params) -> dict[str, list[str]]:
    """File name -> names of the tensors in it, none over SHARD_BYTES unless by a single tensor."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, slot in slots.items():
        grown = size + _bytes(params, slot)
        if grown > SHARD_BYTES and shards[-1]:
            shards.append([])
            grown = _bytes(params, slot)
        shards[-1].append(name)
        size = grown
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, start=1)}


def _tensors(
    config: DecoderConfig, slots: Mapping[str, Slot], names: list[str], params: Params
) -> Iterator[np.ndarray]:
    """The named tensors in Hugging Face's layout, one at a time on the host."""
    from jax.experimental import multihost_utils

    for slot in map(slots.__getitem__, names):
        leaf = _leaf(params, slot.path)
        array = leaf if slot.row is None else jax.lax.dynamic_index_in_dim(leaf, slot.row, keepdims=False)
        if not array.is_fully_addressable:
            array = multihost_utils.process_allgather(array, tiled=True)
        name = slot.path[-1]
        tensor = np.asarray(array)
        yield tensor.reshape(_split(config, name)).T if name in OUTPUTS else tensor.reshape(slot.shape)


def _write_index(path: Path, files: Mapping[str, list[str]], slots: Mapping[str, Slot], params: Params) -> None:
    total = sum(_bytes(params, slot) for slot in slots.values())
    weight_map = {name: file for file, names in files.items() for name in names}
    path.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")


def _write_config(path: Path, config: DecoderConfig) -> None:
    source = json.loads(config.source)
    source.pop("dtype", None)  # the newer name of torch_dtype, which all versions read
    family = families.FAMILIES[source["model_type"]]
    source |= {"architectures": [family.architecture], "torch_dtype": config.param_dtype}
    if config.outputs:
        architecture = family.architecture.replace("ForCausalLM", families.HEAD)
        source |= {"architectures": [architecture], "num_labels": config.outputs}
    path.write_text(json.dumps(source, indent=2, sort_keys=True) + "\n")
