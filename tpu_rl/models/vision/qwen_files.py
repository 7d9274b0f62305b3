"""The configurations of Hugging Face with the towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from tpu_rl.models.hf.checks import require_size, require_supported
from tpu_rl.models.vision import towers
from tpu_rl.models.vision.config import QwenVisionConfig

TOKENS = {
    "image_token_id": 151_655,
    "video_token_id": 151_656,
    "vision_start_token_id": 151_652,
    "vision_end_token_id": 151_653,
}
"""Fields of the outer configuration with transformers' defaults."""

OUTER_FIELDS = (*TOKENS, "vision_token_id", "vision_config", "model_type", "architectures")
"""Fields that are not the text's in files that have the text's beside them."""


def read(source: Mapping[str, Any], text_size: int) -> QwenVisionConfig:
    """Return the vision part of a configuration whose text has `text_size` dimensions.

    Raises:
        InputError: a field is out of range or not supported.
    """
    kind = str(source["model_type"])
    tower = source.get("vision_config") or {}
    fields = towers.with_defaults(kind, tower)
    is_first = kind == "qwen2_vl"
    # Qwen2-VL's hidden_size is that of the text.
    width = fields["embed_dim"] if is_first else fields["hidden_size"]
    outputs = fields["hidden_size"] if is_first else fields["out_hidden_size"]
    mlp = width * fields["mlp_ratio"] if is_first else fields["intermediate_size"]
    require_size("vision_config.intermediate_size", mlp, 2**22)
    window = None
    if kind == "qwen2_5_vl":
        window = fields["window_size"] // (fields["patch_size"] * fields["spatial_merge_size"])

    layers = set(range(fields["depth"]))
    positions = fields.get("num_position_embeddings", 0)
    side = math.isqrt(positions)
    full_layers = sorted(fields.get("fullatt_block_indexes", ()))
    deep_layers = list(fields.get("deepstack_visual_indexes", ()))
    activation = fields["hidden_act"]
    num_heads = fields["num_heads"]
    require_supported(
        {
            "hidden_act": (activation, activation in towers.ACTIVATIONS),
            "hidden_size": (outputs, outputs == text_size),
            "num_heads": (num_heads, width % (4 * num_heads) == 0),
            "window_size": (fields.get("window_size"), window is None or window > 0),
            "fullatt_block_indexes": (full_layers, {*full_layers} <= layers),
            "deepstack_visual_indexes": (
                deep_layers,
                deep_layers == sorted({*deep_layers} & layers),
            ),
            "num_position_embeddings": (positions, positions == side**2),
        },
        subject="vision_config with ",
        why="the features would be wrong, or of another width than the text's "
        f"{text_size} dimensions",
        fix="download config.json again",
    )
    tokens = towers.with_tokens(source, TOKENS)
    outer = dict(source)
    if "text_config" not in source:
        outer = {name: source[name] for name in OUTER_FIELDS if name in source}
    outer.pop("text_config", None)
    parameters = fields.get("rope_parameters") or {}
    return QwenVisionConfig(
        model_type=kind,
        patch_size=fields["patch_size"],
        merge_size=fields["spatial_merge_size"],
        frames=fields["temporal_patch_size"],
        hidden_size=width,
        mlp_size=mlp,
        num_layers=fields["depth"],
        num_heads=num_heads,
        activation=towers.ACTIVATIONS[activation],
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
