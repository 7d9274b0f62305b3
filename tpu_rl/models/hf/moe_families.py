"""Families with mixtures of experts: defaults, names of weights, and how the mixture is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpu_rl.errors import InputError
from tpu_rl.models.config import AttentionConfig, LatentConfig, MoeConfig
from tpu_rl.models.hf import rope_config
from tpu_rl.models.hf.checks import require, require_size, require_values

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
QWEN3_VL_MOE = {
    **QWEN3_MOE,
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    # Not a field of Qwen3-VL: weights are always divided by their sum.
    "norm_topk_prob": True,
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
DEEPSEEK_V3 = {
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rope_interleave": True,
    "max_position_embeddings": 4096,
    "num_experts": None,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}
QWEN3_5_MOE = {
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    # Not fields of Qwen3.5: there is no other MLP, and weights are always divided by their sum.
    "intermediate_size": 512,
    "norm_topk_prob": True,
}
QWEN3_NEXT = {
    **QWEN3_5_MOE,
    "intermediate_size": 5632,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
}
GEMMA4 = {
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
    # Not a field of Gemma 4: weights are always divided by their sum.
    "norm_topk_prob": True,
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
QWEN3_5_MOE_NAMES = NAMES | {
    "shared_gate": "mlp.shared_expert.gate_proj.weight",
    "shared_up": "mlp.shared_expert.up_proj.weight",
    "shared_down": "mlp.shared_expert.down_proj.weight",
    "shared_router": "mlp.shared_expert_gate.weight",
}
QWEN3_NEXT_NAMES = QWEN3_5_MOE_NAMES | {
    "delta_query": "linear_attn.in_proj_qkvz.weight",
    "delta_key": "linear_attn.in_proj_qkvz.weight",
    "delta_value": "linear_attn.in_proj_qkvz.weight",
    "delta_gate": "linear_attn.in_proj_qkvz.weight",
    "delta_rate": "linear_attn.in_proj_ba.weight",
    "delta_decay": "linear_attn.in_proj_ba.weight",
}
GROUPED_BY_HEAD = ("linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight")
"""Names of tensors of several weights that have the rows of one head of keys, with the heads of
values that it serves, before those of the next."""
MIXTRAL_NAMES = {
    "router": "block_sparse_moe.gate.weight",
    "expert_gate": "block_sparse_moe.experts.{expert}.w1.weight",
    "expert_up": "block_sparse_moe.experts.{expert}.w3.weight",
    "expert_down": "block_sparse_moe.experts.{expert}.w2.weight",
}
DEEPSEEK_V3_NAMES = NAMES | {"router_correction_bias": "mlp.gate.e_score_correction_bias"}
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
# All experts are one tensor, [experts, inputs, outputs]. Columns of the gate come first.
QWEN3_VL_MOE_NAMES = {
    "router": "mlp.gate.weight",
    "expert_gate": "mlp.experts.gate_up_proj",
    "expert_up": "mlp.experts.gate_up_proj",
    "expert_down": "mlp.experts.down_proj",
}
# All experts are one tensor, [experts, outputs, inputs]. Rows of the gate come first.
GEMMA4_NAMES = {
    "router": "router.proj.weight",
    "router_norm": "router.scale",
    "router_gain": "router.per_expert_scale",
    "dense_post_norm": "post_feedforward_layernorm_1.weight",
    "expert_norm": "pre_feedforward_layernorm_2.weight",
    "expert_post_norm": "post_feedforward_layernorm_2.weight",
    "expert_gate": "experts.gate_up_proj",
    "expert_up": "experts.gate_up_proj",
    "expert_down": "experts.down_proj",
}
OLMOE_NAMES = NAMES | {
    "query_wide_norm": "self_attn.q_norm.weight",
    "key_wide_norm": "self_attn.k_norm.weight",
}

MAX_EXPERTS = 2**14
MAX_INTERMEDIATE_SIZE = 2**22


def read_moe(hf: Mapping[str, Any]) -> MoeConfig:
    """Return the mixture of a configuration with its family's defaults.

    Raises:
        InputError: a number is out of range, or only some of the layers are mixtures.
    """
    if hf.get("decoder_sparse_step", 1) != 1 or hf.get("mlp_only_layers"):
        stated = (
            f"decoder_sparse_step = {hf['decoder_sparse_step']}, "
            f"mlp_only_layers = {hf['mlp_only_layers']}"
        )
        raise InputError(
            "models in which only some layers have experts are not supported",
            why=stated[:200],
            fix="use a model with decoder_sparse_step = 1 and without mlp_only_layers",
        )
    # Newer files may have either name, in any family.
    num_experts: Any = (
        hf.get("num_local_experts") or hf["num_experts"] or hf.get("n_routed_experts")
    )
    experts_per_token = hf["top_k_experts" if "top_k_experts" in hf else "num_experts_per_tok"]
    intermediate_size = hf.get("moe_intermediate_size") or hf["intermediate_size"]
    for field, number, largest in (
        ("num_experts", num_experts, MAX_EXPERTS),
        ("num_experts_per_tok", experts_per_token, num_experts),
        ("moe_intermediate_size", intermediate_size, MAX_INTERMEDIATE_SIZE),
    ):
        require_size(field, number, largest)
    is_turned = hf["model_type"] == "qwen3_vl_moe_text"
    if is_turned and hf["hidden_size"] in (intermediate_size, 2 * intermediate_size):
        raise InputError(
            f"moe_intermediate_size = {intermediate_size} is not supported with "
            f"hidden_size = {hf['hidden_size']}",
            why="files have the matrices of experts either way round, and their shapes would not "
            "tell which",
            fix="use a model whose experts are neither as wide nor half as wide",
        )
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        intermediate_size=intermediate_size,
        normalize_weights=bool(hf["norm_topk_prob"]),
        bias=hf.get("biased_experts", False),
        beside_mlp="enable_moe_block" in hf,
        **_read_shared_expert(hf),
        **_read_grouped_routing(hf, num_experts, experts_per_token),
    )


def _read_shared_expert(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields that Qwen3.5 has beside those of other mixtures; none for the others."""
    field = "shared_expert_intermediate_size"
    if field not in hf:
        return {}
    require_size(field, hf[field], MAX_INTERMEDIATE_SIZE)
    return {"shared_size": hf[field], "shared_is_routed": True}


