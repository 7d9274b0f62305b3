"""The rotary embedding in a Hugging Face configuration.

The newer form is `rope_parameters`, one dict or one per layer type; the older one is
`rope_scaling`. Either may leave theta to `rope_theta` outside. If a configuration has several of
these, the precedence is that of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tpu_rl.errors import InputError
from tpu_rl.models.layers import RopeConfig


def read_rope(hf: Mapping[str, Any]) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotary embeddings of full and of sliding layers.

    `hf` is the configuration with its family's defaults. Sliding layers of Gemma 3 have their own
    theta, `rope_local_base_freq`, and their own scaling.

    Raises:
        InputError: the scaling is not supported.
    """
    older = hf.get("rope_scaling") or {}
    newer = hf.get("rope_parameters") or {}
    if hf["model_type"] == "gemma3_text":
        full = newer.get("full_attention") or {}
        sliding = newer.get("sliding_attention") or {}
        return (
            _read_parameters(hf, {**full, **older}, hf["rope_theta"]),
            _read_parameters(hf, sliding, hf["rope_local_base_freq"]),
        )
    # The older form replaces the newer one entirely, its theta included.
    parameters = older or newer
    full = parameters.get("full_attention") or parameters
    sliding = parameters.get("sliding_attention") or full
    return (
        _read_parameters(hf, full, hf["rope_theta"]),
        _read_parameters(hf, sliding, hf["rope_theta"]),
    )


def _read_parameters(
    hf: Mapping[str, Any], parameters: Mapping[str, Any], default_theta: float
) -> RopeConfig:
    scaling = parameters.get("rope_type") or parameters.get("type") or "default"
    if scaling not in ("default", "linear", "llama3"):
        raise InputError(
            f"rope scaling {scaling!r} is not supported",
            where="config.json",
            why="the model would compute other rotary angles",
            fix="use a model with one of: default, linear, llama3",
        )
    theta = _positive("rope_theta", parameters.get("rope_theta") or default_theta)
    if scaling == "default":
        return RopeConfig(theta)
    factor = _positive("factor", parameters["factor"])
    if scaling == "linear":
        return RopeConfig(theta, scaling="linear", factor=factor)
    original_length = parameters.get("original_max_position_embeddings")
    return RopeConfig(
        theta,
        scaling="llama3",
        factor=factor,
        low_freq_factor=_positive("low_freq_factor", parameters["low_freq_factor"]),
        high_freq_factor=_positive("high_freq_factor", parameters["high_freq_factor"]),
        original_length=int(original_length or hf["max_position_embeddings"]),
    )


def _positive(name: str, value: Any) -> float:
    """Return a number of the rotary embedding. Raises InputError if it is not positive."""
    number = float(value)
    if not 0 < number < math.inf:
        raise InputError(
            f"{name} is {number}",
            where="config.json",
            why="rotary angles need a positive finite number",
            fix="download config.json again",
        )
    return number
