"""The supported families of models, as data: their configurations and the names of their weights.

`FAMILIES`, which families.yaml holds, maps each `model_type` to what distinguishes the family.
`read_config` reads a Hugging Face configuration with it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tpu_rl import plain_values
from tpu_rl.errors import InputError
from tpu_rl.models.config import (
    RECURRENT,
    AttentionConfig,
    ClampedSwish,
    DecoderConfig,
    DeltaConfig,
    FullHeads,
    MlpConfig,
    NormConfig,
    VocabConfig,
)
from tpu_rl.models.hf import moe_families, rope_config
from tpu_rl.models.hf.checks import (
    require,
    require_heads,
    require_size,
    require_supported,
    require_together,
    require_values,
)
from tpu_rl.models.vision import towers

TOP_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "unembedding": "lm_head.weight",
    "final_norm": "model.norm.weight",
    "layer_embedding": "model.embed_tokens_per_layer.weight",
    "layer_inputs_projection": "model.per_layer_model_projection.weight",
    "layer_inputs_norm": "model.per_layer_projection_norm.weight",
    "score": "score.weight",
}
"""Weight outside of the layers -> Hugging Face's name."""

ACTIVATION_NAMES = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
    "gelu": "gelu_exact",
}
"""Hugging Face's name -> key of `layers.ACTIVATIONS`."""

HEAD_SUFFIX = "ForSequenceClassification"
"""Suffix of Hugging Face's architectures with a head of `num_labels` numbers in place of the
vocabulary."""

MTP_FIELDS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Names, in different families, of the number of modules that predict several tokens at once."""

IMAGE_MODULES = (
    *("vision_tower.", "multi_modal_projector.", "visual.", "vision_model.", "connector."),
    *("audio_tower.", "embed_vision.", "embed_audio.", "vision_embedder."),
)
"""Beginnings of the names of tensors that read images or sound, after "model."."""

KEY_MODULES = tuple(f"self_attn.{name}." for name in ("k_proj", "v_proj", "k_norm"))
"""Beginnings of the names of a layer's tensors for keys and values."""

NULLABLE = (
    *("sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "q_lora_rank"),
    "hidden_size_per_layer_input",
)
"""Fields in which null means "none". In all other fields it means the default."""

REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)
"""Fields without a default."""

MAX_SIZES = {
    "num_hidden_layers": 1_000,
    "num_attention_heads": 4_096,
    "num_key_value_heads": 4_096,
    "head_dim": 2**14,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "vocab_size": 2**24,
}
"""Field -> the largest value that is accepted. A file with 10^9 layers would otherwise take all
memory."""


UNROTATED = {"full": "unrotated"}
"""Type of a layer -> its type without rotary embedding."""


# The families.

LayerTypes = Literal[
    "full", "all_sliding", "sliding_if_used", "upper_sliding", "every_nth_full", "others_linear"
]


@dataclasses.dataclass(frozen=True)
class Family:
    """The differences between a family and Llama."""

    architecture: str
    """The class in transformers."""
    defaults: Mapping[str, Any]
    """Values that transformers assumes for fields that a configuration does not have."""
    layer_types: LayerTypes = "full"
    """The rule for configurations without the field `layer_types`; see `_usual_layer_types`."""
    reads_layer_types: bool = True
    """True if transformers reads the field `layer_types`."""
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Weight -> Hugging Face's name inside `model.layers.N.`. Weights with the same name are one
    tensor in files."""
    is_interleaved: bool = False
    """True if the columns of weights that are one tensor alternate in files. Otherwise the rows of
    one weight follow those of the other."""
    experts_are_transposed: bool = False
    """True if a matrix of all experts, which is one tensor, is [experts, outputs, inputs]."""
    experts_may_be_turned: bool = False
    """True if files also have such a tensor with these two axes the other way round."""
    quantizations: Sequence[str] = ()
    """Values of `quant_method` in files that are read, and dequantized."""
    norm: NormConfig = NormConfig()
    """The norms; their epsilon comes from the configuration."""
    scales_embedding: bool = False
    """True if embeddings are multiplied by sqrt(hidden_size)."""
    classifier: str | None = None
    """The class with a head, if its name is not `architecture` with another suffix."""

    @property
    def head_architecture(self) -> str:
        """The class with a head, in transformers. OLMoE and Granite have no such class."""
        return self.classifier or self.architecture.replace("ForCausalLM", HEAD_SUFFIX)


def _read_families() -> tuple[dict[str, Family], dict[str, str]]:
    """Read the families in families.yaml, and the names of weights in most of them."""
    rows = plain_values.read_tables([Path(__file__).with_name("families.yaml")], base="like")
    most = rows.pop("all")
    families: dict[str, Family] = {}
    for name, row in rows.items():
        norm = NormConfig(**row.pop("norm", {}))
        families[name] = Family(**row, norm=norm)
    return families, most["names"]


FAMILIES, LAYER_NAMES = _read_families()
"""`model_type` -> family, and weight -> Hugging Face's name inside `model.layers.N.` in most."""

