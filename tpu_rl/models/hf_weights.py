"""Hugging Face model directories, read and written tensor by tensor: host memory holds one of them at a time."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from tpu_rl import model_files, sharding
from tpu_rl.errors import InputError
from tpu_rl.models import families, lora, peft_files, safetensors_files
from tpu_rl.models.architecture import EXPERT_MATRICES, LORA_A, LORA_B, OUTPUTS, DecoderConfig
from tpu_rl.models.decoder import decoder, param_shapes
from tpu_rl.models.directories import find_directory, require_replaceable, written_whole
from tpu_rl.models.slots import Slot, leaf_at, require_fit, tensor_of, weight_slots
from tpu_rl.types import Array, Model, Params

SHARD_BYTES = 5_000_000_000
"""Largest file that `save` writes, unless a single tensor is larger."""


# --- configurations ----------------------------------------------------------------------------------------------


def from_config(
    config: Mapping[str, Any] | str | Path, dtype: str = "float32", param_dtype: str | None = None
) -> Model:
    """The model that a Hugging Face configuration describes: a dict, or a directory with config.json, or with that of a
    PEFT adapter, which describes its base. No weights.

    `dtype` is what it computes in, `param_dtype` what its weights are kept in (None: the same).
    Raises InputError where the architecture is not supported, the directory has no readable config.json, or its files
    are not safe to read (`model_files`).
    """
    if isinstance(config, Mapping):
        return decoder(families.read_config(config, dtype, param_dtype or dtype))
    directory = Path(config)
    model_files.require_safe(directory)
    if peft_files.is_adapter(directory):
        base = from_config(peft_files.base_directory(directory), dtype, param_dtype)
        adapted = peft_files.adapted_model(directory, base)
        return decoder(replace(adapted.config, adapters=None))
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
    another token's row. Special tokens may lie beyond, as the image token of Gemma 3 does: text never becomes one.
    """
    path = directory / "tokenizer.json"
    if not path.exists():
        return size
    tokenizer = model_files.read_json(path)
    try:
        vocab = tokenizer.get("model", {}).get("vocab")
        if not vocab:
            return size
        added = tokenizer.get("added_tokens", [])
        special = {token["id"] for token in added if token.get("special")}
        # Of a unigram model the vocabulary is a list of [text, score].
        ids = set(vocab.values() if isinstance(vocab, dict) else range(len(vocab))) | {token["id"] for token in added}
        known, ordinary = 1 + max(ids), 1 + max(ids - special, default=0)
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


# --- reading -----------------------------------------------------------------------------------------------------


def load(
    path: str | Path, dtype: str = "float32", mesh: Mesh | None = None, param_dtype: str | None = None
) -> tuple[Model, Params]:
    """A model directory (or hub id) as a model that computes in `dtype`, and its weights, cut over `mesh`.

    Adapters in PEFT's form are merged into their base. `param_dtype` is what the weights are kept in (None: `dtype`).
    Each tensor goes straight to its place, so the host holds one tensor beside what the system maps from the files.
    Raises InputError for anything wrong in the directory.
    """
    directory = find_directory(path)
    if peft_files.is_adapter(directory):
        return _load_merged(directory, dtype, mesh, param_dtype)
    model = from_config(directory, dtype, param_dtype)
    stored = check(directory, model)
    if model.config.vocab.tied and model.config.outputs is None:
        _require_tied(directory)
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
            return _place(tensors, model.config, keys[-1], place)
        stack = jnp.zeros(shape.shape, shape.dtype, device=place)
        each = len(tensors) // shape.shape[0]  # of a mixture, a layer's experts
        for row in range(shape.shape[0]):
            own = tensors[row * each : (row + 1) * each]
            stack = _fill(stack, _place(own, model.config, keys[-1], _without_layers(place)), row)
        return stack

    params = jax.tree_util.tree_map_with_path(assemble, shapes, places)
    _require_finite(directory, weight_slots(model), params)
    return model, params


def _load_merged(directory: Path, dtype: str, mesh: Mesh | None, param_dtype: str | None) -> tuple[Model, Params]:
    """An adapter's base with what the adapter adds: the model that its directory stands for."""
    model_files.require_safe(directory)
    base, params = load(peft_files.base_directory(directory), dtype, mesh, param_dtype)
    adapted, adapters = peft_files.load_adapters(directory, base, mesh)
    whole = lora.join(params, adapters)
    if adapted.config.outputs:
        whole.pop("unembedding", None)
    return lora.merge(adapted, whole, donate=True)


def _require_tied(directory: Path) -> None:
    """Raises InputError where a tied model's file has an unembedding that is not its embedding."""
    stored = _plain_tensors(directory)
    ends = [stored.get(families.TOP_NAMES[name]) for name in ("embedding", "unembedding")]
    one, other = (None if tensor is None else tensor.read() for tensor in ends)
    if one is None or other is None:
        return
    pieces = [slice(start, start + 4096) for start in range(0, len(one), 4096)]  # rows: as float32 all would be large
    if one.shape != other.shape or any(
        not np.array_equal(one[rows].astype(np.float32), other[rows].astype(np.float32), equal_nan=True)
        for rows in pieces
    ):
        raise InputError(
            "lm_head.weight is not the embedding, though config.json ties the two",
            where=str(directory),
            why="transformers would compute logits with lm_head.weight, and a tied model with the embedding",
            fix="set tie_word_embeddings to false in config.json",
        )


