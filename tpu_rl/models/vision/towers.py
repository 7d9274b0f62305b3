"""The families of towers: how each is read, its forward pass, and its tensors in files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from tpu_rl import lazy, plain_values
from tpu_rl.models.config import DecoderConfig
from tpu_rl.models.hf.checks import require_size
from tpu_rl.models.vision.config import BOUNDS, LAYERS, MERGERS, TOP, AnyVisionConfig
from tpu_rl.models.vision.features import Features
from tpu_rl.types import Array, Params

PROJECTOR = "multi_modal_projector."

OLDER_PREFIXES = {
    "connector.": PROJECTOR,
    "vision_tower.vision_model.": "vision_tower.",
    "vision_model.": "vision_tower.",
}
"""Beginnings of names of tensors in some files -> those of `Tower`."""

PREFIXES = ("vision_tower.", PROJECTOR, "embed_vision.", "visual.")


@dataclasses.dataclass(frozen=True)
class Tower:
    """A family of towers: how it is read and computed, and the names of its tensors in files.

    A module ends with a dot, and "weight" or "bias" follows it. Other names are whole.
    """

    kind: str
    """`KIND_files.py` reads its configuration, and `KIND.py` computes its features."""
    top: Mapping[str, str]
    """Weight outside of layers -> tensor or module."""
    layer: Mapping[str, str]
    """Weight of a layer -> tensor or module behind `layer_prefix`."""
    layer_prefix: str = "vision_tower.encoder.layers.{}."
    merger: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The same for the projectors that DeepStack reads."""
    merger_prefix: str = ""
    outer_axes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Weight -> number of axes of size 1 that it begins with in files."""
    transposed: Sequence[str] = ()
    """Matrices that are [inputs, outputs] in files."""
    written: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {
            **{prefix: f"model.{prefix}" for prefix in PREFIXES},
            "model.": "model.language_model.",
        }
    )
    """Beginning of a tensor's name -> its beginning in files that are written. The first that fits
    is taken."""
    text_prefix: str = "model.language_model."
    """The beginning of the names that the text's modules have in transformers."""
    text: Mapping[str, Any] | None = None
    """transformers' defaults for fields that a text_config leaves out, of a model that always reads
    images; None: it reads them if it is asked to."""
    image_token: int = 0
    """transformers' default of the id of the token that stands for an image, of squares."""
    projector: Literal["mlp", "pooled", "shuffled", "shuffled_mlp"] = "mlp"
    """See `SquareVisionConfig`."""
    tower: str | None = None
    """A key of `VISION_CONFIGS` for a vision_config of squares that does not name one."""
    reads_layer: bool = False
    """True if the configuration says which layer's states are features, and how they become so."""


def _read_towers() -> dict[str, Tower]:
    rows = plain_values.read_tables([Path(__file__).with_name("towers.yaml")], base="like")
    return {name: Tower(**row) for name, row in rows.items() if name != "clip"}


TOWERS = _read_towers()
"""`model_type` -> tower."""

VISION_CONFIGS = plain_values.read_tables(
    [Path(__file__).with_name("vision_configs.yaml")], base="like"
)
"""Kind of tower -> transformers' defaults for fields that a vision_config leaves out."""

ACTIVATIONS = {
    "quick_gelu": "quick_gelu",
    "gelu": "gelu_exact",
    "gelu_pytorch_tanh": "gelu",
    "silu": "silu",
}
"""Hugging Face's name -> key of `layers.ACTIVATIONS`."""

LARGEST_SIZE = 65_536


