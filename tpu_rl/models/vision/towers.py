"""The families of towers: how each is read, its forward pass, and its tensors in files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from tpu_rl import lazy
from tpu_rl.models.config import DecoderConfig
from tpu_rl.models.vision.config import BOUNDS, LAYERS, MERGERS, TOP, AnyVisionConfig
from tpu_rl.models.vision.features import Features
from tpu_rl.types import Array, Params

PROJECTOR = "multi_modal_projector."

OLDER_PREFIXES = {
    "connector.": PROJECTOR,
    "vision_tower.vision_model.": "vision_tower.",
    "vision_model.": "vision_tower.",
}
"""Beginnings of names of tensors in some files -> those of `FileNames`."""

PREFIXES = ("vision_tower.", PROJECTOR, "embed_vision.", "visual.")


@dataclasses.dataclass(frozen=True)
class FileNames:
    """The names of a tower's tensors in files.

    A module ends with a dot, and "weight" or "bias" follows it. Other names are whole.
    """

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
    transposed: tuple[str, ...] = ()
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


LLAVA_WRITTEN = {"vision_tower.": "vision_tower.", PROJECTOR: PROJECTOR, "": "language_model."}

CLIP_TOP = {
    "vision_class": "vision_tower.embeddings.class_embedding",
    "vision_patch": "vision_tower.embeddings.patch_embedding.",
    "vision_position": "vision_tower.embeddings.position_embedding.",
    "vision_first_norm": "vision_tower.pre_layrnorm.",
    "vision_last_norm": "vision_tower.post_layernorm.",
    "projector_in": "multi_modal_projector.linear_1.",
    "projector_out": "multi_modal_projector.linear_2.",
}
CLIP_LAYER = {
    "vision_attention_norm": "layer_norm1.",
    "vision_query": "self_attn.q_proj.",
    "vision_key": "self_attn.k_proj.",
    "vision_value": "self_attn.v_proj.",
    "vision_output": "self_attn.out_proj.",
    "vision_mlp_norm": "layer_norm2.",
    "vision_up": "mlp.fc1.",
    "vision_down": "mlp.fc2.",
}
LLAVA = FileNames(CLIP_TOP, CLIP_LAYER, written=LLAVA_WRITTEN)
GEMMA3 = FileNames(
    CLIP_TOP
    | {
        "projector_pooled_norm": "multi_modal_projector.mm_soft_emb_norm.",
        "projector_matrix": "multi_modal_projector.mm_input_projection_weight",
    },
    CLIP_LAYER,
    transposed=("projector_matrix",),
    written=LLAVA_WRITTEN,
)
IDEFICS3 = FileNames(
    CLIP_TOP | {"projector_matrix": "multi_modal_projector.modality_projection.proj."},
    CLIP_LAYER,
    written={
        "vision_tower.": "model.vision_model.",
        f"{PROJECTOR}modality_projection.": "model.connector.modality_projection.",
        "model.": "model.text_model.",
    },
    text_prefix="model.text_model.",
)
INTERNVL = FileNames(
    {
        "vision_class": "vision_tower.embeddings.cls_token",
        "vision_patch": "vision_tower.embeddings.patch_embeddings.projection.",
        "vision_position": "vision_tower.embeddings.position_embeddings",
        "projector_merged_norm": "multi_modal_projector.layer_norm.",
        "projector_merge": "multi_modal_projector.linear_1.",
        "projector_read": "multi_modal_projector.linear_2.",
    },
    {
        "vision_attention_norm": "layernorm_before.",
        "vision_query": "attention.q_proj.",
        "vision_key": "attention.k_proj.",
        "vision_value": "attention.v_proj.",
        "vision_output": "attention.projection_layer.",
        "vision_attention_gain": "lambda_1",
        "vision_mlp_norm": "layernorm_after.",
        "vision_up": "mlp.fc1.",
        "vision_down": "mlp.fc2.",
        "vision_mlp_gain": "lambda_2",
    },
    layer_prefix="vision_tower.encoder.layer.{}.",
    outer_axes={"vision_class": 2, "vision_position": 1},
    written=LLAVA_WRITTEN,
)
# The queries, keys and values of a layer are one tensor in files, in this order.
QWEN2_TOP = {
    "vision_frames": "visual.patch_embed.proj.",
    "projector_norm": "visual.merger.ln_q.",
    "projector_merge": "visual.merger.mlp.0.",
    "projector_read": "visual.merger.mlp.2.",
}
QWEN2_LAYER = {
    "vision_attention_norm": "norm1.",
    **dict.fromkeys(("vision_query", "vision_key", "vision_value"), "attn.qkv."),
    "vision_output": "attn.proj.",
    "vision_mlp_norm": "norm2.",
    "vision_up": "mlp.fc1.",
    "vision_down": "mlp.fc2.",
}
QWEN2 = FileNames(QWEN2_TOP, QWEN2_LAYER, "visual.blocks.{}.")
QWEN2_5_MLP = {
    "vision_gate": "mlp.gate_proj.",
    "vision_up": "mlp.up_proj.",
    "vision_down": "mlp.down_proj.",
}
QWEN2_5 = FileNames(QWEN2_TOP, QWEN2_LAYER | QWEN2_5_MLP, "visual.blocks.{}.")
QWEN3 = FileNames(
    {
        "vision_frames": "visual.patch_embed.proj.",
        "vision_position": "visual.pos_embed.",
        "projector_norm": "visual.merger.norm.",
        "projector_merge": "visual.merger.linear_fc1.",
        "projector_read": "visual.merger.linear_fc2.",
    },
    QWEN2_LAYER | {"vision_up": "mlp.linear_fc1.", "vision_down": "mlp.linear_fc2."},
    "visual.blocks.{}.",
    {
        "projector_merged_norm": "norm.",
        "projector_merge": "linear_fc1.",
        "projector_read": "linear_fc2.",
    },
    "visual.deepstack_merger_list.{}.",
)
GEMMA4 = FileNames(
    {
        "vision_pixels": "vision_tower.patch_embedder.input_proj.",
        "vision_axis_positions": "vision_tower.patch_embedder.position_embedding_table",
        "vision_feature_bias": "vision_tower.std_bias",
        "vision_feature_gain": "vision_tower.std_scale",
        "projector_matrix": "embed_vision.embedding_projection.",
    },
    {
        "vision_attention_norm": "input_layernorm.",
        "vision_query": "self_attn.q_proj.linear.",
        "vision_key": "self_attn.k_proj.linear.",
        "vision_value": "self_attn.v_proj.linear.",
        "vision_query_norm": "self_attn.q_norm.",
        "vision_key_norm": "self_attn.k_norm.",
        "vision_output": "self_attn.o_proj.linear.",
        "vision_attention_post_norm": "post_attention_layernorm.",
        "vision_mlp_norm": "pre_feedforward_layernorm.",
        "vision_gate": "mlp.gate_proj.linear.",
        "vision_up": "mlp.up_proj.linear.",
        "vision_down": "mlp.down_proj.linear.",
        "vision_mlp_post_norm": "post_feedforward_layernorm.",
    },
)


class Tower(NamedTuple):
    """A family of towers."""

    kind: str
    """`KIND_files.py` reads its configuration, and `KIND.py` computes its features."""
    files: FileNames


TOWERS = {
    "llava": Tower("square", LLAVA),
    "gemma3": Tower("square", GEMMA3),
    "idefics3": Tower("square", IDEFICS3),
    "smolvlm": Tower("square", IDEFICS3),
    "internvl": Tower("square", INTERNVL),
    "qwen2_vl": Tower("qwen", QWEN2),
    "qwen2_5_vl": Tower("qwen", QWEN2_5),
    "qwen3_vl": Tower("qwen", QWEN3),
    "qwen3_vl_moe": Tower("qwen", QWEN3),
    "gemma4": Tower("gemma4", GEMMA4),
}
"""`model_type` -> tower."""

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
    files = TOWERS[vision.model_type].files
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
    for prefix, written in TOWERS[vision.model_type].files.written.items():
        if name.startswith(prefix):
            return written + name.removeprefix(prefix)
    return name


def text_prefix(vision: AnyVisionConfig | None) -> str:
    """Return the beginning of the names that the text's modules have in transformers."""
    return FileNames.text_prefix if vision is None else TOWERS[vision.model_type].files.text_prefix