MULTIMODAL = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""`model_type` of a model with images -> that of the language model inside, which is read."""

VISION = {name: tower.text for name, tower in towers.TOWERS.items() if tower.text is not None}
"""`model_type` of a model that always reads images -> defaults of the language model inside, for
fields that its text_config leaves out."""

OPTIONAL_VISION = ("gemma3", "gemma4")
"""Those of `MULTIMODAL` whose images can be read. Without images nothing of it is loaded."""


# Configurations.


def read_config(
    source: Mapping[str, Any],
    dtype: str,
    param_dtype: str,
    *,
    images: bool = False,
) -> DecoderConfig:
    """Return the config of a Hugging Face configuration, in its older or newer form.

    Args:
        source: the content of config.json.
        dtype: the compute dtype.
        param_dtype: the dtype that weights are stored in.
        images: read images with a model that is one of `MULTIMODAL`.

    Raises:
        InputError: a field is missing, or something is not supported; it names the field.
    """
    outer = source
    model_type = outer.get("model_type")
    reads_images = model_type in VISION or (images and model_type in OPTIONAL_VISION)
    if images and not reads_images:
        raise InputError(
            f"a model of the type {model_type!r} reads no images here",
            why="types that do are " + ", ".join([*VISION, *OPTIONAL_VISION]),
            fix="leave --model.images out, or use another model",
        )
    source = _text_config(source)
    family = FAMILIES[source["model_type"]]
    hf = _with_defaults(family, source)
    layer_types = _layer_types(family, hf)
    attention = _attention(hf, layer_types)
    rotary_dim = attention.full.head_dim if attention.full else attention.rotary_dim
    rope, sliding_rope = rope_config.read_rope(hf, rotary_dim)
    vision = None
    if reads_images and model_type is not None:
        vision = towers.read(model_type, outer, hf["hidden_size"])
    has_mixture = "router" in family.names and hf.get("enable_moe_block", True)
    moe = moe_families.read_moe(hf) if has_mixture else None
    return DecoderConfig(
        hidden_size=hf["hidden_size"],
        layer_types=layer_types,
        vocab=VocabConfig(
            size=hf["vocab_size"],
            valid=hf["vocab_size"],
            tied=hf["tie_word_embeddings"],
            embedding_scale=(
                hf["hidden_size"] ** 0.5 if family.scales_embedding else hf["embedding_multiplier"]
            ),
            logit_scale=1 / hf["logits_scaling"],
            softcap=hf["final_logit_softcapping"],
        ),
        attention=attention,
        mlp=_mlp(hf),
        norm=dataclasses.replace(family.norm, eps=hf["rms_norm_eps"]),
        delta=_read_delta(hf) if RECURRENT in layer_types else None,
        rope=rope,
        sliding_rope=sliding_rope,
        residual_scale=hf["residual_multiplier"],
        layer_scalars=hf.get("layer_scalars", False),
        **_read_small_gemma4(hf, layer_types),
        moe=moe,
        dense_layers=moe_families.read_dense_layers(hf) if moe else 0,
        dtype=dtype,
        param_dtype=param_dtype,
        num_outputs=_num_outputs(source),
        multimodal=model_type in MULTIMODAL or model_type in VISION,
        vision=vision,
        source=json.dumps(source, sort_keys=True),
    )


def _with_defaults(family: Family, source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration with the defaults of its family.

    Raises:
        InputError: a field is missing, out of range or not supported.
    """
    hf = {**family.defaults, **{key: value for key, value in source.items() if value is not None}}
    hf |= {field: None for field in NULLABLE if field in source and source[field] is None}
    missing = [field for field in REQUIRED if field not in hf]
    if missing:
        raise InputError(
            "the model's configuration lacks " + ", ".join(missing),
            why=f"a {source['model_type']} model has no default for it",
            fix="add it, or download config.json again",
        )
    for field, largest in MAX_SIZES.items():
        # A size that is null follows from the others.
        if hf[field] is not None or field in REQUIRED:
            require_size(field, hf[field], largest)
    _require_supported(family, hf)
    epsilon = hf["rms_norm_eps"]
    why = "it is added to a variance, so that none is zero: a small number"
    require("rms_norm_eps", epsilon, 0 <= float(epsilon) < 1, why)
    return hf


