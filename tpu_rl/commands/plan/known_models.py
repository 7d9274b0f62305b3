"""Shapes of well-known models, to plan a run before any weight is downloaded.

They are the fields of each model's published config.json that decide sizes and shapes. Nothing here
loads weights.
"""

from __future__ import annotations

import difflib
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


def _llama2(sizes: dict[str, Any]) -> dict[str, Any]:
    return sizes | {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 10_000.0}


def _smollm2(sizes: dict[str, Any], theta: float) -> dict[str, Any]:
    return _llama2(sizes) | {"rope_theta": theta, "tie_word_embeddings": True}


def _qwen(generation: int, sizes: dict[str, Any], tied: bool) -> dict[str, Any]:
    return sizes | {
        "model_type": f"qwen{generation}",
        "head_dim": 128
        if generation == 3
        else sizes["hidden_size"] // sizes["num_attention_heads"],
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


def _gemma2(sizes: dict[str, Any], head_dim: int = 256, scalar: int = 256) -> dict[str, Any]:
    return sizes | {
        "model_type": "gemma2",
        "head_dim": head_dim,
        "query_pre_attn_scalar": scalar,
        "sliding_window": 4096,
    }


def _gemma3(
    sizes: dict[str, Any],
    window: int,
    factor: float | None = None,
    head_dim: int = 256,
    scalar: int = 256,
) -> dict[str, Any]:
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": factor}} if factor else {}
    return (
        sizes
        | scaling
        | {
            "model_type": "gemma3_text",
            "head_dim": head_dim,
            "query_pre_attn_scalar": scalar,
            "sliding_window": window,
        }
    )


def _with_siglip(text: dict[str, Any]) -> dict[str, Any]:
    """Return a Gemma 3 with the tower that --model.images reads."""
    tower = {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 896,
        "patch_size": 14,
    }
    return {
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": tower,
        "mm_tokens_per_image": 256,
    }


def _qwen25_vl(sizes: dict[str, Any], tied: bool) -> dict[str, Any]:
    return sizes | {
        "model_type": "qwen2_5_vl",
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "tie_word_embeddings": tied,
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "out_hidden_size": sizes["hidden_size"],
            "num_heads": 16,
        },
    }


def _with_gemma4_tower(text: dict[str, Any]) -> dict[str, Any]:
    """Return a Gemma 4 with the tower that --model.images reads."""
    if text["hidden_size_per_layer_input"]:
        tower: dict[str, Any] = {"use_clipped_linears": True}
    else:
        tower = {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 72,
            "standardize": True,
        }
        text = text | {"use_bidirectional_attention": "vision"}
    return {"model_type": "gemma4", "text_config": text, "vision_config": tower}


def _gemma4(sizes: dict[str, Any], full_kv_heads: int, **others: Any) -> dict[str, Any]:
    return (
        sizes
        | {
            "model_type": "gemma4_text",
            "num_global_key_value_heads": full_kv_heads,
            "attention_k_eq_v": True,
            "sliding_window": 1024,
            "final_logit_softcapping": 30.0,
            "hidden_size_per_layer_input": 0,
        }
        | others
    )


