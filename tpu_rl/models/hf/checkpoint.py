"""Hugging Face model directories: read a model and its weights, and write them.

Weights are read and written one tensor at a time, so host memory holds one tensor beside the pages
that the operating system maps from files. With a mesh, each process reads only what its devices
hold.
"""

from __future__ import annotations

import collections
import functools
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from tpu_rl import untrusted_files
from tpu_rl.errors import InputError, located, refused
from tpu_rl.models import lora, quantization
from tpu_rl.models.config import (
    EXPERT_MATRICES,
    FLOAT32,
    LORA_A,
    LORA_B,
    QUANTIZED,
    STACKED,
    DecoderConfig,
    WeightDtype,
)
from tpu_rl.models.decoder import decoder, param_shapes
from tpu_rl.models.hf import families, mxfp4, peft, safetensors_files, stacked_experts
from tpu_rl.models.hf.mxfp4 import Mxfp4Tensor
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
from tpu_rl.models.quantization import Quantized
from tpu_rl.models.vision import towers
from tpu_rl.models.vision.config import BOUNDS, NO_BOUND, TILE_TOKEN
from tpu_rl.train import sharding
from tpu_rl.types import Array, Model, Params

SHARD_BYTES = 5_000_000_000
"""Largest file that `save` writes, unless a single tensor is larger."""

COMPARED_ROWS = 4096
"""Rows of two matrices that are compared at once. As float32, the whole matrices would be large."""


# Configurations.


def from_config(
    config: Mapping[str, Any] | str | Path,
    dtype: str = "float32",
    param_dtype: str | None = None,
    *,
    images: bool = False,
) -> Model:
    """Return the model that a Hugging Face configuration describes, without weights.

    Args:
        config: the content of a config.json, or a directory that has one. For the directory of a
            PEFT adapter it is the adapter's base model.
        dtype: the compute dtype.
        param_dtype: the dtype that weights are stored in (None: `dtype`).
        images: read images with a model that is a text model otherwise (Gemma 3 and 4).

    Raises:
        InputError: the architecture is not supported, there is no readable config.json, or the
            directory is not safe to read (see `untrusted_files`).
    """
    if isinstance(config, Mapping):
        with located("config.json"):
            return decoder(families.read_config(config, dtype, param_dtype or dtype, images=images))
    directory = Path(config)
    untrusted_files.require_safe(directory)
    if peft.is_adapter(directory):
        base_directory = peft.base_directory(directory)
        base = from_config(base_directory, dtype, param_dtype, images=images)
        adapted = peft.adapted_model(directory, base)
        return decoder(replace(adapted.config, adapters=None))
    path = directory / "config.json"
    source = untrusted_files.read_json(path)
    _refuse_remote_code(source, path)
    # In a stranger's file any value may have any type. Values of the right type that are not
    # supported raise an InputError of their own.
    kinds = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError)
    what = "config.json does not describe a model"
    with located(str(path)), refused(kinds, what, fix="download it again"):
        decoder_config = families.read_config(source, dtype, param_dtype or dtype, images=images)
    size = decoder_config.vocab.size
    valid = min(_num_known_tokens(directory, size), size)
    vision = decoder_config.vision
    if vision is not None and vision.has_tiles:
        vision = replace(vision, tile_tokens=_tile_tokens(directory))
    vocab = replace(decoder_config.vocab, valid=valid)
    return decoder(replace(decoder_config, vocab=vocab, vision=vision))


def _refuse_remote_code(source: Mapping[str, Any], path: Path) -> None:
    """Refuse a model whose own code would compute something else than its `model_type` says."""
    classes = source.get("auto_map")
    if not isinstance(classes, Mapping):
        return
    models = [name for name in classes if str(name).startswith("AutoModel")]
    if models:
        raise InputError(
            "the checkpoint brings its own code, which is never run",
            where=str(path),
            why=f"auto_map: {classes[models[0]]}"[:200],
            fix="use a checkpoint of a supported family; if this is one, remove auto_map from "
            "config.json",
        )


