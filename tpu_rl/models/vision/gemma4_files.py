"""The configurations of Hugging Face with the tower of Gemma 4."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tpu_rl.errors import InputError
from tpu_rl.models.hf.checks import require_supported
from tpu_rl.models.vision import towers
from tpu_rl.models.vision.config import Gemma4VisionConfig

TOKENS = {
    "boi_token_id": 255_999,
    "eoi_token_id": 258_882,
    "image_token_id": 258_880,
    "video_token_id": 258_884,
    "boa_token_id": 256_000,
    "eoa_token_index": 258_883,
    "audio_token_id": 258_881,
}
"""Fields of the outer configuration with transformers' defaults."""


def read(source: Mapping[str, Any], text_size: int) -> Gemma4VisionConfig:
    """Return the vision part of a configuration.

    Raises:
        InputError: a field is out of range or not supported.
    """
    tower = source.get("vision_config")
    if not isinstance(tower, Mapping):
        raise InputError(
            "the model has no vision tower",
            why=f"vision_config is {tower!r}",
            fix="leave --model.images out, or use the files that were published with the tower",
        )
    fields = towers.with_defaults("gemma4", tower)
    rope = {"rope_type": "axial", "rope_theta": 100.0, **(fields.get("rope_parameters") or {})}
    heads = fields["num_attention_heads"]
    kv_heads = fields["num_key_value_heads"]
    activation = fields["hidden_activation"]
    has_biases = fields.get("attention_bias")
    require_supported(
        {
            "hidden_activation": (activation, activation in towers.ACTIVATIONS),
            "head_dim": (fields["head_dim"], fields["head_dim"] % 4 == 0),
            "num_key_value_heads": (kv_heads, heads % kv_heads == 0),
            "attention_bias": (has_biases, not has_biases),
            "rope_type": (rope["rope_type"], rope["rope_type"] == "axial"),
        },
        subject="vision_config with ",
        why="the model would load, but its features would be wrong",
        fix="use a tower as published: plain projections, and heads whose halves turn with columns "
        "and rows",
    )
    tokens = towers.with_tokens(source, TOKENS)
    text = source.get("text_config") or {}
    # Sound is not read, so a written model has no tower for it.
    outer = {**source, **tokens, "audio_config": None}
    outer.pop("text_config", None)
    sees_all = text.get("use_bidirectional_attention") == "vision"
    return Gemma4VisionConfig(
        model_type=source["model_type"],
        patch_size=fields["patch_size"],
        merge_size=fields["pooling_kernel_size"],
        hidden_size=fields["hidden_size"],
        mlp_size=fields["intermediate_size"],
        num_layers=fields["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=fields["head_dim"],
        eps=float(fields["rms_norm_eps"]),
        num_positions=fields["position_embedding_size"],
        activation=towers.ACTIVATIONS[activation],
        image_token=tokens["image_token_id"],
        around=(tokens["boi_token_id"], tokens["eoi_token_id"]),
        written="token",
        two_way=("sliding",) if sees_all else (),
        layer_input_token=int(text.get("pad_token_id") or 0),
        rope_theta=float(rope["rope_theta"]),
        is_clipped=bool(fields["use_clipped_linears"]),
        is_standardized=bool(fields["standardize"]),
        has_audio=source.get("audio_config") is not None,
        source=json.dumps(outer, sort_keys=True),
    )
