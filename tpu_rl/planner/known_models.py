"""Shapes of well-known models, to plan a run before any weight is downloaded.

They are the fields of each model's published config.json that decide sizes and shapes. Nothing here
loads weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _sizes(
    width: int, mlp: int, layers: int, heads: int, kv_heads: int, vocabulary: int
) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
    }


def _llama(
    sizes: dict[str, Any], factor: float, head_dim: int, tied: bool = False
) -> dict[str, Any]:
    return sizes | {
        "model_type": "llama",
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": tied,
    }


def _qwen(generation: int, sizes: dict[str, Any], tied: bool) -> dict[str, Any]:
    return sizes | {
        "model_type": f"qwen{generation}",
        "rope_theta": 1e6,
        "tie_word_embeddings": tied,
    }


def _qwen3_moe(sizes: dict[str, Any], experts: int, chosen: int, width: int) -> dict[str, Any]:
    return sizes | {
        "model_type": "qwen3_moe",
        "head_dim": 128,
        "rope_theta": 1e6,
        "norm_topk_prob": True,
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": width,
    }


def _gemma2(sizes: dict[str, Any]) -> dict[str, Any]:
    return sizes | {
        "model_type": "gemma2",
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    }


def _gemma3(sizes: dict[str, Any], window: int, factor: float | None = None) -> dict[str, Any]:
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": factor}} if factor else {}
    return (
        sizes
        | scaling
        | {
            "model_type": "gemma3_text",
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": window,
        }
    )


SHAPES: Mapping[str, dict[str, Any]] = {
    "Llama-3.2-1B": _llama(
        _sizes(2048, 8192, 16, 32, 8, 128_256), factor=32.0, head_dim=64, tied=True
    ),
    "Llama-3.1-8B": _llama(_sizes(4096, 14_336, 32, 32, 8, 128_256), factor=8.0, head_dim=128),
    "Llama-3.3-70B": _llama(_sizes(8192, 28_672, 80, 64, 8, 128_256), factor=8.0, head_dim=128),
    "Qwen2.5-0.5B": _qwen(2, _sizes(896, 4864, 24, 14, 2, 151_936), tied=True),
    "Qwen2.5-1.5B": _qwen(2, _sizes(1536, 8960, 28, 12, 2, 151_936), tied=True),
    "Qwen2.5-7B": _qwen(2, _sizes(3584, 18_944, 28, 28, 4, 152_064), tied=False),
    "Qwen2.5-32B": _qwen(2, _sizes(5120, 27_648, 64, 40, 8, 152_064), tied=False),
    "Qwen3-0.6B": _qwen(3, _sizes(1024, 3072, 28, 16, 8, 151_936), tied=True),
    "Qwen3-4B": _qwen(3, _sizes(2560, 9728, 36, 32, 8, 151_936), tied=True),
    "Qwen3-8B": _qwen(3, _sizes(4096, 12_288, 36, 32, 8, 151_936), tied=False),
    "Qwen3-30B-A3B": _qwen3_moe(
        _sizes(2048, 6144, 48, 32, 4, 151_936), experts=128, chosen=8, width=768
    ),
    "Gemma-2-2B": _gemma2(_sizes(2304, 9216, 26, 8, 4, 256_000)),
    "Gemma-2-9B": _gemma2(_sizes(3584, 14_336, 42, 16, 8, 256_000)),
    "Gemma-3-1B": _gemma3(_sizes(1152, 6912, 26, 4, 1, 262_144), window=512),
    "Gemma-3-12B": _gemma3(_sizes(3840, 15_360, 48, 16, 8, 262_208), window=1024, factor=8.0),
}
"""Name -> a Hugging Face configuration, as `models.from_config` reads it."""


def find(name: str) -> dict[str, Any] | None:
    """Return the shape of a well-known model, or None.

    `name` may be a hub id such as "meta-llama/Llama-3.1-8B-Instruct", in upper or lower case.
    """
    model = name.rpartition("/")[2].lower()
    for suffix in ("-it", "-instruct", "-pt"):
        model = model.removesuffix(suffix)
    return next((shape for known, shape in SHAPES.items() if known.lower() == model), None)
