"""The vision parts of Hugging Face directories: LLaVA with a tower of CLIP; see
`qwen_vision_files` for the family of Qwen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tpu_rl.errors import InputError
from tpu_rl.models import vision
from tpu_rl.models.config import QwenVisionConfig, VisionConfig
from tpu_rl.models.hf import qwen_vision_files

TEXT_PREFIX = "language_model."
"""Beginning of the names of the text's tensors in files that are written."""

TOP_NAMES = {
    "vision_class": "vision_tower.embeddings.class_embedding",
    "vision_patch": "vision_tower.embeddings.patch_embedding.weight",
    "vision_position": "vision_tower.embeddings.position_embedding.weight",
    "vision_first_norm": "vision_tower.pre_layrnorm.weight",
    "vision_first_norm_bias": "vision_tower.pre_layrnorm.bias",
    "vision_last_norm": "vision_tower.post_layernorm.weight",
    "vision_last_norm_bias": "vision_tower.post_layernorm.bias",
    "projector_in": "multi_modal_projector.linear_1.weight",
    "projector_in_bias": "multi_modal_projector.linear_1.bias",
    "projector_out": "multi_modal_projector.linear_2.weight",
    "projector_out_bias": "multi_modal_projector.linear_2.bias",
}
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
"""transformers' defaults of a clip_vision_model, for fields that a config.json leaves out."""

LARGEST_SIZE = 65_536


def read_vision(
    source: Mapping[str, Any], text_size: int, where: str
) -> VisionConfig | QwenVisionConfig:
    """Return the vision part of a configuration whose text has `text_size` dimensions.

    Raises:
        InputError: the tower is not one of CLIP, or a field is not supported.
    """
    if source["model_type"] in qwen_vision_files.TOWERS:
        return qwen_vision_files.read_vision(source, text_size, where)
    tower = source.get("vision_config")
    if not isinstance(tower, Mapping) or tower.get("model_type") != "clip_vision_model":
        raise InputError(
            "the model's vision tower is not supported",
            where=where,
            why="vision_config has the model_type "
            f"{tower.get('model_type') if isinstance(tower, Mapping) else tower!r}",
            fix="use a LLaVA model with a tower of CLIP (clip_vision_model)",
        )
    fields = CLIP_DEFAULTS | {name: value for name, value in tower.items() if value is not None}
    sizes = {name: fields[name] for name in CLIP_DEFAULTS if isinstance(CLIP_DEFAULTS[name], int)}
    for name, size in sizes.items():
        if type(size) is not int or not 0 < size <= LARGEST_SIZE:
            raise InputError(
                f"vision_config.{name} is {size!r}",
                where=where,
                why=f"it is a whole number from 1 to {LARGEST_SIZE:,}",
                fix="download config.json again",
            )
    layer = source.get("vision_feature_layer", -2)
    num_layers = fields["num_hidden_layers"]
    strategy = source.get("vision_feature_select_strategy", "default")
    projector_activation = source.get("projector_hidden_act", "gelu")
    num_read_layers = layer if isinstance(layer, int) and layer >= 0 else None
    if isinstance(layer, int) and layer < 0:
        num_read_layers = num_layers + 1 + layer
    for name, value, is_supported in (
        ("vision_feature_layer", layer, num_read_layers in range(num_layers + 1)),
        ("vision_feature_select_strategy", strategy, strategy in ("default", "full")),
        ("projector_hidden_act", projector_activation, projector_activation in ACTIVATION_NAMES),
        (
            "vision_config.hidden_act",
            fields["hidden_act"],
            fields["hidden_act"] in ACTIVATION_NAMES,
        ),
        (
            "vision_config.patch_size",
            fields["patch_size"],
            fields["image_size"] % fields["patch_size"] == 0,
        ),
        (
            "vision_config.num_attention_heads",
            fields["num_attention_heads"],
            fields["hidden_size"] % fields["num_attention_heads"] == 0,
        ),
    ):
        if not is_supported:
            raise InputError(
                f"{name} = {value!r} is not supported",
                where=where,
                why="the model would load, but its outputs would be wrong",
                fix="use a LLaVA model whose features are the states of one layer of the tower",
            )
    outer = {name: value for name, value in source.items() if name != "text_config"}
    return VisionConfig(
        image_size=fields["image_size"],
        patch_size=fields["patch_size"],
        hidden_size=fields["hidden_size"],
        mlp_size=fields["intermediate_size"],
        num_layers=num_layers,
        num_read_layers=num_read_layers or 0,
        num_heads=fields["num_attention_heads"],
        eps=float(fields["layer_norm_eps"]),
        activation=ACTIVATION_NAMES[fields["hidden_act"]],
        projector_activation=ACTIVATION_NAMES[projector_activation],
        projector_bias=bool(source.get("multimodal_projector_bias", True)),
        keeps_class=strategy == "full",
        image_token=int(source.get("image_token_index", source.get("image_token_id", 32_000))),
        channels=fields["num_channels"],
        source=json.dumps(outer, sort_keys=True),
    )


def weight_name(name: str, layer: int | None) -> str:
    """Return Hugging Face's name of a vision weight, in a layer or (None) outside of layers."""
    if layer is None:
        return TOP_NAMES[name]
    module = LAYER_MODULES[name.removesuffix("_bias")]
    kind = "bias" if name.endswith("_bias") else "weight"
    return f"vision_tower.encoder.layers.{layer}.{module}.{kind}"


def plain_name(name: str) -> str | None:
    """Return the name as `weight_name` has it, for newer and older files; None: not of vision."""
    plain = name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.", 1)
    if plain.startswith(("vision_tower.", "multi_modal_projector.")):
        return plain
    return qwen_vision_files.plain_name(name)


def written_name(config: VisionConfig | QwenVisionConfig, name: str) -> str:
    """Return the name that files have for a tensor of a model that reads images."""
    if isinstance(config, QwenVisionConfig):
        return qwen_vision_files.written_name(name)
    return name if plain_name(name) else TEXT_PREFIX + name


def weights(
    config: VisionConfig | QwenVisionConfig,
) -> list[tuple[str, str, tuple[str, ...], int | None]]:
    """Return (name in files, name, path in the params, layer or None) of each vision weight, in
    order. Weights with the same name in files are one tensor there: the rows of the first weight
    come first."""
    if isinstance(config, QwenVisionConfig):
        return qwen_vision_files.weights(config)
    unbiased = () if config.projector_bias else ("projector_in_bias", "projector_out_bias")
    top = [(name, (vision.TOP,), None) for name in vision.TOP_WEIGHTS if name not in unbiased]
    layers = [
        (name, (vision.LAYERS, "layer_0"), layer)
        for layer in range(config.num_layers)
        for name in vision.LAYER_WEIGHTS
    ]
    return [(weight_name(name, layer), name, path, layer) for name, path, layer in [*top, *layers]]
