"""Mixtures of experts and latent attention in a Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpu_rl.models.config import AttentionConfig, LatentConfig, MoeConfig
from tpu_rl.models.hf import rope_config
from tpu_rl.models.hf.checks import require, require_size, require_together, require_values

GROUPED_BY_HEAD = ("linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight")
"""Names of tensors of several weights that have the rows of one head of keys, with the heads of
values that it serves, before those of the next."""

MAX_EXPERTS = 2**14
MAX_INTERMEDIATE_SIZE = 2**22


def read_moe(hf: Mapping[str, Any]) -> MoeConfig:
    """Return the mixture of a configuration with its family's defaults.

    Raises:
        InputError: a number is out of range, or only some of the layers are mixtures.
    """
    all_mixtures = {"decoder_sparse_step": 1, "mlp_only_layers": []}
    require_together(
        {name: hf.get(name) for name in all_mixtures},
        all(hf.get(name, value) in (value, ()) for name, value in all_mixtures.items()),
        why="only some layers have experts",
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
    widths = (intermediate_size, 2 * intermediate_size)
    require_together(
        {"moe_intermediate_size": intermediate_size, "hidden_size": hf["hidden_size"]},
        hf["model_type"] != "qwen3_vl_moe_text" or hf["hidden_size"] not in widths,
        why="files have the matrices of experts either way round, and their shapes would not tell "
        "which",
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
    require_together(
        {"n_group": groups, "topk_group": chosen, "n_shared_experts": shared},
        are_counts
        and chosen <= groups
        and num_experts % groups == 0
        and (groups == 1 or num_experts // groups >= 2)
        and experts_per_token <= chosen * (num_experts // groups),
        why=f"groups of {num_experts} experts must be of equal size, of two experts or more, and "
        "hold enough experts for each token; there must be a shared expert",
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
    require_together(
        {name: hf[name] for name in ("attention_bias", "qk_rope_head_dim", "v_head_dim")},
        not hf["attention_bias"] and rope_dim % 2 == 0 and value_dim <= own_dim + rope_dim,
        why="projections may have no bias, rotated dimensions form pairs, and values are at most "
        "as wide as keys",
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
