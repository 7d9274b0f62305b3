"""The vision parts of Hugging Face directories: Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from tpu_rl.errors import InputError
from tpu_rl.models import qwen_vision
from tpu_rl.models.config import QwenVisionConfig
from tpu_rl.models.hf import moe_families

LARGEST_SIZE = 65_536

TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": 3584,
        "mlp_ratio": 4,
        "hidden_act": "quick_gelu",
        "num_heads": 16,
        "patch_size": 14,
    },
    "qwen2_5_vl": {
        "depth": 32,
        "hidden_size": 3584,
        "intermediate_size": 3420,
        "out_hidden_size": 3584,
        "hidden_act": "silu",
        "num_heads": 16,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": (7, 15, 23, 31),
    },
    "qwen3_vl": {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "out_hidden_size": 3584,
        "hidden_act": "gelu_pytorch_tanh",
        "num_heads": 16,
        "patch_size": 16,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": (8, 16, 24),
    },
}
"""`model_type` -> transformers' defaults of vision_config, beside `COMMON`."""
TOWERS["qwen3_vl_moe"] = TOWERS["qwen3_vl"]

COMMON = {"in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2}

ACTIVATIONS = {
    "quick_gelu": "quick_gelu",
    "gelu": "gelu_exact",
    "gelu_pytorch_tanh": "gelu",
    "silu": "silu",
}

TOKENS = {
    "image_token_id": 151_655,
    "video_token_id": 151_656,
    "vision_start_token_id": 151_652,
    "vision_end_token_id": 151_653,
}
"""Fields of the outer configuration with transformers' defaults."""

OUTER_FIELDS = (*TOKENS, "vision_token_id", "vision_config", "model_type", "architectures")
"""Fields that are not the text's in files that have the text's beside them."""


def read_vision(source: Mapping[str, Any], text_size: int, where: str) -> QwenVisionConfig:
    """Return the vision part of a configuration whose text has `text_size` dimensions.

    Raises:
        InputError: a field is out of range or not supported.
    """
    kind = str(source["model_type"])
    given = source.get("vision_config") or {}
    fields = {**COMMON, **TOWERS[kind], **{k: v for k, v in given.items() if v is not None}}
    for name in (*COMMON, "depth", "num_heads", "patch_size", "hidden_size"):
        moe_families.require_size(f"vision_config.{name}", fields[name], LARGEST_SIZE, where)
    is_first = kind == "qwen2_vl"
    width = fields["embed_dim"] if is_first else fields["hidden_size"]
    mlp = width * fields["mlp_ratio"] if is_first else fields["intermediate_size"]
    outputs = fields["hidden_size"] if is_first else fields["out_hidden_size"]
    moe_families.require_size("vision_config.intermediate_size", mlp, 2**22, where)
    moe_families.require_size("vision_config.embed_dim", width, LARGEST_SIZE, where)
    window = None
    if kind == "qwen2_5_vl":
        unit = fields["patch_size"] * fields["spatial_merge_size"]
        moe_families.require_size(
            "vision_config.window_size", fields["window_size"], LARGEST_SIZE, where
        )
        window = fields["window_size"] // unit
    layers = range(fields["depth"])
    side = math.isqrt(fields.get("num_position_embeddings", 0))
    full_layers = sorted(fields.get("fullatt_block_indexes", ()))
    deep_layers = list(fields.get("deepstack_visual_indexes", ()))
    activation = fields["hidden_act"]
    for name, value, is_supported in (
        ("hidden_act", activation, activation in ACTIVATIONS),
        ("hidden_size", outputs, outputs == text_size),
        ("num_heads", fields["num_heads"], width % (4 * fields["num_heads"]) == 0),
        ("window_size", fields.get("window_size"), window is None or window > 0),
        ("fullatt_block_indexes", full_layers, set(full_layers) <= set(layers)),
        (
            "deepstack_visual_indexes",
            deep_layers,
            deep_layers == sorted({*deep_layers} & set(layers)),
        ),
        ("num_position_embeddings", side**2, side**2 == fields.get("num_position_embeddings", 0)),
    ):
        if not is_supported:
            raise InputError(
                f"vision_config with {name} = {value!r} is not supported",
                where=where,
                why="the features would be wrong, or of another width than the text's "
                f"{text_size} dimensions",
                fix="download config.json again",
            )
    tokens = {name: int(source.get(name) or default) for name, default in TOKENS.items()}
    outer = dict(source)
    if "text_config" not in source:
        outer = {name: source[name] for name in OUTER_FIELDS if name in source}
    outer.pop("text_config", None)
    parameters = fields.get("rope_parameters") or {}
    return QwenVisionConfig(
        patch_size=fields["patch_size"],
        merge_size=fields["spatial_merge_size"],
        frames=fields["temporal_patch_size"],
        hidden_size=width,
        mlp_size=mlp,
        num_layers=fields["depth"],
        num_heads=fields["num_heads"],
        activation=ACTIVATIONS[activation],
        image_token=tokens["image_token_id"],
        around=(tokens["vision_start_token_id"], tokens["vision_end_token_id"]),
        has_rms_norms=kind == "qwen2_5_vl",
        is_gated=kind == "qwen2_5_vl",
        has_patch_bias=kind.startswith("qwen3_vl"),
        window=window,
        full_layers=tuple(full_layers),
        position_side=side or None,
        deep_layers=tuple(deep_layers),
        rope_theta=float(parameters.get("rope_theta") or 10_000.0),
        channels=fields["in_channels"],
        source=json.dumps(outer, sort_keys=True),
    )


MODULES = {
    "vision_frames": "patch_embed.proj",
    "vision_position": "pos_embed",
    "vision_attention_norm": "norm1",
    "vision_query": "attn.qkv",
    "vision_key": "attn.qkv",
    "vision_value": "attn.qkv",
    "vision_output": "attn.proj",
    "vision_mlp_norm": "norm2",
    "vision_gate": "mlp.gate_proj",
    "vision_up": "mlp.up_proj",
    "vision_down": "mlp.down_proj",
    "projector_norm": "merger.ln_q",
    "projector_merge": "merger.mlp.0",
    "projector_read": "merger.mlp.2",
}
"""Weight -> Hugging Face's module, in a layer or outside, of Qwen2.5-VL."""

PLAIN_MLP = {"vision_up": "mlp.fc1", "vision_down": "mlp.fc2"}

QWEN3 = {
    "vision_up": "mlp.linear_fc1",
    "vision_down": "mlp.linear_fc2",
    "projector_norm": "merger.norm",
    "projector_merge": "merger.linear_fc1",
    "projector_read": "merger.linear_fc2",
}
DEEP = {
    "projector_merged_norm": "norm",
    "projector_merge": "linear_fc1",
    "projector_read": "linear_fc2",
}


def weights(vision: QwenVisionConfig) -> list[tuple[str, str, tuple[str, ...], int | None]]:
    """Return (name in files, name, path in the params, layer or None) of each vision weight.

    The queries, keys and values of a layer are one tensor in files, in this order.
    """
    modules = MODULES
    if not vision.is_gated:
        modules = MODULES | (QWEN3 if vision.position_side else PLAIN_MLP)
    top, layer_names, merger_names = qwen_vision.weight_names(vision)

    def file_name(prefix: str, modules: Mapping[str, str], name: str) -> str:
        kind = "bias" if name.endswith("_bias") else "weight"
        return f"visual.{prefix}{modules[name.removesuffix('_bias')]}.{kind}"

    found: list[tuple[str, str, tuple[str, ...], int | None]] = [
        (file_name("", modules, name), name, ("vision",), None) for name in top
    ]
    for layer in range(vision.num_layers):
        path = ("vision_layers", "layer_0")
        prefix = f"blocks.{layer}."
        found += [(file_name(prefix, modules, name), name, path, layer) for name in layer_names]
    for index in range(len(vision.deep_layers)):
        path = (qwen_vision.MERGERS, "layer_0")
        prefix = f"deepstack_merger_list.{index}."
        found += [(file_name(prefix, DEEP, name), name, path, index) for name in merger_names]
    return found


def plain_name(name: str) -> str | None:
    """Return the name as `weights` has it, for newer and older files; None: not of vision."""
    plain = name.removeprefix("model.")
    return plain if plain.startswith("visual.") else None
