"""The supported families as data: how a Hugging Face configuration reads, and what its weights are called."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from tpu_rl.errors import InputError
from tpu_rl.models import expert_families, ropes
from tpu_rl.models.architecture import AttentionConfig, DecoderConfig, MlpConfig, NormConfig, VocabConfig

LAYER_NAMES = {
    "attention_norm": "input_layernorm.weight",
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "output": "self_attn.o_proj.weight",
    "query_bias": "self_attn.q_proj.bias",
    "key_bias": "self_attn.k_proj.bias",
    "value_bias": "self_attn.v_proj.bias",
    "output_bias": "self_attn.o_proj.bias",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
}
"""Our names -> Hugging Face's inside `model.layers.N.`; a family may override some."""

TOP_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "unembedding": "lm_head.weight",
    "final_norm": "model.norm.weight",
    "score": "score.weight",
}

GEMMA_NORMS = {
    "attention_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}

ACTIVATION_NAMES = {"silu": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "gelu": "gelu_exact"}
"""Hugging Face's name -> ours."""

HEAD = "ForSequenceClassification"
"""How Hugging Face's architectures with a head of `num_labels` numbers in place of the vocabulary end."""

NULLABLE = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
"""Fields where null means "none"; elsewhere it means the default."""

Kinds = Callable[[Mapping[str, Any]], list[str]]


def _full(config: Mapping[str, Any]) -> list[str]:
    return ["full"] * config["num_hidden_layers"]


def _all_sliding(config: Mapping[str, Any]) -> list[str]:
    return ["sliding" if config["sliding_window"] else "full"] * config["num_hidden_layers"]


def _sliding_if_used(config: Mapping[str, Any]) -> list[str]:
    slides = config["use_sliding_window"] and config["sliding_window"]
    return ["sliding" if slides else "full"] * config["num_hidden_layers"]


def _upper_sliding(config: Mapping[str, Any]) -> list[str]:
    slides = config["use_sliding_window"] and config["sliding_window"]
    first = config["max_window_layers"] if slides else config["num_hidden_layers"]
    return ["sliding" if i >= first else "full" for i in range(config["num_hidden_layers"])]


def _every_nth_full(config: Mapping[str, Any]) -> list[str]:
    period = config["sliding_window_pattern"]
    return ["sliding" if (i + 1) % period else "full" for i in range(config["num_hidden_layers"])]


@dataclasses.dataclass(frozen=True)
class Family:
    """What sets a family apart from a Llama."""

    architecture: str
    """The class that transformers loads it with."""
    defaults: Mapping[str, Any]
    """What transformers takes where a configuration is silent."""
    kinds: Kinds = _full
    """Layer kinds where the configuration has no `layer_types`."""
    reads_layer_types: bool = True
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Of layer weights, where they differ from `LAYER_NAMES`."""
    gemma: bool = False
    """Norm scales stored as distance from 1, norms at both ends of a branch, embeddings times sqrt(width)."""
    classifier: str | None = None
    """The class with a head, where it is not called as `architecture` but for its end. OLMoE has none at all."""

    @property
    def head_architecture(self) -> str:
        return self.classifier or self.architecture.replace("ForCausalLM", HEAD)


_LLAMA = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "query_key_value_bias": False,  # ours: Qwen2 has these without saying so, and no bias on the output
    "mlp_bias": False,
    "query_key_norm": False,  # ours: Qwen3 and Gemma 3 have it without saying so
    "wide_norm": False,  # ours: OLMoE has it without saying so
    "clip_qkv": None,
    "sliding_window": None,
    "num_key_value_heads": None,
    "head_dim": None,
    "query_pre_attn_scalar": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
_QWEN2 = {
    **_LLAMA,
    "query_key_value_bias": True,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN3 = {**_QWEN2, "query_key_value_bias": False, "query_key_norm": True, "head_dim": 128}
_GEMMA2 = {
    **_LLAMA,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "vocab_size": 256_000,
}
_GEMMA3 = {
    **_GEMMA2,
    "query_key_norm": True,
    "sliding_window_pattern": 6,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "vocab_size": 262_208,
}
_MIXTRAL = {**_LLAMA, **expert_families.MIXTRAL}
_QWEN3_MOE = {**_QWEN3, **expert_families.QWEN3_MOE}
_OLMOE = {**_LLAMA, **expert_families.OLMOE}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", _LLAMA, reads_layer_types=False),
    "mistral": Family(
        "MistralForCausalLM",
        {**_LLAMA, "sliding_window": 4096, "num_key_value_heads": 8},
        kinds=_all_sliding,
        reads_layer_types=False,
    ),
    "qwen2": Family("Qwen2ForCausalLM", _QWEN2, kinds=_upper_sliding),
    "qwen3": Family("Qwen3ForCausalLM", _QWEN3, kinds=_upper_sliding),
    "mixtral": Family(
        "MixtralForCausalLM",
        _MIXTRAL,
        kinds=_all_sliding,
        reads_layer_types=False,
        names=expert_families.MIXTRAL_NAMES,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _QWEN3_MOE,
        kinds=_sliding_if_used,
        reads_layer_types=False,
        names=expert_families.NAMES,
    ),
    "olmoe": Family("OlmoeForCausalLM", _OLMOE, reads_layer_types=False, names=expert_families.OLMOE_NAMES),
    "gemma2": Family("Gemma2ForCausalLM", _GEMMA2, kinds=_every_nth_full, names=GEMMA_NORMS, gemma=True),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _GEMMA3,
        kinds=_every_nth_full,
        names=GEMMA_NORMS,
        gemma=True,
        classifier="Gemma3Text" + HEAD,
    ),
}
"""By `model_type`. Gemma 3 with images ("gemma3") is read as the "gemma3_text" inside it."""


def text_part(source: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """The configuration of the language model in `source` (the whole of it, unless it also reads images).

    Raises InputError where its architecture is not one of `FAMILIES`.
    """
    model_type = source.get("model_type")
    if model_type == "gemma3" and "text_config" in source:
        return text_part({"model_type": "gemma3_text", **source["text_config"]}, where)
    if model_type not in FAMILIES:
        raise InputError(
            f"model_type {model_type!r} is not supported",
            where=where,
            why=f"architectures: {source.get('architectures')}",
            fix="supported: " + ", ".join([*FAMILIES, "gemma3"]),
        )
    return dict(source)


def _refuse(hf: Mapping[str, Any]) -> None:
    """Raises InputError for variations that would load and then compute something else."""
    for field, harmless in (
        ("quantization_config", None),
        ("partial_rotary_factor", 1.0),
        ("use_bidirectional_attention", False),
    ):
        if hf.get(field, harmless) not in (harmless, None):
            raise InputError(
                f"{field} = {hf[field]!r} is not supported", where="config.json", fix=f"{field} = {harmless}"
            )


LARGEST = {
    "num_hidden_layers": 1_000,
    "num_attention_heads": 4_096,
    "num_key_value_heads": 4_096,
    "head_dim": 2**14,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "vocab_size": 2**24,
}


def _require_sizes(hf: Mapping[str, Any], where: str) -> None:
    """Raises InputError where a size is no number, or beyond any model's: to list 10^9 layers would take all memory."""
    for field, largest in LARGEST.items():
        value = hf[field]
        if value is None and field not in REQUIRED:  # follows from the others
            continue
        if type(value) is not int or not 1 <= value <= largest:
            raise InputError(
                f"{field} = {str(value)[:40]}",
                where=where or "config.json",
                why=f"it is a whole number, 1 to {largest:,}",
            )


def _kinds(family: Family, hf: Mapping[str, Any]) -> tuple[str, ...]:
    """The kind of each layer. Raises InputError where it is none of ours or `layer_types` has not one a layer."""
    stated = hf.get("layer_types", []) if family.reads_layer_types else []
    kinds = tuple(kind.removesuffix("_attention") for kind in stated) or tuple(family.kinds(hf))
    if len(kinds) != hf["num_hidden_layers"] or not {*kinds} <= {"full", "sliding"}:
        raise InputError(
            f"layer_types = {stated} is not supported",
            where="config.json",
            fix=f"full_attention or sliding_attention, once for each of the {hf['num_hidden_layers']} layers",
        )
    if "sliding" in kinds and not hf["sliding_window"]:
        raise InputError("sliding_attention layers without a sliding_window", where="config.json")
    return kinds


def _attention(hf: Mapping[str, Any], kinds: tuple[str, ...], where: str) -> AttentionConfig:
    """Raises InputError where the numbers of heads and their width do not go together."""
    heads = hf["num_attention_heads"]
    kv_heads = hf["num_key_value_heads"] or heads
    head_dim = hf["head_dim"] or hf["hidden_size"] // heads
    if head_dim % 2 or heads % kv_heads:
        raise InputError(
            f"{heads} heads of width {head_dim} with {kv_heads} key-value heads",
            where=where,
            why="the width must be even (rotary pairs) and the heads a multiple of the key-value heads",
        )
    return AttentionConfig(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=(hf["query_pre_attn_scalar"] or head_dim) ** -0.5,
        window=hf["sliding_window"] if "sliding" in kinds else None,
        bias=hf["query_key_value_bias"] or hf["attention_bias"],
        output_bias=hf["attention_bias"],
        query_key_norm=hf["query_key_norm"],
        wide_norm=hf["wide_norm"],
        clip=hf["clip_qkv"],
        softcap=hf["attn_logit_softcapping"],
    )


def _activation(hf: Mapping[str, Any]) -> str:
    name = hf.get("hidden_activation") or hf["hidden_act"]
    if name not in ACTIVATION_NAMES:
        raise InputError(
            f"activation {name!r} is not supported",
            where="config.json",
            fix="supported: " + ", ".join(ACTIVATION_NAMES),
        )
    return ACTIVATION_NAMES[name]


REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def read_config(source: Mapping[str, Any], dtype: str, param_dtype: str, where: str = "") -> DecoderConfig:
    """A Hugging Face configuration, of the older or newer form, as ours. `where` is the file, for errors.

    Raises InputError naming what is missing or not supported.
    """
    inside_gemma3 = source.get("model_type") == "gemma3"
    source = text_part(source, where)
    family = FAMILIES[source["model_type"]]
    hf = {**family.defaults, **{key: value for key, value in source.items() if value is not None}}
    hf |= {field: None for field in NULLABLE if field in source and source[field] is None}
    missing = [field for field in REQUIRED if field not in hf]
    if missing:
        raise InputError("the model's configuration lacks " + ", ".join(missing), where=where)
    _require_sizes(hf, where)
    _refuse(hf)
    kinds = _kinds(family, hf)
    rope, sliding_rope = ropes.read(hf)
    size = hf["vocab_size"]
    return DecoderConfig(
        width=hf["hidden_size"],
        kinds=kinds,
        vocab=VocabConfig(
            size=size,
            valid=size,
            tied=hf["tie_word_embeddings"],
            embedding_scale=hf["hidden_size"] ** 0.5 if family.gemma else 1.0,
            softcap=hf["final_logit_softcapping"],
        ),
        attention=_attention(hf, kinds, where),
        mlp=MlpConfig(hf["intermediate_size"], _activation(hf), hf["mlp_bias"]),
        norm=NormConfig(hf["rms_norm_eps"], unit_offset=family.gemma, post=family.gemma),
        rope=rope,
        sliding_rope=sliding_rope,
        experts=expert_families.experts(hf, where) if "router" in family.names else None,
        dtype=dtype,
        param_dtype=param_dtype,
        outputs=_outputs(source),
        inside_gemma3=inside_gemma3,
        source=json.dumps(source, sort_keys=True),
    )


def _outputs(source: Mapping[str, Any]) -> int | None:
    """Of a head; None for a language model."""
    architectures = source.get("architectures") or [""]
    if not architectures[0].endswith(HEAD):
        return None
    return source["num_labels"] if "num_labels" in source else len(source.get("id2label", (0, 1)))


def weight_name(family: Family, name: str, layer: int | None, expert: int = 0) -> str:
    """What Hugging Face calls our weight `name`, of a layer of the model or (None) outside the layers."""
    if layer is None:
        return TOP_NAMES[name]
    return f"model.layers.{layer}.{(LAYER_NAMES | {**family.names})[name].format(expert=expert)}"


def plain_name(name: str) -> str | None:
    """A checkpoint's name of a weight as a text model has it; None for what is not part of the model.

    That is rotary frequencies, which old Llama checkpoints contain, and the image half of Gemma 3.
    """
    for prefix in ("language_model.", "model.language_model."):  # older and newer checkpoints of Gemma 3
        if name.startswith(prefix):
            inner = name.removeprefix(prefix)
            return inner if inner.startswith(("model.", "lm_head.")) else f"model.{inner}"
    foreign = name.removeprefix("model.").startswith(("vision_tower.", "multi_modal_projector."))
    return None if foreign or name.endswith("rotary_emb.inv_freq") else name
