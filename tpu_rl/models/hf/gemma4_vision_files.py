"""The vision parts of Hugging Face directories: Gemma 4."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tpu_rl.errors import InputError
from tpu_rl.models import gemma4_vision
from tpu_rl.models.config import BOUNDS, Gemma4VisionConfig
from tpu_rl.models.hf import moe_families
from tpu_rl.models.hf.qwen_vision_files import ACTIVATIONS, LARGEST_SIZE

TOWER: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10_240,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "use_clipped_linears": False,
    "standardize": False,
}
"""transformers' defaults of vision_config."""

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


def read_vision(source: Mapping[str, Any], where: str) -> Gemma4VisionConfig:
    """Return the vision part of a configuration.

    Raises:
        InputError: a field is out of range or not supported.
    """
    given = source.get("vision_config")
    if not isinstance(given, Mapping):
        raise InputError(
            "the model has no vision tower",
            where=where,
            why=f"vision_config is {given!r}",
            fix="leave --model.images out, or use the files that were published with the tower",
        )
    fields = TOWER | {name: value for name, value in given.items() if value is not None}
    for name, default in TOWER.items():
        if type(default) is int:
            moe_families.require_size(f"vision_config.{name}", fields[name], LARGEST_SIZE, where)
    rope = {"rope_type": "axial", "rope_theta": 100.0, **(fields.get("rope_parameters") or {})}
    heads = fields["num_attention_heads"]
    kv_heads = fields["num_key_value_heads"]
    activation = fields["hidden_activation"]
    for name, value, is_supported in (
        ("hidden_activation", activation, activation in ACTIVATIONS),
        ("head_dim", fields["head_dim"], fields["head_dim"] % 4 == 0),
        ("num_key_value_heads", kv_heads, heads % kv_heads == 0),
        ("attention_bias", fields.get("attention_bias"), not fields.get("attention_bias")),
        ("rope_type", rope["rope_type"], rope["rope_type"] == "axial"),
    ):
        if not is_supported:
            raise InputError(
                f"vision_config with {name} = {value!r} is not supported",
                where=where,
                why="the model would load, but its features would be wrong",
                fix="use a tower as published: plain projections, and heads whose halves turn "
                "with columns and rows",
            )
    tokens = {name: int(source.get(name) or default) for name, default in TOKENS.items()}
    text = source.get("text_config") or {}
    # Sound is not read, so a written model has no tower for it.
    outer = {**source, **tokens, "audio_config": None}
    outer.pop("text_config", None)
    sees_all = text.get("use_bidirectional_attention") == "vision"
    return Gemma4VisionConfig(
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
        activation=ACTIVATIONS[activation],
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


TOP_NAMES = {
    "vision_pixels": "vision_tower.patch_embedder.input_proj.weight",
    "vision_axis_positions": "vision_tower.patch_embedder.position_embedding_table",
    "vision_feature_bias": "vision_tower.std_bias",
    "vision_feature_gain": "vision_tower.std_scale",
    "projector_matrix": "embed_vision.embedding_projection.weight",
}

MODULES = {
    "vision_attention_norm": "input_layernorm",
    "vision_query": "self_attn.q_proj",
    "vision_key": "self_attn.k_proj",
    "vision_value": "self_attn.v_proj",
    "vision_query_norm": "self_attn.q_norm",
    "vision_key_norm": "self_attn.k_norm",
    "vision_output": "self_attn.o_proj",
    "vision_attention_post_norm": "post_attention_layernorm",
    "vision_mlp_norm": "pre_feedforward_layernorm",
    "vision_gate": "mlp.gate_proj",
    "vision_up": "mlp.up_proj",
    "vision_down": "mlp.down_proj",
    "vision_mlp_post_norm": "post_feedforward_layernorm",
}
"""Weight of a layer -> Hugging Face's module."""


def weights(
    vision: Gemma4VisionConfig,
) -> list[tuple[str, str, tuple[str, ...], int | None]]:
    """Return (name in files, name, path in the params, layer or None) of each vision weight."""
    top, names, _ = gemma4_vision.weight_names(vision)

    def file_name(name: str, layer: int) -> str:
        bound = next((suffix for suffix in BOUNDS if name.endswith(suffix)), "")
        module = MODULES[name.removesuffix(bound)]
        kind = bound[1:] or ("weight" if name.endswith("_norm") else "linear.weight")
        return f"vision_tower.encoder.layers.{layer}.{module}.{kind}"

    of_layers = [
        (file_name(name, layer), name, ("vision_layers", "layer_0"), layer)
        for layer in range(vision.num_layers)
        for name in names
    ]
    return [*((TOP_NAMES[name], name, ("vision",), None) for name in top), *of_layers]


def plain_name(name: str) -> str | None:
    """Return the name as `weights` has it; None: not of vision."""
    plain = name.removeprefix("model.")
    return plain if plain.startswith(("vision_tower.", "embed_vision.")) else None