def _small_gemma4(
    sizes: dict[str, Any], period: int, reusing: int, is_double_wide: bool = False
) -> dict[str, Any]:
    types = ["sliding_attention"] * (period - 1) + ["full_attention"]
    return sizes | {
        "model_type": "gemma4_text",
        "layer_types": types * (sizes["num_hidden_layers"] // period),
        "num_kv_shared_layers": reusing,
        "use_double_wide_mlp": is_double_wide,
        "sliding_window": 512,
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 256,
    }


def _of(model_type: str, sizes: dict[str, Any], tied: bool = False) -> dict[str, Any]:
    """Return a shape whose other fields are the defaults of its family."""
    return sizes | {"model_type": model_type, "tie_word_embeddings": tied}


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    sizes = _sizes(2880, 2880, layers, 64, 8, 201_088)
    return _of("gpt_oss", sizes) | {"num_local_experts": experts, "num_experts_per_tok": 4}


_LLAMA_8B = _llama(_sizes(4096, 14_336, 32, 32, 8, 128_256), factor=8.0, head_dim=128)
_LLAMA_70B = _llama(_sizes(8192, 28_672, 80, 64, 8, 128_256), factor=8.0, head_dim=128)

SHAPES: Mapping[str, dict[str, Any]] = {
    "Llama-2-7B": _llama2(_sizes(4096, 11_008, 32, 32, 32, 32_000)),
    "Llama-2-13B": _llama2(_sizes(5120, 13_824, 40, 40, 40, 32_000)),
    "Llama-2-70B": _llama2(_sizes(8192, 28_672, 80, 64, 8, 32_000)),
    "Llama-3.2-1B": _llama(
        _sizes(2048, 8192, 16, 32, 8, 128_256), factor=32.0, head_dim=64, tied=True
    ),
    "Llama-3.2-3B": _llama(
        _sizes(3072, 8192, 28, 24, 8, 128_256), factor=32.0, head_dim=128, tied=True
    ),
    "Llama-3.1-8B": _LLAMA_8B,
    "Llama-3.1-70B": _LLAMA_70B,
    "Llama-3.3-70B": _LLAMA_70B,
    "SmolLM2-135M": _smollm2(_sizes(576, 1536, 30, 9, 3, 49_152), theta=1e5),
    "SmolLM2-360M": _smollm2(_sizes(960, 2560, 32, 15, 5, 49_152), theta=1e5),
    "SmolLM2-1.7B": _smollm2(_sizes(2048, 8192, 24, 32, 32, 49_152), theta=1.3e5),
    "Mixtral-8x7B": _sizes(4096, 14_336, 32, 32, 8, 32_000)
    | {
        "model_type": "mixtral",
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "OLMoE-1B-7B": _sizes(2048, 1024, 16, 16, 16, 50_304)
    | {
        "model_type": "olmoe",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "norm_topk_prob": False,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
    "Qwen2.5-0.5B": _qwen(2, _sizes(896, 4864, 24, 14, 2, 151_936), tied=True),
    "Qwen2.5-1.5B": _qwen(2, _sizes(1536, 8960, 28, 12, 2, 151_936), tied=True),
    "Qwen2.5-3B": _qwen(2, _sizes(2048, 11_008, 36, 16, 2, 151_936), tied=True),
    "Qwen2.5-7B": _qwen(2, _sizes(3584, 18_944, 28, 28, 4, 152_064), tied=False),
    "Qwen2.5-14B": _qwen(2, _sizes(5120, 13_824, 48, 40, 8, 152_064), tied=False),
    "Qwen2.5-32B": _qwen(2, _sizes(5120, 27_648, 64, 40, 8, 152_064), tied=False),
    "Qwen2.5-72B": _qwen(2, _sizes(8192, 29_568, 80, 64, 8, 152_064), tied=False),
    "Qwen2.5-VL-3B": _qwen25_vl(_sizes(2048, 11_008, 36, 16, 2, 151_936), tied=True),
    "Qwen2.5-VL-7B": _qwen25_vl(_sizes(3584, 18_944, 28, 28, 4, 152_064), tied=False),
    "Qwen3-0.6B": _qwen(3, _sizes(1024, 3072, 28, 16, 8, 151_936), tied=True),
    "Qwen3-1.7B": _qwen(3, _sizes(2048, 6144, 28, 16, 8, 151_936), tied=True),
    "Qwen3-4B": _qwen(3, _sizes(2560, 9728, 36, 32, 8, 151_936), tied=True),
    "Qwen3-8B": _qwen(3, _sizes(4096, 12_288, 36, 32, 8, 151_936), tied=False),
    "Qwen3-14B": _qwen(3, _sizes(5120, 17_408, 40, 40, 8, 151_936), tied=False),
    "Qwen3-32B": _qwen(3, _sizes(5120, 25_600, 64, 64, 8, 151_936), tied=False),
    "Qwen3-30B-A3B": _qwen3_moe(
        _sizes(2048, 6144, 48, 32, 4, 151_936), experts=128, chosen=8, width=768
    ),
    "Qwen3-235B-A22B": _qwen3_moe(
        _sizes(4096, 12_288, 94, 64, 4, 151_936), experts=128, chosen=8, width=1536
    ),
    "Qwen3-Next-80B-A3B": _of("qwen3_next", _sizes(2048, 5632, 48, 16, 2, 151_936)),
    "Qwen3.5-9B": _of("qwen3_5_text", _sizes(4096, 12_288, 32, 16, 4, 248_320)),
    "Qwen3.5-35B-A3B": _of("qwen3_5_moe_text", _sizes(2048, 512, 40, 16, 2, 248_320)),
    "Gemma-2-2B": _gemma2(_sizes(2304, 9216, 26, 8, 4, 256_000)),
    "Gemma-2-9B": _gemma2(_sizes(3584, 14_336, 42, 16, 8, 256_000)),
    "Gemma-2-27B": _gemma2(_sizes(4608, 36_864, 46, 32, 16, 256_000), head_dim=128, scalar=144),
    "Gemma-3-1B": _gemma3(_sizes(1152, 6912, 26, 4, 1, 262_144), window=512),
    "Gemma-3-4B": _with_siglip(
        _gemma3(_sizes(2560, 10_240, 34, 8, 4, 262_208), window=1024, factor=8.0)
    ),
    "Gemma-3-12B": _with_siglip(
        _gemma3(_sizes(3840, 15_360, 48, 16, 8, 262_208), window=1024, factor=8.0)
    ),
    "Gemma-3-27B": _with_siglip(
        _gemma3(
            _sizes(5376, 21_504, 62, 32, 16, 262_208),
            window=1024,
            factor=8.0,
            head_dim=128,
            scalar=168,
        )
    ),
    "Gemma-4-E2B": _with_gemma4_tower(
        _small_gemma4(_sizes(1536, 6144, 35, 8, 1, 262_144), 5, 20, is_double_wide=True)
    ),
    "Gemma-4-E4B": _with_gemma4_tower(
        _small_gemma4(_sizes(2560, 10_240, 42, 8, 2, 262_144), 6, 18)
    ),
    "Gemma-4-12B": _gemma4(
        _sizes(3840, 15_360, 48, 16, 8, 262_144), 1, model_type="gemma4_unified_text"
    ),
    "Gemma-4-31B": _with_gemma4_tower(_gemma4(_sizes(5376, 21_504, 60, 32, 16, 262_144), 4)),
    "Gemma-4-26B-A4B": _with_gemma4_tower(
        _gemma4(
            _sizes(2816, 2112, 30, 16, 8, 262_144),
            2,
            enable_moe_block=True,
            num_experts=128,
            top_k_experts=8,
            moe_intermediate_size=704,
        )
    ),
    "SmolLM3-3B": _of("smollm3", _sizes(2048, 11_008, 36, 16, 4, 128_256), tied=True),
    "OLMo-2-0425-1B": _of("olmo2", _sizes(2048, 8192, 16, 16, 16, 100_352)),
    "OLMo-2-1124-7B": _of("olmo2", _sizes(4096, 11_008, 32, 32, 32, 100_352)),
    "OLMo-2-1124-13B": _of("olmo2", _sizes(5120, 13_824, 40, 40, 40, 100_352)),
    "OLMo-2-0325-32B": _of("olmo2", _sizes(5120, 27_648, 64, 40, 8, 100_352)),
    "Olmo-3-7B": _of("olmo3", _sizes(4096, 11_008, 32, 32, 32, 100_278)),
    "Olmo-3-32B": _of("olmo3", _sizes(5120, 27_648, 64, 40, 8, 100_278)),
    "Phi-4": _of("phi3", _sizes(5120, 17_920, 40, 40, 10, 100_352)),
    "Phi-4-mini": _of("phi3", _sizes(3072, 8192, 32, 24, 8, 200_064), tied=True)
    | {"partial_rotary_factor": 0.75},
    "GLM-4-9B-0414": _of("glm4", _sizes(4096, 13_696, 40, 32, 2, 151_552)),
    "GLM-4-32B-0414": _of("glm4", _sizes(6144, 23_040, 61, 48, 8, 151_552)),
    "gpt-oss-20b": _gpt_oss(layers=24, experts=32),
    "gpt-oss-120b": _gpt_oss(layers=36, experts=128),
    "DeepSeek-V3": _of("deepseek_v3", _sizes(7168, 18_432, 61, 128, 128, 129_280)),
    "Moonlight-16B-A3B": _of("deepseek_v3", _sizes(2048, 11_264, 27, 16, 16, 163_840))
    | {
        "q_lora_rank": None,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "Granite-3.3-2B": _of("granite", _sizes(2048, 8192, 40, 32, 8, 49_159), tied=True),
    "Granite-3.3-8B": _of("granite", _sizes(4096, 12_800, 40, 32, 8, 49_159), tied=True),
}
"""Name -> a Hugging Face configuration, as `models.from_config` reads it."""


def find(name: str) -> dict[str, Any] | None:
    """Return the shape of a well-known model, or None.

    `name` may be a hub id such as "meta-llama/Llama-3.1-8B-Instruct", in upper or lower case.
    """
    model = _short_name(name)
    return next((shape for known, shape in SHAPES.items() if known.lower() == model), None)


def nearest(name: str, count: int = 4) -> list[str]:
    """Return the well-known names most like `name`, best first; empty if none is like it."""
    by_lower = {known.lower(): known for known in SHAPES}
    close = difflib.get_close_matches(_short_name(name), by_lower, count, cutoff=0.7)
    return [by_lower[match] for match in close]


def _short_name(name: str) -> str:
    """Return the name of a model without owner, variant and date, in lower case."""
    model = name.rpartition("/")[2].lower().removeprefix("meta-")
    for suffix in ("-hf", "-chat", "-v0.1", "-0924", "-it", "-instruct", "-pt", "-base"):
        model = model.removesuffix(suffix)
    return model
