"""What the families with mixtures of experts add to the others: defaults, names of weights, how fields read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpu_rl.errors import InputError
from tpu_rl.models.architecture import Experts

MIXTRAL = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "num_key_value_heads": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,  # ours: it takes the softmax of the chosen logits, which is the same
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
OLMOE = {
    "rms_norm_eps": 1e-5,
    "wide_norm": True,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}
"""What transformers takes where a configuration is silent."""

NAMES = {
    "router": "mlp.gate.weight",
    "expert_gate": "mlp.experts.{expert}.gate_proj.weight",
    "expert_up": "mlp.experts.{expert}.up_proj.weight",
    "expert_down": "mlp.experts.{expert}.down_proj.weight",
}
"""Our names -> Hugging Face's inside `model.layers.N.`, as published checkpoints have them: an expert a tensor."""

MIXTRAL_NAMES = {
    "router": "block_sparse_moe.gate.weight",
    "expert_gate": "block_sparse_moe.experts.{expert}.w1.weight",
    "expert_up": "block_sparse_moe.experts.{expert}.w3.weight",
    "expert_down": "block_sparse_moe.experts.{expert}.w2.weight",
}

OLMOE_NAMES = NAMES | {
    "query_wide_norm": "self_attn.q_norm.weight",
    "key_wide_norm": "self_attn.k_norm.weight",
}

MOST_EXPERTS = 2**14


def experts(hf: Mapping[str, Any], where: str) -> Experts:
    """The mixture of a configuration with its family's defaults.

    Raises InputError where numbers do not go together, or some layers have an MLP in place of a mixture.
    """
    if hf.get("decoder_sparse_step", 1) != 1 or hf.get("mlp_only_layers"):
        raise InputError(
            "layers without experts among layers with them are not supported",
            where=where or "config.json",
            why=f"decoder_sparse_step = {hf['decoder_sparse_step']}, mlp_only_layers = {hf['mlp_only_layers']}"[:200],
            fix="decoder_sparse_step = 1 and no mlp_only_layers",
        )
    # Newer files may have either name, whatever the family.
    count = hf.get("num_local_experts") or hf["num_experts"]
    width = hf.get("moe_intermediate_size") or hf["intermediate_size"]
    chosen = hf["num_experts_per_tok"]
    numbers = {"num_experts": count, "num_experts_per_tok": chosen, "moe_intermediate_size": width}
    for field, most in zip(numbers, (MOST_EXPERTS, count, 2**22), strict=True):
        if type(numbers[field]) is not int or not 1 <= numbers[field] <= most:
            raise InputError(
                f"{field} = {str(numbers[field])[:40]}",
                where=where or "config.json",
                why=f"it is a whole number, 1 to {most:,}",
            )
    return Experts(count, chosen, width, bool(hf["norm_topk_prob"]))
