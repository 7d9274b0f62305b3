"""The rotary embedding in a Hugging Face configuration.

The newer form is `rope_parameters`, one dict or one per layer type; the older one is
`rope_scaling`. Either may leave theta to `rope_theta` outside. If a configuration has several of
these, the precedence is that of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tpu_rl.models.hf.checks import require
from tpu_rl.models.layers import RopeConfig

SCALINGS = ("default", "linear", "llama3", "yarn", "longrope")

GEMMA4 = ("gemma4_text", "gemma4_unified_text")
"""Families that may have the scaling "proportional" in full layers."""

SECTIONS = {
    "qwen2_vl_text": (16, 24, 24),
    "qwen2_5_vl_text": (16, 24, 24),
    "qwen3_vl_text": (24, 20, 20),
    "qwen3_vl_moe_text": (24, 20, 20),
}
"""Families whose frequencies turn with time, row or column -> default of `mrope_section`."""

OWN_SLIDING_ROPE = ("gemma3_text", "olmo3", *GEMMA4)
"""Families whose sliding layers have their own theta, `rope_local_base_freq`, and scaling."""


def read_rope(hf: Mapping[str, Any], head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotary embeddings of full and of sliding layers.

    `hf` is the configuration with its family's defaults. `head_dim` only matters if a part of a
    head's dimensions is rotated.

    Raises:
        InputError: the scaling is not supported, or a number is impossible.
    """
    older = hf.get("rope_scaling") or {}
    newer = hf.get("rope_parameters") or {}
    if hf["model_type"] in OWN_SLIDING_ROPE:
        full = newer.get("full_attention") or {}
        sliding = newer.get("sliding_attention") or {}
        return (
            _read_parameters(hf, {**full, **older}, hf["rope_theta"], head_dim),
            _read_parameters(hf, sliding, hf["rope_local_base_freq"], head_dim),
        )
    # The older form replaces the newer one entirely, its theta included.
    parameters = older or newer
    full = parameters.get("full_attention") or parameters
    sliding = parameters.get("sliding_attention") or full
    return (
        _read_parameters(hf, full, hf["rope_theta"], head_dim),
        _read_parameters(hf, sliding, hf["rope_theta"], head_dim),
    )


def _read_parameters(
    hf: Mapping[str, Any], parameters: Mapping[str, Any], default_theta: float, head_dim: int
) -> RopeConfig:
    scaling = parameters.get("rope_type") or parameters.get("type") or "default"
    if hf["model_type"] == "phi3" and scaling in ("su", "yarn"):
        scaling = "longrope"  # Names in older configurations.
    if scaling == "mrope" and hf["model_type"] in SECTIONS:
        scaling = "default"  # The name in older configurations.
    is_proportional = scaling == "proportional" and hf["model_type"] in GEMMA4
    fix = "use a model with one of: " + ", ".join(SCALINGS)
    is_known = scaling in SCALINGS or is_proportional
    require("rope_type", scaling, is_known, "the model would compute other rotary angles", fix)
    if is_proportional:
        fraction = parameters.get("partial_rotary_factor", 1.0)
        theta = _positive("rope_theta", parameters.get("rope_theta") or default_theta)
        factor = _positive("factor", parameters.get("factor") or 1.0)
        return RopeConfig(theta, scaling, factor, fraction=fraction)
    rope = RopeConfig(
        _positive("rope_theta", parameters.get("rope_theta") or default_theta),
        scaling,
        fraction=_read_fraction(hf, parameters, head_dim),
        interleaved=hf.get("rope_interleave", False),
    )
    if hf["model_type"] in SECTIONS:
        rope = _with_sections(rope, hf, parameters, head_dim)
    if scaling == "default":
        return rope
    if scaling == "linear":
        return replace(rope, factor=_positive("factor", parameters["factor"]))
    original_length = int(
        hf.get("original_max_position_embeddings")
        or parameters.get("original_max_position_embeddings")
        or hf["max_position_embeddings"]
    )
    _positive("original_max_position_embeddings", original_length)
    rope = replace(rope, original_length=original_length)
    if scaling == "llama3":
        return replace(
            rope,
            factor=_positive("factor", parameters["factor"]),
            low_freq_factor=_positive("low_freq_factor", parameters["low_freq_factor"]),
            high_freq_factor=_positive("high_freq_factor", parameters["high_freq_factor"]),
        )
    extension = parameters.get("factor") or hf["max_position_embeddings"] / original_length
    factor = _positive("factor", extension)
    if scaling == "yarn":
        return replace(
            rope,
            factor=factor,
            beta_fast=_positive("beta_fast", parameters.get("beta_fast") or 32.0),
            beta_slow=_positive("beta_slow", parameters.get("beta_slow") or 1.0),
            truncate=bool(parameters.get("truncate", True)),
            magnitude=_yarn_magnitude(parameters, factor),
        )
    divisors = tuple(_positive("short_factor", number) for number in parameters["short_factor"])
    pairs = rope.rotated(head_dim) // 2
    why = f"there are {pairs} pairs of rotated dimensions, and it has {len(divisors)} numbers"
    require("short_factor", divisors, len(divisors) == pairs, why)
    magnitude = parameters.get("attention_factor")
    if magnitude is None and factor > 1:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original_length))
    magnitude = _positive("attention_factor", 1.0 if magnitude is None else magnitude)
    return replace(rope, divisors=divisors, magnitude=magnitude)