@jax.jit
def _all_finite(params: Params) -> Array:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)]).all()


def _require_finite(directory: Path, slots: Mapping[str, Slot], params: Params) -> None:
    """Raises InputError naming the first tensors with NaN or infinity: a run would only say so after its first step."""
    if _all_finite(params):
        return

    def is_finite(slot: Slot) -> bool:
        return bool(jnp.isfinite(tensor_of(params, slot)).all())

    names = [name for name, slot in slots.items() if not is_finite(slot)]
    raise InputError(
        f"{len(names)} of {len(slots)} tensors hold NaN or infinity",
        where=str(directory),
        why=", ".join(names[:5]),
        fix="use a checkpoint from before its training diverged",
    )


def check(directory: Path, model: Model) -> dict[str, safetensors_files.Stored]:
    """The stored tensor of each of the model's slots, from the headers alone.

    Of an adapter, those of its base. Raises InputError naming tensors missing, left over or of another shape.
    """
    if peft_files.is_adapter(directory):
        place = peft_files.base_directory(directory)
        base = from_config(place)
        peft_files.adapted_model(directory, base)
        return check(place, base)
    slots, stored = weight_slots(model), _plain_tensors(directory)
    if families.TOP_NAMES["unembedding"] not in slots:
        stored.pop(families.TOP_NAMES["unembedding"], None)  # a tied model needs none; some files have a copy
    require_fit(directory, {name: slot.shape for name, slot in slots.items()}, stored, "config.json")
    return stored


def _plain_tensors(directory: Path) -> dict[str, safetensors_files.Stored]:
    """By the names that a text model has."""
    tensors = ((families.plain_name(name), one) for name, one in safetensors_files.find_tensors(directory).items())
    return {name: tensor for name, tensor in tensors if name is not None}


def _place(tensors: list[safetensors_files.Stored], config: DecoderConfig, name: str, place: Sharding) -> Array:
    """Stored tensors (one, or an expert each) as our weight `name` on its devices; only what this process holds of
    them is read."""
    shape, transposed = config.shape(name), name in (*OUTPUTS, *EXPERT_MATRICES)
    inner = shape[1:] if name in EXPERT_MATRICES else shape
    views = [(mapped.T if transposed else mapped).reshape(inner) for mapped in (one.read() for one in tensors)]

    # Copies, never the mapped file itself: arrays on the CPU may alias what they are given.
    def read(part: Any) -> np.ndarray:
        if name in EXPERT_MATRICES:
            return np.stack([view[part[1:]].astype(config.param_dtype) for view in views[part[0]]])
        return np.array(views[0][part], config.param_dtype, order="C")

    return jax.make_array_from_callback(shape, place, read).block_until_ready()  # else many could wait on the host


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
    """Writes a model directory that transformers loads: config.json, safetensors in the params' own dtype, tokenizer,
    and with that generation_config.json, so that completions end where they did. (An OLMoE with a head is read here
    alone: transformers has none.)

    Adapters are merged into the weights (`save_adapters` writes them alone). The directory is written beside `path` and
    renamed when whole, so `path` never holds half a model; a model directory that was there before is replaced. Several
    processes call it together and the first one writes.
    Raises InputError where `path` is something else than a model directory.
    """
    require_replaceable(path, "config.json")
    slots = weight_slots(model)
    files = _files(slots, params)
    if jax.process_index() != 0:
        for names in files.values():  # takes part in gathering
            for _ in _tensors(model.config, slots, names, params):
                pass
        return
    with written_whole(path) as whole:
        for file, names in files.items():
            layout = {name: (_dtype(params, slots[name]), slots[name].shape) for name in names}
            safetensors_files.write_file(whole / file, layout, _tensors(model.config, slots, names, params))
        if len(files) > 1:
            _write_index(whole / safetensors_files.INDEX, files, slots, params)
        _write_config(whole / "config.json", model.config)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(whole))


def _dtype(params: Params, slot: Slot) -> np.dtype:
    return np.dtype(leaf_at(params, slot.path).dtype)


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
        array = _merged(config, params, slot)
        if not array.is_fully_addressable:
            array = multihost_utils.process_allgather(array, tiled=True)
        name, tensor = slot.path[-1], np.asarray(array)
        if name in (*OUTPUTS, *EXPERT_MATRICES):
            yield tensor.reshape(slot.shape[::-1]).T
        else:
            yield tensor.reshape(slot.shape)


def _merged(config: DecoderConfig, params: Params, slot: Slot) -> Array:
    """A slot's weight, with what its adapter adds where it has one."""

    def of_row(name: str) -> Array:
        return tensor_of(params, slot._replace(path=(*slot.path[:-1], name)))

    name = slot.path[-1]
    if config.adapter_scale(name) is None:
        return of_row(name)
    return lora.merged_weight(config, name, of_row(name), of_row(name + LORA_A), of_row(name + LORA_B))


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
        source |= {"architectures": [family.head_architecture], "num_labels": config.outputs}
        if len(source.get("id2label") or ()) != config.outputs:  # of the model before it had this head
            for name in ("id2label", "label2id", "problem_type"):
                source.pop(name, None)
    path.write_text(json.dumps(source, indent=2, sort_keys=True) + "\n")