def _text_config(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the language model: `source`, or the one inside it.

    Raises:
        InputError: the architecture is not one of `FAMILIES`.
    """
    from tpu_rl.models.vision import square_files

    model_type = source.get("model_type")
    if model_type in MULTIMODAL and "text_config" in source:
        inner = {"model_type": MULTIMODAL[model_type], **source["text_config"]}
        if "tie_word_embeddings" in source:
            inner.setdefault("tie_word_embeddings", source["tie_word_embeddings"])
        return _text_config(inner)
    if model_type in VISION and towers.TOWERS[model_type].kind == "qwen":
        return _qwen_text_config(source)
    if model_type in VISION and isinstance(source.get("text_config"), Mapping):
        inner = source["text_config"]
        default = VISION[model_type]["model_type"]
        if inner.get("model_type", default) == default:
            inner = {**VISION[model_type], **inner}
        tied = source.get("tie_word_embeddings", model_type == "internvl")
        if model_type in (*square_files.IDEFICS, "internvl"):
            # As transformers does: the outer field decides.
            return _text_config({**inner, "tie_word_embeddings": tied})
        return _text_config({"tie_word_embeddings": tied, **inner})
    if model_type not in FAMILIES:
        raise InputError(
            f"model_type {model_type!r} is not supported",
            why=f"architectures: {source.get('architectures')}",
            fix="supported: "
            + ", ".join([*FAMILIES, *MULTIMODAL, *VISION])
            + "; to add one, see CONTRIBUTING.md",
        )
    return dict(source)


def _qwen_text_config(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the language model in one of Qwen's, which has it inside or, in
    older files, beside its own fields."""
    from tpu_rl.models.vision import qwen_files

    defaults = VISION[source["model_type"]]
    inner = source.get("text_config")
    if not isinstance(inner, Mapping):
        outer = qwen_files.OUTER_FIELDS
        inner = {name: value for name, value in source.items() if name not in outer}
    # As transformers: the outer field decides, and files of Qwen2.5-VL may have it inside.
    is_tied = bool(source.get("tie_word_embeddings"))
    if source["model_type"] not in ("qwen3_vl", "qwen3_vl_moe"):
        is_tied = is_tied or bool(inner.get("tie_word_embeddings"))
    model_type = defaults["model_type"]
    return {**defaults, **inner, "model_type": model_type, "tie_word_embeddings": is_tied}


def _require_supported(family: Family, hf: Mapping[str, Any]) -> None:
    """Refuse variants of a family that would load, but then compute something else."""
    why = "the model would load, but its outputs would be wrong"
    quantization = hf.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    require_supported(
        {"quantization_config": (quantization, not quantization or method in family.quantizations)},
        why=why,
        fix="give the model that was quantized, in 16 or 32 bits; below adapters, "
        "--model.lora.base-dtype nf4 or int8 quantizes it here",
    )
    supported = {
        "partial_rotary_factor": 1.0,
        "use_bidirectional_attention": False,
        "is_causal": True,
        "attn_output_gate": family.defaults.get("gated_attention", False),
    }
    is_gemma4 = hf["model_type"] in rope_config.GEMMA4
    for field, value in supported.items():
        # In Gemma 4 only tokens of images see later ones.
        is_of_images = is_gemma4 and hf.get(field) == "vision"
        if field not in family.defaults and hf.get(field) is not None and not is_of_images:
            require_values(hf, {field: value}, why=why)


def _layer_types(family: Family, hf: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the type of each layer."""
    stated = hf.get("layer_types", []) if family.reads_layer_types else []
    layer_types = tuple(name.removesuffix("_attention") for name in stated)
    if not layer_types:
        layer_types = tuple(_usual_layer_types(family.layer_types, hf))
    num_layers = hf["num_hidden_layers"]
    if hf["model_type"] in rope_config.GEMMA4:
        layer_types = (*layer_types[:-1], "full")  # as transformers does
    other = RECURRENT if "linear_num_value_heads" in family.defaults else "sliding"
    require(
        "layer_types",
        stated,
        len(layer_types) == num_layers and {*layer_types} <= {"full", other},
        why=f"each of the {num_layers} layers must have full_attention or {other}_attention",
        fix="use a model whose layers are all of these two types",
    )
    if "sliding" in layer_types:
        require(
            "sliding_window",
            hf["sliding_window"],
            bool(hf["sliding_window"]),
            why="the model has sliding_attention layers, and the width of the window is unknown",
            fix="add sliding_window, in tokens",
        )
        require(
            "use_sliding_window",
            True,
            hf["model_type"] not in rope_config.SECTIONS,
            why="tokens of an image have other positions than texts, and a window counts them",
            fix="use a model with use_sliding_window = false, as the published ones are",
        )
    if "no_rope_layer_interval" not in family.defaults:
        return layer_types
    rotated = hf["no_rope_layers"] or [
        (i + 1) % hf["no_rope_layer_interval"] for i in range(num_layers)
    ]
    why = f"it says for each of {num_layers} layers whether it has a rotary embedding"
    require("no_rope_layers", rotated, len(rotated) >= num_layers, why)
    pairs = list(zip(layer_types, rotated[:num_layers], strict=True))
    require(
        "no_rope_layers",
        rotated,
        ("sliding", 0) not in pairs,
        why="a layer with sliding_attention needs a rotary embedding",
        fix="use a model with use_sliding_window = false",
    )
    return tuple(name if is_rotated else UNROTATED[name] for name, is_rotated in pairs)


def _usual_layer_types(rule: LayerTypes, hf: Mapping[str, Any]) -> list[str]:
    """Return the type of each layer, "full", "sliding" or "linear", by the rule of a family."""
    numbers = range(hf["num_hidden_layers"])
    if rule in ("every_nth_full", "others_linear"):
        is_linear = rule == "others_linear"
        period = hf["full_attention_interval" if is_linear else "sliding_window_pattern"]
        other = "linear" if is_linear else "sliding"
        return [other if (i + 1) % period else "full" for i in numbers]
    is_used = hf["sliding_window"] and (rule == "all_sliding" or hf.get("use_sliding_window"))
    if rule == "full" or not is_used:
        return ["full" for _ in numbers]
    first_sliding = hf["max_window_layers"] if rule == "upper_sliding" else 0
    return ["sliding" if i >= first_sliding else "full" for i in numbers]


def _attention(hf: Mapping[str, Any], layer_types: tuple[str, ...]) -> AttentionConfig:
    if "kv_lora_rank" in hf:
        return moe_families.read_latent_attention(hf)
    num_heads = hf["num_attention_heads"]
    num_kv_heads = hf["num_key_value_heads"] or num_heads
    head_dim = hf["head_dim"] or hf["hidden_size"] // num_heads
    require_heads(num_heads, head_dim, num_kv_heads)
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=hf["attention_multiplier"] or (hf["query_pre_attn_scalar"] or head_dim) ** -0.5,
        sliding_window=hf["sliding_window"] if "sliding" in layer_types else None,
        bias=hf["query_key_value_bias"] or hf["attention_bias"],
        output_bias=hf["attention_bias"] and hf["biased_output"],
        query_key_norm=hf["query_key_norm"],
        joint_query_key_norm=hf["joint_query_key_norm"],
        clip_qkv=hf["clip_qkv"],
        softcap=hf["attn_logit_softcapping"],
        value_norm=hf.get("value_norm", False),
        full=_read_full_heads(hf, layer_types),
        sinks=hf["attention_sinks"],
        gated=hf.get("gated_attention", False),
    )


def _read_full_heads(hf: Mapping[str, Any], layer_types: tuple[str, ...]) -> FullHeads | None:
    """Return the heads of Gemma 4's full layers, or None for other families.

    Published files have sizes of their own for these layers. transformers writes
    `per_layer_config` in their place, which has what differs in each layer.

    Raises:
        InputError: a size is out of range, or layers of one type differ.
    """
    if "global_head_dim" not in hf:
        return None
    sizes = {"head_dim": hf["global_head_dim"]}
    if hf["attention_k_eq_v"] and hf["num_global_key_value_heads"]:
        sizes["num_key_value_heads"] = hf["num_global_key_value_heads"]
    of_layers = hf.get("per_layer_config")
    if of_layers is not None:
        sizes = of_layers.get(str(len(layer_types) - 1), {})
        expected = {str(i): sizes for i, kind in enumerate(layer_types) if kind == "full"}
        require(
            "per_layer_config",
            of_layers,
            of_layers == expected and sizes.keys() <= {"head_dim", "num_key_value_heads"},
            why="all full_attention layers must have the same head_dim and "
            "num_key_value_heads, and no other layer may have its own",
            fix="use a model whose layers of one type are alike",
        )
    head_dim = sizes.get("head_dim", hf["head_dim"])
    num_kv_heads = sizes.get("num_key_value_heads", hf["num_key_value_heads"])
    require_size("global_head_dim", head_dim, MAX_SIZES["head_dim"])
    require_size("num_global_key_value_heads", num_kv_heads, hf["num_attention_heads"])
    require_heads(hf["num_attention_heads"], head_dim, num_kv_heads, "global_")
    return FullHeads(num_kv_heads, head_dim, key_is_value=hf["attention_k_eq_v"])


def _read_small_gemma4(hf: Mapping[str, Any], layer_types: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields of `DecoderConfig` that E2B and E4B have, nothing for other families.

    Raises:
        InputError: a size is out of range.
    """
    if "num_kv_shared_layers" not in hf:
        return {}
    fields: dict[str, Any] = {}
    reusing = hf["num_kv_shared_layers"]
    if reusing:
        require_size("num_kv_shared_layers", reusing, len(layer_types) - 1)
        missing = ", ".join({*layer_types[-reusing:]} - {*layer_types[:-reusing]})
        why = f"no layer before the last {reusing} is of type {missing}, whose keys they would use"
        require("num_kv_shared_layers", reusing, not missing, why)
        fields["reusing_layers"] = reusing
        if hf["use_double_wide_mlp"]:
            fields["reusing_mlp_size"] = 2 * hf["intermediate_size"]
    size = hf["hidden_size_per_layer_input"]
    if size:
        require_size("hidden_size_per_layer_input", size, MAX_SIZES["hidden_size"])
        supported = {"vocab_size_per_layer_input": hf["vocab_size"]}
        require_values(hf, supported, why="both embeddings must have vocab_size rows")
        fields["layer_input_size"] = size
    return fields


def _read_delta(hf: Mapping[str, Any]) -> DeltaConfig:
    """Return the linear attention of a configuration.

    Raises:
        InputError: a size is out of range, or biases or another activation are wanted.
    """
    sizes = {
        "key_heads": "linear_num_key_heads",
        "value_heads": "linear_num_value_heads",
        "key_dim": "linear_key_head_dim",
        "value_dim": "linear_value_head_dim",
        "taps": "linear_conv_kernel_dim",
    }
    for field in sizes.values():
        require_size(field, hf[field], MAX_SIZES["head_dim"])
    delta = DeltaConfig(**{size: hf[field] for size, field in sizes.items()})
    require_together(
        {name: hf[name] for name in ("linear_num_value_heads", "linear_num_key_heads")},
        delta.value_heads % delta.key_heads == 0,
        why="each head of keys must serve equally many heads of values",
    )
    require_values(
        hf,
        {"attention_bias": False, "hidden_act": "silu"},
        why="its outputs would be wrong",
        subject="linear attention with ",
    )
    return delta


def _mlp(hf: Mapping[str, Any]) -> MlpConfig:
    clamped = None
    if "swiglu_alpha" in hf:
        clamped = ClampedSwish(float(hf["swiglu_alpha"]), float(hf["swiglu_limit"]))
    return MlpConfig(
        intermediate_size=hf["intermediate_size"],
        activation=_activation(hf),
        clamped=clamped,
        bias=hf["mlp_bias"],
    )


def _activation(hf: Mapping[str, Any]) -> str:
    name = hf.get("hidden_activation") or hf["hidden_act"]
    fix = "use a model with one of: " + ", ".join(ACTIVATION_NAMES)
    is_known = name in ACTIVATION_NAMES
    require("activation", name, is_known, "the MLP would compute something else", fix)
    return ACTIVATION_NAMES[name]


def _num_outputs(source: Mapping[str, Any]) -> int | None:
    """Return the number of outputs of the head, or None for a language model."""
    architectures = source.get("architectures") or [""]
    if not architectures[0].endswith(HEAD_SUFFIX):
        return None
    if "num_labels" in source:
        return source["num_labels"]
    return len(source.get("id2label", (0, 1)))


# Names of weights.


def family_of(config: DecoderConfig) -> Family:
    """Return the family of a model that was read from a configuration."""
    return FAMILIES[json.loads(config.source)["model_type"]]


def weight_name(family: Family, name: str, layer: int | None, expert: int = 0) -> str:
    """Return Hugging Face's name of the weight `name`, in a layer or (None) outside of layers."""
    if layer is None:
        return TOP_NAMES[name]
    return f"model.layers.{layer}.{family.names[name].format(expert=expert)}"


def unused_names(config: DecoderConfig, names: Iterable[str]) -> list[str]:
    """Return those names of tensors that nothing uses.

    These are tensors of layers after the last one, where DeepSeek-V3 has its modules for several
    tokens at once, and keys and values of layers that reuse those of others (Gemma 4).
    """
    source = json.loads(config.source)
    last = len(config.layer_types)
    has_modules = any(source.get(field) for field in MTP_FIELDS)
    unused = []
    for name in names:
        layer, _, inner = name.removeprefix("model.layers.").partition(".")
        if not layer.isdigit():
            continue
        is_beyond = has_modules and int(layer) >= last
        is_replaced = config.first_reusing <= int(layer) < last and inner.startswith(KEY_MODULES)
        if is_beyond or is_replaced:
            unused.append(name)
    return unused


def has_stacked_experts(family: Family) -> bool:
    """Return True if the matrices of all experts of a layer are one tensor in files."""
    return "{expert}" not in family.names.get("expert_down", "{expert}")


def plain_name(name: str) -> str | None:
    """Return the name that a text model has for a tensor of a checkpoint.

    None means that the tensor is not part of the language model: rotary frequencies, which old
    Llama checkpoints contain, the image half of Gemma 3 and Qwen3.5, and the modules of Qwen3.5 for
    several tokens at once.
    """
    # The prefixes of older and of newer checkpoints of Gemma 3; the second is also Qwen3.5's.
    # The third is that of Idefics3.
    for prefix in ("language_model.", "model.language_model.", "model.text_model."):
        if name.startswith(prefix):
            inner = name.removeprefix(prefix)
            return inner if inner.startswith(("model.", "lm_head.")) else f"model.{inner}"
    if name.removeprefix("model.").startswith(IMAGE_MODULES) or name.startswith("mtp."):
        return None
    if name.endswith("rotary_emb.inv_freq"):
        return None
    return name
