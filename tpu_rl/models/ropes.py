"""How a Hugging Face configuration says its rotary embedding.

The newer form is `rope_parameters`, one dict or one a layer kind; the older `rope_scaling`. Either may leave theta to
`rope_theta` outside. Where a configuration has more than one of them, what transformers takes is taken here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpu_rl.errors import InputError
from tpu_rl.models.layers import RopeConfig


def read(hf: Mapping[str, Any]) -> tuple[RopeConfig, RopeConfig]:
    """Of full and of sliding layers. Raises InputError where the scaling is not supported.

    Sliding layers of Gemma 3 have a theta of their own, `rope_local_base_freq`, and are not scaled as the others are.
    """
    older, newer = hf.get("rope_scaling") or {}, hf.get("rope_parameters") or {}
    if hf["model_type"] == "gemma3_text":
        full, sliding = newer.get("full_attention") or {}, newer.get("sliding_attention") or {}
        return _rope(hf, {**full, **older}, hf["rope_theta"]), _rope(hf, sliding, hf["rope_local_base_freq"])
    given = older or newer  # the older form wins whole, its theta included
    full = given.get("full_attention") or given
    return _rope(hf, full, hf["rope_theta"]), _rope(hf, given.get("sliding_attention") or full, hf["rope_theta"])


def _rope(hf: Mapping[str, Any], parameters: Mapping[str, Any], theta: float) -> RopeConfig:
    scaling = parameters.get("rope_type") or parameters.get("type") or "default"
    if scaling not in ("default", "linear", "llama3"):
        raise InputError(
            f"rope scaling {scaling!r} is not supported", where="config.json", fix="supported: default, linear, llama3"
        )
    theta = float(parameters.get("rope_theta") or theta)
    if scaling == "default":
        return RopeConfig(theta)
    if scaling == "linear":
        return RopeConfig(theta, "linear", float(parameters["factor"]))
    return RopeConfig(
        theta,
        "llama3",
        float(parameters["factor"]),
        float(parameters["low_freq_factor"]),
        float(parameters["high_freq_factor"]),
        int(parameters.get("original_max_position_embeddings") or hf["max_position_embeddings"]),
    )