def _num_known_tokens(directory: Path, size: int) -> int:
    """Return the number of ids that tokenizer.json knows, added tokens included.

    Without that file, or without a vocabulary in it, this is `size`, the number of rows of the
    embedding. Special tokens may have ids beyond `size`, as the image token of Gemma 3 does,
    because text never becomes one.

    Raises:
        InputError: ordinary text has ids beyond `size`. Reading them would give another token's
            row.
    """
    with _readable_vocabulary(directory) as tokenizer:
        vocab = tokenizer.get("model", {}).get("vocab")
        if not vocab:
            return size
        added_tokens = tokenizer.get("added_tokens", [])
        special_ids = {token["id"] for token in added_tokens if token.get("special")}
        # The vocabulary of a unigram model is a list of [text, score].
        ids = set(vocab.values() if isinstance(vocab, dict) else range(len(vocab)))
        ids |= {token["id"] for token in added_tokens}
        num_known = 1 + max(ids)
        num_ordinary = 1 + max(ids - special_ids, default=0)
    if num_ordinary > size:
        raise InputError(
            f"the tokenizer knows {num_ordinary:,} ids and the model's embedding {size:,}",
            where=str(directory),
            why="tokenizer.json and vocab_size in config.json do not belong together",
            fix="use the tokenizer that the model was trained with",
        )
    return num_known


def _tile_tokens(directory: Path) -> tuple[int, ...]:
    """Return the ids of the control tokens around tiles of images.

    Raises:
        InputError: tokenizer.json is not readable.
    """
    with _readable_vocabulary(directory) as tokenizer:
        return tuple(
            int(token["id"])
            for token in tokenizer.get("added_tokens", [])
            if TILE_TOKEN.fullmatch(token["content"])
        )