def _with_sections(
    rope: RopeConfig, hf: Mapping[str, Any], parameters: Mapping[str, Any], head_dim: int
) -> RopeConfig:
    """Return the rotary embedding with its sections. Raises InputError if they do not fit."""
    sections = parameters.get("mrope_section") or SECTIONS[hf["model_type"]]
    are_sizes = len(sections) == 3 and all(type(size) is int and size >= 0 for size in sections)
    why = f"its three numbers share the {head_dim // 2} frequencies of a head"
    require("mrope_section", sections, are_sizes and sum(sections) == head_dim // 2, why)
    alternate = hf["model_type"].startswith("qwen3_vl")
    return replace(rope, sections=tuple(sections), sections_alternate=alternate)


def _read_fraction(hf: Mapping[str, Any], parameters: Mapping[str, Any], head_dim: int) -> float:
    """Return the part of a head's dimensions that is rotated."""
    fraction = parameters.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    rotated = int(head_dim * fraction)
    is_read = hf.get("partial_rotary_factor") is not None or fraction == 1.0
    require(
        "partial_rotary_factor",
        fraction,
        is_read and 0 < fraction <= 1 and rotated > 0 and rotated % 2 == 0,
        why=f"{rotated} of the {head_dim} dimensions of a head would be rotated; they form "
        f"pairs, and {hf['model_type']} may always rotate all of them",
    )
    return fraction


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """Return the factor by which scores should grow in a context longer by `factor`, its square
    root.

    See arXiv 2309.00071, section 3.4. The logarithm has the `weight`.
    """
    return 0.1 * weight * math.log(max(factor, 1.0)) + 1.0


def _yarn_magnitude(parameters: Mapping[str, Any], factor: float) -> float:
    """Return the factor of cosines and sines."""
    stated = parameters.get("attention_factor")
    if stated is not None:
        return _positive("attention_factor", stated)
    mscale, mscale_all_dim = (parameters.get(name) for name in ("mscale", "mscale_all_dim"))
    if mscale and mscale_all_dim:
        return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all_dim)
    return yarn_magnitude(factor)


def _positive(name: str, value: Any) -> float:
    """Return a number of the rotary embedding. Raises InputError if it is not positive."""
    number = float(value)
    require(name, number, 0 < number < math.inf, "rotary angles need a positive finite number")
    return number
