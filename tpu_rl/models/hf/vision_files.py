"""The vision parts of Hugging Face directories: LLaVA with a tower of CLIP or SigLIP, Gemma 3,
Idefics3, SmolVLM and InternVL; see `qwen_vision_files` and `gemma4_vision_files` for others."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Literal

from tpu_rl.errors import InputError
from tpu_rl.models import vision
from tpu_rl.models.config import (
    Gemma4VisionConfig,
    QwenVisionConfig,
    TableVisionConfig,
    VisionConfig,
)
from tpu_rl.models.hf import gemma4_vision_files, qwen_vision_files

AnyVisionConfig = VisionConfig | QwenVisionConfig | Gemma4VisionConfig

TABLE_FILES: dict[type, Any] = {
    QwenVisionConfig: qwen_vision_files,
    Gemma4VisionConfig: gemma4_vision_files,
}
"""Configuration of a tower that reads images of any size -> the module of its files."""

IDEFICS = ("idefics3", "smolvlm")

FILE_NAMES = {
    "vision_tower.": "model.vision_model.",
    "multi_modal_projector.modality_projection.": "model.connector.modality_projection.",
    "model.": "model.text_model.",
}
"""Beginnings of names of tensors, those of LLaVA and of texts -> those of Idefics3 and SmolVLM."""

TOP_NAMES = {
    "vision_class": "vision_tower.embeddings.class_embedding",
    "vision_patch": "vision_tower.embeddings.patch_embedding.weight",
    "vision_patch_bias": "vision_tower.embeddings.patch_embedding.bias",
    "vision_position": "vision_tower.embeddings.position_embedding.weight",
    "vision_first_norm": "vision_tower.pre_layrnorm.weight",
    "vision_first_norm_bias": "vision_tower.pre_layrnorm.bias",
    "vision_last_norm": "vision_tower.post_layernorm.weight",
    "vision_last_norm_bias": "vision_tower.post_layernorm.bias",
    "projector_in": "multi_modal_projector.linear_1.weight",
    "projector_in_bias": "multi_modal_projector.linear_1.bias",
    "projector_out": "multi_modal_projector.linear_2.weight",
    "projector_out_bias": "multi_modal_projector.linear_2.bias",
    "projector_pooled_norm": "multi_modal_projector.mm_soft_emb_norm.weight",
}
MATRIX_NAMES = {
    "pooled": "multi_modal_projector.mm_input_projection_weight",
    "shuffled": "multi_modal_projector.modality_projection.proj.weight",
}
"""`VisionConfig.projector` -> name of the projector's matrix. The first is [inputs, outputs]."""

LAYER_MODULES = {
    "vision_attention_norm": "layer_norm1",
    "vision_query": "self_attn.q_proj",
    "vision_key": "self_attn.k_proj",
    "vision_value": "self_attn.v_proj",
    "vision_output": "self_attn.out_proj",
    "vision_mlp_norm": "layer_norm2",
    "vision_up": "mlp.fc1",
    "vision_down": "mlp.fc2",
}

INTERNVL_TOP_NAMES = TOP_NAMES | {
    "vision_class": "vision_tower.embeddings.cls_token",
    "vision_patch": "vision_tower.embeddings.patch_embeddings.projection.weight",
    "vision_patch_bias": "vision_tower.embeddings.patch_embeddings.projection.bias",
    "vision_position": "vision_tower.embeddings.position_embeddings",
    "projector_merged_norm": "multi_modal_projector.layer_norm.weight",
    "projector_merged_norm_bias": "multi_modal_projector.layer_norm.bias",
    "projector_merge": "multi_modal_projector.linear_1.weight",
    "projector_merge_bias": "multi_modal_projector.linear_1.bias",
    "projector_read": "multi_modal_projector.linear_2.weight",
    "projector_read_bias": "multi_modal_projector.linear_2.bias",
}
INTERNVL_MODULES = {
    "vision_attention_norm": "layernorm_before",
    "vision_query": "attention.q_proj",
    "vision_key": "attention.k_proj",
    "vision_value": "attention.v_proj",
    "vision_output": "attention.projection_layer",
    "vision_mlp_norm": "layernorm_after",
    "vision_up": "mlp.fc1",
    "vision_down": "mlp.fc2",
}
INTERNVL_GAINS = {"vision_attention_gain": "lambda_1", "vision_mlp_gain": "lambda_2"}
OUTER_AXES = {"vision_class": (1, 1), "vision_position": (1,)}
"""Weight of InternVL's tower -> axes of size 1 that it begins with in files."""