@contextmanager
def _readable_vocabulary(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the content of tokenizer.json, {} without one; raise InputError if it is another."""
    path = directory / "tokenizer.json"
    tokenizer = untrusted_files.read_json(path) if path.exists() else {}
    kinds = (TypeError, ValueError, KeyError, AttributeError)
    what = "tokenizer.json has no readable vocabulary"
    with refused(kinds, what, where=str(path), fix="download it again"):
        yield tokenizer


# Reading.


def load(
    path: str | Path,
    dtype: str = "float32",
    mesh: Mesh | None = None,
    param_dtype: str | None = None,
    weight_dtype: WeightDtype | None = None,
    *,
    images: bool = False,
) -> tuple[Model, Params]:
    """Load a model and its weights from a directory or hub id.

    For the directory of a PEFT adapter, the adapter is merged into its base. Matrices are quantized
    layer by layer, so that memory never holds all of them whole; after an adapter was merged, all
    at once.

    Args:
        path: a directory, or the id of a model on the Hugging Face hub.
        dtype: the compute dtype.
        mesh: the mesh that weights are sharded over (None: they are on one device).
        param_dtype: the dtype that weights are stored in (None: `dtype`).
        weight_dtype: the type of quantized matrices (None: none are).
        images: see `from_config`.

    Raises:
        InputError: the directory is missing, damaged, not safe to read, or not supported.
    """
    directory = find_directory(path)
    if peft.is_adapter(directory):
        model, params = _load_merged(directory, dtype, mesh, param_dtype, images)
        if weight_dtype is None:
            return model, params
        quantize = jax.jit(functools.partial(quantization.quantize_tree, dtype=weight_dtype))
        return decoder(replace(model.config, weight_dtype=weight_dtype)), quantize(params)
    model = from_config(directory, dtype, param_dtype, images=images)
    stored = check(directory, model)
    shapes = param_shapes(model.config)
    target = decoder(replace(model.config, weight_dtype=weight_dtype))
    target_shapes = param_shapes(target.config)
    placements = _placements(target, target_shapes, mesh)
    shardings = _placements(model, shapes, mesh)
    parts_of_leaf = _parts_of_leaf(model, stored)

    def load_leaf(path, shape: jax.ShapeDtypeStruct, leaf_sharding: Sharding) -> Any:
        keys = tuple(key.key for key in path)
        name = keys[-1]
        parts = parts_of_leaf[keys]
        own_dtype = weight_dtype if name in QUANTIZED else None

        def read(parts: list[_StoredPart], dims: tuple[int, ...], placement: Sharding) -> Any:
            weight = _read_weight(parts, model.config, name, dims, placement)
            return weight if own_dtype is None else _quantize(name, weight, own_dtype)

        def leaf_of(tree: Any) -> Any:
            if own_dtype is None:
                return leaf_at(tree, keys)
            scale = leaf_at(tree, (*keys[:-1], quantization.scale_name(name, own_dtype)))
            return Quantized(leaf_at(tree, keys), scale)

        if keys[0] not in STACKED:
            leaf = read(parts, shape.shape, leaf_sharding)
            return jax.tree.map(jax.device_put, leaf, leaf_of(placements))
        stack = jax.tree.map(
            lambda shape, placement: jnp.zeros(shape.shape, shape.dtype, device=placement),
            leaf_of(target_shapes),
            leaf_of(placements),
        )
        num_layers, *layer_shape = shape.shape
        per_layer = len(parts) // num_layers  # in a mixture, one for each expert
        for layer in range(num_layers):
            layer_parts = parts[layer * per_layer : (layer + 1) * per_layer]
            weight = read(layer_parts, tuple(layer_shape), _layer_sharding(leaf_sharding))
            stack = _set_layer(stack, weight, layer)
        return stack

    leaves = jax.tree_util.tree_map_with_path(load_leaf, shapes, shardings)
    params = quantization.with_scales(leaves)
    _require_finite(directory, stored, params)
    return target, params


def _parts_of_leaf(
    model: Model, stored: Mapping[str, StoredTensor | Mxfp4Tensor]
) -> dict[tuple[str, ...], list[_StoredPart]]:
    """Return path of a leaf -> the stored parts of its layers, and of their experts, in order."""
    parts: dict[tuple[str, ...], list[_StoredPart]] = {}
    for name, file_tensor in weight_locations(model).items():
        for location in file_tensor.locations:
            part = _StoredPart(stored[name], location)
            parts.setdefault(location.path, []).append(part)
    return parts


def _placements(model: Model, shapes: Any, mesh: Mesh | None) -> Any:
    """Return the sharding of each leaf; without a mesh, the first device of this process."""
    if mesh is not None:
        return sharding.shardings(model.axes, mesh, shapes)
    device = SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda _: device, shapes)


_quantize = jax.jit(quantization.quantize, static_argnums=(0, 2))


def _load_merged(
    directory: Path, dtype: str, mesh: Mesh | None, param_dtype: str | None, images: bool
) -> tuple[Model, Params]:
    """Load an adapter's base, with the adapter merged into it."""
    untrusted_files.require_safe(directory)
    base, params = load(peft.base_directory(directory), dtype, mesh, param_dtype, images=images)
    adapted, adapters = peft.load_adapters(directory, base, mesh)
    joined = lora.join(params, adapters)
    if adapted.config.num_outputs:
        joined.pop("unembedding", None)
    return lora.merge(adapted, joined, donate=True)


def check(directory: Path, model: Model) -> dict[str, StoredTensor | Mxfp4Tensor]:
    """Return Hugging Face name -> stored tensor for all weights of the model.

    Only headers are read, and of a tied model with an unembedding in its files these two. For the
    directory of an adapter, these are the tensors of its base.

    Raises:
        InputError: tensors are missing, are left over, have another shape, or are not tied; it
            names them.
    """
    if peft.is_adapter(directory):
        base_directory = peft.base_directory(directory)
        base = from_config(base_directory, images=model.config.vision is not None)
        peft.adapted_model(directory, base)
        return check(base_directory, base)
    file_tensors = weight_locations(model)
    stored = _model_tensors(directory, has_vision=model.config.vision is not None)
    unembedding = families.TOP_NAMES["unembedding"]
    if unembedding not in file_tensors:
        # A tied model needs none, but some files have a copy of the embedding.
        stored.pop(unembedding, None)
    if model.config.vocab.tied and model.config.num_outputs is None:
        _require_tied(directory)
    family = families.family_of(model.config)
    if any("{expert}" in name for name in family.names.values()):
        stored = stacked_experts.split(stored)
    for name in families.unused_names(model.config, stored):
        del stored[name]
    shapes = {name: file_tensor.shape for name, file_tensor in file_tensors.items()}
    if family.experts_may_be_turned:
        stored = stacked_experts.turned(stored, shapes)
    require_fit(directory, shapes, stored, "config.json")
    return stored


def file_dtype(directory: Path) -> str:
    """Return the dtype of most numbers in the files of a model: float32, bfloat16 or float16.

    Only headers are read. For the directory of an adapter, these are the files of its base.

    Raises:
        InputError: the files are missing or damaged, or have another dtype.
    """
    if peft.is_adapter(directory):
        return file_dtype(peft.base_directory(directory))
    numbers: collections.Counter[str] = collections.Counter()
    for tensor in mxfp4.join(safetensors_files.find_tensors(directory)).values():
        numbers[tensor.code] += math.prod(tensor.shape)
    code = max(numbers, key=lambda code: numbers[code], default="")
    for name, dtype in safetensors_files.DTYPE_NAMES.items():
        if safetensors_files.DTYPE_CODES[dtype] == code:
            return name
    raise InputError(
        f"tensors of type {code or 'unknown'} are not supported",
        where=str(directory),
        fix=f"use a checkpoint with tensors of type {', '.join(safetensors_files.DTYPES)}",
    )


def _model_tensors(
    directory: Path, has_vision: bool = False
) -> dict[str, StoredTensor | Mxfp4Tensor]:
    """Return the tensors of the language model, by the names that a text model has for them.

    With `has_vision`, also those that read images.
    """
    tensors = {}
    for name, tensor in mxfp4.join(safetensors_files.find_tensors(directory)).items():
        plain_name = families.plain_name(name)
        if has_vision:
            plain_name = plain_name or towers.plain_name(name)
        if plain_name is not None:
            tensors[plain_name] = tensor
    return tensors


def _require_tied(directory: Path) -> None:
    """Check that a tied model's files have no unembedding that differs from the embedding."""
    stored = _model_tensors(directory)
    stored_embedding = stored.get(families.TOP_NAMES["embedding"])
    stored_unembedding = stored.get(families.TOP_NAMES["unembedding"])
    if stored_embedding is None or stored_unembedding is None:
        return
    embedding = stored_embedding.read()
    unembedding = stored_unembedding.read()
    if not _are_equal(embedding, unembedding):
        raise InputError(
            "lm_head.weight is not the embedding, though config.json ties the two",
            where=str(directory),
            why="transformers would compute logits with lm_head.weight, a tied model with the "
            "embedding",
            fix="set tie_word_embeddings to false in config.json",
        )


def _are_equal(first: np.ndarray, second: np.ndarray) -> bool:
    """Return True if two matrices are equal as float32."""
    if first.shape != second.shape:
        return False
    for start in range(0, len(first), COMPARED_ROWS):
        rows = slice(start, start + COMPARED_ROWS)
        first_rows = first[rows].astype(np.float32)
        second_rows = second[rows].astype(np.float32)
        if not np.array_equal(first_rows, second_rows, equal_nan=True):
            return False
    return True


@jax.jit
def _all_finite(params: Params) -> Array:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)]).all()