def with_defaults(kind: str, tower: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a vision_config with the defaults of its kind, in `VISION_CONFIGS`.

    Raises InputError if one of the sizes is out of range.
    """
    defaults = VISION_CONFIGS[kind]
    fields = defaults | {name: value for name, value in tower.items() if value is not None}
    for name, default in defaults.items():
        if type(default) is int:
            require_size(f"vision_config.{name}", fields[name], LARGEST_SIZE)
    return fields


def with_tokens(source: Mapping[str, Any], defaults: Mapping[str, int]) -> dict[str, int]:
    """Return the ids of tokens in a configuration, which may leave out those with defaults."""
    return {name: int(source.get(name) or default) for name, default in defaults.items()}


KINDS = ("square", "qwen", "gemma4")
READERS: lazy.LazyTable[Callable[[Mapping[str, Any], int], AnyVisionConfig]] = lazy.LazyTable(
    lambda module, kind: module.read, {kind: f"tpu_rl.models.vision.{kind}_files" for kind in KINDS}
)
"""Kind -> (the whole configuration, dimensions of the text) -> the vision part."""
FORWARDS: lazy.LazyTable[Callable[[DecoderConfig, Params, Array], Features]] = lazy.LazyTable(
    lambda module, kind: module.features, {kind: f"tpu_rl.models.vision.{kind}" for kind in KINDS}
)
"""Kind -> (config, params, pieces of images) -> their features."""


def read(model_type: str, outer: Mapping[str, Any], text_size: int) -> AnyVisionConfig:
    """Read the vision part of a configuration, for a text of `text_size` dimensions."""
    return READERS[TOWERS[model_type].kind](outer, text_size)


def features(config: DecoderConfig, params: Params, images: Array) -> Features:
    """Compute the features of pieces of images [I, ...] (see `tokenizers.images`).

    The pixels are those of the image processor: scaled and normalized.
    """
    assert config.vision is not None
    return FORWARDS[TOWERS[config.vision.model_type].kind](config, params, images)


def param_shapes(config: DecoderConfig) -> dict[str, Any]:
    """Return the vision parts of a model's params with shapes and dtypes in place of arrays."""
    vision = config.vision
    assert vision is not None

    def leaves(names: list[str], *stack: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            name: jax.ShapeDtypeStruct((*stack, *config.shape(name)), config.stored_dtype(name))
            for name in names
        }

    names = vision.weight_names
    shapes = {TOP: leaves(names.top), LAYERS: {"layer_0": leaves(names.layer, vision.num_layers)}}
    if names.merger:
        shapes[MERGERS] = {"layer_0": leaves(names.merger, len(vision.deep_layers))}
    return shapes


class StoredWeight(NamedTuple):
    """The place of a vision weight in files and in the params."""

    file_name: str
    """Weights with the same name are one tensor there: the rows of the first weight come first."""
    path: tuple[str, ...]
    index: tuple[int, ...]
    """The layer in a stacked leaf."""
    shape: tuple[int, ...]
    """Shape in the file."""
    is_transposed: bool


def stored_weights(config: DecoderConfig) -> Iterator[StoredWeight]:
    """Yield the place of each vision weight, in the order in which files have them."""
    vision = config.vision
    assert vision is not None
    files = TOWERS[vision.model_type]
    names = vision.weight_names

    def stored(
        weights: list[str], path: tuple[str, ...], index: tuple[int, ...], prefix: str, modules: Any
    ) -> Iterator[StoredWeight]:
        for name in weights:
            is_transposed = name in files.transposed
            shape = config.shape(name)
            shape = (1,) * files.outer_axes.get(name, 0) + shape[:: -1 if is_transposed else 1]
            file_name = prefix + _name_in(modules, name)
            yield StoredWeight(file_name, (*path, name), index, shape, is_transposed)

    yield from stored(names.top, (TOP,), (), "", files.top)
    for path, weights, prefix, modules, count in (
        (LAYERS, names.layer, files.layer_prefix, files.layer, vision.num_layers),
        (MERGERS, names.merger, files.merger_prefix, files.merger, len(vision.deep_layers)),
    ):
        for number in range(count):
            yield from stored(weights, (path, "layer_0"), (number,), prefix.format(number), modules)


def _name_in(modules: Mapping[str, str], name: str) -> str:
    """Return the name of a weight's tensor, from its module or that of its bias or bound."""
    if name in modules:
        module = modules[name]
        return f"{module}weight" if module.endswith(".") else module
    if name.endswith("_bias"):
        return modules[name.removesuffix("_bias")] + "bias"
    bound = next(suffix for suffix in BOUNDS if name.endswith(suffix))
    return modules[name.removesuffix(bound)].removesuffix("linear.") + bound[1:]


def plain_name(name: str) -> str | None:
    """Return the name as `stored_weights` has it, for newer and older files; None if none."""
    plain = name.removeprefix("model.")
    older = next((prefix for prefix in OLDER_PREFIXES if plain.startswith(prefix)), "")
    plain = OLDER_PREFIXES.get(older, "") + plain.removeprefix(older)
    is_read = plain.startswith(PREFIXES) and not plain.startswith("vision_tower.head.")
    return plain if is_read else None


def written_name(vision: AnyVisionConfig, name: str) -> str:
    """Return the name that files have for a tensor of a model that reads images."""
    for prefix, written in TOWERS[vision.model_type].written.items():
        if name.startswith(prefix):
            return written + name.removeprefix(prefix)
    return name


def text_prefix(vision: AnyVisionConfig | None) -> str:
    """Return the beginning of the names that the text's modules have in transformers."""
    return Tower.text_prefix if vision is None else TOWERS[vision.model_type].text_prefix