ACTIVATION_NAMES = {"quick_gelu": "quick_gelu", "gelu": "gelu_exact", "gelu_pytorch_tanh": "gelu"}
"""Hugging Face's name -> key of `layers.ACTIVATIONS`."""

CLIP_DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
SIGLIP_DEFAULTS: dict[str, Any] = CLIP_DEFAULTS | {
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
IDEFICS_DEFAULTS: dict[str, Any] = SIGLIP_DEFAULTS | {
    "hidden_size": 1152,
    "num_attention_heads": 16,
    "patch_size": 32,
}
INTERNVL_DEFAULTS: dict[str, Any] = CLIP_DEFAULTS | {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
}
TOWERS = {
    "internvl_vision": INTERNVL_DEFAULTS,
    "clip_vision_model": CLIP_DEFAULTS,
    "siglip_vision_model": SIGLIP_DEFAULTS,
    "idefics3_vision": IDEFICS_DEFAULTS,
}
"""`model_type` of a tower -> transformers' defaults, for fields that a config.json leaves out."""

IMAGE_TOKENS = {"llava": 32_000, "gemma3": 262_144, "idefics3": 128_257, "smolvlm": 128_257}
IMAGE_TOKENS["internvl"] = 151_667
"""`model_type` -> transformers' default of the id of the token that stands for an image."""

PROJECTORS: dict[str, Literal["mlp", "pooled", "shuffled", "shuffled_mlp"]] = {
    "internvl": "shuffled_mlp",
    "llava": "mlp",
    "gemma3": "pooled",
    "idefics3": "shuffled",
    "smolvlm": "shuffled",
}
"""`model_type` -> `VisionConfig.projector`."""

IDEFICS_SIDES = frozenset(range(1, 38)) - {19, 25, 29, 31}
"""Patches in a row of a tile for which patch i has position i. transformers' Idefics3 computes
positions from fractions, and with other numbers of patches rounding gives some the position
before."""

INTERNVL_VALUES = {
    "norm_type": "layer_norm",
    "use_qk_norm": False,
    "use_mask_token": False,
    "use_mean_pooling": True,
    "use_absolute_position_embeddings": True,
}
"""Fields of InternVL's vision_config with the values that are supported: those of InternVL3 up to
14B have layer norms, and no norms of queries and keys."""

LARGEST_SIZE = 65_536


def read_vision(source: Mapping[str, Any], text_size: int, where: str) -> AnyVisionConfig:
    """Return the vision part of a configuration whose text has `text_size` dimensions.

    Raises:
        InputError: the tower is not one of `TOWERS`, or a field is not supported.
    """
    if source["model_type"] in qwen_vision_files.TOWERS:
        return qwen_vision_files.read_vision(source, text_size, where)
    if source["model_type"] == "gemma4":
        return gemma4_vision_files.read_vision(source, where)
    model_type = source["model_type"]
    tower = source.get("vision_config")
    kind = tower.get("model_type") if isinstance(tower, Mapping) else None
    if model_type in IDEFICS:
        kind = "idefics3_vision"
    elif model_type in ("gemma3", "internvl") and kind is None:
        kind = "siglip_vision_model" if model_type == "gemma3" else "internvl_vision"
    if not isinstance(tower, Mapping) or kind not in TOWERS:
        raise InputError(
            "the model's vision tower is not supported",
            where=where,
            why="vision_config has the model_type "
            f"{tower.get('model_type') if isinstance(tower, Mapping) else tower!r}",
            fix="use a model with a tower of CLIP or SigLIP (clip_vision_model, "
            "siglip_vision_model)",
        )
    defaults = TOWERS[kind]
    fields = defaults | {name: value for name, value in tower.items() if value is not None}
    merge = source.get("scale_factor", 2)
    if model_type == "internvl":
        for name in ("image_size", "patch_size"):  # They may have a height and a width.
            height, width = fields[name] if isinstance(fields[name], list) else [fields[name]] * 2
            fields[name] = height if height == width else [height, width]
        merge = int(1 / source.get("downsample_ratio", 0.5))
    sizes = {
        f"vision_config.{name}": fields[name] for name in defaults if type(defaults[name]) is int
    }
    if model_type == "gemma3":
        sizes["mm_tokens_per_image"] = source.get("mm_tokens_per_image", 256)
    if model_type in IDEFICS:
        sizes["scale_factor"] = merge
    for name, size in sizes.items():
        if type(size) is not int or not 0 < size <= LARGEST_SIZE:
            raise InputError(
                f"{name} is {size!r}",
                where=where,
                why=f"it is a whole number from 1 to {LARGEST_SIZE:,}",
                fix="download config.json again",
            )
    side = fields["image_size"] // fields["patch_size"]
    per_image = sizes.get("mm_tokens_per_image", side**2)
    if model_type == "gemma3":
        merge = max(side // math.isqrt(per_image), 1)
    elif model_type == "llava":
        merge = 1
    num_layers = fields["num_hidden_layers"]
    is_internvl = model_type == "internvl"
    is_llava = model_type == "llava"
    has_fields = is_llava or is_internvl
    layer = source.get("vision_feature_layer", -2 if is_llava else -1) if has_fields else -1
    strategy = source.get("vision_feature_select_strategy", "default") if has_fields else "full"
    projector_activation = source.get("projector_hidden_act", "gelu") if has_fields else "gelu"
    num_read_layers = layer if isinstance(layer, int) and layer >= 0 else None
    if isinstance(layer, int) and layer < 0:
        num_read_layers = num_layers + 1 + layer
    activation = fields["hidden_act"]
    num_heads = fields["num_attention_heads"]
    is_square = side % merge == 0 and per_image in (side**2, (side // merge) ** 2)
    for name, value, is_supported in (
        ("vision_feature_layer", layer, num_read_layers in range(num_layers + 1)),
        (
            "vision_feature_select_strategy",
            strategy,
            strategy == "default" or (strategy == "full" and not is_internvl),
        ),
        *(
            (f"vision_config.{name}", fields.get(name, value), fields.get(name, value) == value)
            for name, value in INTERNVL_VALUES.items()
            if is_internvl
        ),
        ("downsample_ratio", source.get("downsample_ratio"), not is_internvl or is_square),
        ("projector_hidden_act", projector_activation, projector_activation in ACTIVATION_NAMES),
        ("vision_config.hidden_act", activation, activation in ACTIVATION_NAMES),
        (
            "vision_config.patch_size",
            fields["patch_size"],
            fields["image_size"] % fields["patch_size"] == 0,
        ),
        ("vision_config.num_attention_heads", num_heads, fields["hidden_size"] % num_heads == 0),
        ("mm_tokens_per_image", per_image, model_type != "gemma3" or is_square),
        ("scale_factor", merge, model_type not in IDEFICS or is_square),
        (
            "vision_config.image_size",
            fields["image_size"],
            model_type not in IDEFICS or side in IDEFICS_SIDES,
        ),
    ):
        if not is_supported:
            raise InputError(
                f"{name} = {value!r} is not supported",
                where=where,
                why="the model would load, but its outputs would be wrong",
                fix="use a model whose features are the states of one layer of the tower, of whole "
                "squares of patches",
            )
    outer = {name: value for name, value in source.items() if name != "text_config"}
    if kind == "siglip_vision_model":
        # Nothing reads SigLIP's pooling head, which is left out.
        outer["vision_config"] = {**tower, "vision_use_head": False}
    image_token = IMAGE_TOKENS[model_type]
    return VisionConfig(
        image_size=fields["image_size"],
        patch_size=fields["patch_size"],
        hidden_size=fields["hidden_size"],
        mlp_size=fields["intermediate_size"],
        num_layers=num_layers,
        num_read_layers=num_read_layers or 0,
        num_heads=num_heads,
        eps=float(fields["layer_norm_eps"]),
        activation=ACTIVATION_NAMES[activation],
        projector_activation=ACTIVATION_NAMES[projector_activation],
        projector_bias=bool(source.get("multimodal_projector_bias", True)),
        keeps_first=strategy == "full",
        image_token=int(source.get("image_token_index", source.get("image_token_id", image_token))),
        channels=fields["num_channels"],
        has_class=kind in ("clip_vision_model", "internvl_vision"),
        has_first_norm=kind == "clip_vision_model",
        has_patch_bias=kind != "clip_vision_model",
        has_key_biases=not is_internvl or bool(fields.get("attention_bias")),
        has_gains=is_internvl,
        has_last_norm=not has_fields,
        projector=PROJECTORS[model_type],
        merge=merge,
        around=(
            int(source.get("boi_token_index", source.get("boi_token_id", 255_999))),
            int(source.get("eoi_token_index", source.get("eoi_token_id", 256_000))),
        )
        if model_type == "gemma3"
        else None,
        gap="\n\n" if model_type == "gemma3" else "",
        written="before" if model_type == "gemma3" else "all",
        two_way=("full", "sliding") if model_type == "gemma3" else (),
        source=json.dumps(outer, sort_keys=True),
    )


def weight_name(config: VisionConfig, name: str, layer: int | None) -> str:
    """Return Hugging Face's name of a vision weight, in a layer or (None) outside of layers."""
    is_internvl = config.projector == "shuffled_mlp"
    if name == "projector_matrix":
        return MATRIX_NAMES[config.projector]
    if layer is None:
        return (INTERNVL_TOP_NAMES if is_internvl else TOP_NAMES)[name]
    if name in INTERNVL_GAINS:
        return f"vision_tower.encoder.layer.{layer}.{INTERNVL_GAINS[name]}"
    stack, modules = ("layer", INTERNVL_MODULES) if is_internvl else ("layers", LAYER_MODULES)
    module = modules[name.removesuffix("_bias")]
    kind = "bias" if name.endswith("_bias") else "weight"
    return f"vision_tower.encoder.{stack}.{layer}.{module}.{kind}"


def file_shape(config: AnyVisionConfig, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that a vision weight has in files, of its shape here."""
    if isinstance(config, VisionConfig) and config.projector == "shuffled_mlp":
        return (*OUTER_AXES.get(name, ()), *shape)
    return shape


def plain_name(name: str) -> str | None:
    """Return the name as `weight_name` has it, for newer and older files; None: not of vision."""
    plain = name.removeprefix("model.")
    if plain.startswith("connector."):
        return plain.replace("connector.", "multi_modal_projector.", 1)
    plain = plain.replace("vision_tower.vision_model.", "vision_tower.", 1)
    if plain.startswith("vision_model."):
        plain = plain.replace("vision_model.", "vision_tower.", 1)
    if plain.startswith("vision_tower.head."):
        return None
    if plain.startswith(("vision_tower.", "multi_modal_projector.")):
        return plain
    return gemma4_vision_files.plain_name(name) or qwen_vision_files.plain_name(name)


def written_name(config: AnyVisionConfig, name: str) -> str:
    """Return the name that files have for a tensor of a model that reads images."""
    if isinstance(config, TableVisionConfig):
        if TABLE_FILES[type(config)].plain_name(name):
            return f"model.{name}"
        return name.replace("model.", "model.language_model.", 1) if "model." in name[:6] else name
    if text_prefix(config) == FILE_NAMES["model."]:
        for plain, prefix in FILE_NAMES.items():
            if name.startswith(plain):
                return name.replace(plain, prefix, 1)
        return name
    return name if plain_name(name) else f"language_model.{name}"


def text_prefix(config: AnyVisionConfig | None) -> str:
    """Return the beginning of the names that the text's modules have in transformers."""
    is_idefics = config is not None and json.loads(config.source)["model_type"] in IDEFICS
    return FILE_NAMES["model."] if is_idefics else "model.language_model."


def weights(config: AnyVisionConfig) -> list[tuple[str, str, tuple[str, ...], int | None]]:
    """Return (name in files, name, path in the params, layer or None) of each vision weight, in
    order. Weights with the same name in files are one tensor there: the rows of the first weight
    come first."""
    if isinstance(config, TableVisionConfig):
        return TABLE_FILES[type(config)].weights(config)
    top = [(name, (vision.TOP,), None) for name in vision.TOP_WEIGHTS if name not in config.absent]
    layers = [
        (name, (vision.LAYERS, "layer_0"), layer)
        for layer in range(config.num_layers)
        for name in vision.LAYER_WEIGHTS
        if name not in config.absent
    ]
    return [
        (weight_name(config, name, layer), name, path, layer)
        for name, path, layer in [*top, *layers]
    ]
