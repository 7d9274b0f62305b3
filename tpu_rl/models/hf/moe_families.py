"""Families with mixtures of experts: defaults, names of weights, and how the mixture is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpu_rl.errors import InputError
from tpu_rl.models.config import MoeConfig

# Values that transformers assumes for fields that a configuration does not have.

MIXTRAL = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "num_key_value_heads": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    # Not a field of Mixtral: it takes the softmax over the chosen experts, which is the same.
    "norm_topk_prob": True,
}
QWEN3_MOE = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
}
GPT_OSS = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "attention_sinks": True,
    "sliding_window": 128,
    "sliding_window_pattern": 2,
    "num_experts": 128,
    "num_experts_per_tok": 4,
    # Not a field of gpt-oss: it takes the softmax over the chosen experts, which is the same.
    "norm_topk_prob": True,
    "biased_experts": True,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
OLMOE = {
    "rms_norm_eps": 1e-5,
    "joint_query_key_norm": True,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}

# Weight -> Hugging Face's name inside `model.layers.N.`. Published checkpoints have one tensor for
# each expert.

NAMES = {
    "router": "mlp.gate.weight",
    "expert_gate": "mlp.experts.{expert}.gate_proj.weight",
    "expert_up": "mlp.experts.{expert}.up_proj.weight",
    "expert_down": "mlp.experts.{expert}.down_proj.weight",
}
MIXTRAL_NAMES = {
    "router": "block_sparse_moe.gate.weight",
    "expert_gate": "block_sparse_moe.experts.{expert}.w1.weight",
    "expert_up": "block_sparse_moe.experts.{expert}.w3.weight",
    "expert_down": "block_sparse_moe.experts.{expert}.w2.weight",
}
# All experts are one tensor, whose columns alternate between gate and up.
GPT_OSS_NAMES = {
    "sink_bias": "self_attn.sinks",
    "router": "mlp.router.weight",
    "router_bias": "mlp.router.bias",
    "expert_gate": "mlp.experts.gate_up_proj",
    "expert_up": "mlp.experts.gate_up_proj",
    "expert_down": "mlp.experts.down_proj",
    "expert_gate_bias": "mlp.experts.gate_up_proj_bias",
    "expert_up_bias": "mlp.experts.gate_up_proj_bias",
    "expert_down_bias": "mlp.experts.down_proj_bias",
}
OLMOE_NAMES = NAMES | {
    "query_wide_norm": "self_attn.q_norm.weight",
    "key_wide_norm": "self_attn.k_norm.weight",
}

MAX_EXPERTS = 2**14
MAX_INTERMEDIATE_SIZE = 2**22


def read_moe(hf: Mapping[str, Any], where: str) -> MoeConfig:
    """Return the mixture of a configuration with its family's defaults.

    Raises:
        InputError: a number is out of range, or only some of the layers are mixtures.
    """
    where = where or "config.json"
    if hf.get("decoder_sparse_step", 1) != 1 or hf.get("mlp_only_layers"):
        given = (
            f"decoder_sparse_step = {hf['decoder_sparse_step']}, "
            f"mlp_only_layers = {hf['mlp_only_layers']}"
        )
        raise InputError(
            "models in which only some layers have experts are not supported",
            where=where,
            why=given[:200],
            fix="use a model with decoder_sparse_step = 1 and without mlp_only_layers",
        )
    # Newer files may have either name, in any family.
    num_experts = hf.get("num_local_experts") or hf["num_experts"]
    experts_per_token = hf["num_experts_per_tok"]
    intermediate_size = hf.get("moe_intermediate_size") or hf["intermediate_size"]
    for field, number, largest in (
        ("num_experts", num_experts, MAX_EXPERTS),
        ("num_experts_per_tok", experts_per_token, num_experts),
        ("moe_intermediate_size", intermediate_size, MAX_INTERMEDIATE_SIZE),
    ):
        if type(number) is not int or not 1 <= number <= largest:
            raise InputError(
                f"{field} = {str(number)[:40]} is out of range",
                where=where,
                why=f"it must be a whole number from 1 to {largest:,}",
                fix="correct config.json, or download it again",
            )
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        intermediate_size=intermediate_size,
        normalize_weights=bool(hf["norm_topk_prob"]),
        bias=hf.get("biased_experts", False),
    )