def _with_finite_bounds(name: str, weight: np.ndarray) -> np.ndarray:
    """Return a stored weight as params have it: without infinite bounds (`NO_BOUND`)."""
    if not name.replace(".", "_").endswith(BOUNDS):
        return weight
    return np.clip(np.asarray(weight, np.float32), -NO_BOUND, NO_BOUND)


def _require_finite(
    directory: Path, stored: Mapping[str, StoredTensor | Mxfp4Tensor], params: Params
) -> None:
    """Check that no weight is NaN or infinite, which a run would only notice after a step.

    A matrix that was quantized has such a scale then.
    """
    if _all_finite(params):
        return
    names = [
        name
        for name, tensor in stored.items()
        if not np.isfinite(_with_finite_bounds(name, tensor.read())).all()
    ]
    raise InputError(
        f"{len(names)} of {len(stored)} tensors hold NaN or infinity",
        where=str(directory),
        why=", ".join(names[:5]),
        fix="use a checkpoint from before its training diverged",
    )


class _StoredPart(NamedTuple):
    """A part of a stored tensor, or all of it."""

    tensor: StoredTensor | Mxfp4Tensor
    location: WeightLocation

    def read(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return the part in our layout, where it has this shape; memory-mapped."""
        part = self.tensor.read()[self.location.part]
        return (part.swapaxes(-1, -2) if self.location.is_transposed else part).reshape(shape)


def _read_weight(
    parts: list[_StoredPart],
    config: DecoderConfig,
    name: str,
    shape: tuple[int, ...],
    weight_sharding: Sharding,
) -> Array:
    """Read the weight `name` of one layer, or outside of layers, to its devices.

    `parts` is one part, or one for each expert. This process reads only what it holds.
    """
    is_expert = name in EXPERT_MATRICES and len(parts[0].location.shape) < len(shape)
    views = [part.read(shape[1:] if is_expert else shape) for part in parts]

    # These are copies, never the mapped file itself: arrays on CPUs may alias what they are given.
    def read_shard(index: Any) -> np.ndarray:
        if is_expert:
            experts = views[index[0]]
            return np.stack([view[index[1:]].astype(config.param_dtype) for view in experts])
        view = _with_finite_bounds(name, views[0][index])
        return np.array(view, config.stored_dtype(name), order="C")

    weight = jax.make_array_from_callback(shape, weight_sharding, read_shard)
    # Otherwise many tensors could wait on the host.
    return weight.block_until_ready()


@functools.partial(jax.jit, donate_argnums=0)
def _set_layer(stack: Any, weight: Any, layer: int) -> Any:
    """Return the stacked arrays with those of one layer."""
    update = functools.partial(jax.lax.dynamic_update_index_in_dim, index=layer, axis=0)
    return jax.tree.map(update, stack, weight)


def _layer_sharding(stack_sharding: Sharding) -> Sharding:
    """Return the sharding of one layer of a stack."""
    if isinstance(stack_sharding, jax.NamedSharding):
        return jax.NamedSharding(stack_sharding.mesh, jax.P(*stack_sharding.spec[1:]))
    return stack_sharding


# Writing.


def save(
    path: str | Path,
    model: Model,
    params: Params,
    tokenizer: Any = None,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
    card: str | None = None,
) -> None:
    """Write a model directory that transformers loads.

    It has config.json, and safetensors in `dtype` (None: the dtype of the params), in files of at
    most `max_shard_bytes` (None: SHARD_BYTES), and README.md with the text `card`. With `tokenizer`
    it has the tokenizer's files and generation_config.json, so that completions end at the same
    tokens. Adapters are merged into the weights (`save_adapters` writes them alone). An OLMoE or
    a Granite with a head can only be loaded by this library, because transformers has no such
    class.

    The directory is written beside `path` and then renamed, so `path` is never incomplete. A model
    directory that was there before is replaced. All processes must call this together; the first
    one writes.

    Raises:
        InputError: `path` exists and is not a model directory, or a weight is too large for
            `dtype`.
    """
    require_replaceable(path, "config.json")
    file_tensors = _written_tensors(model)
    layout = {
        name: (_file_dtype(model.config, params, file_tensor, dtype), file_tensor.shape)
        for name, file_tensor in file_tensors.items()
    }
    files = assign_files(layout, max_shard_bytes or SHARD_BYTES)

    read = functools.partial(_merged_tensor, model.config, params)

    def tensors_of(names: list[str]) -> Iterator[np.ndarray]:
        """Yield the named tensors, one at a time; all processes must iterate together."""
        for name in names:
            yield _cast(name, gathered(file_tensors[name], read), layout[name][0])

    if jax.process_index() != 0:
        # Take part in the first process's collective operations.
        for names in files.values():
            for _ in tensors_of(names):
                pass
        return
    with atomic_directory(path) as directory:
        for file, names in files.items():
            file_layout = {name: layout[name] for name in names}
            safetensors_files.write_file(directory / file, file_layout, tensors_of(names))
        if len(files) > 1:
            write_index(directory / safetensors_files.INDEX, files, layout)
        _write_config(directory / "config.json", model.config, dtype or model.config.param_dtype)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(directory))
        if card is not None:
            (directory / "README.md").write_text(card, encoding="utf-8")


def _written_tensors(model: Model) -> dict[str, FileTensor]:
    """Return `weight_locations`, by the names that files have for them."""
    tensors = weight_locations(model)
    if model.config.vision is None:
        return tensors
    return {
        towers.written_name(model.config.vision, name): tensor for name, tensor in tensors.items()
    }


Layout = Mapping[str, tuple[np.dtype, tuple[int, ...]]]
"""Name of a tensor -> its dtype and its shape in the file."""


def _file_dtype(
    config: DecoderConfig, params: Params, file_tensor: FileTensor, dtype: str | None
) -> np.dtype:
    """Return the dtype of a tensor in the file: `dtype`, or that of the params if it is None.

    Quantized matrices are written whole, in `param_dtype` then.
    """
    path = file_tensor.locations[0].path
    if dtype is None and config.weight_dtype is not None and path[-1] in QUANTIZED:
        return np.dtype(jnp.dtype(config.param_dtype))
    if dtype is None or path[-1] in FLOAT32:
        return np.dtype(leaf_at(params, path).dtype)
    return safetensors_files.DTYPE_NAMES[dtype]


def _cast(name: str, tensor: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return a tensor in the dtype of the file.

    Raises:
        InputError: a finite number is too large for it.
    """
    if tensor.dtype == dtype:
        return tensor
    with np.errstate(over="ignore"):
        narrow = tensor.astype(dtype)
    if not np.array_equal(np.isfinite(narrow), np.isfinite(tensor)):
        raise InputError(
            f"{name} does not fit {dtype.name}",
            where="--dtype",
            why=f"its largest number is {np.abs(tensor.astype(np.float32)).max():.4g}",
            fix="use bfloat16 or float32",
        )
    return narrow


def _num_bytes(layout: Layout, name: str) -> int:
    dtype, shape = layout[name]
    return math.prod(shape) * dtype.itemsize


def assign_files(layout: Layout, max_shard_bytes: int) -> dict[str, list[str]]:
    """Return file name -> names of its tensors.

    No file has more than `max_shard_bytes` of tensors, unless a single tensor is larger.
    """
    shards: list[list[str]] = [[]]
    shard_bytes = 0
    for name in layout:
        tensor_bytes = _num_bytes(layout, name)
        if shard_bytes + tensor_bytes > max_shard_bytes and shards[-1]:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += tensor_bytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {
        f"model-{i:05d}-of-{len(shards):05d}.safetensors": names
        for i, names in enumerate(shards, start=1)
    }


def _merged_tensor(config: DecoderConfig, params: Params, location: WeightLocation) -> Array:
    """Return the tensor at a location, with its adapter merged into it."""
    name = location.path[-1]

    def tensor_named(leaf_name: str) -> Array:
        return tensor_at(params, location._replace(path=(*location.path[:-1], leaf_name)))

    weight = tensor_named(name)
    if config.weight_dtype is not None and name in QUANTIZED:
        scale = tensor_named(quantization.scale_name(name, config.weight_dtype))
        quantized = Quantized(weight, scale)
        weight = quantization.dequantize(name, quantized, config.param_dtype)
    if config.adapter_scale(name) is None:
        return weight
    a = tensor_named(name + LORA_A)
    b = tensor_named(name + LORA_B)
    return lora.merged_weight(config, name, weight, a, b)


def write_index(path: Path, files: Mapping[str, list[str]], layout: Layout) -> None:
    index = {
        "metadata": {"total_size": sum(_num_bytes(layout, name) for name in layout)},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    path.write_text(json.dumps(index, indent=2) + "\n")


def _write_config(path: Path, config: DecoderConfig, dtype: str) -> None:
    source = json.loads(config.source)
    # The newer name of torch_dtype, which all versions of transformers read.
    source.pop("dtype", None)
    # The weights in the files are not quantized any more.
    source.pop("quantization_config", None)
    # Modules for several tokens at once were not read (see `families.beyond_last_layer`).
    source |= {name: 0 for name in families.MTP_FIELDS if source.get(name)}
    family = families.family_of(config)
    source |= {"architectures": [family.architecture], "torch_dtype": dtype}
    if config.num_outputs:
        source |= {"architectures": [family.head_architecture], "num_labels": config.num_outputs}
        # Labels of another number of outputs belong to a head that the model had before.
        if len(source.get("id2label") or ()) != config.num_outputs:
            for name in ("id2label", "label2id", "problem_type"):
                source.pop(name, None)
    if config.vision is not None:
        outer = json.loads(config.vision.source)
        outer.pop("dtype", None)
        source = outer | {"text_config": source, "torch_dtype": dtype}
    path.write_text(json.dumps(source, indent=2, sort_keys=True) + "\n")