def _read_grouped_routing(
    hf: Mapping[str, Any], num_experts: int, experts_per_token: int
) -> dict[str, Any]:
    """Read the fields that DeepSeek-V3 has beside those of other mixtures; none for the others."""
    if "n_routed_experts" not in hf:
        return {}
    require_values(
        hf,
        {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
        why="the router would choose other experts",
    )
    groups, chosen, shared = (hf[name] for name in ("n_group", "topk_group", "n_shared_experts"))
    are_counts = all(type(number) is int and number >= 1 for number in (groups, chosen, shared))
    if (
        not are_counts
        or chosen > groups
        or num_experts % groups
        or (groups > 1 and num_experts // groups < 2)
        or experts_per_token > chosen * (num_experts // groups)
    ):
        raise InputError(
            f"{num_experts} experts in n_group = {str(groups)[:40]}, topk_group = "
            f"{str(chosen)[:40]}, n_shared_experts = {str(shared)[:40]} are not supported",
            why="groups must be of equal size, of two experts or more, and hold enough experts for "
            "each token; there must be a shared expert",
            fix="download config.json again",
        )
    return {
        "scoring": "sigmoid",
        "has_correction": True,
        "num_groups": groups,
        "groups_per_token": chosen,
        "weight_scale": float(hf["routed_scaling_factor"]),
        "shared_size": shared * hf["moe_intermediate_size"],
    }


def read_dense_layers(hf: Mapping[str, Any]) -> int:
    """Return the number of layers at the beginning that have an MLP.

    Raises:
        InputError: no layer with experts is left.
    """
    count = hf.get("first_k_dense_replace", 0)
    most = hf["num_hidden_layers"]
    why = f"of {most} layers at least the last one must have experts"
    require("first_k_dense_replace", count, type(count) is int and 0 <= count < most, why)
    return count


def read_latent_attention(hf: Mapping[str, Any]) -> AttentionConfig:
    """Return the multi-head latent attention of a configuration.

    Raises:
        InputError: a size is out of range, or projections have biases.
    """
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    rank, rope_dim, own_dim, value_dim = (hf[name] for name in names)
    query_rank = hf["q_lora_rank"]
    sizes = {name: hf[name] for name in names}
    if query_rank is not None:
        sizes["q_lora_rank"] = query_rank
    for field, size in sizes.items():
        require_size(field, size, MAX_INTERMEDIATE_SIZE)
    if hf["attention_bias"] or rope_dim % 2 or value_dim > own_dim + rope_dim:
        raise InputError(
            f"latent attention with attention_bias = {hf['attention_bias']}, qk_rope_head_dim = "
            f"{rope_dim} and v_head_dim = {value_dim} is not supported",
            why="projections may have no bias, rotated dimensions form pairs, and values are at "
            "most as wide as keys",
            fix="use a model without these",
        )
    head_dim = own_dim + rope_dim
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    scale = head_dim**-0.5
    if rope.get("mscale_all_dim") and rope.get("rope_type", rope.get("type")) != "default":
        scale *= rope_config.yarn_magnitude(rope["factor"], rope["mscale_all_dim"]) ** 2
    return AttentionConfig(
        num_heads=hf["num_attention_heads"],
        num_kv_heads=hf["num_attention_heads"],
        head_dim=head_dim,
        scale=scale,
        latent=LatentConfig(rank, rope_dim, value_dim, query_rank),
    )
