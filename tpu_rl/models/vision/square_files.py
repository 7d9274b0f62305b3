"""The configurations of Hugging Face whose towers read squares of pixels: LLaVA with a tower of
CLIP or SigLIP, Gemma 3, Idefics3, SmolVLM and InternVL."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from tpu_rl.errors import InputError
from tpu_rl.models.hf.checks import require_size, require_supported
from tpu_rl.models.vision import towers
from tpu_rl.models.vision.config import SquareVisionConfig

IDEFICS = ("idefics3", "smolvlm")

KINDS = ("internvl_vision", "clip_vision_model", "siglip_vision_model", "idefics3_vision")
"""The kinds of towers that a vision_config may name."""

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


def read(source: Mapping[str, Any], text_size: int) -> SquareVisionConfig:
    """Return the vision part of a configuration.

    Raises:
        InputError: the tower is not one of `KINDS`, or a field is not supported.
    """
    model_type = source["model_type"]
    family = towers.TOWERS[model_type]
    kind, fields = _tower(source)
    is_internvl = model_type == "internvl"
    merge, squares = _squares(source, fields)

    layer, strategy, checks = _feature_layer(source, fields["num_hidden_layers"])
    activation = fields["hidden_act"]
    projector_activation = "gelu"
    if family.reads_layer:
        projector_activation = source.get("projector_hidden_act", "gelu")
    num_heads = fields["num_attention_heads"]
    tower_values = {name: fields.get(name, value) for name, value in INTERNVL_VALUES.items()}
    require_supported(
        {
            **checks,
            "projector_hidden_act": (
                projector_activation,
                projector_activation in towers.ACTIVATIONS,
            ),
            "vision_config.hidden_act": (activation, activation in towers.ACTIVATIONS),
            "vision_config.num_attention_heads": (
                num_heads,
                fields["hidden_size"] % num_heads == 0,
            ),
            **squares,
            **{
                f"vision_config.{name}": (value, not is_internvl or value == INTERNVL_VALUES[name])
                for name, value in tower_values.items()
            },
        },
        why="the model would load, but its outputs would be wrong",
        fix="use a model whose features are the states of one layer of the tower, of whole squares "
        "of patches",
    )
    outer = {name: value for name, value in source.items() if name != "text_config"}
    if kind == "siglip_vision_model":
        # Nothing reads SigLIP's pooling head, which is left out.
        outer["vision_config"] = {**source["vision_config"], "vision_use_head": False}
    token = source.get("image_token_index", source.get("image_token_id", family.image_token))
    return SquareVisionConfig(
        model_type=model_type,
        image_size=fields["image_size"],
        patch_size=fields["patch_size"],
        hidden_size=fields["hidden_size"],
        mlp_size=fields["intermediate_size"],
        num_layers=fields["num_hidden_layers"],
        num_read_layers=layer,
        num_heads=num_heads,
        eps=float(fields["layer_norm_eps"]),
        activation=towers.ACTIVATIONS[activation],
        projector_activation=towers.ACTIVATIONS[projector_activation],
        projector_bias=bool(source.get("multimodal_projector_bias", True)),
        keeps_first=strategy == "full",
        image_token=int(token),
        channels=fields["num_channels"],
        has_class=kind in ("clip_vision_model", "internvl_vision"),
        has_first_norm=kind == "clip_vision_model",
        has_patch_bias=kind != "clip_vision_model",
        has_key_biases=not is_internvl or bool(fields.get("attention_bias")),
        has_gains=is_internvl,
        has_last_norm=not family.reads_layer,
        projector=family.projector,
        merge=merge,
        source=json.dumps(outer, sort_keys=True),
        **(_gemma_tokens(source) if model_type == "gemma3" else {}),
    )


def _gemma_tokens(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `SquareVisionConfig` about the tokens around an image, for Gemma 3."""
    first, last = (
        int(source.get(f"{name}_index", source.get(f"{name}_id", default)))
        for name, default in (("boi_token", 255_999), ("eoi_token", 256_000))
    )
    return {
        "around": (first, last),
        "gap": "\n\n",
        "written": "before",
        "two_way": ("full", "sliding"),
    }


def _tower(source: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return (one of `KINDS`, the fields of vision_config with transformers' defaults).

    Raises:
        InputError: the tower is not one of `KINDS`, or a size is out of range.
    """
    model_type = source["model_type"]
    default = towers.TOWERS[model_type].tower
    tower = source.get("vision_config")
    named = tower.get("model_type") if isinstance(tower, Mapping) else tower
    # SmolVLM's files have another name for the tower of Idefics3.
    kind = default if model_type in IDEFICS or named is None else named
    if not isinstance(tower, Mapping) or kind not in KINDS:
        raise InputError(
            "the model's vision tower is not supported",
            why=f"vision_config has the model_type {named!r}"[:200],
            fix="use a model with a tower of CLIP or SigLIP (clip_vision_model, "
            "siglip_vision_model)",
        )
    fields = dict(tower)
    if model_type == "internvl":
        for name in ("image_size", "patch_size"):  # They may have a height and a width.
            sides = fields.get(name)
            if isinstance(sides, list) and len({*sides}) == 1:
                fields[name] = sides[0]
    return kind, towers.with_defaults(kind, fields)


def _feature_layer(
    source: Mapping[str, Any], num_layers: int
) -> tuple[int, str, dict[str, tuple[Any, bool]]]:
    """Return (number of layers whose states are features, which of the states, the fields about
    them for `require_supported`)."""
    model_type = source["model_type"]
    if not towers.TOWERS[model_type].reads_layer:
        return num_layers, "full", {}
    # Layers are counted from the first or, below 0, from the last.
    layer = source.get("vision_feature_layer", -2 if model_type == "llava" else -1)
    count = -1
    if isinstance(layer, int):
        count = layer if layer >= 0 else num_layers + 1 + layer
    strategies = ["default"] if model_type == "internvl" else ["default", "full"]
    strategy = source.get("vision_feature_select_strategy", "default")
    checks = {
        "vision_feature_layer": (layer, 0 <= count <= num_layers),
        "vision_feature_select_strategy": (strategy, strategy in strategies),
    }
    return count, strategy, checks


def _squares(
    source: Mapping[str, Any], fields: Mapping[str, Any]
) -> tuple[int, dict[str, tuple[Any, bool]]]:
    """Return the height, in patches, of the squares that become one feature each, and the fields
    about them for `require_supported`."""
    model_type = source["model_type"]
    image_size, patch_size = fields["image_size"], fields["patch_size"]
    side = image_size // patch_size
    checks = {"vision_config.patch_size": (patch_size, image_size % patch_size == 0)}
    if model_type == "gemma3":
        per_image = source.get("mm_tokens_per_image", 256)
        require_size("mm_tokens_per_image", per_image, towers.LARGEST_SIZE)
        merge = max(side // math.isqrt(per_image), 1)
        is_square = side % merge == 0 and per_image in (side**2, (side // merge) ** 2)
        return merge, checks | {"mm_tokens_per_image": (per_image, is_square)}
    if model_type in IDEFICS:
        merge = source.get("scale_factor", 2)
        require_size("scale_factor", merge, towers.LARGEST_SIZE)
        checks["scale_factor"] = (merge, side % merge == 0)
        checks["vision_config.image_size"] = (image_size, side in IDEFICS_SIDES)
        return merge, checks
    if model_type == "internvl":
        ratio = source.get("downsample_ratio", 0.5)
        merge = int(1 / ratio)
        return merge, checks | {"downsample_ratio": (ratio, side % merge == 0)}
    return 1, checks
